"""Movements of data: which element of an argument becomes which element of y, as one description for all operators.

transpose, depth_to_space, space_to_depth, strided_slice, concat, pad and layout_transform compute nothing. Each maps the
index space of y to those of its arguments. A `Movement` says so by *boxes*: a box is a part of y whose elements come from
one argument. Its *factors* are the digits of an index into the box, each with one stride in x and one in y. A transposition
of a 2 x 3 x 4 array to 4 x 2 x 3, for example, in elements:

    factor    extent   stride in x   stride in y
    axis 2    4        1             6
    axes 0,1  6        4             1

Factors that follow one another in both arrays are merged, as axes 0 and 1 are here. The operators differ in little else:

    transpose, depth_to_space, space_to_depth   one box; its factors are the axes, or parts of axes, in another order
    strided_slice   one box that starts at `x_start`; strides in x are longer, or negative
    concat          a box for each argument, which starts at `y_start`
    pad             one box, as large as y; an index along a *ragged* axis may be outside of x: the element is then the fill
    layout_transform   one box; axes with blocks are ragged where their last block is not full

The boxes of a movement are disjoint and together cover y, so that a kernel writes each element once and need not fill y
before. A kernel that handles every kind of box therefore serves every operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from schedsearch.typed import Array, GivenParams

MAX_EXTENT = 2**31 - 1  # of a factor; positions within it are 32-bit


@dataclass(frozen=True)
class Factor:
    """A digit of the index space, in elements of x and y.

    Attributes:
        extent: number of its values.
        x: stride, the distance in elements of x between neighbours. It may be negative, and more than 1 everywhere.
        y: stride in y, positive.
        axis: the ragged axis that it belongs to, an index into `Box.ragged`; -1 if it never leaves its axis.
        unit: how far a step moves the index of that axis.
    """

    extent: int
    x: int
    y: int
    axis: int = -1
    unit: int = 1


@dataclass(frozen=True)
class Ragged:
    """An axis of y that has indices outside of x, or whose last block is not full in x or y.

    An index is the sum of digit * unit over the factors of the axis. It is 0 at `Box.y_start` and at `Box.x_start`.

    Attributes:
        read: indices from here on are not in x; their elements are the fill.
        written: indices from here on are not in y; nothing is written.
        first: indices below are not in x either. Only `pad` has a first index above 0.
    """

    read: int
    written: int
    first: int = 0


@dataclass(frozen=True)
class Box:
    """A part of y whose elements come from one argument.

    The element with the digits d is at `y_start + sum(d * factor.y)` in y, and at `x_start + sum(d * factor.x)` in x unless
    it is outside of a ragged axis.

    Attributes:
        x: name of the argument.
        factors: all with more than one value, in the order of y, outermost first. A box of one element has none.
        x_start: position of the element whose digits are all 0. It is outside of x, and may be negative, if that element is
            outside of a ragged axis.
        y_start: the same in y, never negative.
        ragged: axes that factors may leave.
    """

    x: str
    factors: tuple[Factor, ...]
    x_start: int = 0
    y_start: int = 0
    ragged: tuple[Ragged, ...] = ()

    @classmethod
    def of(
        cls,
        x: str,
        factors: Iterable[Factor],
        *,
        x_start: int = 0,
        y_start: int = 0,
        ragged: Sequence[Ragged] = (),
    ) -> Box:
        """The box in its canonical form: without factors of one value, sorted, and merged."""
        limits = list(ragged)
        merged = _absorbed(merge(factors), limits)
        return cls(x, merged, x_start, y_start, tuple(limits))

    @property
    def size(self) -> int:
        """Number of elements, with those that are not written."""
        return math.prod(factor.extent for factor in self.factors)


@dataclass(frozen=True)
class Movement:
    """What an operator of data movement does. `DataMovement.movement` gives it.

    Attributes:
        element_bytes: 1, 2 or 4.
        boxes: disjoint parts of y that cover it; none if y is empty.
        fill: the bits of an element that is not in x.

    Examples:
        >>> from schedsearch import transpose
        >>> workload = transpose(x=(2, 3, 4), permutation=(2, 0, 1), dtype="float32")
        >>> (box,) = workload.definition.movement(workload.params).boxes
        >>> [(factor.extent, factor.x, factor.y) for factor in box.factors]
        [(4, 1, 6), (6, 4, 1)]
    """

    element_bytes: int
    boxes: tuple[Box, ...]
    fill: int = 0

    def apply(self, arrays: GivenParams, y_size: int) -> Array:
        """y, by NumPy's index arithmetic; slow, for tests.

        Args:
            arrays: argument -> its bits, a one-dimensional array of unsigned integers of `element_bytes`.
            y_size: elements of y.
        """
        import numpy as np

        y = np.empty(y_size, f"u{self.element_bytes}")
        written = np.zeros(y_size, np.int64)
        for box in self.boxes:
            x_at, y_at = np.full(1, box.x_start, np.int64), np.full(1, box.y_start, np.int64)
            index = np.zeros((len(box.ragged), 1), np.int64)
            for factor in box.factors:
                digit = np.arange(factor.extent, dtype=np.int64)
                x_at = (x_at[:, None] + digit * factor.x).reshape(-1)
                y_at = (y_at[:, None] + digit * factor.y).reshape(-1)
                step = np.array([factor.unit if factor.axis == axis else 0 for axis in range(len(box.ragged))], np.int64)
                index = (index[:, :, None] + step[:, None, None] * digit).reshape(len(box.ragged), x_at.size)
            exists, is_read = np.ones(x_at.shape, bool), np.ones(x_at.shape, bool)
            for limits, along in zip(box.ragged, index):
                exists &= along < limits.written
                is_read &= (along >= limits.first) & (along < limits.read)
            x = arrays[box.x]
            values = np.where(is_read, x[np.where(is_read, x_at, 0)], x.dtype.type(self.fill))
            y[y_at[exists]] = values[exists]
            written[y_at[exists]] += 1
        assert (written == 1).all(), "boxes are disjoint and cover y"
        return y


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a contiguous array."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def permuted(x: str, shape: Sequence[int], order: Sequence[int], in_y: Sequence[int] | None = None) -> Box:
    """The box of `x.reshape(shape).transpose(order)`; no extent is 0.

    Args:
        in_y: strides of y, if it is not an array of its own.

    Examples:
        >>> [(factor.extent, factor.x, factor.y) for factor in permuted("x", (2, 3, 4), (0, 2, 1)).factors]
        [(2, 12, 12), (4, 1, 3), (3, 4, 1)]
    """
    in_x, in_y = row_strides(shape), in_y or row_strides([shape[axis] for axis in order])
    return Box.of(x, [Factor(shape[axis], in_x[axis], stride) for axis, stride in zip(order, in_y)])


def merge(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Sorts factors in the order of y and merges those that follow one another in both arrays."""
    found: list[Factor] = []
    for factor in sorted((f for f in factors if f.extent > 1), key=lambda f: (f.y, f.x), reverse=True):
        if found and _follows(found[-1], factor):
            outer = found.pop()
            factor = replace(factor, extent=outer.extent * factor.extent)
        found.append(factor)
    return tuple(found)


def _follows(outer: Factor, inner: Factor) -> bool:
    same_axis = outer.axis == inner.axis and (outer.axis < 0 or outer.unit == inner.unit * inner.extent)
    return same_axis and _contiguous(outer, inner)


def _contiguous(outer: Factor, inner: Factor) -> bool:
    fits = outer.extent * inner.extent <= MAX_EXTENT
    return fits and outer.x == inner.x * inner.extent and outer.y == inner.y * inner.extent


def _absorbed(factors: tuple[Factor, ...], limits: list[Ragged]) -> tuple[Factor, ...]:
    """Lets the only factor of a ragged axis absorb the one that follows it in both arrays, so that runs become longer.

    The index of the axis then counts the finer steps, and so do its limits, which change in place.
    """
    found: list[Factor] = []
    for factor in factors:
        outer = found[-1] if found else None
        alone = outer is not None and outer.axis >= 0 and sum(each.axis == outer.axis for each in factors) == 1
        if outer is not None and alone and factor.axis < 0 and _contiguous(outer, factor):
            finer, old = factor.extent, limits[outer.axis]
            limits[outer.axis] = Ragged(old.read * finer, old.written * finer, old.first * finer)
            factor = replace(outer, extent=outer.extent * finer, x=factor.x, y=factor.y)
            found.pop()
        found.append(factor)
    return tuple(found)
