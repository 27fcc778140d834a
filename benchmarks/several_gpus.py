"""How much faster do several GPUs of one host search? Tunes the 13 shapes of conv2d_fp16.py on one card and on all.

    python benchmarks/several_gpus.py --time 40 --runs 1,2,2,1 --out FILE.json
    python benchmarks/several_gpus.py --time 40 --runs 1,2,2,1 --warm 40 --out FILE.json

Every run starts without records, and gets the cores, and so the builders, in proportion to its cards. Its build cache is
empty, or with --warm a copy of what one run of so many seconds on all cards has left. The table has, for each run,

- verified trials a second of the search, and of the whole run with its final races;
- the shares of wall time, as a mean of its devices;
- seconds until the geometric mean over the layers of (best of all runs / best so far) was 0.98;
- the geometric mean over the layers of (best of all runs / best of this run), by the times of the search;
- trials, and the time of the same kernel, by device.
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

import schedsearch
from schedsearch.device.detect import detect_all
from schedsearch.errors import Interrupted
from schedsearch.records.store import Store
from schedsearch.target import Target

NEAR = 0.98
Found = list[tuple[float, str, float]]  # seconds since the run began, workload id, time_ns


def tuned(
    devices: Sequence[Target], cores: Sequence[int], time_s: float, seed: int, builds: Path, *, keep: bool = False
) -> tuple[dict[str, Any], Found]:
    """One run, and the valid times that it found, in the order of their measurement.

    Args:
        builds: the build cache that it starts with.
        keep: whether the run fills this cache itself.
    """
    workloads = [square(*shape) for shape in SHAPES]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCHEDSEARCH_BUILD_CACHE"] = str(builds if keep else shutil.copytree(builds, f"{folder}/builds"))
        os.sched_setaffinity(0, cores)
        db = Path(folder) / "records.db"
        summary = schedsearch.tune(
            workloads, db, target=devices, trials=5000, time_s=time_s, seed=seed, workers=len(cores), progress=False
        )
        with Store.open(db, readonly=True) as store:
            (run,) = store.runs()
            records = [row for row in store.records_after(0) if not row.final_race]
    begin_s = run["started_at"]
    ok = [row for row in records if row.measurement.ok]
    verified = sum(row.measurement.outcome.is_verified for row in records)
    search_s = max(row.finished_at for row in records) - begin_s
    by_card = {device.uuid: sum(row.measurement.device_uuid == device.uuid for row in ok) for device in summary.devices}
    row = {
        "devices": len(devices),
        "cores": len(cores),
        "seed": seed,
        "verified": verified,
        "search_s": search_s,
        "wall_s": summary.wall_s,
        "a_second": verified / search_s,
        "a_second_with_races": verified / summary.wall_s,
        "shares": vars(summary.shares),
        "by_device": [each.to_json() for each in summary.devices],
        "ok_by_uuid": by_card,
        "races": sum(task.race is not None for task in summary.tasks),
        "default_over_best": [task.speedup for task in summary.tasks],
    }
    return row, [(each.finished_at - begin_s, each.workload_id, each.measurement.time_ns or math.inf) for each in ok]


def seconds_until_near(found: Found, best_ns: Mapping[str, float]) -> float | None:
    """When the best times so far were near those of `best_ns`, in the geometric mean over the layers."""
    so_far: dict[str, float] = {}
    for at_s, workload, time_ns in sorted(found):
        so_far[workload] = min(time_ns, so_far.get(workload, math.inf))
        if len(so_far) == len(best_ns) and quality(so_far, best_ns) >= NEAR:
            return at_s
    return None


def quality(times_ns: Mapping[str, float], best_ns: Mapping[str, float]) -> float:
    return common.geometric_mean([best_ns[each] / times_ns[each] for each in best_ns])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=40.0, help="seconds of each run")
    parser.add_argument("--runs", default="1,2,2,1", help="number of cards of each run")
    parser.add_argument("--warm", type=float, default=0.0, help="seconds of a run that fills the build cache; 0: none")
    parser.add_argument("--out", help="write the data here after each run")
    options = parser.parse_args()
    counts = [int(count) for count in options.runs.split(",")]
    devices, cores = detect_all("cuda:all"), sorted(os.sched_getaffinity(0))
    if max(counts) > len(devices):
        raise SystemExit(f"there are {len(devices)} GPUs, and --runs needs {max(counts)}")
    rows: list[dict[str, Any]] = []
    founds: list[Found] = []
    builds = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, builds, ignore_errors=True)
    if options.warm:
        tuned(devices[: max(counts)], cores, options.warm, 99, builds, keep=True)
    for number, count in enumerate(counts):
        chosen = devices[number % (len(devices) - count + 1) :][:count]  # single runs take turns on the cards
        try:
            row, found = tuned(chosen, cores[: len(cores) * count // max(counts)], options.time, number, builds)
        except Interrupted:
            break
        rows.append(row)
        founds.append(found)
        best_ns: dict[str, float] = {}
        for _, workload, time_ns in (each for found in founds for each in found):
            best_ns[workload] = min(time_ns, best_ns.get(workload, math.inf))
        for each, own in zip(rows, founds):
            bests = {workload: min(ns for _, name, ns in own if name == workload) for workload in best_ns}
            each["near_best_s"], each["quality"] = seconds_until_near(own, best_ns), quality(bests, best_ns)
        common.write(options.out, {"rows": rows})
    header = ("cards", "cores", "verified/s", "with races", "busy", "preparing", "builds", "tuner", ".98 after", "quality")
    lines = [
        (
            row["devices"], row["cores"], f"{row['a_second']:.1f}", f"{row['a_second_with_races']:.1f}",
            *(f"{row['shares'][name]:.0%}" for name in ("device", "preparing", "build", "tuner")),
            "-" if row["near_best_s"] is None else f"{row['near_best_s']:.0f} s", f"{row['quality']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    print(common.table(header, lines))


if __name__ == "__main__":
    main()
