"""Convolutions whose filters are computed, as products of matrices: modulated and dynamic convolutions.

The pixels that each filter meets become a column, [n, groups, channels of a group * taps, pixels of the result], and the
filters become rows, [1, groups, output channels of a group, channels of a group * taps]. Filters for each image, as StyleGAN
has them, are groups of one image already.
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
    x, weight, bias, y = c.needed(0), c.needed(1), c.input(2), c.node.outputs[0]
    if folded(weight) is not None or dtype_of(x) not in FLOATS or y.shape is None or not y.shape.is_static():
        return None
    shape, filters, made = shape_of(x), shape_of(weight), [int(extent) for extent in y.shape]
    groups = c.node.attributes.get_int("group", 1)
    if min(*shape, *filters, *made) < 1 or len(filters) != len(shape) or len(shape) < 3:
        return None
    columns = _columns(c, x, filters[2:], made[2:])
    wide, pixels = math.prod(filters[1:]), math.prod(made[2:])
    columns = c.reshape(columns, [shape[0], groups, wide, pixels])
    rows = c.reshape(weight, [1, groups, filters[0] // groups, wide])
    found = c.reshape(c.matmul(rows, columns), made)
    if bias is not None:
        found = c.add("Add", [found, c.reshape(bias, [filters[0], *(1,) * (len(shape) - 2)])])
    c.finish(found)
    return None


def _columns(c: Composition, x: ir.Value, taps: Sequence[int], windows: Sequence[int]) -> ir.Value:
    """[n * c, *taps, *windows]: the pixels of x at each tap of the filters."""
    shape, rank, window = shape_of(x), len(taps), Window.of(c.node, taps)
    image = shape[2:]
    pads = window.pads(image)
    value = c.reshape(x, [math.prod(shape[:2]), *image])
    if any(pads):
        around = [extent + before + after for extent, before, after in zip(image, pads, pads[rank:])]
        margins = np.array([0, *pads[:rank], 0, *pads[rank:]], np.int64)
        value = c.add("Pad", [value, c.constant(margins), c.constant(np.array(0), x)], [math.prod(shape[:2]), *around])
    for axis, (count, stride, dilation, made) in enumerate(zip(taps, window.strides, window.dilations, windows), 1):
        chosen = (np.arange(count, dtype=np.int64)[:, None] * dilation + np.arange(made) * stride).ravel()
        extents = shape_of(value)
        if not np.array_equal(chosen, np.arange(extents[axis])):
            extents[axis] = chosen.size
            value = c.add("Gather", [value, c.constant(chosen)], extents, axis=axis)
    parted = c.reshape(value, [math.prod(shape[:2]), *(each for pair in zip(taps, windows) for each in pair)])
    return c.transpose(parted, [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2)])


REWRITTEN: Mapping[str, Rewrite] = {"Conv": rewrite(_conv)}
