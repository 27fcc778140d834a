"""Networks whose kernels are tuned in different modes of timing, and how well each mode predicts the network's time.

    python benchmarks/tuning_modes.py --cases resnet50:1:float16=50 mobilenet_v2:1:float16=30 --out tuning_modes_h200.json

For each mode the `--layers` layers of a network of `onnx_models.py` that take most of its time are tuned into an empty
database, for the same seconds (after `=`); the other kernels are defaults. Then the network is built from that database, and
groups of runs of all builds take turns. It needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import onnx_models
import torch
from network_cases import network_of
from networks import hot_us

import schedsearch
from schedsearch.device.detect import detect
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, MODES
from schedsearch.network.costs import costs_of
from schedsearch.network.graph import Network
from schedsearch.network.plan import best_plan
from schedsearch.task import Task

TURNS = 9


def longest(network: Network, db: Path, count: int) -> list[Task]:
    """The layers with the largest times, by a database that may be missing, which their numbers in the network weight."""
    with costs_of(network, db, detect("cuda"), COLD_GRAPH) as costs:
        counts = Counter(best_plan(network, costs).implementations.values())
        chosen = sorted(counts, key=lambda workload: -counts[workload] * costs(workload).time_ns)[:count]
    return [Task(workload, weight=counts[workload]) for workload in chosen]


def measured(case: str, tune_s: float, modes: list[str], layers: int, folder: Path) -> list[dict[str, Any]]:
    path = onnx_models.saved(case, folder)
    tasks = longest(network_of((path,)), path.with_name("none.db"), layers)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        launches = []
        for mode in modes:
            db = folder / f"{case}-{mode}.db"
            schedsearch.tune(tasks, db, target="cuda", mode=mode, time_s=tune_s, trials=None)
            net = stack.enter_context(
                schedsearch.build(path, target="cuda", db=db, dtype="float16", io_layout="NHWC", check=False, mode=mode)
            )
            (port,) = net.inputs
            x = torch.randn(port.shape, device="cuda").to(getattr(torch, port.dtype))
            launches.append(net.bind(x))
            levels = [kernel.level for kernel in net.kernels]
            predicted_us = net.program.predicted_ns / 1e3
            rows.append({"case": case, "mode": mode, "tune_s": tune_s, "predicted_us": predicted_us, "calls": len(levels),
                         "tuned": levels.count("exact")})  # fmt: skip
        times: list[list[float]] = [[] for _ in modes]
        for _ in range(TURNS):
            for found, launch in zip(times, launches, strict=True):
                found.append(hot_us(launch))
        for launch in launches:
            launch.close()
    return [{**row, "us": statistics.median(found)} for row, found in zip(rows, times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["resnet50:1:float16=50"], metavar="NAME:BATCH:FORMAT=SECONDS")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[COLD_GRAPH, CHAIN_GRAPH])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for text in options.cases:
            case, _, seconds = text.partition("=")
            rows += measured(case, float(seconds), options.modes, options.layers, Path(folder))
            common.write(options.out, {"rows": rows})
            for row in rows[-len(options.modes) :]:
                print(row, flush=True)
    cells = [
        (row["case"], row["mode"], f"{row['tune_s']:g}", f"{row['tuned']} of {row['calls']}", f"{row['us']:.1f}",
         f"{row['predicted_us']:.1f}", f"{row['predicted_us'] / row['us'] - 1:+.1%}")
        for row in rows
    ]  # fmt: skip
    print(common.table(("network", "mode", "tuned, s", "tuned kernels", "us", "predicted", "error"), cells))


if __name__ == "__main__":
    main()
