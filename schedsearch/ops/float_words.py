"""Numbers of float32 and float64 in shape arithmetic: words of int64 between the operations, float64 within them.

A number is a word of int64: the bits of its magnitude in float64, negated if the number is negative. Words are therefore in
the order of their numbers, and zero is 0 without a sign. A number of float32 has the word of the same number in float64.

Every result is rounded to nearest, ties to even, as IEEE 754 says. Kernels of sizes are compiled without contraction
(`KernelStep.contract`), so that hosts, CPUs and GPUs agree. The float64 result of two numbers of float32 has more than twice
their bits, so that rounding it once more gives the float32 result. There are no infinities and no NaN: rows whose ranges do
not exclude them are refused when a model is read.

See docs/decisions/179-floats-of-shapes-by-hardware.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

DTYPES = ("float32", "float64")
_INTEGERS = 2.0**52  # from here on every number of float64 is an integer


def word_of(number: Any) -> Any:
    """The word of a finite number."""
    magnitude = int(np.float64(abs(number)).view(np.int64))
    return -magnitude if number < 0 else magnitude


def number_of(word: Any) -> Any:
    """The number of a word, in float64."""
    magnitude = float(np.int64(abs(word)).view(np.float64))
    return -magnitude if word < 0 else magnitude


MOST = word_of(2.0**100)  # what ranges may reach: far from the largest number of float32
LEAST_DIVISOR = word_of(2.0**-100)


def _add(a: Any, b: Any) -> Any:
    return a + b


def _sub(a: Any, b: Any) -> Any:
    return a - b


def _mul(a: Any, b: Any) -> Any:
    return a * b


def _div(a: Any, b: Any) -> Any:
    """0 where b is 0, which ranges exclude."""
    return 0.0 if b == 0 else a / b


def _round(number: Any) -> Any:
    """The nearest integer, and the even one of two: the sum has no room for what is behind the point."""
    magnitude = abs(number)
    if magnitude < _INTEGERS:
        magnitude = magnitude + _INTEGERS - _INTEGERS
    return -magnitude if number < 0 else magnitude


def _floor(number: object) -> Any:
    nearest = _round(number)
    return nearest - 1.0 if nearest > number else nearest


def _ceil(number: object) -> Any:
    nearest = _round(number)
    return nearest + 1.0 if nearest < number else nearest


def _to_float32(number: Any) -> Any:
    """The nearest number of float32; integers are rounded once, too."""
    return float(np.float32(number))


def _to_float64(number: Any) -> Any:
    return float(number)


def cut(word: object) -> Any:
    """The integer of a number within int64, without what is behind the point."""
    return int(number_of(word))


def _of_words(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compute(a: Any) -> Any:
        return word_of(op(number_of(a)))

    return compute


def _of_integers(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compute(a: Any) -> Any:
        return word_of(convert(np.int64(a)))

    return compute


def _of_two(op: Callable[[Any, Any], Any], convert: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def compute(a: Any, b: Any) -> Any:
        return word_of(convert(op(number_of(a), number_of(b))))

    return compute


_OPS = {"Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div}
_TO = {"float32": _to_float32, "float64": _to_float64}

BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    f"{op} {name}": _of_two(compute, convert) for op, compute in _OPS.items() for name, convert in _TO.items()
}
UNARY: Mapping[str, Callable[[Any], Any]] = {
    "Floor": _of_words(_floor),
    "Ceil": _of_words(_ceil),
    "Round": _of_words(_round),
    "cut": cut,
    "float32 of float64": _of_words(_to_float32),
    **{f"{name} of whole": _of_integers(convert) for name, convert in _TO.items()},
}
ALL = frozenset([*BINARY.values(), *UNARY.values()])
