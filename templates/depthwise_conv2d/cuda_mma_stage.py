"""How planes of channels get to shared memory, and results back to NHWC: for the kernels on tensor cores.

In NCHW the planes of a tile are copied as they are. In NHWC the block transposes: it loads two neighbouring pixels at a time
and writes a word to the plane of each channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numba import cuda

from schedsearch.templates.depthwise_conv2d import cuda_mma_text
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import (
    ELEMENT_BYTES,
    STRIP_COLUMNS,
    WORD_BYTES,
    StagedPlanes,
    StripBlocks,
)
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import AxisStrides
from schedsearch.templates.parts.casts import i32, i64, u32, u64


def stage_of(
    blocks: StripBlocks, planes: StagedPlanes, strides: Mapping[str, AxisStrides], waits: bool = True
) -> Callable[..., None]:
    """`stage(shared, array, tile, channel, thread)`: brings the planes of a tile to shared memory, zeros outside of them.

    Args:
        strides: of the array.
        waits: for the copies of the thread, also those that it began before.

    The operation takes the shared address of the first plane, the array's, the tile's first target (image, row, column) and
    the block's first channel.
    """
    if blocks.channels_last:
        return _stage_pixels(blocks, planes, strides)
    return _stage_planes(blocks, planes, strides, waits)


def _stage_planes(
    blocks: StripBlocks, planes: StagedPlanes, strides: Mapping[str, AxisStrides], waits: bool
) -> Callable[..., None]:  # fmt: skip
    of_image, of_channel, of_row = (strides[axis].outer for axis in "NCH")
    (rows, columns), (above, left), (staged_rows, staged_columns) = planes.plane, planes.first, planes.extents
    channels, images, together, threads = blocks.channels, blocks.images, blocks.together, blocks.threads
    of_copy, nbytes = planes.of_copy, planes.of_copy * ELEMENT_BYTES
    pieces = staged_columns // of_copy
    count = blocks.block_channels * together * staged_rows * pieces
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in planes.pitches), planes.plane_place()
    copy, wait_all = ptx.cp_async(nbytes), ptx.cp_async_wait(0)

    def stage(shared: Any, array: Any, tile: Any, channel: Any, thread: Any) -> None:
        for number in range(i32(thread), i32(count), i32(threads)):
            line = u32(u32(number) // u32(pieces))
            piece = i32(number - line * pieces)
            plane = u32(line // u32(staged_rows))
            down = i32(line - plane * staged_rows)
            own = i32(u32(plane // u32(together)))
            along = i32(plane - own * together)
            n, h, w = i32(tile[0] + along), i32(tile[1] + above + down), i32(tile[2] + left + piece * of_copy)
            c = i32(channel + own)
            inside = (u32(h) < u32(rows)) & (u32(w) < u32(columns)) & (n < images) & (c < channels)
            offset = i64(i64(n) * of_image + i64(c) * of_channel + i64(h) * of_row + i64(w))
            staged = u32(shared + plane_of(own) + along * image_bytes + down * row_bytes + piece * nbytes)
            copy(staged, u64(array + u64(offset * ELEMENT_BYTES)), i32(nbytes if inside else 0))
        if waits:
            ptx.cp_async_commit()
            wait_all()

    return stage


def _pixel_pairs(parts: int, rows: int, pairs: int) -> Callable[[Any], Any]:
    """item -> (access to the block's channels, image, row, pair of columns) within a tile of so many rows and pairs."""

    def place_of(item: Any) -> Any:
        rest = u32(item // u32(parts))
        line = u32(rest // u32(pairs))
        image = u32(line // u32(rows))
        return i32(item - rest * parts), i32(image), i32(line - image * rows), i32(rest - line * pairs)

    return place_of


def _stage_pixels(
    blocks: StripBlocks, planes: StagedPlanes, strides: Mapping[str, AxisStrides]
) -> Callable[..., None]:  # fmt: skip
    """Two pairs of pixels of a thread are in flight at once."""
    of_image, of_row, of_column = (strides[axis].outer for axis in "NHW")
    (rows, columns), (above, left), (staged_rows, staged_columns) = planes.plane, planes.first, planes.extents
    channels, images, threads, of_copy = blocks.channels, blocks.images, blocks.threads, planes.of_copy
    parts, pairs = blocks.block_channels // of_copy, staged_columns // 2
    items, words = parts * blocks.together * staged_rows * pairs, cuda_mma_text.pixel_words(planes)
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in planes.pitches), planes.plane_place()
    place = _pixel_pairs(parts, staged_rows, pairs)
    load, spread = cuda_mma_text.load_pixels(planes, of_column * ELEMENT_BYTES), cuda_mma_text.spread_pixels(planes)

    def load_item(pixels: Any, item: Any, array: Any, tile: Any, channel: Any) -> Any:
        part, along, down, pair = place(u32(item))
        n, h, w = i32(tile[0] + along), i32(tile[1] + above + down), i32(tile[2] + left + pair * 2)
        c = i32(channel + part * of_copy)
        inside = (item < items) & (u32(h) < u32(rows)) & (n < images) & (c < channels)
        offset = i64(i64(n) * of_image + i64(h) * of_row + i64(w) * of_column + i64(c))
        address = u64(array + u64(offset * ELEMENT_BYTES))
        load(pixels, address, i32(inside & (u32(w) < u32(columns))), i32(inside & (u32(w + 1) < u32(columns))))
        return u32(plane_of(part * of_copy) + along * image_bytes + down * row_bytes + pair * WORD_BYTES)

    def stage(shared: Any, array: Any, tile: Any, channel: Any, thread: Any) -> None:
        one = cuda.local.array(words, u32)
        other = cuda.local.array(words, u32)
        for item in range(i32(thread), i32(items), i32(2 * threads)):
            second = i32(item + threads)
            at = load_item(one, i32(item), array, tile, channel)
            second_at = load_item(other, second, array, tile, channel)
            spread(one, u32(shared + at))
            if second < items:
                spread(other, u32(shared + second_at))

    return stage


def copy_pixels(blocks: StripBlocks, strides: Mapping[str, AxisStrides]) -> Callable[..., None]:
    """`copy_out(shared, array, tile, channel, thread)`: the results of a tile of NHWC, which are where its sources were."""
    planes = blocks.sources
    of_image, of_row, of_column = (strides[axis].outer for axis in "NHW")
    rows, columns, channels, images = blocks.rows.targets, blocks.columns.targets, blocks.channels, blocks.images
    of_copy, threads, parts = planes.of_copy, blocks.threads, blocks.block_channels // planes.of_copy
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in planes.pitches), planes.plane_place()
    tile_rows, pairs = blocks.height * blocks.down, STRIP_COLUMNS * blocks.across // 2
    items, place = parts * blocks.together * tile_rows * pairs, _pixel_pairs(parts, tile_rows, pairs)
    gather = cuda_mma_text.gather_pixels(planes, of_column * ELEMENT_BYTES)

    def copy_out(shared: Any, array: Any, tile: Any, channel: Any, thread: Any) -> None:
        for item in range(i32(thread), i32(items), i32(threads)):
            part, along, down, pair = place(u32(item))
            n, h, w, c = i32(tile[0] + along), i32(tile[1] + down), i32(tile[2] + pair * 2), i32(channel + part * of_copy)
            inside = (h < rows) & (n < images) & (c < channels)
            offset = i64(i64(n) * of_image + i64(h) * of_row + i64(w) * of_column + i64(c))
            staged = u32(shared + plane_of(part * of_copy) + along * image_bytes + down * row_bytes + pair * WORD_BYTES)
            address = u64(array + u64(offset * ELEMENT_BYTES))
            gather(address, staged, i32(inside & (w < columns)), i32(inside & (w + 1 < columns)))

    return copy_out
