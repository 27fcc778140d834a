"""depthwise_conv2d: the operator and its reference, against the definition in NumPy (`depthwise_support`)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from depthwise_support import case_workloads, numpy_depthwise, random_workload, small_integers

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice
from schedsearch.ops.depthwise_conv2d import DEPTHWISE_CONV2D
from schedsearch.target import PRESETS
from schedsearch.template import load_reference, magnitude_of
from schedsearch.templates.depthwise_conv2d import reference
from schedsearch.testing.op_contract import OpContract
from schedsearch.verification.inputs import draw

LAYER = {"n": 1, "c": 8, "h": 9, "w": 10, "r": 3, "s": 3}
REFERENCE = load_reference("depthwise_conv2d")


class TestDepthwiseConv2d(OpContract):
    op = DEPTHWISE_CONV2D
    examples = (
        LAYER,
        {**LAYER, "stride": 2, "padding": [0, 0, 1, 1], "multiplier": 2, "epilogue": ["scale_shift", "relu"]},
        {**LAYER, "layout": "NCHW", "weight_layout": "OHWI", "dtype": "bfloat16", "epilogue": ["bias", "residual", "clip"]},
        {**LAYER, "dilation": (1, 2), "direction": "grad_input", "accumulate": True, "weight_layout": "HWOI"},
        {**LAYER, "direction": "grad_weight", "deterministic": True, "dtype": "float32"},
        {**LAYER, "direction": "grad_both", "accumulate": True, "dtype": "float32", "layout": "NCHW"},
        {**LAYER, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "epilogue": ["bias", "requantise"]},
    )
    wrong = (
        ({**LAYER, "multiplier": 0}, "multiplier"),
        ({**LAYER, "multiplier": 1.5}, "multiplier"),
        ({**LAYER, "r": 10}, "r"),
        ({**LAYER, "s": 6, "dilation": 2}, "s"),
        ({**LAYER, "direction": "backward"}, "direction"),
        ({**LAYER, "dtype": "int32"}, "dtype"),
        ({**LAYER, "dtype": "int8", "direction": "grad_weight"}, "direction"),
        ({**LAYER, "zero_points": ["x"]}, "zero_points"),
        ({**LAYER, "layout": "NCHW32c"}, "layout"),
        ({**LAYER, "weight_layout": "IOHW"}, "weight_layout"),
        ({**LAYER, "accumulate": True}, "accumulate"),
        ({**LAYER, "deterministic": True}, "deterministic"),
        ({**LAYER, "direction": "grad_input", "deterministic": True}, "deterministic"),
        ({**LAYER, "direction": "grad_input", "epilogue": ["bias"]}, "epilogue"),
        ({**LAYER, "epilogue": ["requantise"]}, "epilogue"),
        ({**LAYER, "epilogue": ["quantise"]}, "epilogue"),
        ({**LAYER, "groups": 8}, "groups"),
    )
    ids: ClassVar = {
        "82247774ac8272d9456dc53880f46bf5e58d10d4d9a6166253ba238843930fad": LAYER,
        "bd42336ae75fb199020f3b3c1762f89327e71ec55e61139f0e3ba0c810ecf95e": {
            **LAYER,
            "direction": "grad_weight",
            "deterministic": True,
            "dtype": "float32",
        },
    }

    def test_a_message_says_what_to_do(self) -> None:
        assert self.mistakes({**LAYER, "r": 10}) == {
            "r": "the kernel spans 10 (r=10, dilation 1) but the padded input has only 9 (h=9, padding 0+0); enlarge the "
            "padding or shrink the kernel"
        }
        assert self.mistakes({**LAYER, "accumulate": True}) == {
            "accumulate": "accumulate belongs to the gradients, but direction is forward; leave it out, or add an array to "
            "the output by the stage residual"
        }
        assert self.mistakes({**LAYER, "epilogue": ["quantise"]}) == {
            "epilogue": "stage quantise follows sums of int8 or uint8, but dtype is float16; allowed: bias, scale_shift, "
            "residual, relu, leaky_relu, clip, sigmoid, silu, hard_swish, gelu"
        }

    def test_arrays_of_each_direction(self) -> None:
        layer = {**LAYER, "n": 2, "stride": 2, "multiplier": 3, "layout": "NCHW", "dtype": "float32"}
        image, filtered, weight = (2, 8, 9, 10), (2, 24, 4, 4), (24, 1, 3, 3)

        def arrays(direction: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            workload = Workload("depthwise_conv2d", {**layer, "direction": direction, **options})
            return ({spec.name: spec.shape for spec in each} for each in (workload.signature, workload.outputs))  # type: ignore[return-value]

        assert [*arrays("forward")] == [{"x": image, "weight": weight}, {"y": filtered}]
        assert [*arrays("grad_input")] == [{"dy": filtered, "weight": weight}, {"dx": image}]
        assert [*arrays("grad_weight", weight_layout="HWOI")] == [{"x": image, "dy": filtered}, {"dw": (3, 3, 24, 1)}]
        both, outputs = arrays("grad_both", accumulate=True)
        assert list(both.items()) == [
            ("x", image), ("weight", weight), ("dy", filtered), ("dx_before", image), ("dw_before", weight),
        ]  # fmt: skip
        assert outputs == {"dx": image, "dw": weight}

    def test_work_counts_products_and_bytes(self) -> None:
        layer = depthwise_conv2d(n=2, c=4, h=8, w=8, r=3, s=3, padding=1, dtype="float32")
        assert (layer.flops, layer.work.reduction, layer.min_bytes) == (2 * 2 * 8 * 8 * 4 * 9, 9, 4 * (2 * 512 + 36))
        grad = layer.replace(direction="grad_weight")
        assert (grad.flops, grad.work.reduction, grad.min_bytes) == (layer.flops, 2 * 64, layer.min_bytes)
        assert layer.replace(direction="grad_input", multiplier=2).work.reduction == 18
        both = layer.replace(direction="grad_both", accumulate=True)
        assert (both.flops, both.min_bytes) == (2 * layer.flops, 4 * (4 * 512 + 3 * 36))
        # A kernel must read the 2 x 2 pixels of each window that a stride of 3 leaves, and write every element of dx.
        apart = depthwise_conv2d(n=1, c=4, h=8, w=8, r=2, s=2, stride=3, dtype="float32", direction="grad_weight")
        assert apart.work.least_bytes == 4 * 4 * (36 + 9 + 4)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.mostly_long(4)
def test_kernel_and_points_of_the_reference_agree_with_numpy(
    device: CpuDevice, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed >= 4:  # parts of several rows, and one part only
        monkeypatch.setattr(reference, "_PART_SUMS", 200 if seed < 8 else 1)
    rng = np.random.default_rng(seed)
    direction = ("forward", "grad_input", "grad_weight", "grad_both")[seed % 4]
    workload = random_workload(rng, direction=direction, dtype=("float32", "bfloat16", "float16")[seed % 3])
    arrays, scalars = small_integers(workload, seed), DEPTHWISE_CONV2D.check_scalars(workload.params, 4.0)
    expected = numpy_depthwise(workload, arrays, scalars)
    buffers = {each: (o.shape, np.float64) for o in workload.outputs for each in (o.name, magnitude_of(o.name))}
    found = run_on_cpu(device, REFERENCE.kernel(workload, device.target), arrays, buffers, scalars)
    for name, truth in expected.items():
        np.testing.assert_array_equal(found[name], truth)
        assert (found[magnitude_of(name)] >= 0).all()
        everywhere = np.arange(truth.size)
        np.testing.assert_array_equal(REFERENCE.points(workload, arrays, scalars, everywhere, name), truth.reshape(-1))


@pytest.mark.parametrize("direction", ["grad_input", "grad_weight"])
def test_gradients_are_finite_differences_of_the_forward(direction: str) -> None:
    """The loss is sum(y * dy). It is linear in x and in the weight, so differences are exact but for rounding."""
    rng = np.random.default_rng(3)
    forward = random_workload(rng, direction="forward", dtype="float32", epilogue=(), c=3, h=6, w=7)
    grad = forward.replace(direction=direction)
    arrays = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in forward.signature}
    dy = rng.standard_normal(forward.output.shape).astype(np.float32)
    moved, step = ("x", 0.5) if direction == "grad_input" else ("weight", 0.5)

    def loss() -> float:
        y = REFERENCE.points(forward, arrays, {}, np.arange(forward.output.size), "y")
        return float(np.sum(y * dy.reshape(-1)))

    where = rng.integers(0, grad.output.size, 12)
    gradient = REFERENCE.points(grad, {**arrays, "dy": dy}, {}, where, grad.output.name)
    for index, slope in zip(where, gradient):
        flat, before = arrays[moved].reshape(-1), arrays[moved].reshape(-1)[index]
        flat[index] = before + step
        above = loss()
        flat[index] = before - step
        below, width = loss(), float(before + step) - float(before - step)
        flat[index] = before
        assert (above - below) / (2 * step) == pytest.approx(slope, abs=1e-5 * max(1.0, abs(slope))), width


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "grad_input", "grad_weight"])
def test_numbers_for_verification_show_sums_in_half_precision(direction: str, dtype: str) -> None:
    """A kernel that adds in its arrays' format differs from the truth by more than one rounding."""
    workload = depthwise_conv2d(n=4, c=32, h=16, w=16, r=3, s=3, padding=1, direction=direction, layout="NCHW", dtype=dtype)
    rng, domains = np.random.default_rng(0), DEPTHWISE_CONV2D.check_inputs(workload.params)
    arrays = {
        spec.name: draw(domains[spec.name], spec.size, rng).reshape(spec.shape).astype(np.float32)
        for spec in workload.signature
    }
    truth = REFERENCE.points(workload, arrays, {}, np.arange(workload.output.size), workload.output.name)
    half = _half_sums(workload, arrays, dtype)
    roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert np.isfinite(half).all()
    wrong = np.abs(half - truth) > roundoff * np.abs(truth)
    assert wrong.mean() > 0.005


def _half_sums(workload: Workload, arrays: Any, dtype: str) -> Any:
    """The output of a 3x3 layer with padding 1, rounded to the format after each addition; flat."""
    import itertools

    from schedsearch.ops.dtypes import decode, encode

    def rounded(values: Any) -> Any:
        return decode(encode(values.astype(np.float32), dtype), dtype).astype(np.float32)

    factor = arrays["dy" if workload.direction == "grad_input" else "x"]
    padded = np.pad(factor, ((0, 0), (0, 0), (1, 1), (1, 1)))
    if workload.direction == "grad_weight":
        dw = np.zeros(workload.output.shape, np.float32)
        for n, row in itertools.product(range(workload.n), range(workload.h)):
            for column in range(workload.w):
                seen = padded[n, :, None, row : row + 3, column : column + 3]
                dw = rounded(dw + seen * arrays["dy"][n, :, row, column][:, None, None, None])
        return dw.reshape(-1).astype(np.float64)
    taps = arrays["weight"] if workload.direction == "forward" else arrays["weight"][:, :, ::-1, ::-1]
    total = np.zeros_like(factor)
    for i, j in itertools.product(range(3), range(3)):
        total = rounded(total + padded[:, :, i : i + workload.h, j : j + workload.w] * taps[None, :, 0, i, j, None, None])
    return total.reshape(-1).astype(np.float64)


def test_points_beyond_two_to_the_31() -> None:
    """Every element of x is 1, so that the last pixel has four products with a weight of 1."""
    workload = depthwise_conv2d(n=600, c=512, h=90, w=90, r=3, s=3, padding=1, dtype="float16")
    arrays = {spec.name: np.broadcast_to(np.float16(1), spec.shape) for spec in workload.signature}
    last = workload.output.size - 1
    assert last > 2**31
    assert REFERENCE.points(workload, arrays, {}, [last, last - 512], "y").tolist() == [4.0, 6.0]


@pytest.mark.parametrize("direction", ["forward", "grad_both"])
@pytest.mark.mostly_long(2)
def test_the_reference_compiles_for_a_gpu(direction: str) -> None:
    workload = depthwise_conv2d(**LAYER, direction=direction, accumulate=direction != "forward", dtype="bfloat16")
    assert compile_source(REFERENCE.kernel(workload, PRESETS["h200"]), PRESETS["h200"]).artifact.code


def test_the_operators_cases_are_workloads(shared: Any) -> None:
    workloads = case_workloads(shared)
    assert len(workloads) == 100 + 4 + 8 + 8
    assert len({workload.id for workload in workloads}) >= 110
    assert {workload.direction for workload in workloads} == {"forward", "grad_input", "grad_weight"}
