"""What a network computes, by the references of its operators: slow, exact, and on no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from schedsearch.errors import BranchError
from schedsearch.network.graph import Control, Impossible, Network, Node, Subgraph, Value, View
from schedsearch.ops import ArgSpec, Layout, decode, encode
from schedsearch.template import load_reference
from schedsearch.typed import Array
from schedsearch.workload import Workload


def _first(node: Node) -> Workload:
    return node.implementations[0]


def evaluate(
    network: Network, inputs: Mapping[str, Array], *, implementation: Callable[[Node], Workload] = _first
) -> dict[str, Array]:
    """Every value of a network, in the order of its axes.

    Sums are float64 or exact integers; each value is rounded to its dtype once.

    Args:
        inputs: input of the network -> an array of its shape.
        implementation: chooses the implementation that computes a node; by default its first.

    Returns:
        value -> array. Values of bfloat16 are float32.
    """
    found = {
        name: _rounded(np.asarray(inputs[name]), network.values[name]).reshape(network.values[name].shape)
        for name in network.inputs
    }
    found |= {name: _rounded(each.array, network.values[name]) for name, each in network.fixed.items()}
    for node in network.nodes:
        if isinstance(node, View):
            x, y = (network.values[name] for name in (node.x, node.y))
            of_x, of_y = node.layouts[0]
            packed = Layout.parse(of_x).pack(found[node.x], x.axes)
            layout, sizes = Layout.parse(of_y), dict(zip(y.axes, y.shape))
            found[node.y] = layout.unpack(packed.reshape(layout.shape(sizes)), sizes, y.axes)
        elif isinstance(node, Subgraph):
            _evaluate_subgraph(network, node, found)
        elif isinstance(node, Control):
            constants = {name: each.array for name, each in network.constants.items()}
            given = [found[name] if name in found else constants[name] for name in node.reads]
            run = _loop if node.kind == "Loop" else _branch
            found |= dict(zip(node.writes, run(node, given, implementation)))
        else:
            _compute(network, node, implementation(node), found)
    return found


def _branch(node: Control, given: Sequence[Array], implementation: Callable[[Node], Workload]) -> list[Array]:
    body = node.bodies[0 if bool(np.any(given[0])) else 1]
    if isinstance(body, Impossible):
        raise BranchError(f"{node.name}: {body.reason}")
    inside = evaluate(body, dict(zip(body.inputs, given[1:])), implementation=implementation)
    return [inside[name] for name in body.outputs]


def _loop(node: Control, given: Sequence[Array], implementation: Callable[[Node], Workload]) -> list[Array]:
    (body,) = node.networks
    most, goes_on, *arrays = given
    carried, around = arrays[: len(node.writes)], arrays[len(node.writes) :]
    turn, condition = 0, bool(np.any(goes_on))
    while turn < int(np.ravel(most)[0]) and condition:
        inputs = dict(zip(body.inputs, (np.array(turn), np.array(True), *carried, *around)))
        inside = evaluate(body, inputs, implementation=implementation)
        truth, *carried = (inside[name] for name in body.outputs)
        turn, condition = turn + 1, bool(np.any(truth))
    return carried


def _evaluate_subgraph(network: Network, subgraph: Subgraph, values: dict[str, Array]) -> None:
    """By ONNX's reference evaluator."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load_model_from_string(subgraph.model)
    feeds = {}
    for port, name in zip(model.graph.input, subgraph.reads):
        kind = port.type.tensor_type
        array = values[name].reshape([each.dim_value for each in kind.shape.dim])
        feeds[port.name] = array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    for name, result in zip(subgraph.writes, ReferenceEvaluator(model).run(None, feeds)):
        value = network.values[name]
        values[name] = _rounded(np.asarray(result), value).reshape(value.shape)


def _compute(network: Network, node: Node, workload: Workload, values: dict[str, Array]) -> None:
    arrays: dict[str, Array] = {}
    reference = load_reference(workload.op)
    outputs = {spec.name for spec in workload.outputs}
    for (name, spec), plain in zip(node.layouts(workload), (*workload.signature, *workload.outputs)):
        layout = Layout.parse(network.layout(name, spec))
        if spec.name in outputs:
            value = network.values[name]
            flat = np.arange(spec.size, dtype=np.int64)
            found = np.asarray(reference.points(workload, arrays, node.scalars, flat, spec.name))
            sizes = dict(zip(value.axes, value.shape))
            if spec.name in node.offsets:
                sizes["C"] = math.prod(spec.shape) * value.shape[1] // math.prod(value.shape)
            own = layout.unpack(found.reshape(layout.shape(sizes)), sizes, value.axes)
            if spec.name not in node.offsets:
                values[name] = _rounded(own, value).reshape(value.shape)
                continue
            start = node.offsets[spec.name]
            values.setdefault(name, np.zeros(value.shape, _rounded(own, value).dtype))
            values[name][:, start : start + sizes["C"]] = _rounded(own, value)
        elif name in network.values:
            arrays[plain.name] = _in_memory(values[name], network.values[name].axes, layout, plain)
        else:
            constant = network.constants[name]
            arrays[plain.name] = _in_memory(constant.array, constant.axes, layout, plain)


def _in_memory(array: Array, axes: str, layout: Layout, spec: ArgSpec) -> Array:
    packed: Array = layout.pack(array, axes).reshape(spec.shape)
    return decode(encode(packed, spec.dtype), spec.dtype)


def _rounded(array: Array, value: Value) -> Array:
    return decode(encode(array, value.dtype), value.dtype)
