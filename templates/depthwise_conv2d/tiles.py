"""Tiles of NHWC images that a block stages in shared memory: the pixels that its threads need together, with its channels.

Pixels lie one after the other, row by row. Pixels outside of the image, and channels behind the last one, are zeros, so that
nothing is tested when a tile is read. The copies are asynchronous: while one tile is multiplied, the next ones are on their
way, however few warps a multiprocessor has room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.templates.depthwise_conv2d.cuda_pixels import Blocks
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import AxisStrides
from schedsearch.templates.parts.casts import i32, i64, u32, u64


@dataclass(frozen=True)
class Tile:
    """What a block stages of one array.

    Attributes:
        first: row and column of its first pixel, relative to the first source (or target) of the block's first patch.
        extents: rows and columns.
        steps: pixels from the patch of a thread to that of the next one, down and across.
        channels: of the block.
        nbytes: of an element.
    """

    first: tuple[int, int]
    extents: tuple[int, int]
    steps: tuple[int, int]
    channels: int
    nbytes: int

    @classmethod
    def of_sources(cls, blocks: Blocks) -> Tile:
        patch = blocks.patch
        axes = (
            (patch.rows, patch.tile_h, blocks.down, patch.row_meetings),
            (patch.columns, patch.tile_w, blocks.across, patch.column_meetings),
        )
        first, extents, steps = [], [], []
        for axis, tile, threads, meetings in axes:
            steps.append(tile * axis.up // axis.down)
            first.append(min(meetings, default=0))
            extents.append(max(meetings, default=0) - first[-1] + 1 + (threads - 1) * steps[-1])
        return cls(_pair(first), _pair(extents), _pair(steps), blocks.block_channels, patch.nbytes)

    @classmethod
    def of_targets(cls, blocks: Blocks) -> Tile:
        steps = blocks.patch.tile_h, blocks.patch.tile_w
        extents = steps[0] * blocks.down, steps[1] * blocks.across
        return cls((0, 0), extents, steps, blocks.block_channels, blocks.patch.nbytes)

    @property
    def pixel_bytes(self) -> int:
        return self.channels * self.nbytes

    @property
    def row_bytes(self) -> int:
        return self.extents[1] * self.pixel_bytes

    @property
    def bytes(self) -> int:
        """In shared memory, with what aligns the tile behind it."""
        return -(-self.extents[0] * self.row_bytes // VECTOR_BYTES) * VECTOR_BYTES

    def offset(self, row: int, column: int) -> int:
        """Bytes from the first pixel that a thread reads to a source (or target) relative to the first of its patch."""
        return (row - self.first[0]) * self.row_bytes + (column - self.first[1]) * self.pixel_bytes

    def own(self) -> Callable[[Any, Any], Any]:
        """`own(down, across)`: bytes to the first pixel that a thread of the block reads."""
        down_bytes, across_bytes = self.steps[0] * self.row_bytes, self.steps[1] * self.pixel_bytes

        def own_bytes(down: Any, across: Any) -> Any:
            return i32(down * down_bytes + across * across_bytes)

        return own_bytes


def copied_bytes(channels: int, block_channels: int, nbytes: int) -> int:
    """Bytes of one copy: they divide the channels of a pixel, and those of a block."""
    return math.gcd(VECTOR_BYTES, channels * nbytes, block_channels * nbytes)


def stage_of(
    tile: Tile, rows: int, columns: int, channels: int, strides: dict[str, AxisStrides], threads: int
) -> Callable[..., None]:
    """`stage(to, image, row, column, channel, thread)`: asynchronous copies of a tile.

    Args:
        rows, columns, channels: of the image, whose array has `strides`.
        threads: of the block.

    The operation takes the shared address, the address of the image, the tile's first pixel, which may be outside of it, and
    the first channel.
    """
    nbytes, across, pixels = tile.nbytes, tile.extents[1], tile.extents[0] * tile.extents[1]
    of_copy, pixel_bytes = copied_bytes(channels, tile.channels, nbytes), tile.pixel_bytes
    parts, copy = pixel_bytes // of_copy, ptx.cp_async(of_copy)  # parts divides the threads, as they have whole vectors
    pixels_at_once, part_channels = threads // parts, of_copy // nbytes
    row_bytes, column_bytes = strides["H"].outer * nbytes, strides["W"].outer * nbytes

    def stage(to: Any, image: Any, first_row: Any, first_column: Any, first_channel: Any, thread: Any) -> None:
        own = u32(thread // u32(parts))
        part = i32(thread - own * parts)
        channel = i32(first_channel + part * part_channels)
        source, staged = u64(image + u64(i64(channel) * nbytes)), u32(to + part * of_copy)
        for pixel in range(i32(own), i32(pixels), i32(pixels_at_once)):
            down = i32(u32(pixel) // u32(across))
            row, column = i32(first_row + down), i32(first_column + i32(pixel - down * across))
            inside = (u32(row) < u32(rows)) & (u32(column) < u32(columns)) & (channel < channels)
            address = u64(source + u64(i64(row) * row_bytes + i64(column) * column_bytes))
            copy(u32(staged + pixel * pixel_bytes), address, i32(of_copy if inside else 0))

    return stage


def _pair(values: list[int]) -> tuple[int, int]:
    one, other = values
    return one, other
