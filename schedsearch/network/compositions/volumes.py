"""Convolutions and pools with three dimensions, as those of images.

A volume [n, c, d, h, w] is n * d images [n * d, c, h, w]. A convolution of volumes is one of images whose channels are those
of all planes that a filter reaches: as many slices along the depth as the filter has planes, concatenated. A depthwise one
is the sum of one for each plane, which is faster (docs/decisions/395-volumes-have-no-template-yet.md). The change from
volumes to images moves behind the element-wise nodes that read them, so that lowering fuses these as others.

A pool is one over height and width, and one over the depth: a maximum of maxima is the largest pixel, and all averages of a
window have the same number of pixels, because windows that reach beyond a volume are smaller boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, is_given, is_onnx, optional_input
from schedsearch.network.transposed import Axis, transposed_problem
from schedsearch.network.windows import Window

if TYPE_CHECKING:
    import onnx_ir as ir

_RANK = 5
_SWAP = [0, 2, 1, 3, 4]  # [n, c, d, h, w] and [n, d, c, h, w]
_FIRST_ONLY = ("BatchNormalization", "Clip", "Cast", "Identity")


def is_volume(node: ir.Node) -> bool:
    """Whether a node reads a volume of a known shape, and its filters or windows fit."""
    shape, result = extents(optional_input(node, 0)), extents(node.outputs[0])
    return shape is not None and result is not None and len(shape) == _RANK and min(*shape, *result) > 0


def rewrite_volumes(model: ir.Model) -> None:
    """Rewrites the convolutions of a simplified graph, and what is element-wise behind them."""
    if not any(is_onnx(node) and node.op_type in ("Conv", "ConvTranspose") and is_volume(node) for node in model.graph):
        return
    made: _Made = {}
    for node in list(model.graph):
        if not is_onnx(node):
            continue
        if node.op_type == "ConvTranspose" and is_volume(node):
            node = _transposed(model, node) or node
        if node.op_type == "Conv" and is_volume(node):
            _convolution(model, node, made)
        else:
            _sink(model, node, made)


# --- Views --------------------------------------------------------------------------------------------------------------
_Made = dict["ir.Value", "ir.Value"]  # volume -> its images, of nodes before


def _images(steps: Steps, x: ir.Value, made: _Made) -> ir.Value:
    """The images [n * d, c, h, w] of a volume; those that it was made of, if it was."""
    found = _images_behind(x) or made.get(x)
    if found is not None:
        return found
    shape = extents(x)
    assert shape is not None
    n, c, d, h, w = shape
    made[x] = steps.reshape(x if 1 in (c, d) else steps.transpose(x, _SWAP), [n * d, c, h, w])
    return made[x]


def _volume(steps: Steps, images: ir.Value, shape: Sequence[int]) -> ir.Value:
    """The volume of images."""
    n, c, d, h, w = shape
    if 1 in (c, d):
        return steps.add("Reshape", [images, np.array(shape)], shape, like=images)
    return steps.transpose(steps.add("Reshape", [images, np.array([n, d, c, h, w])], [n, d, c, h, w], like=images), _SWAP)


def _images_behind(value: ir.Value | None) -> ir.Value | None:
    """The images of which `_volume` made a value; None if it is something else."""
    shape, node = extents(value), None if value is None else value.producer()
    if shape is None or len(shape) != _RANK or node is None:
        return None
    n, c, d, h, w = shape
    if 1 not in (c, d):
        swapped = node.op_type == "Transpose" and list(node.attributes.get_ints("perm", ())) == _SWAP
        node = node.inputs[0].producer() if swapped and node.inputs[0] is not None else None
    if node is None or node.op_type != "Reshape" or extents(node.inputs[0]) != [n * d, c, h, w]:
        return None
    return node.inputs[0]


def _sink(model: ir.Model, node: ir.Node, made: _Made) -> None:
    """Moves the view in front of an element-wise node behind it, if all that it reads has images."""
    y = extents(node.outputs[0])
    if y is None or len(y) != _RANK or all(_images_behind(value) is None for value in node.inputs) or len(node.outputs) > 1:
        return
    concatenated = node.op_type == "Concat" and node.attributes.get_int("axis", 0) % _RANK == 1
    if not concatenated and (node.op_type not in ELEMENTWISE or "axis" in node.attributes or "axes" in node.attributes):
        return
    first, given = node.op_type in _FIRST_ONLY, list(node.inputs)
    read = given[:1] if first else given
    if any(value is not None and not _has_images(value, y, concatenated) for value in read):
        return
    steps = Steps(model, node)
    inputs = [value if value is None else _operand(steps, value, made) for value in read] + given[len(read) :]
    n, c, d, h, w = y
    attributes = {name: each.value for name, each in node.attributes.items()}
    images = steps.add(node.op_type, inputs, [n * d, c, h, w], **attributes)
    _volume(steps, images, y)
    steps.replace()


def _has_images(value: ir.Value, y: Sequence[int], concatenated: bool) -> bool:
    """Whether a value is a volume of the shape of y, or a constant that is the same for all images."""
    shape = extents(value)
    if shape is None:
        return False
    if value.const_value is None:
        return len(shape) == _RANK and (shape[0], *shape[2:]) == (y[0], *y[2:]) and (concatenated or shape[1] == y[1])
    whole = [*(1,) * (_RANK - len(shape)), *shape]
    return whole[0] == whole[2] == 1 and not concatenated


def _operand(steps: Steps, value: ir.Value, made: _Made) -> ir.Value:
    if value.const_value is None:
        return _images(steps, value, made)
    shape = extents(value) or []
    return (
        value
        if len(shape) < 3
        else steps.shaped(value, [each for place, each in enumerate(shape, -len(shape)) if place != -3])
    )


# --- Convolutions -------------------------------------------------------------------------------------------------------
def _convolution(model: ir.Model, node: ir.Node, made: _Made) -> None:
    x, weight, y, read = node.inputs[0], constant_input(node, 1), extents(node.outputs[0]), node.attributes
    shape = extents(x)
    if x is None or shape is None or weight is None or y is None or dtype_of(x) not in FLOATS or weight.ndim != _RANK:
        return
    groups, window = read.get_int("group", 1), Window.of(node, weight.shape[2:])
    strides, dilations, pads = window.strides, window.dilations, window.pads(shape[2:])
    bias = node.inputs[2] if is_given(node, 2) else None
    n, (k, each, planes, *_), depth = shape[0], weight.shape, y[2]
    if shape[2] + pads[0] + pads[3] <= (planes - 1) * dilations[0]:
        return  # the filter does not fit; onnx's shape inference counts one place if the stride is larger than what lacks
    steps = Steps(model, node)
    images = _images(steps, x, made)
    flat = {"strides": strides[1:], "dilations": dilations[1:], "pads": [*pads[1:3], *pads[4:]], "group": groups}

    def convolved(images: ir.Value, filters: NDArray[Any], bias: ir.Value | None) -> ir.Value:
        return steps.add("Conv", [images, filters, bias], [n * depth, k, *y[3:]], like=x, **flat)

    if (planes, strides[0], pads[0], pads[3]) == (1, 1, 0, 0):
        parts = [images]
    else:
        places = [(plane * dilations[0], strides[0]) for plane in range(planes)]
        is_depthwise = 1 < groups == shape[1] == k
        parts = _planes(steps, images, shape, (pads[0], pads[3]), places, depth, stay=groups == 1 or is_depthwise)
        if not is_depthwise:
            parts = [_side_by_side(steps, parts, groups)]
    filters = np.split(weight.transpose(0, 2, 1, 3, 4).reshape(k, planes * each, *weight.shape[3:]), len(parts), axis=1)
    total = convolved(parts[0], filters[0], bias)
    for part, own in zip(parts[1:], filters[1:]):
        total = steps.add("Add", [convolved(part, own, None), total], [n * depth, k, *y[3:]], like=x)
    _volume(steps, total, y)
    steps.replace()


def _planes(
    steps: Steps,
    images: ir.Value,
    shape: Sequence[int],
    pads: tuple[int, int],
    places: Sequence[tuple[int, int]],
    depth: int,
    *,
    stay: bool,
) -> list[ir.Value]:
    """The images [n * depth, c, h, w] that each plane of a filter reads.

    Args:
        shape: of the volume.
        pads: planes of zeros in front of it and behind it.
        places: of each plane of a filter: the first plane of the volume, and the distance to the next one.
        stay: whether those of one volume stay images, in whatever layout.
    """
    n, c, d, h, w = shape
    axis, x = (0, images) if stay and n == 1 else (1, steps.reshape(images, [n, d, c, h, w]))
    if any(pads):
        made = extents(x) or []
        margins = np.zeros(2 * len(made), np.int64)
        margins[axis], margins[len(made) + axis] = pads
        made[axis] += sum(pads)
        x = steps.add("Pad", [x, margins, 0.0], made, like=images)
    parts = (steps.slice(x, axis, start, start + (depth - 1) * step + 1, step) for start, step in places)
    return [steps.reshape(part, [n * depth, c, h, w]) for part in parts]


def _side_by_side(steps: Steps, parts: Sequence[ir.Value], groups: int) -> ir.Value:
    """The images [m, c, h, w] of all planes as one, [m, planes * c, h, w]; the planes of each group stand side by side."""
    shape = extents(parts[0])
    assert shape is not None
    m, c, h, w = shape
    if groups == 1:
        return steps.reshape(steps.concat(list(parts), 1), [m, len(parts) * c, h, w])
    apart = [steps.reshape(part, [m, groups, 1, c // groups * h, w]) for part in parts]
    return steps.reshape(steps.concat(apart, 2), [m, len(parts) * c, h, w])


def _transposed(model: ir.Model, node: ir.Node) -> ir.Node | None:
    """A transposed convolution as one of blocks of pixels, as of images, whose pixels a Transpose moves to their places.
    Returns the convolution."""
    x, weight, bias, y = node.inputs[0], constant_input(node, 1), optional_input(node, 2), extents(node.outputs[0])
    if transposed_problem(node) or x is None or weight is None or y is None or dtype_of(x) not in FLOATS:
        return None
    if bias is not None and bias.const_value is None:
        return None
    axes = [Axis.of(node, axis) for axis in range(3)]
    groups, (c, k, *taps) = node.attributes.get_int("group", 1), weight.shape
    strides = [axis.stride for axis in axes]
    block, n, channels = math.prod(strides), y[0], groups * weight.shape[1]
    grouped = weight.reshape(groups, c // groups, k, *taps).astype(np.float32)
    filters = np.einsum("gcktrs,dit,ejr,fls->gkdefcijl", grouped, *(axis.selection() for axis in axes), optimize=True)
    filters = filters.reshape(channels * block, c // groups, *(axis.taps for axis in axes)).astype(weight.dtype)
    steps = Steps(model, node)
    repeated = None if bias is None else bias.const_value.numpy().repeat(block)
    blocks = [axis.blocks for axis in axes]
    pads = [*(axis.before for axis in axes), *(axis.after for axis in axes)]
    value = steps.add("Conv", [x, filters, repeated], [n, channels * block, *blocks], like=x, pads=pads, group=groups)
    conv = value.producer()
    if block > 1:
        value = steps.reshape(value, [n * channels, *strides, *blocks])
        value = steps.transpose(value, [0, 4, 1, 5, 2, 6, 3])
    whole = [extent * stride for extent, stride in zip(blocks, strides)]
    value = steps.reshape(value, [n, channels, *whole])
    for place, axis in enumerate(axes):
        value = steps.slice(value, 2 + place, 0, axis.extent)
    steps.replace()
    return conv


# --- Pools --------------------------------------------------------------------------------------------------------------
def _pool(model: ir.Model, node: ir.Node) -> None:
    x, y = node.inputs[0], extents(node.outputs[0])
    shape = extents(x)
    if not is_volume(node) or x is None or shape is None or y is None:
        return
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return
    (n, c, d, h, w), (depth, *sides) = shape, y[2:]
    steps = Steps(model, node)
    images = _images_behind(x)
    planes = [n, c * d] if images is None else [n * d, c]
    images = steps.reshape(x, [n, c * d, h, w]) if images is None else images
    pooled = steps.add(node.op_type, [images], [*planes, *sides], like=x, **_window(node, slice(1, 3)))
    if planes == [n, c * d]:
        pooled = steps.reshape(pooled, [n, c, d, math.prod(sides)])
    else:
        pooled = steps.reshape(_volume(steps, pooled, [n, c, d, *sides]), [n, c, d, math.prod(sides)])
    window = _window(node, slice(0, 1))
    if window["kernel_shape"] != [1, 1] or window.get("strides", [1, 1]) != [1, 1] or depth != d:
        pooled = steps.add(node.op_type, [pooled], [n, c, depth, math.prod(sides)], like=x, **window)
    steps.reshape(pooled, y)
    steps.replace()


def _window(node: ir.Node, axes: slice) -> dict[str, Any]:
    """The attributes of a pool over some of its axes; of one, it is the height of images."""
    read, found = node.attributes, dict[str, Any]()
    count = len(range(3)[axes])
    for name in ("kernel_shape", "strides", "dilations"):
        if name in read:
            found[name] = [*list(read.get_ints(name, ()))[axes], *(1,) * (2 - count)]
    if "pads" in read:
        pads = list(read.get_ints("pads", ()))
        found["pads"] = [*pads[:3][axes], *(0,) * (2 - count), *pads[3:][axes], *(0,) * (2 - count)]
    others = ("ceil_mode", "count_include_pad")
    found |= {name: read.get_int(name, 0) for name in others if name in read}
    auto_pad = read.get_string("auto_pad", "NOTSET")
    return found if auto_pad == "NOTSET" else found | {"auto_pad": auto_pad}


def _global_pool(model: ir.Model, node: ir.Node) -> None:
    x, y = node.inputs[0], extents(node.outputs[0])
    shape = extents(x)
    if not is_volume(node) or x is None or shape is None or y is None:
        return
    n, c, d, h, w = shape
    steps = Steps(model, node)
    steps.reshape(steps.add(node.op_type, [steps.reshape(x, [n, c, d * h, w])], [n, c, 1, 1], like=x), y)
    steps.replace()


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {
    **dict.fromkeys(("MaxPool", "AveragePool"), _pool),
    **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool"), _global_pool),
}
