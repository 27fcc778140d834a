"""ONNX Runtime's operators of quantised numbers (domain com.microsoft) as ONNX's own.

Each is defined as DequantizeLinear of its inputs, an operator of ONNX in floating point, and QuantizeLinear of the result,
and is replaced by these nodes before anything else looks at the graph. Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.network.new_nodes import constant, replace

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class _Contributed:
    """An operator of this domain.

    Attributes:
        op: what it computes in floating point.
        inputs: how many arrays it has; each is followed by its scale and its zero point. Those of the result come last.
        attributes: those that it shares with `op`.
    """

    op: str
    inputs: int
    attributes: tuple[str, ...] = ()


_WINDOW = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides", "dilations")
_OPERATORS = {
    "QLinearAdd": _Contributed("Add", 2),
    "QLinearMul": _Contributed("Mul", 2),
    "QLinearSigmoid": _Contributed("Sigmoid", 1),
    "QLinearLeakyRelu": _Contributed("LeakyRelu", 1, ("alpha",)),
    "QLinearAveragePool": _Contributed("AveragePool", 1, _WINDOW),
    "QLinearGlobalAveragePool": _Contributed("GlobalAveragePool", 1),
    "QLinearSoftmax": _Contributed("Softmax", 1, ("axis",)),
}
_RENAMED = ("QuantizeLinear", "DequantizeLinear")  # of 8 bits they are as ONNX's
TAKEN = frozenset({*_OPERATORS, *_RENAMED, "QLinearConcat"})  # operators of the domain that become ONNX's


def rewrite_contributed(model: ir.Model) -> None:
    """Replaces nodes of the domain in a graph that need not be simplified. Nodes with images in NHWC stay, so that they are
    reported like other nodes without an operator."""
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type not in TAKEN or node.attributes.get_int("channels_last", 0):
            continue
        if node.op_type in _RENAMED:
            node.domain = ""
        elif node.op_type == "QLinearConcat":
            arrays = [node.inputs[place : place + 3] for place in range(2, len(node.inputs), 3)]
            _between(model, node, _Contributed("Concat", len(arrays), ("axis",)), arrays, node.inputs[:2])
        else:
            kind = _OPERATORS[node.op_type]
            arrays = [node.inputs[3 * place : 3 * place + 3] for place in range(kind.inputs)]
            _between(model, node, kind, arrays, node.inputs[3 * kind.inputs : 3 * kind.inputs + 2])


_Inputs = Sequence["ir.Value | None"]


def _between(model: ir.Model, node: ir.Node, kind: _Contributed, arrays: Sequence[_Inputs], of_y: _Inputs) -> None:
    """Puts the operator between conversions in the place of a node."""
    import onnx_ir as ir

    y, floats, nodes = node.outputs[0], ir.TensorType(ir.DataType.FLOAT), []
    for number, (whole, *linear) in enumerate(arrays):
        assert whole is not None
        value = ir.Value(name=f"{y.name}.dequantised{number}", type=floats, shape=whole.shape)
        inputs = [whole, *_numbers(model, linear)]
        nodes.append(ir.Node("", "DequantizeLinear", inputs, outputs=[value], name=node.name))
    attributes = [node.attributes[name] for name in kind.attributes if name in node.attributes]
    value = ir.Value(name=f"{y.name}.computed", type=floats)
    nodes.append(ir.Node("", kind.op, [each.outputs[0] for each in nodes], attributes, outputs=[value], name=node.name))
    inputs = [value, *_numbers(model, of_y)]
    codes = ir.Value(name=f"{y.name}.codes", type=y.type, shape=y.shape)
    nodes.append(ir.Node("", "QuantizeLinear", inputs, outputs=[codes], name=node.name))
    replace(model, node, nodes)


def _numbers(model: ir.Model, linear: _Inputs) -> list[ir.Value | None]:
    """A scale and a zero point. They may be given as arrays with one element, which ONNX's operators take as one for each
    channel."""
    found = []
    for value in linear:
        array = None if value is None or value.const_value is None else value.const_value.numpy()
        if value is not None and array is not None and array.ndim and array.size == 1:
            value = constant(model, f"{value.name}.number", array.reshape(()))
        found.append(value)
    return found
