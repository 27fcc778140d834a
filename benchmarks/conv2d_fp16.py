"""fp16 convolution against cuDNN: tunes, then times the winners and PyTorch's ways in both layouts in one process.

    python benchmarks/conv2d_fp16.py                         the 13 shapes
    python benchmarks/conv2d_fp16.py --epilogue bias,relu    the same with bias and relu fused on both sides
    python benchmarks/conv2d_fp16.py --dtype bfloat16        the same in bf16
    python benchmarks/conv2d_fp16.py --suite random --seed 7 twenty shapes drawn from the seed
    python benchmarks/conv2d_fp16.py --suite grouped         grouped layers of ResNeXt and RegNet, and each template's best
    python benchmarks/conv2d_fp16.py --suite networks --networks networks.json --trials 64
    python benchmarks/conv2d_fp16.py --suite networks --networks networks.json --trials 64 \\
        --network "resnet50 batch 32" --add --out networks_h200.json     one network; --out keeps its data of the others

Needs a CUDA device and PyTorch. cuDNN runs in benchmark mode. We compare with its fastest way, whose output has that way's
layout. Without an epilogue the ways are NCHW and NHWC. With bias and relu they are, in each layout, cuDNN's fused
convolution, torch.compile in its default mode, and one operator after the other. Everything is timed cold: all operands
rotate over sets that together exceed 2.5x L2, inside a CUDA graph.

Trials count across runs with one database: another run with the same --trials continues where the last one stopped. --out
is written after every layer.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Sequence
from typing import Any

import common
from convolutions import (
    SHAPES,
    Layer,
    fastest_by_template,
    kept,
    layers_of,
    network_sums,
    report,
    run_facts,
    square,
)

import schedsearch
from schedsearch.errors import SchedsearchError

PEER_FIELDS = ("_nchw_us", "_nhwc_us")
MAX_FLOPS, MAX_BYTES = 4e12, 8e9  # of a shape that is drawn: a launch of at most some 10 ms

# n, h, w, c, k, kernel, stride, padding, groups
GROUPED = [
    (32, 56, 56, 128, 128, 3, 1, 1, 32),  # ResNeXt-50 32x4d: all its grouped shapes except those of 512 channels at stride 2
    (32, 56, 56, 256, 256, 3, 2, 1, 32),
    (32, 28, 28, 256, 256, 3, 1, 1, 32),
    (32, 14, 14, 512, 512, 3, 1, 1, 32),
    (32, 14, 14, 1024, 1024, 3, 2, 1, 32),
    (32, 7, 7, 1024, 1024, 3, 1, 1, 32),
    (32, 56, 56, 256, 256, 3, 1, 1, 64),  # ResNeXt-101 64x4d
    (32, 14, 14, 1024, 1024, 3, 1, 1, 64),
    (32, 28, 28, 168, 168, 3, 1, 1, 7),  # RegNetX-1.6GF
    (32, 28, 28, 192, 192, 3, 1, 1, 4),  # RegNetX-3.2GF
    (32, 14, 14, 1232, 1232, 3, 1, 1, 11),  # RegNetY-16GF
    (1, 56, 56, 128, 128, 3, 1, 1, 32),  # ResNeXt-50 32x4d again
    (1, 28, 28, 256, 256, 3, 1, 1, 32),
    (1, 14, 14, 512, 512, 3, 1, 1, 32),
    (1, 7, 7, 1024, 1024, 3, 1, 1, 32),
]


def draw(seed: int, count: int) -> list[schedsearch.Workload]:
    """Random shapes: sizes 7 to 224, channels 16 to 1024 in multiples of 8, batch 1 to 64, without the largest ones."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        kernel, size = rng.choice((1, 3, 5, 7)), rng.randint(7, 224)
        c, k = (8 * rng.randint(2, 128) for _ in range(2))
        workload = square(rng.randint(1, 64), size, size, c, k, kernel, rng.choice((1, 2)), kernel // 2)
        if workload.flops < MAX_FLOPS and workload.min_bytes < MAX_BYTES:
            found.append(workload)
    return found


def compare(workload: schedsearch.Workload, db: str, l2_bytes: int) -> dict[str, Any]:
    """Times the tuned kernel and PyTorch's ways; compares our output with float32.

    Raises:
        SchedsearchError: there is no kernel; RuntimeError: PyTorch's; ValueError: no way of PyTorch works.
    """
    import torch
    import torch_conv2d as peers

    sets = common.sets_needed(workload.min_bytes, l2_bytes)
    row: dict[str, Any] = {"workload": workload.label, "sets": sets}
    times: dict[str, float] = {}
    operands: list[tuple[torch.Tensor, ...]] = []
    for layout in ("NCHW", "NHWC"):
        operands.clear()
        torch.cuda.empty_cache()
        operands += [peers.operands(workload, layout) for _ in range(sets)]
        for name, way in peers.ways(workload, layout):
            try:
                with peers.time_limit(peers.WAY_LIMIT_S):
                    times[name] = common.cold_graph_us([functools.partial(way, *tensors) for tensors in operands])
                row[f"{name}_us"] = times[name]
            except Exception as error:  # torch.compile may raise anything; the other ways are still timed
                row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
    if not times:
        raise ValueError(f"no way of PyTorch works: {row['failed']}")
    row["peer"] = min(times, key=lambda name: times[name])
    row["cudnn_us"] = times[row["peer"]]
    kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",))
    steps = [kernel.bind(*tensors) for tensors in operands]
    row["us"] = common.cold_graph_us(steps)
    expected = peers.convolve(workload, *(tensor.float() for tensor in operands[0]))
    row["relative_error"] = peers.relative_error(steps[0](), expected)
    row["ratio"] = row["cudnn_us"] / row["us"]
    row["tflops"] = workload.flops / row["us"] / 1e6
    row["template"], row["config"] = kernel.provenance.template, dict(kernel.config)
    row["recorded_us"] = kernel.provenance.time_ns / 1e3 if kernel.provenance.time_ns else None
    return row


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("targets", "random", "grouped", "networks"), default="targets")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of all operands and outputs")
    parser.add_argument("--epilogue", choices=("", "bias,relu"), default="", help="fused, on both sides")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tuner and of the shapes of --suite random")
    parser.add_argument("--count", type=int, default=20, help="shapes of --suite random")
    parser.add_argument(
        "--trials", type=int, default=200, help="trials per shape, including those of earlier runs with this --db"
    )
    parser.add_argument("--templates", nargs="+", metavar="NAME", help="tune these only, e.g. those of cards without wgmma")
    parser.add_argument("--time", type=float, help="seconds of tuning over all shapes")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds from the start, after which no further shape is timed"
    )
    parser.add_argument(
        "--networks", metavar="FILE", help="JSON file with the layers of --suite networks; `network_layers` has its form"
    )
    parser.add_argument(
        "--network", action="append", help="with --suite networks: only this network; may be given several times"
    )
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--add", action="store_true", help="keep the data in --out of shapes that this run does not time")
    options = parser.parse_args(words)
    if (options.suite == "networks") != bool(options.networks) or (options.network and not options.networks):
        parser.error("--suite networks and --networks FILE belong together, and --network to them")
    return options


def chosen(options: argparse.Namespace) -> tuple[list[schedsearch.Workload], list[Layer]]:
    """The workloads to time, each once, and the layers of all networks that they come from."""
    kind = {
        "epilogue": tuple(filter(None, options.epilogue.split(","))),
        "dtype": options.dtype,
        "out_dtype": options.dtype,
    }
    if options.suite == "networks":
        return layers_of(options.networks, options.network, kind)
    if options.suite == "random":
        workloads = draw(options.seed, options.count)
    else:
        workloads = [square(*shape) for shape in (SHAPES if options.suite == "targets" else GROUPED)]
    return list(dict.fromkeys(workload.replace(**kind) for workload in workloads)), []


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    workloads, layers = chosen(options)
    suite = "+".join(filter(None, (options.suite, options.epilogue, options.dtype.removeprefix("float16"))))
    earlier = kept(options.out if options.add else None, suite)

    import torch

    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    summary = schedsearch.tune(
        workloads,
        options.db,
        target="cuda",
        trials=options.trials,
        time_s=options.time,
        seed=options.seed,
        templates=options.templates,
    )
    run = run_facts(started, summary)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows: list[dict[str, Any]] = []
    for workload, task in zip(workloads, summary.tasks):
        if time.perf_counter() - started > options.limit:
            print(f"{len(workloads) - len(rows)} shapes are not timed: the time is up")
            break
        try:
            row = compare(workload, options.db, l2_bytes)
            row["template_us"] = fastest_by_template(workload, options.db)
        except (
            SchedsearchError,
            RuntimeError,
            ValueError,
        ) as error:  # RuntimeError: torch's errors, including out of memory
            row = {"workload": workload.label, "error": f"{type(error).__name__}: {error}"}
        row["trials"], row["default_us"] = task.trials, task.default_ns and task.default_ns / 1e3
        rows.append(row)
        result = report(suite, earlier, rows, run)
        if layers:
            result["networks"] = network_sums(layers, result["rows"])
        common.write(options.out, result)
        print(line(row), flush=True)
    if not rows:
        return
    for row in rows:
        print(f"  {row['workload']}: {row.get('config') or row['error']}")
    sums = [
        (name, e["layers"], e["missing"], f"{e['cudnn_ms']:.3f}", f"{e['ms']:.3f}", f"{e['cudnn_ms'] / e['ms']:.2f}")
        for name, e in result.get("networks", {}).items()
    ]
    if sums:
        print(common.table(("network", "layers", "missing", "cuDNN ms", "ms", "ratio"), sums))
    good = sum("ratio" in row for row in result["rows"])
    print(f"geometric mean {result['geometric_mean_ratio']:.3f} of cuDNN over {good} of {len(result['rows'])} shapes; "
          f"tuned in {run['tuning_s']:.0f} s, {run['new_trials']} trials; {summary.shares}")  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row in words, printed as soon as it is measured."""
    if "error" in row:
        return f"{row['workload']}: {row['error']}"
    ways = ", ".join(f"{name.removesuffix('_us')} {row[name]:.2f}" for name in row if name.endswith(PEER_FIELDS))
    templates = ", ".join(f"{name} {us:.2f}" for name, us in row.get("template_us", {}).items())
    failed = "".join(f"\n    {name} failed: {text}" for name, text in row.get("failed", {}).items())
    return (
        f"{row['workload']}: {row['us']:.2f} us by {row['template']}, {row['ratio']:.2f} of {row['peer']} ({ways}), "
        f"{row['tflops']:.0f} TFLOP/s, error {row['relative_error']:.1e}, {row['trials']} trials; "
        f"{templates}{failed}"
    )


if __name__ == "__main__":
    main()
