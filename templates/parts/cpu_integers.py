"""What the stages of an epilogue do to 32-bit integers in CPU kernels; `stages.STAGE_CODES` has the same for float32.

An entry of `INTEGER_STAGES` is a function of the stage and of Numba's type of the integers. It returns
`function(value, operands)`, in which `operands` are the stage's operands and scalars in the order in which its kind declares
them. The result has the same type, or is the number that the stage makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.cpu_ops import round_to_even, rounded_product
from schedsearch.ops import Stage
from schedsearch.templates.parts.casts import f32, i32, i64

Integers = Callable[[Stage, Any], Callable[[Any, Any], Any]]

_ZERO = np.float32(0)
_BEYOND = np.float32(2**33)  # outside of 32 bits
_SATURATED = np.float32(2**24)  # outside of 8 bits, whatever the zero point is


def saturated(value: Any, zero_point: Any, lowest: int, largest: int) -> Any:
    """A float32 as an int32 in kernels: rounded half to even, plus the zero point, limited to lowest ... largest."""
    rounded = i32(round_to_even(min(max(value, -_SATURATED), _SATURATED)))
    return min(max(i32(rounded + i32(zero_point)), i32(lowest)), i32(largest))


def _add(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    def add(value: Any, operands: Any) -> Any:
        return kind(value + operands[0])

    return add


def _relu(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    def relu(value: Any, operands: Any) -> Any:
        return max(value, kind(0))

    return relu


def _clip(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    lowest, largest = int(kind.minval), int(kind.maxval)

    def clip(value: Any, operands: Any) -> Any:
        low, high = operands
        # A bound beyond 32 bits becomes the nearest integer of the format.
        least = i64(math.ceil(min(max(low, -_BEYOND), _BEYOND)))
        most = i64(math.floor(min(max(high, -_BEYOND), _BEYOND)))
        least, most = min(max(least, lowest), largest), min(max(most, lowest), largest)
        return min(max(value, kind(least)), kind(most))

    return clip


def _requantise(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    narrow = getattr(types, stage.params["to"])
    lowest, largest = int(narrow.minval), int(narrow.maxval)

    def requantise(value: Any, operands: Any) -> Any:
        scale, zero_point = operands
        return narrow(saturated(f32(value) * scale, zero_point, lowest, largest))

    return requantise


def quantise(stage: Stage) -> Callable[[Any, Any], Any]:
    """The stage `quantise`: `function(value, operands)` for a float32."""
    narrow = getattr(types, stage.params["to"])
    lowest, largest = int(narrow.minval), int(narrow.maxval)

    def quantise(value: Any, operands: Any) -> Any:
        scale, zero_point = operands
        return narrow(saturated(f32(value / scale), zero_point, lowest, largest))

    return quantise


def _requantise_add(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    made, middle = getattr(types, stage.params["to"]), getattr(types, stage.params["middle"])
    lowest, largest = int(made.minval), int(made.maxval)
    least, most = int(middle.minval), int(middle.maxval)

    def requantise_add(value: Any, operands: Any) -> Any:
        scale, residual, by_middle, middle_zero, by_residual, residual_zero, divisor, zero_point, relu = operands
        whole = i32(saturated(f32(value) * scale, middle_zero, least, most) - i32(middle_zero))
        other = i32(i32(residual) - i32(residual_zero))
        total = rounded_product(f32(whole), by_middle) + rounded_product(f32(other), by_residual)
        if relu and total < _ZERO:
            total = _ZERO
        return made(saturated(f32(total / divisor), zero_point, lowest, largest))

    return requantise_add


def _dequantise(stage: Stage, kind: Any) -> Callable[[Any, Any], Any]:
    def dequantise(value: Any, operands: Any) -> Any:
        return f32(value) * operands[0]

    return dequantise


INTEGER_STAGES: Mapping[str, Integers] = {
    "bias": _add,
    "residual": _add,
    "relu": _relu,
    "clip": _clip,
    "requantise": _requantise,
    "requantise_add": _requantise_add,
    "dequantise": _dequantise,
}
