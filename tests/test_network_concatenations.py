"""Concatenations cost nothing: what they join is stored where it belongs, and read there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import network_support as support  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402
from test_network_lower import check, expected, implementation, numbers  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.executable import check as checks  # noqa: E402
from schedsearch.executable.stored import save  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network, Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402


def layer(net: Net, x: str, channels: int) -> str:
    """What a layer of a DenseNet adds to its channels."""
    return net.conv(net.node("Relu", x), 32, channels)


def nested(layers: int = 3) -> Net:
    """Each concatenation has the one before as an argument."""
    net = Net(2, 32, 6, 6)
    x = net.conv("x", 32, 32, 1)
    for number in range(layers):
        x = net.node("Concat", x, layer(net, x, 32 * (number + 1)), axis=1, name=f"c{number}")
    net.node("Relu", x)
    return net


def listed(layers: int = 3) -> Net:
    """Each concatenation has all results before as arguments, as in torchvision's DenseNets."""
    net = Net(2, 32, 6, 6)
    parts = [net.conv("x", 32, 32, 1)]
    x = parts[0]
    for number in range(layers):
        parts.append(layer(net, x, 32 * (number + 1)))
        x = net.node("Concat", *parts, axis=1, name=f"c{number}")
    net.node("Relu", x)
    return net


def kernels(network: Network) -> list[str]:
    return [node.implementations[0].op for node in network.nodes if isinstance(node, Node)]


@pytest.mark.parametrize("build", [nested, listed])
@pytest.mark.mostly_long(2)
def test_a_dense_block_lies_in_one_array(build: Callable[[], Net], tmp_path: Path) -> None:
    net = build()
    model = read_model(net.save(tmp_path))
    network = lower(model)
    assert kernels(network) == ["conv2d", *["elementwise", "conv2d"] * 3, "elementwise"]
    nodes = [node for node in network.nodes if isinstance(node, Node)]
    assert [node.offsets["y"] for node in nodes if node.offsets] == [0, 32, 64, 96]
    assert len({node.outputs["y"] for node in nodes if node.offsets}) == 1
    read = [node.implementations[0].inputs[0] for node in nodes if node.implementations[0].op == "elementwise"]
    assert [each[2][-1] for each in read] == [32, 64, 96, 128]  # channels
    assert [each[3][-1] for each in read[:-1]] == [128] * 3 and len(read[-1]) == 3  # of an array of so many
    x = numbers(net)
    truth = expected(model, x)
    for number in range(max(len(node.implementations) for node in nodes)):
        check(network, truth, evaluate(network, {"x": x}, implementation=implementation(number)), 1e-5)


def test_a_block_whose_first_channels_come_from_elsewhere_has_them_copied(tmp_path: Path) -> None:
    net = Net(1, 32, 6, 6)
    x = net.node("Concat", "x", layer(net, "x", 32), axis=1)
    net.node("Relu", net.node("Concat", x, layer(net, x, 64), axis=1))
    model = read_model(net.save(tmp_path))
    network = lower(model)
    assert kernels(network) == ["elementwise", "conv2d", "concat", "elementwise", "conv2d", "elementwise"]
    array = numbers(net)
    check(network, expected(model, array), evaluate(network, {"x": array}), 1e-5)


def pooled(net: Net) -> None:
    """A pool reads the shorter concatenation, and takes no slice."""
    one = net.conv("x", 32, 32, 1)
    first = net.node("Concat", one, layer(net, one, 32), axis=1)
    second = net.node("Concat", first, layer(net, first, 64), axis=1)
    net.node("Concat", net.node("GlobalMaxPool", first), net.node("GlobalMaxPool", second), axis=1)


def doubled(net: Net) -> None:
    """One kernel would read and write the array."""
    one = net.conv("x", 32, 32, 1)
    net.node("Relu", net.node("Concat", one, net.node("Elu", one), axis=1))


def repeated(net: Net) -> None:
    """One array is two arguments."""
    one = net.conv("x", 32, 32, 1)
    net.node("Relu", net.node("Concat", one, one, axis=1))


def narrow(net: Net) -> None:
    """A slice would begin between vectors of 16 channels."""
    one = net.conv("x", 24, 32, 1)
    net.node("Relu", net.node("Concat", one, layer(net, one, 24), axis=1))


def inside(net: Net) -> None:
    """A concatenation lies in the middle of a longer one, and something else reads it."""
    a, b, d, e = (net.conv("x", 32, 32, 1) for _ in range(4))
    middle = net.node("Concat", net.node("Elu", a), net.node("Elu", b), axis=1)
    net.results = [net.node("Relu", net.node("Concat", d, middle, e, axis=1)), net.node("Relu", middle)]


def crossed(net: Net) -> None:
    """The shorter one ends within an argument of the longer one."""
    a, b = (net.conv("x", 32, 32, 1) for _ in range(2))
    d = layer(net, net.node("Concat", a, b, axis=1), 64)
    middle = net.node("Concat", b, d, axis=1)
    net.node("Relu", net.node("Concat", a, middle, layer(net, middle, 64), axis=1))


def five(net: Net) -> None:
    """Readers have five dimensions, so none of them can read another layout than the plain one."""
    numbers = net.weight("numbers", 2, 1, 1, 1, 1)

    def added(x: str, channels: int) -> str:
        both = net.node("Add", x, numbers)
        return net.conv(net.node("ReduceSum", both, net.row(0), keepdims=0), 32, channels)

    one = net.conv("x", 32, 32, 1)
    first = net.node("Concat", one, added(one, 32), axis=1)
    net.node("Relu", net.node("Concat", first, added(first, 64), axis=1))


@pytest.mark.parametrize("build", [pooled, doubled, repeated, narrow, inside, crossed, five])
@pytest.mark.mostly_long(3)
def test_what_cannot_lie_in_one_array_is_computed_as_well(build: Callable[[Net], None], tmp_path: Path) -> None:
    net = Net(1, 32, 6, 6)
    build(net)
    model = read_model(net.save(tmp_path))
    network = lower(model)
    assert "concat" in kernels(network)
    x = numbers(net)
    truth = expected(model, x)
    for number in range(3):
        check(network, truth, evaluate(network, {"x": x}, implementation=implementation(number)), 1e-5)


def test_a_value_that_leaves_the_network_is_an_array_of_its_own(tmp_path: Path) -> None:
    path = nested(2).save(tmp_path)
    loaded = onnx.load(path)
    shorter = next(node.output[0] for node in loaded.graph.node if node.name == "c0")
    loaded.graph.output.append(onnx.helper.make_tensor_value_info(shorter, onnx.TensorProto.FLOAT, [2, 64, 6, 6]))
    onnx.save(loaded, path)
    model = read_model(path)
    network = lower(model)
    assert kernels(network).count("concat") == 1 and shorter in network.outputs  # a copy of it into the longer one
    x = numbers(nested(2))
    check(network, expected(model, x), evaluate(network, {"x": x}), 1e-5)


def test_parts_of_rows() -> None:
    parts = checks._Parts(row=16)
    parts.add(8, 4)
    parts.add(0, 4)
    assert parts.cover(0, 4) and parts.cover(9, 12)
    assert not parts.cover(0, 5) and not parts.cover(4, 8) and not parts.fill()
    parts.add(4, 4)
    assert parts.cover(0, 12) and not parts.cover(0, 16) and not parts.fill()
    parts.add(12, 4)
    assert parts.cover(0, 16) and parts.fill()


@pytest.mark.long
def test_a_dense_block_is_built_stored_and_loaded(tmp_path: Path) -> None:
    net = listed(2)
    x = numbers(net)
    network = lower(read_model(net.save(tmp_path)), layouts=("NHWC", "NCHW"), slices=("float32",))
    executable = support.build(network, schedsearch.detect("cpu"))
    save(executable, tmp_path / "m.ssx")
    (wanted,) = ReferenceEvaluator(net.model()).run(None, {"x": x})
    with schedsearch.load(tmp_path / "m.ssx") as loaded:
        assert np.abs(loaded(x) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    program, plans = executable.program, {key: each.plan for key, each in executable.artifacts.items()}
    first = next(number for number, call in enumerate(program.calls) if " into " in call.label)
    calls = program.calls[:first] + program.calls[first + 1 :]
    with pytest.raises(checks.ProgramError, match="nothing has written there before"):
        checks.check(dataclasses.replace(program, calls=calls), plans)
