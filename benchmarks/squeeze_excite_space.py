"""Configurations of squeeze_excite_cuda for layers of networks, timed in a chain of kernels.

    python benchmarks/squeeze_excite_space.py --out squeeze_excite_space_h200.json

All configurations with clusters of eight blocks whose image stays in shared memory, and the default, are timed in the mode
chain-graph-v1: as a network launches them. The table has the default's time, the best one's, and what that one is. It needs
a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common
from split_k import kernel_us

from schedsearch import Config, Workload, squeeze_excite
from schedsearch.backend import compile_source
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.measure.timing import open_timer
from schedsearch.target import Target
from schedsearch.template import load_template

TEMPLATE = "squeeze_excite_cuda"
LAYERS: tuple[dict[str, Any], ...] = (
    {"c": 960, "h": 7, "w": 7, "squeezed": 240, "gate": "hard_sigmoid"},  # mobilenet_v3_large
    {"c": 672, "h": 14, "w": 14, "squeezed": 168, "gate": "hard_sigmoid"},
    {"c": 120, "h": 28, "w": 28, "squeezed": 32, "gate": "hard_sigmoid"},
    {"c": 208, "h": 14, "w": 14, "squeezed": 52},  # regnet_y_400mf
    {"c": 440, "h": 7, "w": 7, "squeezed": 110},
    {"c": 1152, "h": 7, "w": 7, "squeezed": 48, "activation": "silu"},  # efficientnet_b0
)


def configurations(workload: Workload, target: Target) -> list[Config]:
    """The default first."""
    template = load_template(TEMPLATE)
    space = template.space(workload, target)
    default = template.default(workload, target, space)
    every = [config for rows in space.walk() for config in space.configs(rows)]
    wide = [c for c in every if c["cluster"] == 8 and c["threads"] >= 256 and c["holds"]]
    return [default, *(config for config in wide if config != default)]


def built(workload: Workload, config: Config, target: Target) -> Any:
    return compile_source(load_template(TEMPLATE).kernel(workload, target, config), target).artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no configuration is begun")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started, target, rows = time.perf_counter(), detect("cuda"), []
    with (
        ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool,
        contextlib.closing(open_device(target)) as device,
    ):
        timer = open_timer(device)
        workloads = [squeeze_excite(n=1, **layer) for layer in LAYERS]
        tried = [(w, c, pool.submit(built, w, c, target)) for w in workloads for c in configurations(w, target)]
        for workload, config, artifact in tried:
            if time.perf_counter() - started > options.limit:
                artifact.cancel()
                continue
            us = kernel_us(device, timer, workload, artifact.result())
            rows.append({"layer": workload.label, "config": dict(config), "us": us})
        common.write(options.out, {"rows": rows})
    cells = []
    for label in dict.fromkeys(row["layer"] for row in rows):
        of = [row for row in rows if row["layer"] == label]
        best = min(of, key=lambda row: row["us"])
        knobs = ", ".join(f"{name} {value}" for name, value in best["config"].items())
        cells.append((label, str(len(of)), f"{of[0]['us']:.2f}", f"{best['us']:.2f}", knobs))
    print(common.table(("layer", "configurations", "default, us", "best, us", "the best"), cells))


if __name__ == "__main__":
    main()
