"""Tile schedulers: they choose the next tile of a block and give its position.

A kernel captures the functions here, and they become part of it. Tiles are numbered from 0. Divisions are unsigned and have
32 bits, because a 64-bit division is a call, and calls make ptxas serialise wgmma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.templates.parts import ptx


def persistent(blocks: int) -> Callable[[], Any]:
    """(first tile, distance to the next one) of a block, if groups of `blocks` neighbouring blocks share a number."""

    def own_tiles() -> Any:
        first = types.int32(types.uint32(cuda.blockIdx.x) // types.uint32(blocks))
        step = types.int32(types.uint32(cuda.gridDim.x) // types.uint32(blocks))
        return first, step

    return own_tiles


def banded(rows: int, columns: int, height: int) -> Callable[[Any], Any]:
    """tile -> (row, column): bands of `height` rows one after the other, each column by column.

    Tiles that run at the same time then share rows and columns of the operands in L2.
    """
    band_tiles = height * columns

    uneven = rows % height != 0

    def place(tile: Any) -> Any:
        tile = types.uint32(tile)
        band = types.uint32(tile // types.uint32(band_tiles))
        within = types.uint32(tile - band * types.uint32(band_tiles))
        own_height = types.uint32(height)
        if uneven:
            own_height = types.uint32(min(height, rows - band * height))
        column = ptx.divide_u32(within, own_height)
        row = types.uint32(band * height + within - column * own_height)
        return row, column

    return place


def rectangles(rows: int, columns: int, tile_h: int, tile_w: int) -> Callable[[Any], Any]:
    """tile -> (image, first row, first column) for images of `rows` x `columns` tiles; along a row first."""

    def origin(tile: Any) -> Any:
        tile = types.uint32(tile)
        rest = types.uint32(tile // types.uint32(columns))
        column = types.int32((tile - rest * types.uint32(columns)) * tile_w)
        image = types.uint32(rest // types.uint32(rows))
        row = types.int32((rest - image * types.uint32(rows)) * tile_h)
        return types.int32(image), row, column

    return origin
