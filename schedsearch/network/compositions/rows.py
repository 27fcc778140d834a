"""Convolutions and pools with one dimension, as those of images with one row.

A node over [n, c, w] becomes one over [n, c, 1, w], between two views. A view behind a node moves behind the element-wise
nodes, concatenations, slices and pads that read it, until it meets the view in front of the next such node: what is left
are nodes over images, which lowering fuses as it does others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.facts import constant_input, is_given, is_onnx
from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.network.settings import size_problem

if TYPE_CHECKING:
    import onnx_ir as ir

ROW_AXIS = 2  # of an image: its height, which is 1
_WEIGHTS: Mapping[str, int | None] = {  # operator -> the place of its filters
    **dict.fromkeys(("Conv", "ConvTranspose", "ConvInteger"), 1),
    "QLinearConv": 3,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"), None),
}
_ONES = ("kernel_shape", "strides", "dilations", "output_shape")  # attributes with a number for each dimension
_FIRST_ONLY = ("BatchNormalization", "QuantizeLinear", "DequantizeLinear", "Clip", "Cast", "Identity", "Dropout")


def lift_rows(model: ir.Model) -> None:
    """Rewrites a simplified graph. Nodes of which a shape is not known stay as they are."""
    made: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if is_onnx(node) and node.op_type in _WEIGHTS:
            _lift(model, node, made)
    if any(is_onnx(node) and _image_behind(value) is not None for node in model.graph for value in node.outputs):
        for node in list(model.graph):
            if is_onnx(node):
                _sink(model, node)


# --- Views --------------------------------------------------------------------------------------------------------------
def _shape(value: ir.Value | None) -> list[int] | None:
    """The extents of a value; None if they are not known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return [int(extent) for extent in value.shape]


def _lifted(shape: Sequence[int]) -> list[int]:
    """The shape of an array that is repeated to [n, c, w], of one that is repeated to [n, c, 1, w]."""
    return [*shape[:-1], 1, shape[-1]] if len(shape) > 1 else list(shape)


def _view(model: ir.Model, value: ir.Value, shape: Sequence[int], suffix: str, name: str | None) -> ir.Node:
    import onnx_ir as ir

    target = constant(model, f"{value.name}.{suffix}.shape", np.array(shape, np.int64))
    return ir.Node("", "Reshape", [value, target], outputs=[result(value, suffix, list(shape))], name=name)


def _image_behind(value: ir.Value | None) -> ir.Value | None:
    """The image [n, c, 1, w] of which a value is the view [n, c, w]; None if it is something else."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Reshape", "Squeeze") or not is_onnx(node):
        return None
    image, row = _shape(node.inputs[0]), _shape(value)
    return node.inputs[0] if row is not None and len(row) == 3 and image == _lifted(row) else None


class _Images:
    """Values as they are in front of a node over images.

    Attributes:
        views: nodes that the values need.
    """

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.node = model, node
        self.views: list[ir.Node] = []

    def of(self, value: ir.Value | None) -> ir.Value | None:
        """The value with one more dimension; None if its shape is not known or has too many dimensions already."""
        shape = _shape(value)
        if value is None or shape is None or len(shape) > 3:
            return None
        if (image := _image_behind(value)) is not None:
            return image
        if len(shape) < 2:
            return value
        if value.const_value is not None:
            return constant(self.model, f"{value.name}.row", value.const_value.numpy().reshape(_lifted(shape)))
        self.views.append(_view(self.model, value, _lifted(shape), "image", self.node.name))
        return self.views[-1].outputs[0]


def _put(
    model: ir.Model,
    node: ir.Node,
    views: Sequence[ir.Node],
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    shape: Sequence[int],
) -> None:
    """Puts a node over images of one row, and the view of its result, in the place of a node."""
    import onnx_ir as ir

    y = node.outputs[0]
    image = result(y, "image", list(shape))
    made = ir.Node("", node.op_type, inputs, list(attributes.values()), outputs=[image], name=node.name)
    back = _view(model, image, _shape(y) or [], "row", node.name)
    back.outputs[0].type = y.type
    replace(model, node, [*views, made, back])


# --- Convolutions and pools ---------------------------------------------------------------------------------------------
def _lift(model: ir.Model, node: ir.Node, made: dict[ir.Value, ir.Value]) -> None:
    """Args: made: filters -> those with one more dimension, of nodes before."""
    x, y = _shape(node.inputs[0]), _shape(node.outputs[0])
    if x is None or y is None or len(x) != 3 or len(y) != 3 or any(_is_read(value) for value in node.outputs[1:]):
        return
    place, images = _WEIGHTS[node.op_type], _Images(model, node)
    inputs = list(node.inputs)
    inputs[0] = images.of(inputs[0])
    if place is not None:
        filters = inputs[place]
        shape = _shape(filters)
        if filters is None or shape is None or len(shape) != 3:
            return
        if filters not in made:
            made[filters] = _filters(model, filters, images)
        inputs[place] = made[filters]
    _put(model, node, images.views, inputs, _window(node), _lifted(y))


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _filters(model: ir.Model, value: ir.Value, images: _Images) -> ir.Value:
    """Filters of one row: constants, or constants that are dequantised."""
    import onnx_ir as ir

    maker = value.producer()
    whole = None if maker is None or maker.op_type != "DequantizeLinear" else maker.inputs[0]
    if maker is None or whole is None or whole.const_value is None or maker.attributes.get_int("axis", 1) > 1:
        found = images.of(value)
        assert found is not None
        return found
    numbers = images.of(whole)
    row = result(value, "image", _lifted(_shape(value) or []))
    inputs = [numbers, *maker.inputs[1:]]
    dequantised = ir.Node("", maker.op_type, inputs, list(maker.attributes.values()), outputs=[row], name=maker.name)
    model.graph.insert_before(maker, dequantised)
    return row


def _window(node: ir.Node) -> dict[str, Any]:
    import onnx_ir as ir

    attributes = dict(node.attributes)
    for name, each in node.attributes.items():
        if name in _ONES:
            attributes[name] = ir.AttrInt64s(name, [1, *each.as_ints()])
        elif name == "output_padding":
            attributes[name] = ir.AttrInt64s(name, [0, *each.as_ints()])
        elif name == "pads":
            before, after = each.as_ints()
            attributes[name] = ir.AttrInt64s(name, [0, before, 0, after])
    return attributes


# --- Nodes behind them --------------------------------------------------------------------------------------------------
def _sink(model: ir.Model, node: ir.Node) -> None:
    """Moves the view in front of a node behind it, if the node computes the same over images."""
    if node.op_type in ("Reshape", "Unsqueeze"):
        return _cancel(model, node)
    y = _shape(node.outputs[0])
    if all(_image_behind(value) is None for value in node.inputs) or y is None or len(y) != 3:
        return None
    if len(node.outputs) > 1 and any(_is_read(value) for value in node.outputs[1:]):
        return None
    if node.op_type == "Transpose":
        return _transposed(model, node, y)
    read, images = _reads(node), _Images(model, node)
    attributes = _attributes(model, node)
    if read is None or attributes is None:
        return None
    inputs = [images.of(value) if place in read else value for place, value in enumerate(node.inputs)]
    if any(inputs[place] is None for place in read):
        return None
    if node.op_type in _MOVED:
        numbers = _MOVED[node.op_type](model, node)
        if numbers is None:
            return None
        inputs[1:] = numbers
    _put(model, node, images.views, inputs, attributes, _lifted(y))
    return None


def _cancel(model: ir.Model, node: ir.Node) -> None:
    """Leaves out a view that makes the image again of which its input is a view."""
    import onnx_ir as ir

    image = _image_behind(node.inputs[0])
    if image is None or _shape(image) != _shape(node.outputs[0]) or node.outputs[0].is_graph_output():
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], image)
    model.graph.remove(node, safe=True)


def _transposed(model: ir.Model, node: ir.Node, y: list[int]) -> None:
    """[n, w, c] of an image is a view of the image in NHWC."""
    import onnx_ir as ir

    image = _image_behind(node.inputs[0])
    if image is None or list(node.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return
    n, w, c = y
    value = result(node.outputs[0], "image", [n, 1, w, c])
    order = ir.AttrInt64s("perm", [0, 2, 3, 1])
    made = ir.Node("", "Transpose", [image], [order], outputs=[value], name=node.name)
    back = _view(model, value, y, "row", node.name)
    replace(model, node, [made, back])


def _reads(node: ir.Node) -> list[int] | None:
    """The places of the inputs that are over images if the node is; None if it cannot be."""
    if node.op_type in (*_FIRST_ONLY, *_MOVED, "Softmax", "LogSoftmax"):
        return None if size_problem(node) else [0]
    if node.op_type == "Concat":
        return list(range(len(node.inputs))) if all(len(_shape(each) or ()) == 3 for each in node.inputs) else None
    if node.op_type not in ELEMENTWISE or "axis" in node.attributes or "axes" in node.attributes:
        return None
    return [place for place, value in enumerate(node.inputs) if value is not None]


def _attributes(model: ir.Model, node: ir.Node) -> dict[str, Any] | None:
    """With the axis counted among those of images; None if there is no such axis."""
    import onnx_ir as ir

    attributes = dict(node.attributes)
    if node.op_type in ("Softmax", "LogSoftmax"):
        old = model.opset_imports.get("", 13) < 13
        axis = node.attributes.get_int("axis", 1 if old else -1) % 3
        if old and axis < 2:
            return None
        attributes["axis"] = ir.AttrInt64("axis", _moved(axis))
    elif "axis" in attributes:
        attributes["axis"] = ir.AttrInt64("axis", _moved(attributes["axis"].as_int() % 3))
    return attributes


def _moved(axis: int) -> int:
    return axis + (axis >= ROW_AXIS)


def _sliced(model: ir.Model, node: ir.Node) -> list[ir.Value | None] | None:
    starts, axes = constant_input(node, 1), constant_input(node, 3)
    if starts is None or (axes is None and is_given(node, 3)):
        return None
    along = range(starts.size) if axes is None else [int(axis) % 3 for axis in axes.ravel()]
    places = constant(model, f"{node.outputs[0].name}.axes", np.array([_moved(axis) for axis in along], np.int64))
    return [*node.inputs[1:3], places, *node.inputs[4:]]


def _padded(model: ir.Model, node: ir.Node) -> list[ir.Value | None] | None:
    pads, axes = constant_input(node, 1), constant_input(node, 3)
    if pads is None or (axes is None and is_given(node, 3)):
        return None
    along = list(range(3)) if axes is None else [int(axis) % 3 for axis in axes.ravel()]
    every = [0] * 8
    for place, axis in enumerate(along):
        every[_moved(axis)], every[4 + _moved(axis)] = int(pads[place]), int(pads[len(along) + place])
    return [constant(model, f"{node.outputs[0].name}.pads", np.array(every, np.int64)), *node.inputs[2:3]]


def _expanded(model: ir.Model, node: ir.Node) -> list[ir.Value | None] | None:
    shape = _lifted(_shape(node.outputs[0]) or [])
    return [constant(model, f"{node.outputs[0].name}.shape", np.array(shape, np.int64))]


_MOVED = {"Slice": _sliced, "Pad": _padded, "Expand": _expanded}
