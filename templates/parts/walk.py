"""Tile schedulers: they choose the next tile of a block and give its position.

A kernel captures the functions here, and they become part of it. Tiles are numbered from 0. Divisions are unsigned and have
32 bits, because a 64-bit division is a call, and calls make ptxas serialise wgmma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, u32


def persistent(blocks: int) -> Callable[[], Any]:
    """(first tile, distance to the next one) of a block, if groups of `blocks` neighbouring blocks share a number."""

    def own_tiles() -> Any:
        first = i32(u32(cuda.blockIdx.x) // u32(blocks))
        step = i32(u32(cuda.gridDim.x) // u32(blocks))
        return first, step

    return own_tiles


def banded(rows: int, columns: int, height: int) -> Callable[[Any], Any]:
    """tile -> (row, column): bands of `height` rows one after the other, each column by column.

    Tiles that run at the same time then share rows and columns of the operands in L2.
    """
    band_tiles = height * columns

    uneven = rows % height != 0

    def place(tile: Any) -> Any:
        tile = u32(tile)
        band = u32(tile // u32(band_tiles))
        within = u32(tile - band * u32(band_tiles))
        own_height = u32(height)
        if uneven:
            own_height = u32(min(height, rows - band * height))
        column = ptx.divide_u32(within, own_height)
        row = u32(band * height + within - column * own_height)
        return row, column

    return place


def rectangles(rows: int, columns: int, tile_h: int, tile_w: int) -> Callable[[Any], Any]:
    """tile -> (image, first row, first column) for images of `rows` x `columns` tiles; along a row first."""

    def origin(tile: Any) -> Any:
        tile = u32(tile)
        rest = u32(tile // u32(columns))
        column = i32((tile - rest * u32(columns)) * tile_w)
        image = u32(rest // u32(rows))
        row = i32((rest - image * u32(rows)) * tile_h)
        return i32(image), row, column

    return origin
