"""Gates that a model has written out: x * Clip(x + 3, 0, 6) / 6 is HardSwish, and Clip(x + 3, 0, 6) / 6 is HardSigmoid.

Convolutions apply these functions to their results before they store them. Rounding differs by a unit in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.compositions.composition import Rewrite
from schedsearch.network.facts import FLOATS, dtype_of
from schedsearch.network.new_nodes import replace, result

if TYPE_CHECKING:
    import onnx_ir as ir

_OFFSET, _LEAST, _MOST = 3.0, 0.0, 6.0


def _quotient(model: ir.Model, node: ir.Node) -> None:
    """A Div by 6."""
    import onnx_ir as ir

    dividend, divisor = node.inputs
    if _number(divisor) != _MOST or dividend is None or dtype_of(dividend) not in FLOATS:
        return
    if (x := _clipped(dividend)) is not None:
        op, attributes = "HardSigmoid", [ir.AttrFloat32("alpha", 1 / _MOST), ir.AttrFloat32("beta", _OFFSET / _MOST)]
    elif (x := _gated(dividend)) is not None:
        op, attributes = "HardSwish", []
    else:
        return
    if x.shape != node.outputs[0].shape:
        return
    value = result(node.outputs[0], "activated", None)
    replace(model, node, [ir.Node("", op, [x], attributes, outputs=[value], name=node.name)])


def _gated(product: ir.Value) -> ir.Value | None:
    """x of x * Clip(x + 3, 0, 6), if nothing else reads the product."""
    maker = _only_for_its_reader(product, "Mul")
    if maker is None:
        return None
    first, second = maker.inputs
    for x, gate in ((first, second), (second, first)):
        if x is not None and gate is not None and _clipped(gate) is x:
            return x
    return None


def _clipped(value: ir.Value) -> ir.Value | None:
    """x of Clip(x + 3, 0, 6), if nothing else reads it."""
    maker = _only_for_its_reader(value, "Clip")
    if maker is None:
        return None
    limits = [_number(each) for each in maker.inputs[1:]]
    if not limits:
        limits = [maker.attributes.get_float(name, None) for name in ("min", "max")]
    sum_ = maker.inputs[0]
    adder = None if sum_ is None else _only_for_its_reader(sum_, "Add")
    if limits != [_LEAST, _MOST] or adder is None:
        return None
    first, second = adder.inputs
    for x, offset in ((first, second), (second, first)):
        if x is not None and _number(x) is None and _number(offset) == _OFFSET:
            return x
    return None


def _only_for_its_reader(value: ir.Value, op: str) -> ir.Node | None:
    """The node that makes a value, if it is of this operator and one place reads the value."""
    maker = value.producer()
    if maker is None or maker.op_type != op or value.is_graph_output() or len(list(value.uses())) != 1:
        return None
    return maker


def _number(value: ir.Value | None) -> float | None:
    """The number that a constant of one element is, if it does not widen what it is applied to."""
    if value is None or value.const_value is None or value.const_value.size != 1 or len(value.const_value.shape) > 1:
        return None
    return float(value.const_value.numpy().reshape(()))


REWRITTEN: Mapping[str, Rewrite] = {"Div": _quotient}
