"""fp16 convolution against cuDNN: tunes, then times the winners and both of cuDNN's layouts in one process.

    python benchmarks/conv2d_fp16.py                         the 13 shapes
    python benchmarks/conv2d_fp16.py --suite random --seed 7 twenty shapes drawn from the seed
    python benchmarks/conv2d_fp16.py --suite networks --networks networks.json --trials 64

Needs a CUDA device and PyTorch. cuDNN runs in benchmark mode; the faster of NCHW and NHWC counts, the output in that
layout. Everything is timed cold: all operands rotate over sets that together exceed 2.5x L2, inside a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import common
import torch

import schedsearch
from schedsearch.errors import SchedsearchError

# n, h, w, c, k, kernel, stride, padding
SHAPES = [
    (32, 56, 56, 64, 64, 3, 1, 1),
    (32, 28, 28, 128, 128, 3, 1, 1),
    (32, 14, 14, 256, 256, 3, 1, 1),
    (32, 7, 7, 512, 512, 3, 1, 1),
    (32, 56, 56, 64, 256, 1, 1, 0),
    (32, 28, 28, 512, 128, 1, 1, 0),
    (1, 56, 56, 64, 64, 3, 1, 1),
    (1, 28, 28, 128, 128, 3, 1, 1),
    (1, 14, 14, 256, 256, 3, 1, 1),
    (1, 7, 7, 512, 512, 3, 1, 1),
    (1, 56, 56, 64, 256, 1, 1, 0),
    (1, 28, 28, 512, 128, 1, 1, 0),
    (32, 300, 300, 64, 64, 3, 1, 1),
]


def square(n: int, h: int, w: int, c: int, k: int, kernel: int, stride: int, padding: int) -> schedsearch.Workload:
    return schedsearch.Workload.conv2d(n=n, h=h, w=w, c=c, k=k, r=kernel, s=kernel, stride=stride, padding=padding)


def draw(seed: int, count: int) -> list[schedsearch.Workload]:
    """Shapes that nobody chose: sizes 7 to 224, channels 16 to 1024 in multiples of 8, batch 1 to 64."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        kernel, size = rng.choice((1, 3, 5, 7)), rng.randint(7, 224)
        c, k = (8 * rng.randint(2, 128) for _ in range(2))
        workload = square(rng.randint(1, 64), size, size, c, k, kernel, rng.choice((1, 2)), kernel // 2)
        if workload.flops < 4e12 and workload.min_bytes < 8e9:  # a launch of at most some 10 ms
            found.append(workload)
    return found


def network_layers(path: str) -> list[tuple[schedsearch.Workload, str, int]]:
    """(workload, network, multiplicity) of every convolution at batch 1, and of ResNet-50 at batch 32 too."""
    data = json.loads(Path(path).read_text())
    found = []
    for name, batch in (("resnet50", 1), ("vgg16", 1), ("inception_v3", 1), ("resnet50", 32)):
        for layer in data[name]["layers"]:
            h, w, c, k, r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, times = layer
            workload = schedsearch.Workload.conv2d(
                n=batch, h=h, w=w, c=c, k=k, r=r, s=s, stride=(stride_h, stride_w), padding=(pad_h, pad_w),
                dilation=(dilation_h, dilation_w), groups=groups,
            )  # fmt: skip
            found.append((workload, f"{name} batch {batch}", times))
    return found


def operands(workload: schedsearch.Workload, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight as logical NCHW and OIHW tensors, in memory as `layout` says."""
    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    fan_in = workload.c // workload.groups * workload.r * workload.s
    x = torch.randn(workload.n, workload.c, workload.h, workload.w, device="cuda", dtype=torch.float16)
    weight = torch.randn(
        workload.k, workload.c // workload.groups, workload.r, workload.s, device="cuda", dtype=torch.float16
    )
    return x.contiguous(memory_format=memory), (weight / fan_in**0.5).contiguous(memory_format=memory)


def cudnn(workload: schedsearch.Workload, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    top, left, bottom, right = workload.padding
    if (top, left) != (bottom, right):
        x = torch.nn.functional.pad(x, (left, right, top, bottom))
        top = left = 0
    return torch.nn.functional.conv2d(x, weight, None, workload.stride, (top, left), workload.dilation, workload.groups)


def compare(workload: schedsearch.Workload, db: str, l2_bytes: int) -> dict[str, Any]:
    """Times the tuned kernel and cuDNN in both layouts; compares the outputs."""
    sets = common.sets_needed(workload.min_bytes, l2_bytes)
    row: dict[str, Any] = {"workload": workload.label, "sets": sets}
    for layout in ("NCHW", "NHWC"):
        pairs = [operands(workload, layout) for _ in range(sets)]
        row[f"cudnn_{layout.lower()}_us"] = common.cold_graph_us([lambda p=pair: cudnn(workload, *p) for pair in pairs])
        if layout == "NCHW":
            del pairs
            torch.cuda.empty_cache()
    row["cudnn_us"] = min(row["cudnn_nchw_us"], row["cudnn_nhwc_us"])
    kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",))
    steps = [kernel.bind(*pair) for pair in pairs]
    row["us"] = common.cold_graph_us(steps)
    expected = cudnn(workload, *(tensor.float() for tensor in pairs[0])).double()
    got = steps[0]().double()
    row["relative_error"] = float((got - expected).norm() / expected.norm())
    row["ratio"] = row["cudnn_us"] / row["us"]
    row["tflops"] = workload.flops / row["us"] / 1e6
    row["template"], row["config"] = kernel.provenance.template, dict(kernel.config)
    row["recorded_us"] = kernel.provenance.time_ns / 1e3 if kernel.provenance.time_ns else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("targets", "random", "networks"), default="targets")
    parser.add_argument("--seed", type=int, default=0, help="of the tuner, and of the shapes of --suite random")
    parser.add_argument("--count", type=int, default=20, help="shapes of --suite random")
    parser.add_argument("--trials", type=int, default=200, help="a shape")
    parser.add_argument("--time", type=float, help="seconds of tuning over all shapes")
    parser.add_argument("--networks", help="the file networks.json with the layers of --suite networks")
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    layers = network_layers(options.networks) if options.suite == "networks" else []
    chosen = {
        "targets": lambda: [square(*shape) for shape in SHAPES],
        "random": lambda: draw(options.seed, options.count),
        "networks": lambda: list(dict.fromkeys(workload for workload, _, _ in layers)),
    }[options.suite]()
    started = time.perf_counter()
    summary = schedsearch.tune(
        chosen, options.db, target="cuda", trials=options.trials, time_s=options.time, seed=options.seed
    )
    tuning_s = time.perf_counter() - started
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows = []
    for workload, task in zip(chosen, summary.tasks):
        try:
            row = compare(workload, options.db, l2_bytes)
        except (SchedsearchError, torch.cuda.OutOfMemoryError) as error:
            row = {"workload": workload.label, "error": f"{type(error).__name__}: {error}"}
        row["trials"], row["default_us"] = task.trials, task.default_ns and task.default_ns / 1e3
        rows.append(row)
        torch.cuda.empty_cache()
    good = [row for row in rows if "ratio" in row]
    print(
        common.table(
            ("workload", "trials", "cuDNN NCHW", "NHWC", "default", "tuned us", "ratio", "TFLOP/s", "error", "template"),
            [
                (
                    row["workload"], row["trials"], f"{row['cudnn_nchw_us']:.2f}", f"{row['cudnn_nhwc_us']:.2f}",
                    f"{row['default_us']:.2f}", f"{row['us']:.2f}", f"{row['ratio']:.2f}", f"{row['tflops']:.0f}",
                    f"{row['relative_error']:.1e}", row["template"],
                )
                for row in good
            ],
        )
    )  # fmt: skip
    for row in good:
        print(f"  {row['workload']}: {row['config']}")
    for row in rows:
        if "error" in row:
            print(f"  {row['workload']}: {row['error']}")
    result: dict[str, Any] = {"suite": options.suite, "rows": rows, "tuning_s": tuning_s}
    result["geometric_mean_ratio"] = common.geometric_mean([row["ratio"] for row in good])
    result["trials_per_s"] = sum(task.new_trials for task in summary.tasks) / tuning_s
    shares = ("device", "preparing", "build", "tuner")
    result["shares"] = {name: round(getattr(summary.shares, name), 3) for name in shares}
    if layers:
        result["networks"] = network_sums(layers, {workload: row for workload, row in zip(chosen, rows) if "ratio" in row})
    print(f"geometric mean {result['geometric_mean_ratio']:.3f} of cuDNN over {len(good)} of {len(rows)} shapes; "
          f"tuned in {tuning_s:.0f} s, {result['trials_per_s']:.1f} trials/s; {summary.shares}")  # fmt: skip
    common.write(options.out, result)


def network_sums(layers: list[Any], rows: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of all convolutions of one pass, ours and cuDNN's."""
    sums: dict[str, Any] = {}
    for workload, network, times in layers:
        entry = sums.setdefault(network, {"ms": 0.0, "cudnn_ms": 0.0, "layers": 0, "missing": 0})
        if workload not in rows:
            entry["missing"] += times
            continue
        entry["ms"] += rows[workload]["us"] * times / 1e3
        entry["cudnn_ms"] += rows[workload]["cudnn_us"] * times / 1e3
        entry["layers"] += times
    lines = [
        (name, e["layers"], e["missing"], f"{e['cudnn_ms']:.3f}", f"{e['ms']:.3f}", f"{e['cudnn_ms'] / e['ms']:.2f}")
        for name, e in sums.items()
    ]
    print(common.table(("network", "layers", "missing", "cuDNN ms", "ms", "ratio"), lines))
    return sums


if __name__ == "__main__":
    main()
