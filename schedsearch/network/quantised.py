"""Integers that stand for numbers, as ONNX's quantised operators describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.network.facts import INTEGERS, constant_input, dtype_of, is_given, number_of
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Quantised:
    """Integers q that stand for (q - zero_point) * scale.

    Attributes:
        value: the integers.
        scale: one float32 number, or one for each channel; None if it is computed.
        zero_point: None if it is computed, or not the same for all channels.
    """

    value: ir.Value
    scale: Array | None
    zero_point: float | None

    @classmethod
    def of(cls, node: ir.Node, value: ir.Value, scale: int | None, zero_point: int) -> Quantised:
        """Integers that a node reads or makes.

        Args:
            scale, zero_point: the places of these inputs of the node.
        """
        found = None if scale is None else constant_input(node, scale)
        zero = number_of(constant_input(node, zero_point)) if is_given(node, zero_point) else 0.0
        return cls(value, None if found is None else found.astype("float32").ravel(), zero)

    @property
    def dtype(self) -> str:
        return dtype_of(self.value)


def converted_from(value: ir.Value) -> Quantised | None:
    """The integers that a value is made of by DequantizeLinear; None if it is not."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return None
    return Quantised.of(node, node.inputs[0], 1, 2)


def same_scale(values: Sequence[ir.Value], reader: ir.Node | None) -> list[Quantised] | None:
    """The integers that values are made of, if the only reader of a result of theirs makes integers with the same
    scale and zero point; otherwise None. A node in between that selects elements may then select integers."""
    y = None if reader is None else converted_to(reader)
    found = [converted_from(value) for value in values]
    if y is None or y.scale is None:
        return None
    known = [each for each in found if each is not None and each.scale is not None]
    alike = [
        each
        for each in known
        if (each.dtype, each.zero_point) == (y.dtype, y.zero_point)
        and each.scale is not None
        and each.scale.tolist() == y.scale.tolist()
    ]
    return alike if len(alike) == len(values) and y.scale.size == 1 else None


def converted_to(node: ir.Node) -> Quantised | None:
    """The 8-bit numbers that a QuantizeLinear makes, with known scale and zero point; None for other nodes."""
    if node.op_type != "QuantizeLinear" or dtype_of(node.outputs[0]) not in INTEGERS:
        return None
    found = Quantised.of(node, node.outputs[0], 1, 2)
    return found if found.scale is not None and found.zero_point is not None else None
