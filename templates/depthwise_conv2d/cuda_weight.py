"""The kernels of dw: blocks add up the products of their part of the images, then their results are added up.

A block has the channels and threads of `cuda_pixels.Blocks`. Its threads walk over patches of dy and keep a sum for each tap
and channel in registers. At the end the block adds up the sums of its threads in shared memory, in a fixed order. Blocks
that share channels (splits) leave their results in a workspace, which a second kernel adds up in order, or add them with
atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d import patch_text
from schedsearch.templates.depthwise_conv2d.cuda_pixels import SUM_BYTES, Blocks, Rounds
from schedsearch.templates.depthwise_conv2d.patch_text import SUMMED_AT_ONCE
from schedsearch.templates.depthwise_conv2d.patches import arrays_of, filter_strides
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.workload import Workload

REDUCE_THREADS = 256


@dataclass(frozen=True)
class Reduction:
    """How the sums of threads and blocks come together.

    Attributes:
        blocks: threads and channels of a block.
        rounds: of taps, each with blocks of its own.
        splits: blocks that share channels and taps; each has a part of the images.
        atomic: they add to one result; otherwise each has its own in the workspace.
    """

    blocks: Blocks
    rounds: Rounds
    splits: int
    atomic: bool

    @property
    def thread_sums(self) -> int:
        """Sums of a thread."""
        patch = self.blocks.patch
        return patch.tap_h * patch.tap_w * patch.vector

    @property
    def block_sums(self) -> int:
        """Sums of a block: those of each lane."""
        return self.thread_sums * self.blocks.lanes

    @property
    def parts(self) -> int:
        """Threads that share one sum of a block at first."""
        return max(1, min(self.blocks.threads // self.block_sums, self.blocks.across * self.blocks.down))

    @property
    def shared_bytes(self) -> int:
        return (self.thread_sums * self.blocks.threads + self.block_sums * self.parts) * SUM_BYTES

    @property
    def units(self) -> int:
        """Parts of the images that the threads of a block cover at once."""
        blocks = self.blocks
        return blocks.images * blocks.row_blocks * blocks.column_blocks

    @property
    def filter_elements(self) -> int:
        """Elements of dw."""
        patch = self.blocks.patch
        return patch.rows.taps * patch.columns.taps * self.blocks.channels

    @property
    def count(self) -> int:
        return self.blocks.channel_blocks * self.rounds.rows * self.rounds.columns * self.splits

    @property
    def reduce_parts(self) -> int:
        """Threads of the second kernel that share an element."""
        return max(n for n in (1, 2, 4, 8, 16, 32) if n == 1 or (n * 4 <= self.splits and not self.atomic))

    @property
    def reduce_blocks(self) -> int:
        return -(-self.filter_elements // (REDUCE_THREADS // self.reduce_parts))


def build_kernel(workload: Workload[DepthwiseConv2dParams], reduction: Reduction) -> Callable[..., None]:
    """The kernel (x, dy, before, sums): it writes dw if there is one split, else the workspace or what atomics add to."""
    blocks, patch = reduction.blocks, reduction.blocks.patch
    source_strides, target_strides = (strides_of(workload, name) for name in arrays_of(workload)[:2])
    element = dtype_of(workload.params.dtype).nbytes
    source_image, source_channel = source_strides["N"].outer, source_strides["C"].outer
    target_image, target_channel = target_strides["N"].outer, target_strides["C"].outer
    channels, multiplier, vector, block_channels = (
        blocks.channels,
        workload.params.multiplier,
        patch.vector,
        blocks.block_channels,
    )
    tile_h, tile_w, down, across = patch.tile_h, patch.tile_w, blocks.down, blocks.across
    row_targets, column_targets = patch.rows.targets, patch.columns.targets
    row_up, column_up = patch.rows.up, patch.columns.up
    tap_h, tap_w, rounds_across = patch.tap_h, patch.tap_w, reduction.rounds.columns
    row_step, column_step = patch.rows.tap_step, patch.columns.tap_step
    rounds, splits, channel_blocks = reduction.rounds.rows * rounds_across, reduction.splits, blocks.channel_blocks
    units, units_of_a_split = reduction.units, -(-reduction.units // splits)
    column_blocks, row_blocks = blocks.column_blocks, blocks.row_blocks
    sums_count = reduction.thread_sums
    thread_place = blocks.thread_place()
    add_products = patch_text.add_products(patch)
    add_up = block_sums(workload, reduction)

    def kernel(x: Any, dy: Any, before: Any, out: Any) -> None:
        shared, thread, block = shared_base(), u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        rest = u32(block // u32(channel_blocks))
        channel_block = i32(block - rest * channel_blocks)
        split = i32(rest // u32(rounds))
        one_round = i32(rest - u32(split) * rounds)
        first_row = i32(one_round // rounds_across * tap_h)
        first_column = i32(one_round % rounds_across * tap_w)
        lane, own_column, own_row = thread_place(thread)
        k = i32(channel_block * block_channels + lane * vector)
        sums = cuda.local.array(sums_count, f32)
        for i in range(sums_count):
            sums[i] = f32(0)
        if k < channels:
            first_unit = i32(split * units_of_a_split)
            for unit in range(first_unit, i32(min(first_unit + units_of_a_split, units))):
                bands = u32(u32(unit) // u32(column_blocks))
                image = u32(bands // u32(row_blocks))
                beside = i32(unit - i32(bands) * column_blocks)
                column = i32((beside * across + own_column) * tile_w)
                band = i32(bands - image * u32(row_blocks))
                row = i32((band * down + own_row) * tile_h)
                if (row < row_targets) & (column < column_targets):
                    of_x = i64(i64(image) * source_image + i64(k // multiplier) * source_channel)
                    of_dy = i64(i64(image) * target_image + i64(k) * target_channel)
                    add_products(
                        sums,
                        u64(x + u64(of_x * element)),
                        u64(dy + u64(of_dy * element)),
                        i32(row * row_up + first_row * row_step),
                        i32(column * column_up + first_column * column_step),
                        row,
                        column,
                    )
        add_up(sums, shared, thread, i32(channel_block * block_channels), first_row, first_column, split, before, out)

    return kernel


def write_sum(workload: Workload[DepthwiseConv2dParams], reduction: Reduction) -> Callable[..., None]:
    """`write(channel, tap's row and column, total, split, before, out)`: a sum of a block goes to dw if there is one split,
    else to the workspace or to what atomics add to."""
    p = workload.params
    channels, taps_w = reduction.blocks.channels, reduction.blocks.patch.columns.taps
    elements, alone, atomic = reduction.filter_elements, reduction.splits == 1, reduction.atomic
    strides, element = filter_strides(workload), dtype_of(p.dtype).nbytes
    of_filter, of_row, of_column = (strides[axis].outer for axis in "OHW")
    to_filter = alone or (atomic and p.dtype == "float32")  # the order of dw; that of the workspace is (tap, channel)
    write = patch_text.write_gradient(p.dtype, p.accumulate)
    write_part, add_to_global = patch_text.write_gradient("float32", False), patch_text.add_to_global()

    def write_one(k: Any, row: Any, column: Any, total: Any, split: Any, before: Any, out: Any) -> None:
        if to_filter:
            offset = i64(i64(k) * of_filter + row * of_row + column * of_column)
        else:
            offset = i64(i64(row * taps_w + column) * channels + k)
        if alone:
            offset = i64(offset * element)
            write(u64(out + u64(offset)), u64(before + u64(offset)), total)
        elif atomic:
            add_to_global(u64(out + u64(offset * SUM_BYTES)), total)
        else:
            at_part = i64(i64(split) * elements + offset)
            write_part(u64(out + u64(at_part * SUM_BYTES)), u64(0), total)

    return write_one


def block_sums(workload: Workload[DepthwiseConv2dParams], reduction: Reduction) -> Callable[..., None]:
    """`add_up(sums, shared, thread, first channel, first tap's row and column, split, before, out)`.

    Shared memory has a row for each sum of a thread, with the threads side by side, then the sums of parts of the threads.
    """
    blocks, patch, parts = reduction.blocks, reduction.blocks.patch, reduction.parts
    threads, lanes, pixels = blocks.threads, blocks.lanes, blocks.across * blocks.down
    lane_step, pixel_step = (1, lanes) if patch.channels_last else (pixels, 1)
    sums_count, count, vector, channels = reduction.thread_sums, reduction.block_sums, patch.vector, blocks.channels
    tap_w, taps_h, taps_w = patch.tap_w, patch.rows.taps, patch.columns.taps
    second = sums_count * threads * SUM_BYTES
    store_sums = patch_text.store_sums(sums_count, threads * SUM_BYTES)
    store_one = patch_text.store_sums(1, SUM_BYTES)
    write = write_sum(workload, reduction)

    part_step = parts * pixel_step * SUM_BYTES
    rounds, rest = divmod(pixels // parts, SUMMED_AT_ONCE)
    add_round, add_rest = (patch_text.add_shared(pixels, part_step) for pixels in (SUMMED_AT_ONCE, rest))
    left_over, summed = pixels % parts, pixels // parts * parts

    def finish(
        place: Any, total: Any, first: Any, first_row: Any, first_column: Any, split: Any, before: Any, out: Any
    ) -> None:
        own = i32(place // lanes)
        k = i32(first + place % lanes * vector + own % vector)
        tap = i32(own // vector)
        row, column = i32(first_row + tap // tap_w), i32(first_column + tap % tap_w)
        if (k < channels) & (row < taps_h) & (column < taps_w):
            write(k, row, column, total, split, before, out)

    def add_up(
        sums: Any, shared: Any, thread: Any, first: Any, first_row: Any, first_column: Any, split: Any, before: Any, out: Any
    ) -> None:
        one = cuda.local.array(1, f32)
        store_sums(sums, u32(shared + thread * SUM_BYTES))
        cuda.syncthreads()
        for number in range(i32(thread), i32(count * parts), i32(threads)):
            part = i32(number // count)
            place = i32(number - part * count)
            row = u32(shared + place // lanes * (threads * SUM_BYTES) + place % lanes * (lane_step * SUM_BYTES))
            own = u32(row + part * (pixel_step * SUM_BYTES))
            one[0] = f32(0)
            for step in range(i32(rounds)):
                one[0] = add_round(u32(own + step * (SUMMED_AT_ONCE * part_step)), one[0])
            one[0] = add_rest(u32(own + rounds * (SUMMED_AT_ONCE * part_step)), one[0])
            if part < left_over:
                one[0] = f32(one[0] + ptx.load_shared_f32(u32(row + (summed + part) * (pixel_step * SUM_BYTES))))
            if parts == 1:
                finish(place, one[0], first, first_row, first_column, split, before, out)
            else:
                store_one(one, u32(shared + second + number * SUM_BYTES))
        if parts > 1:
            cuda.syncthreads()
            for place in range(i32(thread), i32(count), i32(threads)):
                total = f32(0)
                for part in range(i32(parts)):
                    at = u32(shared + second + (part * count + place) * SUM_BYTES)
                    total = f32(total + ptx.load_shared_f32(at))
                finish(place, total, first, first_row, first_column, split, before, out)

    return add_up


def build_reduce(workload: Workload[DepthwiseConv2dParams], reduction: Reduction) -> Callable[..., None]:
    """The kernel (parts, before, dw) that adds up the splits of the workspace, or converts what atomics added up."""
    p = workload.params
    splits = 1 if reduction.atomic else reduction.splits
    elements, parts = reduction.filter_elements, reduction.reduce_parts
    own_elements = REDUCE_THREADS // parts
    channels, taps_w = reduction.blocks.channels, reduction.blocks.patch.columns.taps
    strides, element = filter_strides(workload), dtype_of(p.dtype).nbytes
    of_filter, of_row, of_column = (strides[axis].outer for axis in "OHW")
    step = parts * elements * SUM_BYTES
    add_strided = patch_text.add_strided(step)
    store_one = patch_text.store_sums(1, SUM_BYTES)
    write = patch_text.write_gradient(p.dtype, p.accumulate)

    def reduce(sums: Any, before: Any, dw: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        own, part = u32(thread % u32(own_elements)), i32(thread // u32(own_elements))
        number = i64(i64(cuda.blockIdx.x) * own_elements + own)
        one = cuda.local.array(1, f32)
        one[0] = f32(0)
        if (number < elements) & (part < parts):
            at = u64(sums + u64((i64(part) * elements + number) * SUM_BYTES))
            left = i32((splits - part + parts - 1) // parts)
            for done in range(i32(0), left, i32(SUMMED_AT_ONCE)):
                one[0] = add_strided(u64(at + u64(done) * step), i32(left - done), one[0])
        store_one(one, u32(shared + thread * SUM_BYTES))
        cuda.syncthreads()
        if (part == 0) & (number < elements):
            total = f32(0)
            for other in range(i32(parts)):
                at_part = u32(shared + (other * own_elements + own) * SUM_BYTES)
                total = f32(total + ptx.load_shared_f32(at_part))
            tap, k = i64(number // channels), i64(number % channels)
            offset = i64((k * of_filter + tap // taps_w * of_row + tap % taps_w * of_column) * element)
            write(u64(dw + u64(offset)), u64(before + u64(offset)), total)

    return reduce


def build_start(workload: Workload[DepthwiseConv2dParams], count: int) -> Callable[..., None]:
    """The kernel (before, sums) that writes what atomics add to: `count` zeros, or the float32 gradient before."""
    starts_before = workload.params.accumulate and workload.params.dtype == "float32"
    write = patch_text.write_gradient("float32", starts_before)

    def start(before: Any, sums: Any) -> None:
        number = i64(i64(cuda.blockIdx.x) * REDUCE_THREADS + cuda.threadIdx.x)
        if number < count:
            at = u64(number * SUM_BYTES)
            write(u64(sums + at), u64(before + at), f32(0))

    return start
