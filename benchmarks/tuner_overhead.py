"""What a tuner costs per 64 proposals: CPU seconds (all threads) of ask and tell, fits included, nothing measured.

What is imported once a process, scipy and xgboost, is counted apart: where scikit-learn is installed xgboost imports that
too, which takes longer than all the rest.

Run: python benchmarks/tuner_overhead.py [--tuners xgb,ga,annealing,random,grid] [--trials 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import resource
import time
from typing import Any

from common import write

from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.tuner import TUNERS, make_tuner
from schedsearch.workload import Config

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROPOSALS = 64


def tiled_space() -> ConfigSpace:
    """1.3e9 points, about 5e8 of them legal, shaped like that of a tiled kernel."""
    return ConfigSpace(
        [
            *(Knob(f"tile{i}", POWERS) for i in range(8)),
            Knob("vectorised", (True, False)),
            Knob("order", ("x", "y", "z")),
            Knob("stages", (1, 2, 3, 4, 5)),
        ],
        [
            Constraint("threads <= 1024", lambda k: k["threads"] <= 1024),
            Constraint("tile3 divides tile2", lambda k: k["tile2"] % k["tile3"] == 0),
            Constraint("shared memory <= 232448 bytes", lambda k: k["shared_bytes"] <= 232448),
        ],
        derived={
            "threads": lambda k: k["tile0"] * k["tile1"],
            "shared_bytes": lambda k: 2 * k["stages"] * (k["tile2"] * k["tile3"] + k["tile4"] * k["tile5"]),
        },
    )


def synthetic_time_ns(config: Config) -> float | None:
    """A smooth landscape; deep pipelines of big tiles fail."""
    log = [math.log2(int(config[f"tile{i}"])) for i in range(8)]
    if int(config["stages"]) * int(config["tile2"]) >= 512:
        return None
    return 1000 * (1 + 0.2 * (log[0] + log[1] - 8) ** 2 + 0.1 * (log[2] - 6) ** 2 + 0.1 * sum(abs(x - 3) for x in log[3:]))


def imports_cpu_s(name: str) -> float:
    """CPU seconds for what a tuner imports, itself included."""
    started = time.process_time()
    importlib.import_module(TUNERS[name].partition(":")[0])
    if name == "xgb":
        importlib.import_module("xgboost")
    return time.process_time() - started


def overhead(name: str, space: ConfigSpace, trials: int) -> list[dict[str, Any]]:
    """One row per 64 proposals, asked and told in the tuner's own batches."""
    tuner = make_tuner(name, space, seed=0)
    rows, asked = [], 0
    while asked < trials and not tuner.finished:
        cpu, wall, until = 0.0, 0.0, asked + PROPOSALS
        while asked < until and not tuner.finished:
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            configs = tuner.ask(min(tuner.batch, until - asked))
            cpu, wall = cpu + time.process_time() - cpu_start, wall + time.perf_counter() - wall_start
            results = [(config, synthetic_time_ns(config)) for config in configs]
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            tuner.tell(results)
            cpu, wall = cpu + time.process_time() - cpu_start, wall + time.perf_counter() - wall_start
            asked += len(configs)
        rows.append({"tuner": name, "until_trial": asked, "cpu_s": cpu, "wall_s": wall})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuners", default=",".join(TUNERS))
    parser.add_argument("--trials", type=int, default=512)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    space = tiled_space()
    print(f"space: {space.size} legal configurations of {space.cardinality:.2e}")
    print(f"{'tuner':8} {'until trial':>12} {'CPU s / 64':>12} {'wall s / 64':>12}")
    every: list[dict[str, Any]] = []
    imports: dict[str, float] = {}
    for name in args.tuners.split(","):
        imports[name] = imports_cpu_s(name)
        print(f"{name:8} {'imports':>12} {imports[name]:12.4f}")
        for row in overhead(name, space, args.trials):
            print(f"{row['tuner']:8} {row['until_trial']:12} {row['cpu_s']:12.4f} {row['wall_s']:12.4f}")
            every.append(row)
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    scikit_learn = importlib.util.find_spec("sklearn") is not None
    write(args.json, {"scikit_learn_installed": scikit_learn, "imports_cpu_s": imports, "rows": every})


if __name__ == "__main__":
    main()
