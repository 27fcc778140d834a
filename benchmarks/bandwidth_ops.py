"""Pools, expressions, softmax and resize against PyTorch and torch.compile, and a copy of as many bytes, in one run.

    python benchmarks/bandwidth_ops.py                 the defaults, without tuning
    python benchmarks/bandwidth_ops.py --trials 32     tuned
    python benchmarks/bandwidth_ops.py --only pool2d --no-compile --out pools.json

Needs a CUDA device and PyTorch. Every case is timed cold in a CUDA graph: all operands rotate over sets that together exceed
2.5x L2. PyTorch computes on the same memory: images in NHWC are channels_last tensors. The copy moves half of the bytes that
a case must read and write. Results are compared with PyTorch's in float32. --out is written after every case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common

import schedsearch
from schedsearch.errors import SchedsearchError

Call = Callable[..., Any]
HEADER = ("case", "us", "PyTorch us", "compiled us", "copy us", "of a copy")
TOLERANCE = 2e-2  # of the largest element, for float16


def _max_pool(x: Any) -> Any:
    import torch

    return torch.nn.functional.max_pool2d(x, 3, 2, 1)


def _average_pool(x: Any) -> Any:
    import torch

    return torch.nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _global_average(x: Any) -> Any:
    import torch

    return torch.nn.functional.adaptive_avg_pool2d(x, 1)


def _relu_add(a: Any, b: Any) -> Any:
    import torch

    return torch.relu(a + b)


def _silu_scaled(a: Any, s: Any) -> Any:
    import torch

    return torch.nn.functional.silu(a) * s


def _softmax(x: Any) -> Any:
    import torch

    return torch.softmax(x, -1)


def _twice(x: Any) -> Any:
    import torch

    return torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest")


def _twice_linear(x: Any) -> Any:
    import torch

    return torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def cases() -> Mapping[schedsearch.Workload, Call]:
    """What PyTorch calls for each workload, on images in the order NCHW."""
    pool, elementwise = schedsearch.pool2d, schedsearch.elementwise
    large = dict(n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1)
    head = dict(c=2048, h=7, w=7, r=7, s=7, mode="average")
    image, small = (32, 56, 56, 256), dict(n=1, c=128, h=180, w=320, oh=360, ow=640)
    return {
        pool(**large): _max_pool,
        pool(**large, layout="NCHW"): _max_pool,
        pool(n=32, c=192, h=35, w=35, r=3, s=3, padding=1, mode="average"): _average_pool,
        pool(n=32, **head): _global_average,
        pool(n=1, **head): _global_average,
        pool(n=32, **head, layout="NCHW"): _global_average,
        elementwise(y=image, expression="relu(a + b)"): _relu_add,
        elementwise(y=image, expression="silu(a) * s", inputs=["a", ("s", "float16", (32, 1, 1, 256))]): _silu_scaled,
        schedsearch.softmax(x=(32, 1000)): _softmax,
        schedsearch.softmax(x=(8192, 4096)): _softmax,
        schedsearch.resize(**small, coordinates="asymmetric", rounding="floor"): _twice,
        schedsearch.resize(**small, mode="linear"): _twice_linear,
        schedsearch.resize(**small, mode="linear", layout="NCHW"): _twice_linear,
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose label contains this text")
    parser.add_argument("--trials", type=int, default=0, help="trials of a case; 0: the default configuration")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--db", default="bandwidth_ops.db", help="record database")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    if options.trials < 0:
        parser.error("--trials must be at least 0")
    return options


def compare(workload: schedsearch.Workload, call: Call, options: argparse.Namespace, l2_bytes: int) -> dict[str, Any]:
    """Times of our kernel, of PyTorch and of a copy. Raises AssertionError if our result is wrong."""
    import torch

    count = common.sets_needed(workload.min_bytes, l2_bytes)
    sets = [
        [torch.randn(each.shape, device="cuda").to(getattr(torch, each.dtype)) for each in workload.signature]
        for _ in range(count)
    ]
    allow = ("exact",) if options.trials else ("default",)
    kernel = schedsearch.compile(workload, options.db, target="cuda", allow=allow)
    theirs = [[_logical(tensor, workload) for tensor in tensors] for tensors in sets]
    expected = call(*(tensor.float() for tensor in theirs[0]))
    found = _logical(kernel(*sets[0]), workload).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE, f"{workload.label}: wrong by {error:.2g} of the largest element"
    row = {
        "label": workload.label, "nbytes": workload.min_bytes, "error": error, "config": dict(kernel.config),
        "us": common.cold_graph_us([kernel.bind(*tensors) for tensors in sets]),
        "torch_us": common.cold_graph_us([lambda tensors=tensors: call(*tensors) for tensors in theirs]),
        "copy_us": common.copy_us(workload.min_bytes, count),
    }  # fmt: skip
    if not options.no_compile:
        compiled = torch.compile(call, dynamic=False)
        row["compiled_us"] = common.cold_graph_us([lambda tensors=tensors: compiled(*tensors) for tensors in theirs])
    return row


def _logical(tensor: Any, workload: schedsearch.Workload) -> Any:
    """A view in PyTorch's order NCHW of what lies in memory as NHWC."""
    last = workload.params.get("layout", "NHWC" if workload.op == "elementwise" else "") == "NHWC"
    return tensor.permute(0, 3, 1, 2) if last and tensor.dim() == 4 else tensor


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case."""
    lines = [
        (
            row["label"],
            f"{row['us']:.2f}",
            f"{row['torch_us']:.2f}",
            f"{row['compiled_us']:.2f}" if "compiled_us" in row else "",
            f"{row['copy_us']:.2f}",
            f"{row['copy_us'] / row['us']:.0%}",
        )
        for row in rows
    ]
    return common.table(HEADER, lines)


def main() -> None:
    options = arguments()
    import torch

    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    chosen = {workload: call for workload, call in cases().items() if not options.only or options.only in workload.label}
    if options.trials:
        schedsearch.tune(list(chosen), options.db, target="cuda", trials=options.trials)
    rows: list[dict[str, Any]] = []
    for workload, call in chosen.items():
        try:
            rows.append(compare(workload, call, options, l2_bytes))
        except SchedsearchError as error:
            print(f"{workload.label}: {error}")
            continue
        common.write(options.out, {"rows": rows})
        print(table(rows[-1:]).splitlines()[2], flush=True)
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
