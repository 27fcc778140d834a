"""The reference for conv2d: a naive kernel in float64 or int64 for GPUs and CPUs, and NumPy at single points.

A thread computes one pixel of four output channels, so it reads x once for four products. Neighbouring threads take
neighbouring pixels. They share their weights, and with NCHW their reads are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.backend.access import access
from schedsearch.ops import ArgSpec
from schedsearch.ops.conv2d import CONV2D, Conv2dParams, first_channel
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.ops.layout import Layout
from schedsearch.target import Target
from schedsearch.template import KernelSource
from schedsearch.templates.parts.addressing import offset_along, plain_strides
from schedsearch.templates.parts.casts import f64, i64
from schedsearch.templates.parts.reference import (
    apply_stages,
    computed_output,
    gather,
    of_two_factors,
    reference_source,
    sharer,
    stage_operands,
    stages_function,
    truth_writer,
    zero_points_function,
)
from schedsearch.templates.parts.sum_reference import SumReference, is_float
from schedsearch.workload import Workload

_CHANNELS = 4  # output channels per thread; the kernel has one line for each


class Conv2dReference(SumReference[Conv2dParams]):
    def kernel(self, workload: Workload[Conv2dParams], target: Target) -> KernelSource:
        p = workload.params
        groups_of_channels = math.ceil(p.k // p.groups / _CHANNELS)
        oh, ow = CONV2D.output_hw(p)
        items = p.n * p.groups * groups_of_channels * oh * ow
        function = _kernel(workload, target)
        return reference_source(workload, target, function, items, operands=stage_operands(workload))

    def sums(
        self, workload: Workload[Conv2dParams], arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any
    ) -> Any:
        return _sums(workload, arrays, scalars, flat)


def _kernel(workload: Workload[Conv2dParams], target: Target) -> Callable[..., None]:
    """f(x, weight, y, magnitude, operands of the epilogue, start, stop) for addresses, float32s, and a range of items."""
    p = workload.params
    load, load_weight = access(target.kind).load(p.dtype), access(target.kind).load(p.weight_dtype)
    integers, rounded = not dtype(p.dtype).is_float, is_float(workload.output)
    zero = 0 if integers else 0.0
    write, items = truth_writer(target, rounded), sharer(target)
    finish, zero_points = stages_function(workload, target), zero_points_function(workload)
    place = _place(workload)
    x_arg, w_arg, y_arg = workload.signature[0], workload.signature[1], computed_output(workload)
    x_bytes, weight_bytes = dtype(p.dtype).nbytes, dtype(p.weight_dtype).nbytes
    xn, _, xh, xw = (x_bytes * stride for stride in plain_strides(x_arg, "NCHW"))
    _, _, wr, ws = (weight_bytes * stride for stride in plain_strides(w_arg, "OIHW"))
    yn, _, yp, yq = plain_strides(y_arg, "NCHW")  # elements
    x_channel, y_channel = offset_along("C", x_arg, x_bytes), offset_along("C", y_arg)
    filter_offset, weight_channel = offset_along("O", w_arg, weight_bytes), offset_along("I", w_arg, weight_bytes)
    oh, ow = CONV2D.output_hw(p)
    height, width, kr, ks, of_slice = p.h, p.w, p.r, p.s, first_channel(p)
    groups, reduced, outputs = p.groups, p.c // p.groups, p.k // p.groups
    quads = math.ceil(outputs / _CHANNELS)
    stride_h, stride_w = p.stride
    dilation_h, dilation_w = p.dilation
    top, left = p.padding[:2]

    def convolve(x: Any, weight: Any, y: Any, magnitude: Any, operands: Any, start: Any, stop: Any) -> None:
        x, weight = i64(x), i64(weight)
        x_zero, weight_zero = zero_points(operands)
        for item in items(start, stop):
            q = item % ow
            row = item // ow % oh
            rest = item // (ow * oh)
            k0 = rest % quads * _CHANNELS
            group = rest // quads % groups
            n = rest // (quads * groups)
            # Channels past the group's last one repeat it and are not stored.
            first = group * outputs + k0
            w0 = weight + filter_offset(first)
            w1 = weight + filter_offset(first + min(1, outputs - 1 - k0))
            w2 = weight + filter_offset(first + min(2, outputs - 1 - k0))
            w3 = weight + filter_offset(first + min(3, outputs - 1 - k0))
            sum0 = sum1 = sum2 = sum3 = zero
            bound0 = bound1 = bound2 = bound3 = zero
            for r in range(kr):
                h = row * stride_h - top + r * dilation_h
                if h < 0 or h >= height:
                    continue
                for s in range(ks):
                    w = q * stride_w - left + s * dilation_w
                    if w < 0 or w >= width:
                        continue
                    x_pixel = x + n * xn + h * xh + w * xw
                    tap = r * wr + s * ws
                    for c in range(reduced):
                        value = load(x_pixel + x_channel(of_slice + group * reduced + c)) - x_zero
                        w_at = tap + weight_channel(c)
                        product = value * (load_weight(w0 + w_at) - weight_zero)
                        sum0 += product
                        bound0 += abs(product)
                        product = value * (load_weight(w1 + w_at) - weight_zero)
                        sum1 += product
                        bound1 += abs(product)
                        product = value * (load_weight(w2 + w_at) - weight_zero)
                        sum2 += product
                        bound2 += abs(product)
                        product = value * (load_weight(w3 + w_at) - weight_zero)
                        sum3 += product
                        bound3 += abs(product)
            for j in range(min(_CHANNELS, outputs - k0)):
                total = sum0 if j == 0 else sum1 if j == 1 else sum2 if j == 2 else sum3
                bound = bound0 if j == 0 else bound1 if j == 1 else bound2 if j == 2 else bound3
                k = group * outputs + k0 + j
                at = n * yn + y_channel(k) + row * yp + q * yq
                # Sums of integers are exact in float64, too.
                value, bound = finish(f64(total), f64(bound), k, at, operands)
                at = place(at, n, k, row, q)
                write(y, magnitude, at, value, bound)

    return of_two_factors(convolve, target, rounded)


def _place(p: Workload[Conv2dParams]) -> Callable[..., Any]:
    """`place(at, n, k, row, column)`: the offset in y of the element at offset `at` of the output before depth_to_space."""
    shuffle = pixel_shuffle(p.params.epilogue, p.params.k)
    if shuffle is None:
        return lambda at, n, k, row, column: at
    crd, block, pixels, channels = shuffle.mode == "CRD", shuffle.block, shuffle.pixels, shuffle.out_channels
    yn, yc, yp, yq = plain_strides(p.output, "NCHW")

    def place(at: Any, n: Any, k: Any, row: Any, column: Any) -> Any:
        channel = k // pixels if crd else k % channels
        pixel = k % pixels if crd else k // channels
        return n * yn + channel * yc + (row * block + pixel // block) * yp + (column * block + pixel % block) * yq

    return place


# ---- NumPy


def _sums(workload: Workload[Conv2dParams], arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any) -> Any:
    p = workload.params
    n, k, row, q = _logical(workload.output, flat)
    if shuffle := pixel_shuffle(p.epilogue, p.k):
        k, row, q = shuffle.source(k, row, q)
        flat = np.ravel_multi_index(tuple({"N": n, "C": k, "H": row, "W": q}[axis] for axis in p.output_layout),
                                    computed_output(workload).shape)  # fmt: skip
    reduced, outputs = p.c // p.groups, p.k // p.groups
    x, weight = workload.signature[:2]
    channel = first_channel(p) + (k // outputs * reduced)[:, None] + np.arange(reduced)
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
    pixels = gather(arrays, x, _indices(x, axes_x)) - scalars.get("x_zero_point", 0.0)
    filters = gather(arrays, weight, _indices(weight, axes_w)) - scalars.get("weight_zero_point", 0.0)
    y = np.einsum("pcrs,pcrs->p", np.where(inside, pixels, 0.0), filters)
    return apply_stages(workload, y, arrays, scalars, k, flat)


def _logical(spec: ArgSpec, flat: Any) -> tuple[Any, ...]:
    """Indices along N, C, H, W of positions in memory."""
    layout = Layout.parse(spec.axes)
    place = dict(zip(layout.dimensions, np.unravel_index(flat, spec.shape)))
    place["C"] = place["C"] * layout.block("C") + place.get("c", 0)
    return tuple(place[axis] for axis in "NCHW")


def _indices(spec: ArgSpec, logical: Mapping[str, Any]) -> tuple[Any, ...]:
    """The index along each dimension in memory."""
    layout = Layout.parse(spec.axes)
    outer = tuple(logical[axis] // layout.block(axis) for axis in layout.axes)
    return (*outer, *(logical[axis] % layout.block(axis) for axis, _ in layout.blocks))
