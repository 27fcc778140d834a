"""Where a position of y lies in x, along one axis, as functions for kernels. All arithmetic is exact, in integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.resize import Line, ResizeParams, coordinate, nearest
from schedsearch.templates.parts.casts import f32, i32, u32, u64
from schedsearch.workload import Workload


def nearest_pixel(workload: Workload[ResizeParams], axis: int) -> Callable[[Any], Any]:
    """`pixel(position)`: the nearest pixel of x, int32."""
    p = workload.params
    last, floor = (p.h, p.w)[axis] - 1, _floor(nearest(p, axis), (p.oh, p.ow)[axis])

    def pixel(position: Any) -> Any:
        whole, _ = floor(position)
        return i32(min(max(whole, 0), last))

    return pixel


def pixels_around(workload: Workload[ResizeParams], axis: int) -> Callable[[Any], Any]:
    """`around(position)`: the two pixels beside the coordinate, int32, and the weight of the second one, float32."""
    p = workload.params
    line = coordinate(p, axis)
    last, floor, divisor = (p.h, p.w)[axis] - 1, _floor(line, (p.oh, p.ow)[axis]), f32(line.divisor)

    def around(position: Any) -> Any:
        whole, rest = floor(position)
        weight = f32(f32(rest) / divisor)
        return i32(min(max(whole, 0), last)), i32(min(max(whole + 1, 0), last)), weight

    return around


def between(a: Any, b: Any, share: Any) -> Any:
    """a + share * (b - a), with weights, so that a share of 0 or 1 gives a or b exactly."""
    return f32(f32(a * f32(f32(1) - share)) + f32(b * share))


def _floor(line: Line, positions: int) -> Callable[[Any], Any]:
    """`floor(position)`: the floor of a line, int32, and what is left of the division.

    `before` integers are added first and subtracted afterwards, so that the division has no sign.
    """
    before = max(-(line.shift // line.divisor), 0)
    factor, shift, divisor = line.factor, line.shift + before * line.divisor, line.divisor
    number = u32 if factor * (positions - 1) + shift < 2**32 else u64

    def floor(position: Any) -> Any:
        above = number(number(position) * number(factor) + number(shift))
        whole = number(above // number(divisor))
        return i32(i32(whole) - before), number(above - whole * number(divisor))

    return floor
