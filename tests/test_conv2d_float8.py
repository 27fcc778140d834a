"""float8 in conv2d: what it means, how its sums are judged, and which arrays are taken."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import convolve

from schedsearch.backend import compile_source
from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import ArgumentError, WorkloadError
from schedsearch.measure.timed_set import likely_roundoffs
from schedsearch.ops import decode, encode
from schedsearch.runtime import arrays as runtime_arrays
from schedsearch.template import load_reference
from schedsearch.verification.compare import CpuComparer, Tolerance, Truth
from schedsearch.verification.inputs import check_domains, draw, second_domains, timing_pattern
from schedsearch.verification.truths import Truths, allowed_roundoffs
from schedsearch.workload import Workload

ROWS = 96
FORMATS = ("float8_e4m3", "float8_e5m2")
LAYER = {"n": 1, "h": 5, "w": 6, "c": 24, "k": 16, "r": 3, "s": 3, "padding": 1}
Array = np.ndarray[Any, np.dtype[Any]]


def workload(**changes: Any) -> Workload:
    return Workload.conv2d(**{**LAYER, "dtype": "float8_e4m3", **changes})


def pointwise(k: int, **changes: Any) -> Workload:
    return workload(c=k, k=8, r=1, s=1, padding=0, **changes)


# ---- the operator


def test_scales_are_a_stage_and_vectors_are_float32() -> None:
    plain = workload(epilogue=["bias", "relu"])
    assert (plain.out_dtype, plain.output.dtype) == ("float16", "float16")
    scaled = workload(weight_dtype="float8_e5m2", epilogue=["bias", {"dequantise": {"to": "bfloat16"}}, "residual"])
    dtypes = {spec.name: spec.dtype for spec in scaled.signature}
    assert dtypes == {
        "x": "float8_e4m3", "weight": "float8_e5m2", "bias": "float32", "dequantise_scale": "float32",
        "residual": "bfloat16",
    }  # fmt: skip
    assert scaled.out_dtype == "bfloat16"
    assert scaled.label.endswith("p1 e4m3xe5m2->bf16 NHWC+bias+dequantise(to=bfloat16)+residual")


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"weight_dtype": "int8"}, "weight_dtype", "allowed: float8_e4m3, float8_e5m2"),
        ({"out_dtype": "float8_e4m3"}, "out_dtype", "allowed: float16, bfloat16, float32"),
        ({"out_dtype": "float16", "epilogue": ["dequantise"]}, "out_dtype", "the epilogue leaves float32"),
        ({"epilogue": ["requantise"]}, "epilogue", "needs the 32-bit sums of int8 or uint8, got float16"),
        ({"dtype": "float16", "epilogue": ["dequantise"]}, "epilogue", "sums of int8, uint8 or float8, got float16"),
        ({"precision": "tf32"}, "precision", "belongs to float32, but dtype is float8_e4m3"),
        ({"zero_points": ["x"]}, "zero_points", "belong to int8 and uint8"),
    ],
)
def test_impossible_workloads_say_what_is_allowed(changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        workload(**changes)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(("x", "weight"), [(x, weight) for x in FORMATS for weight in FORMATS])
@pytest.mark.mostly_long(3)
def test_the_reference_multiplies_the_numbers_that_the_bytes_mean(x: str, weight: str) -> None:
    w = workload(dtype=x, weight_dtype=weight, epilogue=[{"dequantise": {"to": "float32"}}])
    rng = np.random.default_rng(5)
    values = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in w.signature}
    raw = {spec.name: encode(values[spec.name], spec.dtype) for spec in w.signature}
    exact = {spec.name: decode(raw[spec.name], spec.dtype) for spec in w.signature}
    expected = convolve(w, exact["x"], exact["weight"]).astype(np.float64) * exact["dequantise_scale"]
    points = load_reference("conv2d").points(w, raw, {}, np.arange(w.output.size))
    np.testing.assert_allclose(points, expected.reshape(-1), rtol=1e-5, atol=1e-5)

    target = detect("cpu")
    with contextlib.closing(open_device(target)) as device:
        truths = Truths(device, w, exact_sums=False)
        truths.compute(CodeCache(), {name: array.ctypes.data for name, array in raw.items()}, {})
        found = np.empty(w.output.size, np.float64)
        device.copy_out(found.data, truths["y"].address)
        truths.close()
    np.testing.assert_allclose(found, points, rtol=1e-12)


def test_a_nan_is_data() -> None:
    w = pointwise(4, h=1, w=2, epilogue=["relu"])
    x = np.array([0x38, 0x7F, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38], np.uint8).reshape(1, 1, 2, 4)  # 1 and one NaN
    y = load_reference("conv2d").points(w, {"x": x, "weight": np.full((8, 1, 1, 4), 0x40, np.uint8)}, {}, np.arange(16))
    assert np.isnan(y[:8]).all()
    np.testing.assert_array_equal(y[8:], 8.0)


# ---- judging kernels


def tensor_core(products: Array, group: int = 32, bits: int = 13) -> Array:
    """Sums as Hopper makes them: the products of an instruction and the old sum are aligned to the largest exponent and cut
    to `bits` stored bits."""
    total = np.zeros(len(products))
    for start in range(0, products.shape[1], group):
        terms = np.concatenate([total[:, None], products[:, start : start + group]], axis=1)
        unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(axis=1))[1] - 1 - bits)[:, None]
        total = (np.trunc(terms / unit) * unit).sum(axis=1)
        unit = np.ldexp(1.0, np.frexp(np.abs(total))[1] - 1 - bits)
        total = np.trunc(total / unit) * unit
    return total


def violations(w: Workload, x: Array, weight: Array, sums: Array, tolerance: Tolerance) -> int:
    products = x.astype(np.float64) * weight
    truth, magnitude = products.sum(axis=1), np.abs(products).sum(axis=1)
    y = encode(sums.astype(np.float32), w.out_dtype)
    expected = Truth(w.out_dtype, ROWS, truth.ctypes.data, magnitude.ctypes.data, tolerance)
    return CpuComparer().output(y.ctypes.data, expected).violations


def fewer_bits(values: Array) -> Array:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.trunc(mantissa * 4) / 4, exponent)


@pytest.mark.parametrize("out", ["float16", "float32"])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [("float8_e4m3", "float8_e4m3"), ("float8_e5m2", "float8_e4m3")])
@pytest.mark.parametrize("k", [16, 147, 576, 4608])
@pytest.mark.mostly_long(3)
def test_verification_takes_sums_of_14_bits_and_no_shorter_factors(k: int, x_dtype: str, w_dtype: str, out: str) -> None:
    w = pointwise(k, dtype=x_dtype, weight_dtype=w_dtype, out_dtype=out)
    tolerance = Tolerance.rounded(out, allowed_roundoffs(w, k), exact_sums=True)
    fooled = []
    for domains in (check_domains(w), second_domains(w)):
        x, weight = (
            draw(domains[name], ROWS * k, np.random.default_rng(seed)).astype(np.float32).reshape(ROWS, k)
            for seed, name in enumerate(("x", "weight"))
        )
        for values, dtype in ((x, x_dtype), (weight, w_dtype)):
            np.testing.assert_array_equal(decode(encode(values, dtype), dtype), values)
        products = x.astype(np.float64) * weight
        for sums in (tensor_core(products), tensor_core(products[:, ::-1]), tensor_core(products, 16)):
            assert violations(w, x, weight, sums, tolerance) == 0
        assert violations(w, x, weight, products[:, : k - k // 4].sum(axis=1), tolerance) > 0.5 * ROWS
        fooled.append(violations(w, x, weight, (fewer_bits(x) * fewer_bits(weight)).sum(axis=1), tolerance) == 0)
    assert not all(fooled)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("k", [16, 576, 4608, 16384])
def test_on_the_timings_numbers_such_sums_pass_and_a_missing_quarter_does_not(k: int, dtype: str) -> None:
    w = pointwise(k, dtype=dtype, out_dtype="float32")
    x_spec, w_spec = w.signature
    x = decode(timing_pattern(w, x_spec).elements(ROWS * k), dtype).reshape(ROWS, k)
    weight = decode(timing_pattern(w, w_spec).elements(ROWS * k + 77)[77:], dtype).reshape(ROWS, k)
    tolerance = Tolerance.rounded("float32", likely_roundoffs(w), exact_sums=False)
    products = x.astype(np.float64) * weight
    assert violations(w, x, weight, tensor_core(products), tolerance) == 0
    assert violations(w, x, weight, products[:, : k - k // 4].sum(axis=1), tolerance) > 0.5 * ROWS


# ---- arrays


def test_arrays_of_ml_dtypes_and_torch_are_taken_and_others_are_named() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    spec = workload().signature[0]

    def check(array: Any) -> None:
        runtime_arrays.check(spec, runtime_arrays.view(array, "x"), ("cpu", 0))

    check(np.zeros(spec.shape, ml_dtypes.float8_e4m3fn))
    for dtype, named in ((np.uint8, "uint8"), (ml_dtypes.float8_e5m2, "float8_e5m2")):
        with pytest.raises(ArgumentError, match=f"x has dtype {named}, the kernel takes float8_e4m3"):
            check(np.zeros(spec.shape, dtype))
    if hasattr(ml_dtypes, "float8_e4m3"):
        with pytest.raises(ArgumentError, match="x has dtype float8_e4m3 with infinities, the kernel takes float8_e4m3"):
            check(np.zeros(spec.shape, ml_dtypes.float8_e4m3))


def test_cuda_reads_float8_in_the_reference() -> None:
    """The reference compiles for a GPU without one."""
    from schedsearch.target import PRESETS

    w = workload(weight_dtype="float8_e5m2", epilogue=["bias", "dequantise"])
    assert compile_source(load_reference("conv2d").kernel(w, PRESETS["h200"]), PRESETS["h200"]).artifact.code


def test_pytorch_is_no_peer_of_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    from schedsearch.errors import UnsupportedError
    from schedsearch.integrations.torch_peer import conv2d
    from schedsearch.target import PRESETS

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    with pytest.raises(
        UnsupportedError, match="no convolution of float8_e4m3 on a GPU; allowed: float16, bfloat16, float32"
    ):
        conv2d(workload(), PRESETS["h200"])
