"""Depthwise convolutions and their gradients against each variant of PyTorch, and a copy of as many bytes, in one run.

    python benchmarks/depthwise.py                               MobileNetV1's layers at batch 1, 32 and 128, and others
    python benchmarks/depthwise.py --suite others --direction grad_weight --dtype float32
    python benchmarks/depthwise.py --batch 32 --limit 8 --trials 16    the first 8 of the chosen layers
    python benchmarks/depthwise.py --trials 0                          the defaults, without tuning
    python benchmarks/depthwise.py --suite random --trials 0           40 layers that a generator draws

Needs a CUDA device and PyTorch. Each layer is tuned, then timed cold in a CUDA graph: all operands rotate over sets that
together exceed 2.5x L2. PyTorch's variants are cuDNN (in benchmark mode, and forced for forward) and its native kernels, in
both memory formats; we compare with the fastest. The copy moves half of the bytes that a layer must read and write, so that
its reads and writes together are as many. Results are compared with PyTorch's. --out is written after every layer.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import common

import schedsearch
from schedsearch.errors import SchedsearchError

# channels, height and width, kernel, stride, padding, dilation
MOBILENET_V1 = [
    (32, 112, 3, 1, 1, 1), (64, 112, 3, 2, 1, 1), (128, 56, 3, 1, 1, 1), (128, 56, 3, 2, 1, 1), (256, 28, 3, 1, 1, 1),
    (256, 28, 3, 2, 1, 1), (512, 14, 3, 1, 1, 1), (512, 14, 3, 2, 1, 1), (1024, 7, 3, 1, 1, 1),
]  # fmt: skip
OTHERS = [  # 5x5 layers of EfficientNet-B0 and MobileNetV3, and dilated ones
    (144, 56, 5, 1, 2, 1), (144, 56, 5, 2, 2, 1), (192, 28, 5, 1, 2, 1), (576, 14, 5, 1, 2, 1), (512, 28, 3, 1, 2, 2),
    (512, 28, 3, 1, 4, 4), (512, 28, 5, 1, 4, 2),
]  # fmt: skip
SUITES = {"mobilenet": MOBILENET_V1, "others": OTHERS}
RANDOM = 40  # layers
MOST_BYTES = 400 << 20  # of a random layer
DIRECTIONS, DTYPES, LAYOUTS = ("forward", "grad_input", "grad_weight"), ("float16", "float32"), ("NHWC", "NCHW")
BATCHES = (1, 32, 128)
HEADER = ("layer", "us", "PyTorch us", "faster", "copy us", "of a copy", "variant")
RTOL = {"float32": 1e-4, "float16": 2e-2}  # of the largest element; sums of dw are long


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", default=list(SUITES), choices=(*SUITES, "random"), help="layers")
    parser.add_argument("--direction", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="images; the others have 32 only")
    parser.add_argument("--only", nargs="+", default=[""], help="layers whose label contains one of these strings")
    parser.add_argument("--every", type=int, default=1, help="each n-th of the chosen layers")
    parser.add_argument("--limit", type=int, help="at most so many layers")
    parser.add_argument("--seed", type=int, default=1, help="of the random layers")
    parser.add_argument("--trials", type=int, default=64, help="trials of a layer; 0: the default configuration")
    parser.add_argument("--template", help="tune with this template only; --trials 1 times its default")
    parser.add_argument("--time", type=float, help="seconds, after which no further layer begins")
    parser.add_argument("--db", default="depthwise.db", help="record database")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    if options.trials < 0 or options.every < 1 or min(options.batch) < 1:
        parser.error("--trials must be at least 0, --every and --batch at least 1")
    return options


def chosen(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """The layers that the options select."""
    found = drawn(options) if "random" in options.suite else []
    suites = [suite for suite in options.suite if suite in SUITES]
    for direction, dtype, layout, suite in itertools.product(options.direction, options.dtype, options.layout, suites):
        for batch in options.batch if suite == "mobilenet" else [n for n in options.batch if n == 32]:
            for c, size, kernel, stride, padding, dilation in SUITES[suite]:
                found.append(
                    schedsearch.depthwise_conv2d(
                        n=batch, c=c, h=size, w=size, r=kernel, s=kernel, stride=stride, padding=padding,
                        dilation=dilation, direction=direction, dtype=dtype, layout=layout,
                    )
                )  # fmt: skip
    found = [workload for workload in found if any(text in workload.label for text in options.only)]
    return found[:: options.every][: options.limit]


def drawn(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """Layers from 3x3 to 7x7 with strides, dilations, all directions, formats and layouts, and batches of 1 to 128."""
    draw = random.Random(options.seed)
    found: list[schedsearch.Workload] = []
    while len(found) < RANDOM:
        kernel, size = draw.choice((3, 3, 5, 7)), draw.choice((7, 14, 19, 28, 33, 56, 75, 112))
        stride, dilation = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
        n, c = draw.choice((1, 8, 32, 128)), draw.choice((24, 58, 96, 128, 240, 512, 1024))
        workload = schedsearch.depthwise_conv2d(
            n=n, c=c, h=size, w=size, r=kernel, s=kernel, stride=stride, padding=dilation * (kernel // 2),
            dilation=dilation, direction=draw.choice(options.direction), dtype=draw.choice(options.dtype),
            layout=draw.choice(options.layout),
        )  # fmt: skip
        if workload.min_bytes <= MOST_BYTES:
            found.append(workload)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each layer, and the geometric mean of what PyTorch takes longer."""
    lines = [
        (
            row["label"],
            f"{row['us']:.2f}",
            f"{row['torch_us']:.2f}",
            f"{row['torch_us'] / row['us']:.2f}",
            f"{row['copy_us']:.2f}",
            f"{row['copy_us'] / row['us']:.0%}",
            row["variant"],
        )
        for row in rows
    ]
    faster = [row["torch_us"] / row["us"] for row in rows]
    if rows:
        share = common.geometric_mean([row["copy_us"] / row["us"] for row in rows])
        lines.append(("geometric mean", "", "", f"{common.geometric_mean(faster):.2f}", "", f"{share:.0%}", ""))
        lines.append(("least", "", "", f"{min(faster):.2f}", "", "", ""))
    return common.table(HEADER, lines)


def variants(workload: schedsearch.Workload, tensors: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """PyTorch's ways to compute a layer from (x, weight, dy), as (name, call); cuDNN must be on or off as the name says."""
    import torch

    p, (x, weight, dy) = workload, tensors
    stride, padding, dilation = list(p.stride), list(p.padding[:2]), list(p.dilation)
    backward = torch.ops.aten.convolution_backward
    wanted = [p.direction == "grad_input", p.direction == "grad_weight", False]
    for memory in ("contiguous", "channels_last"):
        form = getattr(torch, f"{memory}_format" if memory == "contiguous" else memory)
        a, w, g = (each.contiguous(memory_format=form) for each in (x, weight, dy))
        if p.direction == "forward":

            def call(a: Any = a, w: Any = w) -> Any:
                return torch.nn.functional.conv2d(a, w, None, stride, padding, dilation, p.c)

            def forced(a: Any = a, w: Any = w) -> Any:
                return torch.cudnn_convolution(a, w, padding, stride, dilation, p.c, True, False, False)

            yield f"{memory} cudnn forced", forced
        else:

            def call(a: Any = a, w: Any = w, g: Any = g) -> Any:
                zeros = [0, 0]
                found = backward(g, a, w, None, stride, padding, dilation, False, zeros, p.c, wanted)
                return found[0 if wanted[0] else 1]

        yield f"{memory} cudnn", call
        yield f"{memory} native", call


def fastest_torch(workload: schedsearch.Workload, sets: Sequence[Sequence[Any]]) -> tuple[float, str]:
    """Microseconds of PyTorch's fastest variant, and its name; variants that PyTorch refuses do not count."""
    import torch

    times: dict[str, float] = {}
    calls = [dict(variants(workload, tensors)) for tensors in sets]
    for name in calls[0]:
        torch.backends.cudnn.enabled = "cudnn" in name
        torch.backends.cudnn.benchmark = True
        try:
            times[name] = common.cold_graph_us([each[name] for each in calls])
        except RuntimeError as error:
            print(f"  {workload.label}: PyTorch refuses {name}: {str(error).splitlines()[0][:90]}")
        finally:
            torch.backends.cudnn.enabled = True
    best = min(times, key=lambda name: times[name])
    return times[best], best


def compare(workload: schedsearch.Workload, kernels: schedsearch.KernelCache, l2_bytes: int) -> dict[str, Any]:
    """Times of our kernel, of PyTorch's fastest variant and of a copy. Raises AssertionError if our result is wrong."""
    import torch

    sets_count = common.sets_needed(workload.min_bytes, l2_bytes)
    dtype, forward = getattr(torch, workload.dtype), workload.replace(direction="forward")
    out_h, out_w = workload.definition.output_hw(workload.params)  # type: ignore[attr-defined]
    shapes = (
        (workload.n, workload.c, workload.h, workload.w),
        (workload.c, 1, workload.r, workload.s),
        (workload.n, workload.c, out_h, out_w),
    )
    form = torch.channels_last if workload.layout == "NHWC" else torch.contiguous_format
    sets = [
        [torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=form) for shape in shapes]
        for _ in range(sets_count)
    ]
    kernel = kernels.kernel(workload)
    names = [spec.name for spec in workload.signature]
    ours = [[dict(zip(("x", "weight", "dy"), tensors))[name] for name in names] for tensors in sets]
    plain = [[_in_memory_order(tensor, spec.axes) for tensor, spec in zip(row, workload.signature)] for row in ours]
    found = _as_torch(kernel(*plain[0]), workload)
    truth = dict(variants(workload, [each.float() for each in sets[0]]))["contiguous native"]
    torch.backends.cudnn.enabled = False
    expected = truth().float()
    torch.backends.cudnn.enabled = True
    error = float((found.float() - expected).abs().max() / expected.abs().max())
    assert error < RTOL[workload.dtype], f"{workload.label}: wrong by {error:.2g} of the largest element"
    us = common.cold_graph_us([kernel.bind(*row) for row in plain])
    torch_us, variant = fastest_torch(workload, sets)
    copy_us = common.copy_us(workload.min_bytes, sets_count)
    return {
        "label": workload.label, "nbytes": workload.min_bytes, "us": us, "torch_us": torch_us, "variant": variant,
        "copy_us": copy_us, "error": error, "flops": forward.flops, "config": dict(kernel.config),
        "template": kernel.provenance.template, "leaves_l2": workload.min_bytes > l2_bytes,
    }  # fmt: skip


def _in_memory_order(tensor: Any, axes: str) -> Any:
    """A logical NCHW or OIHW tensor as a contiguous one with these axes."""
    order = "OIHW" if "O" in axes else "NCHW"
    return tensor.permute([order.index(axis) for axis in axes]).contiguous()


def _as_torch(result: Any, workload: schedsearch.Workload) -> Any:
    """Our result with its axes in PyTorch's order."""
    axes = workload.output.axes
    order = "OIHW" if "O" in axes else "NCHW"
    return result.permute([axes.index(axis) for axis in order])


def main() -> None:
    options = arguments()
    import torch

    started = time.perf_counter()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows: list[dict[str, Any]] = []
    workloads = chosen(options)
    if options.trials:
        limit: dict[str, Any] = {"time_s": options.time * 0.7} if options.time else {}
        if options.template:
            limit["templates"] = [options.template]
        schedsearch.tune(workloads, options.db, target="cuda", trials=options.trials, **limit)
    allow = ("exact",) if options.trials else ("default",)
    kernels = schedsearch.KernelCache(options.db, "cuda", allow=allow)
    kernels.build_ahead(workloads)
    for workload in workloads:
        if options.time and time.perf_counter() - started > options.time:
            print(f"{len(workloads) - len(rows)} layers are left out: the time is over")
            break
        try:
            rows.append(compare(workload, kernels, l2_bytes))
        except SchedsearchError as error:
            print(f"{workload.label}: {error}")
            continue
        common.write(options.out, {"rows": rows})
        print(table(rows[-1:]).splitlines()[2], flush=True)
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
