"""layout_transform against a device-to-device copy of as many bytes, and PyTorch's permute().contiguous(), in one run.

    python benchmarks/layout_transform.py [--db FILE] [--trials N] [--batch N] [--out FILE.json]

Each shape is tuned first. All times are microseconds with cold operands in a CUDA graph. The copy moves half of the bytes
that the transform reads and writes, so that its reads and writes together are as many. Every tuned result is compared bit
for bit with `schedsearch.pack`. PyTorch has no layout with blocks, so it is compared where both layouts are plain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import common

import schedsearch

LAYOUTS = (("NHWC", "NCHW"), ("NCHW", "NHWC"), ("NCHW", "NCHW32c"), ("NHWC", "NCHW32c"), ("NCHW32c", "NCHW"))
IMAGES = ((64, 56), (100, 56), (256, 28), (512, 7), (3, 224))  # channels, height and width
DTYPES = ("int8", "float16", "float32")
PLAIN = ("NCHW", "NHWC")
HEADER = ("transform", "us", "copy us", "share of a copy", "PyTorch us", "GB/s")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="layout_transform.db", help="record database")
    parser.add_argument("--trials", type=int, default=64, help="trials for each shape")
    parser.add_argument("--batch", type=int, default=128, help="images")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    if options.batch < 1 or options.trials < 1:
        parser.error(f"--batch and --trials must be at least 1, got {options.batch} and {options.trials}")
    return options


def chosen(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """Every layout, image and dtype."""
    return [
        schedsearch.layout_transform(n=options.batch, c=c, h=size, w=size, layout=layout, to=to, dtype=dtype)
        for dtype in DTYPES
        for layout, to in LAYOUTS
        for c, size in IMAGES
    ]


def row_of(workload: schedsearch.Workload, us: float, copy_us: float, torch_us: float | None) -> dict[str, Any]:
    return {"label": workload.label, "nbytes": workload.min_bytes, "us": us, "copy_us": copy_us, "torch_us": torch_us}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each transform, and the least and the mean share of a copy's speed."""
    shares = [row["copy_us"] / row["us"] for row in rows]
    lines: list[tuple[object, ...]] = [
        (
            row["label"],
            f"{row['us']:.1f}",
            f"{row['copy_us']:.1f}",
            f"{share:.0%}",
            "" if row["torch_us"] is None else f"{row['torch_us']:.1f}",
            f"{row['nbytes'] / row['us'] / 1e3:.0f}",
        )
        for row, share in zip(rows, shares)
    ]
    lines.append(("geometric mean", "", "", f"{common.geometric_mean(shares):.0%}", "", ""))
    lines.append(("least", "", "", f"{min(shares):.0%}", "", ""))
    return common.table(HEADER, lines)


def compare(workload: schedsearch.Workload, db: str, l2_bytes: int) -> dict[str, Any]:
    """Times of the best recorded kernel, of a copy and of PyTorch. Raises AssertionError if the kernel's result is wrong."""
    import torch

    spec, dtype = workload.signature[0], getattr(torch, workload.dtype)
    sets = common.sets_needed(workload.min_bytes, l2_bytes)
    xs = [torch.randint(-100, 100, spec.shape, device="cuda").to(dtype) for _ in range(sets)]
    kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",))
    plain = xs[0] if workload.layout == "NCHW" else schedsearch.unpack(xs[0], workload.layout, c=workload.c)
    assert torch.equal(kernel(xs[0]), schedsearch.pack(plain, workload.to)), workload.label
    us = common.cold_graph_us([kernel.bind(x) for x in xs])
    halves = [torch.empty((2, workload.min_bytes // 2), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    copy_us = common.cold_graph_us([lambda half=half: half[1].copy_(half[0]) for half in halves])
    torch_us = None
    if workload.layout in PLAIN and workload.to in PLAIN:
        order = [workload.layout.index(axis) for axis in workload.to]
        torch_us = common.cold_graph_us([lambda x=x: x.permute(order).contiguous() for x in xs])
    return row_of(workload, us, copy_us, torch_us)


def main() -> None:
    options = arguments()
    import torch

    workloads = chosen(options)
    schedsearch.tune(workloads, options.db, target="cuda", trials=options.trials)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows = []
    for workload in workloads:
        rows.append(compare(workload, options.db, l2_bytes))
        torch.cuda.empty_cache()
    common.write(options.out, {"rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
