"""Squeeze-excite: a pool of whole images, two products, and the product of the image with the result, in one kernel.

    x -> GlobalAveragePool -> Conv 1x1 -> Relu, Swish or HardSwish -> Conv 1x1 -> Sigmoid or HardSigmoid -> Mul with x

Apart these are four kernels, of which each takes as long as a launch, because a product of one row has hardly any work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from schedsearch.network.chain import Chain, Read
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, extents_of, is_given, is_onnx, only_reader
from schedsearch.network.graph import Constant
from schedsearch.network.reductions import reduction_of
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_ACTIVATIONS = {"Relu": "relu", "Swish": "silu", "HardSwish": "hard_swish"}
_LEFT = ""  # why a pool begins no such chain; others take it
MOST_BYTES = 4 << 20
"""Of an image. A cluster of eight multiprocessors computes it, and all of the card where there are many images."""


class _Product(NamedTuple):
    """A convolution with one tap.

    Attributes:
        weight: (outputs, inputs).
        bias: float32, one for each output.
    """

    node: ir.Node
    weight: Array
    bias: Array


def _squeeze(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x = node.inputs[0]
    if x is None or dtype_of(x) not in FLOATS or not _is_pool_of_images(node):
        return _LEFT
    n, c, h, w = extents_of(node, x)
    if c * h * w * (4 if dtype_of(x) == "float32" else 2) > MOST_BYTES:
        return _LEFT
    reduce = _product(_next(node.outputs[0]), c)
    activated = None if reduce is None else _next(reduce.node.outputs[0])
    if reduce is None or activated is None or activated.op_type not in _ACTIVATIONS:
        return _LEFT
    if activated.attributes.get_float("alpha", 1.0) != 1.0:  # of Swish
        return _LEFT
    expand = _product(_next(activated.outputs[0]), len(reduce.weight))
    gate = None if expand is None else _next(expand.node.outputs[0])
    if expand is None or len(expand.weight) != c or gate is None or gate.op_type not in ("Sigmoid", "HardSigmoid"):
        return _LEFT
    scaled = _next(gate.outputs[0])
    if scaled is None or scaled.op_type != "Mul" or {*scaled.inputs} != {x, gate.outputs[0]}:
        return _LEFT
    nodes = [node, reduce.node, activated, expand.node, gate, scaled]
    if taken.intersection(nodes):
        return _LEFT
    params = {"n": n, "c": c, "h": h, "w": w, "squeezed": len(reduce.weight), "dtype": dtype_of(x)}
    params |= {"activation": _ACTIVATIONS[activated.op_type], "gate": "sigmoid"}
    if gate.op_type == "HardSigmoid":
        read = gate.attributes
        numbers = {"alpha": read.get_float("alpha", 0.2), "beta": read.get_float("beta", 0.5)}
        if not all(abs(number) <= 1e6 for number in numbers.values()):
            return _LEFT
        if math.isclose(numbers["alpha"], 1 / 6, rel_tol=1e-6):  # as float32
            del numbers["alpha"]
        params |= {"gate": "hard_sigmoid", **numbers}
    arguments = {
        "x": x,
        "reduce": _constant(reduce.node, 1, "KC", reduce.weight),
        "reduce_bias": _constant(reduce.node, 2, "K", reduce.bias),
        "expand": _constant(expand.node, 1, "KC", expand.weight),
        "expand_bias": _constant(expand.node, 2, "K", expand.bias),
    }
    return Chain("squeeze_excite", params, nodes, scaled.outputs[0], arguments, channels=c)


def _is_pool_of_images(node: ir.Node) -> bool:
    """Whether a node is the mean over height and width, which stay as axes."""
    if node.op_type == "GlobalAveragePool":
        return node.inputs[0] is not None and node.inputs[0].shape is not None and len(node.inputs[0].shape) == 4
    found = reduction_of(node)
    keeps = node.attributes.get_int("keepdims", 1)
    return not isinstance(found, str) and len(found.shape) == 4 and found.axes == [2, 3] and bool(keeps)


def _next(value: ir.Value) -> ir.Node | None:
    """The node that alone reads a value."""
    reader = only_reader(value)
    return reader if reader is not None and is_onnx(reader) else None


def _product(node: ir.Node | None, inputs: int) -> _Product | None:
    """A node as a product with a constant matrix, if it is one."""
    if node is None or node.op_type != "Conv" or node.attributes.get_int("group", 1) != 1:
        return None
    weight, bias = constant_input(node, 1), constant_input(node, 2)
    pads: Sequence[int] = node.attributes.get_ints("pads", ())
    if weight is None or weight.shape[1:] != (inputs, 1, 1) or any(pads) or (bias is None and is_given(node, 2)):
        return None
    row = np.zeros(len(weight), np.float32) if bias is None else bias.astype(np.float32)
    return _Product(node, weight.reshape(len(weight), inputs), row)


def _constant(node: ir.Node, place: int, axes: str, array: Array) -> Constant:
    value = node.inputs[place] if is_given(node, place) else None
    name = str(value.name) if value is not None else f"{node.outputs[0].name}.bias"
    return Constant(name, axes, array)


SQUEEZES: Mapping[str, Read] = dict.fromkeys(("GlobalAveragePool", "ReduceMean"), _squeeze)
