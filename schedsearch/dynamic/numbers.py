"""Nodes of ONNX that compute with shapes: rows of integers, computed where the sizes are.

`Shape`, and arithmetic of a few integers, become shape functions over extents and values. The kernel that computes the
sizes of a segment computes them, too. What does not depend on unknown extents is a constant. For every number there is also
a range in which it lies, by which arrays get their bounds. Arithmetic is that of the model's dtype: integers beyond
int64 or int32 wrap, as in NumPy, and floats are rounded as IEEE 754 says; see `ops.float_words`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedsearch.ops import float_words
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.typed import Array, GivenParams

MOST = 64  # numbers of a row

Range = tuple[int | None, int | None]  # least and most, of floats as words; None: unlimited
LIMITS = {"int64": (-(2**63), 2**63 - 1), "int32": (-(2**31), 2**31 - 1)}


@dataclass(frozen=True)
class Row:
    """Numbers of a model, in their order.

    Attributes:
        value: of the graph.
        shape: as the model has it.
        ranges: of each number.
        dtype: as the model has it; the graph has int64, and of floats the words of `ops.float_words`.
    """

    value: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    dtype: str = "int64"

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def places(self) -> np.ndarray[Any, Any]:
        """The place of each number, in the model's shape."""
        return np.arange(self.count).reshape(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in float_words.DTYPES


@dataclass(frozen=True)
class Computed:
    """Numbers that a rule computes from rows or extents, as data: `function` makes the function of it."""

    rule: str
    params: GivenParams
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    dtype: str = "int64"

    @property
    def function(self) -> ShapeFunction:
        return function(self.rule, self.params)


def function(rule: str, params: GivenParams) -> ShapeFunction:
    """The function of one of `RULES`; its parameters are what it is computed from, in order."""
    made = RULES[rule](**{name: tuple(each) if isinstance(each, list) else each for name, each in params.items()})
    return replace(made, made_by=(rule, params))


# ---- functions of two rows, element by element, after NumPy's rule of broadcasting


def _add(a: Any, b: Any) -> Any:
    return a + b


def _sub(a: Any, b: Any) -> Any:
    return a - b


def _mul(a: Any, b: Any) -> Any:
    return a * b


def _div(a: Any, b: Any) -> Any:
    """Towards zero, as ONNX divides integers; 0 where b is 0."""
    if b == 0:
        return 0
    if b == -1:  # the least number has no negative: processors fail to divide it
        return -a
    quotient = a // b
    return quotient + 1 if quotient < 0 and quotient * b != a else quotient


def _mod(a: Any, b: Any) -> Any:
    """With the sign of b; 0 where b is 0."""
    return 0 if b == 0 or b == -1 else a - a // b * b


def _min(a: Any, b: Any) -> Any:
    return min(a, b)


def _max(a: Any, b: Any) -> Any:
    return max(a, b)


def _equal(a: object, b: object) -> Any:
    return 1 if a == b else 0


def _less(a: Any, b: Any) -> Any:
    return 1 if a < b else 0


def _greater(a: Any, b: Any) -> Any:
    return 1 if a > b else 0


def _less_equal(a: Any, b: Any) -> Any:
    return 1 if a <= b else 0


def _greater_equal(a: Any, b: Any) -> Any:
    return 1 if a >= b else 0


def _and(a: object, b: object) -> Any:
    return 1 if a != 0 and b != 0 else 0


def _or(a: object, b: object) -> Any:
    return 1 if a != 0 or b != 0 else 0


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div, "Mod": _mod, "Min": _min, "Max": _max, "Equal": _equal,
    "Less": _less, "Greater": _greater, "LessOrEqual": _less_equal, "GreaterOrEqual": _greater_equal, "And": _and, "Or": _or,
}  # fmt: skip
_TRUTHS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or")
SAME = ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten")  # other shapes of the same numbers
REDUCED = {"ReduceProd": "Mul", "ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
UNARY = ("Neg", "Abs", "Not", "Floor", "Ceil", "Round")
_COMPUTED: Mapping[str, Callable[[Any, Any], Any]] = {**BINARY, **float_words.BINARY}
_WRAPPING = ("Add", "Sub", "Mul", "Div", "Neg", "Abs")  # may leave the limits of a dtype


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
    compute = _COMPUTED[op]

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


def _inverted(a: object) -> Any:
    return 1 if a == 0 else 0


def _truth(a: object) -> Any:
    return 0 if a == 0 else 1


def _wrapped(a: Any) -> Any:
    """The lower half, as int32."""
    low = a & 0xFFFFFFFF
    return low - 0x100000000 if low > 0x7FFFFFFF else low


_UNARY = {"Neg": _negative, "Abs": _absolute, "Not": _inverted, "truth": _truth, "int32": _wrapped, **float_words.UNARY}


def _each(op: str) -> ShapeFunction:
    compute = _UNARY[op]

    def extent(axis: int, a: Sequence[int]) -> int:
        return compute(a[axis])  # type: ignore[no-any-return]

    return _values(extent, "a")


def _agreeing(
    place: Sequence[int], axis: Sequence[int], times: Sequence[int], plus: Sequence[int], over: Sequence[int]
) -> ShapeFunction:
    """1, if extents of a give those of b: (times * a[place] + plus) // over is b[axis] for all of these."""

    def extent(axis: int, a: Sequence[int], b: Sequence[int]) -> int:
        return 1

    def problem(a: Sequence[int], b: Sequence[int]) -> int:
        for each in range(len(place)):
            if (times[each] * a[place[each]] + plus[each]) // over[each] != b[axis[each]]:
                return 1
        return 0

    message = "the extents do not fit one another; allowed: sizes for which they do"
    return ShapeFunction(dict.fromkeys("ab", Dependence.SHAPE), extent, problem, (message,))


# ---- rules of extents


def _of_view(shape: tuple[int, ...], places: tuple[int, ...]) -> ShapeFunction:
    """The extents of a view of x, or of an array of which some axes count up to their bounds: those of x at `places`, or
    where a place is -1, those of `shape`."""

    def extent(axis: int, x: Sequence[int]) -> int:
        return x[places[axis]] if places[axis] >= 0 else shape[axis]

    return ShapeFunction({"x": Dependence.SHAPE}, extent)


def _following(
    source: str,
    arguments: tuple[str, ...],
    shape: tuple[int, ...],
    places: tuple[int, ...],
    times: tuple[int, ...],
    plus: tuple[int, ...],
    over: tuple[int, ...],
) -> ShapeFunction:
    """Extents of the argument `source` where an axis of y follows one of it, otherwise those of `shape`."""

    def of_x(axis: int, x: Sequence[int]) -> int:
        return (times[axis] * x[places[axis]] + plus[axis]) // over[axis] if places[axis] >= 0 else shape[axis]

    def of_x0(axis: int, x0: Sequence[int]) -> int:
        return x0[places[axis]] if places[axis] >= 0 else shape[axis]

    needs = {name: Dependence.SHAPE if name == source else Dependence.NOTHING for name in arguments}
    return ShapeFunction(needs, {"x": of_x, "x0": of_x0}[source])


RULES: Mapping[str, Callable[..., ShapeFunction]] = {
    "extents": _of_shape, "elements": _of_size, "two": _of_two, "where": _of_three, "concat": _one_after_the_other,
    "at": _at, "at computed": _at_computed, "reduce": _all_as_one, "each": _each,
    "agree": _agreeing, "view": _of_view, "follow": _following,
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
    rule = f"{op} {a.dtype}" if a.is_float and op in _WRAPPING else op
    ranges = tuple(_range(rule, a.ranges[i], b.ranges[j]) for i, j in zip(of_a, of_b))
    dtype = "bool" if op in _TRUTHS else a.dtype
    return Computed("two", {"op": rule, "of_a": of_a, "of_b": of_b}, shape, ranges, dtype)


def where(c: Row, a: Row, b: Row) -> Computed:
    shape, (of_c, of_a, of_b) = _broadcast(c, a, b)
    ranges = tuple(_union(a.ranges[i], b.ranges[j]) for i, j in zip(of_a, of_b))
    return Computed("where", {"of_c": of_c, "of_a": of_a, "of_b": of_b}, shape, ranges, a.dtype)


def concat(a: Row, b: Row) -> Computed:
    """Of rows along their only axis."""
    return Computed("concat", {"first": a.count}, (a.count + b.count,), (*a.ranges, *b.ranges), a.dtype)


def picked(a: Row, places: Array) -> Computed:
    """Numbers at known places."""
    at = [int(each) for each in places.reshape(-1)]
    return Computed("at", {"places": at}, places.shape, tuple(a.ranges[each] for each in at), a.dtype)


def gathered(a: Row, indices: Row) -> Computed | None:
    """Numbers at computed places; negative ones count from the end. None if one may be out of range: a call can say so."""
    if any(low is None or high is None or low < -a.count or high >= a.count for low, high in indices.ranges):
        return None
    every = functools.reduce(_union, a.ranges)
    return Computed("at computed", {"length": a.count}, indices.shape, (every,) * indices.count, a.dtype)


def reduced(op: str, a: Row, keeps: bool) -> Computed:
    """All numbers as one."""
    combine = REDUCED[op]
    found = functools.reduce(lambda one, other: _range(combine, one, other), a.ranges)
    return Computed("reduce", {"op": combine}, (1,) * len(a.shape) if keeps else (), (found,), a.dtype)


def unary(op: str, a: Row) -> Computed:
    ranges = tuple(_range_of_one(op, each) for each in a.ranges)
    return Computed("each", {"op": op}, a.shape, ranges, "bool" if op == "Not" else a.dtype)


def converted(a: Row, dtype: str) -> Computed | None:
    """The numbers in another dtype; None if they are the same ones.

    Raises:
        ValueError: a float may be beyond the integers of the dtype. ONNX does not say what that gives.
    """
    if a.dtype == dtype or (a.dtype, dtype) == ("float32", "float64"):
        return None
    own = LIMITS.get(a.dtype, LIMITS["int64"])
    limits = [own[end] if each is None else each for pair in a.ranges for end, each in enumerate(pair)]
    if dtype == "bool":
        return None if set(limits) <= {0, 1} else Computed("each", {"op": "truth"}, a.shape, ((0, 1),) * a.count, dtype)
    if dtype in float_words.DTYPES:
        rule = "float32 of float64" if a.is_float else f"{dtype} of whole"
        return _converted(a, rule, dtype)
    least, most = LIMITS[dtype]
    if a.is_float:
        if any(not least < float_words.number_of(each) < most for each in limits):  # as floats the limits are powers of two
            numbers = [float_words.number_of(each) for each in limits]
            raise ValueError(f"the numbers are between {min(numbers):g} and {max(numbers):g}, some of which {dtype} lacks")
        return _converted(a, "cut", dtype)
    if all(least <= each <= most for each in limits):
        return None
    return Computed("each", {"op": "int32"}, a.shape, ((None, None),) * a.count, dtype)


def wrapped(computed: Computed, value: str) -> Computed | None:
    """What int32 makes of numbers that arithmetic in int64 gave; None if they are within."""
    if computed.dtype != "int32" or computed.params.get("op") not in _WRAPPING:
        return None
    return converted(Row(value, computed.shape, computed.ranges), "int32")


def _converted(a: Row, rule: str, dtype: str) -> Computed:
    convert, (least, most) = _UNARY[rule], LIMITS.get(a.dtype, LIMITS["int64"])
    ranges = tuple(
        (convert(least if low is None else low), convert(most if high is None else high)) for low, high in a.ranges
    )
    return Computed("each", {"op": rule}, a.shape, ranges, dtype)


def _broadcast(*rows: Row) -> tuple[tuple[int, ...], list[list[int]]]:
    """The shape of a result, and for each row the places that its elements come from."""
    shape = np.broadcast_shapes(*(row.shape for row in rows))
    places = (np.broadcast_to(np.arange(row.count).reshape(row.shape), shape).reshape(-1) for row in rows)
    return shape, [[int(place) for place in each] for each in places]


def _range_of_one(op: str, a: Range) -> Range:
    low, high = a
    if op == "Not":
        return 0, 1
    if low is None or high is None:
        return None, None
    if op == "Abs":
        return _limited(0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high)))
    if op == "Neg":
        return _limited(-high, -low)
    return _UNARY[op](low), _UNARY[op](high)


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
    if op == "Mod" and b_low is not None and b_low > 0 and b_high is not None:
        return 0, b_high - 1
    if a_low is None or a_high is None or b_low is None or b_high is None or op == "Mod":
        return None, None
    if op in float_words.BINARY:
        return _range_of_floats(op, (a_low, a_high), (b_low, b_high))
    if op == "Div" and b_low <= 0 <= b_high:
        largest = max(abs(a_low), abs(a_high))
        return _limited(-largest, largest)
    corners = [BINARY[op](x, y) for x in (a_low, a_high) for y in (b_low, b_high)]
    return _limited(min(corners), max(corners))


def _limited(low: int, high: int) -> Range:
    """Numbers that wrap can be any."""
    least, most = LIMITS["int64"]
    return (low, high) if least <= low and high <= most else (None, None)


def _range_of_floats(op: str, a: tuple[int, int], b: tuple[int, int]) -> Range:
    """By the corners: rounding keeps the order. Unlimited if a result may be infinite or no number."""
    if op.startswith("Div") and (b[0] <= 0 <= b[1] or min(map(abs, b)) < float_words.LEAST_DIVISOR):
        return None, None
    corners = [float_words.BINARY[op](x, y) for x in a for y in b]
    return (min(corners), max(corners)) if max(map(abs, corners)) <= float_words.MOST else (None, None)
