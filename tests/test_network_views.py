"""The shapes of views are those of onnx's reference evaluator; graphs of open sizes take the same views and operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ir = pytest.importorskip("onnx_ir")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402
from schedsearch.network.views import viewed  # noqa: E402


def model_of(nodes: list[Any], x: Any, constants: dict[str, Any], kind: int = TensorProto.FLOAT) -> Any:
    weights = [numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items()]
    inputs = [helper.make_tensor_value_info("x", kind, x)]
    graph = helper.make_graph(nodes, "net", inputs, [helper.make_empty_tensor_value_info("y")], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], Any]:
    """A shape, and the model of a view of it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    rank, op = len(shape), draw(st.sampled_from(["Identity", "Flatten", "Squeeze", "Unsqueeze", "Reshape"]))
    if op == "Flatten":
        return shape, model_of([helper.make_node(op, ["x"], ["y"], axis=draw(st.integers(-rank, rank)))], shape, {})
    ones = [axis - draw(st.sampled_from([0, rank])) for axis, extent in enumerate(shape) if extent == 1]
    if op == "Identity" or (op == "Squeeze" and not ones):
        return shape, model_of([helper.make_node(op, ["x"], ["y"])], shape, {})
    if op == "Squeeze":
        axes = draw(st.lists(st.sampled_from(ones), min_size=1, unique=True))
    elif op == "Unsqueeze":
        count = draw(st.integers(1, 3))
        places = st.integers(-rank - count, rank + count - 1)
        axes = draw(st.lists(places, min_size=count, max_size=count, unique_by=lambda axis: axis % (rank + count)))
    else:
        axes = draw(st.permutations([*shape, *[1] * draw(st.integers(0, 2))]))
        if axes and draw(st.booleans()):
            axes[draw(st.integers(0, len(axes) - 1))] = -1
        axes = [
            0 if place < rank and extent == shape[place] and draw(st.booleans()) else extent
            for place, extent in enumerate(axes)
        ]
    return shape, model_of([helper.make_node(op, ["x", "axes"], ["y"])], shape, {"axes": np.array(axes, np.int64)})


@settings(deadline=None, max_examples=200)
@given(views())
def test_a_view_has_the_shape_that_onnx_gives_it(view: tuple[list[int], Any]) -> None:
    shape, model = view
    wanted: Any = ReferenceEvaluator(model).run(None, {"x": np.zeros(shape, np.float32)})[0]
    (node,) = ir.from_proto(model).graph
    assert viewed(node, shape) == list(wanted.shape)


def test_a_dimension_that_cannot_be_dropped_is_named() -> None:
    model = model_of([helper.make_node("Squeeze", ["x", "axes"], ["y"])], [2, 3], {"axes": np.array([1])})
    (node,) = ir.from_proto(model).graph
    with pytest.raises(ModelError, match=r"drops dimension 1 of \[2, 3\]; allowed: of extent 1"):
        viewed(node, [2, 3])


@pytest.mark.parametrize("name", ["Dropout", "QLinearSigmoid"])
@pytest.mark.mostly_long(2)
def test_graphs_of_open_sizes_are_prepared_as_those_of_fixed_ones(name: str, tmp_path: Path) -> None:
    """A Dropout computes nothing, and operators of com.microsoft are those of ONNX between conversions."""
    if name == "Dropout":
        model = model_of([helper.make_node("Dropout", ["x"], ["v"]), helper.make_node("Relu", ["v"], ["y"])], ["n", 3], {})
        x: Any = np.array([[0, -1, 2], [-3, 0, 4]], np.float32)
        wanted = np.maximum(x, 0)
    else:
        of_x, of_y = ["scale", "zero"], ["scale_of_y", "zero"]
        nodes = [helper.make_node("QLinearSigmoid", ["x", *of_x, *of_y], ["y"], domain="com.microsoft")]
        scales = {"scale": np.float32(0.05), "scale_of_y": np.float32(1 / 256), "zero": np.uint8(0)}
        model = model_of(nodes, ["n", 3], scales, TensorProto.UINT8)
        x = np.array([[0, 10, 200], [255, 3, 90]], np.uint8)
        wanted = np.minimum(np.rint(256 / (1 + np.exp(-0.05 * x.astype(float)))), 255).astype(np.uint8)
    onnx.save(model, tmp_path / "net.onnx")
    options: dict[str, Any] = {"run_mode": "exact", "target": "cpu", "db": tmp_path / "none.db", "check": False}
    with schedsearch.build_dynamic(tmp_path / "net.onnx", {"n": (1, 4)}, **options) as net:
        np.testing.assert_array_equal(net(x), wanted)
