"""Determinants of small matrices, as chains of element-wise nodes over slices of one element of each matrix.

The expansion is that by the minors of the first row, from the last rows up, so that minors of the same columns are computed
once: 2 products for a matrix of 2 x 2, 9 for 3 x 3, 28 for 4 x 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of

if TYPE_CHECKING:
    import onnx_ir as ir

_LARGEST = 4


def _det(c: Composition) -> str | None:
    x = c.needed(0)
    *batch, rows, columns = shape_of(x)
    if dtype_of(x) not in FLOATS:
        return f"reads {dtype_of(x)}; allowed: {', '.join(FLOATS)}"
    if rows != columns or not 1 <= rows <= _LARGEST:
        return f"is of matrices of {rows} x {columns}; allowed: square ones of up to {_LARGEST} x {_LARGEST}"
    count = math.prod(batch)
    if not count:
        return "reads an array without elements; allowed: at least one matrix"
    flat = c.reshape(x, [count, rows * columns])

    def element(row: int, column: int) -> ir.Value:
        at = row * columns + column
        return c.slice(flat, 1, at, at + 1)

    minors: dict[tuple[int, ...], ir.Value] = {}  # of the last rows, by their columns
    minors.update({(column,): element(rows - 1, column) for column in range(columns)})
    for row in range(rows - 2, -1, -1):
        elements = [element(row, column) for column in range(columns)]
        found: dict[tuple[int, ...], ir.Value] = {}
        for chosen in itertools.combinations(range(columns), rows - row):
            total: ir.Value | None = None
            for place, column in enumerate(chosen):
                product = c.add("Mul", [elements[column], minors[chosen[:place] + chosen[place + 1 :]]])
                total = product if total is None else c.add("Sub" if place % 2 else "Add", [total, product])
            assert total is not None
            found[chosen] = total
        minors = found
    c.finish(c.reshape(minors[tuple(range(columns))], batch))
    return None


REWRITTEN: Mapping[str, Rewrite] = {"Det": rewrite(_det)}
