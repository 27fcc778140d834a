"""The instructions that requantise has on a GPU, executed one by one on arrays of registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedsearch.templates.parts.stages import STAGE_CODES

CODE = STAGE_CODES["requantise"]
TEXTS = {"any sums": (CODE.integer, -(2**31)), "sums after relu": (CODE.after_relu, 0)}  # and the least sum


def requantised_by_ptx(
    text: str, total: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], zero_point: float
) -> np.ndarray[Any, Any]:
    """Executes the instructions of requantise on arrays of int32 registers."""
    bits = {name: np.asarray(value).view(np.int32) for name, value in (("value", total), ("scale", scale))}
    bits["zero"] = np.array([zero_point], np.float32).view(np.int32)

    def number(of: Callable[[Any], Any], *operands: Any) -> Any:
        return of(*(each.view(np.float32) for each in operands)).astype(np.float32).view(np.int32)

    operations: dict[str, Callable[..., Any]] = {
        "cvt.rn.f32.s32": lambda a: a.astype(np.float32).view(np.int32),
        "mul.rn.f32": lambda a, b: number(np.multiply, a, b),
        "add.rn.f32": lambda a, b: number(np.add, a, b),
        "max.f32": lambda a, b: number(np.fmax, a, b),
        "cvt.rni.s32.f32": lambda a: np.rint(a.view(np.float32)).astype(np.int32),
        "add.s32": np.add,
        "sub.s32": np.subtract,
    }
    names = {"value": "value", "requantise_scale": "scale", "y_zero_point": "zero", "temporary0": "t0", "int": "s32"}
    with np.errstate(over="ignore"):
        for name, operands in re.findall(r"([a-z][\w.]+) ([^;]+);", text.format(**names)):
            to, *sources = operands.split(", ")
            literals = {each: np.array([int(each[2:], 16)], np.uint32).view(np.int32) for each in sources if each[0] == "0"}
            bits[to] = operations[name](*(literals[each] if each in literals else bits[each] for each in sources))
    return bits["value"]


@pytest.mark.parametrize("zero_point", [0.0, 7.0, -128.0, 255.0])
@pytest.mark.parametrize(("text", "least"), TEXTS.values(), ids=TEXTS)
def test_requantise_rounds_and_saturates_as_its_formula_says(text: str, least: int, zero_point: float) -> None:
    """Sums of the whole range of int32, products that are halves, beyond 2^22, infinite, or too small for normal numbers."""
    rng = np.random.default_rng(0)
    extremes = np.array([-(2**31), 2**31 - 1, -(2**31) + 64, -1, 0, 1, 2**24 + 1, -(2**24) - 3])
    total = np.concatenate([extremes, rng.integers(-(2**31), 2**31, 4000), rng.integers(-3000, 3000, 4000)])
    total = np.maximum(total, least).astype(np.int32)
    for scale in (0.5, 2.0**-5, 0.0007, 1.0, 2.0**-24, 1e-38, 1e30, 3e38):
        scales = np.full(total.shape, scale, np.float32)
        with np.errstate(over="ignore"):
            product = total.astype(np.float32) * scales
        for low, high in ((-128, 127), (0, 255)):
            expected = np.clip(np.rint(product.astype(np.float64)) + zero_point, low, high)
            np.testing.assert_array_equal(np.clip(requantised_by_ptx(text, total, scales, zero_point), low, high), expected)
