"""The kernel of dw whose blocks stage tiles of x and dy in shared memory: see docs/kernels/depthwise.md.

The threads of a block multiply the patches of one part of the images, while the tiles of the next parts are on their way.
Their sums come together as in `cuda_weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d.cuda_pixels import Blocks
from schedsearch.templates.depthwise_conv2d.cuda_weight import Reduction, block_sums
from schedsearch.templates.depthwise_conv2d.patches import arrays_of
from schedsearch.templates.depthwise_conv2d.tile_text import add_staged_products
from schedsearch.templates.depthwise_conv2d.tiles import Tile, stage_of
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.workload import Workload


def buffer_bytes(blocks: Blocks) -> int:
    """Bytes of a buffer: a tile of x and one of dy."""
    return Tile.of_sources(blocks).bytes + Tile.of_targets(blocks).bytes


def build_staged_kernel(
    workload: Workload[DepthwiseConv2dParams], reduction: Reduction, buffers: int
) -> Callable[..., None]:
    """The kernel (x, dy, before, sums) of `cuda_weight.build_kernel`, with `buffers` parts of the images staged at once."""
    blocks, patch = reduction.blocks, reduction.blocks.patch
    strides_x, strides_dy = (strides_of(workload, name) for name in arrays_of(workload)[:2])
    element = dtype_of(workload.params.dtype).nbytes
    x_image, dy_image = strides_x["N"].outer * element, strides_dy["N"].outer * element
    channels, block_channels, channel_blocks = blocks.channels, blocks.block_channels, blocks.channel_blocks
    tile_h, tile_w, down, across, threads = patch.tile_h, patch.tile_w, blocks.down, blocks.across, blocks.threads
    rows, columns, vector_bytes = patch.rows, patch.columns, patch.vector * element
    row_targets, column_targets, row_up, column_up = rows.targets, columns.targets, rows.up, columns.up
    tap_h, tap_w, rounds_across = patch.tap_h, patch.tap_w, reduction.rounds.columns
    row_step, column_step = rows.tap_step, columns.tap_step
    rounds, splits = reduction.rounds.rows * rounds_across, reduction.splits
    units, units_of_a_split = reduction.units, -(-reduction.units // splits)
    column_blocks, row_blocks = blocks.column_blocks, blocks.row_blocks
    of_x, of_dy = Tile.of_sources(blocks), Tile.of_targets(blocks)
    above, left = of_x.first
    dy_offset, of_buffer = of_x.bytes, buffer_bytes(blocks)
    stage_x = stage_of(of_x, rows.sources, columns.sources, channels, strides_x, threads)
    stage_dy = stage_of(of_dy, rows.targets, columns.targets, channels, strides_dy, threads)
    own_x, own_dy, thread_place, sums_count = of_x.own(), of_dy.own(), blocks.thread_place(), reduction.thread_sums
    add_products, add_up = add_staged_products(patch, of_x, of_dy), block_sums(workload, reduction)
    wait = ptx.cp_async_wait(buffers - 1)

    def place_of(unit: Any) -> Any:
        """unit -> (image, first row, first column) of the block's targets."""
        bands = u32(u32(unit) // u32(column_blocks))
        image = u32(bands // u32(row_blocks))
        row = i32(i32(bands - image * u32(row_blocks)) * (down * tile_h))
        return i32(image), row, i32(i32(unit - i32(bands) * column_blocks) * (across * tile_w))

    def kernel(x: Any, dy: Any, before: Any, out: Any) -> None:
        shared, thread, block = shared_base(), u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        rest = u32(block // u32(channel_blocks))
        first = i32(i32(block - rest * channel_blocks) * block_channels)
        split = i32(rest // u32(rounds))
        one_round = i32(rest - u32(split) * rounds)
        first_row = i32(one_round // rounds_across * tap_h)
        first_column = i32(one_round % rounds_across * tap_w)
        lane, own_column, own_row = thread_place(thread)
        own_source = i32(own_x(own_row, own_column) + lane * vector_bytes)
        own_target = i32(own_dy(own_row, own_column) + lane * vector_bytes)
        sums = cuda.local.array(sums_count, f32)
        for i in range(sums_count):
            sums[i] = f32(0)

        def load(unit: Any, stop: Any, to: Any) -> None:
            if unit < stop:
                image, row, column = place_of(unit)
                x_row = i32(row * row_up + first_row * row_step + above)
                x_column = i32(column * column_up + first_column * column_step + left)
                stage_x(to, u64(x + u64(i64(image) * x_image)), x_row, x_column, first, thread)
                stage_dy(u32(to + dy_offset), u64(dy + u64(i64(image) * dy_image)), row, column, first, thread)
            ptx.cp_async_commit()

        unit = i32(split * units_of_a_split)
        stop = i32(min(i32(unit + units_of_a_split), i32(units)))
        for ahead in range(buffers - 1):
            load(i32(unit + ahead), stop, u32(shared + ahead * of_buffer))
        here, there = i32(0), i32(buffers - 1)
        while unit < stop:
            load(i32(unit + buffers - 1), stop, u32(shared + there * of_buffer))
            wait()
            cuda.syncthreads()
            _, row, column = place_of(unit)
            row, column = i32(row + own_row * tile_h), i32(column + own_column * tile_w)
            if (row < row_targets) & (column < column_targets):
                tiles = u32(shared + here * of_buffer)
                add_products(sums, u32(tiles + own_source), u32(tiles + dy_offset + own_target), row, column)
            cuda.syncthreads()
            here = i32(here + 1 if here + 1 < buffers else 0)
            there = i32(there + 1 if there + 1 < buffers else 0)
            unit = i32(unit + 1)
        add_up(sums, shared, thread, first, first_row, first_column, split, before, out)

    return kernel
