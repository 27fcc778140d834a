"""ONNX models with one gather or scatter whose indices are given or computed, and graphs of computed sizes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from test_dynamic_net import artifact

from schedsearch.device import Device
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet

X = (4, 3, 5)


def updates_of(op: str, indices: Any) -> list[Any]:
    """The updates of a scatter, if it is one."""
    shape = np.shape(indices)
    shape = (*shape[:-1], *X[shape[-1] :]) if op == "ScatterND" else shape
    return [np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)] if op.startswith("Scatter") else []


def model(op: str, attributes: dict[str, Any], indices: Any, *, rows: str | None = None) -> onnx.ModelProto:
    """y of a node that is called pick. Its indices are an input; `rows` is the name of their first extent."""
    given = [np.zeros(X, np.float32), np.array(indices), *updates_of(op, indices)]
    types = [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT]
    shapes = [list(each.shape) for each in given]
    for shape in shapes[1:] if rows is not None else ():
        shape[0] = rows
    names = ["x", "places", "updates"][: len(given)]
    inputs = [helper.make_tensor_value_info(*each) for each in zip(names, types, shapes)]
    nodes = [helper.make_node(op, names, ["y"], "pick", **attributes)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "indices", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def graph(op: str, attributes: dict[str, Any], indices: Any, device: Device) -> DynamicNet:
    """With r = 0 to 5 rows of indices."""
    read = read_graph(model(op, attributes, indices, rows="r"), {"r": Size("r", 0, 5)})
    return DynamicNet(read.program(), device, functools.partial(artifact, device.target))
