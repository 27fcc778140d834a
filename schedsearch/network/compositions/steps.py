"""Nodes one behind another that take the place of one, while they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Given = Union["ir.Value", Array, float, None]  # an input of a new node; numbers become constants


class Steps:
    """The nodes that replace `node`.

    >>> steps = Steps(model, node)
    >>> squares = steps.add("Mul", [x, x], shape)
    >>> steps.add("Sqrt", [squares], shape)
    >>> steps.replace()

    Attributes:
        nodes: in order; the last one makes the result.
    """

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.node = model, node
        self.nodes: list[ir.Node] = []

    def add(
        self, op: str, inputs: Sequence[Given], shape: Sequence[int], *, like: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Appends a node and returns its result.

        Args:
            inputs: values, None for one that is missing, or numbers: an array as it is, a number in the dtype of `like`.
            shape: of the result.
            like: has the dtype of the result; default: the first result of the node that is replaced.
            attributes: integers, lists of integers, floats and strings by name.
        """
        import onnx_ir as ir

        like = like or self.node.outputs[0]
        value = result(self.node.outputs[0], f"step{len(self.nodes)}", list(shape))
        value.type = like.type
        given = [self._input(each, like) for each in inputs]
        made = [ir.convenience.convert_attribute(name, each) for name, each in attributes.items()]
        self.nodes.append(ir.Node("", op, given, made, outputs=[value], name=self.node.name))
        return value

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self.add("Reshape", [x, np.array(shape, np.int64)], shape, like=x)

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        shape = extents(x)
        assert shape is not None
        return self.add("Transpose", [x], [shape[axis] for axis in order], like=x, perm=list(order))

    def cast(self, x: ir.Value, to: ir.DataType | None) -> ir.Value:
        """x in another dtype; itself if it has it, or if it is not known."""
        import onnx_ir as ir

        if to is None or x.dtype == to:
            return x
        shape = extents(x)
        assert shape is not None
        made = self.add("Cast", [x], shape, to=int(to))
        made.type = ir.TensorType(to)
        return made

    def in_float32(self, x: ir.Value) -> ir.Value:
        import onnx_ir as ir

        return self.cast(x, ir.DataType.FLOAT)

    def shaped(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        """x under another shape: a constant if it is one, else a view."""
        if extents(x) == list(shape):
            return x
        if x.const_value is None:
            return self.reshape(x, shape)
        return constant(self.model, f"{x.name}.shaped", x.const_value.numpy().reshape(shape))

    def replace(self, others: Mapping[ir.Value, ir.Value] | None = None) -> None:
        """Puts the nodes in the place of the old one.

        Args:
            others: results of the old node, other than the first one -> values that the nodes make.
        """
        import onnx_ir as ir

        for old, new in (others or {}).items():
            name = old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = f"{name}.old", name
        replace(self.model, self.node, self.nodes)

    def _input(self, given: Given, like: ir.Value) -> ir.Value | None:
        if isinstance(given, float | int):
            assert like.dtype is not None
            given = np.array(given).astype(like.dtype.numpy())
        if isinstance(given, np.ndarray):
            return constant(self.model, f"{self.node.outputs[0].name}.numbers{len(self.nodes)}", given)
        return given


def extents(value: ir.Value | None) -> list[int] | None:
    """The shape of a value; None if it is missing or not known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return [int(extent) for extent in value.shape]
