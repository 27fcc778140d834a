"""Numbers of float32 and float64 in shape arithmetic, as integers: the same on the host, a CPU and a GPU.

A number is a word of int64: the bits of its magnitude in float64, negated if the number is negative. Words are therefore in
the order of their numbers, and zero is 0 without a sign. A number of float32 has the word of the same number in float64.
Results are rounded to nearest, ties to even, as IEEE 754 says: no compiler can contract or reorder this arithmetic. There
are no infinities and no NaN: rows whose ranges do not exclude them are refused when a model is read.

See docs/decisions/167-floats-of-shapes.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

FORMATS = {"float32": (24, -149), "float64": (53, -1074)}  # bits of a significand, exponent of the least number
_FRACTION = 2**52 - 1
_HIDDEN = 2**52
_HALF = 26  # bits of the lower half of a significand
_HALF_BITS = 2**26 - 1
_LEAST = -(2**63)
_BELOW_8_BITS = 2**44 - 1  # of 52


def word_of(number: float) -> int:
    """The word of a finite number."""
    magnitude = int.from_bytes(struct.pack("<d", abs(number)), "little")
    return -magnitude if number < 0 else magnitude


def number_of(word: int) -> float:
    """The number of a word."""
    found: float = struct.unpack("<d", abs(word).to_bytes(8, "little"))[0]
    return -found if word < 0 else found


MOST = word_of(2.0**100)  # what ranges may reach: far from the largest number of float32
LEAST_DIVISOR = word_of(2.0**-100)


# ---- integer Python: a magnitude is significand * 2^exponent, with 53 bits of significand unless it is 0


def _significand(word: Any) -> Any:
    magnitude = abs(word)
    if magnitude > _FRACTION:
        return (magnitude & _FRACTION) + _HIDDEN
    while 0 < magnitude <= _FRACTION:
        magnitude = magnitude * 2
    return magnitude


def _exponent(word: Any) -> Any:
    magnitude = abs(word)
    exponent = max(magnitude >> 52, 1) - 1075
    while 0 < magnitude <= _FRACTION:
        magnitude = magnitude * 2
        exponent = exponent - 1
    return exponent


def _rounded(negative: Any, significand: Any, exponent: Any, rest: Any, digits: Any, least: Any) -> Any:
    """The word of a number of up to 63 bits; `rest`: whether it is a little larger, if it has more than `digits` bits."""
    bits = 0
    while bits < 63 and significand >> bits:
        bits = bits + 1
    drop = max(bits - digits, least - exponent)
    kept = significand
    if drop > 62:
        kept = 0 * significand
    elif drop > 0:
        kept = significand >> drop
        below = significand - (kept << drop)
        half = 1 << (drop - 1)
        if below > half or (below == half and (rest != 0 or kept & 1 == 1)):
            kept = kept + 1
    return _packed(negative, kept, exponent + max(drop, 0))


def _packed(negative: Any, significand: Any, exponent: Any) -> Any:
    """The word of a number that float64 has, with up to 54 bits."""
    kept, place = significand, exponent
    if kept >= 2 * _HIDDEN:  # a power of two
        kept, place = kept >> 1, place + 1
    while 0 < kept < _HIDDEN and place > -1074:
        kept, place = kept << 1, place - 1
    magnitude = kept if kept < _HIDDEN else ((place + 1075) << 52) + (kept - _HIDDEN)
    return -magnitude if negative else magnitude


def _sum(a: Any, b: Any, digits: Any, least: Any) -> Any:
    large, small = (a, b) if abs(a) >= abs(b) else (b, a)
    exponent = _exponent(large) - 8
    apart = max(exponent + 8 - _exponent(small), 0)  # that of 0 may be larger
    one, other = _significand(large) << 8, _significand(small) << 8
    moved = 0 * small if apart > 62 else other >> apart
    rest = 1 if other != 0 and (apart > 62 or moved << apart != other) else 0
    if (large < 0) == (small < 0):
        return _rounded(large < 0, one + moved, exponent, rest, digits, least)
    return _rounded(large < 0, one - moved - rest, exponent, rest, digits, least)


def _product(a: Any, b: Any, digits: Any, least: Any) -> Any:
    one, other = _significand(a), _significand(b)
    middle = (one >> _HALF) * (other & _HALF_BITS) + (one & _HALF_BITS) * (other >> _HALF)
    low = (one & _HALF_BITS) * (other & _HALF_BITS) + ((middle & _HALF_BITS) << _HALF)
    high = (one >> _HALF) * (other >> _HALF) + (middle >> _HALF) + (low >> 52)  # below 2^54
    low = low & _FRACTION
    rest = 1 if low & _BELOW_8_BITS else 0
    exponent = _exponent(a) + _exponent(b) + 44
    return _rounded((a < 0) != (b < 0), (high << 8) + (low >> 44), exponent, rest, digits, least)


def _quotient(a: Any, b: Any, digits: Any, least: Any) -> Any:
    """Ten bits at a time; 0 where b is 0, which ranges exclude."""
    divisor = max(_significand(b), 1)
    found = _significand(a) // divisor
    left = _significand(a) - found * divisor
    for _ in range(6):
        step = (left << 10) // divisor
        left = (left << 10) - step * divisor
        found = (found << 10) + step
    exponent = _exponent(a) - _exponent(b) - 60
    return _rounded((a < 0) != (b < 0), found, exponent, 1 if left else 0, digits, least)


def _whole(word: Any, way: int) -> Any:
    """The integer below (-1), above (1), or nearest to a number, and the even one of two (0)."""
    exponent, significand = _exponent(word), _significand(word)
    if exponent >= 0 or word == 0:
        return word
    shift = min(-exponent, 62)
    kept = significand >> shift
    below = significand - (kept << shift)
    half = 1 << (shift - 1)
    away = below > half or (below == half and kept & 1 == 1) if way == 0 else below != 0 and (word < 0) == (way < 0)
    return _packed(word < 0, kept + 1 if away else kept, 0 * kept)


def _floor(word: Any) -> Any:
    return _whole(word, -1)


def _ceil(word: Any) -> Any:
    return _whole(word, 1)


def _round(word: Any) -> Any:
    return _whole(word, 0)


def cut(word: Any) -> Any:
    """The integer of a number within int64, without what is behind the point."""
    exponent, significand = _exponent(word), _significand(word)
    found = significand << min(exponent, 10) if exponent >= 0 else significand >> min(-exponent, 62)
    return -found if word < 0 else found


def _of_format(op: Callable[..., Any], digits: int, least: int) -> Callable[..., Any]:
    def compute(a: Any, b: Any) -> Any:
        return op(a, b, digits, least)

    return compute


def _from_whole(digits: int, least: int) -> Callable[[Any], Any]:
    def convert(number: Any) -> Any:
        if number == _LEAST:  # its magnitude is beyond int64
            return _packed(True, _HIDDEN, 11 + 0 * number)
        return _rounded(number < 0, abs(number), 0 * number, 0, digits, least)

    return convert


def _narrowed(word: Any) -> Any:
    return _rounded(word < 0, _significand(word), _exponent(word), 0, 24, -149)


_OPS = {"Add": _sum, "Sub": _sum, "Mul": _product, "Div": _quotient}


def _difference(add: Callable[..., Any]) -> Callable[..., Any]:
    def compute(a: Any, b: Any) -> Any:
        return add(a, -b)

    return compute


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    f"{op} {name}": _difference(_of_format(each, *limits)) if op == "Sub" else _of_format(each, *limits)
    for op, each in _OPS.items()
    for name, limits in FORMATS.items()
}
UNARY: Mapping[str, Callable[[Any], Any]] = {
    "Floor": _floor,
    "Ceil": _ceil,
    "Round": _round,
    "cut": cut,
    "float32 of float64": _narrowed,
    **{f"{name} of whole": _from_whole(*limits) for name, limits in FORMATS.items()},
}
