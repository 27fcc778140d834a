"""Nodes of ONNX over images whose height and width are known at run time only, and that no static operator computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.dynamic.dims import Unknown, same
from schedsearch.dynamic.numbers import Range
from schedsearch.network.facts import FLOATS, is_given, name_of
from schedsearch.network.invalid import ModelError
from schedsearch.network.others import resize_scales, resize_words, resized_axes
from schedsearch.ops.resize import as_float32
from schedsearch.typed import ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

    from schedsearch.dynamic.node_arrays import Nodes

MEANS = {"GlobalAveragePool": "average", "GlobalMaxPool": "max", "ReduceMean": "average"}


def global_pool(nodes: Nodes, node: ir.Node) -> list[str] | None:
    """The global pool of images of open height and width, filled up to their bound; None if the node is something else.

    Zeros lower the mean to a share of it, which is that of the pixels in use: it is divided by this share.
    """
    (x,) = nodes.taken(node, 1)
    shape = nodes.shape(x)
    if len(shape) != 4 or not any(isinstance(dim, Unknown) for dim in nodes.graph.dims(x)[2:]):
        return None
    if isinstance(nodes.graph.dims(x)[1], Unknown) or nodes.dtype(x) not in FLOATS:
        return None
    if node.op_type == "ReduceMean" and sorted(nodes.axes(node, 1, 4) or ()) != [2, 3]:
        return None
    mode, height, width = MEANS[node.op_type], shape[2], shape[3]
    source = f"node {name_of(node)} ({node.op_type})"

    def pooled(array: str) -> str:
        n, c, *_ = nodes.shape(array)
        filled = nodes.graph.filled(array, (2, 3), "lowest" if mode == "max" else "zero", source=source)
        params = {"n": n, "c": c, "h": height, "w": width, "r": height, "s": width, "mode": mode, "layout": "NCHW"}
        return nodes.call(node, Workload("pool2d", params | {"dtype": nodes.dtype(array)}), [filled])[0]

    y = pooled(x)
    if mode == "average":
        graph, unused = nodes.graph, nodes.graph.unused
        extents = graph.numbers(unused(f"{x} height and width"), 2, "extents", [x], {"first": 2})
        one = graph.constant(unused("one"), np.ones(1, np.float32))
        ones = {"x": (1,), "bound": (height, width), "entries": 2, "dtype": "float32"}
        pixels = graph.view(nodes.call(node, Workload("expand", ones), [one, extents])[0], (1, 1, height, width))
        inputs = [["a", nodes.dtype(x), nodes.shape(y)], ["b", "float32", (1, 1, 1, 1)]]
        quotient = {"y": nodes.shape(y), "expression": "a / b", "inputs": inputs, "dtype": nodes.dtype(x)}
        (y,) = nodes.call(node, Workload("elementwise", quotient), [y, pooled(pixels)])
    keeps = node.op_type != "ReduceMean" or node.attributes.get_int("keepdims", 1)
    return [y if keeps else nodes.seen(y, shape[:2])]


def resize(nodes: Nodes, node: ir.Node) -> tuple[Workload, Sequence[str]]:
    """Of images whose size is not known, unless each pixel becomes as many whole ones: static subgraphs have those."""
    words, scales = resize_words(node), resize_scales(node)
    if isinstance(words, str) or isinstance(scales, str):
        raise ModelError(words if isinstance(words, str) else str(scales))
    (x,) = nodes.taken(node, 1)
    shape = nodes.shape(x)
    if len(shape) != 4:
        raise ModelError(f"{name_of(node)} resizes {list(shape)}; allowed: images of four dimensions")
    params: ParamsByName = dict(zip("nchw", shape)) | words | {"layout": "NCHW", "dtype": nodes.dtype(x)}
    ranges, arrays = nodes.rows.ranges(x), [x]
    if scales is None:
        sizes, sides = _height_and_width(nodes, node, x)
        arrays.append(sizes)
    else:
        if scales[:2] != [1, 1]:
            raise ModelError(f"{name_of(node)} scales {_ONLY_SIDES}; got {scales[:2]} for these")
        if words["coordinates"] == "align_corners" and any(scale % 1 for scale in scales):
            raise ModelError(f"{name_of(node)} has align_corners and the scales {scales[2:]}; give integers, or sizes")
        params["scale"] = scales[2:]
        sides = [(0, math.floor(Fraction(as_float32(scale)) * most)) for scale, most in zip(scales[2:], shape[2:])]
    _, _, params["oh"], params["ow"] = nodes.bounds(node, [*ranges[:2], *sides])
    return Workload("dyn_resize", params), arrays


_ONLY_SIDES = "the batch or the channels of an image; allowed: height and width, and 1 for the others"


def _height_and_width(nodes: Nodes, node: ir.Node, x: str) -> tuple[str, Sequence[Range]]:
    """The numbers of the input `sizes` that are y's height and width, as an array, and their ranges."""
    row = nodes.rows.row(node.inputs[3]) if is_given(node, 3) and node.inputs[3] is not None else None
    axes = resized_axes(node)
    if row is None or row.is_float or row.count != len(axes) or not {2, 3} <= set(axes):
        raise ModelError(f"{name_of(node)} has no integers for height and width; allowed: scales, or sizes of both")
    elements, dims = nodes.graph.elements(row.value), nodes.graph.dims(x)
    for place, axis in enumerate(axes):
        wanted = None if elements is None else elements[place]
        if axis < 2 and not same(wanted, dims[axis]):
            got = "a number that is computed" if wanted is None else repr(wanted)
            raise ModelError(
                f"{name_of(node)} gives sizes to all axes, and may change the batch or the channels: axis {axis} is "
                f"{dims[axis]!r} before and {got} after it; allowed: the same extent, as Shape gives it, or axes=[2, 3]"
            )
    places = [axes.index(2), axes.index(3)]
    ranges = [row.ranges[place] for place in places]
    if places == list(range(row.count)):
        return nodes.array_of(row), ranges
    name = nodes.graph.unused(f"{name_of(node)} height and width")
    return nodes.graph.numbers(name, 2, "at", [row.value], {"places": places}), ranges
