"""ONNX models with branches and loops, what they compute by ONNX Runtime, and what schedsearch computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load  # noqa: E402

Array = np.ndarray[Any, Any]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info = helper.make_tensor_value_info


def model_of(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
) -> Any:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    ports = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(list(nodes), "net", list(inputs), ports, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def body_of(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: dict[str, Any] | None = None
) -> Any:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    return helper.make_graph(list(nodes), "body", list(inputs), list(outputs), weights)


def right(model: Any, feeds: dict[str, Array]) -> list[Array]:
    """What ONNX Runtime computes; without it, onnx's evaluator."""
    try:
        import onnxruntime
    except ImportError:
        return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, feeds)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feeds)]


def ours(model: Any, feeds: dict[str, Array]) -> list[Array]:
    network = lower(load(model).graph())
    values = evaluate(network, feeds)
    return [values[name].reshape(network.values[name].shape) for name in network.outputs]


def assert_right(model: Any, feeds: dict[str, Array]) -> None:
    for name, found, wanted in zip([each.name for each in model.graph.output], ours(model, feeds), right(model, feeds)):
        assert found.shape == wanted.shape, name
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def is_left(model: Any) -> list[str]:
    """Operators with bodies, and of sequences, that are left after a model was simplified."""
    found = load(model).graph()
    return [node.op_type for node in found.graph.all_nodes() if re.match("If|Loop|Scan|.*Sequence|Optional", node.op_type)]


def branch(op: str, *inputs: str, result: str = "r", **attributes: Any) -> Any:
    return body_of([helper.make_node(op, list(inputs), [result], **attributes)], [], [info(result, FLOAT, None)])


def loop(turns: str, condition: str, goes_on: Sequence[Any], extra: dict[str, Any] | None = None, scans: bool = True) -> Any:
    """x -> 2 x + turn, again and again; scans what it had before."""
    nodes = [
        *goes_on,
        helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
        helper.make_node("Mul", ["v", "two"], ["double"]),
        helper.make_node("Add", ["double", "number"], ["after"]),
        helper.make_node("Neg", ["v"], ["before"]),
    ]
    outputs = [info("on", BOOL, []), info("after", FLOAT, [2]), info("before", FLOAT, [2])]
    inputs = [info("i", INT64, []), info("cond", BOOL, []), info("v", FLOAT, [2])]
    body = body_of(nodes, inputs, outputs, {"two": np.float32(2), **(extra or {})})
    return helper.make_node("Loop", [turns, condition, "x"], ["y", "all"], name="turns", body=body)


ALWAYS = [helper.make_node("Identity", ["cond"], ["on"])]
BELOW_BIG = [helper.make_node("ReduceMax", ["v"], ["w"], keepdims=0), helper.make_node("Less", ["w", "big"], ["on"])]
X = np.array([1, -0.5], np.float32)


def two_branches(*, then: str = "Exp", inputs: Sequence[str] = ("x",), **attributes: Any) -> Any:
    chosen = helper.make_node(
        "If", ["c"], ["y"], name="either", then_branch=branch(then, *inputs, **attributes), else_branch=branch("Neg", "x")
    )
    total = helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)
    above = helper.make_node("GreaterOrEqual", ["total", "limit"], ["c"], name="above")
    return model_of(
        [total, above, chosen], [info("x", FLOAT, [2, 3])], ["y"], {"limit": np.float32(0), "i": np.array([0, 1])}
    )
