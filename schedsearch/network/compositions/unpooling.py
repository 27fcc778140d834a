"""MaxPool with the places of the largest pixels, and MaxUnpool, which puts pixels back there.

The pixels of each window become a row, and ArgMax gives the place in it: the first of equal ones. Arithmetic on integers
makes of it the place in the array. A window that reaches into the padding has its first or last pixel several times instead,
so that no place is outside of the image. The values stay those of a MaxPool, which fuses with others as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import constant_input, dtype_of, is_given
from schedsearch.network.windows import Axis, Window
from schedsearch.ops.topk import DTYPES as RANKED
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def _ends(axis: Axis) -> tuple[Array, Array]:
    """The first and the last pixel of the image in each window. The first is behind the last where there is none."""
    pixels, rows = axis.pixels(), np.arange(axis.windows)
    inside = (pixels >= 0) & (pixels < axis.size)
    first, last = inside.argmax(1), axis.taps - 1 - inside[:, ::-1].argmax(1)
    return pixels[rows, first], np.where(inside.any(1), pixels[rows, last], -1)


def _pixels(axis: Axis) -> Array:
    """Of each tap of each window, [windows, taps]; the first or last of the image for those in the padding."""
    first, last = _ends(axis)
    return np.clip(axis.pixels(), first[:, None], last[:, None])


def _max_pool(c: Composition) -> str | None:
    x = c.needed(0)
    if not c.is_read(1):
        return None
    if dtype_of(x) not in RANKED:
        return f"gives the places of the largest of {dtype_of(x)}; allowed: {', '.join(RANKED)}"
    shape, read = shape_of(x), c.node.attributes
    made = [int(extent) for extent in c.node.outputs[0].shape or ()]
    axes = Window.of(c.node).axes(shape[2:], made[2:])
    if 0 in (*shape, *made) or any((first > last).any() for first, last in map(_ends, axes)):
        return "has a window without pixels, of which none is the largest; allowed: windows that reach into the image"
    values = None
    if c.is_read(0):
        window = {name: each.value for name, each in read.items() if name != "storage_order"}
        values = c.add("MaxPool", [x], made, **window)
    index = _places(c, x, axes, columns=bool(read.get_int("storage_order", 0)))
    c.finish(values, c.reshape(index, made))
    return None


def _places(c: Composition, x: ir.Value, axes: Sequence[Axis], *, columns: bool) -> ir.Value:
    """The places [images, *windows] in the whole array; of a plane column by column if so."""
    images = math.prod(shape_of(x)[:2])
    taps = [axis.taps for axis in axes]
    tap = _largest(c, x, axes)
    steps = [
        math.prod([axis.size for axis in (axes[:place] if columns else axes[place + 1 :])]) for place in range(len(axes))
    ]
    plane = math.prod(axis.size for axis in axes)
    found = c.constant((np.arange(images, dtype=np.int64) * plane).reshape(images, *(1,) * len(axes)))
    for place, (axis, step) in enumerate(zip(axes, steps)):
        along = [axis.windows if each == place else 1 for each in range(-1, len(axes))]
        first, last = (c.constant(each.reshape(along)) for each in _ends(axis))
        at = c.constant(axis.starts().reshape(along))
        if axis.taps > 1:
            digit = c.add("Div", [tap, c.constant(np.array(math.prod(taps[place + 1 :]), np.int64))])
            digit = c.add("Mod", [digit, c.constant(np.array(axis.taps, np.int64))])
            at = c.add("Add", [c.add("Mul", [digit, c.constant(np.array(axis.dilation, np.int64))]), at])
        at = c.add("Min", [c.add("Max", [at, first]), last])
        found = c.add("Add", [c.add("Mul", [at, c.constant(np.array(step, np.int64))]), found])
    return found


def _largest(c: Composition, x: ir.Value, axes: Sequence[Axis]) -> ir.Value:
    """The number of the largest pixel of each window, row by row, [images, *windows]."""
    import onnx_ir as ir

    images, rank = math.prod(shape_of(x)[:2]), len(axes)
    windows = [axis.windows for axis in axes]
    if all(axis.taps == 1 for axis in axes):
        return c.constant(np.zeros((1, *(1,) * rank), np.int64))
    value = c.reshape(x, [images, *(axis.size for axis in axes)])
    rows = [images * math.prod(windows), math.prod(axis.taps for axis in axes)]
    rowwise = c.reshape(c.patches(value, list(map(_pixels, axes))), rows)
    index = c.add("ArgMax", [rowwise], rows[:1], ir.DataType.INT64, axis=1, keepdims=0)
    return c.reshape(index, [images, *windows])


def _max_unpool(c: Composition) -> str | None:
    """A scatter of the pixels into zeros. Of pixels with one place, which pools of overlapping windows make, any remains."""
    x, index = c.needed(0), c.needed(1)
    if shape_of(x) != shape_of(index):
        return f"reads places of shape {shape_of(index)}; allowed: one for each pixel, {shape_of(x)}"
    made = _unpooled(c.node, shape_of(x))
    if made is None:
        return f"has windows of other axes than its pixels; allowed: {len(shape_of(x)) - 2} numbers, and twice as many pads"
    given: Any = constant_input(c.node, 2)
    if is_given(c.node, 2) and (given is None or given.ravel().tolist() != made):
        got = "that is computed" if given is None else f"{given.ravel().tolist()}"
        return f"has an output_shape {got}, where runtimes put pixels at different places; allowed: {made}"
    if min(made) < 1:
        return "makes an array without elements; allowed: at least one"
    pixels = math.prod(shape_of(x))
    zeros = c.constant(np.zeros(math.prod(made)), x)
    places, updates = c.reshape(index, [pixels, 1]), c.reshape(x, [pixels])
    c.finish(c.reshape(c.add("ScatterND", [zeros, places, updates], [math.prod(made)]), made))
    return None


def _unpooled(node: ir.Node, shape: Sequence[int]) -> list[int] | None:
    """The shape by ONNX's formula, without output_shape; None if windows and pixels have other numbers of axes."""
    window, rank = Window.of(node), len(shape) - 2
    pads = window.given
    if rank < 1 or (len(window.taps), len(window.strides), len(pads)) != (rank, rank, 2 * rank):
        return None
    sides = zip(shape[2:], window.taps, window.strides, pads, pads[rank:])
    return [*shape[:2], *((extent - 1) * step + each - before - after for extent, each, step, before, after in sides)]


PLACES: Mapping[str, Rewrite] = {"MaxPool": rewrite(_max_pool)}  # before pools with other dimensions become those of images
REWRITTEN: Mapping[str, Rewrite] = {"MaxUnpool": rewrite(_max_unpool)}
