"""New nodes of an ONNX graph, and the constants and results that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def constant(model: ir.Model, name: str, array: Array) -> ir.Value:
    """A new constant, with a name that is free."""
    import onnx_ir as ir

    number = 1
    while (unique := name if number == 1 else f"{name}.{number}") in model.graph.initializers:
        number += 1
    tensor = ir.tensor(array, name=unique)
    value = ir.Value(name=unique, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def result(like: ir.Value, suffix: str, shape: list[int] | None) -> ir.Value:
    """A value of the same type; None: of the same shape."""
    import onnx_ir as ir

    return ir.Value(name=f"{like.name}.{suffix}", type=like.type, shape=like.shape if shape is None else ir.Shape(shape))


def replace(model: ir.Model, old: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Puts nodes in the place of one, whose result the last one makes under the old name."""
    import onnx_ir as ir

    before, after = old.outputs[0], nodes[-1].outputs[0]
    name = before.name
    model.graph.insert_before(old, nodes)
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)
    after.name = name
