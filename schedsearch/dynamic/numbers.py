"""Nodes of ONNX that compute with shapes: rows of whole numbers, computed where the sizes are.

`Shape`, and arithmetic of a few whole numbers, become shape functions over extents and values. The kernel that computes the
sizes of a segment computes them, too. What does not depend on unknown extents is a constant. For every number there is also
a range in which it lies, by which arrays get their bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.dependence import Dependence, ShapeFunction

MOST = 64  # numbers of a row

Range = tuple[int | None, int | None]  # least and most; None: unlimited


@dataclass(frozen=True)
class Row:
    """Whole numbers of a model, in their order.

    Attributes:
        value: of the graph.
        shape: as the model has it.
        ranges: of each number.
    """

    value: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Computed:
    """Numbers that a rule computes from rows or extents, as data: `function` makes the function of it."""

    rule: str
    params: Mapping[str, Any]
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def function(self) -> ShapeFunction:
        return function(self.rule, self.params)


def function(rule: str, params: Mapping[str, Any]) -> ShapeFunction:
    """The function of one of `RULES`; its parameters are what it is computed from, in order."""
    return RULES[rule](**{name: tuple(each) if isinstance(each, list) else each for name, each in params.items()})


# ---- functions of two rows, element by element, after NumPy's rule of broadcasting


def _add(a: Any, b: Any) -> Any:
    return a + b


def _sub(a: Any, b: Any) -> Any:
    return a - b


def _mul(a: Any, b: Any) -> Any:
    return a * b


def _div(a: Any, b: Any) -> Any:
    """Towards zero, as ONNX divides whole numbers; 0 where b is 0."""
    if b == 0:
        return 0
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _mod(a: Any, b: Any) -> Any:
    """With the sign of b; 0 where b is 0."""
    return 0 if b == 0 else a - a // b * b


def _min(a: Any, b: Any) -> Any:
    return min(a, b)


def _max(a: Any, b: Any) -> Any:
    return max(a, b)


def _equal(a: Any, b: Any) -> Any:
    return 1 if a == b else 0


def _less(a: Any, b: Any) -> Any:
    return 1 if a < b else 0


def _greater(a: Any, b: Any) -> Any:
    return 1 if a > b else 0


def _less_equal(a: Any, b: Any) -> Any:
    return 1 if a <= b else 0


def _greater_equal(a: Any, b: Any) -> Any:
    return 1 if a >= b else 0


def _and(a: Any, b: Any) -> Any:
    return 1 if a != 0 and b != 0 else 0


def _or(a: Any, b: Any) -> Any:
    return 1 if a != 0 or b != 0 else 0


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div, "Mod": _mod, "Min": _min, "Max": _max, "Equal": _equal,
    "Less": _less, "Greater": _greater, "LessOrEqual": _less_equal, "GreaterOrEqual": _greater_equal, "And": _and, "Or": _or,
}  # fmt: skip
_TRUTHS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or")
SAME = ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten")  # other shapes of the same numbers
REDUCED = {"ReduceProd": "Mul", "ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
UNARY = ("Neg", "Abs", "Not")


# ---- rules: what is computed, as shape functions


def _of_shape(first: int) -> ShapeFunction:
    def extent(axis: int, x: Sequence[int]) -> int:
        return x[first + axis]

    return ShapeFunction({"x": Dependence.SHAPE}, extent)


def _of_size() -> ShapeFunction:
    def extent(axis: int, x: Sequence[int]) -> int:
        size = 1
        for each in range(len(x)):
            size = size * x[each]
        return size

    return ShapeFunction({"x": Dependence.SHAPE}, extent)


def _of_two(op: str, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> ShapeFunction:
    compute = BINARY[op]

    def extent(axis: int, a: Sequence[int], b: Sequence[int]) -> int:
        return compute(a[of_a[axis]], b[of_b[axis]])  # type: ignore[no-any-return]

    return _values(extent, "a", "b")


def _of_three(of_c: tuple[int, ...], of_a: tuple[int, ...], of_b: tuple[int, ...]) -> ShapeFunction:
    def extent(axis: int, c: Sequence[int], a: Sequence[int], b: Sequence[int]) -> int:
        return a[of_a[axis]] if c[of_c[axis]] != 0 else b[of_b[axis]]

    return _values(extent, "c", "a", "b")


def _one_after_the_other(first: int) -> ShapeFunction:
    def extent(axis: int, a: Sequence[int], b: Sequence[int]) -> int:
        return a[axis] if axis < first else b[axis - first]

    return _values(extent, "a", "b")


def _at(places: tuple[int, ...]) -> ShapeFunction:
    def extent(axis: int, a: Sequence[int]) -> int:
        return a[places[axis]]

    return _values(extent, "a")


def _at_computed(length: int) -> ShapeFunction:
    def extent(axis: int, a: Sequence[int], indices: Sequence[int]) -> int:
        place = indices[axis]
        if place < 0:
            place = place + length
        return a[min(max(place, 0), length - 1)]

    return _values(extent, "a", "indices")


def _all_as_one(op: str) -> ShapeFunction:
    combine = BINARY[op]

    def extent(axis: int, a: Sequence[int]) -> int:
        found = a[0]
        for each in range(1, len(a)):
            found = combine(found, a[each])
        return found

    return _values(extent, "a")


def _negative(a: Any) -> Any:
    return -a


def _absolute(a: Any) -> Any:
    return abs(a)


def _inverted(a: Any) -> Any:
    return 1 if a == 0 else 0


_UNARY = {"Neg": _negative, "Abs": _absolute, "Not": _inverted}


def _each(op: str) -> ShapeFunction:
    compute = _UNARY[op]

    def extent(axis: int, a: Sequence[int]) -> int:
        return compute(a[axis])  # type: ignore[no-any-return]

    return _values(extent, "a")


RULES: Mapping[str, Callable[..., ShapeFunction]] = {
    "extents": _of_shape, "elements": _of_size, "two": _of_two, "where": _of_three, "concat": _one_after_the_other,
    "at": _at, "at computed": _at_computed, "reduce": _all_as_one, "each": _each,
}  # fmt: skip


# ---- nodes


def of_shape(ranges: Sequence[Range], first: int, last: int) -> Computed:
    """The extents of x from an axis to before another one."""
    return Computed("extents", {"first": first}, (last - first,), tuple(ranges[first:last]))


def of_size(ranges: Sequence[Range]) -> Computed:
    """The number of elements of x."""
    most = [high for _, high in ranges if high is not None]
    return Computed("elements", {}, (), ((0, math.prod(most) if len(most) == len(ranges) else None),))


def binary(op: str, a: Row, b: Row) -> Computed:
    """A function of two rows, element by element."""
    shape, (of_a, of_b) = _broadcast(a, b)
    ranges = tuple(_range(op, a.ranges[i], b.ranges[j]) for i, j in zip(of_a, of_b))
    return Computed("two", {"op": op, "of_a": of_a, "of_b": of_b}, shape, ranges)


def where(c: Row, a: Row, b: Row) -> Computed:
    shape, (of_c, of_a, of_b) = _broadcast(c, a, b)
    ranges = tuple(_union(a.ranges[i], b.ranges[j]) for i, j in zip(of_a, of_b))
    return Computed("where", {"of_c": of_c, "of_a": of_a, "of_b": of_b}, shape, ranges)


def concat(a: Row, b: Row) -> Computed:
    """Of rows along their only axis."""
    return Computed("concat", {"first": a.count}, (a.count + b.count,), (*a.ranges, *b.ranges))


def picked(a: Row, places: np.ndarray[Any, Any]) -> Computed:
    """Numbers at known places."""
    at = [int(each) for each in places.reshape(-1)]
    return Computed("at", {"places": at}, places.shape, tuple(a.ranges[each] for each in at))


def gathered(a: Row, indices: Row) -> Computed:
    """Numbers at computed places; negative ones count from the end, and what is out of range is cut to it."""
    every = functools.reduce(_union, a.ranges)
    return Computed("at computed", {"length": a.count}, indices.shape, (every,) * indices.count)


def reduced(op: str, a: Row, keeps: bool) -> Computed:
    """All numbers as one."""
    combine = REDUCED[op]
    found = functools.reduce(lambda one, other: _range(combine, one, other), a.ranges)
    return Computed("reduce", {"op": combine}, (1,) * len(a.shape) if keeps else (), (found,))


def unary(op: str, a: Row) -> Computed:
    return Computed("each", {"op": op}, a.shape, tuple(_range_of_one(op, each) for each in a.ranges))


def _broadcast(*rows: Row) -> tuple[tuple[int, ...], list[list[int]]]:
    """The shape of a result, and for each row the places that its elements come from."""
    shape = np.broadcast_shapes(*(row.shape for row in rows))
    places = (np.broadcast_to(np.arange(row.count).reshape(row.shape), shape).reshape(-1) for row in rows)
    return shape, [[int(place) for place in each] for each in places]


def _range_of_one(op: str, a: Range) -> Range:
    low, high = a
    if op == "Neg":
        return (None if high is None else -high), (None if low is None else -low)
    if op == "Abs":
        return 0, None if low is None or high is None else max(abs(low), abs(high))
    return 0, 1


def _values(extent: Callable[..., int], *names: str) -> ShapeFunction:
    return ShapeFunction(dict.fromkeys(names, Dependence.VALUE), extent)


def _union(a: Range, b: Range) -> Range:
    low = None if a[0] is None or b[0] is None else min(a[0], b[0])
    high = None if a[1] is None or b[1] is None else max(a[1], b[1])
    return low, high


def _range(op: str, a: Range, b: Range) -> Range:
    """The range of a result; where there is no simple rule it is unlimited."""
    if op in _TRUTHS:
        return 0, 1
    (a_low, a_high), (b_low, b_high) = a, b
    if op in ("Min", "Max"):
        choose = min if op == "Min" else max
        lows, highs = [n for n in (a_low, b_low) if n is not None], [n for n in (a_high, b_high) if n is not None]
        low = choose(lows) if len(lows) == 2 or (lows and op == "Max") else None
        high = choose(highs) if len(highs) == 2 or (highs and op == "Min") else None
        return low, high
    if op == "Add":
        return (
            None if a_low is None or b_low is None else a_low + b_low,
            None if a_high is None or b_high is None else a_high + b_high,
        )
    if op == "Sub":
        return (
            None if a_low is None or b_high is None else a_low - b_high,
            None if a_high is None or b_low is None else a_high - b_low,
        )
    if op == "Mod" and b_low is not None and b_low > 0 and b_high is not None:
        return 0, b_high - 1
    if a_low is None or a_high is None or b_low is None or b_high is None or op == "Mod":
        return None, None
    if op == "Div" and b_low <= 0 <= b_high:
        largest = max(abs(a_low), abs(a_high))
        return -largest, largest
    corners = [BINARY[op](x, y) for x in (a_low, a_high) for y in (b_low, b_high)]
    return min(corners), max(corners)
