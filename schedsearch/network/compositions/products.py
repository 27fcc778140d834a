"""Products of matrices in the forms for which there are kernels: of a matrix by a constant one, and of batches of equal size
or one of which has a single matrix.

- A vector is a matrix of one row or column.
- Batches that are repeated: axes of x alone right before its rows become rows; else the smaller factor is written out.
- A Gemm is a MatMul with its transposes, factors and addition, unless a dense layer takes it as it is.
- A product of the same letters in an Einsum is a MatMul of transposed arrays; see `einsum`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of, folded

if TYPE_CHECKING:
    import onnx_ir as ir


# --- MatMul -------------------------------------------------------------------------------------------------------------
def _matmul(c: Composition) -> str | None:
    x, weight = c.needed(0), c.needed(1)
    if dtype_of(x) not in FLOATS:
        return None
    shape, other = shape_of(x), shape_of(weight)
    if min(len(shape), len(other)) == 1:
        first = c.reshape(x, [1, *shape]) if len(shape) == 1 else x
        second = c.reshape(weight, [*other, 1]) if len(other) == 1 else weight
        y = c.matmul(first, second)
        extents = shape_of(y)
        kept = [*extents[:-2], *extents[-2:-1] * (len(shape) > 1), *extents[-1:] * (len(other) > 1)]
        c.finish(c.reshape(y, kept))
        return None
    kinds = batch_kinds(shape[:-2], other[:-2])
    if folded(weight) is not None and math.prod(other[:-2]) == 1:
        return None  # a dense layer
    if "x" in kinds and len(set(kinds)) > 1:
        _with_rows(c, x, weight)
    elif len(set(kinds)) > 1:  # of weight alone, and of both
        c.finish(c.matmul(repeated(c, x, other), weight))
    return None


def batch_kinds(x: Sequence[int], weight: Sequence[int]) -> list[str]:
    """For each axis of the batch with more than one matrix: x or weight if only this factor has several, else both."""
    rank = max(len(x), len(weight))
    pairs = zip([1] * (rank - len(x)) + list(x), [1] * (rank - len(weight)) + list(weight))
    return ["both" if one == other else "weight" if one == 1 else "x" for one, other in pairs if max(one, other) > 1]


def _with_rows(c: Composition, x: ir.Value, weight: ir.Value) -> None:
    """Axes of x alone in front of its rows become rows."""
    shape, other = shape_of(x), shape_of(weight)
    rank = max(len(shape), len(other))
    shape, other = ([1] * (rank - len(each)) + each for each in (shape, other))
    first = rank - 2  # of the axes that become rows
    while first and other[first - 1] == 1:
        first -= 1
    y = [*np.broadcast_shapes(tuple(shape[:-2]), tuple(other[:-2])), shape[-2], other[-1]]
    rows, matrices = math.prod(shape[first:-1]), c.reshape(weight, [*other[:first], *other[-2:]])
    folded_x = c.reshape(x, [*shape[:first], rows, shape[-1]])
    kinds = set(batch_kinds(shape[:first], other[:first]))
    if "x" in kinds:
        matrices = repeated(c, matrices, [*shape[:first], 1, 1])
    if "weight" in kinds and len(kinds) > 1:
        folded_x = repeated(c, folded_x, [*other[:first], 1, 1])
    c.finish(c.reshape(c.matmul(folded_x, matrices), y))


def repeated(c: Composition, value: ir.Value, like: Sequence[int]) -> ir.Value:
    """An array with its batch repeated to that of another shape: a product with ones, which every kernel has."""
    shape = shape_of(value)
    batch = np.broadcast_shapes(tuple(shape[:-2]), tuple(like[:-2]))
    if list(batch) == shape[:-2]:
        return value
    own = [1] * (len(batch) - len(shape) + 2) + shape[:-2]
    ones = [wanted if mine == 1 else 1 for mine, wanted in zip(own, batch)]
    return c.add("Mul", [value, c.constant(np.ones((*ones, 1, 1)), value)], [*batch, *shape[-2:]])


# --- Gemm ---------------------------------------------------------------------------------------------------------------
def _gemm(c: Composition) -> str | None:
    read, (a, b, addend) = c.node.attributes, (c.needed(0), c.needed(1), c.input(2))
    if dtype_of(a) not in FLOATS:
        return None
    factors = read.get_float("alpha", 1.0), read.get_float("beta", 1.0)
    columns = shape_of(b)[0 if read.get_int("transB", 0) else 1]
    transposed = bool(read.get_int("transA", 0))
    if folded(b) is not None and not transposed and _is_row(addend, columns):
        return None  # a dense layer
    y = c.matmul(c.swap(a) if transposed else a, _swapped(c, b) if read.get_int("transB", 0) else b)
    y = c.times(y, factors[0])
    if addend is not None and factors[1]:
        y = c.add("Add", [y, c.times(addend, factors[1])], shape_of(y))
    c.finish(y)
    return None


def _swapped(c: Composition, matrix: ir.Value) -> ir.Value:
    """The matrix with its axes exchanged; one of integers that a constant is dequantised from stays one."""
    maker = matrix.producer()
    whole = None if maker is None or maker.op_type != "DequantizeLinear" else maker.inputs[0]
    if maker is None or whole is None or whole.const_value is None or maker.attributes.get_int("block_size", 0):
        return c.swap(matrix)
    axis = 1 - maker.attributes.get_int("axis", 1) % 2
    return c.add("DequantizeLinear", [c.swap(whole), *maker.inputs[1:]], shape_of(matrix)[::-1], matrix.dtype, axis=axis)


def _is_row(addend: ir.Value | None, columns: int) -> bool:
    """Whether an addend is missing, or a constant with a number for each column."""
    if addend is None:
        return True
    array = folded(addend)
    return array is not None and (array.size == 1 or (array.size == columns and array.shape[-1] == columns))


REWRITTEN: Mapping[str, Rewrite] = {"MatMul": rewrite(_matmul), "Gemm": rewrite(_gemm)}
