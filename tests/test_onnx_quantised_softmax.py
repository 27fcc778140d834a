"""QLinearSoftmax of ONNX Runtime beside NumPy in float64: over one axis, or over all from one on, as its `opset` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import NoOperatorError, simplified  # noqa: E402

SHAPE = (2, 3, 4, 5)
SCALES = {"x_scale": np.float32(0.07), "x_zero": np.uint8(120), "y_scale": np.float32(0.0173), "y_zero": np.uint8(3)}
X = np.random.default_rng(4).integers(0, 256, SHAPE).astype(np.uint8)


def model_of(axis: int, opset: int, model_opset: int = 18) -> Any:
    info = helper.make_tensor_value_info
    node = helper.make_node(
        "QLinearSoftmax", ["x", *SCALES], ["y"], domain="com.microsoft", name="softmax", axis=axis, opset=opset
    )
    constants = [numpy_helper.from_array(np.asarray(each), name) for name, each in SCALES.items()]
    ports = [[info(name, TensorProto.UINT8, SHAPE)] for name in "xy"]
    graph = helper.make_graph([node], "net", *ports, constants)
    opsets = [helper.make_opsetid("", model_opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def wanted(axis: int, opset: int) -> Any:
    axes = (axis,) if opset >= 13 else tuple(range(axis % X.ndim, X.ndim))
    powers = np.exp((X.astype(np.float64) - 120) * 0.07)
    return np.clip(np.rint(powers / powers.sum(axes, keepdims=True) / np.float32(0.0173)) + 3, 0, 255)


@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (0, 13), (-1, 11), (1, 11), (0, 11), (-2, 12)])
def test_a_network_sums_over_the_axes_of_its_opset(axis: int, opset: int) -> None:
    model = simplified(onnx_ir.from_proto(model_of(axis, opset)), "softmax.onnx")
    np.testing.assert_array_equal(evaluate(lower(model), {"x": X})["y"], wanted(axis, opset))


def test_a_sum_over_one_axis_is_refused_where_the_model_has_none() -> None:
    with pytest.raises(NoOperatorError, match="QLinearSoftmax: softmax"):
        lower(simplified(onnx_ir.from_proto(model_of(1, 13, model_opset=12)), "softmax.onnx"))


@pytest.mark.integrations
@pytest.mark.parametrize(("axis", "opset"), [(1, 13), (1, 11)])
def test_a_built_network_is_not_taken_for_wrong(tmp_path: Path, axis: int, opset: int) -> None:
    """ONNX Runtime 1.32 rounds 1 / scale of the result, 57.8, down, and its numbers are 1.4 % too small."""
    pytest.importorskip("onnxruntime")
    onnx.save(model_of(axis, opset), tmp_path / "softmax.onnx")
    with schedsearch.build(tmp_path / "softmax.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_array_equal(net.evaluate({"x": X})["y"], wanted(axis, opset))
