"""Col2Im: images that are sums of blocks, which may overlap. PyTorch's `fold` writes it.

Blocks side by side only move. Others are what a transposed convolution adds up: a group for each channel, whose inputs are
the pixels of a block, and whose filters are 1 at the place of the input's pixel and 0 elsewhere. An infinite number makes
the pixels around it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, constant_of, dtype_of
from schedsearch.network.windows import Window

if TYPE_CHECKING:
    import onnx_ir as ir

_SPATIAL = (1, 2, 3)


def _col2im(c: Composition) -> str | None:
    x, given = c.needed(0), [constant_of(c.needed(place)) for place in (1, 2)]
    if any(each is None for each in given):
        return "has an image or a block whose extents are computed; allowed: constants"
    image, block = ([int(extent) for extent in each.ravel()] for each in given if each is not None)
    rank = len(image)
    if rank not in _SPATIAL or len(block) != rank:
        return f"has blocks of {len(block)} dimensions in images of {rank}; allowed: 1 to 3, as many in both"
    if dtype_of(x) not in FLOATS:
        return f"adds {dtype_of(x)}; allowed: {', '.join(FLOATS)}"
    window = Window.of(c.node, block)
    strides, dilations, pads, reach = list(window.strides), list(window.dilations), list(window.given), window.reaches
    if rank != 2 and max(dilations) > 1:  # ONNX Runtime 1.32 differs from ONNX's definition there
        return f"has dilations {dilations}, with which runtimes add pixels at different places; allowed but in images: 1"
    around = [extent + before + after for extent, before, after in zip(image, pads, pads[rank:])]
    grid = [(extent - own) // stride + 1 for extent, own, stride in zip(around, reach, strides)]
    n, pixels, columns = shape_of(x)
    channels, left = divmod(pixels, math.prod(block))
    if left or min(grid) < 1 or columns != math.prod(grid):
        return (
            f"reads {columns} blocks of {pixels} numbers; allowed: {math.prod(grid)} blocks, {grid} in the image, of a "
            f"multiple of {math.prod(block)} numbers"
        )
    places = c.reshape(x, [n, pixels, *grid])
    if (
        strides == block
        and around == image == [extent * count for extent, count in zip(block, grid)]
        and max(dilations) == 1
    ):
        c.finish(_side_by_side(c, [n, channels], places, block, grid))
        return None
    filters = np.eye(math.prod(block)).reshape(1, -1, *block).repeat(channels, 0).reshape(pixels, 1, *block)
    over = [extent - (count - 1) * stride - own for extent, count, stride, own in zip(around, grid, strides, reach)]
    y = c.add(
        "ConvTranspose", [places, c.constant(filters, x)], [n, channels, *image], group=channels, strides=strides,
        dilations=dilations, pads=pads, output_padding=over,
    )  # fmt: skip
    c.finish(y)
    return None


def _side_by_side(
    c: Composition, ends: Sequence[int], places: ir.Value, block: Sequence[int], grid: Sequence[int]
) -> ir.Value:
    """Blocks that touch and do not overlap: their pixels are moved."""
    image, rank = [*ends, *(count * extent for count, extent in zip(grid, block))], len(block)
    if rank == 2 and block[0] == block[1]:
        return c.add("DepthToSpace", [places], image, blocksize=block[0], mode="CRD")
    parted = c.reshape(places, [*ends, *block, *grid])
    order = [each for axis in range(2, 2 + rank) for each in (axis + rank, axis)]
    return c.reshape(c.transpose(parted, [0, 1, *order]), image)


REWRITTEN: Mapping[str, Rewrite] = {"Col2Im": rewrite(_col2im)}
