"""Convolutions of volumes: PyTorch in both layouts, beside image convolutions of ours that compute the same, and a copy.

    python benchmarks/volumes.py --out volumes.json

A 3x3x3 filter over a volume is one of images whose channels are those of three planes (`one image convolution`), as networks
compute it, or the sum of three convolutions of images, each of which adds to the last (`three`). Both are timed without the
slices and the concatenation in front of them. Depthwise layers have only the sum. All run cold in CUDA graphs over sets of
tensors, in default configurations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import common
import torch
from torch.nn import functional

import schedsearch

LAYERS = (  # batch, depth, height and width, channels, outputs, groups
    (2, 8, 28, 256, 256, 1),
    (2, 16, 56, 96, 96, 96),
    (2, 16, 56, 64, 64, 1),
)


def workloads_of(layer: tuple[int, ...]) -> dict[str, schedsearch.Workload]:
    n, d, h, c, k, groups = layer
    size: dict[str, Any] = dict(n=n * d, h=h, w=h, r=3, s=3, padding=1, dtype="float16", layout="NHWC")
    if groups > 1:
        return {"first": schedsearch.depthwise_conv2d(c=c, **size)}
    return {
        "first": schedsearch.conv2d(c=c, k=k, **size),
        "next": schedsearch.conv2d(c=c, k=k, epilogue=["residual"], **size),
        "wide": schedsearch.conv2d(c=3 * c, k=k, **size),
    }


def contenders(layer: tuple[int, ...], kernels: schedsearch.KernelCache) -> dict[str, Callable[[], Any]]:
    """Calls on tensors of their own."""
    n, d, h, c, k, groups = layer
    x = torch.randn(n, c, d, h, h, device="cuda", dtype=torch.float16)
    w = torch.randn(k, c // groups, 3, 3, 3, device="cuda", dtype=torch.float16) / (27 * c // groups) ** 0.5
    xl, wl = (each.contiguous(memory_format=torch.channels_last_3d) for each in (x, w))
    found: dict[str, Callable[[], Any]] = {
        "PyTorch NCDHW": lambda: functional.conv3d(x, w, padding=1, groups=groups),
        "PyTorch NDHWC": lambda: functional.conv3d(xl, wl, padding=1, groups=groups),
        "copy": x.clone,
    }
    bound: dict[str, Any] = {}
    for name, workload in workloads_of(layer).items():
        kernel = kernels.kernel(workload)
        arrays = [torch.randn(spec.shape, device="cuda", dtype=torch.float16) for spec in workload.signature]
        bound[name] = kernel.bind(*arrays)
    if groups > 1:
        found["three image convolutions"] = lambda: [bound["first"]() for _ in range(3)]
    else:
        found["three image convolutions"] = lambda: [bound["first"](), bound["next"](), bound["next"]()]
        found["one image convolution"] = bound["wide"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="builds the kernels, and ends")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="how many of the layers")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    kernels = schedsearch.KernelCache("none.db", "cuda", allow=("default",))
    layers = LAYERS[: args.layers]
    kernels.build_ahead([each for layer in layers for each in workloads_of(layer).values()])
    if args.build:
        return
    rows = []
    for layer in layers:
        n, d, h, c, k, _ = layer
        nbytes = 2 * n * d * h * h * (c + k)
        sets = [contenders(layer, kernels) for _ in range(max(2, min(8, (200 << 20) // nbytes)))]
        us = {name: common.cold_graph_us([each[name] for each in sets]) for name in sets[0]}
        rows.append({"layer": layer, "us": us, "sets": len(sets)})
        print(rows[-1], flush=True)
        common.write(args.out, {"rows": rows})
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
