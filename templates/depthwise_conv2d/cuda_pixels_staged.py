"""The kernel of y and dx whose blocks stage tiles of the source in shared memory: see docs/kernels/depthwise.md.

A block computes the patches of its threads for `strip` tiles, one below the other. While one is multiplied, the next are on
their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d import held, patch_text
from schedsearch.templates.depthwise_conv2d.cuda_pixels import SUM_BYTES, Blocks, Rounds, filter_copies
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, arrays_of, filter_strides
from schedsearch.templates.depthwise_conv2d.tile_text import correlate_staged
from schedsearch.templates.depthwise_conv2d.tiles import Tile, stage_of
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload


def filter_bytes(blocks: Blocks, rounds: Rounds, direct: bool) -> int:
    """Bytes of shared memory in front of the tiles."""
    return 0 if direct else -(-rounds.shared_bytes(blocks.block_channels) // VECTOR_BYTES) * VECTOR_BYTES


def build_staged_kernel(
    workload: Workload[DepthwiseConv2dParams], blocks: Blocks, rounds: Rounds, epilogue: Epilogue | None, buffers: int,
    direct: bool
) -> Callable[..., None]:  # fmt: skip
    """The kernel (source, weight, before, target, *epilogue operands) of `cuda_pixels.build_kernel`, with `buffers` tiles
    staged at once. The multiplier is 1, and there is one round."""
    p, patch, strip = workload.params, blocks.patch, blocks.strip
    source_name, target_name, _ = arrays_of(workload)
    source_strides, target_strides = strides_of(workload, source_name), strides_of(workload, target_name)
    out, element, out_element = workload.output.dtype, dtype_of(p.dtype).nbytes, dtype_of(workload.output.dtype).nbytes
    source_image, target_image = source_strides["N"].outer * element, target_strides["N"].outer
    target_row, target_column = patch.target
    channels, vector, block_channels, threads = blocks.channels, patch.vector, blocks.block_channels, blocks.threads
    tile_h, tile_w, down, across, sums_count = patch.tile_h, patch.tile_w, blocks.down, blocks.across, patch.sums
    rows, columns = patch.rows, patch.columns
    row_targets, column_targets = rows.targets, columns.targets
    row_up, row_down, column_up, column_down = rows.up, rows.down, columns.up, columns.down
    tile, tiles_at = Tile.of_sources(blocks), filter_bytes(blocks, rounds, direct)
    (above, left), buffer_bytes, own_of = tile.first, tile.bytes, tile.own()
    stage = stage_of(tile, rows.sources, columns.sources, channels, source_strides, threads)
    place, thread_place = blocks.place(), blocks.thread_place()
    copy_filters = filter_copies(workload, blocks, rounds, lambda operands: ())
    steps = filter_strides(workload)
    filter_steps = (steps["O"].outer, steps["H"].outer, steps["W"].outer)
    of_filter = steps["O"].outer * element
    load_filters, filter_words = held.load_filters(patch, filter_steps), held.filter_words(patch, filter_steps)
    load_operands, operand_words = held.load_operands(patch, epilogue), held.held_operands(patch, epilogue)
    holds, array_of_operands = operand_words > 0, max(operand_words, 1)  # an array has a constant size, not 0
    correlate = correlate_staged(patch, tile, rounds.pitch(block_channels), filter_steps if direct else None)
    finish = patch_text.finish(patch, epilogue, out, p.accumulate)
    wait = ptx.cp_async_wait(buffers - 1)

    def kernel(source: Any, weight: Any, before: Any, target: Any, *operands: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        channel_block, column_block, row_block, image = place(u32(cuda.blockIdx.x))
        lane, own_column, own_row = thread_place(thread)
        sums = cuda.local.array(sums_count, f32)
        taken = cuda.local.array(array_of_operands, u32)
        first = i32(channel_block * block_channels)
        k = i32(first + lane * vector)
        block_column = i32(column_block * (across * tile_w))
        column = i32(block_column + own_column * tile_w)
        has_work = (k < channels) & (column < column_targets)

        # ---- load the filters, and what the epilogue reads for their channels
        if holds and has_work:
            load_operands(taken, k, *operands)
        if direct:
            own_filters = cuda.local.array(filter_words, u32)
            if has_work:
                load_filters(own_filters, u64(weight + u64(i64(k) * of_filter)))
        else:
            copy_filters(shared, weight, thread, first, operands)
        ptx.wait_for_predecessor()

        # ---- multiply and store, tile by tile
        tiles = u32(shared + tiles_at)
        own = i32(own_of(own_row, own_column) + lane * (vector * element))
        at, plane = u64(source + u64(i64(image) * source_image)), i64(i64(image) * target_image + k)
        from_column = i32(block_column // column_down * column_up + left)

        def load(step: Any, to: Any) -> None:
            row = i32((row_block * strip + step) * (down * tile_h))
            if (step < strip) & (row < row_targets):
                stage(to, at, i32(row // row_down * row_up + above), from_column, first, thread)
            ptx.cp_async_commit()

        for ahead in range(buffers - 1):
            load(i32(ahead), u32(tiles + ahead * buffer_bytes))
        here, there = i32(0), i32(buffers - 1)
        for step in range(i32(strip)):
            load(i32(step + buffers - 1), u32(tiles + there * buffer_bytes))
            wait()
            cuda.syncthreads()
            row = i32(((row_block * strip + step) * down + own_row) * tile_h)
            if has_work & (row < row_targets):
                for i in range(sums_count):
                    sums[i] = f32(0)
                own_source = u32(tiles + here * buffer_bytes + own)
                if direct:
                    correlate(sums, own_filters, own_source)
                else:
                    correlate(sums, own_source, u32(shared + u32(lane * vector) * SUM_BYTES))
                place_in_y = i64(plane + i64(row) * target_row + i64(column) * target_column)
                to, added = u64(target + u64(plane * out_element)), u64(before + u64(plane * out_element))
                if holds:
                    finish(sums, taken, to, added, row, column, k, place_in_y, *operands)
                else:
                    finish(sums, to, added, row, column, k, place_in_y, *operands)
            if strip > 1:
                cuda.syncthreads()
            here = i32(here + 1 if here + 1 < buffers else 0)
            there = i32(there + 1 if there + 1 < buffers else 0)

    return kernel
