"""The reference of pool2d: every window in float64, element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import dtype
from schedsearch.ops.images import planes_of
from schedsearch.ops.pool2d import Pool2dParams, pooled_hw
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import gather, half_to_even, reader, reference_source, sharer, writer
from schedsearch.workload import Workload

_ERRORS = 2.0  # of an average, beside those of the sum: the quotient's


class Pool2dReference(Reference[Pool2dParams]):
    """Each item is an element of y. The magnitude is the average of the pixels' magnitudes."""

    def kernel(self, workload: Workload[Pool2dParams], target: Target) -> KernelSource:
        is_float = dtype(workload.params.dtype).is_float
        items, write = sharer(target), writer(target, "float64" if is_float else "int64")
        largest, average = _largest(workload, target), _average(workload, target)

        def pool_max(x: Any, y: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                write(y, at, largest(x, at))

        def pool_average(x: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                value, bound = average(x, at)
                write(y, at, value)
                write(magnitude, at, _ERRORS * bound)

        def pool_average_integers(x: Any, y: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                write(y, at, i64(half_to_even(average(x, at)[0])))

        function: Callable[..., None] = pool_max
        if workload.params.mode == "average":
            function = pool_average if is_float else pool_average_integers
        return reference_source(workload, target, function, workload.output.size)

    def points(
        self,
        workload: Workload[Pool2dParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        p = workload.params
        planes, channels = planes_of(p)
        out_h, out_w = pooled_hw(p)
        plane, row, column, channel = (
            each[:, None, None]
            for each in np.unravel_index(np.asarray(flat_indices, np.int64), (planes, out_h, out_w, channels))
        )
        h = row * p.stride[0] - p.padding[0] + np.arange(p.r)[None, :, None] * p.dilation[0]
        w = column * p.stride[1] - p.padding[1] + np.arange(p.s)[None, None, :] * p.dilation[1]
        inside = (h >= 0) & (h < p.h) & (w >= 0) & (w < p.w)
        clipped_h, clipped_w = np.clip(h, 0, p.h - 1), np.clip(w, 0, p.w - 1)
        values = gather(arrays, workload.signature[0], ((plane * p.h + clipped_h) * p.w + clipped_w) * channels + channel)
        if p.mode == "max":
            found = np.max(np.where(inside, values, -np.inf), axis=(1, 2))
        else:
            counted = inside if not p.count_include_pad else (h < p.h + p.padding[2]) & (w < p.w + p.padding[3])
            found = np.sum(np.where(inside, values, 0.0), axis=(1, 2)) / np.sum(counted, axis=(1, 2))
        rounded: np.ndarray[Any, np.dtype[Any]] = found if dtype(p.dtype).is_float else np.rint(found).astype(np.int64)
        return rounded


def _window(workload: Workload[Pool2dParams], target: Target) -> Callable[..., Any]:
    """`each(x, at, i, l) -> (value, inside, counted)` for kernels: a pixel of the window of element `at` of y."""
    p = workload.params
    read = reader(target, p.dtype)
    _, channels = planes_of(p)
    out_h, out_w = pooled_hw(p)
    height, width, (stride_h, stride_w), (dilation_h, dilation_w) = p.h, p.w, p.stride, p.dilation
    top, left, bottom, right = p.padding
    with_padding = p.count_include_pad

    def pixel(x: Any, at: Any, i: Any, j: Any) -> Any:
        place = at // channels
        h = place // out_w % out_h * stride_h - top + i * dilation_h
        w = place % out_w * stride_w - left + j * dilation_w
        inside = h >= 0 and h < height and w >= 0 and w < width
        value = 0.0
        if inside:
            plane = place // out_w // out_h
            value = float(read(x, ((plane * height + h) * width + w) * channels + at % channels))
        counted = inside or (with_padding and h < height + bottom and w < width + right)
        return value, inside, counted

    return pixel


def _largest(workload: Workload[Pool2dParams], target: Target) -> Callable[[Any, Any], Any]:
    p = workload.params
    pixel, kernel_h, kernel_w = _window(workload, target), p.r, p.s
    is_float = dtype(p.dtype).is_float

    def largest(x: Any, at: Any) -> Any:
        found = -np.inf
        for i in range(kernel_h):
            for j in range(kernel_w):
                value, inside, _ = pixel(x, at, i, j)
                if inside and value > found:
                    found = value
        return found

    def largest_integer(x: Any, at: Any) -> Any:
        return i64(largest(x, at))

    return largest if is_float else largest_integer


def _average(p: Workload[Pool2dParams], target: Target) -> Callable[[Any, Any], Any]:
    pixel, kernel_h, kernel_w = _window(p, target), p.params.r, p.params.s

    def average(x: Any, at: Any) -> Any:
        total = bound = 0.0
        count = 0
        for i in range(kernel_h):
            for j in range(kernel_w):
                value, _, counted = pixel(x, at, i, j)
                total += value
                bound += abs(value)
                count += counted
        return total / count, bound / count

    return average
