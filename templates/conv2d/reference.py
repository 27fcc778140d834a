"""The reference for conv2d: a naive float64 kernel for GPUs and CPUs, and NumPy at single points.

A thread computes one pixel of four output channels, so it reads x once for four products. Neighbouring threads take
neighbouring pixels. They share their weights, and with NCHW their reads are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.access import access
from schedsearch.ops.dtypes import dtype
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.reference import (
    apply_stages,
    gather,
    reference_source,
    sharer,
    stage_operands,
    stages_function,
    writer,
)
from schedsearch.workload import Workload

_CHANNELS = 4  # output channels per thread; the kernel has one line for each
_POINTS_ELEMENTS = 1 << 22  # products that `points` holds at once


class Conv2dReference(Reference):
    """The magnitude is the sum of |x| |weight| after the epilogue of `schedsearch.templates.parts.reference`."""

    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        groups_of_channels = math.ceil(workload.k // workload.groups / _CHANNELS)
        oh, ow = workload.definition.output_hw(workload.params)  # type: ignore[attr-defined]
        items = workload.n * workload.groups * groups_of_channels * oh * ow
        function = _kernel(workload, target)
        return reference_source(workload, target, function, items, operands=stage_operands(workload))

    def points(
        self,
        workload: Workload,
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """See `Reference.points`. Omitted scalars have their defaults. Arrays of bfloat16 may hold values or their bits."""
        indices = np.asarray(flat_indices, dtype=np.int64)
        per_point = workload.work.reduction
        chunk = max(_POINTS_ELEMENTS // per_point, 1)
        values = {scalar.name: float(np.float32(scalars.get(scalar.name, scalar.default))) for scalar in workload.scalars}
        parts = [_points(workload, arrays, values, indices[at : at + chunk]) for at in range(0, len(indices), chunk)]
        return np.concatenate(parts) if parts else np.empty(0)


def _kernel(p: Workload, target: Target) -> Callable[..., None]:
    """f(x, weight, y, magnitude, operands of the epilogue, start, stop) for addresses, float32s, and a range of items."""
    load, write, items = access(target.kind).load(p.dtype), writer(target), sharer(target)
    finish = stages_function(p, target)
    x_arg, w_arg, y_arg = p.signature[0], p.signature[1], p.output
    size = dtype(p.dtype).nbytes
    xn, xc, xh, xw = (size * stride for stride in x_arg.strides("NCHW"))  # bytes
    wo, wi, wr, ws = (size * stride for stride in w_arg.strides("OIHW"))
    yn, yk, yp, yq = y_arg.strides("NCHW")  # elements
    oh, ow = p.definition.output_hw(p.params)  # type: ignore[attr-defined]
    height, width, kr, ks = p.h, p.w, p.r, p.s
    groups, reduced, outputs = p.groups, p.c // p.groups, p.k // p.groups
    quads = math.ceil(outputs / _CHANNELS)
    stride_h, stride_w = p.stride
    dilation_h, dilation_w = p.dilation
    top, left = p.padding[:2]

    def convolve(x: Any, weight: Any, y: Any, magnitude: Any, operands: Any, start: Any, stop: Any) -> None:
        x, weight = types.int64(x), types.int64(weight)
        for item in items(start, stop):
            q = item % ow
            row = item // ow % oh
            rest = item // (ow * oh)
            k0 = rest % quads * _CHANNELS
            group = rest // quads % groups
            n = rest // (quads * groups)
            # Channels past the group's last one repeat it and are not stored.
            w0 = weight + (group * outputs + k0) * wo
            w1 = w0 + min(1, outputs - 1 - k0) * wo
            w2 = w0 + min(2, outputs - 1 - k0) * wo
            w3 = w0 + min(3, outputs - 1 - k0) * wo
            sum0 = sum1 = sum2 = sum3 = 0.0
            bound0 = bound1 = bound2 = bound3 = 0.0
            for r in range(kr):
                h = row * stride_h - top + r * dilation_h
                if h < 0 or h >= height:
                    continue
                for s in range(ks):
                    w = q * stride_w - left + s * dilation_w
                    if w < 0 or w >= width:
                        continue
                    x_at = x + n * xn + group * reduced * xc + h * xh + w * xw
                    w_at = r * wr + s * ws
                    for _ in range(reduced):
                        value = load(x_at)
                        product = value * load(w0 + w_at)
                        sum0 += product
                        bound0 += abs(product)
                        product = value * load(w1 + w_at)
                        sum1 += product
                        bound1 += abs(product)
                        product = value * load(w2 + w_at)
                        sum2 += product
                        bound2 += abs(product)
                        product = value * load(w3 + w_at)
                        sum3 += product
                        bound3 += abs(product)
                        x_at += xc
                        w_at += wi
            for j in range(min(_CHANNELS, outputs - k0)):
                total = sum0 if j == 0 else sum1 if j == 1 else sum2 if j == 2 else sum3
                bound = bound0 if j == 0 else bound1 if j == 1 else bound2 if j == 2 else bound3
                k = group * outputs + k0 + j
                at = n * yn + k * yk + row * yp + q * yq
                total, bound = finish(total, bound, k, at, operands)
                write(y, at, total)
                write(magnitude, at, bound)

    def on_cpu(x: Any, weight: Any, y: Any, magnitude: Any, *operands: Any, start: Any, stop: Any) -> None:
        convolve(x, weight, y, magnitude, operands, start, stop)

    def on_cuda(x: Any, weight: Any, y: Any, magnitude: Any, start: Any, stop: Any, *operands: Any) -> None:
        convolve(x, weight, y, magnitude, operands, start, stop)

    return on_cpu if target.kind == "cpu" else on_cuda


# ---- NumPy


def _points(p: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any) -> Any:
    place = dict(zip(p.output.axes, np.unravel_index(flat, p.output.shape)))
    n, k, row, q = (place[axis] for axis in "NCHW")
    reduced, outputs = p.c // p.groups, p.k // p.groups
    x, weight = p.signature[:2]
    channel = (k // outputs * reduced)[:, None] + np.arange(reduced)
    h = (row * p.stride[0] - p.padding[0])[:, None] + np.arange(p.r) * p.dilation[0]
    w = (q * p.stride[1] - p.padding[1])[:, None] + np.arange(p.s) * p.dilation[1]
    inside = ((h >= 0) & (h < p.h))[:, None, :, None] & ((w >= 0) & (w < p.w))[:, None, None, :]
    axes_x = {
        "N": n[:, None, None, None],
        "C": channel[:, :, None, None],
        "H": np.clip(h, 0, p.h - 1)[:, None, :, None],
        "W": np.clip(w, 0, p.w - 1)[:, None, None, :],
    }
    axes_w = {
        "O": k[:, None, None, None],
        "I": np.arange(reduced)[None, :, None, None],
        "H": np.arange(p.r)[None, None, :, None],
        "W": np.arange(p.s)[None, None, None, :],
    }
    pixels = gather(arrays, x, tuple(axes_x[axis] for axis in x.axes))
    filters = gather(arrays, weight, tuple(axes_w[axis] for axis in weight.axes))
    y = np.einsum("pcrs,pcrs->p", np.where(inside, pixels, 0.0), filters)
    return apply_stages(p, y, arrays, scalars, k, flat)
