"""ONNX models that are valid though they look odd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from invalid_models import (
    EIGHT,
    added,
    array,
    body,
    branch,
    call,
    changed,
    function,
    model,
    nested,
    node,
    relu,
    row,
    softmax_of_attribute,
)
from onnx import TensorProto as T
from onnx import helper


def _odd() -> Iterator[tuple[str, Any]]:
    yield "nodes in any order", model([node("Relu", ["t"], ["y"]), node("Neg", ["x"], ["t"])])
    yield "two equal weights of one name", model([node("Add", ["x", "w"], ["y"])], [array(EIGHT)] * 2)
    both = added(array(EIGHT))
    both.graph.input.append(helper.make_tensor_value_info("w", T.FLOAT, [8]))
    yield "a weight that is an input, too", both
    for name, extents in (("extent", [1, 9]), ("rank", [8])):
        wrong = model([node("Neg", ["x"], ["t"]), node("Relu", ["t"], ["y"])])
        wrong.graph.value_info.append(helper.make_tensor_value_info("t", T.FLOAT, extents))
        wrong.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", T.FLOAT, extents))
        yield f"notes of a wrong {name}", wrong
    notes = relu()
    notes.graph.value_info.append(helper.make_tensor_value_info("nothing", T.INT64, [3]))
    yield "notes about no value", notes
    yield (
        "the long name of ONNX's domain",
        changed(model([node("Relu", ["x"], ["y"], domain="ai.onnx")]), "opset_import.0.domain", "ai.onnx"),
    )
    yield "metadata twice", _with_metadata()
    yield "a negative axis", model([node("Softmax", ["x"], ["y"], axis=-2)])
    yield "a Reshape that keeps an extent", model([node("Reshape", ["x", "s"], ["y"])], [row(0, -1)])
    yield "an empty weight", model([node("Concat", ["x", "w"], ["y"], axis=0)], [array(np.ones((0, 8), np.float32))])
    yield "bodies that use one name", branch(body([node("Relu", ["x"], ["negated"])], "negated"))
    yield "a body that hides a name", branch(body([node("Relu", ["x"], ["most"])], "most"))
    yield "functions in functions", nested(3)
    yield (
        "an argument of a function",
        model([call("F", along=1)], functions=[function("F", [softmax_of_attribute()], ["along"])]),
    )


def _with_metadata() -> Any:
    made = relu()
    for value in "ab":
        made.metadata_props.add(key="key", value=value)
    return made


ODD = dict(_odd())  # valid models
