"""How conv2d_wgmma stores y: by TMA, or by each warp with stores of 16 bytes. Times of both, in equal configurations.

    python benchmarks/conv2d_stores.py --out conv2d_stores_h200.json

Layers are 1x1 convolutions with short reductions, whose time is mostly that of stores, and one 3x3 layer; int8 with bias,
relu and requantisation, and fp16 with bias and relu. The space offers the choice for 8-bit results only, but the kernel has
it for 16 bits too. For every number of columns, schedule and number of blocks on a multiprocessor, the configuration with
the least predicted time is built once with each way to store. Results of both ways must be equal. Times are cold, in a CUDA
graph; see conv2d_fp16.py.

Needs a CUDA device of compute capability 9.0 and PyTorch. --out is written after every layer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from typing import Any

import common
from conv2d_types import FUSED, KINDS, draw
from convolutions import square

from schedsearch import Config, Workload
from schedsearch.backend import CompileError, RejectedError, compile_source
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.conv2d.wgmma_sizes import STORES

SHAPES = [
    (32, 56, 56, 64, 256, 1, 1, 0),
    (32, 28, 28, 128, 512, 1, 1, 0),
    (32, 56, 56, 256, 64, 1, 1, 0),
    (32, 28, 28, 128, 128, 3, 1, 1),
]
COLUMNS, BLOCKS_PER_SM, SCHEDULES = (64, 128, 256), (1, 2, 3), ("together", "in_turn")
TEMPLATE = Conv2dWgmma()
Build = tuple[Workload, Target, Config]


def configurations(workload: Workload, target: Target) -> list[Config]:
    """Without the knob `store`: the default, and the best predicted ones of several kinds."""
    space = TEMPLATE.space(workload, target)
    kept: dict[str, list[Any]] = {"store": [STORES[0]]} if "store" in space.names else {}
    found = [TEMPLATE.default(workload, target, space.restrict(kept))]
    for bn, blocks, schedule in itertools.product(COLUMNS, BLOCKS_PER_SM, SCHEDULES):
        values = {"bn": [bn], "blocks_per_sm": [blocks], "schedule": [schedule], "cluster_m": [1], "cluster_n": [1], **kept}
        try:
            found.append(TEMPLATE.default(workload, target, space.restrict(values)))
        except (IndexError, ValueError):  # there is no such configuration
            continue
    plain = [Config({name: value for name, value in config.items() if name != "store"}) for config in found]
    return list(dict.fromkeys(plain))


def built(task: Build) -> Any:
    """The artifact, or why there is none."""
    workload, target, config = task
    try:
        return compile_source(TEMPLATE.kernel(workload, target, config), target).artifact
    except (CompileError, RejectedError) as error:
        return str(error).splitlines()[0]


def times(workload: Workload, pairs: list[tuple[Config, list[Any]]], l2_bytes: int) -> list[dict[str, Any]]:
    """A row for each configuration, in microseconds for each way; None if it could not be built."""
    import torch

    from schedsearch.device import open_device

    device = open_device(detect("cuda"))
    out = {"int8": torch.int8, "float16": torch.float16}[workload.out_dtype]
    sets = [draw(workload) for _ in range(common.sets_needed(workload.min_bytes, l2_bytes))]
    outputs = [torch.empty(workload.output.shape, dtype=out, device="cuda") for _ in sets]
    scalars = {scalar.name: 0.0 for scalar in workload.scalars}
    names = [spec.name for spec in workload.signature]
    rows = []
    for config, artifacts in pairs:
        row: dict[str, Any] = {"config": dict(config)}
        results = []
        for way, artifact in zip(STORES, artifacts):
            if isinstance(artifact, str):
                row[way] = None
                continue
            kernel = device.load(artifact)
            bound = [
                kernel.bind({**{name: each.data_ptr() for name, each in zip(names, arrays)}, "y": y.data_ptr()}, scalars)
                for arrays, y in zip(sets, outputs)
            ]
            calls = [lambda each=each: each.launch(torch.cuda.current_stream().cuda_stream) for each in bound]
            row[way] = common.cold_graph_us(calls)
            results.append(outputs[0].clone())
            outputs[0].zero_()
            torch.cuda.synchronize()
            kernel.close()
        if len(results) == len(STORES) and not torch.equal(*results):
            raise AssertionError(f"the ways to store differ: {workload.label}, {config}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no further layer is timed")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    started, target = time.perf_counter(), detect("cuda")
    halves = [square(*shape).replace(epilogue=FUSED) for shape in SHAPES]
    workloads = [square(*shape).replace(**KINDS["int8"].params) for shape in SHAPES] + halves
    drawn = [(workload, config) for workload in workloads for config in configurations(workload, target)]
    tasks = [(workload, target, Config({**config, "store": way})) for workload, config in drawn for way in STORES]
    with multiprocessing.get_context("forkserver").Pool(options.processes) as pool:
        artifacts = pool.map(built, tasks, chunksize=1)
    pairs = [(*each, artifacts[len(STORES) * i : len(STORES) * (i + 1)]) for i, each in enumerate(drawn)]

    import torch

    torch.set_grad_enabled(False)
    l2_bytes, layers = torch.cuda.get_device_properties(0).L2_cache_size, []
    for workload in workloads:
        if time.perf_counter() - started > options.limit:
            print("the time is up")
            break
        rows = times(workload, [(config, made) for each, config, made in pairs if each is workload], l2_bytes)
        layers.append({"workload": workload.label, "bytes": workload.min_bytes, "rows": rows})
        common.write(options.out, {"layers": layers})
        best = {way: min((row for row in rows if row[way]), key=lambda row: row[way]) for way in STORES}
        print(
            workload.label,
            {way: round(row[way], 2) for way, row in best.items()},
            f"default {rows[0]['tma']:.2f}",
            flush=True,
        )
        print("   ", {way: {k: row["config"][k] for k in ("bn", "consumer_groups", "schedule", "blocks_per_sm", "stages")}
                      for way, row in best.items()}, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
