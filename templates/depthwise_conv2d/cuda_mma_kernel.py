"""The kernel of `depthwise_conv2d_mma`: stage the sources of a tile, multiply windows by bands, store; tile by tile.

In NCHW the planes of a tile are copied as they are, and threads store their results to global memory. In NHWC the block
transposes: it loads two neighbouring pixels at a time and writes a word to the plane of each channel. Results take the place
of the sources, and go back the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.templates.depthwise_conv2d import cuda_mma_text, held, patch_text
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import (
    ELEMENT_BYTES,
    MATRIX_WORDS,
    STRIP_COLUMNS,
    WORD_BYTES,
    StripBlocks,
)
from schedsearch.templates.depthwise_conv2d.patches import Patch, arrays_of, filter_strides
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload


def patch_of(workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks) -> Patch:
    """What a thread has of the targets of a strip."""
    return Patch.of(workload, blocks.height, 2, blocks.rows.taps, blocks.columns.taps, 1)


def build_kernel(
    workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, epilogue: Epilogue | None
) -> Callable[..., None]:
    """The kernel (source, weight, before, target, *epilogue operands) of y or dx; `before` is dx_before."""
    source_name, target_name, _ = arrays_of(workload)
    weight_strides = filter_strides(workload)
    of_filter, of_tap_row, of_tap_column = (weight_strides[axis].outer for axis in "OHW")
    block_channels, warps, two = blocks.block_channels, blocks.warps, blocks.each == 2
    channels, channel_blocks, strips, slack = blocks.channels, blocks.channel_blocks, blocks.strips, blocks.slack
    tiles, tile_count, (row_words, image_words, _) = blocks.tiles, blocks.tile_count, blocks.pitches
    band_count, channels_last = cuda_mma_text.band_words(blocks), blocks.channels_last
    place, strip_place, plane_of = blocks.place(), blocks.strip_place(), _plane_place(blocks)
    stage = (_stage_pixels if channels_last else _stage_planes)(workload, blocks, source_name)
    copy_out = _copy_pixels(workload, blocks, target_name)
    load_bands = cuda_mma_text.load_bands(blocks, (of_tap_row, of_tap_column))
    patch = patch_of(workload, blocks)
    load_operands, operand_words = held.load_operands(patch, epilogue), held.held_operands(patch, epilogue)
    holds, array_of_operands = operand_words > 0, max(operand_words, 1)  # an array has a constant size, not 0
    multiply = _multiply_channel(workload, blocks, epilogue)

    def load_channel(bands: Any, taken: Any, weight: Any, k: Any, distance: Any, operands: Any) -> None:
        own = i64(k if k < channels else 0)
        load_bands(bands, u64(weight + u64(own * (of_filter * ELEMENT_BYTES))), distance)
        if holds and k < channels:
            load_operands(taken, k, *operands)

    def kernel(source: Any, weight: Any, before: Any, target: Any, *operands: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        part = u32(cuda.blockIdx.x // u32(channel_blocks))
        first = i32(i32(cuda.blockIdx.x - part * u32(channel_blocks)) * block_channels)
        warp, lane = i32(thread // u32(32)), i32(thread % u32(32))
        bands = cuda.local.array(band_count, u32)
        taken = cuda.local.array(array_of_operands, u32)

        # ---- the bands of the warp's channels, and what the epilogue reads for them
        distance = i32(lane % 4 * 2 - lane // 4 - slack)
        load_channel(bands, taken, weight, i32(first + warp), distance, operands)
        if two:
            other_bands = cuda.local.array(band_count, u32)
            other_taken = cuda.local.array(array_of_operands, u32)
            load_channel(other_bands, other_taken, weight, i32(first + warp + warps), distance, operands)
        ptx.wait_for_predecessor()

        # ---- where the window lies that the thread loads, within a plane
        image, row, column = strip_place(u32(lane % 16 if lane % 16 < strips else 0))
        half = i32(lane // 16 * (MATRIX_WORDS * WORD_BYTES))
        window = i32((image * image_words + row * row_words) * WORD_BYTES + column * ELEMENT_BYTES + half)

        # ---- tile by tile
        done = i32(min(i32(tiles), i32(tile_count - i32(part) * tiles)))
        for step in range(done):
            tile = place(u32(i32(part) * tiles + step))
            if step > 0:
                cuda.syncthreads()
            stage(shared, source, tile, first, thread)
            cuda.syncthreads()
            plane = u32(shared + plane_of(warp))
            multiply(bands, taken, plane, window, tile, i32(first + warp), lane, target, before, operands)
            if two:
                plane = u32(shared + plane_of(warp + warps))
                k = i32(first + warp + warps)
                multiply(other_bands, other_taken, plane, window, tile, k, lane, target, before, operands)
            if channels_last:
                cuda.syncthreads()
                copy_out(shared, target, tile, first, thread)

    return kernel


def _multiply_channel(
    workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, epilogue: Epilogue | None
) -> Callable[..., None]:
    """`multiply(bands, taken, plane, window, tile, k, lane, target, before, operands)`: the results of a channel of a tile.

    Results of NHWC go to shared memory, where the strip's sources were, those of NCHW to global memory.
    """
    _, target_name, _ = arrays_of(workload)
    strides, patch = strides_of(workload, target_name), patch_of(workload, blocks)
    of_image, of_channel = strides["N"].outer, strides["C"].outer
    of_row, of_column = patch.target
    channels, images, strips, channels_last = blocks.channels, blocks.images, blocks.strips, blocks.channels_last
    rows, columns, (row_words, image_words, _) = blocks.rows.targets, blocks.columns.targets, blocks.pitches
    sums_count, strip_place = patch.sums, blocks.strip_place()
    multiply_strips = cuda_mma_text.multiply_strips(blocks, workload.params.dtype)
    staged_row = row_words * WORD_BYTES if channels_last else 0
    finish = patch_text.finish(patch, epilogue, workload.output.dtype, workload.params.accumulate, staged_row)
    holds = held.held_operands(patch, epilogue) > 0

    def finish_strip(
        sums: Any, taken: Any, strip: Any, plane: Any, tile: Any, k: Any, pair: Any, target: Any, before: Any, operands: Any
    ) -> None:
        along, down, across = strip_place(u32(strip))
        across = i32(across + pair * 2)
        image, row, column = i32(tile[0] + along), i32(tile[1] + down), i32(tile[2] + across)
        if (strip < strips) & (image < images) & (row < rows) & (column < columns):
            first = i64(i64(image) * of_image + i64(k) * of_channel)
            offset = i64(first + i64(row) * of_row + i64(column) * of_column)
            added = u64(before + u64(first * ELEMENT_BYTES))
            if channels_last:
                to = u32(plane + (along * image_words + down * row_words) * WORD_BYTES + across * ELEMENT_BYTES)
            else:
                to = u64(target + u64(first * ELEMENT_BYTES))
            if holds:
                finish(sums, taken, to, added, row, column, k, offset, *operands)
            else:
                finish(sums, to, added, row, column, k, offset, *operands)

    def multiply(
        bands: Any, taken: Any, plane: Any, window: Any, tile: Any, k: Any, lane: Any, target: Any, before: Any,
        operands: Any
    ) -> None:  # fmt: skip
        upper = cuda.local.array(sums_count, f32)
        lower = cuda.local.array(sums_count, f32)
        multiply_strips(upper, lower, bands, u32(plane + window))
        if channels_last:
            ptx.warp_barrier()  # all lanes have read the plane that now gets the results
        strip, pair = i32(lane // 4), i32(lane % 4)
        if k < channels:
            finish_strip(upper, taken, strip, plane, tile, k, pair, target, before, operands)
            finish_strip(lower, taken, i32(strip + 8), plane, tile, k, pair, target, before, operands)

    return multiply


def _plane_place(blocks: StripBlocks) -> Callable[[Any], Any]:
    """channel of the block -> bytes from the first plane in shared memory to its own."""
    of_group = blocks.of_group
    plane_bytes, group_bytes = blocks.pitches[2] * WORD_BYTES, blocks.group_words * WORD_BYTES

    def place_of(channel: Any) -> Any:
        group = i32(channel // of_group)
        return i32(group * group_bytes + (channel - group * of_group) * plane_bytes)

    return place_of


def _stage_planes(workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, name: str) -> Callable[..., None]:
    """`stage(shared, array, tile, channel, thread)`: copies the planes of a tile of NCHW, zeros outside."""
    strides = strides_of(workload, name)
    of_image, of_channel, of_row = (strides[axis].outer for axis in "NCH")
    rows, columns, channels, images = blocks.rows.sources, blocks.columns.sources, blocks.channels, blocks.images
    above, left, staged_rows, together = blocks.down_reach.first, blocks.origin, blocks.staged_rows, blocks.together
    of_copy, threads = blocks.of_copy, blocks.threads
    pieces, nbytes = blocks.staged_columns // of_copy, of_copy * ELEMENT_BYTES
    count = blocks.block_channels * together * staged_rows * pieces
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in blocks.pitches), _plane_place(blocks)
    copy, wait_all = ptx.cp_async(nbytes), ptx.cp_async_wait(0)

    def stage(shared: Any, array: Any, tile: Any, channel: Any, thread: Any) -> None:
        for number in range(i32(thread), i32(count), i32(threads)):
            line = u32(u32(number) // u32(pieces))
            piece = i32(number - line * pieces)
            plane = u32(line // u32(staged_rows))
            down = i32(line - plane * staged_rows)
            number_of_channel = u32(plane // u32(together))
            along = i32(plane - number_of_channel * together)
            n, h, w = i32(tile[0] + along), i32(tile[1] + above + down), i32(tile[2] + left + piece * of_copy)
            c = i32(channel + i32(number_of_channel))
            inside = (u32(h) < u32(rows)) & (u32(w) < u32(columns)) & (n < images) & (c < channels)
            offset = i64(i64(n) * of_image + i64(c) * of_channel + i64(h) * of_row + i64(w))
            staged = u32(shared + plane_of(i32(number_of_channel)) + along * image_bytes + down * row_bytes + piece * nbytes)
            copy(staged, u64(array + u64(offset * ELEMENT_BYTES)), i32(nbytes if inside else 0))
        ptx.cp_async_commit()
        wait_all()

    return stage


def _pixel_pairs(blocks: StripBlocks, rows: int, pairs: int) -> Callable[[Any], Any]:
    """item -> (access to the block's channels, image, row, pair of columns) within a tile of so many rows and pairs."""
    parts = blocks.block_channels // blocks.of_copy

    def place_of(item: Any) -> Any:
        rest = u32(item // u32(parts))
        line = u32(rest // u32(pairs))
        image = u32(line // u32(rows))
        return i32(item - rest * parts), i32(image), i32(line - image * rows), i32(rest - line * pairs)

    return place_of


def _stage_pixels(workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, name: str) -> Callable[..., None]:
    """The same for NHWC: two pairs of pixels of a thread are in flight at once."""
    strides = strides_of(workload, name)
    of_image, of_row, of_column = (strides[axis].outer for axis in "NHW")
    rows, columns, channels, images = blocks.rows.sources, blocks.columns.sources, blocks.channels, blocks.images
    above, left, of_copy, threads = blocks.down_reach.first, blocks.origin, blocks.of_copy, blocks.threads
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in blocks.pitches), _plane_place(blocks)
    staged_rows, pairs, parts = blocks.staged_rows, blocks.staged_columns // 2, blocks.block_channels // of_copy
    items, words = parts * blocks.together * staged_rows * pairs, cuda_mma_text.pixel_words(blocks)
    place = _pixel_pairs(blocks, staged_rows, pairs)
    load = cuda_mma_text.load_pixels(blocks, of_column * ELEMENT_BYTES)
    spread = cuda_mma_text.spread_pixels(blocks)

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


def _copy_pixels(workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, name: str) -> Callable[..., None]:
    """`copy_out(shared, array, tile, channel, thread)`: the results of a tile of NHWC, from their planes."""
    strides = strides_of(workload, name)
    of_image, of_row, of_column = (strides[axis].outer for axis in "NHW")
    rows, columns, channels, images = blocks.rows.targets, blocks.columns.targets, blocks.channels, blocks.images
    of_copy, threads = blocks.of_copy, blocks.threads
    (row_bytes, image_bytes, _), plane_of = (pitch * WORD_BYTES for pitch in blocks.pitches), _plane_place(blocks)
    tile_rows, pairs, parts = (
        blocks.height * blocks.down,
        STRIP_COLUMNS * blocks.across // 2,
        blocks.block_channels // of_copy,
    )
    items, place = parts * blocks.together * tile_rows * pairs, _pixel_pairs(blocks, tile_rows, pairs)
    gather = cuda_mma_text.gather_pixels(blocks, of_column * ELEMENT_BYTES)

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
