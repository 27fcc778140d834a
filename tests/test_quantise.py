"""The stage `quantise`: its formula, and which integers verification accepts when they come from rounded floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from exact_ptx import run_ptx
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from schedsearch import WorkloadError
from schedsearch.backend import compile_source
from schedsearch.constructors.convolutions import conv2d
from schedsearch.ops import STAGES, encode
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.parts.stages import STAGE_CODES
from schedsearch.verification.compare import CpuComparer, Tolerance, Truth
from schedsearch.verification.reference import is_rounded

LAYER: dict[str, Any] = {"n": 1, "h": 8, "w": 8, "c": 32, "k": 32, "r": 3, "s": 3, "padding": 1, "dtype": "int8"}
EPILOGUE = ["bias", "dequantise", "scale_shift", "relu", {"quantise": {"to": "uint8"}}]


def accepted(y: list[int], truth: list[float], magnitude: float, roundings: int, dtype: str = "int8") -> list[bool]:
    """Whether verification accepts each element of y."""
    found = []
    for got, wanted in zip(y, truth):
        stored, number, bound = np.array([got], dtype), np.array([wanted]), np.array([magnitude])
        expected = Truth(dtype, 1, number.ctypes.data, bound.ctypes.data, Tolerance.quantised(roundings))
        found.append(CpuComparer().output(stored.ctypes.data, expected).violations == 0)
    return found


def test_away_from_a_half_only_the_nearest_integer_is_accepted() -> None:
    assert accepted([3, 2, 4], [3.2] * 3, magnitude=100.0, roundings=9) == [True, False, False]
    assert accepted([-128, -127, 127, 126], [-128.0, -128.0, 127.0, 127.0], 1e4, 9) == [True, False, True, False]


def test_at_a_half_both_neighbours_are_accepted_as_far_as_rounding_reaches() -> None:
    reach = 9 * 2.0**-24 * 1000.0  # nine roundings of numbers up to 1000
    assert accepted([2, 3, 1, 4], [2.5] * 4, 1000.0, 9) == [True, True, False, False]
    assert accepted([2, 2], [2.5 + reach * 0.99, 2.5 + reach * 1.01], 1000.0, 9) == [True, False]
    assert accepted([3, 3], [2.5 - reach * 0.99, 2.5 - reach * 1.01], 1000.0, 9) == [True, False]


def test_no_magnitude_makes_every_integer_acceptable() -> None:
    assert accepted([3, 2, 4], [3.0] * 3, magnitude=1e30, roundings=9) == [True, False, False]


@given(
    total=st.integers(-(2**24), 2**24), dequantise=st.floats(2.0**-20, 1.0), scale=st.floats(0.1, 4.0),
    shift=st.floats(-100.0, 100.0), divisor=st.floats(2.0**-6, 64.0),
)  # fmt: skip
def test_float32_in_any_order_of_rounding_is_accepted(total, dequantise, scale, shift, divisor) -> None:  # type: ignore[no-untyped-def]
    dequantise, scale, shift, divisor = map(np.float32, (dequantise, scale, shift, divisor))
    exact = np.float64(total) * dequantise * scale + shift
    magnitude = (abs(np.float64(total)) * dequantise * scale + abs(shift)) / divisor
    truth = float(np.clip(np.float64(exact) / np.float64(divisor), -128, 127))
    roundings = conv2d(**LAYER, epilogue=["dequantise", "scale_shift", "quantise"]).output.roundings
    dequantised = np.float32(total) * dequantise
    separate = dequantised * scale + shift
    fused = np.float32(np.float64(dequantised) * scale + shift)
    for value in (separate, fused):
        y = int(np.clip(np.rint(value / divisor), -128, 127))
        assert accepted([y], [truth], float(magnitude), roundings) == [True]


def test_only_an_epilogue_that_ends_with_quantise_may_be_off_by_one() -> None:
    quantised, requantised = (conv2d(**LAYER, epilogue=e).output for e in (EPILOGUE, ["bias", "requantise"]))
    assert (quantised.dtype, quantised.roundings) == ("uint8", 9)  # four stages of floats
    assert (requantised.dtype, requantised.roundings) == ("int8", 0)
    w = conv2d(**LAYER, epilogue=EPILOGUE)
    assert is_rounded(w, w.output) and not is_rounded(w, requantised)


@pytest.mark.parametrize("to", ["int8", "uint8"])
@pytest.mark.parametrize("zero_point", [0, 6])
def test_the_formula_is_that_of_onnx(to: str, zero_point: int) -> None:
    """An odd zero point is added after the rounding of a half, so NumPy's definition is compared with even ones there."""
    rng = np.random.default_rng(0)
    scale = np.float32(0.25)
    value = np.concatenate([np.arange(-600, 600) * np.float32(0.125), rng.normal(0, 60, 500)]).astype(np.float32)
    halves = np.abs(value / scale % 1) == 0.5
    assert halves.any()
    operands, scalars = {"quantise_scale": np.full(value.shape, 0.25)}, {"y_zero_point": float(zero_point)}
    ours = encode(STAGES["quantise"].apply(value.astype(np.float64), operands, scalars, {"to": to}), to)
    node = onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    given = {"x": value, "scale": scale, "zero": np.array(zero_point, to)}
    (theirs,) = ReferenceEvaluator(node).run(None, given)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("reciprocal_error", [-(2.0**-23), 0.0, 2.0**-23])
@pytest.mark.mostly_long(3)
def test_the_instructions_for_a_gpu_divide_as_exactly_as_numpy(reciprocal_error: float) -> None:
    """Among the quotients are halves, and neighbours of halves; rcp.approx may be off by one unit in the last place."""
    rng = np.random.default_rng(0)
    names = {name: name for name in ("value", "quantise_scale", "y_zero_point")}
    text = STAGE_CODES["quantise"].ptx.format(**names, **{f"temporary{i}": f"t{i}" for i in range(4)})
    scales = np.exp(rng.normal(0, 6, 300)).astype(np.float32)
    near = (rng.integers(-200, 200, 300) + np.float32(0.5)) * scales
    values = np.concatenate([near, np.nextafter(near, np.float32(1e9)), scales * rng.normal(0, 90, 300), near * 1e9])
    values = np.append(values, [3e38, -3e38, 3e38, 0.0, -0.0]).astype(np.float32)
    scales = np.append(np.tile(scales, 4), [2**-100, 2**-100, 2**100, 2**-100, 2**100]).astype(np.float32)
    for value, scale in zip(values, scales):
        found = run_ptx(text, {"value": float(value), "quantise_scale": float(scale), "y_zero_point": 3.0}, reciprocal_error)
        with np.errstate(over="ignore"):
            expected = np.clip(np.rint(value / scale) + 3, -128, 127)
        assert np.clip(found["value"], -128, 127) == expected, (value, scale)


def test_quantise_belongs_behind_dequantise_of_an_integer_convolution() -> None:
    for change, reason in (
        ({"epilogue": ["quantise"]}, "needs floating-point numbers, got int32; put dequantise before it"),
        ({"dtype": "float16", "epilogue": ["quantise"]}, "follows sums of int8 or uint8, but dtype is float16"),
        ({"epilogue": ["dequantise", "quantise", "relu"]}, "needs 32-bit sums, got int8"),
        ({"epilogue": ["dequantise", "quantise"], "out_dtype": "float32"}, "the epilogue leaves int8"),
    ):
        with pytest.raises(WorkloadError, match=reason):
            conv2d(**{**LAYER, **change})


@pytest.mark.long
def test_the_stage_compiles_for_hopper() -> None:
    template, target = load_template("conv2d_wgmma"), PRESETS["h200"]
    w = conv2d(**LAYER, epilogue=EPILOGUE)
    assert template.validate(w, target) is None
    source = template.kernel(w, target, template.default(w, target, template.space(w, target)))
    assert compile_source(source, target).resources.spill_bytes == 0
