"""Nodes of constants, computed by ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.facts import dtype_of, folded
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def computed(node: ir.Node, opsets: Mapping[str, int]) -> list[Array] | None:
    """The results of a node of constants that have a name, by ONNX's reference evaluator; None if it cannot compute it."""
    import onnx
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    blocks = node.attributes.get_int("block_size", 0)
    if node.op_type == "DequantizeLinear" and not blocks and dtype_of(node.outputs[0]) == "float32":  # it wants an axis 1
        found = folded(node.outputs[0])
        return None if found is None else [found]
    arrays = {str(value.name): value.const_value.numpy() for value in node.inputs if value is not None and value.const_value}
    proto = ir.to_proto(node)
    info = onnx.helper.make_empty_tensor_value_info
    names = [name for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "constant", [info(name) for name in arrays], [info(name) for name in names])
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        results: list[Any] = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports)).run(None, arrays)
    except Exception:  # the evaluator lacks operators, and fails in many ways for nodes against their rules
        return None
    if not all(isinstance(each, np.ndarray | np.generic) for each in results):
        return None
    return [np.asarray(each) for each in results]
