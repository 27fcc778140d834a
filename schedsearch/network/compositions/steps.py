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


class Steps(Composition):
    """The nodes that replace a node, one behind another; the last one makes its first result.

    >>> steps = Steps(model, node)
    >>> squares = steps.step("Mul", [x, x], shape)
    >>> steps.step("Sqrt", [squares], shape)
    >>> steps.replace()
    """

    last: ir.Value | None = None

    def step(
        self, op: str, inputs: Sequence[Given], shape: Sequence[int], *, like: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Appends a node and returns its result.

        Args:
            inputs: values, None for one that is missing, or numbers: an array as it is, a number in the dtype of `like`.
            shape: of the result.
            like: has the dtype of the result; default: the first result of the node that is replaced.
        """
        like = like or self.node.outputs[0]
        given = [self._input(each, like) for each in inputs]
        self.last = self.add(op, given, shape, like.dtype, **attributes)
        return self.last

    def add(self, *args: Any, **options: Any) -> ir.Value:
        self.last = super().add(*args, **options)
        return self.last

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """The value in a dtype; itself if it has it, or if it is not known."""
        return value if dtype is None else super().cast(value, dtype)

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
        self.finish(self.last, *(more.get(value) for value in self.node.outputs[1:]))

    def _input(self, given: Given, like: ir.Value) -> ir.Value | None:
        if isinstance(given, float | int):
            return self.constant(given, like)
        return self.constant(given) if isinstance(given, np.ndarray) else given


def extents(value: ir.Value | None) -> list[int] | None:
    """The shape of a value; None if it is missing or not known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return [int(extent) for extent in value.shape]
