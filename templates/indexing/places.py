"""Where a row lies that indices choose, as functions for kernels; see `schedsearch.ops.index_map`.

`dynamic` and `dynamic_x` are the parameters of the workload: which extents kernels read from memory. The others are
constants of the machine code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.ops.index_map import ByIndicesParams, IndexMap, Term
from schedsearch.templates.parts.casts import i64, u32
from schedsearch.workload import Workload

Find = Callable[[Any, Any, Any], Any]
Examine = Callable[[Any, Any, Any, Any], None]


def finder(m: IndexMap, dynamic_x: bool) -> Find:
    """`find(row, indices, x_extents)` for kernels: (row of the indexed array, whether all indices are in range).

    A row whose index is out of range may have any number.
    """
    base, position, depth = _sum(m.base, m.rows), _sum(m.position, m.rows), m.depth
    chosen: Find = _nothing
    for place, stride in enumerate(m.strides):
        chosen = _with_index(chosen, place, _extent(m, place, dynamic_x), stride)

    def find(row: Any, indices: Any, x_extents: Any) -> Any:
        total, inside = chosen(i64(position(row) * depth), indices, x_extents)
        return i64(base(row) + total), inside

    return find


def noter(m: IndexMap, dynamic_x: bool, note: Callable[[Any, Any, Any], None]) -> Examine:
    """`note_row(row, indices, x_extents, address)` for kernels: notes an index of a row that is out of range, if there is an
    address.

    Args:
        note: `note(address, place, index)`, a place counting from 1: writes both unless something is noted there already.
    """
    position, depth = _sum(m.position, m.rows), m.depth
    examine: Examine = _examine_nothing
    for place in range(depth):
        examine = _and_examine(examine, place, _extent(m, place, dynamic_x), note)

    def note_row(row: Any, indices: Any, x_extents: Any, address: Any) -> None:
        if address != 0:
            examine(i64(position(row) * depth), indices, x_extents, address)

    return note_row


def counter(m: IndexMap, dynamic: bool) -> Callable[[Any, Any], Any]:
    """`counts(row, indices_extents)` for kernels: whether a row of the dense array is in use."""
    position = _sum(m.position, m.rows)
    within: Callable[[Any, Any], Any] = _always
    for axis, extent in enumerate(m.places if dynamic else ()):
        within = _and_within(within, axis, extent, math.prod(m.places[axis + 1 :]))

    def counts(row: Any, indices_extents: Any) -> Any:
        return within(position(row), indices_extents)

    return counts if dynamic else _always


def extents_writer(p: Workload[ByIndicesParams]) -> Callable[[Any, Any, Any], None]:
    """`write(indices_extents, x_extents, y_extents)` for kernels: the extents of y by the operator's shape function."""
    write: Callable[[Any, Any, Any], None] = _write_nothing
    function = p.shape_functions.get("y")
    if function is None:
        return write
    open_arrays = {"indices": p.params.dynamic, "x": p.params.dynamic_x}
    given = [[(name, axis) if open_arrays[name] else n for axis, n in enumerate(p.params[name])] for name in function.inputs]
    for axis in range(len(p.outputs[0].shape)):
        write = _and_write(write, axis, function.extent(axis, *given))
    return write


def _extent(m: IndexMap, place: int, dynamic_x: bool) -> Callable[[Any], Any]:
    """The extent that an index of a tuple counts along, as a function of `x_extents`. It is not beyond the bound."""
    bound, axis = m.extents[place], m.axes[place]

    def known(x_extents: Any) -> Any:
        return bound

    def read(x_extents: Any) -> Any:
        return min(i64(x_extents[axis]), i64(bound))

    return read if dynamic_x else known


def _always(at: Any, extents: Any) -> Any:
    return True


def _and_within(before: Callable[[Any, Any], Any], axis: int, extent: int, step: int) -> Callable[[Any, Any], Any]:
    """Whether a position is within the extent of one more axis. There are fewer than 2^31 positions."""

    def first(at: Any, extents: Any) -> Any:
        return at < i64(extents[0]) * step

    def later(at: Any, extents: Any) -> Any:
        place = u32(u32(at) // u32(step))
        return before(at, extents) & (i64(u32(place % u32(extent))) < i64(extents[axis]))

    return later if axis else first


def _write_nothing(indices_extents: Any, x_extents: Any, y_extents: Any) -> None:
    pass


def _and_write(before: Callable[[Any, Any, Any], None], axis: int, source: Any) -> Callable[[Any, Any, Any], None]:
    """One more extent of y: a number, or that of an array along one of its axes."""
    name, place = source if isinstance(source, tuple) else ("", source)

    def number(indices_extents: Any, x_extents: Any, y_extents: Any) -> None:
        before(indices_extents, x_extents, y_extents)
        y_extents[axis] = place

    def of_indices(indices_extents: Any, x_extents: Any, y_extents: Any) -> None:
        before(indices_extents, x_extents, y_extents)
        y_extents[axis] = indices_extents[place]

    def of_x(indices_extents: Any, x_extents: Any, y_extents: Any) -> None:
        before(indices_extents, x_extents, y_extents)
        y_extents[axis] = x_extents[place]

    return {"": number, "indices": of_indices, "x": of_x}[name]


def _sum(terms: tuple[Term, ...], rows: int) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = _zero
    for divisor, modulus, factor in terms:
        if divisor == 1 and modulus == rows:
            found = _all(found, factor)
        else:
            found = (_short_term if rows < 2**31 else _long_term)(found, divisor, modulus, factor)
    return found


def _zero(row: Any) -> Any:
    return i64(0)


def _all(before: Callable[[Any], Any], factor: int) -> Callable[[Any], Any]:
    def total(row: Any) -> Any:
        return i64(before(row) + i64(row) * factor)

    return total


def _short_term(before: Callable[[Any], Any], divisor: int, modulus: int, factor: int) -> Callable[[Any], Any]:
    """Divisions of 32 bits are several times faster."""

    def total(row: Any) -> Any:
        quotient = u32(u32(row) // u32(divisor))
        return i64(before(row) + i64(u32(quotient % u32(modulus))) * factor)

    return total


def _long_term(before: Callable[[Any], Any], divisor: int, modulus: int, factor: int) -> Callable[[Any], Any]:
    def total(row: Any) -> Any:
        return i64(before(row) + i64(row) // divisor % modulus * factor)

    return total


def _nothing(at: Any, indices: Any, x_extents: Any) -> Any:
    return i64(0), True


def _with_index(before: Find, place: int, extent_of: Callable[[Any], Any], stride: int) -> Find:
    def total(at: Any, indices: Any, x_extents: Any) -> Any:
        found, inside = before(at, indices, x_extents)
        extent, index = extent_of(x_extents), i64(indices[at + place])
        inside = inside & (index >= -extent) & (index < extent)
        index = i64(index + extent) if index < 0 else index
        return i64(found + index * stride), inside

    return total


def _examine_nothing(at: Any, indices: Any, x_extents: Any, address: Any) -> None:
    pass


def _and_examine(
    before: Examine, place: int, extent_of: Callable[[Any], Any], note: Callable[[Any, Any, Any], None]
) -> Examine:
    def examine(at: Any, indices: Any, x_extents: Any, address: Any) -> None:
        before(at, indices, x_extents, address)
        extent, index = extent_of(x_extents), i64(indices[at + place])
        if (index < -extent) | (index >= extent):
            note(address, i64(at + place + 1), index)

    return examine
