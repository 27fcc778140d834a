"""What verification costs: its share of a tuning run's wall time, and whether it changes measured times.

    python benchmarks/verification_cost.py                          layers of ResNet-50 on the GPU, 60 trials each
    python benchmarks/verification_cost.py --target cpu --layers 2 --trials 8

The first part tunes each layer and adds up the runner's seconds for verification (`Runner.verify_s`): before and after
timing, and in the race. The second part measures the best configurations again, in turns: with the runner, and plainly,
without any verification. It prints the ratio of the two times, which is 1 apart from noise.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

import schedsearch
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.measure import Builder, Built, Candidate, Runner
from schedsearch.measure.timing import PATIENCE, Arena, open_timer, repeat
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.store import Store
from schedsearch.session.tune import tune
from schedsearch.target import Target
from schedsearch.template import load_template


class Meter:
    """Adds up what every Runner of this process reports when it is closed."""

    def __init__(self) -> None:
        self.verify_s = self.busy_s = self.prepare_s = 0.0
        close = Runner.close

        def closed(runner: Runner) -> None:
            self.verify_s += runner.verify_s
            self.busy_s += runner.busy_s
            self.prepare_s += runner.prepare_s
            runner.verify_s = runner.busy_s = runner.prepare_s = 0.0
            close(runner)

        Runner.close = closed  # type: ignore[method-assign]


def share_of_a_run(workloads: list[schedsearch.Workload], target: Target, trials: int, db: str) -> dict[str, float]:
    """Seconds of a tuning run."""
    meter, began = Meter(), time.monotonic()
    tune(workloads, db, target=target, trials=trials)
    wall_s = time.monotonic() - began
    return {"wall_s": wall_s, "device_s": meter.busy_s, "preparing_s": meter.prepare_s, "verify_s": meter.verify_s}


def plain_ns(workload: schedsearch.Workload, built: Built, target: Target) -> float:
    """The time of a kernel that is loaded and timed, without verification."""
    with contextlib.closing(open_device(target)) as device:
        arena = Arena(device, workload, COLD_GRAPH)
        kernel = device.load(built.artifact)
        timed = open_timer(device).prepare(kernel, arena)
        times = repeat(timed.sample, None, PATIENCE[target.kind])
        timed.close()
        kernel.close()
        arena.close()
    return statistics.median(times)


def compare(workload: schedsearch.Workload, target: Target, db: str, rounds: int) -> list[dict[str, Any]]:
    """The best configurations of a layer, measured in turns with verification and without. Medians of the rounds."""
    with Store.open(db) as store:
        bests = [best.record for best in store.bests(workload=workload, target=target.key, mode=COLD_GRAPH)]
    rows = []
    with Builder(target, workers=1) as builder, Runner(target) as runner:
        for record in bests:
            builder.submit(Candidate(workload, load_template(record.template), record.config))
            ((_, built),) = builder.drain()
            assert isinstance(built, Built), built
            verified, plain = [], []
            for _ in range(rounds):
                measured = runner.measure(workload, built)
                assert measured.time_ns is not None, measured.message
                verified.append(measured.time_ns)
                plain.append(plain_ns(workload, built, target))
            rows.append({
                "workload": workload.label,
                "template": record.template,
                "verified_us": statistics.median(verified) / 1e3,
                "plain_us": statistics.median(plain) / 1e3,
                "ratio": statistics.median(verified) / statistics.median(plain),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--layers", type=int, default=len(SHAPES))
    parser.add_argument("--trials", type=int, default=60, help="of each layer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    target = detect(arguments.target)
    workloads = [square(*shape) for shape in SHAPES]
    if target.kind == "cpu":
        workloads = [workload.replace(n=1, dtype="float32", out_dtype="float32") for workload in workloads[6:]]
    workloads = workloads[: arguments.layers]
    with tempfile.TemporaryDirectory() as folder:
        db = str(Path(folder, "records.db"))
        seconds = share_of_a_run(workloads, target, arguments.trials, db)
        share = seconds["verify_s"] / seconds["wall_s"]
        cells = [[name, f"{value:.2f}", f"{value / seconds['wall_s']:.3f}"] for name, value in seconds.items()]
        print(common.table(["seconds of", "s", "of the wall time"], cells), flush=True)
        rows = [row for workload in workloads for row in compare(workload, target, db, arguments.rounds)]
    print(common.table(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows]))
    ratio = common.geometric_mean([row["ratio"] for row in rows])
    print(f"verification takes {100 * share:.1f} % of the wall time; times with it over times without: {ratio:.4f}")
    common.write(arguments.out, {"target": target.key, "seconds": seconds, "share": share, "ratio": ratio, "rows": rows})


if __name__ == "__main__":
    main()
