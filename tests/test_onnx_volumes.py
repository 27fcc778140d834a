"""Convolutions and pools of ONNX with three dimensions: lowered as images, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, lowered, normal, run_by_onnxruntime  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

SIDES = (5, 4, 6)


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Attributes of a window over `SIDES` that leave at least one result."""
    taps = [draw(st.integers(1, 3)) for _ in SIDES]
    found: dict[str, Any] = {
        "kernel_shape": taps,
        "strides": [draw(st.integers(1, 3)) for _ in SIDES],
        "dilations": [draw(st.integers(1, (side - 1) // max(each - 1, 1))) if each > 1 else 1
                      for side, each in zip(SIDES, taps)],
    }  # fmt: skip
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER"]))
    if auto_pad == "NOTSET":
        return found | {"pads": [draw(st.integers(0, each - 1)) for each in (*taps, *taps)]}
    if auto_pad != "VALID":  # ONNX Runtime has no SAME with dilations
        found["dilations"] = [1, 1, 1]
    return found | {"auto_pad": auto_pad}


@settings(max_examples=25)
@given(windows(), st.sampled_from([(1, 3, 5), (2, 2, 1), (4, 1, 2), (1, 1, 3), (4, 1, 1)]), st.integers(1, 2))
def test_a_convolution_computes_what_onnxruntime_does(
    window: dict[str, Any], channels: tuple[int, int, int], batch: int
) -> None:
    """channels: groups, and of each its inputs and outputs."""
    groups, c, k = channels
    net = Net(batch, groups * c, *SIDES)
    net.node("Conv", "x", net.weight("w", groups * k, c, *window["kernel_shape"]), net.weight("b", groups * k), group=groups,
             **window)  # fmt: skip
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


@settings(max_examples=20)
@given(windows(), st.sampled_from([(1, 3, 5), (2, 2, 3), (4, 1, 2)]))
def test_a_transposed_convolution_computes_what_onnxruntime_does(
    window: dict[str, Any], channels: tuple[int, int, int]
) -> None:
    groups, c, k = channels
    net = Net(2, groups * c, *SIDES)
    weight = net.weight("w", groups * c, k, *window["kernel_shape"])
    net.node("ConvTranspose", "x", weight, net.weight("b", groups * k), group=groups, **window)
    inputs = {"x": normal(*net.shape)}
    try:
        assert_as_onnxruntime(net.model(), inputs)
    except ModelError as error:
        assert "asks for more pixels than there are" in str(error) or "larger than its filters" in str(error)


@settings(max_examples=30)
@given(st.sampled_from(["MaxPool", "AveragePool", "LpPool"]), windows(), st.booleans(), st.booleans())
def test_a_pool_computes_what_onnxruntime_does(op: str, window: dict[str, Any], ceil: bool, counts: bool) -> None:
    net = Net(2, 3, *SIDES)
    own = {"LpPool": {"p": 2}, "AveragePool": {"count_include_pad": int(counts)}}.get(op, {})
    net.node(op, "x", ceil_mode=int(ceil and op != "LpPool"), **own, **window)
    inputs = {"x": normal(*net.shape)}
    try:
        run_by_onnxruntime(net.model(), inputs)
    except Exception:  # what it refuses
        return
    try:
        assert_as_onnxruntime(net.model(), inputs)
    except ModelError as error:
        assert "runtimes pad in different ways" in str(error) or "strides are larger than its windows" in str(error)


@pytest.mark.parametrize("op", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
def test_a_global_pool_computes_what_onnxruntime_does(op: str) -> None:
    net = Net(2, 3, *SIDES)
    net.node(op, "x")
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


def residual_block(x: str, net: Net) -> str:
    number = len(net.nodes)
    y = net.node("Conv", x, net.weight(f"w{number}", 16, 16, 3, 3, 3), net.weight(f"b{number}", 16), pads=[1] * 6)
    y = net.node("Conv", net.node("Relu", y), net.weight(f"v{number}", 16, 16, 1, 3, 3), pads=[0, 1, 1, 0, 1, 1])
    return net.node("Relu", net.node("Add", net.node("Mul", y, net.weight(f"s{number}", 1, 16, 1, 1, 1)), x))


def test_between_convolutions_there_are_only_images() -> None:
    net = Net(1, 16, *SIDES)
    y = residual_block(residual_block("x", net), net)
    net.node("Concat", y, net.node("Sigmoid", y), axis=1)
    network = lowered(net.model(), layouts=("NHWC",))
    calls = [node.implementations[0] for node in network.nodes if isinstance(node, Node)]
    assert [call.op for call in calls].count("transpose") == 2  # of the input and the output
    convolutions = [call.label.partition(" NHWC")[2] for call in calls if call.op == "conv2d"]
    assert convolutions == ["+bias+relu", "+scale_shift+residual+relu"] * 2
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)}, atol=1e-3)  # of numbers of hundreds


@pytest.mark.parametrize("batch", [1, 2])
def test_a_depthwise_convolution_is_one_of_images_for_each_plane_of_its_filter(batch: int) -> None:
    """Each adds to the sum of those before it, so that no kernel is left for the additions."""
    net = Net(batch, 16, *SIDES)
    y = net.node("Conv", "x", net.weight("w", 16, 1, 3, 3, 3), net.weight("b", 16), group=16, pads=[1] * 6)
    net.node("Relu", y)
    read = [node.implementations[0] for node in lowered(net.model()).nodes if isinstance(node, Node)]
    computed = [list(map(str, each.epilogue)) for each in read if each.op == "depthwise_conv2d"]
    assert computed == [["bias"], ["residual"], ["residual", "relu"]]
    assert not any(each.op == "elementwise" for each in read)
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


def test_a_gate_of_each_volume_is_no_constant_of_its_images() -> None:
    """Two volumes have gates of their own, which are repeated along the depth only."""
    net = Net(2, 4, *SIDES)
    y = net.node("Conv", "x", net.weight("w", 4, 4, 1, 1, 1))
    net.node("Mul", y, net.node("Sigmoid", net.node("GlobalAveragePool", y)))
    assert_as_onnxruntime(net.model(), {"x": normal(*net.shape)})


@pytest.mark.long  # builds a network
def test_a_network_of_volumes_runs_on_the_cpu(tmp_path: Path) -> None:
    net = Net(2, 16, *SIDES)
    y = net.node("MaxPool", residual_block("x", net), kernel_shape=[2, 2, 2], strides=[2, 2, 2])
    y = net.node("ConvTranspose", y, net.weight("up", 16, 3, 2, 2, 2), net.weight("c", 3), strides=[2, 2, 2])
    z = net.node("AveragePool", y, kernel_shape=[3, 3, 3], pads=[1] * 6)
    net.results = [y, z]
    onnx.save(net.model(), tmp_path / "m.onnx")
    x = normal(*net.shape)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        for found, wanted in zip(built(x), run_by_onnxruntime(net.model(), {"x": x}), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_four_dimensions_are_refused() -> None:
    net = Net(1, 2, 3, 3, 3, 3)
    net.node("AveragePool", "x", kernel_shape=[2] * 4, name="guilty")
    with pytest.raises(ModelError, match=r"guilty \(has 4 spatial dimensions; allowed: 1 to 3"):
        lowered(net.model())


def test_a_filter_deeper_than_the_volume_is_refused() -> None:
    """onnx's shape inference counts one place: it divides -1 by 3, and drops the fraction."""
    net = Net(2, 3, 4, 5, 5)
    net.node("Conv", "x", net.weight("w", 1, 3, 5, 2, 2), strides=[3, 1, 1], name="guilty")
    with pytest.raises(ModelError, match=r"guilty \(.*whose filters fit into the padded input"):
        lowered(net.model())
