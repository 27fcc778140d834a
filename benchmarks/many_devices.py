"""What does a trial cost the process that coordinates a run? Real tuner, loop and store; builders and devices are simulated.

    python benchmarks/many_devices.py --devices 1,2,4,8 --time 20
    python benchmarks/many_devices.py --devices 8 --db postgresql://me@host/empty

Every simulated device takes 40 ms for a trial and 0.3 s to prepare a task; builds take no time. The spaces are those of the
13 shapes of conv2d_fp16.py for an H200, on which nothing runs. The table has trials a second, the share of the time that
the devices were busy, and the processor time of this process for a trial: its loop, its tuner and its store together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.measurement import Measurement, Outcome, Resources
from schedsearch.processes.builder import Built, Candidate
from schedsearch.records.store import Store
from schedsearch.session.loop import Session
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.session.tune import queue_depth, think_ahead
from schedsearch.target import PRESETS
from schedsearch.template import load_templates
from schedsearch.workload import Workload

TRIAL_S, PREPARE_S = 0.04, 0.3
BUILDERS = 16  # for each device


class InstantBuilder:
    """Every candidate compiles to code of its own by the next poll."""

    def __init__(self) -> None:
        self._done: list[tuple[int, Built]] = []
        self._tokens = 0

    @property
    def pending(self) -> int:
        return len(self._done)

    def _submit(self, text: str) -> int:
        self._tokens += 1
        artifact = Artifact(text.encode(), LaunchPlan("cuda", "sm_90a", (Step("kernel", (), Grid(1), 32),)))
        self._done.append((self._tokens, Built(artifact, Resources(registers=64), sha256_hex(text), 0.5)))
        return self._tokens

    def submit(self, candidate: Candidate) -> int:
        return self._submit(f"{candidate.workload.id} {candidate.template.name} {candidate.config.json}")

    def submit_reference(self, workload: Workload) -> int:
        return self._submit(f"reference of {workload.id}")

    def withdraw(self, tokens: Collection[int]) -> set[int]:
        return set()

    def poll(self, timeout_s: float) -> list[tuple[int, Built]]:
        done, self._done = self._done, []
        return done


class SleepingRunner:
    """A device whose times follow from the code's digest."""

    reference_s = 0.0

    def __init__(self, uuid: str) -> None:
        self._uuid, self._prepared, self.prepare_s = uuid, set[Workload](), 0.0

    def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
        pass

    def prepare(self, workload: Workload) -> None:
        if workload not in self._prepared:
            self._prepared.add(workload)
            time.sleep(PREPARE_S)
            self.prepare_s += PREPARE_S

    def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
        self.prepare(workload)
        time.sleep(TRIAL_S)
        time_ns = 1e4 + int(built.artifact.sha256[:8], 16) / 2**32 * 1e5
        return Measurement(
            Outcome.OK, times_ns=(time_ns,) * 9, resources=built.resources, run_s=TRIAL_S, max_error=0.0,
            device_uuid=self._uuid,
        )  # fmt: skip

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        return [self.measure(workload, each, None) for each in built]


def searched(devices: int, time_s: float, db: str | Path) -> dict[str, Any]:
    """One run on simulated devices."""
    target = PRESETS["h200"]
    plans = plan_tasks([square(*shape) for shape in SHAPES], load_templates(), target)
    think_ahead(plans, "xgb")  # as `tune` does while its devices open
    runners = [
        (replace(target, ordinal=number, uuid=f"GPU-{number}"), SleepingRunner(f"GPU-{number}")) for number in range(devices)
    ]
    options = Options(time_s=time_s, tuner_thread=True, queue_depth=queue_depth(BUILDERS * devices, devices), resume=False)
    before_s = time.process_time()
    with Store.open(db) as store:
        summary = Session(plans, store, InstantBuilder(), runners, target, options, {"compiler": "none"}, db=str(db)).run()
    cpu_s = time.process_time() - before_s
    shares = summary.shares
    return {
        "devices": devices,
        "trials": summary.new_trials,
        "wall_s": summary.wall_s,
        "a_second": summary.new_trials / summary.wall_s,
        "shares": vars(shares),
        "cpu_ms_a_trial": 1e3 * cpu_s / summary.new_trials,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2,4,8", help="numbers of simulated devices")
    parser.add_argument("--time", type=float, default=20.0, help="seconds of each run")
    parser.add_argument("--db", help="an empty database; default: a file of its own for each run")
    parser.add_argument("--out", help="write the data here")
    options = parser.parse_args()
    rows = []
    for count in map(int, options.devices.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(searched(count, options.time, options.db or Path(folder) / "records.db"))
        common.write(options.out, {"rows": rows})
    header = ("devices", "trials/s", "devices busy", "preparing", "waiting for the tuner", "CPU ms/trial")
    lines = [
        (
            row["devices"], f"{row['a_second']:.1f}",
            *(f"{row['shares'][name]:.0%}" for name in ("device", "preparing", "tuner")), f"{row['cpu_ms_a_trial']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    print(common.table(header, lines))


if __name__ == "__main__":
    main()
