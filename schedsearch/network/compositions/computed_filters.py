"""Convolutions whose filters or bias are computed: modulated and dynamic convolutions.

Computed filters make products of matrices. The pixels that each filter meets become a column, [n, groups, channels of a
group * taps, pixels of the result], and the filters become rows, [1, groups, output channels of a group, channels of a group
* taps]. Filters for each image, as StyleGAN has them, are groups of one image already. A transposed convolution is one of
the image with zeros between its pixels, and of filters that are turned around. A computed bias is added behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of, folded
from schedsearch.network.windows import Window

if TYPE_CHECKING:
    import onnx_ir as ir


def _conv(c: Composition) -> str | None:
    if (found := _shapes(c)) is None:
        return None
    _, filters, made = found
    if folded(c.needed(1)) is not None:
        _bias_apart(c, made)
        return None
    groups, window = c.node.attributes.get_int("group", 1), Window.of(c.node, filters[2:])
    rows = c.reshape(c.needed(1), [1, groups, filters[0] // groups, math.prod(filters[1:])])
    _finish(c, _product(c, c.needed(0), rows, window, made), made)
    return None


def _conv_transpose(c: Composition) -> str | None:
    if (found := _shapes(c)) is None:
        return None
    shape, filters, made = found
    weight, read = c.needed(1), c.node.attributes
    if folded(weight) is not None:
        _bias_apart(c, made)
        return None
    groups, window, rank = read.get_int("group", 1), Window.of(c.node, filters[2:]), len(filters) - 2
    if window.is_same or "output_shape" in read:
        return "has auto_pad or output_shape that asks for more pixels than there are; allowed: pads and output_padding"
    more = read.get_ints("output_padding", (0,) * rank)
    before = [reach - 1 - pad for reach, pad in zip(window.reaches, window.fixed)]
    after = [reach - 1 - pad + each for reach, pad, each in zip(window.reaches, window.fixed[rank:], more)]
    if min(*before, *after) < 0:
        return "has pads that are larger than its filters; allowed: smaller ones"
    for axis, count in enumerate(window.taps, 2):
        weight = c.gather(weight, axis, np.arange(count, dtype=np.int64)[::-1])
    channels, taps = filters[0] // groups, math.prod(window.taps)  # of the image, in a group
    rows = c.transpose(c.reshape(weight, [1, groups, channels, filters[1], taps]), [0, 1, 3, 2, 4])
    rows = c.reshape(rows, [1, groups, filters[1], channels * taps])
    dense = Window(window.taps, (1,) * rank, window.dilations, "NOTSET", (*before, *after))
    _finish(c, _product(c, _spread(c, shape, window.strides), rows, dense, made), made)
    return None


def _shapes(c: Composition) -> tuple[list[int], list[int], list[int]] | None:
    """Those of the image, of the filters and of the result; None if one is unknown or has no elements."""
    y = c.node.outputs[0]
    if dtype_of(c.needed(0)) not in FLOATS or y.shape is None or not y.shape.is_static():
        return None
    shape, filters, made = shape_of(c.needed(0)), shape_of(c.needed(1)), shape_of(y)
    if min(*shape, *filters, *made) < 1 or len(filters) != len(shape) or len(shape) < 3:
        return None
    return shape, filters, made


def _bias_apart(c: Composition, made: Sequence[int]) -> None:
    """Adds a computed bias behind a convolution with constant filters."""
    bias = c.input(2)
    if bias is None or folded(bias) is not None:
        return
    attributes = {name: each.value for name, each in c.node.attributes.items()}
    _finish(c, c.add(c.node.op_type, [c.needed(0), c.needed(1)], made, **attributes), made)


def _finish(c: Composition, value: ir.Value, made: Sequence[int]) -> None:
    bias, found = c.input(2), c.reshape(value, made)
    if bias is not None:
        found = c.add("Add", [found, c.reshape(bias, [made[1], *(1,) * (len(made) - 2)])])
    c.finish(found)


def _product(c: Composition, x: ir.Value, rows: ir.Value, window: Window, made: Sequence[int]) -> ir.Value:
    """[n, groups, channels of a group, pixels of the result].

    Args:
        rows: the filters, [1, groups, output channels of a group, channels of a group * taps].
        made: the shape of the result.
    """
    columns = _columns(c, x, window, made[2:])
    _, groups, _, wide = shape_of(rows)
    return c.matmul(rows, c.reshape(columns, [made[0], groups, wide, math.prod(made[2:])]))


def _columns(c: Composition, x: ir.Value, window: Window, windows: Sequence[int]) -> ir.Value:
    """[n * c, *taps, *windows]: the pixels of x at each tap of the filters."""
    shape, rank = shape_of(x), len(window.taps)
    rows, image = math.prod(shape[:2]), shape[2:]
    pads, axes = window.pads(image), window.axes(image, windows)
    value = c.reshape(x, [rows, *image])
    if any(pads):
        around = [extent + before + after for extent, before, after in zip(image, pads, pads[rank:])]
        margins = np.array([0, *pads[:rank], 0, *pads[rank:]], np.int64)
        value = c.add("Pad", [value, c.constant(margins), c.constant(np.array(0), x)], [rows, *around])
    return c.patches(value, [axis.pixels().T + axis.before for axis in axes])


def _spread(c: Composition, shape: Sequence[int], strides: Sequence[int]) -> ir.Value:
    """The image of a transposed convolution with `stride - 1` zeros between two pixels along each axis."""
    x, (n, channels, *image) = c.needed(0), shape
    if max(strides) == 1:
        return x
    parted = c.reshape(x, [n, channels, *(each for extent in image for each in (extent, 1))])
    behind = [0, 0, *(each for stride in strides for each in (0, stride - 1))]
    made = [extent + more for extent, more in zip(shape_of(parted), behind)]
    margins = np.array([*(0,) * len(behind), *behind], np.int64)
    value = c.add("Pad", [parted, c.constant(margins), c.constant(np.array(0), x)], made)
    value = c.reshape(value, [n, channels, *(extent * stride for extent, stride in zip(image, strides))])
    for axis, (extent, stride) in enumerate(zip(image, strides), 2):
        value = c.slice(value, axis, 0, (extent - 1) * stride + 1)
    return value


REWRITTEN: Mapping[str, Rewrite] = {"Conv": rewrite(_conv), "ConvTranspose": rewrite(_conv_transpose)}
