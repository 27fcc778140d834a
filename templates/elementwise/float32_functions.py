"""The functions of expressions on float32 numbers, for kernels on GPUs and CPUs. See `program`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from schedsearch.templates.elementwise import whole_functions
from schedsearch.templates.parts.casts import f32, i64

_SQRT_HALF = f32(math.sqrt(0.5))
_SIXTH = f32(1 / 6)
_INFINITY = f32(math.inf)
_MOST_FACTORS = 16  # of a power that is multiplied out


def add(a: Any, b: Any) -> Any:
    return f32(a + b)


def subtract(a: Any, b: Any) -> Any:
    return f32(a - b)


def multiply(a: Any, b: Any) -> Any:
    return f32(a * b)


def divide(a: Any, b: Any) -> Any:
    return f32(a / b)


def negate(a: Any) -> Any:
    return f32(-a)


def smaller(a: Any, b: Any) -> Any:
    """A NaN stays."""
    return b if (b < a) | (b != b) else a


def larger(a: Any, b: Any) -> Any:
    return b if (b > a) | (b != b) else a


def absolute(x: Any) -> Any:
    return f32(abs(x))


def relu(x: Any) -> Any:
    return f32(0) if x < f32(0) else x


def leaky_relu(x: Any, slope: Any) -> Any:
    return f32(x * slope) if x < f32(0) else x


def clip(x: Any, low: Any, high: Any) -> Any:
    return smaller(larger(x, low), high)


def sigmoid(x: Any) -> Any:
    return f32(f32(1) / f32(f32(1) + f32(math.exp(f32(-x)))))


def silu(x: Any) -> Any:
    return f32(x / f32(f32(1) + f32(math.exp(f32(-x)))))


def hard_sigmoid(x: Any, alpha: Any, beta: Any) -> Any:
    return clip(f32(f32(alpha * x) + beta), f32(0), f32(1))


def hard_swish(x: Any) -> Any:
    return f32(x * hard_sigmoid(x, _SIXTH, f32(0.5)))


def tanh(x: Any) -> Any:
    return f32(math.tanh(x))


def erf(x: Any) -> Any:
    return f32(math.erf(x))


def gelu(x: Any) -> Any:
    return f32(f32(f32(0.5) * x) * f32(f32(1) + f32(math.erf(f32(x * _SQRT_HALF)))))


def exp(x: Any) -> Any:
    return f32(math.exp(x))


def log(x: Any) -> Any:
    return f32(math.log(x))


def sqrt(x: Any) -> Any:
    return f32(math.sqrt(x))


def sign(x: Any) -> Any:
    return f32(1) if x > f32(0) else f32(-1) if x < f32(0) else x


def fmod(a: Any, b: Any) -> Any:
    found = f32(f32(abs(a)) % f32(abs(b)))
    return f32(-found) if a < f32(0) else found


def modulo(a: Any, b: Any) -> Any:
    """With the sign of b."""
    found = fmod(a, b)
    return f32(found + b) if (found != f32(0)) & ((found < f32(0)) != (b < f32(0))) else found


def pow_(base: Any, exponent: Any) -> Any:
    return f32(math.pow(base, exponent))


def where(condition: Any, a: Any, b: Any) -> Any:
    """A NaN of the branch that is not taken goes nowhere."""
    return a if condition != i64(0) else b


def is_nan(x: Any) -> Any:
    return i64(x != x)


def is_inf(x: Any) -> Any:
    return i64(f32(abs(x)) == _INFINITY)


def _library(name: str) -> Callable[[Any], Any]:
    function = getattr(math, name)

    def call(x: Any) -> Any:
        return f32(function(x))

    return call


LIBRARY: Mapping[str, Callable[[Any], Any]] = {
    name: _library(name)
    for name in (
        *("sin", "cos", "tan", "asin", "acos", "atan"),
        *("sinh", "cosh", "asinh", "acosh", "atanh"),
    )
}


def less(a: Any, b: Any) -> Any:
    return i64(a < b)


def less_equal(a: Any, b: Any) -> Any:
    return i64(a <= b)


def greater(a: Any, b: Any) -> Any:
    return i64(a > b)


def greater_equal(a: Any, b: Any) -> Any:
    return i64(a >= b)


def equal(a: Any, b: Any) -> Any:
    return i64(a == b)


def not_equal(a: Any, b: Any) -> Any:
    return i64(a != b)


COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    each.__name__: each for each in (less, less_equal, greater, greater_equal, equal, not_equal)
}
"""Of two float32 or two int64."""


def power(exponent: float) -> Callable[[Any], Any]:
    if exponent == 0.5:
        return sqrt
    count, inverse, constant = int(abs(exponent)), exponent < 0, f32(exponent)

    def product(base: Any) -> Any:
        found = f32(1)
        for _ in range(count):
            found = f32(found * base)
        return f32(f32(1) / found) if inverse else found

    def general(base: Any) -> Any:
        return f32(math.pow(base, constant))

    return product if count == abs(exponent) and count <= _MOST_FACTORS else general


def nearest(nearest_whole: Callable[[Any], Any], product: Callable[[Any, Any], Any]) -> Mapping[str, Callable[..., Any]]:
    """All functions.

    Args:
        nearest_whole: of the device: rounds a float32 to an integer, half to even.
        product: of the device: multiplies two float32 and rounds, even where an addition follows. Dequantised numbers are
            then those of the formula, and a sum of them is quantised to the same integer on every device.
    """

    def quantise(x: Any, scale: Any, zero_point: Any) -> Any:
        return f32(nearest_whole(f32(x / scale)) + zero_point)

    def dequantise(q: Any, scale: Any, zero_point: Any) -> Any:
        return f32(product(f32(q - zero_point), scale))

    def floor(x: Any) -> Any:
        nearest = nearest_whole(x)
        return f32(nearest - f32(1)) if nearest > x else nearest

    def ceil(x: Any) -> Any:
        nearest = nearest_whole(x)
        return f32(nearest + f32(1)) if nearest < x else nearest

    def truncated(x: Any) -> Any:
        return ceil(x) if x < f32(0) else floor(x)

    return {
        **LIBRARY,
        **COMPARISONS,
        **whole_functions.functions(nearest_whole, truncated, COMPARISONS, where),
        "sign": sign, "floor": floor, "ceil": ceil, "fmod": fmod, "modulo": modulo, "pow": pow_, "where": where,
        "is_nan": is_nan, "is_inf": is_inf,
        "number": f32, "add": add, "subtract": subtract, "multiply": multiply, "divide": divide, "negate": negate,
        "power": power, "relu": relu, "leaky_relu": leaky_relu, "clip": clip, "sigmoid": sigmoid, "silu": silu,
        "hard_sigmoid": hard_sigmoid, "hard_swish": hard_swish, "tanh": tanh, "gelu": gelu, "erf": erf, "exp": exp,
        "log": log, "sqrt": sqrt, "abs": absolute, "min": smaller, "max": larger, "round": nearest_whole,
        "quantise": quantise, "dequantise": dequantise,
    }  # fmt: skip
