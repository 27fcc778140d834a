"""The time that deployment takes to find a kernel in a large database.

    python benchmarks/lookup_latency.py [--records 100000] [--seed 0] [--out FILE.json]

Builds a database of the real schema (bulk inserts of real rows: by default 100,000 records of 2,000 workloads, each workload
with a best and its code), then measures

- open plus first lookup, in fresh processes (without the import of the module),
- an uncached lookup: every workload once, in random order, including the launch plan,
- a cached lookup: the same workload again,
- a look for new records (`Lookup.version`), which `KernelCache` does in every call.

Prints a table and writes the data.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from schedsearch.config import Config
from schedsearch.launch import Artifact, Grid, Int32, LaunchPlan, Pointer, Step, TensorMap
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record, Resources
from schedsearch.records import rows, schema
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.workload import Workload

TARGET = "cuda:sm_90:132:NVIDIA H200"
RECORDS_PER_WORKLOAD = 50
CODE_BYTES = 16 << 10
LIMITS_US = {"open and first lookup": 10_000.0, "uncached lookup": 20.0, "cached lookup": 1.3}

FIRST_LOOKUP = """
import sys, time
started = time.perf_counter()
from schedsearch.records.lookup import Lookup
imported = time.perf_counter()
lookup = Lookup(sys.argv[1])
row = lookup.exact(*sys.argv[2:])
done = time.perf_counter()
assert row is not None and row.plan_json
print((imported - started) * 1e6, (done - imported) * 1e6)
"""


def workloads(count: int) -> list[Workload]:
    return [
        Workload.conv2d(
            n=1 + i % 32, h=7 + i // 32, w=7 + i // 32, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "relu")
        )
        for i in range(count)
    ]


def records(workload: Workload, rng: random.Random, count: int) -> Iterator[Record]:
    """One measurement in ten is a failure; the others have twenty repeats each."""
    for i in range(count):
        failed = i % 10 == 9
        middle = rng.uniform(1e4, 1e6)
        yield Record(
            workload=workload,
            target=TARGET,
            template="conv2d_wgmma",
            template_version=1,
            config=Config(
                bm=128, bn=rng.choice((64, 128, 256)), bk=64, stages=4, consumers=2, raster="n", group=8, persistent=True
            ),
            measurement=Measurement(
                Outcome.COMPILE_ERROR if failed else Outcome.OK,
                times_ns=() if failed else tuple(middle * rng.uniform(0.99, 1.01) for _ in range(20)),
                resources=Resources(168, 200_000, 0, 0, CODE_BYTES),
                max_error=None if failed else 0.0,
                message="ptxas error : something that takes a line to say" if failed else "",
                build_s=rng.uniform(0.5, 2),
                run_s=0.1,
                clocks={"sm_mhz": 1980, "memory_mhz": 3201, "throttle": "none"},
            ),
            toolchain={"numba-cuda": "0.30.4", "nvjitlink": "13.0.88", "driver": "580.65"},
            run="20250101T000000-00000000",
            batch=i // 8,
            prediction=rng.uniform(-1, 1),
            started_at=1.7e9 + i,
            finished_at=1.7e9 + i + 1,
        )


def artifact(rng: random.Random) -> Artifact:
    image = TensorMap(
        "x", "float16", (64, 56, 56, 32), (128, 7168, 401408), (1,) * 4,
        lower=(-1, -1), upper=(-1, -1), channels_per_pixel=64, pixels_per_column=128, swizzle_bytes=128,
    )  # fmt: skip
    weight = TensorMap("weight", "float16", (576, 64), (1152,), (1, 1), box=(64, 64), swizzle_bytes=128)
    params = (image, weight, Pointer("bias"), Pointer("y"), *[Int32(i) for i in range(12)])
    step = Step("conv2d_wgmma", params, Grid(784, blocks_per_sm=1), 384, dynamic_shared_bytes=200_000, cluster=2)
    return Artifact(rng.randbytes(CODE_BYTES), LaunchPlan("cuda", "sm_90a", (step,), alignments={"x": 16, "weight": 16}))


def build(path: Path, count: int, seed: int) -> list[Workload]:
    """Fills a new database and returns its workloads."""
    rng = random.Random(seed)
    tasks = workloads(max(count // RECORDS_PER_WORKLOAD, 1))
    with Store.open(path) as store:

        def insert(table: sa.Table) -> Any:
            return store.database.insert(table).on_conflict_do_nothing()

        for workload in tasks:
            values = [rows.to_row(record) for record in records(workload, rng, min(RECORDS_PER_WORKLOAD, count))]
            with store.database.write() as connection:
                connection.execute(insert(schema.workload), {"id": workload.id, "op": workload.op, "json": workload.json})
                toolchains = {row["toolchain_id"]: row.pop("toolchain_json") for row in values}
                connection.execute(insert(schema.toolchain), [{"id": id_, "json": text} for id_, text in toolchains.items()])
                connection.execute(
                    insert(schema.record), [{k: v for k, v in row.items() if k != "workload_json"} for row in values]
                )
                fastest = connection.execute(
                    sa.select(schema.record.c.id)
                    .where(schema.record.c.workload_id == workload.id)
                    .order_by(schema.record.c.time_ns.nulls_last())
                    .limit(1)
                ).scalar_one()
            store.promote(fastest, artifact(rng))
        assert store.stats()["records"] == len(tasks) * min(RECORDS_PER_WORKLOAD, count)
    return tasks


def measure(path: Path, tasks: list[Workload], seed: int, processes: int = 20) -> dict[str, list[float]]:
    """Microseconds of each kind of lookup."""
    rng = random.Random(seed)
    imports, firsts = [], []
    for task in rng.choices(tasks, k=processes):
        command = [sys.executable, "-c", FIRST_LOOKUP, str(path), task.id, TARGET, COLD_GRAPH]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        imported, first = map(float, text.split())
        imports.append(imported)
        firsts.append(first)
    uncached, cached, versions = [], [], []
    with Lookup(path) as lookup:
        for task in rng.sample(tasks, len(tasks)):
            key = (task.id, TARGET, COLD_GRAPH)
            started = time.perf_counter_ns()
            row = lookup.exact(*key)
            uncached.append((time.perf_counter_ns() - started) / 1e3)
            assert row is not None and row.plan_json
        key = (tasks[0].id, TARGET, COLD_GRAPH)
        for _ in range(50):
            started = time.perf_counter_ns()
            for _ in range(1000):
                lookup.exact(*key)
            cached.append((time.perf_counter_ns() - started) / 1e6)
            started = time.perf_counter_ns()
            for _ in range(1000):
                lookup.version()
            versions.append((time.perf_counter_ns() - started) / 1e6)
    return {
        "import of the module": imports,
        "open and first lookup": firsts,
        "uncached lookup": uncached,
        "cached lookup": cached,
        "look for new records": versions,
    }


def summary(times_us: list[float]) -> dict[str, float]:
    ordered = sorted(times_us)
    return {
        "median_us": statistics.median(ordered),
        "p99_us": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max_us": ordered[-1],
        "samples": len(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCHEDSEARCH_STATE_DIR"] = folder
        path = Path(folder) / "records.db"
        started = time.perf_counter()
        tasks = build(path, options.records, options.seed)
        build_s = time.perf_counter() - started
        size_mb = path.stat().st_size / 1e6
        print(f"{options.records} records of {len(tasks)} workloads, {size_mb:.0f} MB, built in {build_s:.0f} s")
        times = measure(path, tasks, options.seed)
        started = time.perf_counter()
        with Store.open(path, readonly=True) as store:
            assert len(store.history()) == len(tasks) * min(RECORDS_PER_WORKLOAD, options.records)
        history_s = time.perf_counter() - started
    print(f"{'':24}{'median us':>12}{'p99 us':>12}{'max us':>12}{'limit us':>12}")
    results: dict[str, Any] = {}
    for name, values in times.items():
        found = results[name] = {**summary(values), "limit_us": LIMITS_US.get(name)}
        limit = f"{found['limit_us']:.1f}" if found["limit_us"] else "-"
        print(f"{name:24}{found['median_us']:12.2f}{found['p99_us']:12.2f}{found['max_us']:12.2f}{limit:>12}")
    print(f"every record read as an object: {history_s:.2f} s")
    data = {
        "command": " ".join(["python", "benchmarks/lookup_latency.py", *sys.argv[1:]]),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "sqlalchemy": sa.__version__},
        "records": options.records,
        "workloads": len(tasks),
        "size_mb": round(size_mb, 1),
        "history_s": round(history_s, 2),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
