"""Convolutions of int8 and uint8: operator, reference and its NumPy points against a model in int64; tensor-core kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_support import run_on_cpu

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.layout import Layout
from schedsearch.target import PRESETS
from schedsearch.template import load_reference
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.workload import Workload

REFERENCE = load_reference("conv2d")
SHAPE: dict[str, Any] = {"n": 2, "h": 7, "w": 6, "c": 16, "k": 16, "r": 3, "s": 2, "padding": 1, "stride": (2, 1)}
ZERO_POINTS = {"x_zero_point": 3.0, "weight_zero_point": -5.0, "y_zero_point": 7.0}

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(detect("cpu"))
    yield device
    device.close()


def sums(w: Workload, x: Array, weight: Array) -> Array:
    """The convolution without its epilogue, int64 NHWC: of x NHWC and weight OHWI, int64, zero points subtracted."""
    top, left, bottom, right = w.padding
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    out_h = (x.shape[1] - (w.r - 1) * w.dilation[0] - 1) // w.stride[0] + 1
    out_w = (x.shape[2] - (w.s - 1) * w.dilation[1] - 1) // w.stride[1] + 1
    y = np.zeros((w.n, out_h, out_w, w.k), np.int64)
    inputs, outputs = w.c // w.groups, w.k // w.groups
    for n, p, q, k in np.ndindex(y.shape):
        rows = slice(p * w.stride[0], p * w.stride[0] + (w.r - 1) * w.dilation[0] + 1, w.dilation[0])
        columns = slice(q * w.stride[1], q * w.stride[1] + (w.s - 1) * w.dilation[1] + 1, w.dilation[1])
        group = k // outputs
        y[n, p, q, k] = np.sum(x[n, rows, columns, group * inputs : (group + 1) * inputs] * weight[k])
    return y


def drawn(w: Workload) -> tuple[dict[str, Array], Array, Array]:
    """x and weight in the workload's layouts over their whole formats; and both as int64 NHWC and OHWI."""
    rng = np.random.default_rng(0)
    x = rng.integers(*_range(w.dtype), (w.n, w.h, w.w, w.c))
    weight = rng.integers(*_range(w.weight_dtype), (w.k, w.r, w.s, w.c // w.groups))
    arrays = {
        "x": Layout.parse(w.layout).pack(x.astype(w.dtype), "NHWC"),
        "weight": Layout.parse(w.weight_layout).pack(weight.astype(w.weight_dtype), "OHWI"),
    }
    return arrays, x, weight


def _range(dtype: str) -> tuple[int, int]:
    return (-128, 128) if dtype == "int8" else (0, 256)


def computed(device: CpuDevice, w: Workload, arrays: Mapping[str, Array]) -> Array:
    """y of the reference's kernel, after a comparison with its NumPy points at every element."""
    scalars = {scalar.name: ZERO_POINTS[scalar.name] for scalar in w.scalars}
    is_float = w.output.dtype.startswith("float")
    outputs = {"y": (w.output.shape, np.float64 if is_float else np.int64)}
    if is_float:
        outputs["magnitude_of_y"] = (w.output.shape, np.float64)
    y = run_on_cpu(device, REFERENCE.kernel(w, device.target), arrays, outputs, scalars)["y"]
    points = REFERENCE.points(w, arrays, scalars, np.arange(w.output.size)).reshape(w.output.shape)
    np.testing.assert_array_equal(points, y)
    assert points.dtype == y.dtype
    return y


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int8"},
        {"dtype": "uint8", "weight_dtype": "int8", "layout": "NCHW"},
        {"dtype": "int8", "weight_dtype": "uint8", "weight_layout": "OIHW"},
        {"dtype": "uint8", "dilation": (1, 2), "padding": (0, 2, 1, 0)},
        {"dtype": "int8", "layout": "NCHW4c", "groups": 4},
        {"dtype": "uint8", "layout": "NCHW16c", "zero_points": ["weight", "x"]},  # which makes some sums negative
    ],
    ids=str,
)
@pytest.mark.mostly_long(6)
def test_sums_are_those_of_a_model_in_int64(device: CpuDevice, change: dict[str, Any]) -> None:
    w = conv2d(**{**SHAPE, **change})
    unsigned = w.dtype == w.weight_dtype == "uint8" and not w.zero_points
    assert w.output.dtype == ("uint32" if unsigned else "int32")
    arrays, x, weight = drawn(w)
    x_zero, weight_zero = (ZERO_POINTS[f"{name}_zero_point"] if name in w.zero_points else 0 for name in ("x", "weight"))
    expected = sums(w, x - int(x_zero), weight - int(weight_zero))
    np.testing.assert_array_equal(computed(device, w, arrays), Layout.parse(w.layout).pack(expected, "NHWC"))


@pytest.mark.parametrize("to", ["int8", "uint8"])
@pytest.mark.mostly_long(2)
def test_requantise_rounds_the_product_in_float32_and_then_to_even(device: CpuDevice, to: str) -> None:
    w = conv2d(**SHAPE, dtype="int8", layout="NCHW8c", epilogue=["bias", "relu", {"requantise": {"to": to}}])
    arrays, x, weight = drawn(w)
    rng = np.random.default_rng(1)
    arrays["bias"] = rng.integers(-(10**6), 10**6, w.k).astype(np.int32)
    # 2^-5: many exact halves. 0.0007: products that float32 must round.
    arrays["requantise_scale"] = rng.choice(np.array([2.0**-5, 0.0007, 2.0**-13], np.float32), w.k)
    total = np.maximum(sums(w, x, weight) + arrays["bias"], 0)
    product = total.astype(np.float32) * arrays["requantise_scale"]
    halves = np.abs(product - np.trunc(product)) == 0.5
    expected = np.clip(np.rint(product).astype(np.int64) + 7, *((-128, 127) if to == "int8" else (0, 255)))
    assert halves.any() and len(np.unique(expected)) > 50
    np.testing.assert_array_equal(computed(device, w, arrays), Layout.parse("NCHW8c").pack(expected, "NHWC"))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.mostly_long(2)
def test_a_quantised_residual_is_added_with_every_rounding_of_the_graph(device: CpuDevice, relu: bool) -> None:
    """The scales are such that many quotients lie within a roundoff of a half."""
    added = {"to": "uint8", "middle": "int8", "residual": "uint8", "relu": relu}
    w = conv2d(**SHAPE, dtype="int8", layout="NCHW8c", epilogue=["bias", {"requantise_add": added}])
    dtypes = {spec.name: (spec.dtype, spec.aliases) for spec in w.signature}
    assert w.output.dtype == "uint8" and dtypes["residual"] == ("uint8", "y")
    arrays, scalars = integer_model.arguments(w), {scalar.name: integer_model.SCALARS[scalar.name] for scalar in w.scalars}
    expected = integer_model.expected(w, arrays)
    assert len(np.unique(expected)) > 50
    y = run_on_cpu(device, REFERENCE.kernel(w, device.target), arrays, {"y": (w.output.shape, np.int64)}, scalars)["y"]
    np.testing.assert_array_equal(y, expected)
    points = REFERENCE.points(w, arrays, scalars, np.arange(w.output.size)).reshape(w.output.shape)
    np.testing.assert_array_equal(points, expected)


def test_a_batch_norm_in_floating_point_follows_dequantise(device: CpuDevice) -> None:
    epilogue = ["bias", {"dequantise": {"to": "float16"}}, "scale_shift", "residual", "relu"]
    w = conv2d(**SHAPE, dtype="int8", epilogue=epilogue)
    dtypes = {argument.name: argument.dtype for argument in w.signature}
    assert w.output.dtype == dtypes["residual"] == "float16"
    assert (dtypes["bias"], dtypes["dequantise_scale"], dtypes["scale"]) == ("int32", "float32", "float32")
    arrays, x, weight = drawn(w)
    rng = np.random.default_rng(2)
    arrays["bias"] = rng.integers(-100, 100, w.k).astype(np.int32)
    arrays["dequantise_scale"] = np.full(w.k, 2.0**-10, np.float32)
    arrays["scale"], arrays["shift"] = np.full(w.k, 0.5, np.float32), np.full(w.k, -3, np.float32)
    arrays["residual"] = rng.integers(-8, 8, w.output.shape).astype(np.float16)
    total = (sums(w, x, weight) + arrays["bias"]) * 2.0**-10 * 0.5 - 3 + arrays["residual"]
    np.testing.assert_array_equal(computed(device, w, arrays), np.maximum(total, 0))


def test_check_inputs_saturate_some_outputs_and_hit_halves() -> None:
    w = conv2d(n=1, h=28, w=28, c=256, k=64, r=3, s=3, padding=1, dtype="int8", epilogue=["requantise"])
    domains = w.definition.check_inputs(w.params)
    rng = np.random.default_rng(3)
    drawn = [rng.choice(list(domains[name].values), (2000, w.work.reduction)) for name in ("x", "weight")]
    product = np.sum(drawn[0] * drawn[1], axis=1) * rng.choice(np.array(domains["requantise_scale"].values), 2000)
    assert 0.01 < np.mean(np.abs(product) > 127) < 0.5
    assert np.mean(np.abs(product) % 1 == 0.5) > 0.01


def test_the_reference_compiles_for_a_gpu() -> None:
    w = conv2d(
        **SHAPE, dtype="uint8", weight_dtype="int8", zero_points=["x"], layout="NCHW8c", epilogue=["bias", "requantise"]
    )
    target = PRESETS["h200"]
    assert compile_source(REFERENCE.kernel(w, target), target).artifact.code


# --- conv2d_wgmma -------------------------------------------------------------------------------------------------------

TEMPLATE, H200 = Conv2dWgmma(), PRESETS["h200"]
LAYER: dict[str, Any] = {"n": 2, "h": 13, "w": 11, "c": 80, "k": 96, "r": 3, "s": 3, "padding": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "sums": {**LAYER, "dtype": "int8"},
    "unsigned sums": {**LAYER, "dtype": "uint8", "k": 40},
    "requantised": {**LAYER, "dtype": "int8", "stride": 2, "epilogue": ["bias", "relu", "requantise"]},
    "mixed signs, residual": {
        **LAYER,
        "dtype": "uint8",
        "weight_dtype": "int8",
        "epilogue": ["bias", "residual", "clip", {"requantise": {"to": "uint8"}}],
    },
    "a batch norm in half precision": {
        **LAYER,
        "dtype": "int8",
        "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "scale_shift", "residual", "leaky_relu"],
    },
    "zero point of x": {
        **LAYER,
        "dtype": "uint8",
        "weight_dtype": "int8",
        "zero_points": ["x"],
        "padding": (2, 0, 1, 1),
        "epilogue": ["bias", "requantise"],
    },
    "blocks of 16 channels": {**LAYER, "dtype": "int8", "layout": "NCHW16c", "epilogue": ["bias", "residual", "requantise"]},
    "blocks of 48 channels, sums": {**LAYER, "dtype": "int8", "layout": "NCHW48c", "c": 96, "zero_points": ["x"]},
    "merged groups of 8 channels": {**LAYER, "dtype": "int8", "groups": 10, "k": 80, "zero_points": ["x"]},
    "a quantised residual": {**LAYER, "dtype": "int8", "epilogue": ["bias", {"requantise_add": {"relu": True}}]},
    "blocks, a quantised residual": {
        **LAYER,
        "dtype": "uint8",
        "weight_dtype": "int8",
        "layout": "NCHW16c",
        "epilogue": ["bias", "clip", {"requantise_add": {"to": "uint8", "middle": "uint8", "residual": "int8"}}],
    },
    "groups of 48 channels": {**LAYER, "dtype": "int8", "c": 96, "groups": 2, "epilogue": ["requantise"]},
    "float32": {**LAYER, "dtype": "int8", "weight_dtype": "uint8", "dilation": 2, "epilogue": ["dequantise", "bias"]},
}


def configurations(w: Workload, count: int) -> list[Config]:
    space = TEMPLATE.space(w, H200)
    return [TEMPLATE.default(w, H200, space), *space.sample(count, np.random.default_rng(0))]


WITH_CODE_OF_THEIR_OWN = [  # the other layers differ from one of these in signs or sizes
    "requantised", "mixed signs, residual", "a quantised residual", "a batch norm in half precision", "zero point of x",
    "blocks of 16 channels", "blocks of 48 channels, sums", "merged groups of 8 channels",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layer", WITH_CODE_OF_THEIR_OWN)
def test_wgmma_kernels_of_integers_compile_without_local_memory(layer: str) -> None:
    w = conv2d(**LAYERS[layer])
    assert TEMPLATE.validate(w, H200) is None
    for config in configurations(w, int(layer == "requantised")):
        resources = compile_source(TEMPLATE.kernel(w, H200, config), H200).resources
        assert resources.local_bytes == resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"c": 24}, "c is 24; allowed: multiples of 16"),
        ({"k": 24, "epilogue": ["requantise"]}, "k is 24; allowed: multiples of 16"),
        ({"k": 20}, "k is 20; allowed: multiples of 8"),
        ({"zero_points": ["weight"], "n": 2**14, "h": 92, "w": 92}, "needs 138674176 sums of x; allowed: up to 134217728"),
        ({"groups": 16}, "a group has 5 input channels; allowed: multiples of 4"),
        ({"groups": 20, "k": 40}, "groups of 4 input and 2 output channels do not merge"),
        ({"layout": "NCHW"}, "layout and weight_layout are NCHW and OIHW; allowed: NHWC and OHWI, or NCHW[x]c"),
        ({"layout": "NCHW4c"}, "a block of x in NCHW4c has 4 bytes; allowed: multiples of 16"),
    ],
    ids=str,
)
def test_what_wgmma_does_not_take(change: dict[str, Any], reason: str) -> None:
    assert reason in str(TEMPLATE.validate(conv2d(**{**LAYER, "dtype": "int8", **change}), H200))
