"""Nodes of a later opset than a model declares, as the nodes of its opset that ONNX defines them by.

Rewriting makes such nodes: x * Sigmoid(x) becomes Swish, which opset 24 has. Kernels compute them whatever the model
declares; ONNX Runtime does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx


def in_opset(node: onnx.NodeProto, opset: int, types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto]:
    """The node itself, or those that it is defined by if the opset lacks its operator.

    Args:
        types: of its inputs.

    Raises:
        ModelError: ONNX does not define it by operators of the opset.
    """
    if node.domain not in ("", "ai.onnx") or _has(node.op_type, opset):
        return [node]
    import onnx
    from onnx import helper, inliner

    version = next((each for each in range(opset, onnx.defs.onnx_opset_version() + 1) if _has(node.op_type, each)), None)
    if version is None:
        return [node]  # an operator of nobody, which ONNX Runtime will name
    inputs = [onnx.ValueInfoProto(name=name, type=types[name]) for name in dict.fromkeys(node.input) if name]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    functions = [("", node.op_type), *([] if _has("CastLike", opset) else [("", "CastLike")])]
    found = inliner.inline_selected_functions(model, functions, inline_schema_functions=True)
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


def _has(op: str, opset: int) -> bool:
    import onnx

    try:
        onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True
