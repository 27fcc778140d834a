"""Convolutions and pools of ONNX with one dimension: lowered as images of one row, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, lowered, normal, referred, run_by_onnxruntime  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

WIDTH = 13


def calls(net: Net) -> list[Node]:
    return [node for node in lowered(net.model(), layouts=("NHWC",)).nodes if isinstance(node, Node)]


# --- One node -----------------------------------------------------------------------------------------------------------
@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Attributes of a window over `WIDTH` pixels that leave at least one result."""
    taps, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    found = {"kernel_shape": [taps], "strides": [draw(st.integers(1, 3))], "dilations": [dilation]}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto_pad == "NOTSET":
        return found | {"pads": [draw(st.integers(0, taps - 1)), draw(st.integers(0, taps - 1))]}
    if auto_pad != "VALID":  # ONNX Runtime has no SAME with dilations
        found["dilations"] = [1]
    return found | {"auto_pad": auto_pad}


@settings(max_examples=40)
@given(windows(), st.sampled_from([(1, 3, 5), (2, 2, 1), (4, 1, 2)]), st.booleans())
def test_a_convolution_computes_what_onnxruntime_does(
    window: dict[str, Any], channels: tuple[int, int, int], bias: bool
) -> None:
    """channels: groups, and of each its inputs and outputs."""
    groups, c, k = channels
    net = Net(2, groups * c, WIDTH)
    weights = [net.weight("w", groups * k, c, *window["kernel_shape"])]
    net.node("Conv", "x", *weights, *([net.weight("b", groups * k)] if bias else []), group=groups, **window)
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


# window, what is behind it, outputs of a channel, operator
OVER_TIME: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "causal": (dict(kernel_shape=[4], pads=[3, 0]), "", 1, "depthwise_conv1d"),
    "dilated": (dict(kernel_shape=[3], pads=[1, 3], dilations=[2]), "", 1, "depthwise_conv1d"),
    "with another activation": (dict(kernel_shape=[3]), "Relu", 1, "depthwise_conv2d"),
    "with x * Sigmoid(x)": (dict(kernel_shape=[4], pads=[3, 0]), "Sigmoid", 1, "depthwise_conv1d"),
    "with a stride": (dict(kernel_shape=[3], strides=[2]), "", 1, "depthwise_conv2d"),
    "with several outputs of a channel": (dict(kernel_shape=[3]), "", 2, "depthwise_conv2d"),
}


@pytest.mark.parametrize("name", OVER_TIME)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_depthwise_convolution_may_be_one_over_time(name: str, layout: str) -> None:
    """Its window is that of the image of one row, and so are the bytes that it reads and writes."""
    window, behind, outputs, op = OVER_TIME[name]
    net = Net(2, 6, WIDTH)
    weights = net.weight("w", 6 * outputs, 1, *window["kernel_shape"]), net.weight("b", 6 * outputs)
    y = net.node("Conv", "x", *weights, group=6, **window)
    if behind == "Sigmoid":
        net.node("Mul", net.node(behind, y), y)
    elif behind:
        net.node(behind, y)
    model, x = net.model(), normal(*net.shape)
    network = lowered(model, layouts=(layout,), over_time=True)
    assert [node.implementations[0].op for node in network.nodes if isinstance(node, Node)] == [op]
    (found,) = referred(model, {"x": x}, layouts=(layout,), over_time=True)
    np.testing.assert_allclose(found, run_by_onnxruntime(model, {"x": x})[0], rtol=1e-5, atol=1e-5)


# pads, start and end of the slice, stride -> whether the slice is part of the convolution
CUTS: dict[str, tuple[list[int], tuple[int, int], int, bool]] = {
    "both sides padded": ([3, 3], (0, WIDTH), 1, True),
    "from the end": ([3, 3], (0, -2), 1, True),
    "more than the padding": ([1, 1], (0, 5), 1, False),
    "the beginning": ([3, 3], (3, WIDTH + 3), 1, False),
    "with a stride": ([0, 4], (0, -1), 2, True),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_slice_that_cuts_the_padding_off_is_part_of_the_convolution(name: str) -> None:
    pads, (start, end), stride, fuses = CUTS[name]
    net = Net(2, 6, WIDTH)
    y = net.node("Conv", "x", net.weight("w", 6, 1, 4), group=6, pads=pads, strides=[stride])
    net.node("Slice", y, net.row(start), net.row(end), net.row(2))
    model, x = net.model(), normal(*net.shape)
    ops = [node.implementations[0].op for node in lowered(model).nodes if isinstance(node, Node)]
    assert (len(ops) == 1) == fuses
    assert_as_onnxruntime(model, {"x": x})


@settings(max_examples=40)
@given(windows(), st.sampled_from([(1, 3, 5), (2, 2, 3), (4, 1, 2)]), st.integers(0, 1))
def test_a_transposed_convolution_computes_what_onnxruntime_does(
    window: dict[str, Any], channels: tuple[int, int, int], more: int
) -> None:
    groups, c, k = channels
    net = Net(2, groups * c, WIDTH)
    weight = net.weight("w", groups * c, k, *window["kernel_shape"])
    more = min(more, window["strides"][0] - 1)
    net.node("ConvTranspose", "x", weight, net.weight("b", groups * k), group=groups, output_padding=[more], **window)
    inputs = {"x": normal(*net.shape)}
    try:
        assert_as_onnxruntime(net.model(), inputs)
    except ModelError as error:
        assert "asks for more pixels than there are" in str(error) or "larger than its filters" in str(error)


@settings(max_examples=60)
@given(st.sampled_from(["MaxPool", "AveragePool", "LpPool"]), windows(), st.integers(0, 1), st.integers(1, 3), st.booleans())
def test_a_pool_computes_what_onnxruntime_does(op: str, window: dict[str, Any], ceil: int, p: int, counts: bool) -> None:
    net = Net(2, 3, WIDTH)
    own = {"LpPool": {"p": p}, "AveragePool": {"count_include_pad": int(counts)}}.get(op, {})
    if op == "LpPool":  # ONNX Runtime counts their windows in another way
        ceil = 0
    net.node(op, "x", ceil_mode=ceil, **own, **window)
    inputs = {"x": normal(*net.shape)}
    try:
        run_by_onnxruntime(net.model(), inputs)
    except Exception:  # what it refuses
        return
    try:
        assert_as_onnxruntime(net.model(), inputs)
    except ModelError as error:
        assert "runtimes pad in different ways" in str(error) or "strides are larger than its windows" in str(error)


@pytest.mark.parametrize("shape", [(2, 3, WIDTH), (1, 2, 5, 7)])
@pytest.mark.parametrize(
    ("op", "p"), [("GlobalMaxPool", 0), ("GlobalAveragePool", 0), *(("GlobalLpPool", p) for p in (1, 2, 3))]
)
def test_a_global_pool_computes_what_onnxruntime_does(op: str, p: int, shape: tuple[int, ...]) -> None:
    net = Net(*shape)
    net.node(op, "x", **({"p": p} if op == "GlobalLpPool" else {}))
    assert_as_onnxruntime(net.model(), {"x": normal(*shape)})


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_pool_by_a_norm_of_images_computes_what_onnxruntime_does(p: int) -> None:
    net = Net(2, 3, 9, 8)
    net.node("LpPool", "x", p=p, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 2, 1])
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


@pytest.mark.parametrize("strides", [(2, 3), (1, 3), (3, 1), (2, 2)])
def test_a_transposed_convolution_has_any_two_strides(strides: tuple[int, int]) -> None:
    net = Net(2, 4, 5, 6)
    net.node("ConvTranspose", "x", net.weight("w", 4, 3, 3, 4), net.weight("b", 3), strides=strides, pads=[1, 0, 1, 1])
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


# --- Networks -----------------------------------------------------------------------------------------------------------
def residual_block(x: str, net: Net, *, op: str = "Relu") -> str:
    """Two convolutions with a bias, the first with an activation, and x added to the second."""
    y = net.node("Conv", x, net.weight(f"w{len(net.nodes)}", 8, 8, 3), net.weight(f"b{len(net.nodes)}", 8), pads=[1, 1])
    y = net.node(op, y)
    y = net.node("Conv", y, net.weight(f"w{len(net.nodes)}", 8, 8, 3), pads=[1, 1])
    y = net.node("Add", y, net.weight(f"b{len(net.nodes)}", 1, 8, 1))
    return net.node("Relu", net.node("Add", y, x))


def test_convolutions_take_biases_activations_and_residuals() -> None:
    net = Net(2, 8, WIDTH)
    residual_block(residual_block("x", net), net)
    labels = [node.implementations[0].label.partition(" NHWC")[2] for node in calls(net)]
    assert labels == ["+bias+relu", "+bias+residual+relu"] * 2
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


def test_what_stands_between_convolutions_is_over_images_too() -> None:
    """Nothing but views at both ends has three dimensions, so that no layout is changed in between."""
    net = Net(2, 8, WIDTH)
    y = residual_block("x", net, op="Sigmoid")
    gate = net.node("Sigmoid", net.node("GlobalAveragePool", y))
    y = net.node("Mul", y, gate)
    y = net.node("Slice", y, net.row(0, 1), net.row(6, WIDTH), net.row(1, 2))
    y = net.node("Concat", y, net.node("MaxPool", y, kernel_shape=[3], pads=[1, 1]), axis=-2)
    y = net.node("Pad", y, net.row(0, 0, 2, 0, 0, 1), net.numbers(3.0))
    y = net.node("Conv", y, net.weight("last", 4, 12, 1))
    net.node("Softmax", y, axis=2)
    network = lowered(net.model(), layouts=("NHWC", "NCHW"))
    inside = [network.values[name] for node in network.nodes if isinstance(node, Node) for name in node.outputs.values()]
    assert all(len(value.shape) == 4 for value in inside)
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


def test_rows_of_channels_are_a_view_of_the_image_behind_a_convolution() -> None:
    """As in speech networks: convolutions, and then matrix products over [n, time, channels]."""
    net = Net(2, 3, WIDTH)
    y = net.node("Gelu", net.node("Conv", "x", net.weight("w", 8, 3, 3), net.weight("b", 8), pads=[1, 1]))
    net.node("MatMul", net.node("Transpose", y, perm=[0, 2, 1]), net.weight("m", 8, 5))
    assert [node.implementations[0].op for node in calls(net)] == ["conv2d", "dense"]
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


@pytest.mark.parametrize("opset", [9, 11, 13, 21])
def test_old_opsets_have_the_same_rows(opset: int) -> None:
    net = Net(1, 4, WIDTH)
    y = residual_block(net.node("Conv", "x", net.weight("first", 8, 4, 1)), net)
    y = net.node("MaxPool", y, kernel_shape=[2], strides=[2])
    net.node("Softmax", y, axis=2)
    model = net.model(opset=opset)
    assert_as_onnxruntime(model, {"x": normal(*net.shape)})


def quantised(net: Net, x: str, scale: float, zero: int) -> str:
    linear = (net.numbers(scale), net.numbers(zero, dtype=np.uint8))
    return net.node("DequantizeLinear", net.node("QuantizeLinear", x, *linear), *linear)


def test_between_conversions_convolutions_and_pools_compute_integers() -> None:
    net = Net(2, 4, WIDTH)
    y = quantised(net, "x", 0.03, 120)
    for number, (k, c) in enumerate(((8, 4), (4, 8))):
        scales = net.weight(f"scales{number}", k, value=np.linspace(0.01, 0.02, k))
        weight = net.node("DequantizeLinear", net.weight(f"w{number}", k, c, 3, dtype=np.int8), scales, axis=0)
        y = net.node("Conv", y, weight, net.weight(f"b{number}", k), pads=[1, 1])
        y = quantised(net, net.node("Relu", y), 0.05, 3)
        y = quantised(net, net.node("MaxPool", y, kernel_shape=[2]), 0.05, 3)
    dtypes = [(node.implementations[0].op, node.implementations[0].params["dtype"]) for node in calls(net)]
    assert [op for op, dtype in dtypes if dtype == "uint8"][:4] == ["conv2d", "pool2d", "conv2d", "pool2d"]
    (found,), (wanted,) = _both(net)
    np.testing.assert_allclose(found, wanted, atol=0.0501)  # a step of the result, where a rounding is a tie
    assert (np.abs(found - wanted) > 1e-4).mean() < 0.02


def _both(net: Net) -> tuple[list[Any], list[Any]]:
    inputs = {"x": normal(*net.shape)}
    return referred(net.model(), inputs), run_by_onnxruntime(net.model(), inputs)


def test_convolutions_of_integers_compute_what_onnxruntime_does() -> None:
    net = Net(2, 4, WIDTH, dtype=onnx.TensorProto.UINT8)
    zero, weight = net.numbers(7, dtype=np.uint8), net.weight("w", 6, 2, 3, dtype=np.int8)
    linear = [net.numbers(0.02), zero, weight, net.numbers(0.01), net.numbers(0, dtype=np.int8)]
    y = net.node("QLinearConv", "x", *linear, net.numbers(0.004), net.numbers(128, dtype=np.uint8), group=2, pads=[1, 0])
    whole = net.weight("v", 5, 4, 3, dtype=np.uint8, value=np.arange(60).reshape(5, 4, 3))
    z = net.node("ConvInteger", "x", whole, zero, strides=[2])
    net.results = [y, z]
    x = np.random.default_rng(0).integers(0, 256, net.shape).astype(np.uint8)
    for found, wanted in zip(referred(net.model(), {"x": x}), run_by_onnxruntime(net.model(), {"x": x})):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.long  # builds a network
def test_a_network_of_rows_runs_on_the_cpu(tmp_path: Path) -> None:
    net = Net(2, 8, WIDTH)
    y = residual_block("x", net)
    y = net.node("ConvTranspose", y, net.weight("up", 8, 6, 4), net.weight("c", 6), strides=[2], pads=[1, 1])
    y = net.node("LpPool", net.node("Tanh", y), kernel_shape=[3], pads=[1, 1])
    z = net.node("Conv", y, net.weight("depthwise", 6, 1, 5), group=6, dilations=[2])
    net.results = [y, z]
    onnx.save(net.model(), tmp_path / "m.onnx")
    x = normal(*net.shape)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        for found, wanted in zip(built(x), run_by_onnxruntime(net.model(), {"x": x}), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


# --- What is refused ----------------------------------------------------------------------------------------------------
def test_a_transposed_convolution_of_open_height_has_equal_strides() -> None:
    net = Net(1, 4, "h", 6)
    net.node("ConvTranspose", "x", net.weight("w", 4, 3, 2, 3), strides=[2, 3], name="guilty")
    with pytest.raises(ModelError, match=r"guilty.*its strides are 2 and 3; allowed: equal ones where"):
        read_graph(net.model(), {"h": Size("h", 3, 9)})
