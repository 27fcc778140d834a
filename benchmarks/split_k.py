"""Whether small layers of a network are faster if the blocks of a cluster share their reduction, in a chain of kernels.

    python benchmarks/split_k.py --networks mobilenet_v2,resnet50 --out split_k_h200.json

For each layer of a network of `onnx_models.py` at batch 1 that `conv2d_wgmma` computes with at most `--blocks` blocks, the
configuration with the least predicted time is taken for each number of parts of the reduction (`split_k`), and timed in the
mode chain-graph-v1: as a network launches it. The table has the sums over the layers of the default's time, of the best
one's, and how often each number of parts was the best. With `--columns` each number of parts is tried with each of so many
columns of a tile, so that grids of all sizes are timed, and the table has the best time of grids of each size. It needs a
GPU of compute capability 9.0.

    python benchmarks/split_k.py --networks resnet50 --only 1x7x7 --columns 16,32,64,128 --out split_k_7x7_h200.json
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common

from schedsearch import Config, Workload
from schedsearch.backend import compile_source
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import ConfigError
from schedsearch.measure.timing import Arena, open_timer
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH
from schedsearch.target import Target
from schedsearch.template import load_template

TEMPLATE, SAMPLES = "conv2d_wgmma", 5
GRIDS = (16, 32, 64, 100, 132, 264)  # blocks, at most, of the columns of the table


def layers(name: str, target: Target, blocks: int) -> Counter[Workload]:
    """The layers with small grids, and how often the network has each."""
    import onnx_models

    from schedsearch.network.costs import costs_of
    from schedsearch.network.lower import lower
    from schedsearch.network.model import read_model
    from schedsearch.network.plan import best_plan

    template = load_template(TEMPLATE)
    with tempfile.TemporaryDirectory() as folder:
        path = onnx_models.saved(f"{name}:1:float16", Path(folder))
        network = lower(read_model(path), dtype="float16").with_io_layout("NHWC")
        with costs_of(network, path.with_name("none.db"), target, COLD_GRAPH) as costs:
            found = Counter(best_plan(network, costs).implementations.values())
    small: Counter[Workload] = Counter()
    for workload, count in found.items():
        if workload.op == "conv2d" and template.validate(workload, target) is None:
            config = template.default(workload, target, template.space(workload, target))
            step = template.kernel(workload, target, config).steps[-1]
            if step.grid.blocks(target.sms, step.cluster) <= blocks:
                small[workload] = count
    return small


def configurations(workload: Workload, target: Target, columns: list[int]) -> dict[str, Config]:
    """The default, and the best predicted configuration for each number of parts, and of columns if there are some."""
    template = load_template(TEMPLATE)
    space = template.space(workload, target)
    found = {"default": template.default(workload, target, space)}
    for parts in space.values["split_k"]:
        for width in columns or [0]:
            name, restricted = (f"{parts}x{width}", {"bn": [width]}) if width else (str(parts), {})
            with contextlib.suppress(ConfigError):  # no configuration has so many
                found[name] = template.default(workload, target, space.restrict({"split_k": [parts], **restricted}))
    return found


def blocks_of(workload: Workload, config: Config, target: Target) -> int:
    step = load_template(TEMPLATE).kernel(workload, target, config).steps[-1]
    return step.grid.blocks(target.sms, step.cluster)


def by_grid(rows: list[dict[str, Any]]) -> str:
    """Each layer's default time, and the best time of grids of each size."""
    cells = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of = [row for row in rows if row["layer"] == layer]
        cells.append([layer, f"{of[0]['us']:.2f} ({of[0]['blocks']})"])
        for least, most in zip((0, *GRIDS), GRIDS):
            fitting = [row for row in of if least < row["blocks"] <= most]
            best = min(fitting, key=lambda row: row["us"], default=None)
            cells[-1].append(f"{best['us']:.2f} ({best['parts']})" if best else "")
    return common.table(("layer", "default, us (blocks)", *(f"to {most} blocks" for most in GRIDS)), cells)


def built(workload: Workload, config: Config, target: Target) -> Any:
    return compile_source(load_template(TEMPLATE).kernel(workload, target, config), target).artifact


def kernel_us(device: Any, timer: Any, workload: Workload, artifact: Any) -> float:
    with (
        contextlib.closing(Arena(device, workload, CHAIN_GRAPH)) as arena,
        contextlib.closing(device.load(artifact)) as kernel,
        contextlib.closing(timer.prepare(kernel, arena)) as timed,
    ):
        return statistics.median(timed.sample(SAMPLES)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="mobilenet_v2,resnet50")
    parser.add_argument("--blocks", type=int, default=110)
    parser.add_argument("--columns", default="", help="columns of a tile to try, as 16,32")
    parser.add_argument("--only", default="", help="layers whose label contains this text")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target, rows = detect("cuda"), []
    columns = [int(each) for each in options.columns.split(",") if each]
    with ProcessPoolExecutor() as pool, contextlib.closing(open_device(target)) as device:
        timer = open_timer(device)
        for name in options.networks.split(","):
            tried = [
                (workload, count, parts, config, pool.submit(built, workload, config, target))
                for workload, count in layers(name, target, options.blocks).items()
                if options.only in workload.label
                for parts, config in configurations(workload, target, columns).items()
            ]
            for workload, count, parts, config, artifact in tried:
                us = kernel_us(device, timer, workload, artifact.result())
                row = {"network": name, "layer": workload.label, "count": count, "parts": parts, "config": dict(config)}
                rows.append({**row, "blocks": blocks_of(workload, config, target), "us": us})
            common.write(options.out, {"rows": rows})
    if columns:
        print(by_grid(rows))
        return
    cells = []
    for name in options.networks.split(","):
        of: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["network"] == name:
                of.setdefault(row["layer"], {"count": row["count"]})[row["parts"]] = row["us"]
        default = sum(times["count"] * times["default"] for times in of.values())
        best = sum(times["count"] * min(us for key, us in times.items() if key != "count") for times in of.values())
        wins = Counter(
            min((us, key) for key, us in times.items() if key not in ("count", "default"))[1] for times in of.values()
        )
        cells.append(
            (name, str(len(of)), f"{default:.1f}", f"{best:.1f}", ", ".join(f"{k}: {n}" for k, n in sorted(wins.items())))
        )
        for layer, times in of.items():
            print(
                f"{layer[:60]:60s} x{times['count']} " + " ".join(f"{k}:{us:.2f}" for k, us in times.items() if k != "count")
            )
    print(common.table(("network", "layers", "default, us", "best, us", "parts of the best"), cells))


if __name__ == "__main__":
    main()
