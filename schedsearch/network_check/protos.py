"""ONNX's protos: what nodes read, dtypes and shapes, and weights beside a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from schedsearch.network.formats import FORMAT_ATTRIBUTES, narrow
from schedsearch.typed import Array

_NOT_SINGLE = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")


def is_random(node: NodeProto) -> bool:
    if node.op_type in _RANDOM:
        return True
    return node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2])


def subgraphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of a node."""
    for each in node.attribute:
        if each.type == AttributeProto.GRAPH:
            yield each.g
        elif each.type == AttributeProto.GRAPHS:
            yield from each.graphs


def reads_of(node: NodeProto) -> Iterator[str]:
    """Names of values that a node reads, those that its subgraphs capture among them."""
    yield from (name for name in node.input if name)
    for graph in subgraphs_of(node):
        own = {each.name for each in (*graph.input, *graph.initializer)} | {out for n in graph.node for out in n.output}
        for inner in graph.node:
            yield from (name for name in reads_of(inner) if name not in own)
        yield from (each.name for each in graph.output if each.name not in own)


def rename(node: NodeProto, names: Mapping[str, str]) -> None:
    for place, name in enumerate(node.input):
        node.input[place] = names.get(name, name)
    for graph in subgraphs_of(node):
        own = {each.name for each in (*graph.input, *graph.initializer)} | {out for n in graph.node for out in n.output}
        inside = {name: to for name, to in names.items() if name not in own}
        for inner in graph.node:
            rename(inner, inside)


def inferred(model: ModelProto) -> tuple[dict[str, int], dict[str, list[int | None]]]:
    """Dtypes and shapes of values, as far as onnx infers them. Shapes only say how long sums are."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # of many kinds; a model that is wrong by onnx's rules is refused elsewhere
        graph = model.graph
    dtypes: dict[str, int] = {each.name: each.data_type for each in graph.initializer}
    shapes: dict[str, list[int | None]] = {each.name: list(each.dims) for each in graph.initializer}
    for each in (*graph.value_info, *graph.input, *graph.output):
        if not each.type.HasField("tensor_type"):
            continue
        kind = each.type.tensor_type
        dtypes[each.name] = kind.elem_type
        if kind.HasField("shape"):
            shapes[each.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    return dtypes, shapes


def wide(kind: int) -> int:
    return TensorProto.FLOAT if kind in _NOT_SINGLE else kind


def single(array: Array) -> Array:
    """Floating-point numbers in float32; others as they are."""
    if array.dtype == np.float64:
        return narrow(array)
    is_half = array.dtype.itemsize == 2 and array.dtype.name in ("float16", "bfloat16")
    return array.astype(np.float32) if is_half else array


def widen(model: ModelProto) -> None:
    """Makes every floating-point number float32: evaluators lack operators for float16 and bfloat16, and networks compute
    float64 in float32."""
    for function in model.functions:
        for node in function.node:
            _widen_node(node)
    _widen_graph(model.graph)


def _widen_graph(graph: GraphProto) -> None:
    for each in (*graph.input, *graph.output, *graph.value_info):
        if each.type.tensor_type.elem_type in _NOT_SINGLE:
            each.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        _widen_node(node)


def _widen_node(node: NodeProto) -> None:
    for each in node.attribute:
        if each.type == AttributeProto.TENSOR:
            _widen_tensor(each.t)
        elif each.type == AttributeProto.INT and each.name in FORMAT_ATTRIBUTES and each.i in _NOT_SINGLE:
            each.i = TensorProto.FLOAT
    for graph in subgraphs_of(node):
        _widen_graph(graph)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _NOT_SINGLE:
        tensor.CopyFrom(numpy_helper.from_array(single(numpy_helper.to_array(tensor)), tensor.name))


def outside(tensor: TensorProto, folder: Path) -> Array:
    """A weight in a file beside the model, mapped."""
    place = {each.key: each.value for each in tensor.external_data}
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    if math.prod(shape) == 0:
        return np.zeros(shape, kind)
    offset = int(place.get("offset", 0))
    raw = np.memmap(folder / place["location"], np.uint8, "r", offset, math.prod(shape) * kind.itemsize)
    array: Array = raw.view(kind).reshape(shape)
    return array


def value_info(name: str, kind: int, shape: list[int] | None) -> onnx.ValueInfoProto:
    if kind == TensorProto.UNDEFINED:
        return onnx.ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, kind, shape)


def shell(model: ModelProto) -> ModelProto:
    """A model without a graph."""
    made = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    return made
