"""Where a row lies that indices choose, as functions for kernels; see `schedsearch.ops.index_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from schedsearch.ops.index_map import IndexMap, Term

Find = Callable[[Any, Any], Any]


def finder(m: IndexMap) -> Find:
    """`find(row, indices)` for kernels: (row of the indexed array, whether all indices are in range).

    A row whose index is out of range may have any number.
    """
    base, position, depth = _sum(m.base, m.rows), _sum(m.position, m.rows), m.depth
    chosen: Callable[[Any, Any], Any] = _nothing
    for place, (extent, stride) in enumerate(zip(m.extents, m.strides)):
        chosen = _with_index(chosen, place, extent, stride)

    def find(row: Any, indices: Any) -> Any:
        total, inside = chosen(types.int64(position(row) * depth), indices)
        return types.int64(base(row) + total), inside

    return find


def noter(m: IndexMap, note: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """`note_row(row, indices, address)` for kernels: notes an index of a row that is out of range, if there is an address.

    Args:
        note: `note(address, place, index)`, a place counting from 1: writes both unless something is noted there already.
    """
    position, depth = _sum(m.position, m.rows), m.depth
    examine: Callable[[Any, Any, Any], None] = _examine_nothing
    for place, extent in enumerate(m.extents):
        examine = _and_examine(examine, place, extent, note)

    def note_row(row: Any, indices: Any, address: Any) -> None:
        if address != 0:
            examine(types.int64(position(row) * depth), indices, address)

    return note_row


def counter(m: IndexMap, dynamic: bool) -> Callable[[Any, Any], Any]:
    """`counts(row, extents)` for kernels: whether a row of the dense array is in use."""
    position, per_index = _sum(m.position, m.rows), m.per_index

    def counts(row: Any, extents: Any) -> Any:
        return position(row) < types.int64(extents[0]) * per_index

    def always(row: Any, extents: Any) -> Any:
        return True

    return counts if dynamic else always


def _sum(terms: tuple[Term, ...], rows: int) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = _zero
    for divisor, modulus, factor in terms:
        if divisor == 1 and modulus == rows:
            found = _all(found, factor)
        else:
            found = (_short_term if rows < 2**31 else _long_term)(found, divisor, modulus, factor)
    return found


def _zero(row: Any) -> Any:
    return types.int64(0)


def _all(before: Callable[[Any], Any], factor: int) -> Callable[[Any], Any]:
    def total(row: Any) -> Any:
        return types.int64(before(row) + types.int64(row) * factor)

    return total


def _short_term(before: Callable[[Any], Any], divisor: int, modulus: int, factor: int) -> Callable[[Any], Any]:
    """Divisions of 32 bits are several times faster."""

    def total(row: Any) -> Any:
        quotient = types.uint32(types.uint32(row) // types.uint32(divisor))
        return types.int64(before(row) + types.int64(types.uint32(quotient % types.uint32(modulus))) * factor)

    return total


def _long_term(before: Callable[[Any], Any], divisor: int, modulus: int, factor: int) -> Callable[[Any], Any]:
    def total(row: Any) -> Any:
        return types.int64(before(row) + types.int64(row) // divisor % modulus * factor)

    return total


def _nothing(at: Any, indices: Any) -> Any:
    return types.int64(0), True


def _with_index(before: Callable[[Any, Any], Any], place: int, extent: int, stride: int) -> Callable[[Any, Any], Any]:
    def total(at: Any, indices: Any) -> Any:
        found, inside = before(at, indices)
        index = types.int64(indices[at + place])
        inside = inside & (index >= -extent) & (index < extent)
        index = types.int64(index + extent) if index < 0 else index
        return types.int64(found + index * stride), inside

    return total


def _examine_nothing(at: Any, indices: Any, address: Any) -> None:
    pass


def _and_examine(
    before: Callable[[Any, Any, Any], None], place: int, extent: int, note: Callable[[Any, Any, Any], None]
) -> Callable[[Any, Any, Any], None]:
    def examine(at: Any, indices: Any, address: Any) -> None:
        before(at, indices, address)
        index = types.int64(indices[at + place])
        if (index < -extent) | (index >= extent):
            note(address, types.int64(at + place + 1), index)

    return examine
