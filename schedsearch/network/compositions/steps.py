"""Compositions of which most inputs are numbers: constants are given as they are, and shapes are those of the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from schedsearch.network.compositions.composition import Composition
from schedsearch.network.new_nodes import constant
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Given = Union["ir.Value", Array, float, None]  # an input of a new node; numbers become constants


class Steps:
    """The nodes that replace a node, one behind another; the last one makes its first result.

    >>> steps = Steps(model, node)
    >>> squares = steps.add("Mul", [x, x], shape)
    >>> steps.add("Sqrt", [squares], shape)
    >>> steps.replace()

    Attributes:
        last: the result of the last one; None if there is none yet.
    """

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.node = model, node
        self.last: ir.Value | None = None
        self._made = Composition(model, node)

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """Those that were added, in order."""
        return self._made.nodes

    def add(
        self,
        op: str,
        inputs: Sequence[Given],
        shape: Sequence[int],
        dtype: ir.DataType | None = None,
        *,
        like: ir.Value | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Appends a node and returns its result.

        Args:
            inputs: values, None for one that is missing, or numbers: an array as it is, a number in the dtype of `like`.
            shape: of the result.
            dtype: of the result; default: that of `like`.
            like: default: the first result of the node that is replaced.
            attributes: integers, lists of integers, floats and strings by name.
        """
        like = like or self.node.outputs[0]
        given = [self._input(each, like) for each in inputs]
        return self._put(self._made.add(op, given, shape, dtype or like.dtype, **attributes))

    def constant(self, array: Any, like: ir.Value | None = None) -> ir.Value:
        """As of `Composition`."""
        return self._made.constant(array, like)

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self._put(self._made.reshape(x, shape))

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        return self._put(self._made.transpose(x, order))

    def slice(self, x: ir.Value, axis: int, start: int, stop: int, step: int = 1) -> ir.Value:
        return self._put(self._made.slice(x, axis, start, stop, step))

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        return self._put(self._made.concat(values, axis))

    def cast(self, x: ir.Value, to: ir.DataType | None) -> ir.Value:
        """x in another dtype; itself if it has it, or if it is not known."""
        return x if to is None else self._put(self._made.cast(x, to))

    def in_float32(self, x: ir.Value) -> ir.Value:
        import onnx_ir as ir

        return self.cast(x, ir.DataType.FLOAT)

    def shaped(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        """x under another shape: a constant if it is one, else a view."""
        if extents(x) == list(shape) or x.const_value is None:
            return self.reshape(x, shape)
        return constant(self.model, f"{x.name}.shaped", x.const_value.numpy().reshape(shape))

    def replace(self, others: Mapping[ir.Value, ir.Value] | None = None) -> None:
        """Puts the nodes in the place of the old one.

        Args:
            others: results of the old node, other than the first one -> values that the nodes make.
        """
        more = others or {}
        self._made.finish(self.last, *(more.get(value) for value in self.node.outputs[1:]))

    def _put(self, value: ir.Value) -> ir.Value:
        self.last = value
        return value

    def _input(self, given: Given, like: ir.Value) -> ir.Value | None:
        if isinstance(given, float | int):
            return self._made.constant(given, like)
        return self._made.constant(given) if isinstance(given, np.ndarray) else given


def extents(value: ir.Value | None) -> list[int] | None:
    """The shape of a value; None if it is missing or not known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return [int(extent) for extent in value.shape]
