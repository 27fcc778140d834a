"""exp and tanh of float32 numbers in plain arithmetic, so that LLVM computes a vector of them at once in a loop.

A call of a math library in a loop costs some nanoseconds a number. Errors are below four roundoffs of the result.

Source: the coefficients are those of Cephes (Moshier, "Methods and Programs for Mathematical Functions", 1989).
"""

from __future__ import annotations

from typing import Any

from schedsearch.backend.cpu_ops import times_power_of_two
from schedsearch.templates.parts.casts import f32

_LOG2_E = f32(1.44269504088896341)
_SHIFT = f32(12582912.0)  # 1.5 * 2^23: added to a small number, it leaves the nearest integer in the low bits
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_LOWEST, _LARGEST = f32(-87.33), f32(88.37)  # e^x is a normal number between


def exp(x: Any) -> Any:
    """e^x, from 1.2e-38 to 2.4e38. A NaN stays."""
    x = _LOWEST if x < _LOWEST else x
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
    return times_power_of_two(y, shifted)


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
