"""The reference for convolutions of int8 and uint8 against programs that are not ours: ONNX's reference and node cases,
and PyTorch's quantised convolution on the CPU.

ConvInteger is our convolution with zero points. QLinearConv is it with `bias` and `requantise`, whose one scale is
x_scale * w_scale / y_scale. Layouts, groups, strides, dilations and paddings are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import integer_model
import numpy as np
import onnx
import pytest
from bandwidth_support import node_cases
from onnx.reference import ReferenceEvaluator

from schedsearch.constructors.convolutions import conv2d
from schedsearch.ops.layout import Layout
from schedsearch.template import load_reference
from schedsearch.workload import Workload

REFERENCE = load_reference("conv2d")
Array = np.ndarray[Any, Any]


def drawn(rng: np.random.Generator, **more: Any) -> Workload:
    """A small workload with random numbers in every parameter."""
    groups = int(rng.choice([1, 1, 2, 3]))
    r, s = (int(n) for n in rng.integers(1, 4, 2))
    dilation = tuple(int(n) for n in rng.integers(1, 3, 2))
    block = int(rng.choice([1, 2, 4]))
    return conv2d(
        n=int(rng.integers(1, 3)), h=int(rng.integers(1, 6)) + (r - 1) * dilation[0],
        w=int(rng.integers(1, 6)) + (s - 1) * dilation[1], c=groups * block * int(rng.integers(1, 4)),
        k=groups * block * int(rng.integers(1, 4)), r=r, s=s, groups=groups, dilation=dilation,
        stride=tuple(int(n) for n in rng.integers(1, 3, 2)), padding=tuple(int(n) for n in rng.integers(0, 3, 4)),
        layout=str(rng.choice(["NHWC", "NCHW", f"NCHW{block}c"])), **more,
    )  # fmt: skip


def ours(w: Workload, arrays: dict[str, Array], scalars: dict[str, float]) -> Array:
    """y of the reference, NCHW."""
    y = REFERENCE.points(w, arrays, scalars, np.arange(w.output.size)).reshape(w.output.shape)
    out_h, out_w = w.definition.output_hw(w.params)  # type: ignore[attr-defined]
    return Layout.parse(w.layout).unpack(y, {"N": w.n, "C": w.k, "H": out_h, "W": out_w}, "NCHW")


def attributes(w: Workload) -> dict[str, Any]:
    return {"pads": w.padding, "strides": w.stride, "dilations": w.dilation, "group": w.groups, "kernel_shape": (w.r, w.s)}


def given(w: Workload, arrays: dict[str, Array]) -> tuple[Array, Array]:
    """x NCHW and weight OIHW in their own formats."""
    x, weight = (integer_model.logical(w, name, arrays[name]) for name in ("x", "weight"))
    return x.astype(w.dtype), weight.astype(w.weight_dtype)


def zero_point(rng: np.random.Generator, dtype: str) -> int:
    low, high = integer_model.limits(dtype)
    return int(rng.integers(low, high + 1))


@pytest.mark.parametrize("seed", range(12))
def test_sums_are_those_of_conv_integer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, weight_dtype = (("uint8", "int8")[int(bit)] for bit in rng.integers(0, 2, 2))
    w = drawn(rng, dtype=dtype, weight_dtype=weight_dtype, zero_points=["x", "weight"])
    arrays = integer_model.arguments(w, seed)
    zeros = {"x_zero_point": zero_point(rng, dtype), "weight_zero_point": zero_point(rng, weight_dtype)}
    x, weight = given(w, arrays)
    node = onnx.helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **attributes(w))
    feed = {
        "x": x, "w": weight,
        "xz": np.array(zeros["x_zero_point"], dtype), "wz": np.array(zeros["weight_zero_point"], weight_dtype),
    }  # fmt: skip
    (theirs,) = ReferenceEvaluator(node).run(None, feed)
    np.testing.assert_array_equal(ours(w, arrays, {name: float(value) for name, value in zeros.items()}), theirs)
    model = integer_model.sums(w, arrays, {"x": zeros["x_zero_point"], "weight": zeros["weight_zero_point"]})
    np.testing.assert_array_equal(model, theirs)


def quantised(seed: int, scales: tuple[float, float, float], y_zero: int, largest: int = 255) -> tuple[Array, Array, Array]:
    """y of ours and of QLinearConv with these scales (x, weight, y), and the product that both round.

    Args:
        largest: magnitude of x, weight, bias and the zero points of x and weight.
    """
    rng = np.random.default_rng(seed)
    to = ("uint8", "int8")[seed % 2]
    w = drawn(rng, dtype=to, weight_dtype="int8", zero_points=["x", "weight"], epilogue=["bias", {"requantise": {"to": to}}])
    arrays = integer_model.arguments(w, seed)
    arrays = {name: np.clip(array, -largest, largest).astype(array.dtype) for name, array in arrays.items()}
    x_scale, weight_scale, y_scale = (np.float32(scale) for scale in scales)
    weight_scales = weight_scale * rng.choice(np.array([1, 2], np.float32), w.k)
    arrays["requantise_scale"] = (x_scale * weight_scales / y_scale).astype(np.float32)
    zeros = {
        "x_zero_point": int(np.clip(zero_point(rng, to), 0, largest)),
        "weight_zero_point": int(np.clip(zero_point(rng, "int8"), 0, largest)),
    }
    x, weight = given(w, arrays)
    names = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero", "bias"]
    feed = [
        x, x_scale, np.array(zeros["x_zero_point"], to), weight, weight_scales,
        np.full(w.k, zeros["weight_zero_point"], np.int8), y_scale, np.array(y_zero, to), arrays["bias"],
    ]  # fmt: skip
    node = onnx.helper.make_node("QLinearConv", names, ["y"], **attributes(w))
    (theirs,) = ReferenceEvaluator(node).run(None, dict(zip(names, map(np.asarray, feed))))
    sums = integer_model.sums(w, arrays, {"x": zeros["x_zero_point"], "weight": zeros["weight_zero_point"]})
    product = (sums + arrays["bias"][:, None, None]) * arrays["requantise_scale"].astype(np.float64)[:, None, None]
    return (
        ours(w, arrays, {**{name: float(value) for name, value in zeros.items()}, "y_zero_point": y_zero}),
        theirs,
        product,
    )


@pytest.mark.parametrize("seed", range(6))
def test_requantised_sums_are_those_of_qlinear_conv_halves_included(seed: int) -> None:
    """The scales are powers of two, so products are exact, and many are halves. The zero point is even: ONNX's reference
    adds it before the rounding, its specification and we after it, which differs at halves if it is odd."""
    y, theirs, product = quantised(seed, (0.5, 0.25, 0.5), 6, largest=2)
    assert np.any(np.abs(product % 1) == 0.5)
    np.testing.assert_array_equal(y, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_with_other_scales_qlinear_conv_differs_by_one_and_only_beside_a_half(seed: int) -> None:
    """ONNX's reference multiplies in float64. Our product is rounded to float32, which may make a half of its neighbour."""
    y, theirs, product = quantised(seed, (0.023, 0.0011, 0.31), 7)
    different = y != theirs
    distance = np.abs(np.abs(product % 1) - 0.5)
    assert np.all(np.abs(y - theirs.astype(np.int64)) <= 1)
    assert np.all(distance[different] <= np.abs(product[different]) * 2.0**-22)


def test_halves_of_requantise_round_to_even_and_the_zero_point_follows() -> None:
    """One pixel, one channel: the sums are x, and x / 2 is rounded: -3/2 -> -2, -1/2 -> 0, 1/2 -> 0, 3/2 -> 2, 5/2 -> 2."""
    w = conv2d(n=1, h=1, w=5, c=1, k=1, r=1, s=1, dtype="int8", epilogue=["requantise"])
    arrays = {
        "x": np.array([-3, -1, 1, 3, 5], np.int8).reshape(1, 1, 5, 1), "weight": np.ones((1, 1, 1, 1), np.int8),
        "requantise_scale": np.array([0.5], np.float32),
    }  # fmt: skip
    assert ours(w, arrays, {"y_zero_point": 7.0}).ravel().tolist() == [5, 7, 7, 9, 9]
    assert ours(w, arrays, {"y_zero_point": 126.0}).ravel().tolist() == [124, 126, 126, 127, 127]


@pytest.mark.parametrize("seed", range(6))
def test_a_graph_that_simulates_quantisation_differs_by_one_and_only_beside_a_half(seed: int) -> None:
    """QuantizeLinear(Conv(DequantizeLinear(x), DequantizeLinear(weight))) in float32, as frameworks export it."""
    rng = np.random.default_rng(seed)
    w = drawn(rng, dtype="int8", epilogue=["requantise"])
    arrays = integer_model.arguments(w, seed)
    x_scale, weight_scale, y_scale = np.float32(0.25), np.float32(0.5), np.float32(64.0 if seed % 2 else 61.7)
    arrays["requantise_scale"] = np.full(w.k, x_scale * weight_scale / y_scale, np.float32)
    x, weight = given(w, arrays)
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["x", "xs"], ["xf"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "ws"], ["wf"]),
        onnx.helper.make_node("Conv", ["xf", "wf"], ["yf"], **attributes(w)),
        onnx.helper.make_node("QuantizeLinear", ["yf", "ys", "zero"], ["y"]),
    ]
    info = onnx.helper.make_tensor_value_info
    inputs = [info(name, onnx.TensorProto.INT8, None) for name in ("x", "w", "zero")]
    inputs += [info(name, onnx.TensorProto.FLOAT, None) for name in ("xs", "ws", "ys")]
    graph = onnx.helper.make_graph(nodes, "simulated", inputs, [info("y", onnx.TensorProto.INT8, None)])
    feed = {"x": x, "w": weight, "xs": x_scale, "ws": weight_scale, "ys": y_scale, "zero": np.int8(0)}
    model = onnx.helper.make_model(graph)
    (simulated,) = ReferenceEvaluator(model).run(None, {name: np.asarray(value) for name, value in feed.items()})
    y = ours(w, arrays, {"y_zero_point": 0.0})
    product = integer_model.sums(w, arrays) * np.float64(x_scale * weight_scale) / np.float64(y_scale)
    different, beside_half = y != simulated, np.abs(np.abs(product % 1) - 0.5) <= np.abs(product) * 2.0**-21
    assert np.all(np.abs(y - simulated.astype(np.int64)) <= 1)
    assert np.all(beside_half[different])


def by_pytorch(
    torch: Any, w: Workload, arrays: dict[str, Array], scalars: dict[str, float], scales: tuple[float, Array, float]
) -> Array:
    """y of PyTorch's quantised convolution, NCHW, in the format of w.

    PyTorch takes x and gives y as uint8 only. int8 is that with 128 added to the numbers and to the zero point.

    Args:
        w: int8 weights; epilogue bias, perhaps relu, requantise; output of x's format.
        scales: of x, of the weights of each output channel, and of y.
    """
    x, weight = given(w, arrays)
    shift = 128 if w.dtype == "int8" else 0
    x_scale, weight_scales, y_scale = scales
    unsigned = torch.from_numpy((x.astype(np.int64) + shift).astype(np.uint8))
    x_quantised = torch._make_per_tensor_quantized_tensor(unsigned, x_scale, int(scalars["x_zero_point"]) + shift)
    weight_quantised = torch._make_per_channel_quantized_tensor(
        torch.from_numpy(weight), torch.from_numpy(weight_scales.astype(np.float64)), torch.zeros(w.k, dtype=torch.int64), 0
    )
    bias = torch.from_numpy((arrays["bias"] * (x_scale * weight_scales.astype(np.float64))).astype(np.float32))
    packed = torch.ops.quantized.conv2d_prepack(
        weight_quantised, bias, list(w.stride), list(w.padding[:2]), list(w.dilation), w.groups
    )
    relu = any(stage.name == "relu" for stage in w.epilogue)
    convolve = torch.ops.quantized.conv2d_relu if relu else torch.ops.quantized.conv2d
    y = convolve(x_quantised, packed, y_scale, int(scalars["y_zero_point"]) + shift)
    return np.asarray(y.int_repr().numpy()).astype(np.int64) - shift


@pytest.fixture
def fbgemm(torch: Any) -> Iterator[Any]:
    """PyTorch with its engine for x86. Onednn's also runs there, but differs from both at some halves."""
    before = torch.backends.quantized.engine
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("PyTorch's engine fbgemm needs an x86 processor")
    torch.backends.quantized.engine = "fbgemm"
    yield torch
    torch.backends.quantized.engine = before


@pytest.mark.drawn
@pytest.mark.parametrize("exact_scales", [True, False], ids=["scales are powers of two", "any scales"])
@pytest.mark.parametrize("seed", range(20))
def test_requantised_sums_are_those_of_pytorch(fbgemm: Any, seed: int, exact_scales: bool) -> None:
    """Weights have 7 bits: without VNNI, fbgemm adds two products in 16 bits, and 8 bits saturate (PyTorch's reduce_range).

    Products of the sums and powers of two are exact, so that both round the same number, halves included. With other scales
    PyTorch computes x_scale * w_scale / y_scale with a rounding more, and may find the other neighbour of a half.
    """
    rng = np.random.default_rng(seed)
    to = ("uint8", "int8")[seed % 2]
    stages = [["bias"], ["bias", "relu"]][seed // 2 % 2]
    w = drawn(rng, dtype=to, weight_dtype="int8", zero_points=["x"], epilogue=[*stages, {"requantise": {"to": to}}])
    symmetric = {**w.params, "padding": w.padding[:2], "epilogue": list(w.epilogue)}  # PyTorch has no other padding
    w = Workload("conv2d", {**symmetric, "h": w.h + 4, "w": w.w + 4})
    arrays = integer_model.arguments(w, seed)
    arrays["weight"] = arrays["weight"] >> 1
    spread = 37.0 * 74.0 * (w.c // w.groups * w.r * w.s) ** 0.5  # of the sums
    weight_scales = rng.choice(np.array([0.25, 0.5, 1.0] if exact_scales else [0.0123, 0.031, 0.0407], np.float32), w.k)
    y_scale = 2.0 ** round(np.log2(spread / 64)) * (0.125 if exact_scales else 0.0123)
    arrays["requantise_scale"] = (np.float64(0.25) * weight_scales / y_scale).astype(np.float32)
    scalars = {"x_zero_point": float(zero_point(rng, to)), "y_zero_point": float(zero_point(rng, to))}
    y = ours(w, arrays, scalars)
    theirs = by_pytorch(fbgemm, w, arrays, scalars, (0.25, weight_scales, y_scale))
    assert len(np.unique(y)) > 2  # most numbers are not saturated
    if exact_scales:
        np.testing.assert_array_equal(y, theirs)
        return
    sums = integer_model.sums(w, arrays, {"x": scalars["x_zero_point"]}) + arrays["bias"][:, None, None]
    product = sums * arrays["requantise_scale"].astype(np.float64)[:, None, None]
    different, beside_half = y != theirs, np.abs(np.abs(product % 1) - 0.5) <= np.abs(product) * 2.0**-21
    assert np.all(np.abs(y - theirs) <= 1)
    assert np.all(beside_half[different])


INPUTS = {  # of ONNX's operators, in order
    "ConvInteger": ("x", "w", "x_zero_point", "w_zero_point"),
    "QLinearConv": (
        "x", "x_scale", "x_zero_point", "w", "w_scale", "w_zero_point", "y_scale", "y_zero_point"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of ONNX's other cases
def test_node_cases_of_onnx() -> None:
    cases = node_cases("convinteger", "qlinearconv")
    assert set(cases) == {"test_convinteger_without_padding", "test_convinteger_with_padding", "test_qlinearconv"}
    for case in cases.values():
        (node,) = case.model.graph.node
        for inputs, (expected,) in case.data_sets:
            named = dict(zip(INPUTS[node.op_type], inputs))
            x, weight = named["x"], named["w"]
            given_attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            quantised_case = node.op_type == "QLinearConv"
            w = conv2d(
                n=x.shape[0], h=x.shape[2], w=x.shape[3], c=x.shape[1], k=weight.shape[0], r=weight.shape[2],
                s=weight.shape[3], padding=given_attributes.get("pads", (0, 0, 0, 0)), dtype=str(x.dtype),
                weight_dtype=str(weight.dtype), layout="NCHW", zero_points=["x", "weight"],
                epilogue=[{"requantise": {"to": str(expected.dtype)}}] if quantised_case else [],
            )  # fmt: skip
            arrays = {"x": x, "weight": weight}
            zeros = {"x_zero_point": named["x_zero_point"]}
            if quantised_case:
                scale = named["x_scale"] * named["w_scale"] / named["y_scale"]
                arrays["requantise_scale"] = np.broadcast_to(np.float32(scale), (w.k,)).copy()
                zeros["y_zero_point"] = named["y_zero_point"]
            # ONNX may have a zero point for each output channel; ours is one for all, so channels are compared one by one.
            for k, zero in enumerate(np.broadcast_to(np.ravel(named.get("w_zero_point", np.uint8(0))), (w.k,))):
                scalars = {name: float(np.ravel(value)[0]) for name, value in zeros.items()}
                y = ours(w, arrays, {**scalars, "weight_zero_point": float(zero)})
                np.testing.assert_array_equal(y[:, k], expected[:, k], err_msg=case.name)
