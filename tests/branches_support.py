"""ONNX models whose branches and loops depend on inputs, and networks built from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.executable.fixed import FixedNet  # noqa: E402
from schedsearch.executable.program import Program  # noqa: E402

Array = np.ndarray[Any, Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
info = helper.make_tensor_value_info
LONG = 51  # nodes; two shorter branches are both computed
X = np.arange(1, 13, dtype=np.float32).reshape(3, 4) / 8
node = helper.make_node


def graph(nodes: Sequence[Any], results: Sequence[str], constants: dict[str, Any] | None = None) -> Any:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    return helper.make_graph(
        list(nodes), "body", [], [helper.make_empty_tensor_value_info(name) for name in results], weights
    )


def steps(name: str, x: str, count: int = LONG) -> list[Any]:
    """x, its sign changed so many times, as `name`."""
    names = [x, *(f"{name}{number}" for number in range(1, count)), name]
    return [node("Neg", [before], [after]) for before, after in itertools.pairwise(names)]


def model_of(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[str], constants: dict[str, Any] | None = None
) -> Any:
    made = graph(nodes, outputs, constants)
    made.input.extend(inputs)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chosen(
    then: Any, otherwise: Any, *, results: Sequence[str] = ("y",), constants: dict[str, Any] | None = None, k: Any = ()
) -> Any:
    """y = one of two graphs of h = 2 x, the first if the sum of x is positive; z = y + h."""
    nodes = [
        node("Mul", ["x", "two"], ["h"]),
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["positive"], name="above"),
        node("If", ["positive"], list(results), name="either", then_branch=then, else_branch=otherwise),
        node("Add", [results[0], "h"], ["z"]),
    ]
    own = {"two": np.float32(2), "zero": np.float32(0), **(constants or {})}
    return model_of(nodes, [info("x", FLOAT, [3, 4]), *k], ["z", *results[1:]], own)


def scaled(factor: float, name: str = "r") -> Any:
    """h times a number, after many steps."""
    return graph(
        [*steps(f"{name}.n", "h"), node("Mul", [f"{name}.n", "factor"], [name])], [name], {"factor": np.float32(factor)}
    )


def right(model: Any, feeds: dict[str, Array]) -> list[Array]:
    """What ONNX Runtime computes; without it, onnx's evaluator."""
    try:
        import onnxruntime
    except ImportError:
        return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, feeds)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feeds)]


def built(model: Any, folder: Path, **options: Any) -> FixedNet:
    onnx.save(model, folder / "model.onnx")
    net = schedsearch.build(
        folder / "model.onnx", target="cpu", db=folder / "records.db", out=folder / "model.ssx", progress=False, **options
    )
    assert isinstance(net, FixedNet)
    return net


def assert_right(net: Any, model: Any, **feeds: Array) -> None:
    found = net(**feeds)
    several = found if isinstance(found, tuple) else (found,)
    for one, other in zip(several, right(model, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def with_control(program: Program, **changes: Any) -> Program:
    calls = tuple(
        each if each.control is None else replace(each, control=replace(each.control, **changes)) for each in program.calls
    )
    return replace(program, calls=calls)


BOOL = TensorProto.BOOL
