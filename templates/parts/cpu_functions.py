"""Exponentials of float32 numbers and the like in plain arithmetic, so that LLVM computes a vector of them at once.

A call of a math library in a loop costs some nanoseconds a number. Errors are below four roundoffs of the result.

Sources: the coefficients of exp and tanh are those of Cephes (Moshier, "Methods and Programs for Mathematical Functions",
1989). Those of erf are fitted: the largest relative error is least, .25 roundoffs below .92 and .03 above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedsearch.backend.cpu_ops import times_power_of_two
from schedsearch.templates.parts.casts import f32

_LOG2_E = f32(1.44269504088896341)
_SHIFT = f32(12582912.0)  # 1.5 * 2^23: added to a small number, it leaves the nearest integer in the low bits
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_LOWEST, _LARGEST = f32(-87.33), f32(89.0)  # e^x is a normal number above, and infinite beyond
_ERF_SPLIT, _ERF_LAST = f32(0.92), f32(4.0)  # 1 - erf(4) is less than half a unit in the last place of 1
_SQRT_HALF = f32(0.70710678118654752)


def exp(x: Any) -> Any:
    """e^x; 0 where that is less than 1.2e-38. A NaN stays."""
    tiny = x < _LOWEST
    x = _LOWEST if tiny else x
    x = _LARGEST if x > _LARGEST else x
    shifted = f32(f32(x * _LOG2_E) + _SHIFT)
    whole = f32(shifted - _SHIFT)
    r = f32(f32(x - f32(whole * _LN2_HIGH)) - f32(whole * _LN2_LOW))
    y = f32(f32(1.9875691500e-4) * r + f32(1.3981999507e-3))
    y = f32(y * r + f32(8.3334519073e-3))
    y = f32(y * r + f32(4.1665795894e-2))
    y = f32(y * r + f32(1.6666665459e-1))
    y = f32(y * r + f32(5.0000001201e-1))
    y = f32(f32(f32(y * f32(r * r)) + r) + f32(1))
    y = f32(f32(2) * times_power_of_two(y, f32(shifted - f32(1))))  # 2^128 is no float32
    return f32(0) if tiny else y


def tanh(x: Any) -> Any:
    """A polynomial near 0, where 1 - 2 / (e^(2 x) + 1) would lose digits."""
    size = f32(abs(x))
    far = f32(f32(1) - f32(f32(2) / f32(exp(f32(f32(2) * size)) + f32(1))))
    far = f32(-far) if x < f32(0) else far
    square = f32(x * x)
    y = f32(f32(-5.70498872745e-3) * square + f32(2.06390887954e-2))
    y = f32(y * square + f32(-5.37397155531e-2))
    y = f32(y * square + f32(1.33314422036e-1))
    y = f32(y * square + f32(-3.33332819422e-1))
    near = f32(f32(f32(y * square) * x) + x)
    return near if size < f32(0.625) else far


def erf(x: Any) -> Any:
    """A polynomial near 0, and 1 - e^polynomial where that loses no digits."""
    size = f32(abs(x))
    t = _ERF_LAST if size > _ERF_LAST else size
    y = f32(f32(1.95941198e-4) * t + f32(-3.04325621e-3))
    y = f32(y * t + f32(2.22270755e-2))
    y = f32(y * t + f32(-1.0393192e-1))
    y = f32(y * t + f32(-6.37181876e-1))
    y = f32(y * t + f32(-1.12767585))
    far = f32(f32(1) - exp(f32(y * t + f32(-1.95621088e-4))))
    far = f32(-far) if x < f32(0) else far
    square = f32(x * x)
    y = f32(f32(-5.99937545e-4) * square + f32(4.99482555e-3))
    y = f32(y * square + f32(-2.67677176e-2))
    y = f32(y * square + f32(1.12818459e-1))
    y = f32(y * square + f32(-3.76124965e-1))
    y = f32(y * square + f32(1.12837915))
    return far if size > _ERF_SPLIT else f32(y * x)


def sigmoid(x: Any) -> Any:
    return f32(f32(1) / f32(f32(1) + exp(f32(-x))))


def silu(x: Any) -> Any:
    return f32(x / f32(f32(1) + exp(f32(-x))))


def gelu(x: Any) -> Any:
    return f32(f32(f32(0.5) * x) * f32(f32(1) + erf(f32(x * _SQRT_HALF))))


FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {each.__name__: each for each in (exp, tanh, erf, sigmoid, silu, gelu)}
"""By their names in expressions."""
