"""ONNX Runtime's operators of quantised numbers (domain com.microsoft) as ONNX's own.

Each is defined as DequantizeLinear of its inputs, an operator of ONNX in floating point, and QuantizeLinear of the result,
and is replaced by these nodes before anything else looks at the graph. A DynamicQuantizeLSTM becomes an LSTM of dequantised
weights: ONNX Runtime makes 8-bit numbers of x and of the states for speed, which no kernel here gains anything from.
Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_ONE_AXIS = 13  # the opset from which a Softmax is over one axis; before, it is over all from there on
_WEIGHT_AXES = 3  # of an LSTM's weights
_LSTM_INPUTS = 8
_RENAMED = ("QuantizeLinear", "DequantizeLinear")  # of 8 bits they are as ONNX's
_FUSED = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
_ACTIVATIONS = {  # in a fused node -> names of their parameters, in order
    "Relu": (), "Sigmoid": (), "Tanh": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max"),
}  # fmt: skip
TAKEN = frozenset(
    {*_OPERATORS, *_RENAMED, *_FUSED, "QLinearConcat", "DynamicQuantizeLSTM"}
)  # operators of the domain that become ONNX's


def rewrite_contributed(model: ir.Model) -> None:
    """Replaces nodes of the domain in a graph that need not be simplified. Nodes with images in NHWC stay, so that they are
    reported like other nodes without an operator."""
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type not in TAKEN or node.attributes.get_int("channels_last", 0):
            continue
        if node.op_type == "QLinearSoftmax" and node.attributes.get_int("axis", -1) != -1:  # the last one is the same in all
            is_one = node.attributes.get_int("opset", _ONE_AXIS) >= _ONE_AXIS
            if is_one and model.opset_imports.get("", _ONE_AXIS) < _ONE_AXIS:
                continue  # as no Softmax of this model's opset
            node = node if is_one else _of_rows(model, node)
        if node.op_type in _RENAMED:
            node.domain = ""
        elif node.op_type == "DynamicQuantizeLSTM":
            _dequantised_lstm(model, node)
        elif node.op_type in _FUSED:
            _separate(model, node)
        elif node.op_type == "QLinearConcat":
            arrays = [node.inputs[place : place + 3] for place in range(2, len(node.inputs), 3)]
            _between(model, node, _Contributed("Concat", len(arrays), ("axis",)), arrays, node.inputs[:2])
        else:
            kind = _OPERATORS[node.op_type]
            arrays = [node.inputs[3 * place : 3 * place + 3] for place in range(kind.inputs)]
            _between(model, node, kind, arrays, node.inputs[3 * kind.inputs : 3 * kind.inputs + 2])


def _of_rows(model: ir.Model, node: ir.Node) -> ir.Node:
    """Puts a QLinearSoftmax of rows in the place of one over all axes from one on, and returns it."""
    import onnx_ir as ir

    (x, *linear), y = node.inputs, node.outputs[0]
    assert x is not None
    flat, rows = (ir.Value(name=f"{y.name}.{word}", type=x.type) for word in ("flat", "rows"))
    shape, made = ir.Value(name=f"{y.name}.shape"), ir.Value(name=f"{y.name}.shaped", type=y.type, shape=y.shape)
    axis = ir.AttrInt64("axis", node.attributes.get_int("axis", -1))
    softmax = ir.Node(DOMAIN, "QLinearSoftmax", [flat, *linear], [ir.AttrInt64("axis", 1)], outputs=[rows], name=node.name)
    before = [ir.Node("", "Flatten", [x], [axis], outputs=[flat], name=node.name)]
    before.append(ir.Node("", "Shape", [x], outputs=[shape], name=node.name))
    behind = ir.Node("", "Reshape", [rows, shape], outputs=[made], name=node.name)
    replace(model, node, [*before, softmax, behind])
    return softmax


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


def _separate(model: ir.Model, node: ir.Node) -> None:
    """Makes a fused node the product, the addition of another array, and the activation that it consists of. A node with an
    unknown activation stays."""
    import onnx_ir as ir

    read, y, nodes = node.attributes, node.outputs[0], list[ir.Node]()
    activation = read.get_string("activation", "")
    if activation and activation not in _ACTIVATIONS:
        return
    others = [each for name, each in read.items() if not name.startswith("activation")]
    z = node.inputs[3] if node.op_type == "FusedConv" and len(node.inputs) > 3 else None

    def add(op: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr] = ()) -> None:
        value = ir.Value(name=f"{y.name}.part{len(nodes)}", type=node.inputs[0].type)
        nodes.append(ir.Node("", op, inputs, attributes, outputs=[value], name=node.name))

    add(_FUSED[node.op_type], node.inputs[:3], others)
    if z is not None:
        add("Add", [nodes[-1].outputs[0], z])
    if activation:
        _activate(model, node, add, nodes[-1].outputs[0], activation)
    nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = y.type, y.shape
    replace(model, node, nodes)


def _activate(model: ir.Model, node: ir.Node, add: Callable[..., None], x: ir.Value, activation: str) -> None:
    import numpy as np
    import onnx_ir as ir

    read, names = node.attributes, _ACTIVATIONS[activation]
    given = dict(zip(names, read.get_floats("activation_params", ())))
    given |= {name: read[f"activation_{name}"].as_float() for name in names if f"activation_{name}" in read}
    if activation == "Clip":
        limits = {name: constant(model, f"{x.name}.{name}", np.asarray(given[name], np.float32)) for name in given}
        add("Clip", [x, *(limits.get(name) for name in names)])
    else:
        add(activation, [x], [ir.AttrFloat32(name, number) for name, number in given.items()])


def _dequantised_lstm(model: ir.Model, node: ir.Node) -> None:
    """Makes a DynamicQuantizeLSTM an LSTM. Its W and R are (directions, inputs, gates), with a scale and a zero point for
    each direction, or for each gate of these. A node whose weights are computed stays."""
    weights = []
    for place, scale, zero_point in ((1, 8, 9), (2, 10, 11)):
        values = [node.inputs[each] if each < len(node.inputs) else None for each in (place, scale, zero_point)]
        if any(value is None or value.const_value is None for value in values):
            return
        whole, factors, zeros = (value.const_value.numpy() for value in values)  # type: ignore[union-attr]
        if whole.ndim != _WEIGHT_AXES or any(
            each.size not in (len(whole), len(whole) * whole.shape[2]) for each in (factors, zeros)
        ):
            return
        factors, zeros = (each.astype("float32").reshape(len(whole), 1, -1) for each in (factors, zeros))
        weights.append((place, (whole.astype("float32") - zeros) * factors))
    for place, array in weights:
        value = node.inputs[place]
        assert value is not None
        rows_first = array.transpose(0, 2, 1).copy()
        node.replace_input_with(place, constant(model, f"{value.name}.dequantised", rows_first))
    node.resize_inputs(_LSTM_INPUTS)
    node.domain, node.op_type = "", "LSTM"


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
