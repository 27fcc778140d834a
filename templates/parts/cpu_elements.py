"""Elements of any format as float32 numbers in CPU kernels: how they lie in memory, and how they are widened and rounded.

::

    element, widen, narrow = element_type("float16"), widened("float16"), narrowed("float16")

    def double(x, y, start, stop):
        source, out = as_array(x, (size,), element), as_array(y, (size,), element)
        for i in range(start, stop):
            out[i] = narrow(2 * widen(source[i]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from schedsearch.backend.cpu_ops import narrow_op, round_to_even, widen_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import f32, i32, u16

FORMATS = ("float16", "bfloat16", "float32", "int8", "uint8")


def element_type(dtype: str) -> Any:
    """Numba's type of an element in memory; the bits of floats of 16 bits."""
    return u16 if dtype in ("float16", "bfloat16") else getattr(types, dtype)


def widened(dtype: str) -> Callable[[Any], Any]:
    """`widened(element) -> float32`, exact."""
    if dtype in ("float16", "bfloat16"):
        widen: Callable[[Any], Any] = widen_op(dtype)
        return widen

    def number(element: Any) -> Any:
        return f32(element)

    return number


def narrowed(dtype: str) -> Callable[[Any], Any]:
    """`narrowed(float32) -> element`, rounded half to even; integers saturate, and NaN becomes 0."""
    if dtype in ("float16", "bfloat16"):
        narrow: Callable[[Any], Any] = narrow_op(dtype)
        return narrow

    def same(value: Any) -> Any:
        return f32(value)

    if dtype == "float32":
        return same
    lowest, largest = (f32(limit) for limit in (dtype_of(dtype).lowest, dtype_of(dtype).largest))
    element = element_type(dtype)

    def whole(value: Any) -> Any:
        nearest = round_to_even(f32(value))
        nearest = f32(0) if nearest != nearest else nearest
        return element(i32(min(max(nearest, lowest), largest)))

    return whole
