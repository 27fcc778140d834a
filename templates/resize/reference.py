"""The reference of resize: exact coordinates, and weights in float64."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.resize import ResizeGeometry, ResizeParams, coordinate, nearest, positions
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.casts import f64
from schedsearch.templates.parts.reference import gather, reader, reference_source, sharer, writer
from schedsearch.workload import Workload

_ERRORS = 2.0  # of the weights, beside those of the sum


class ResizeReference(Reference[ResizeParams]):
    """Each item is an element of y. The magnitude is that of the largest of its four pixels."""

    def kernel(self, workload: Workload[ResizeParams], target: Target) -> KernelSource:
        p = workload.params
        _, out_h, out_w, channels = positions(p)
        read, items, height, width = reader(target, p.dtype), sharer(target), p.h, p.w
        write = writer(target, "float64" if dtype_of(p.dtype).is_float else "int64")
        of = nearest if p.mode == "nearest" else coordinate
        down, across = of(p, 0), of(p, 1)
        (a_h, b_h, d_h), (a_w, b_w, d_w) = ((line.factor, line.shift, line.divisor) for line in (down, across))

        def inside(index: Any, size: Any) -> Any:
            return min(max(index, 0), size - 1)

        def pixel(x: Any, plane: Any, row: Any, column: Any, channel: Any) -> Any:
            h, w = inside(row, height), inside(column, width)
            return read(x, ((plane * height + h) * width + w) * channels + channel)

        def copy(x: Any, y: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                place = at // channels
                row, column = place // out_w % out_h, place % out_w
                h, w = (row * a_h + b_h) // d_h, (column * a_w + b_w) // d_w
                write(y, at, pixel(x, place // out_w // out_h, h, w, at % channels))

        def interpolate(x: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                place = at // channels
                plane = place // out_w // out_h
                above_h, above_w = place // out_w % out_h * a_h + b_h, place % out_w * a_w + b_w
                h, w = above_h // d_h, above_w // d_w
                value = largest = 0.0
                for i in range(2):
                    for j in range(2):
                        share_h = f64(above_h - h * d_h) / d_h
                        share_w = f64(above_w - w * d_w) / d_w
                        found = pixel(x, plane, h + i, w + j, at % channels)
                        weight = (share_h if i else 1.0 - share_h) * (share_w if j else 1.0 - share_w)
                        value += weight * found
                        largest = max(largest, abs(found))
                write(y, at, value)
                write(magnitude, at, _ERRORS * largest)

        return reference_source(workload, target, copy if p.mode == "nearest" else interpolate, workload.output.size)

    def points(
        self,
        workload: Workload[ResizeParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """From the definition of the coordinates, as fractions."""
        p = workload.params
        planes, out_h, out_w, channels = positions(p)
        plane, row, column, channel = np.unravel_index(np.asarray(flat_indices, np.int64), (planes, out_h, out_w, channels))
        rows, columns = ([_place(workload, axis, int(each)) for each in at] for axis, at in ((0, row), (1, column)))
        found = np.zeros(len(row))
        for i in range(2 if p.mode == "linear" else 1):
            for j in range(2 if p.mode == "linear" else 1):
                h = np.clip([_chosen(workload, each) + i for each in rows], 0, p.h - 1)
                w = np.clip([_chosen(workload, each) + j for each in columns], 0, p.w - 1)
                weights = [float(_weight(workload, a, i) * _weight(workload, b, j)) for a, b in zip(rows, columns)]
                values = gather(arrays, workload.signature[0], ((plane * p.h + h) * p.w + w) * channels + channel)
                found += np.array(weights) * values
        return found if dtype_of(p.dtype).is_float else found.astype(np.int64)


def pixels(
    p: Workload[ResizeGeometry], size: int, out: int, scale: Fraction | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What every position along an axis of y is made of, by the definition.

    Args:
        p: mode, coordinates and rounding.
        size, out: of x and y along the axis.
        scale: if it is given.

    Returns:
        Pixels of x, int64, and their weights, float64: both (1, out) of mode nearest, (2, out) of mode linear.
    """
    places = [_at(p, size, out, scale, position) for position in range(out)]
    both = range(2 if p.params.mode == "linear" else 1)
    chosen = np.array([[min(max(_chosen(p, each) + i, 0), size - 1) for each in places] for i in both], np.int64)
    return chosen, np.array([[float(_weight(p, each, i)) for each in places] for i in both])


def _place(workload: Workload[ResizeParams], axis: int, position: int) -> Fraction:
    p = workload.params
    size, out = ((p.h, p.oh), (p.w, p.ow))[axis]
    return _at(workload, size, out, Fraction(p.scale[axis]) if p.scale else None, position)


def _at(workload: Workload[ResizeGeometry], size: int, out: int, given: Fraction | None, position: int) -> Fraction:
    """The coordinate in x of a position of y."""
    p = workload.params
    scale, half = given or Fraction(out, size), Fraction(1, 2)
    if p.coordinates == "asymmetric":
        return position / scale
    if p.coordinates == "align_corners":
        return Fraction(position * (size - 1), out - 1) if out > 1 else Fraction(0)
    if p.coordinates == "pytorch_half_pixel" and out == 1:
        return Fraction(0)
    return (position + half) / scale - half


def _chosen(workload: Workload[ResizeGeometry], place: Fraction) -> int:
    """The nearest pixel, or the one before the coordinate."""
    p = workload.params
    below = place.numerator // place.denominator
    if p.mode == "linear" or p.rounding == "floor":
        return below
    if p.rounding == "ceil":
        return below + (place > below)
    rest, half = place - below, Fraction(1, 2)
    return below + (rest > half or (rest == half and p.rounding == "round_prefer_ceil"))


def _weight(p: Workload[ResizeGeometry], place: Fraction, second: int) -> Fraction:
    if p.params.mode == "nearest":
        return Fraction(1)
    rest = place - place.numerator // place.denominator
    return rest if second else 1 - rest
