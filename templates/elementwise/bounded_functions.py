"""The functions of expressions on pairs: a float64 and a bound of the error of a kernel in float32. See `program`.

The bound counts roundoff errors of float32 (2^-24). An operation adds one of its result to what its operands bring along,
and a function of a math library four: CUDA's are within two units in the last place (CUDA C++ Programming Guide,
"Mathematical Functions Appendix"), and those of C libraries within one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from schedsearch.templates.parts.casts import f64
from schedsearch.templates.parts.reference import half_to_even

_LIBRARY = 4.0
_UNIT = 2.0**24
_SLOPE_OF_ERF = 2 / math.sqrt(math.pi)
_LARGEST_EXPONENT = 700.0


def number(value: float) -> tuple[float, float]:
    return float(value), abs(float(value))


def add(a: Any, b: Any) -> Any:
    value = a[0] + b[0]
    return value, a[1] + b[1] + abs(value)


def subtract(a: Any, b: Any) -> Any:
    value = a[0] - b[0]
    return value, a[1] + b[1] + abs(value)


def multiply(a: Any, b: Any) -> Any:
    value = a[0] * b[0]
    return value, a[1] * abs(b[0]) + b[1] * abs(a[0]) + abs(value)


def divide(a: Any, b: Any) -> Any:
    value = a[0] / b[0]
    return value, (a[1] + abs(value) * b[1]) / abs(b[0]) + 2.0 * abs(value)


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
    return value, value * (x[1] + _LIBRARY)


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
        return value, base[1] * slope + (abs(exponent) + 4.0 * _LIBRARY) * abs(value)

    return raised


def nearest_whole(x: Any) -> Any:
    """A half is where a step of 1 may go either way."""
    value = half_to_even(x[0])
    near = abs(abs(x[0] - value) - 0.5) * _UNIT <= x[1]
    return value, (_UNIT if near else 0.0)


def quantise(x: Any, scale: Any, zero_point: Any) -> Any:
    return add(nearest_whole(divide(x, scale)), zero_point)


def dequantise(q: Any, scale: Any, zero_point: Any) -> Any:
    return multiply(subtract(q, zero_point), scale)


BOUNDED: Mapping[str, Callable[..., Any]] = {
    "number": number, "add": add, "subtract": subtract, "multiply": multiply, "divide": divide, "negate": negate,
    "power": power, "relu": relu, "leaky_relu": leaky_relu, "clip": clip, "sigmoid": sigmoid, "silu": silu,
    "hard_sigmoid": hard_sigmoid, "hard_swish": hard_swish, "tanh": tanh, "gelu": gelu, "erf": erf, "exp": exp,
    "log": log, "sqrt": sqrt, "abs": absolute, "min": smaller, "max": larger, "round": nearest_whole,
    "quantise": quantise, "dequantise": dequantise,
}  # fmt: skip


def given(value: Any) -> Any:
    """An input, which has no error."""
    return f64(value), 0.0
