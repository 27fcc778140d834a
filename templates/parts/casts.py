"""Numba's scalar types under the names that CUDA code has for them.

In a kernel `u32(x)` converts x. Numba computes with int64 wherever a Python number of unknown size meets another, and a
division of 64 bits is a call, so kernels say the type of almost every number.
"""

from __future__ import annotations

from numba import types

i8, i16, i32, i64 = types.int8, types.int16, types.int32, types.int64
u8, u16, u32, u64 = types.uint8, types.uint16, types.uint32, types.uint64
f32, f64 = types.float32, types.float64

NAMES = {"u8": "uint8", "i8": "int8"} | {
    f"{sign}{bits}": f"{long}{bits}" for sign, long in (("i", "int"), ("u", "uint")) for bits in (16, 32, 64)
} | {"f32": "float32", "f64": "float64"}  # fmt: skip
"""Short name -> Numba's, for emulators that replace both."""
