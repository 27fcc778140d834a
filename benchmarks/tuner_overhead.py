"""The cost of a tuner per 64 proposals: CPU seconds (all threads) of ask and tell, including fits. Nothing is measured.

It runs in a space that is too large to be listed, and in those of our own templates, whose many rules leave a hundredth of
the points. The first ask in a space finds its legal points. The times are invented: smooth and repeatable.

Imports that happen once per process (scipy and xgboost) are counted separately. If scikit-learn is installed, xgboost
imports it too, which takes longer than everything else.

Run: python benchmarks/tuner_overhead.py [--tuners xgb,ga,annealing,random,grid] [--trials 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import write
from record_space import convolution, space_name

from schedsearch.config import Config
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.tuner import TUNERS, make_tuner

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROPOSALS = 64
TEMPLATE_SPACES = (  # as `record_space.py` names them
    ("conv2d_wgmma", "32,28,28,128,128,3"),
    ("conv2d_wgmma", "1,7,7,512,512,3"),
    ("conv2d_halo", "32,28,28,128,128,3"),
    ("conv2d_mma", "1,14,14,256,256,3"),
)


def tiled_space() -> ConfigSpace:
    """A space like that of a tiled kernel: 1.3e9 points, about 5e8 of them legal."""
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


def template_space(template: str, shape: str) -> ConfigSpace:
    return load_template(template).space(convolution(shape, "float16"), PRESETS["h200"])


def of_features(space: ConfigSpace) -> Callable[[Config], float]:
    """Times in ns that are smooth in the features: a fixed random quadratic form of them."""
    weights = np.random.default_rng(0).normal(size=(3, len(space.feature_names)))

    def time_ns(config: Config) -> float:
        features = np.nan_to_num(space.encode(space.indices([config]))[0])
        return 1000 * math.exp(float(np.abs(weights @ features).mean()) / 10)

    return time_ns


def of_tiles(config: Config) -> float | None:
    """Times in ns over `tiled_space`, smooth; deep pipelines of big tiles fail."""
    log = [math.log2(int(config[f"tile{i}"])) for i in range(8)]
    if int(config["stages"]) * int(config["tile2"]) >= 512:
        return None
    return 1000 * (1 + 0.2 * (log[0] + log[1] - 8) ** 2 + 0.1 * (log[2] - 6) ** 2 + 0.1 * sum(abs(x - 3) for x in log[3:]))


def imports_cpu_s(name: str) -> float:
    """CPU seconds of a tuner's imports, including itself."""
    started = time.process_time()
    importlib.import_module(TUNERS[name].partition(":")[0])
    if name == "xgb":
        importlib.import_module("xgboost")
    return time.process_time() - started


def overhead(
    name: str, space: ConfigSpace, time_ns: Callable[[Config], float | None], trials: int
) -> Iterator[dict[str, Any]]:
    """One row per 64 proposals, asked and told in the tuner's own batches."""
    tuner = make_tuner(name, space, seed=0)
    asked = 0
    while asked < trials and not tuner.finished:
        cpu, wall, until = 0.0, 0.0, asked + PROPOSALS
        while asked < until and not tuner.finished:
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            configs = tuner.ask(min(tuner.batch, until - asked))
            cpu, wall = cpu + time.process_time() - cpu_start, wall + time.perf_counter() - wall_start
            results = [(config, time_ns(config)) for config in configs]
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            tuner.tell(results)
            cpu, wall = cpu + time.process_time() - cpu_start, wall + time.perf_counter() - wall_start
            asked += len(configs)
        yield {"tuner": name, "until_trial": asked, "cpu_s": cpu, "wall_s": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuners", default=",".join(TUNERS))
    parser.add_argument("--trials", type=int, default=512)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    tiled = tiled_space()
    spaces: dict[str, tuple[ConfigSpace, Callable[[Config], float | None]]] = {"tiled": (tiled, of_tiles)}
    for template, shape in TEMPLATE_SPACES:
        space = template_space(template, shape)
        spaces[space_name(shape, template)] = space, of_features(space)
    every: list[dict[str, Any]] = []
    imports: dict[str, float] = {}
    for name in args.tuners.split(","):
        imports[name] = imports_cpu_s(name)
        print(f"{name}: {imports[name]:.2f} CPU s of imports")
    print(f"{'space':46} {'legal':>26} {'tuner':>9} {'until trial':>12} {'CPU s / 64':>11} {'wall s / 64':>12}")
    for label, (space, time_ns) in spaces.items():
        for name in imports:
            for row in overhead(name, ConfigSpace(space.knobs, space.constraints, space.derived), time_ns, args.trials):
                every.append({"space": label, **row})
                cost = f"{row['cpu_s']:11.3f} {row['wall_s']:12.3f}"
                print(f"{label:46} {space.size!s:>26} {name:>9} {row['until_trial']:12} {cost}")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    scikit_learn = importlib.util.find_spec("sklearn") is not None
    write(args.json, {"scikit_learn_installed": scikit_learn, "imports_cpu_s": imports, "rows": every})


if __name__ == "__main__":
    main()
