"""Where the rows and elements of a tile are in x and y, and which of them exist, as functions for the staged kernel.

A tile, a row of it and an element of a run are numbers. Their digits, one for each factor, times weights give offsets in
bytes (`tile_offsets`, `load_limits`, `store_limits`), places in shared memory (`digit_sum`), and the indices along ragged
axes that tell what is outside of x or y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.templates.data_movement.staging import Staging
from schedsearch.templates.parts.casts import i32, i64, u32

Sum = Callable[[Any], Any]


# ---- sums over the digits of a number


def digit_sum(extents: Sequence[int], weights: Sequence[int], start: int = 0, wide: bool = False) -> Sum:
    """`sum(number)`: start plus the digits of a number, the first extent's the lowest, times weights; int64 if `wide`."""
    kind = i64 if wide else i32

    def nothing(number: Any) -> Any:
        return kind(start)

    found: Sum = nothing
    below = 1
    for place, (extent, weight) in enumerate(zip(extents, weights)):
        if weight and extent > 1:
            found = _and_digit(found, below, 0 if place == len(extents) - 1 else extent, weight, kind)
        below *= extent
    return found


def _and_digit(before: Sum, below: int, extent: int, weight: int, kind: Any) -> Sum:
    def last(number: Any) -> Any:
        return kind(before(number) + kind(u32(number) // u32(below)) * kind(weight))

    def middle(number: Any) -> Any:
        quotient = u32(u32(number) // u32(below))
        digit = u32(quotient - quotient // u32(extent) * u32(extent))
        return kind(before(number) + kind(digit) * kind(weight))

    return middle if extent else last


def _tile_order(s: Staging, along_y: bool) -> Sequence[int]:
    return s.p.along_y() if along_y else s.p.along_x()


def _of_tile(s: Staging, along_y: bool, weights: Sequence[int], start: int = 0, wide: bool = False) -> Sum:
    """A sum over the digits of a tile's number; a weight is that of a step from tile to tile."""
    order = _tile_order(s, along_y)
    return digit_sum([s.tiles[i] for i in order], [weights[i] for i in order], start, wide)


def tile_offsets(s: Staging, along_y: bool) -> tuple[Sum, Sum]:
    """Offsets in bytes of a tile's first runs of x and y."""
    p, element = s.p, s.p.element_bytes
    x = [factor.x * extent * element for factor, extent in zip(p.factors, s.tile)]
    y = [factor.y * extent * element for factor, extent in zip(p.factors, s.tile)]
    return _of_tile(s, along_y, x, s.x_start, True), _of_tile(s, along_y, y, p.y_start * element, True)


# ---- what of a tile exists


def _limit(s: Staging, along_y: bool, factor: int) -> Sum:
    """`limit(tile)`: how many values of a factor a tile has."""
    steps = [0] * len(s.tile)
    steps[factor] = s.tile[factor]
    first, extent, most = _of_tile(s, along_y, steps), s.p.factors[factor].extent, s.tile[factor]

    def limit(tile: Any) -> Any:
        return i32(min(i32(most), i32(extent - first(tile))))

    def all_of_it(tile: Any) -> Any:
        return i32(most)

    return limit if factor in s.partial else all_of_it


def _always(tile: Any, row: Any) -> Any:
    return True


def _rows_inside(
    s: Staging, along_y: bool, rows: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> Callable[[Any, Any], Any]:
    """`inside(tile, row)`: whether a row's digits, below `counts`, times `steps` are within the tile's extents."""
    found: Callable[[Any, Any], Any] = _always
    for factor in rows:
        if factor in s.partial:
            digit = digit_sum(counts, [step * (each == factor) for each, step in zip(rows, steps)])
            found = _and_within(found, digit, _limit(s, along_y, factor))
    return found


def _and_within(before: Callable[[Any, Any], Any], digit: Sum, limit: Sum) -> Callable[[Any, Any], Any]:
    def inside(tile: Any, row: Any) -> Any:
        return before(tile, row) & (digit(row) < limit(tile))

    return inside


def _index(s: Staging, along_y: bool, axis: int, factors: Sequence[int]) -> tuple[Sum, Sum]:
    """What a tile's number, and a number whose digits are those of `factors`, add to the index along a ragged axis."""
    units = [factor.unit if factor.axis == axis else 0 for factor in s.p.factors]
    of_tile = _of_tile(s, along_y, [unit * extent for unit, extent in zip(units, s.tile)])
    return of_tile, digit_sum(s.extents(factors), [units[i] for i in factors])


def _and_indices(
    before: Callable[[Any, Any], Any], of_tile: Sum, of_row: Sum, first: int, end: int
) -> Callable[[Any, Any], Any]:
    def inside(tile: Any, row: Any) -> Any:
        index = i32(of_tile(tile) + of_row(row))
        return before(tile, row) & (index >= first) & (index < end)

    return inside


def load_limits(s: Staging, along_y: bool) -> tuple[Sum, Callable[[Any, Any], Any], Callable[[Any], Any]]:
    """For rows of x: offsets in bytes, `read(tile, row)`, and `span(tile)`, the part of the run that the tile has."""
    p, element = s.p, s.p.element_bytes
    offset = digit_sum(s.extents(s.x_rows), [p.factors[i].x * element for i in s.x_rows], 0, True)
    read = _rows_inside(s, along_y, s.x_rows, s.extents(s.x_rows), [1] * len(s.x_rows))
    in_run = {p.factors[i].axis for i in s.x_run}
    for axis, limits in enumerate(p.ragged):
        if axis not in in_run:
            read = _and_indices(read, *_index(s, along_y, axis, s.x_rows), limits.first, limits.read)
    whole = s.x_span_bytes

    def all_of_it(tile: Any) -> Any:
        return i32(0), i32(whole)

    if not s.x_run or s.x_run[-1] not in s.partial:
        return offset, read, all_of_it
    last = s.x_run[-1]
    limit, most, step = _limit(s, along_y, last), s.tile[last], abs(p.factors[last].x) * element

    def lower(tile: Any) -> Any:
        return i32(0), i32(whole - (most - limit(tile)) * step)

    def upper(tile: Any) -> Any:
        return i32((most - limit(tile)) * step), i32(whole)

    return offset, read, upper if s.backwards else lower


def store_limits(s: Staging, along_y: bool) -> tuple[Sum, Callable[[Any, Any], Any], Sum]:
    """For rows of y, or the first of those that a thread stores at once: offsets in bytes, `written(tile, row)`, and
    `end(tile)`, the elements of a run that the tile has.
    """
    p, element = s.p, s.p.element_bytes
    steps = [s.row_step(i) for i in s.y_rows]
    strides = [p.factors[i].y * element * step for i, step in zip(s.y_rows, steps)]
    offset = digit_sum(s.y_row_counts, strides, 0, True)
    written = _rows_inside(s, along_y, s.y_rows, s.y_row_counts, steps)
    in_run = {p.factors[i].axis for i in s.y_run}
    for axis, limits in enumerate(p.ragged):
        if axis not in in_run and s.ends(axis):
            written = _and_indices(written, *_index(s, along_y, axis, s.y_rows), 0, limits.written)
    elements = s.run_elements

    def all_of_it(tile: Any) -> Any:
        return i32(elements)

    if not s.y_run or s.y_run[-1] not in s.partial:
        return offset, written, all_of_it
    limit, inner = _limit(s, along_y, s.y_run[-1]), elements // s.tile[s.y_run[-1]]

    def part(tile: Any) -> Any:
        return i32(limit(tile) * inner)

    return offset, written, part


def elements_inside(s: Staging, along_y: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`read(tile, row, e)` and `written(tile, row, e)`: whether an element of a run of y exists in x, and in y."""

    def always(tile: Any, row: Any, e: Any) -> Any:
        return True

    read: Callable[..., Any] = always
    written: Callable[..., Any] = always
    in_run = {s.p.factors[i].axis for i in s.y_run}
    for axis, limits in enumerate(s.p.ragged):
        of_tile, of_row = _index(s, along_y, axis, s.y_rows)
        _, of_run = _index(s, along_y, axis, s.y_run)
        read = _and_element(read, of_tile, of_row, of_run, limits.first, limits.read)
        if axis in in_run and s.ends(axis):
            written = _and_element(written, of_tile, of_row, of_run, 0, limits.written)
    return read, written


def _and_element(
    before: Callable[..., Any], of_tile: Sum, of_row: Sum, of_run: Sum, first: int, end: int
) -> Callable[..., Any]:
    def inside(tile: Any, row: Any, e: Any) -> Any:
        index = i32(of_tile(tile) + of_row(row) + of_run(e))
        return before(tile, row, e) & (index >= first) & (index < end)

    return inside
