"""Shapes that a model declares and that do not hold: found where they follow from inputs, and where a call makes another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import DeviceError  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402


def places(folder: Path, count: int) -> Path:
    """The places of the numbers of x that are not 0, of which the model says how many there are."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"], name="places"),
        helper.make_node("Cast", ["places"], ["y"], name="as_floats", to=TensorProto.FLOAT),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, count])
    graph = helper.make_graph(nodes, "net", [x], [y])
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_a_wrong_declared_shape_is_named_with_the_one_that_a_call_makes(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"'y' has shape \[1, 4\] in this call, and \[1, 2\] in the network.* Correct the"):
        schedsearch.build(places(tmp_path, 2), target="cpu", db=tmp_path / "records.db", fallback="onnxruntime")


def test_a_declared_shape_that_holds_serves(tmp_path: Path) -> None:
    with schedsearch.build(places(tmp_path, 4), target="cpu", db=tmp_path / "records.db", fallback="onnxruntime") as net:
        found = net.evaluate({"x": np.ones(4, np.float32)})["y"]
        np.testing.assert_array_equal(found, [[0, 1, 2, 3]])
        with pytest.raises(DeviceError, match=r"\[1, 2\] in this call, and \[1, 4\] in the network"):
            net.evaluate({"x": np.array([0, 1, 0, 1], np.float32)})


@pytest.mark.parametrize("fallback", [None, "onnxruntime"])
def test_a_declared_shape_that_contradicts_the_inputs_is_named(tmp_path: Path, fallback: str | None) -> None:
    """Rows [1, 4] are repeated as often as a call says; 5 columns are impossible."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["wide"], name="repeat"),
        helper.make_node("Relu", ["wide"], ["y"], name="positive"),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [1, 4]), info("shape", TensorProto.INT64, [2])]
    graph = helper.make_graph(nodes, "net", inputs, [info("y", TensorProto.FLOAT, [3, 5])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "net.onnx")
    with pytest.raises(
        ModelError, match=r"'y' at node positive .* contradicts the \[3,5\] that the model declares: node repeat"
    ):
        schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "records.db", fallback=fallback)
