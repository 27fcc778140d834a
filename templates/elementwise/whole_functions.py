"""The functions of expressions on integers of 64 bits, which wrap, and conversions to and from them. See `program`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.expression_functions import CASTS
from schedsearch.ops.expression_types import WHOLE
from schedsearch.templates.parts.casts import f32, i8, i16, i32, i64, u8, u16, u32

_BITS = 64
_LARGEST = 2**63 - 1


def add(a: Any, b: Any) -> Any:
    return i64(a + b)


def subtract(a: Any, b: Any) -> Any:
    return i64(a - b)


def multiply(a: Any, b: Any) -> Any:
    return i64(a * b)


def negate(a: Any) -> Any:
    return i64(i64(0) - a)


def absolute(a: Any) -> Any:
    return i64(i64(0) - a) if a < i64(0) else a


def sign(a: Any) -> Any:
    return i64(i64(a > i64(0)) - i64(a < i64(0)))


def relu(a: Any) -> Any:
    return a if a > i64(0) else i64(0)


def smaller(a: Any, b: Any) -> Any:
    return b if b < a else a


def larger(a: Any, b: Any) -> Any:
    return b if b > a else a


def clip(a: Any, low: Any, high: Any) -> Any:
    return smaller(larger(a, low), high)


def quotient(a: Any, b: Any) -> Any:
    """Truncated; 0 if b is 0. Processors trap at the least integer divided by -1."""
    if b == i64(0):
        return i64(0)
    if b == i64(-1):
        return i64(i64(0) - a)
    floor = i64(a // b)
    return i64(floor + i64(1)) if (floor < i64(0)) & (i64(floor * b) != a) else floor


def fmod(a: Any, b: Any) -> Any:
    """With the sign of a; 0 if b is 0."""
    return i64(0) if b == i64(0) else i64(a - i64(quotient(a, b) * b))


def modulo(a: Any, b: Any) -> Any:
    """With the sign of b; 0 if b is 0."""
    found = fmod(a, b)
    return i64(found + b) if (found != i64(0)) & ((found < i64(0)) != (b < i64(0))) else found


def pow_(base: Any, exponent: Any) -> Any:
    """By squaring. A negative exponent gives the truncated reciprocal: 0 but for bases 1 and -1."""
    odd = i64(exponent & i64(1))
    if exponent < i64(0):
        if base == i64(1):
            return base
        if base == i64(-1):
            return i64(-1) if odd != i64(0) else i64(1)
        return i64(0)
    found, factor, left = i64(1), i64(base), i64(exponent)
    while left != i64(0):
        if i64(left & i64(1)) != i64(0):
            found = i64(found * factor)
        factor = i64(factor * factor)
        left = i64(left >> i64(1))
    return found


def power(exponent: int) -> Callable[[Any], Any]:
    count = int(exponent)

    def product(base: Any) -> Any:
        return pow_(base, i64(count))

    return product


def bit_and(a: Any, b: Any) -> Any:
    return i64(a & b)


def bit_or(a: Any, b: Any) -> Any:
    return i64(a | b)


def bit_xor(a: Any, b: Any) -> Any:
    return i64(a ^ b)


def invert(a: Any) -> Any:
    return i64(i64(-1) - a)


def shift_left(a: Any, b: Any) -> Any:
    """0 beyond the 64 bits."""
    inside = (b >= i64(0)) & (b < i64(_BITS))
    return i64(a << b) if inside else i64(0)


def shift_right(a: Any, b: Any) -> Any:
    """The sign beyond the 64 bits."""
    inside = (b >= i64(0)) & (b < i64(_BITS))
    return i64(a >> (b if inside else i64(_BITS - 1)))


def to_float(a: Any) -> Any:
    return f32(a)


def of_byte(x: Any) -> Any:
    """Of a float without a fraction."""
    return i64(x)


def wrap(dtype: str) -> Callable[[Any], Any]:
    kept = {"int8": i8, "uint8": u8, "int16": i16, "uint16": u16, "int32": i32, "uint32": u32, "int64": i64}[dtype]

    def wrapped(a: Any) -> Any:
        return i64(kept(a))

    return wrapped


def limited(dtype: str, rounded: Callable[[Any], Any], number: Callable[[Any], Any] = f32) -> Callable[[Any], Any]:
    """Of a float32, or another float: an integer, limited to a dtype; NaN is 0."""
    lowest, largest = int(dtype_of(dtype).lowest), int(dtype_of(dtype).largest)
    least, most = number(lowest), number(largest)  # of long formats a power of two beyond the largest integer

    def integer(x: Any) -> Any:
        whole = rounded(x)
        if not whole > least:
            return i64(0) if whole != whole else i64(lowest)
        return i64(whole) if whole < most else i64(largest)

    return integer


def functions(
    nearest_whole: Callable[[Any], Any],
    truncated: Callable[[Any], Any],
    comparisons: Mapping[str, Callable[[Any, Any], Any]],
    where: Callable[[Any, Any, Any], Any],
) -> Mapping[str, Callable[..., Any]]:
    """All functions that `expression_types.typed` names.

    Args:
        nearest_whole, truncated: of float32, to float32 without fractions.
        comparisons, where: that take integers as well as float32.
    """
    of_integers = {
        **comparisons, "where": where, "add": add, "subtract": subtract, "multiply": multiply, "negate": negate,
        "abs": absolute, "sign": sign, "relu": relu, "min": smaller, "max": larger, "clip": clip, "quotient": quotient,
        "fmod": fmod, "modulo": modulo, "pow": pow_, "power": power, "bit_and": bit_and, "bit_or": bit_or,
        "bit_xor": bit_xor, "invert": invert, "shift_left": shift_left, "shift_right": shift_right,
    }  # fmt: skip
    return {
        "whole": i64,
        "float_of_whole": to_float,
        "whole_of_byte": of_byte,
        **{f"{WHOLE}{name}": function for name, function in of_integers.items()},
        **{f"wrap_{dtype}": wrap(dtype) for dtype in CASTS},
        **{f"truncate_{dtype}": limited(dtype, truncated) for dtype in CASTS},
        **{f"saturate_{dtype}": limited(dtype, nearest_whole) for dtype in CASTS},
    }
