"""What does a fleet add to a trial? Real Dask processes on this machine: a scheduler and four workers, which build.

    python benchmarks/fleet_overhead.py --out benchmarks/results/fleet_overhead.json
    python benchmarks/fleet_overhead.py --kill 10 --trials 1000 --out benchmarks/results/fleet_kills.json

The first command measures one kernel again and again on the CPU of a worker, alone and in batches as a run does, and
builds one candidate again and again, whose pieces are in the build cache. What the fleet adds is the time of a call here
less the time that the worker had it; `here` is the same call on a runner of this process. The second one tunes while a
worker is killed every so many seconds, and counts what is in the store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fleet_support import Cluster, cluster

from schedsearch.fleet import Connection, host
from schedsearch.fleet.builder import FleetBuilder
from schedsearch.fleet.client import Fleet
from schedsearch.fleet.runner import BATCH, FleetRunner
from schedsearch.measure import Runner
from schedsearch.measurement import COLD_GRAPH
from schedsearch.processes.builder import Built
from schedsearch.processes.requests import Candidate
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.session.plan import plan_tasks
from schedsearch.template import load_templates
from schedsearch.workload import Workload

WORKLOADS = [Workload.conv2d(n=1, h=7, w=7, c=16, k=k, r=1, s=1, dtype="float32") for k in (16, 32, 48, 64)]
WORKERS = [("--builds", "1")] + [("--builds", "1", "--only-build")] * 3


class Timed(Fleet):
    """Notes for every call how long it took here, and how long the worker says that it had it."""

    def __init__(self, connection: Connection) -> None:
        self.added_s: list[float] = []
        super().__init__(connection)

    def call(self, address: str, limit_s: float, function: Any, *args: Any) -> Any:
        began_s = time.perf_counter()
        answer = super().call(address, limit_s, function, *args)
        if isinstance(answer, host.Answer):
            self.added_s.append(time.perf_counter() - began_s - answer.took_s)
        return answer


def wait_for_all(fleet: Fleet) -> None:
    while len(fleet.roster.members) < len(WORKERS):
        fleet.wait_for_members()
        time.sleep(0.1)


def overhead(address: str, repeats: int) -> list[dict[str, Any]]:
    rows = []
    with Timed(Connection(address)) as fleet:
        wait_for_all(fleet)
        (device,) = fleet.roster.chosen("cpu")
        toolchain, _ = fleet.roster.builders("cpu")
        (plan,) = plan_tasks(WORKLOADS[:1], load_templates(), device)
        candidate = Candidate(WORKLOADS[0], plan.arms[0].template, plan.arms[0].default)
        builder = FleetBuilder(fleet, device, toolchain, 60.0, COLD_GRAPH)
        for _ in range(4 * len(WORKERS)):  # every worker starts its compiler
            builder.submit(candidate)
        built = builder.drain()[0][1]
        assert isinstance(built, Built), built
        rows.append(build_row(builder, candidate, repeats))
        with FleetRunner(fleet, device, COLD_GRAPH, 10.0, 30.0) as runner:
            runner.prepare(WORKLOADS[0])
            runner.measure(WORKLOADS[0], built)
            for batch in (1, BATCH):
                fleet.added_s.clear()
                for _ in range(repeats // batch):
                    results = runner.measure_many([(WORKLOADS[0], built, None)] * batch)
                    assert all(getattr(each, "ok", False) for each in results), results
                added_ms = [1e3 * each / batch for each in fleet.added_s]
                rows.append(row(f"measure, {batch} in a call", added_ms))
    with Runner(device) as local:
        local.prepare(WORKLOADS[0])
        rows.append(row("a trial here, for comparison", [took_ms(local, built) for _ in range(repeats)]))
    return rows


def build_row(builder: FleetBuilder, candidate: Candidate, repeats: int) -> dict[str, Any]:
    """One candidate after another, so that the way there and back is not hidden."""
    added_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        builder.submit(candidate)
        ((_, built),) = builder.drain()
        added_ms.append(1e3 * (time.perf_counter() - began_s - built.build_s))
    return row("build, one after another", added_ms)


def took_ms(runner: Runner, built: Built) -> float:
    began_s = time.perf_counter()
    assert runner.measure(WORKLOADS[0], built).ok
    return 1e3 * (time.perf_counter() - began_s)


def row(what: str, times_ms: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(times_ms, n=20)
    return {"what": what, "calls": len(times_ms), "median_ms": statistics.median(times_ms), "p95_ms": quartiles[-1]}


def killed(made: Cluster, every_s: float, trials: int) -> dict[str, Any]:
    """A run whose workers are killed in turns."""
    with Fleet(Connection(made.address)) as fleet:
        wait_for_all(fleet)
    done, kills = threading.Event(), 0

    def kill() -> None:
        nonlocal kills
        while not done.wait(every_s):
            kills += made.kill_a_worker(kills % len(WORKERS))

    killer = threading.Thread(target=kill)
    killer.start()
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "records.db"
        try:
            share = trials // len(WORKLOADS)
            summary = tune(WORKLOADS, db, scheduler=made.address, target="cpu", trials=share, tuner="random")
        finally:
            done.set()
            killer.join()
        with Store.open(db, readonly=True) as store:
            records = [found for found in (row.record() for row in store.rows()) if not found.final_race]
    counts = Counter((record.workload.id, record.config) for record in records)
    return {
        "trials": summary.new_trials,
        "records": sum(record.measurement.outcome.is_trial for record in records),
        "twice": sum(count > 1 for count in counts.values()),
        "outcomes": dict(Counter(str(record.measurement.outcome) for record in records)),
        "kills": kills,
        "every_s": every_s,
        "wall_s": summary.wall_s,
        "stopped": summary.stopped,
        "problems": [device.problem for device in summary.devices],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="calls of each kind")
    parser.add_argument("--kill", type=float, metavar="SECONDS", help="kill a worker so often, while a run goes on")
    parser.add_argument("--trials", type=int, default=1000, help="of that run")
    parser.add_argument("--out", help="write the data here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), *WORKERS) as made:
        if options.kill:
            found = killed(made, options.kill, options.trials)
            common.write(options.out, found)
            print(found)
            return
        rows = overhead(made.address, options.repeats)
    common.write(options.out, {"rows": rows})
    print(common.table(("what", "calls", "median ms", "95 % below ms"), [
        (each["what"], str(each["calls"]), f"{each['median_ms']:.1f}", f"{each['p95_ms']:.1f}") for each in rows
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
