"""Whole quantised networks on a CPU equal their model in integers, in every bit of every value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from quantised_networks import Codes, QuantisedNet, inception, mobilenet, resnet, vgg

import schedsearch
from schedsearch.network.evaluate import evaluate
from schedsearch.network.graph import Node
from schedsearch.network.lower import lower
from schedsearch.network.model import read_model


def block(net: QuantisedNet) -> Codes:
    """One of every layer."""
    x = net.conv(net.input, 16)
    x = net.add(net.conv(x, 16, relu=False), x)
    x = net.concat([x, net.conv(x, 16, 1, groups=16)])
    return net.dense(net.global_pool(net.max_pool(x, 3, stride=2, pad=1)), 8)


NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[QuantisedNet], Codes]]] = {
    "one of every layer": ((1, 4, 9, 8), block),
    "VGG-16": ((1, 3, 32, 32), vgg),
    "ResNet-18": ((2, 3, 32, 32), lambda net: resnet(net, (2, 2, 2, 2), bottleneck=False)),
    "ResNet-50": ((1, 3, 32, 32), lambda net: resnet(net, (3, 4, 6, 3), bottleneck=True, width=4)),
    "Inception": ((1, 3, 31, 31), inception),
    "MobileNetV2": ((1, 3, 32, 32), mobilenet),
}


@pytest.mark.long  # each builds a network
@pytest.mark.parametrize("form", ["QDQ", "QLinear"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_value_is_that_of_whole_numbers(tmp_path: Path, name: str, form: str) -> None:
    shape, make = NETWORKS[name]
    net = QuantisedNet(form, *shape)
    result = make(net)
    assert len(np.unique(result.codes)) > 5
    with schedsearch.build(net.save(tmp_path / "net.onnx", result), db=tmp_path / "none.db", target="cpu") as built:
        found = built.trace(net.x)
        ops = [call.label.split()[0] for call in built.steps]
    # Every value has a kernel but the input, and the results of convolutions that are added in the same kernel.
    added = sum(node.op_type in ("Add", "QLinearAdd") for node in net.nodes)
    assert "elementwise" not in ops or "Concat" in name_of_nodes(net), ops
    assert len(net.values.keys() - found.keys() - {"x"}) == added and result.name in found
    for value in net.values.keys() & found.keys():
        codes = net.values[value]
        np.testing.assert_array_equal(found[value].reshape(codes.shape), codes, err_msg=value)


def test_8_bit_arguments_of_one_scale_are_stored_into_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tools for quantisation write concatenations: every argument has the scale of the result."""
    net = QuantisedNet("QDQ", 1, 3, 31, 31)
    monkeypatch.setattr(net, "_linear", lambda numbers, positive: (np.float32(0.0625), 0))
    result = inception(net)
    network = lower(read_model(net.save(tmp_path / "net.onnx", result)), dtype="float16")
    assert sum("Concat" in node.op_type for node in net.nodes) == 3
    assert "concat" not in {node.implementations[0].op for node in network.nodes if isinstance(node, Node)}
    found = evaluate(network, {"x": net.x})
    for value in net.values.keys() & found.keys():
        np.testing.assert_array_equal(found[value].reshape(net.values[value].shape), net.values[value], err_msg=value)
    assert result.name in found and len(net.values.keys() & found.keys()) > 15


def name_of_nodes(net: QuantisedNet) -> str:
    return " ".join(node.op_type for node in net.nodes)
