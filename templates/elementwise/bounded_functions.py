"""The functions of expressions on pairs: a float64 and a bound of the error of a kernel in float32, or an int64 and a bound
that is 0, or `UNDECIDED` where a float32 that may be rounded decided about it. See `program`.

The bound counts roundoff errors of float32 (2^-24). An operation adds one of its result to what its operands bring along,
and a function of a math library four: CUDA's are within two units in the last place (CUDA C++ Programming Guide,
"Mathematical Functions Appendix"), and those of C libraries within one.

Relative errors say nothing where float32 overflows or underflows on the way to a small result. Products, quotients, powers
and exponentials therefore bring `_LEAST` along, too: a result below the least normal number may become 0, and a divisor
beyond the largest is infinite, so that the quotient is 0. sigmoid(-100) is 1 / (1 + infinity) in a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from schedsearch.ops.expression_functions import CASTS
from schedsearch.ops.expression_types import WHOLE
from schedsearch.templates.elementwise import whole_functions
from schedsearch.templates.elementwise.float32_functions import COMPARISONS, where
from schedsearch.templates.parts.casts import f64, i64
from schedsearch.templates.parts.reference import half_to_even

_LIBRARY = 4.0
_UNIT = 2.0**24
_SLOPE_OF_ERF = 2 / math.sqrt(math.pi)
_LARGEST_EXPONENT = 700.0
_LEAST = 2.0**-126 * _UNIT  # the least normal float32, more than 1 / the largest
UNDECIDED = 1e30  # of an integer


def number(value: float) -> tuple[float, float]:
    return float(value), (abs(float(value)) if float(f32_of(value)) != float(value) else 0.0)


def f32_of(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def add(a: Any, b: Any) -> Any:
    value = a[0] + b[0]
    return value, a[1] + b[1] + abs(value)


def subtract(a: Any, b: Any) -> Any:
    value = a[0] - b[0]
    return value, a[1] + b[1] + abs(value)


def multiply(a: Any, b: Any) -> Any:
    value = a[0] * b[0]
    return value, a[1] * abs(b[0]) + b[1] * abs(a[0]) + abs(value) + _LEAST


def divide(a: Any, b: Any) -> Any:
    value = a[0] / b[0]
    return value, (a[1] + abs(value) * b[1]) / abs(b[0]) + 2.0 * abs(value) + _LEAST * max(abs(a[0]), 1.0)


def negate(a: Any) -> Any:
    return -a[0], a[1]


def smaller(a: Any, b: Any) -> Any:
    return min(a[0], b[0]), max(a[1], b[1])


def larger(a: Any, b: Any) -> Any:
    return max(a[0], b[0]), max(a[1], b[1])


def absolute(x: Any) -> Any:
    return abs(x[0]), x[1]


def relu(x: Any) -> Any:
    return max(x[0], 0.0), x[1]


def leaky_relu(x: Any, slope: Any) -> Any:
    value, bound = multiply(x, slope)
    return (value if x[0] < 0.0 else x[0]), max(bound, x[1])


def clip(x: Any, low: Any, high: Any) -> Any:
    return smaller(larger(x, low), high)


def exp(x: Any) -> Any:
    value = math.exp(min(x[0], _LARGEST_EXPONENT))
    return value, value * (x[1] + _LIBRARY) + _LEAST


def log(x: Any) -> Any:
    value = math.log(x[0])
    return value, x[1] / x[0] + _LIBRARY * max(abs(value), 1.0)


def sqrt(x: Any) -> Any:
    value = math.sqrt(x[0])
    return value, x[1] / max(2.0 * value, 1e-30) + 2.0 * value


def tanh(x: Any) -> Any:
    value = math.tanh(x[0])
    return value, x[1] * (1.0 - value * value) + _LIBRARY * abs(value)


def erf(x: Any) -> Any:
    value = math.erf(x[0])
    return value, x[1] * _SLOPE_OF_ERF * math.exp(-min(x[0] * x[0], _LARGEST_EXPONENT)) + _LIBRARY * abs(value)


def sigmoid(x: Any) -> Any:
    return divide((1.0, 0.0), add((1.0, 0.0), exp((-x[0], x[1]))))


def silu(x: Any) -> Any:
    return multiply(x, sigmoid(x))


def hard_sigmoid(x: Any, alpha: Any, beta: Any) -> Any:
    return clip(add(multiply(alpha, x), beta), (0.0, 0.0), (1.0, 0.0))


def hard_swish(x: Any) -> Any:
    return multiply(x, hard_sigmoid(x, (1.0 / 6.0, 1.0), (0.5, 0.0)))


def gelu(x: Any) -> Any:
    return multiply(multiply((0.5, 0.0), x), add((1.0, 0.0), erf(multiply(x, (math.sqrt(0.5), 1.0)))))


def power(exponent: float) -> Callable[[Any], Any]:
    def raised(base: Any) -> Any:
        value = math.pow(base[0], exponent)
        slope = abs(exponent * math.pow(base[0], exponent - 1.0)) if exponent != 0.0 else 0.0
        return value, base[1] * slope + (abs(exponent) + 4.0 * _LIBRARY) * abs(value) + _LEAST

    return raised


def nearest_whole(x: Any) -> Any:
    """A half is where a step of 1 may go either way."""
    value = half_to_even(x[0])
    near = abs(abs(x[0] - value) - 0.5) * _UNIT <= x[1]
    return value, (_UNIT if near else 0.0)


def sign(x: Any) -> Any:
    value = 1.0 if x[0] > 0.0 else -1.0 if x[0] < 0.0 else x[0]
    return value, (2.0 * _UNIT if _may_be(abs(x[0]), x[1]) else 0.0)


def _may_be(distance: Any, bound: Any) -> Any:
    """Whether two numbers that are so far apart may be equal in float32."""
    return (bound > 0.0) & (distance * _UNIT <= bound)


def _near_whole(x: Any) -> Any:
    return _may_be(abs(x[0] - half_to_even(x[0])), x[1])


def floor(x: Any) -> Any:
    nearest = half_to_even(x[0])
    value = nearest - 1.0 if nearest > x[0] else nearest
    return value, (_UNIT if _near_whole(x) else 0.0)


def ceil(x: Any) -> Any:
    nearest = half_to_even(x[0])
    value = nearest + 1.0 if nearest < x[0] else nearest
    return value, (_UNIT if _near_whole(x) else 0.0)


def fmod(a: Any, b: Any) -> Any:
    """It jumps by b where a quotient is whole."""
    value = abs(a[0]) % abs(b[0])
    value = -value if a[0] < 0.0 else value
    bound = a[1] + b[1] * (abs(a[0] / b[0]) + 1.0)
    near = _may_be(abs(value), bound) | _may_be(abs(b[0]) - abs(value), bound)
    return value, bound + (abs(b[0]) * _UNIT if near else 0.0)


def modulo(a: Any, b: Any) -> Any:
    value, bound = fmod(a, b)
    other = (value != 0.0) & ((value < 0.0) != (b[0] < 0.0))
    return (value + b[0] if other else value), bound + abs(b[0])


def pow_(a: Any, b: Any) -> Any:
    value = math.pow(a[0], b[0])
    slope = abs(b[0] * math.pow(a[0], b[0] - 1.0)) if b[0] != 0.0 else 0.0
    along = abs(value * math.log(abs(a[0]))) if a[0] != 0.0 else 0.0
    return value, a[1] * slope + b[1] * along + 4.0 * _LIBRARY * abs(value) + _LEAST


def _smooth(name: str, slope: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    function = getattr(math, name)

    def call(x: Any) -> Any:
        value = function(x[0])
        return value, x[1] * slope(x[0], value) + 2.0 * _LIBRARY * abs(value)

    return call


def _root(x: Any) -> Any:
    return 1.0 / math.sqrt(max(x, 1e-30))


_SMOOTH: Mapping[str, Callable[[Any], Any]] = {
    "sin": _smooth("sin", lambda x, y: abs(math.cos(x))),
    "cos": _smooth("cos", lambda x, y: abs(math.sin(x))),
    "tan": _smooth("tan", lambda x, y: 1.0 + y * y),
    "asin": _smooth("asin", lambda x, y: _root(1.0 - x * x)),
    "acos": _smooth("acos", lambda x, y: _root(1.0 - x * x)),
    "atan": _smooth("atan", lambda x, y: 1.0 / (1.0 + x * x)),
    "sinh": _smooth("sinh", lambda x, y: math.sqrt(1.0 + y * y)),
    "cosh": _smooth("cosh", lambda x, y: abs(y)),
    "asinh": _smooth("asinh", lambda x, y: _root(1.0 + x * x)),
    "acosh": _smooth("acosh", lambda x, y: _root(x * x - 1.0)),
    "atanh": _smooth("atanh", lambda x, y: 1.0 / max(1.0 - x * x, 1e-30)),
}


def choose(condition: Any, a: Any, b: Any) -> Any:
    """If the condition is undecided, either is right; otherwise the other does not matter."""
    value, bound = (a[0], a[1]) if condition[0] != 0 else (b[0], b[1])
    if condition[1] > 0.0:
        bound = max(a[1], b[1]) + abs(a[0] - b[0]) * _UNIT
    return value, bound


def choose_whole(condition: Any, a: Any, b: Any) -> Any:
    value, bound = (a[0], a[1]) if condition[0] != 0 else (b[0], b[1])
    return value, (UNDECIDED if (condition[1] > 0.0) & (a[0] != b[0]) else bound)


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(a: Any, b: Any) -> Any:
        return function(a[0], b[0]), (UNDECIDED if _may_be(abs(a[0] - b[0]), a[1] + b[1]) else 0.0)

    return compare


def is_nan(x: Any) -> Any:
    return i64(x[0] != x[0]), 0.0


def is_inf(x: Any) -> Any:
    return i64(abs(x[0]) == math.inf), 0.0


def to_float(a: Any) -> Any:
    value = f64(a[0])
    return value, a[1] + (abs(value) if abs(value) > _UNIT else 0.0)


def whole(value: int) -> tuple[Any, float]:
    return i64(value), 0.0


def _of_whole(function: Callable[..., Any], arity: int) -> Callable[..., Any]:
    def of_one(a: Any) -> Any:
        return function(a[0]), a[1]

    def of_two(a: Any, b: Any) -> Any:
        return function(a[0], b[0]), max(a[1], b[1])

    def of_three(a: Any, b: Any, c: Any) -> Any:
        return function(a[0], b[0], c[0]), max(a[1], b[1], c[1])

    by_arity: Mapping[int, Callable[..., Any]] = {1: of_one, 2: of_two, 3: of_three}
    return by_arity[arity]


def _whole_power(exponent: int) -> Callable[[Any], Any]:
    return _of_whole(whole_functions.power(exponent), 1)


def _truncated(x: Any) -> Any:
    nearest = half_to_even(x)
    if x < 0.0:
        return nearest + 1.0 if nearest < x else nearest
    return nearest - 1.0 if nearest > x else nearest


def _limited(dtype: str) -> Callable[[Any], Any]:
    integer = whole_functions.limited(dtype, _truncated, f64)

    def limited(x: Any) -> Any:
        return integer(x[0]), (UNDECIDED if _near_whole(x) else 0.0)

    return limited


def _whole_functions() -> Mapping[str, Callable[..., Any]]:
    every = whole_functions.functions(half_to_even, _truncated, COMPARISONS, where)
    arity = {name: len(signature(function).parameters) for name, function in every.items() if name != "whole"}
    return {
        **{name: _of_whole(function, arity[name]) for name, function in every.items() if name != "whole"},
        **{f"truncate_{dtype}": _limited(dtype) for dtype in CASTS},
        "whole": whole, "float_of_whole": to_float, f"{WHOLE}where": choose_whole, f"{WHOLE}power": _whole_power,
    }  # fmt: skip


def quantise(x: Any, scale: Any, zero_point: Any) -> Any:
    return add(nearest_whole(divide(x, scale)), zero_point)


def dequantise(q: Any, scale: Any, zero_point: Any) -> Any:
    return multiply(subtract(q, zero_point), scale)


BOUNDED: Mapping[str, Callable[..., Any]] = {
    **_SMOOTH,
    **{name: _compare(function) for name, function in COMPARISONS.items()},
    **_whole_functions(),
    "sign": sign, "floor": floor, "ceil": ceil, "fmod": fmod, "modulo": modulo, "pow": pow_, "where": choose,
    "is_nan": is_nan, "is_inf": is_inf,
    "number": number, "add": add, "subtract": subtract, "multiply": multiply, "divide": divide, "negate": negate,
    "power": power, "relu": relu, "leaky_relu": leaky_relu, "clip": clip, "sigmoid": sigmoid, "silu": silu,
    "hard_sigmoid": hard_sigmoid, "hard_swish": hard_swish, "tanh": tanh, "gelu": gelu, "erf": erf, "exp": exp,
    "log": log, "sqrt": sqrt, "abs": absolute, "min": smaller, "max": larger, "round": nearest_whole,
    "quantise": quantise, "dequantise": dequantise,
}  # fmt: skip


def given(value: Any) -> Any:
    """An input, which has no error."""
    return f64(value), 0.0


def given_whole(value: Any) -> Any:
    return i64(value), 0.0
