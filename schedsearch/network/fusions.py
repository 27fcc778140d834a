"""Nodes that become part of their neighbours.

- Relu, Clip, and Max and Min with a number: several are one Clip.
- A Pad with zeros is part of the convolution behind it. A Slice that cuts off what padding added at the end of a convolution
  is part of that.
- A BatchNormalization is part of the weights of the convolution or matrix product before it.
- Additions of 0, products with 1 and conversions to and fro are left out.

Each rule returns whether it changed the graph. Values must have their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.pads import fill_of
from schedsearch.network.epilogue import unbounded
from schedsearch.network.facts import (
    FLOATS,
    constant_input,
    constant_of,
    dtype_of,
    is_given,
    is_onnx,
    number_of,
    only_reader,
    optional_input,
)
from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.network.windows import Window
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_CLIP_BY_INPUTS = 11  # the first opset in which the bounds of a Clip are inputs, and the pads of a Pad
_WITHOUT_SPATIAL = 9  # the first opset whose BatchNormalization has no mode with a mean for each pixel
_Bounds = tuple[float, float]


def fuse(model: ir.Model) -> bool:
    """Applies every rule once to every node, in order."""
    changed = False
    for node in list(model.graph):
        if node.graph is not None and is_onnx(node) and (rule := _RULES.get(node.op_type)) is not None:
            changed = rule(model, node) or changed
    return changed


def _replace(
    model: ir.Model, node: ir.Node, node_type: str, inputs: Sequence[ir.Value | None], attributes: Any = ()
) -> None:
    import onnx_ir as ir

    value = result(node.outputs[0], "fused", None)
    replace(model, node, [ir.Node("", node_type, inputs, list(attributes), outputs=[value], name=node.name)])


# --- Bounds -------------------------------------------------------------------------------------------------------------
def _bounded(model: ir.Model, node: ir.Node) -> bool:
    """Bounds of bounds are bounds: those of the first, bounded by the second."""
    found = _bounds(node)
    if found is None:
        return False
    x, (low, high) = found
    before = x.producer()
    first = None if before is None or only_reader(x) is None else _bounds(before)
    if first is None and node.op_type in ("Relu", "Clip"):
        return False
    if first is not None:
        x, (lowest, highest) = first
        low, high = (min(max(bound, low), high) for bound in (min(lowest, highest), highest))
    _write(model, node, x, (low, high))
    return True


def _write(model: ir.Model, node: ir.Node, x: ir.Value, bounds: _Bounds) -> None:
    import onnx_ir as ir

    if bounds == (-math.inf, math.inf):
        return _replace(model, node, "Identity", [x])
    if bounds == (0.0, math.inf):
        return _replace(model, node, "Relu", [x])
    given = dict(zip(("min", "max"), bounds))
    if model.opset_imports.get("", _CLIP_BY_INPUTS) < _CLIP_BY_INPUTS:
        return _replace(model, node, "Clip", [x], [ir.AttrFloat32(name, bound) for name, bound in given.items()])
    assert x.dtype is not None
    given = {name: bound for name, bound in given.items() if not math.isinf(bound) or _is_met(name, bound)}
    inputs = [
        constant(model, f"{node.outputs[0].name}.{name}", np.array(given[name]).astype(x.dtype.numpy()))
        if name in given
        else None
        for name in ("min", "max")
    ]
    return _replace(model, node, "Clip", [x, *inputs])


def _is_met(name: str, bound: float) -> bool:
    """Whether an infinite bound changes numbers."""
    return bound == (math.inf if name == "min" else -math.inf)


def _bounds(node: ir.Node) -> tuple[ir.Value, _Bounds] | None:
    """What a node bounds, from where to where; None if it does something else, or its bounds are computed or NaN."""
    x = optional_input(node, 0)
    if x is None or not is_onnx(node) or dtype_of(x) not in FLOATS:
        return None
    if node.op_type == "Relu":
        return x, (0.0, math.inf)
    if node.op_type == "Clip":
        most = unbounded(node)
        low, high = (_bound(node, place, name, most) for place, name in ((1, "min"), (2, "max")))
        return None if math.isnan(low) or math.isnan(high) else (x, (low, high))
    if node.op_type not in ("Max", "Min") or len(node.inputs) != 2:
        return None
    other = node.inputs[1]
    if other is not None and constant_of(x) is not None:
        x, other = other, x
    bound = constant_of(other)
    if bound is None or bound.size != 1 or constant_of(x) is not None or not _keeps_shape(x, bound, node):
        return None
    number = float(bound.flat[0])
    if math.isnan(number):
        return None
    return x, (number, math.inf) if node.op_type == "Max" else (-math.inf, number)


def _bound(node: ir.Node, place: int, name: str, most: float) -> float:
    """A bound of a Clip; NaN if it is computed."""
    if not is_given(node, place):
        given = node.attributes.get(name)
        return float(given.as_float()) if given is not None else -most if name == "min" else most
    found = constant_input(node, place)
    return math.nan if found is None or found.size != 1 else float(found.flat[0])


def _keeps_shape(x: ir.Value, other: Array, node: ir.Node) -> bool:
    """Whether a binary node with a constant of one element has a result of the shape of x."""
    y = node.outputs[0]
    return (
        not other.ndim
        or (x.shape is not None and other.ndim <= len(x.shape))
        or (x.shape is not None and x.shape == y.shape)
    )


# --- What changes nothing -----------------------------------------------------------------------------------------------
def _neutral(model: ir.Model, node: ir.Node) -> bool:
    """x + 0, x - 0, x * 1 and x / 1."""
    x, other = node.inputs[:2]
    number = 0.0 if node.op_type in ("Add", "Sub") else 1.0
    if node.op_type in ("Add", "Mul") and constant_of(x) is not None:
        x, other = other, x
    found = constant_of(other)
    if x is None or found is None or found.dtype.kind not in "fiu" or number_of(found) != number or found.size != 1:
        return False
    if constant_of(x) is not None or not _keeps_shape(x, found, node):
        return False
    _replace(model, node, "Identity", [x])
    return True


def _cast(model: ir.Model, node: ir.Node) -> bool:
    """A conversion of numbers that were made longer before, which loses nothing."""
    x = node.inputs[0]
    before = None if x is None else x.producer()
    source = None if before is None or before.op_type != "Cast" or not is_onnx(before) else before.inputs[0]
    if x is None or source is None or dtype_of(source) not in ("float16", "bfloat16") or dtype_of(x) != "float32":
        return False
    if node.attributes.get_int("to", 0) == source.dtype:
        _replace(model, node, "Identity", [source])
    else:
        _replace(model, node, "Cast", [source], node.attributes.values())
    return True


# --- Pads ---------------------------------------------------------------------------------------------------------------
def _padded(model: ir.Model, node: ir.Node) -> bool:
    """A convolution of an image that is padded with zeros, in integers with what stands for zero."""
    import onnx_ir as ir

    x = node.inputs[0]
    pad = None if x is None else x.producer()
    if pad is None or pad.op_type != "Pad" or not is_onnx(pad) or pad.inputs[0] is None or pad.inputs[0].shape is None:
        return False
    read, rank = node.attributes, len(pad.inputs[0].shape)
    more, value = _pads(pad, rank), fill_of(pad)
    window = Window.of(node, (1,) * (rank - 2))
    if more is None or value != _zero(node) or window.is_same:
        return False
    if any(more[axis] for axis in (0, 1, rank, rank + 1)) or min(more) < 0:
        return False
    more = [*more[2:rank], *more[rank + 2 :]]
    attributes = [each for name, each in read.items() if name not in ("pads", "auto_pad")]
    pads = ir.AttrInt64s("pads", [before + after for before, after in zip(window.fixed, more)])
    _replace(model, node, node.op_type, [pad.inputs[0], *node.inputs[1:]], [*attributes, pads])
    return True


def _pads(node: ir.Node, rank: int) -> list[int] | None:
    """Of every axis, first in front and then behind; None if they are computed, or the mode is another."""
    if node.attributes.get_string("mode", "constant") != "constant":
        return None
    found = constant_input(node, 1)
    if found is None and is_given(node, 1):
        return None
    pads = list(node.attributes.get_ints("pads", ())) if found is None else found.ravel().tolist()
    axes = constant_input(node, 3)
    if is_given(node, 3) and axes is None:
        return None
    places = list(range(rank)) if axes is None else [int(axis) % rank for axis in axes.ravel()]
    if len(pads) != 2 * len(places):
        return None
    every = [0] * 2 * rank
    for number, axis in enumerate(places):
        every[axis], every[rank + axis] = pads[number], pads[number + len(places)]
    return every


def _cut(model: ir.Model, node: ir.Node) -> bool:
    """A convolution of which a slice cuts the end off pads less there: causal convolutions are often written so."""
    import onnx_ir as ir

    value = node.inputs[0]
    before = None if value is None else value.producer()
    if value is None or before is None or before.op_type != "Conv" or not is_onnx(before) or only_reader(value) is None:
        return False
    shape, read = value.shape, before.attributes
    cuts = None if shape is None or not shape.is_static() else _ends(node, [int(each) for each in shape])
    window = Window.of(before, (1,) * (0 if cuts is None else len(cuts) - 2))
    if cuts is None or window.is_same:
        return False
    spatial, pads = len(cuts) - 2, window.fixed
    pads[spatial:] = [pad - cut * stride for pad, cut, stride in zip(pads[spatial:], cuts[2:], window.strides)]
    if any(cuts[:2]) or not any(cuts) or min(pads) < 0:
        return False
    attributes = [each for name, each in read.items() if name not in ("pads", "auto_pad")]
    node.name, own = before.name, node.name
    _replace(model, node, "Conv", before.inputs, [*attributes, ir.AttrInt64s("pads", pads)])
    node.name = own
    return True


def _ends(node: ir.Node, shape: Sequence[int]) -> list[int] | None:
    """How many elements a Slice cuts off at the end of each axis; None if it does anything else."""
    starts, ends, axes, steps = (constant_input(node, place) for place in range(1, 5))
    if (
        starts is None
        or ends is None
        or any(is_given(node, place) and constant_input(node, place) is None for place in (3, 4))
    ):
        return None
    if steps is not None and (steps != 1).any():
        return None
    found = [0] * len(shape)
    places = range(starts.size) if axes is None else [int(axis) % len(shape) for axis in axes.ravel()]
    for axis, start, end in zip(places, starts.ravel(), ends.ravel()):
        first, last, _ = slice(int(start), int(end)).indices(shape[axis])
        if first or last <= 0:
            return None
        found[axis] = shape[axis] - last
    return found


def _zero(node: ir.Node) -> float | None:
    """The number with which a convolution pads."""
    if node.op_type != "ConvInteger" or not is_given(node, 2):
        return 0.0
    return number_of(constant_input(node, 2))


# --- Batch norms --------------------------------------------------------------------------------------------------------
def _normalised(model: ir.Model, node: ir.Node) -> bool:
    """gamma * (w * x + b - mean) / deviation + beta, with the factor in the weights and the rest in the bias."""
    value = node.inputs[0]
    before = None if value is None else value.producer()
    if value is None or before is None or before.op_type not in _OUTPUT_AXIS or not is_onnx(before):
        return False
    if only_reader(value) is None or _has_other_means(model, node):
        return False
    parts = [constant_input(node, place) for place in range(1, 5)]
    weight, bias = constant_input(before, 1), constant_input(before, 2)
    if weight is None or any(part is None for part in parts) or (bias is None and is_given(before, 2)):
        return False
    gamma, beta, mean, variance = (np.asarray(part, np.float64) for part in parts)
    with np.errstate(all="ignore"):
        factor = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        shift = beta - mean * factor
        scaled = _OUTPUT_AXIS[before.op_type](before, weight.astype(np.float64), factor)
        own = 0.0 if bias is None else bias.astype(np.float64) * before.attributes.get_float("beta", 1.0) * factor
    numbers = (scaled, np.asarray(own + shift))
    if not all(np.isfinite(each.astype(weight.dtype)).all() for each in numbers):
        return False
    x, given = before.inputs[0], before.inputs[1]
    assert given is not None and given.dtype is not None
    names = (f"{given.name}.normalised", f"{node.outputs[0].name}.bias")
    made = [constant(model, name, each.astype(given.dtype.numpy())) for name, each in zip(names, numbers)]
    attributes = [each for name, each in before.attributes.items() if name != "beta"]
    name, node.name = node.name, before.name
    _replace(model, node, before.op_type, [x, *made], attributes)
    node.name = name
    return True


def _has_other_means(model: ir.Model, node: ir.Node) -> bool:
    """Whether a batch norm takes its means from x, gives them, or has one for each pixel."""
    old = model.opset_imports.get("", _WITHOUT_SPATIAL) < _WITHOUT_SPATIAL
    given = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    read = node.attributes
    return bool(given or read.get_int("training_mode", 0) or (old and not read.get_int("spatial", 1)))


def _scaled_filters(node: ir.Node, weight: Array, factor: Array) -> Array:
    scaled: Array = weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
    return scaled


def _scaled_transposed(node: ir.Node, weight: Array, factor: Array) -> Array:
    """Of (inputs, outputs of a group, ...)."""
    groups, (c, k, *taps) = node.attributes.get_int("group", 1), weight.shape
    scaled: Array = weight.reshape(groups, c // groups, k, *taps) * factor.reshape(groups, 1, k, *(1,) * len(taps))
    return scaled.reshape(weight.shape)


def _scaled_matrix(node: ir.Node, weight: Array, factor: Array) -> Array:
    scaled: Array = weight * (factor[:, None] if node.attributes.get_int("transB", 0) else factor)
    return scaled


_OUTPUT_AXIS: Mapping[str, Callable[[Any, Array, Array], Array]] = {
    "Conv": _scaled_filters,
    "ConvTranspose": _scaled_transposed,
    "Gemm": _scaled_matrix,
}


_RULES: Mapping[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("Relu", "Clip", "Max", "Min"), _bounded),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _neutral),
    "Cast": _cast,
    **dict.fromkeys(("Conv", "ConvInteger"), _padded),
    "BatchNormalization": _normalised,
    "Slice": _cut,
}
