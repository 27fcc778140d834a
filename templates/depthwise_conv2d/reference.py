"""The reference for depthwise_conv2d: naive kernels in float64 for GPUs and CPUs, and NumPy at single points.

An item of a kernel is one element of an output, or for dw first a part of its sum. Neighbouring threads take neighbouring
columns of an image, or neighbouring channels where these are innermost in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.backend.access import access
from schedsearch.launch import Param, Pointer
from schedsearch.ops import ArgSpec
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.window import output_hw
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Reference, magnitude_of
from schedsearch.templates.conv2d.reference import Conv2dReference
from schedsearch.templates.depthwise_conv2d.convolution import as_convolution
from schedsearch.templates.parts.addressing import plain_strides
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import (
    apply_stages,
    gather,
    reader,
    reference_source,
    reference_step,
    sharer,
    stage_operands,
    stages_function,
    writer,
)
from schedsearch.workload import Workload

# (addresses of the arguments, index of an element in the output's memory) -> (sum, sum of magnitudes)
Sum = Callable[[Any, Any], Any]

_PARTS = "dw_parts"  # workspace of sums and sums of magnitudes
_PART_SUMS = 1 << 18  # that are computed at once


class DepthwiseConv2dReference(Reference[DepthwiseConv2dParams]):
    """The magnitude is the sum of the products' magnitudes after the epilogue, or with the gradient before.

    Integers are those of conv2d with groups of one channel."""

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> KernelSource:
        if not dtype(workload.params.dtype).is_float:
            return Conv2dReference().kernel(as_convolution(workload), target)
        if workload.params.direction == "forward":
            function, items = _forward_kernel(workload, target), workload.output.size
            return reference_source(workload, target, function, items, operands=stage_operands(workload))
        steps = [step for output in workload.outputs for step in _GRADIENTS[output.name](workload, target)]
        last = workload.outputs[-1]
        workspaces = {_PARTS: 16 * _dw_parts(workload)[0] * last.size} if last.name == "dw" else {}
        return KernelSource(target.kind, "native", tuple(steps), workspaces=workspaces)

    def points(
        self,
        workload: Workload[DepthwiseConv2dParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> Any:
        """See `Reference.points`. Omitted scalars have their defaults. Arrays of bfloat16 may hold values or their bits."""
        if not dtype(workload.params.dtype).is_float:
            return Conv2dReference().points(as_convolution(workload), arrays, scalars, flat_indices, output)
        flat = np.asarray(flat_indices, np.int64)
        spec = next(each for each in workload.outputs if each.name == output)
        found = {"y": _y_points, "dx": _dx_points, "dw": _dw_points}[output](workload, arrays, spec, flat)
        if output == "y":
            values = {each.name: float(np.float32(scalars.get(each.name, each.default))) for each in workload.scalars}
            return apply_stages(workload, found, arrays, values, _logical(spec, flat)["C"], flat)
        before = next((each for each in workload.signature if each.aliases == output), None)
        return found if before is None else found + gather(arrays, before, flat)


# ---- kernels


def _forward_kernel(p: Workload[DepthwiseConv2dParams], target: Target) -> Callable[..., None]:
    write, items, finish, y_sum = writer(target), sharer(target), stages_function(p, target), _y_sum(p, target)
    step, extent = _axis_step(p.output, "C"), p.params.c * p.params.multiplier

    def convolve(x: Any, weight: Any, y: Any, magnitude: Any, operands: Any, start: Any, stop: Any) -> None:
        for at in items(start, stop):
            total, bound = y_sum((i64(x), i64(weight)), at)
            total, bound = finish(total, bound, at // step % extent, at, operands)
            write(y, at, total)
            write(magnitude, at, bound)

    def on_cpu(x: Any, weight: Any, y: Any, magnitude: Any, *operands: Any, start: Any, stop: Any) -> None:
        convolve(x, weight, y, magnitude, operands, start, stop)

    def on_cuda(x: Any, weight: Any, y: Any, magnitude: Any, start: Any, stop: Any, *operands: Any) -> None:
        convolve(x, weight, y, magnitude, operands, start, stop)

    return on_cpu if target.kind == "cpu" else on_cuda


def _gradient_writer(p: Workload[DepthwiseConv2dParams], target: Target) -> Callable[[Any, Any, Any, Any, Any, Any], None]:
    """`put(before, out, magnitude, at, total, bound)`; with `accumulate` the gradient before is an addend."""
    write, read = writer(target), reader(target, p.params.dtype)

    def replace(before: Any, out: Any, magnitude: Any, at: Any, total: Any, bound: Any) -> None:
        write(out, at, total)
        write(magnitude, at, bound)

    def add(before: Any, out: Any, magnitude: Any, at: Any, total: Any, bound: Any) -> None:
        old = read(before, at)
        write(out, at, total + old)
        write(magnitude, at, bound + abs(old))

    return add if p.params.accumulate else replace


def _results(p: Workload[DepthwiseConv2dParams], output: ArgSpec) -> list[Param]:
    """The gradient before, which is any pointer unless it counts, the gradient, and its magnitude."""
    before = next((each.name for each in p.signature if each.aliases == output.name), output.name)
    return [Pointer(before), Pointer(output.name), Pointer(magnitude_of(output.name))]


def _dx_steps(p: Workload[DepthwiseConv2dParams], target: Target) -> list[KernelStep]:
    items, dx_sum, put = sharer(target), _dx_sum(p, target), _gradient_writer(p, target)

    def dx_kernel(dy: Any, weight: Any, before: Any, dx: Any, magnitude: Any, start: Any, stop: Any) -> None:
        for at in items(start, stop):
            total, bound = dx_sum((i64(dy), i64(weight)), at)
            put(before, dx, magnitude, at, total, bound)

    output = p.outputs[0]
    return [reference_step(target, dx_kernel, [Pointer("dy"), Pointer("weight"), *_results(p, output)], output.size)]


def _dw_steps(p: Workload[DepthwiseConv2dParams], target: Target) -> list[KernelStep]:
    """There are few filters, and each of their elements is a sum over all images. So the sums are cut into parts."""
    items, part_of, put = sharer(target), _dw_part(p, target), _gradient_writer(p, target)
    read, write, output = reader(target, "float64"), writer(target), p.outputs[-1]
    parts, size = _dw_parts(p)[0], output.size

    def dw_parts(x: Any, dy: Any, sums: Any, start: Any, stop: Any) -> None:
        for item in items(start, stop):
            total, bound = part_of((i64(x), i64(dy)), item % size, item // size)
            write(sums, 2 * item, total)
            write(sums, 2 * item + 1, bound)

    def dw_kernel(sums: Any, before: Any, dw: Any, magnitude: Any, start: Any, stop: Any) -> None:
        for at in items(start, stop):
            total = bound = 0.0
            for part in range(parts):
                total += read(sums, 2 * (part * size + at))
                bound += read(sums, 2 * (part * size + at) + 1)
            put(before, dw, magnitude, at, total, bound)

    return [
        reference_step(target, dw_parts, [Pointer("x"), Pointer("dy"), Pointer(_PARTS)], parts * size),
        reference_step(target, dw_kernel, [Pointer(_PARTS), *_results(p, output)], size),
    ]


def _dw_parts(p: Workload[DepthwiseConv2dParams]) -> tuple[int, int]:
    """(parts of each sum, rows of dy in a part)."""
    rows = p.params.n * output_hw(p.params)[0]
    rows_a_part = -(-rows // max(1, min(rows, _PART_SUMS // p.outputs[-1].size)))
    return -(-rows // rows_a_part), rows_a_part


_GRADIENTS = {"dx": _dx_steps, "dw": _dw_steps}


def _y_sum(workload: Workload[DepthwiseConv2dParams], target: Target) -> Sum:
    p = workload.params
    load = access(target.kind).load(p.dtype)
    n_of, o_of, row_of, column_of = _indices(workload.output, "NCHW")
    (xn, xc, xh, xw), (wo, _, wr, ws) = (
        _byte_strides(workload.signature[0], "NCHW"),
        _byte_strides(workload.signature[1], "OIHW"),
    )
    height, width, kr, ks, multiplier = p.h, p.w, p.r, p.s, p.multiplier
    (stride_h, stride_w), (dilation_h, dilation_w), (top, left) = p.stride, p.dilation, p.padding[:2]

    def y_sum(factors: Any, at: Any) -> Any:
        x, weight = factors
        o = o_of(at)
        x, weight = x + n_of(at) * xn + o // multiplier * xc, weight + o * wo
        total = bound = 0.0
        for r in range(kr):
            h = row_of(at) * stride_h - top + r * dilation_h
            if h < 0 or h >= height:
                continue
            for s in range(ks):
                w = column_of(at) * stride_w - left + s * dilation_w
                if w < 0 or w >= width:
                    continue
                product = load(x + h * xh + w * xw) * load(weight + r * wr + s * ws)
                total += product
                bound += abs(product)
        return total, bound

    return y_sum


def _dx_sum(workload: Workload[DepthwiseConv2dParams], target: Target) -> Sum:
    p = workload.params
    load = access(target.kind).load(p.dtype)
    arguments = {each.name: each for each in workload.signature}
    n_of, c_of, h_of, w_of = _indices(workload.outputs[0], "NCHW")
    (yn, yo, yp, yq), (wo, _, wr, ws) = _byte_strides(arguments["dy"], "NCHW"), _byte_strides(arguments["weight"], "OIHW")
    (oh, ow), kr, ks, multiplier = output_hw(p), p.r, p.s, p.multiplier
    (stride_h, stride_w), (dilation_h, dilation_w), (top, left) = p.stride, p.dilation, p.padding[:2]

    def dx_sum(factors: Any, at: Any) -> Any:
        dy, weight = factors
        o = c_of(at) * multiplier
        dy, weight = dy + n_of(at) * yn + o * yo, weight + o * wo
        total = bound = 0.0
        for r in range(kr):
            p_scaled = h_of(at) + top - r * dilation_h
            if p_scaled < 0 or p_scaled % stride_h != 0 or p_scaled // stride_h >= oh:
                continue
            for s in range(ks):
                q_scaled = w_of(at) + left - s * dilation_w
                if q_scaled < 0 or q_scaled % stride_w != 0 or q_scaled // stride_w >= ow:
                    continue
                pixel = dy + p_scaled // stride_h * yp + q_scaled // stride_w * yq
                tap = weight + r * wr + s * ws
                for j in range(multiplier):
                    product = load(pixel + j * yo) * load(tap + j * wo)
                    total += product
                    bound += abs(product)
        return total, bound

    return dx_sum


def _dw_part(workload: Workload[DepthwiseConv2dParams], target: Target) -> Callable[[Any, Any, Any], Any]:
    """`part_of(factors, at, part)`: the sum over some rows of dy."""
    p = workload.params
    load = access(target.kind).load(p.dtype)
    arguments = {each.name: each for each in workload.signature}
    o_of, _, r_of, s_of = _indices(workload.outputs[-1], "OIHW")
    (xn, xc, xh, xw), (yn, yo, yp, yq) = (_byte_strides(arguments[name], "NCHW") for name in ("x", "dy"))
    height, width, (oh, ow), multiplier = p.h, p.w, output_hw(p), p.multiplier
    (stride_h, stride_w), (dilation_h, dilation_w), (top, left) = p.stride, p.dilation, p.padding[:2]
    rows, rows_a_part = p.n * oh, _dw_parts(workload)[1]

    def part_of(factors: Any, at: Any, part: Any) -> Any:
        x, dy = factors
        o = o_of(at)
        x, dy = x + o // multiplier * xc, dy + o * yo
        total = bound = 0.0
        for number in range(part * rows_a_part, min((part + 1) * rows_a_part, rows)):
            n, row = number // oh, number % oh
            h = row * stride_h - top + r_of(at) * dilation_h
            if h < 0 or h >= height:
                continue
            for column in range(ow):
                w = column * stride_w - left + s_of(at) * dilation_w
                if w >= 0 and w < width:
                    product = load(x + n * xn + h * xh + w * xw) * load(dy + n * yn + row * yp + column * yq)
                    total += product
                    bound += abs(product)
        return total, bound

    return part_of


def _byte_strides(spec: ArgSpec, order: str) -> tuple[int, ...]:
    return tuple(dtype(spec.dtype).nbytes * stride for stride in plain_strides(spec, order))


def _axis_step(spec: ArgSpec, axis: str) -> int:
    return plain_strides(spec, axis)[0]


def _indices(spec: ArgSpec, order: str) -> list[Callable[[Any], Any]]:
    """For each axis in `order` a function `index(position in memory)` for kernels."""

    def along(step: int, extent: int) -> Callable[[Any], Any]:
        def index(at: Any) -> Any:
            return at // step % extent

        return index

    return [along(_axis_step(spec, axis), spec.shape[spec.axes.index(axis)]) for axis in order]


# ---- NumPy


def _logical(spec: ArgSpec, flat: Any) -> dict[str, Any]:
    """The index along every axis of positions in memory."""
    return dict(zip(spec.axes, np.unravel_index(flat, spec.shape)))


def _place(spec: ArgSpec, **index: Any) -> tuple[Any, ...]:
    return tuple(index[axis] for axis in spec.axes)


def _y_points(workload: Workload[DepthwiseConv2dParams], arrays: Mapping[str, Any], spec: ArgSpec, flat: Any) -> Any:
    p = workload.params
    x, weight = workload.signature[:2]
    at = {axis: index[:, None, None] for axis, index in _logical(spec, flat).items()}
    r, s = np.arange(p.r)[None, :, None], np.arange(p.s)[None, None, :]
    h, w = at["H"] * p.stride[0] - p.padding[0] + r * p.dilation[0], at["W"] * p.stride[1] - p.padding[1] + s * p.dilation[1]
    inside = (h >= 0) & (h < p.h) & (w >= 0) & (w < p.w)
    h, w = np.clip(h, 0, p.h - 1), np.clip(w, 0, p.w - 1)
    pixels = gather(arrays, x, _place(x, N=at["N"], C=at["C"] // p.multiplier, H=h, W=w))
    taps = gather(arrays, weight, _place(weight, O=at["C"], I=0, H=r, W=s))
    return np.sum(np.where(inside, pixels, 0.0) * taps, axis=(1, 2))


def _dx_points(workload: Workload[DepthwiseConv2dParams], arrays: Mapping[str, Any], spec: ArgSpec, flat: Any) -> Any:
    p = workload.params
    dy, weight = (next(each for each in workload.signature if each.name == name) for name in ("dy", "weight"))
    (oh, ow), at = output_hw(p), {axis: i[:, None, None, None] for axis, i in _logical(spec, flat).items()}
    j, r, s = np.ogrid[: p.multiplier, : p.r, : p.s]
    # An output reads this element with the tap (r, s) if its window begins r * dilation rows above and s * dilation left.
    rows, row_rest = np.divmod(at["H"] + p.padding[0] - r * p.dilation[0], p.stride[0])
    columns, column_rest = np.divmod(at["W"] + p.padding[1] - s * p.dilation[1], p.stride[1])
    reads = (row_rest == 0) & (column_rest == 0) & (rows >= 0) & (rows < oh) & (columns >= 0) & (columns < ow)
    rows, columns, o = np.clip(rows, 0, oh - 1), np.clip(columns, 0, ow - 1), at["C"] * p.multiplier + j
    gradients = gather(arrays, dy, _place(dy, N=at["N"], C=o, H=rows, W=columns))
    taps = gather(arrays, weight, _place(weight, O=o, I=0, H=r, W=s))
    return np.sum(np.where(reads, gradients, 0.0) * taps, axis=(1, 2, 3))


def _dw_points(workload: Workload[DepthwiseConv2dParams], arrays: Mapping[str, Any], spec: ArgSpec, flat: Any) -> Any:
    """A sum has millions of products. Each channel of dy and x, and each tap's part of them, is cut out of the arrays."""
    p = workload.params
    x, dy = (next(each for each in workload.signature if each.name == name) for name in ("x", "dy"))
    (oh, ow), at, everything = output_hw(p), _logical(spec, flat), slice(None)
    top, left, bottom, right = p.padding
    found = np.empty(len(flat))
    for o in np.unique(at["O"]):
        image = gather(arrays, x, _place(x, N=everything, C=int(o) // p.multiplier, H=everything, W=everything))
        padded = np.pad(image, ((0, 0), (top, bottom), (left, right)))
        gradient = gather(arrays, dy, _place(dy, N=everything, C=int(o), H=everything, W=everything))
        for point in np.flatnonzero(at["O"] == o):
            h, w = at["H"][point] * p.dilation[0], at["W"][point] * p.dilation[1]
            seen = padded[
                :, h : h + (oh - 1) * p.stride[0] + 1 : p.stride[0], w : w + (ow - 1) * p.stride[1] + 1 : p.stride[1]
            ]
            found[point] = np.sum(seen * gradient)
    return found
