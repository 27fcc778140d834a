"""Images with operands of fewer dimensions: element-wise nodes compute them in every layout that images may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network, Node  # noqa: E402
from schedsearch.network.lower import LAYOUTS, lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402

RNG = np.random.default_rng(3)
IMAGE = (2, 8, 6, 4)
SHAPES = ((), (4,), (1,), (6, 1), (6, 4), (8, 1, 1), (8, 6, 4), (8, 1, 4), (1, 6, 1))


def product(folder: Path, shape: Sequence[int]) -> Path:
    """sin(p * b), p being a pool of x, so that no convolution takes the nodes; b is an input of a shape."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], name="pool", kernel_shape=[1, 1]),
        helper.make_node("Mul", ["p", "b"], ["q"], name="scaled"),
        helper.make_node("Sin", ["q"], ["y"], name="sine"),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, of) for name, of in (("x", IMAGE), ("b", shape))]
    graph = helper.make_graph(nodes, "net", ports, [helper.make_tensor_value_info("y", TensorProto.FLOAT, IMAGE)])
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def numbers(shape: Sequence[int]) -> tuple[dict[str, Any], Any]:
    x, b = (RNG.standard_normal(each).astype(np.float32) for each in (IMAGE, shape))
    return {"x": x, "b": np.asarray(b)}, np.sin(x.astype(np.float64) * b)


def worst(network: Network, inputs: Mapping[str, Any], wanted: Any) -> float:
    """The largest error of any implementation of the last node."""
    errors = []
    for number in range(len(network.nodes[-1].implementations)):

        def chosen(node: Node, number: int = number) -> Any:
            return node.implementations[min(number, len(node.implementations) - 1)]

        errors.append(float(np.abs(evaluate(network, inputs, implementation=chosen)["y"] - wanted).max()))
    return max(errors)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_operand_of_fewer_dimensions_is_read_in_nhwc_and_in_nchw(tmp_path: Path, shape: Sequence[int]) -> None:
    network = lower(read_model(product(tmp_path, shape)), layouts=LAYOUTS)
    last = network.nodes[-1]
    inputs, wanted = numbers(shape)
    assert [last.letters[each]["y"] for each in last.implementations] == ["NHWC", "NCHW"]
    assert worst(network, inputs, wanted) < 1e-6


@pytest.mark.parametrize("layout", ["NHWC", "NCHW4c"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_layout_of_images_is_enough(tmp_path: Path, shape: Sequence[int], layout: str) -> None:
    network = lower(read_model(product(tmp_path, shape)), layouts=(layout,))
    inputs, wanted = numbers(shape)
    assert worst(network, inputs, wanted) < 1e-6


def test_operands_whose_order_stays_are_not_moved(tmp_path: Path) -> None:
    """A row of channels and a plane lie in memory alike in both layouts; one of channels and columns does not."""
    letters = {}
    for shape in SHAPES:
        last = lower(read_model(product(tmp_path, shape)), layouts=("NHWC",)).nodes[-1]
        letters[shape] = last.letters[last.implementations[0]]["b"]
    assert letters == {
        (): "A", (4,): "A", (1,): "A", (6, 1): "AB", (6, 4): "AB", (8, 1, 1): "ABC", (8, 6, 4): "BCA", (8, 1, 4): "BCA",
        (1, 6, 1): "ABC",
    }  # fmt: skip


@pytest.mark.long(of="networks")
def test_a_network_of_images_in_nhwc_multiplies_by_planes_of_channels(tmp_path: Path) -> None:
    path = product(tmp_path, (8, 6, 4))
    inputs, wanted = numbers((8, 6, 4))
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db", layout="NHWC") as net:
        assert "BCA" in str(net.explain())
        assert float(np.abs(net.evaluate(inputs)["y"] - wanted).max()) < 1e-5
