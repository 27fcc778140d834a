"""Nodes of a graph that was rewritten as ONNX Runtime takes them.

Rewriting makes nodes of a later opset than the model declares: x * Sigmoid(x) becomes Swish, which opset 24 has. Kernels
compute them whatever the model declares; for ONNX Runtime they become the nodes of its opset that ONNX defines them by. It
also makes several nodes of one, which have one name, and products of more than two arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def runnable(nodes: Iterable[ir.Node], opset: int) -> list[onnx.NodeProto]:
    """Nodes as ONNX Runtime takes them in a model of an opset, each with a name of its own.

    Raises:
        ModelError: ONNX does not define a node by operators of the opset.
    """
    from onnx_ir import serde

    found = [each for node in nodes for each in _in_opset(serde.serialize_node(node), opset, _types(node))]
    seen: set[str] = set()
    for node in found:
        name, number = node.name, 1
        while node.name and node.name in seen:
            number += 1
            node.name = f"{name}.{number}"
        seen.add(node.name)
    return found


def _types(node: ir.Node) -> dict[str, onnx.TypeProto]:
    """Those of what a node reads."""
    from onnx import helper

    types = {}
    for value in node.inputs:
        if value is not None and value.dtype is not None:
            shape = None if value.shape is None else [each if isinstance(each, int) else None for each in value.shape]
            types[str(value.name)] = helper.make_tensor_type_proto(int(value.dtype), shape)
    return types


def _in_opset(node: onnx.NodeProto, opset: int, types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto]:
    """The node itself, or those that it is defined by if the opset lacks its operator.

    Args:
        types: of its inputs.

    Raises:
        ModelError: ONNX does not define it by operators of the opset.
    """
    if node.op_type == "Mul" and len(node.input) > 2:
        return _in_pairs(node)
    if node.domain not in ("", "ai.onnx") or _has(node.op_type, opset):
        return [node]
    import onnx
    from onnx import helper, inliner

    version = next((each for each in range(opset, onnx.defs.onnx_opset_version() + 1) if _has(node.op_type, each)), None)
    if version is None:
        return [node]  # an operator of nobody, which ONNX Runtime will name
    given = {each.name for each in node.attribute}
    defaults = (each.default_value for each in onnx.defs.get_schema(node.op_type, version, "").attributes.values())
    node.attribute.extend(each for each in defaults if each.name and each.name not in given)  # the inliner wants them all
    inputs = [onnx.ValueInfoProto(name=name, type=types.get(name)) for name in dict.fromkeys(node.input) if name]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    found = inliner.inline_selected_functions(model, [("", node.op_type)], inline_schema_functions=True)
    for each in found.graph.node:
        if each.op_type == "CastLike" and each.input[1] in types:  # which definitions use for constants, and opset 15 has
            to = types[each.input[1]].tensor_type.elem_type
            each.CopyFrom(helper.make_node("Cast", each.input[:1], each.output, to=to))
        elif each.op_type == "Constant" and each.attribute[0].name == "value_float":  # which opset 12 has
            tensor = helper.make_tensor("value", onnx.TensorProto.FLOAT, [], [each.attribute[0].f])
            each.CopyFrom(helper.make_node("Constant", [], each.output, value=tensor))
    made = list(found.graph.node)
    if later := [each.op_type for each in made if not _has(each.op_type, opset)]:
        raise ModelError(
            f"node {node.name or node.op_type} ({node.op_type}) is of opset {version} and needs {later[0]}, which opset "
            f"{opset} lacks; ONNX Runtime cannot compute it in this model. Export the model for opset {version}"
        )
    outer = {*node.input, *node.output}
    for number, each in enumerate(made):
        each.name = f"{node.name}/{number}" if node.name else ""
        for names in (each.input, each.output):
            for place, name in enumerate(names):
                if name and name not in outer:
                    names[place] = f"{node.output[0]}/{name}"
    return made


def _in_pairs(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """A product of several arrays as products of two."""
    from onnx import helper

    (y,) = node.output
    results = [*(f"{y}/{number}" for number in range(len(node.input) - 2)), y]
    lefts = [node.input[0], *results]
    return [helper.make_node("Mul", pair[:2], pair[2:], name=node.name) for pair in zip(lefts, node.input[1:], results)]


def _has(op: str, opset: int) -> bool:
    import onnx

    try:
        onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True
