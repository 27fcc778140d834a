"""Executes the few PTX instructions of a division by a reciprocal: each exactly, rounded once."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np


def rounded(number: Fraction) -> float:
    """The nearest float32; of normal numbers, with any number of bits."""
    if number == 0:
        return 0.0
    exponent = math.frexp(float(number))[1] - 24
    return float(np.float32(math.ldexp(round(number / Fraction(2) ** exponent), exponent)))


def run_ptx(text: str, registers: dict[str, float], reciprocal_error: float) -> dict[str, float]:
    """Executes instructions on registers by their names: a float is a float32, an int a 32-bit integer or the bits of one.

    `reciprocal_error` is the relative error of rcp.approx.
    """
    operations: dict[str, Callable[..., float]] = {
        "rcp.approx.ftz.f32": lambda a: float(np.float32(1 / a) * np.float32(1 + reciprocal_error)),
        "neg.f32": lambda a: -a,
        "min.f32": min,
        "max.f32": max,
        "mul.rn.f32": lambda a, b: rounded(Fraction(a) * Fraction(b)),
        "mul.rn.sat.f32": lambda a, b: saturated(Fraction(a) * Fraction(b)),
        "add.rn.f32": lambda a, b: rounded(Fraction(a) + Fraction(b)),
        "fma.rn.f32": lambda a, b, c: rounded(Fraction(a) * Fraction(b) + Fraction(c)),
        "fma.rn.sat.f32": lambda a, b, c: saturated(Fraction(a) * Fraction(b) + Fraction(c)),
        "cvt.rni.s32.f32": round,
        "sub.s32": lambda a, b: a - b,
        "add.s32": lambda a, b: a + b,
        "and.b32": lambda a, b: a & b,
        "setp.eq.s32": lambda a, b: a == b,
        "mov.b32": lambda a: a,
    }
    for guard, name, operands in re.findall(r"(@q )?([a-z][\w.]+) ([^;]+);", text):
        if guard and not registers["q"]:
            continue
        to, *sources = operands.split(", ")
        numbers = [literal(each) if each[0].isdigit() else registers[each] for each in sources]
        registers[to] = operations[name](*map(as_float if name.endswith(".f32") else as_integer, numbers))
        assert name != "add.s32" or -(2**31) <= registers[to] < 2**31  # the instruction would wrap around
    return registers


def literal(text: str) -> float:
    """A number of PTX: 0f and the bits of a float32, or an integer."""
    return struct.unpack(">f", bytes.fromhex(text[2:]))[0] if text.startswith("0f") else int(text, 0)


def as_float(number: float) -> float:
    return struct.unpack(">f", struct.pack(">i", number))[0] if isinstance(number, int) else number


def as_integer(number: float) -> int:
    return number if isinstance(number, int) else struct.unpack(">i", struct.pack(">f", number))[0]


def saturated(number: Fraction) -> float:
    return rounded(min(max(number, Fraction(0)), Fraction(1)))
