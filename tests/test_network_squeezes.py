"""Squeeze-excite in a graph is one kernel, if nothing else reads what is inside of it; against ONNX's evaluator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network, Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402


def mobilenet() -> Net:
    """MobileNetV3's, behind a depthwise convolution, whose result two nodes read."""
    net = Net(2, 16, 5, 6)
    x = net.node("HardSwish", net.conv("x", 16, 1, group=16, name="deep"))
    small = net.node("Relu", net.conv(net.node("GlobalAveragePool", x, name="pool"), 8, 16, 1))
    gate = net.node("HardSigmoid", net.conv(small, 16, 8, 1), alpha=1 / 6)
    net.conv(net.node("Mul", gate, x), 24, 16, 1, name="wide")
    return net


def efficientnet() -> Net:
    """EfficientNet's, with a mean in the place of the pool, and without biases."""
    net = Net(1, 8, 6, 6)
    small = net.conv(net.node("ReduceMean", "x", net.row(2, 3), keepdims=1), 6, 8, 1, bias=False)
    small = net.node("Mul", small, net.node("Sigmoid", small))
    net.node("Mul", "x", net.node("Sigmoid", net.conv(small, 8, 6, 1, bias=False)))
    return net


def without_function() -> Net:
    net = Net(1, 8, 6, 6)
    small = net.conv(net.node("GlobalAveragePool", "x"), 6, 8, 1)
    net.node("Mul", "x", net.node("Sigmoid", net.conv(small, 8, 6, 1)))
    return net


def read_elsewhere() -> Net:
    """The gates are a result of the network, too."""
    net = efficientnet()
    gates = net.nodes[-2].output[0]
    net.results = [gates, net.nodes[-1].output[0]]
    return net


def of_another_array() -> Net:
    net = Net(1, 8, 6, 6)
    small = net.node("Relu", net.conv(net.node("GlobalAveragePool", "x"), 6, 8, 1))
    net.node("Mul", net.conv("x", 8, 8), net.node("Sigmoid", net.conv(small, 8, 6, 1)))
    return net


def added() -> Net:
    net = Net(1, 8, 6, 6)
    small = net.node("Relu", net.conv(net.node("GlobalAveragePool", "x"), 6, 8, 1))
    net.node("Add", "x", net.node("Sigmoid", net.conv(small, 8, 6, 1)))
    return net


def ops(network: Network) -> list[str]:
    return [node.implementations[0].op for node in network.nodes if isinstance(node, Node)]


def check(net: Net, folder: Path) -> Network:
    """Values of the network are those of the model."""
    model = read_model(net.save(folder))
    network = lower(model, squeezes=True)
    x = np.random.default_rng(7).uniform(-1, 1, net.shape).astype(np.float32)
    truth: dict[str, Any] = ReferenceEvaluator(onnx_ir.to_proto(model)).run(None, {"x": x}, intermediate=True)
    for name, array in evaluate(network, {"x": x}).items():
        np.testing.assert_allclose(array, truth[name], rtol=1e-5, atol=1e-5, err_msg=name)
    return network


@pytest.mark.parametrize(
    "build, wanted",
    [(mobilenet, ["depthwise_conv2d", "squeeze_excite", "conv2d"]), (efficientnet, ["squeeze_excite"])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_squeeze_excite_is_one_kernel(build: Callable[[], Net], wanted: list[str], tmp_path: Path) -> None:
    network = check(build(), tmp_path)
    assert ops(network) == wanted
    (node,) = (each for each in network.nodes if isinstance(each, Node) and each.implementations[0].op == "squeeze_excite")
    assert [each.layout for each in node.implementations] == ["NHWC", "NCHW"]
    assert "squeeze_excite" not in ops(lower(read_model(build().save(tmp_path))))


@pytest.mark.parametrize(
    "build", [without_function, read_elsewhere, of_another_array, added], ids=lambda build: build.__name__
)
def test_what_is_no_squeeze_excite_stays(build: Callable[[], Net], tmp_path: Path) -> None:
    assert "squeeze_excite" not in ops(check(build(), tmp_path))
