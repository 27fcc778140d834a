"""What does a trial cost each part of a fleet? For the estimate of large fleets in docs/fleet.md.

    python benchmarks/fleet_costs.py --out benchmarks/results/fleet_costs.json

Processor seconds, unless a row says otherwise, so that other work of the machine matters little:

- the process that coordinates a run: real tuner, loop and store, simulated devices (as `many_devices.py`);
- the scheduler of Dask, for a task (a build) and for a call (a measurement), of functions that do nothing;
- a PostgreSQL server that the benchmark starts, for a record: wall time with one writer, and records a second of eight;
- bytes of a message with one candidate of each template for the 13 layers, as built for an H200, and processor seconds
  for building it, the first of a kind included.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import many_devices
from convolutions import SHAPES, square

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fleet_support import cluster
from postgres_support import Unavailable, running_server
from records_support import record

from schedsearch.backend import compile_source
from schedsearch.fleet import Connection
from schedsearch.fleet.client import Fleet
from schedsearch.records.store import Store
from schedsearch.session.plan import plan_tasks
from schedsearch.target import PRESETS
from schedsearch.template import load_templates

TARGET = PRESETS["h200"]


def nothing(data: bytes) -> bytes:
    return data


async def nothing_at_once(data: bytes) -> bytes:
    return data


def coordinator(time_s: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = many_devices.searched(4, time_s, Path(folder) / "records.db")
    return [row("coordinator: a trial of 4 simulated devices", found["cpu_ms_a_trial"], "ms", trials=found["trials"])]


def scheduler(calls: int, data: bytes) -> list[dict[str, Any]]:
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder), ("--builds", "1", "--only-build")) as made,
        Fleet(Connection(made.address)) as fleet,
    ):
        while not fleet.roster.members:
            fleet.wait_for_members()
            time.sleep(0.1)
        (address,) = fleet.roster.members

        def task() -> None:
            fleet.result(fleet.submit(address, {"CPU": 1}, nothing, data), address, 30.0)

        def call() -> None:
            fleet.call(address, 30.0, nothing_at_once, data)

        for what, function in (("a task", task), ("a call", call)):
            function()
            before_s = processor_s(made.scheduler.pid)
            for _ in range(calls):
                function()
            spent_ms = 1e3 * (processor_s(made.scheduler.pid) - before_s) / calls
            rows.append(row(f"scheduler: {what} with {len(data) // 1000} KB there and back", spent_ms, "ms"))
    return rows


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def postgres(records: int) -> list[dict[str, Any]]:
    try:
        with running_server() as server:
            url = server.url(server.new_database())
            with Store.open(url) as store:
                took_ms = [append_ms(store, number) for number in range(records)]

            def writer(number: int) -> None:
                with Store.open(url) as store:
                    for each in range(records // 4):
                        append_ms(store, (number + 1) * 100_000 + each)

            began_s = time.perf_counter()
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(writer, range(8)))
            a_second = 8 * (records // 4) / (time.perf_counter() - began_s)
    except Unavailable as error:
        print(f"no PostgreSQL: {error}")
        return []
    ordered = sorted(took_ms)
    return [
        row("PostgreSQL: a record, wall", statistics.median(took_ms), "ms", p95=ordered[int(0.95 * len(ordered))]),
        row("PostgreSQL: 8 writers", a_second, "records/s"),
    ]


def append_ms(store: Store, number: int) -> float:
    made = record(number=number)
    began_s = time.perf_counter()
    store.append(made)
    return 1e3 * (time.perf_counter() - began_s)


def candidates(layers: int) -> list[dict[str, Any]]:
    """The defaults of some of the 13 layers: what travels, and what their builds cost one core."""
    sizes, spent_s = [], []
    for plan in plan_tasks([square(*shape) for shape in SHAPES[:layers]], load_templates(), TARGET):
        for arm in plan.arms:
            before_s = time.process_time()
            built = compile_source(arm.template.kernel(plan.task.workload, TARGET, arm.default), TARGET)
            spent_s.append(time.process_time() - before_s)
            sizes.append(len(pickle.dumps(built)))
    return [
        row("a built candidate", statistics.mean(sizes) / 1e3, "KB", largest=max(sizes) / 1e3, candidates=len(sizes)),
        row("building it, of new kinds and known ones", statistics.mean(spent_s), "s", median=statistics.median(spent_s)),
    ]


def row(what: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=13, help="whose defaults are built")
    parser.add_argument("--time", type=float, default=15.0, help="seconds of the simulated run")
    parser.add_argument("--calls", type=int, default=200, help="of the scheduler, and records")
    parser.add_argument("--parts", default="scheduler,postgres,coordinator,candidates", help="which costs to measure")
    parser.add_argument("--out", help="write the data here; rows of other parts stay")
    options = parser.parse_args()
    parts = {
        "scheduler": lambda: scheduler(options.calls, bytes(50_000)),
        "postgres": lambda: postgres(options.calls),
        "coordinator": lambda: coordinator(options.time),
        "candidates": lambda: candidates(options.layers),
    }
    rows: list[dict[str, Any]] = []
    if options.out and Path(options.out).exists():
        rows = json.loads(Path(options.out).read_text())["rows"]
    for part in options.parts.split(","):
        found = parts[part]()
        rows = [each for each in rows if each["what"] not in {new["what"] for new in found}] + found
        common.write(options.out, {"rows": rows})
    lines = [(each["what"], f"{each['value']:.2f}", each["unit"]) for each in rows]
    print(common.table(("what", "cost", "unit"), lines))


if __name__ == "__main__":
    main()
