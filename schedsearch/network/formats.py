"""Floating-point formats that kernels lack become float32.

- float64 on every device: models have it mostly by accident, as of a number that Python wrote.
- float16 and bfloat16 on a CPU, between inputs and outputs that keep their format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.facts import CONTROL, is_onnx, isolated
from schedsearch.network.graph import Impossible
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

HALVES = ("FLOAT16", "BFLOAT16")  # by ONNX's names
FORMAT_ATTRIBUTES = ("to", "dtype", "output_dtype")  # of nodes: ONNX's number of a dtype


def narrow(array: Array) -> Array:
    """Numbers of float64 in float32. Finite ones stay finite: the lowest float64 of a mask becomes the lowest float32."""
    limits = np.finfo(np.float32)
    finite = np.isfinite(array)
    found: Array = np.where(finite, np.clip(array, limits.min, limits.max), array).astype(np.float32)
    return found


def narrowed(dtype: str) -> str:
    """The dtype that arrays of one have after `narrow_doubles`."""
    return "float32" if dtype == "float64" else dtype


def narrow_doubles(model: ir.Model) -> None:
    """Makes every float64 of a graph float32, inputs and computed outputs as well. Nodes of other domains may need float64,
    so a graph where they read or make some stays as it is."""
    _become_single(model, {"DOUBLE"}, narrow)


def widen_halves(model: ir.Model) -> None:
    """Makes every float16 and bfloat16 of a graph float32, but for inputs and outputs: these are converted. A Cast to one of
    them still rounds. A graph with nodes of other domains that read or make some stays as it is."""
    import onnx_ir as ir

    taken, given = (
        {value: value.dtype for value in ports if _is(value, HALVES)} for ports in (model.graph.inputs, model.graph.outputs)
    )
    if not _widen(model):
        return
    for value, kind in taken.items():
        wide = ir.Value(name=f"{value.name}.float32", type=value.type, shape=value.shape)
        _give_nodes(value, wide)
        value.type = ir.TensorType(kind)
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(ir.DataType.FLOAT))], outputs=[wide], name=wide.name)
        model.graph.insert_before(model.graph[0], cast)
    for place, value in enumerate(model.graph.outputs):
        if value in given and not _is(value, HALVES):
            kind, name, value.name = given[value], value.name, f"{value.name}.float32"
            half = ir.Value(name=name, type=ir.TensorType(kind), shape=value.shape)
            cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(kind))], outputs=[half], name=name)
            model.graph.append(cast)
            model.graph.outputs[place] = half
    for _, bodies in isolated(model):
        for body in bodies:
            if not isinstance(body, Impossible):
                _widen(body)


def _widen(model: ir.Model) -> bool:
    """`_become_single` of float16 and bfloat16, in which a Cast from another format rounds: a second Cast follows it."""
    import onnx_ir as ir

    casts = [
        (node, node.outputs[0].type)
        for graph in (model.graph, *_bodies(model.graph))
        for node in graph
        if node.op_type == "Cast" and is_onnx(node) and _is(node.outputs[0], HALVES) and not _same_format(node)
    ]
    if not _become_single(model, HALVES, lambda array: array.astype(np.float32)):
        return False
    for node, kind in casts:
        short = node.outputs[0]
        wide = ir.Value(name=f"{short.name}.float32", type=short.type, shape=short.shape)
        _give_nodes(short, wide)
        short.type = kind
        node.attributes["to"] = ir.AttrInt64("to", int(kind.dtype))
        assert node.graph is not None
        node.graph.insert_after(
            node, ir.Node("", "Cast", [short], [ir.AttrInt64("to", int(ir.DataType.FLOAT))], outputs=[wide], name=wide.name)
        )
    return True


def _same_format(cast: ir.Node) -> bool:
    source = cast.inputs[0]
    return source is not None and source.dtype == cast.outputs[0].dtype


def _become_single(model: ir.Model, kinds: Collection[str], convert: Callable[[Array], Array]) -> bool:
    """Makes some formats float32 everywhere in a graph, unless a node of another domain reads or makes them; returns whether
    it did. Outputs that are constants keep their format."""
    import onnx_ir as ir

    graphs = [model.graph, *_bodies(model.graph)]
    values = [each for graph in graphs for each in (*graph.inputs, *graph.initializers.values())]
    for node in (each for graph in graphs for each in graph):
        own = [value for value in (*node.inputs, *node.outputs) if _is(value, kinds)]
        if own and not (is_onnx(node) or node.domain == CONTROL):
            return False
        values += node.outputs
    kept = {value for value in model.graph.outputs if _is(value, kinds) and _constant(value) is not None}
    for value in kept:
        _read_a_copy(model.graph, value, convert)
    changed = [value for value in dict.fromkeys(values) if _is(value, kinds) and value not in kept]
    for value in changed:
        value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.const_value is not None:
            value.const_value = ir.tensor(convert(value.const_value.numpy()), name=value.name)
    for graph in graphs if changed else ():
        for node in graph:
            if kept.isdisjoint(node.outputs):
                _convert_attributes(node, kinds, convert)
    return bool(changed)


def _give_nodes(value: ir.Value, other: ir.Value) -> None:
    """Makes all nodes read another value; an output of the graph remains."""
    for node, place in tuple(value.uses()):
        node.replace_input_with(place, other)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    import onnx_ir as ir

    return ir.convenience.get_const_tensor(value)


def _read_a_copy(graph: ir.Graph, value: ir.Value, convert: Callable[[Array], Array]) -> None:
    """Gives the nodes that read a constant one of float32."""
    import onnx_ir as ir

    array = _constant(value)
    if array is None or not value.uses():
        return
    name = f"{value.name}.float32"
    single = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=value.shape,
        const_value=ir.tensor(convert(array.numpy()), name=name),
    )
    graph.register_initializer(single)
    _give_nodes(value, single)


def _bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    for node in graph:
        for each in node.attributes.values():
            found = [each.as_graph()] if each.type.name == "GRAPH" else []
            found += each.as_graphs() if each.type.name == "GRAPHS" else []
            for body in found:
                yield body
                yield from _bodies(body)


def _is(value: ir.Value | None, kinds: Collection[str]) -> bool:
    import onnx_ir as ir

    return value is not None and isinstance(value.type, ir.TensorType) and value.type.dtype.name in kinds


def _convert_attributes(node: ir.Node, kinds: Collection[str], convert: Callable[[Array], Array]) -> None:
    import onnx_ir as ir

    for name, each in list(node.attributes.items()):
        if each.type.name == "INT" and name in FORMAT_ATTRIBUTES and ir.DataType(each.as_int()).name in kinds:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        elif each.type.name == "TENSOR" and each.as_tensor().dtype.name in kinds:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(convert(each.as_tensor().numpy())))
