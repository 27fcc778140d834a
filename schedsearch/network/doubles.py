"""float64 becomes float32: kernels lack it, and models have it mostly by accident, as of a number that Python wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.facts import CONTROL, is_onnx
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

FORMAT_ATTRIBUTES = ("to", "dtype", "output_dtype")  # of nodes: ONNX's number of a dtype


def narrow(array: Array) -> Array:
    """Numbers of float64 in float32. Finite ones stay finite: the lowest float64 of a mask becomes the lowest float32."""
    limits = np.finfo(np.float32)
    finite = np.isfinite(array)
    found: Array = np.where(finite, np.clip(array, limits.min, limits.max), array).astype(np.float32)
    return found


def narrow_doubles(model: ir.Model) -> None:
    """Makes every float64 of a graph float32, inputs and outputs as well. Nodes of other domains may need float64, so a
    graph where they read or make some stays as it is."""
    import onnx_ir as ir

    graphs = [model.graph, *_bodies(model.graph)]
    for node in (each for graph in graphs for each in graph):
        if not (is_onnx(node) or node.domain == CONTROL) and any(map(_is_double, (*node.inputs, *node.outputs))):
            return
    for graph in graphs:
        of_nodes = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *of_nodes):
            if _is_double(value):
                value.type = ir.TensorType(ir.DataType.FLOAT)
                if value.const_value is not None:
                    value.const_value = ir.tensor(narrow(value.const_value.numpy()), name=value.name)
        for node in graph:
            _narrow_attributes(node)


def _bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    for node in graph:
        for each in node.attributes.values():
            found = [each.as_graph()] if each.type.name == "GRAPH" else []
            found += each.as_graphs() if each.type.name == "GRAPHS" else []
            for body in found:
                yield body
                yield from _bodies(body)


def _is_double(value: ir.Value | None) -> bool:
    import onnx_ir as ir

    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.DOUBLE


def _narrow_attributes(node: ir.Node) -> None:
    import onnx_ir as ir

    for name, each in list(node.attributes.items()):
        if each.type.name == "INT" and name in FORMAT_ATTRIBUTES and each.as_int() == ir.DataType.DOUBLE:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        elif each.type.name == "TENSOR" and each.as_tensor().dtype == ir.DataType.DOUBLE:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(narrow(each.as_tensor().numpy())))
