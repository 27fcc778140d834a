"""The kernel of `depthwise_conv2d_mma`: stage the sources of a tile, multiply windows by bands, store; tile by tile.

In NCHW threads store their results to global memory. In NHWC results take the place of the sources in shared memory, and are
transposed on their way back, as the sources were (`cuda_mma_stage`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.templates.depthwise_conv2d import cuda_mma_text, held, patch_text
from schedsearch.templates.depthwise_conv2d.cuda_mma_stage import copy_pixels, stage_of
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import (
    ELEMENT_BYTES,
    MATRIX_WORDS,
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
    tiles, tile_count, (row_words, image_words, _) = blocks.tiles, blocks.tile_count, blocks.sources.pitches
    band_count, channels_last = cuda_mma_text.band_words(blocks), blocks.channels_last
    place, strip_place, plane_of = blocks.place(), blocks.strip_place(), blocks.sources.plane_place()
    stage = stage_of(blocks, blocks.sources, strides_of(workload, source_name))
    copy_out = copy_pixels(blocks, strides_of(workload, target_name))
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
    rows, columns, (row_words, image_words, _) = blocks.rows.targets, blocks.columns.targets, blocks.sources.pitches
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
