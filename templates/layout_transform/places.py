"""Where the parts of a permutation are in x and y, as functions for kernels of both kinds of target.

A kernel's work item is a value of all outer factors together with a tile of the two innermost ones. Its number gives, by
divisions by constants, offsets in both arrays and the indices along ragged axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from schedsearch.ops.movement import Factor
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.parts.casts import i32, i64, u32

Digits = Callable[[Any], Any]


def tiles_along(run: Factor, elements: int) -> int:
    """Tiles of `elements` elements along a factor."""
    return -(-run.extent // elements)


def tile_count(p: Permutation, columns: int, rows: int) -> int:
    """Tiles of `columns` elements of x's innermost factor by `rows` elements of y's."""
    outer = math.prod(factor.extent for factor in p.outer)
    return outer * tiles_along(p.x_column, columns) * tiles_along(p.y_run, rows)


def placer(p: Permutation, tile_columns: int, tile_rows: int, along_y: bool) -> Callable[[Any], Any]:
    """`place(tile)`: offsets of its start in x and y, in elements; rows to read and to write; columns to read and to write.

    Args:
        tile_columns, tile_rows: elements of a tile along x's innermost factor and along y's.
        along_y: neighbouring tiles follow one another along y's innermost factor, not x's.
    """
    a, b = p.x_column, p.y_run
    fast, slow = tiles_along(a, tile_columns), tiles_along(b, tile_rows)
    if along_y:
        fast, slow = slow, fast
    a_x, a_y, b_x, b_y = a.x, a.y, b.x, b.y
    offsets = offsets_of(p.outer)
    columns, rows = limits_of(p, a, p.outer), limits_of(p, b, p.outer)
    read_of, written_of = inside(p, p.outer, {a.axis, b.axis})

    def place(number: Any) -> Any:
        rest, first = divided(u32(number), fast)
        outer, second = divided(rest, slow)
        if along_y:
            column, row = i32(second * tile_columns), i32(first * tile_rows)
        else:
            column, row = i32(first * tile_columns), i32(second * tile_rows)
        x_at, y_at = offsets(outer)
        x_at += i64(column) * a_x + i64(row) * b_x
        y_at += i64(column) * a_y + i64(row) * b_y
        read_columns, written_columns = columns(outer, column)
        read_rows, written_rows = rows(outer, row)
        if not read_of(outer):
            read_rows = i32(0)
        if not written_of(outer):
            written_rows = i32(0)
        return x_at, y_at, read_rows, written_rows, read_columns, written_columns

    return place


def divided(number: Any, by: Any) -> Any:
    """Quotient and remainder of a uint32."""
    quotient = u32(number // u32(by))
    return quotient, u32(number - quotient * u32(by))


def offsets_of(factors: Sequence[Factor], x_start: int = 0, y_start: int = 0) -> Digits:
    """`offsets(number)`: offsets in x and y, in elements, of the digits of a number; those of 0 are the starts."""

    def none(number: Any) -> Any:
        return i64(0), i64(0)

    def start(number: Any) -> Any:
        return i64(x_start), i64(y_start)

    found: Digits = start if x_start or y_start else none
    below = 1
    for factor in reversed(factors):
        found = _and_digit(found, below, factor.extent, factor.x, factor.y)
        below *= factor.extent
    return found


def _and_digit(before: Digits, below: int, extent: int, x: int, y: int) -> Digits:
    def offsets(number: Any) -> Any:
        x_at, y_at = before(number)
        _, digit = divided(u32(number // u32(below)), extent)
        return x_at + i64(digit) * x, y_at + i64(digit) * y

    return offsets


def limits_of(p: Permutation, run: Factor, outer: Sequence[Factor]) -> Callable[[Any, Any], Any]:
    """`limits(number, first)`: how many elements of a run from `first` on are read, and how many are written."""
    extent = run.extent

    def even(number: Any, first: Any) -> Any:
        left = i32(extent - first)
        return left, left

    if run.axis < 0:
        return even
    assert run.unit == 1, "the innermost factor of a ragged axis moves its index by one"
    read, written = p.ragged[run.axis].read, p.ragged[run.axis].written
    index_of = _index_along(outer, run.axis)

    def ragged(number: Any, first: Any) -> Any:
        left, index = i32(extent - first), i32(index_of(number) + first)
        return min(left, i32(read - index)), min(left, i32(written - index))

    return ragged


def inside(p: Permutation, outer: Sequence[Factor], but: Collection[int]) -> tuple[Digits, Digits]:
    """`read(number)` and `written(number)`: whether the indices along ragged axes other than `but` exist in x, and in y."""

    def everywhere(number: Any) -> Any:
        return True

    read: Digits = everywhere
    written: Digits = everywhere
    for axis, limits in enumerate(p.ragged):
        if axis not in but:
            index_of = _index_along(outer, axis)
            read = _and_below(read, index_of, limits.read)
            written = _and_below(written, index_of, limits.written)
    return read, written


def _and_below(before: Digits, index_of: Digits, limit: int) -> Digits:
    def is_inside(number: Any) -> Any:
        return before(number) & (index_of(number) < limit)

    return is_inside


def _index_along(factors: Sequence[Factor], axis: int) -> Digits:
    """`index(number)`: the index along a ragged axis that the digits of a number give."""

    def zero(number: Any) -> Any:
        return i32(0)

    found: Digits = zero
    below = 1
    for factor in reversed(factors):
        if factor.axis == axis:
            found = _and_index(found, below, factor.extent, factor.unit)
        below *= factor.extent
    return found


def _and_index(before: Digits, below: int, extent: int, unit: int) -> Digits:
    def index(number: Any) -> Any:
        _, digit = divided(u32(number // u32(below)), extent)
        return i32(before(number) + digit * u32(unit))

    return index
