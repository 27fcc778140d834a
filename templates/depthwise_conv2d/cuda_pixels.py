"""The kernels of y and dx: each thread computes patches of one column of the image, one below the other.

A block has `channels` x `columns` x `rows` threads. In NHWC neighbouring threads have neighbouring vectors of channels, in
NCHW neighbouring patches of a row; the windows of neighbours overlap, and L1 serves the overlap. The block first copies its
channels' filters to shared memory as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv2d import held, patch_text
from schedsearch.templates.depthwise_conv2d.patches import Patch, arrays_of, filter_strides
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload

SUM_BYTES = 4
FILTERS_AT_ONCE = 8  # elements of the weight whose loads a thread has in flight when it copies them


def filter_pitch(block_channels: Any, vector: Any) -> Any:
    """Bytes of shared memory from a tap of a block's filters to the next: threads that copy neighbouring taps of a filter
    write to different banks, and a vector of channels stays aligned."""
    return (block_channels + np.minimum(vector, 4)) * SUM_BYTES


@dataclass(frozen=True)
class Blocks:
    """How the blocks of a kernel share the patches of all images.

    Attributes:
        patch: of a thread.
        images, channels: of the targets.
        lanes, across, down: threads of a block along the channels (each with a vector), columns and rows.
        strip: patches that a thread computes, one below the other; those of the block's other rows of threads lie between.
    """

    patch: Patch
    images: int
    channels: int
    lanes: int
    across: int
    down: int
    strip: int

    @property
    def threads(self) -> int:
        return self.lanes * self.across * self.down

    @property
    def block_channels(self) -> int:
        return self.lanes * self.patch.vector

    @property
    def channel_blocks(self) -> int:
        return -(-self.channels // self.block_channels)

    @property
    def column_blocks(self) -> int:
        return -(-self.patch.columns.targets // (self.across * self.patch.tile_w))

    @property
    def row_blocks(self) -> int:
        return -(-self.patch.rows.targets // (self.down * self.strip * self.patch.tile_h))

    @property
    def count(self) -> int:
        return self.channel_blocks * self.column_blocks * self.row_blocks * self.images

    def place(self) -> Callable[[Any], Any]:
        """block -> (block of channels, of columns, of rows, image); channels first."""
        channel_blocks, column_blocks, row_blocks = self.channel_blocks, self.column_blocks, self.row_blocks

        def place_of(block: Any) -> Any:
            pixels = u32(block // u32(channel_blocks))
            rows = u32(pixels // u32(column_blocks))
            image = u32(rows // u32(row_blocks))
            return (
                i32(block - pixels * channel_blocks),
                i32(pixels - rows * column_blocks),
                i32(rows - image * row_blocks),
                i32(image),
            )

        return place_of

    def thread_place(self) -> Callable[[Any], Any]:
        """thread -> (lane, column, row) within the block."""
        lanes, across, down = self.lanes, self.across, self.down

        def channels_first(thread: Any) -> Any:
            rest = u32(thread // u32(lanes))
            row = u32(rest // u32(across))
            return i32(thread - rest * lanes), i32(rest - row * across), i32(row)

        def columns_first(thread: Any) -> Any:
            rest = u32(thread // u32(across))
            lane = u32(rest // u32(down))
            return i32(lane), i32(thread - rest * across), i32(rest - lane * down)

        return channels_first if self.patch.channels_last else columns_first


@dataclass(frozen=True)
class Rounds:
    """The taps of a filter in blocks of `tap_h` x `tap_w`, which a patch unrolls; missing taps are zeros.

    Attributes:
        filters: of one target channel, each with a source channel of its own: the multiplier for dx, otherwise 1.
    """

    patch: Patch
    filters: int

    @property
    def rows(self) -> int:
        return -(-self.patch.rows.taps // self.patch.tap_h)

    @property
    def columns(self) -> int:
        return -(-self.patch.columns.taps // self.patch.tap_w)

    @property
    def taps(self) -> int:
        """Taps of a filter, with those that are missing."""
        return self.rows * self.columns * self.patch.tap_h * self.patch.tap_w

    @property
    def steps(self) -> tuple[int, int]:
        """Sources from one round to the next, down and across."""
        rows, columns = self.patch.rows, self.patch.columns
        return self.patch.tap_h * rows.tap_step // rows.down, self.patch.tap_w * columns.tap_step // columns.down

    def pitch(self, block_channels: int) -> int:
        """Bytes of shared memory from a tap to the next one."""
        return int(filter_pitch(block_channels, self.patch.vector))

    def shared_bytes(self, block_channels: int) -> int:
        return self.filters * self.taps * self.pitch(block_channels)


def build_kernel(
    workload: Workload[DepthwiseConv2dParams], blocks: Blocks, rounds: Rounds, epilogue: Epilogue | None,
    branch: bool, direct: bool
) -> Callable[..., None]:  # fmt: skip
    """The kernel (source, weight, before, target, *epilogue operands) of y or dx.

    `before` is dx_before, which is read if the workload accumulates.

    Args:
        branch: patches inside of the image have code of their own.
        direct: threads read their filters from global memory, not from shared memory. Needs a single round.
    """
    p = workload.params
    patch, strip, down, blocks_across = blocks.patch, blocks.strip, blocks.down, blocks.across
    source_name, target_name, _ = arrays_of(workload)
    source_strides, target_strides = strides_of(workload, source_name), strides_of(workload, target_name)
    out, element, out_element = workload.output.dtype, dtype_of(p.dtype).nbytes, dtype_of(workload.output.dtype).nbytes
    source_image, source_channel = source_strides["N"].outer, source_strides["C"].outer
    target_image, target_channel = target_strides["N"].outer, target_strides["C"].outer
    target_row, target_column = patch.target
    channels, vector, block_channels = blocks.channels, patch.vector, blocks.block_channels
    filters, multiplier = rounds.filters, p.multiplier
    per_source = 1 if filters > 1 else multiplier  # target channels that read the same source channel
    tile_h, tile_w, sums_count = patch.tile_h, patch.tile_w, patch.sums
    row_targets, column_targets = patch.rows.targets, patch.columns.targets
    row_up, row_down, column_up, column_down = patch.rows.up, patch.rows.down, patch.columns.up, patch.columns.down
    (rows_of_taps, columns_of_taps), (next_row, next_column) = (rounds.rows, rounds.columns), rounds.steps
    pitch = rounds.pitch(block_channels)
    round_bytes = patch.tap_h * patch.tap_w * pitch
    place, thread_place, lies_inside = blocks.place(), blocks.thread_place(), _inside(patch)
    zero_points = _zero_points(patch, epilogue)
    copy_filters = filter_copies(workload, blocks, rounds, zero_points)
    of_filter, of_tap_row, of_tap_column = (filter_strides(workload)[axis].outer for axis in "OHW")
    filter_steps = (of_filter, of_tap_row, of_tap_column)
    load_filters, filter_words = held.load_filters(patch, filter_steps), held.filter_words(patch, filter_steps)
    load_operands, operand_words = held.load_operands(patch, epilogue), held.held_operands(patch, epilogue)
    holds, array_of_operands = operand_words > 0, max(operand_words, 1)  # an array has a constant size, not 0
    correlate = patch_text.correlate(patch, pitch, branch, filter_steps if direct else None)
    finish = patch_text.finish(patch, epilogue, out, p.accumulate)

    def kernel(source: Any, weight: Any, before: Any, target: Any, *operands: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        channel_block, column_block, row_block, image = place(u32(cuda.blockIdx.x))
        lane, own_column, own_row = thread_place(thread)
        sums = cuda.local.array(sums_count, f32)
        taken = cuda.local.array(array_of_operands, u32)
        k = i32(channel_block * block_channels + lane * vector)
        column = i32((column_block * blocks_across + own_column) * tile_w)
        has_work = (k < channels) & (column < column_targets)

        # ---- load the filters, and what the epilogue reads for their channels
        if holds and has_work:
            load_operands(taken, k, *operands)
        if direct:
            own_filters = cuda.local.array(filter_words, u32)
            if has_work:
                load_filters(own_filters, u64(weight + u64(i64(k) * (of_filter * element))))
        else:
            copy_filters(shared, weight, thread, i32(channel_block * block_channels), operands)
            cuda.syncthreads()
        ptx.wait_for_predecessor()

        # ---- multiply and store, patch by patch
        if has_work:
            weights = u32(shared + u32(lane * vector) * SUM_BYTES)
            first_source = i64(i64(image) * source_image)
            plane = i64(i64(image) * target_image + i64(k) * target_channel)
            for step in range(i32(strip)):
                row = i32(((row_block * strip + step) * down + own_row) * tile_h)
                if row < row_targets:
                    for i in range(sums_count):
                        sums[i] = f32(0)
                    for j in range(i32(filters)):
                        channel = i64(i32(k // per_source) if filters == 1 else k * filters + j)
                        at = u64(source + u64((first_source + channel * source_channel) * element))
                        for a in range(i32(rows_of_taps)):
                            for b in range(i32(columns_of_taps)):
                                from_row = i32(row // row_down * row_up + a * next_row)
                                from_column = i32(column // column_down * column_up + b * next_column)
                                inside = lies_inside(from_row, from_column)
                                rows_follow, columns_follow = i32(rows_of_taps - 1 - a), i32(columns_of_taps - 1 - b)
                                if direct:
                                    correlate(
                                        sums, own_filters, at, from_row, from_column, inside, rows_follow, columns_follow,
                                        *zero_points(operands),
                                    )  # fmt: skip
                                else:
                                    taps = u32(weights + ((j * rows_of_taps + a) * columns_of_taps + b) * round_bytes)
                                    correlate(
                                        sums, at, taps, from_row, from_column, inside, rows_follow, columns_follow,
                                        *zero_points(operands),
                                    )  # fmt: skip
                    place_in_y = i64(plane + i64(row) * target_row + i64(column) * target_column)
                    to, added = u64(target + u64(plane * out_element)), u64(before + u64(plane * out_element))
                    if holds:
                        finish(sums, taken, to, added, row, column, k, place_in_y, *operands)
                    else:
                        finish(sums, to, added, row, column, k, place_in_y, *operands)

    return kernel


def _zero_points(patch: Patch, epilogue: Epilogue | None) -> Callable[[Any], Any]:
    """`zero_points(operands)`: the last operands of the operations that read integers; () for floats."""
    slots = [epilogue.index(name) for name in patch_text.zero_point_operands(patch)] if epilogue else []
    first, last = (slots[0], slots[-1]) if slots else (0, 0)

    def none(operands: Any) -> Any:
        return ()

    def one(operands: Any) -> Any:
        return (operands[first],)

    def both(operands: Any) -> Any:
        return operands[first], operands[last]

    return (none, one, both)[len(slots)]


def _inside(patch: Patch) -> Callable[[Any, Any], Any]:
    """`inside(row, column)`: 1 if the patch whose first source this is lies inside of the image as a whole, else 0."""
    first_row, last_row = min(patch.row_meetings, default=0), max(patch.row_meetings, default=0)
    first_column, last_column = _reach(patch)
    rows, columns = patch.rows.sources, patch.columns.sources

    def inside(row: Any, column: Any) -> Any:
        of_rows = (row + first_row >= 0) & (row + last_row < rows)
        return i32(of_rows & (column + first_column >= 0) & (column + last_column < columns))

    return inside


def _reach(patch: Patch) -> tuple[int, int]:
    """The first and the last column that a patch loads, relative to its first source."""
    if patch.channels_last:
        return min(patch.column_meetings, default=0), max(patch.column_meetings, default=0)
    pieces = patch.source_pieces
    return min((p.first for p in pieces), default=0), max((p.first + p.length - 1 for p in pieces), default=0)


def filter_copies(
    workload: Workload[DepthwiseConv2dParams], blocks: Blocks, rounds: Rounds, zero_points: Callable[[Any], Any]
) -> Callable[..., None]:
    """`copy_filters(shared, weight, thread, first target channel, operands)`: the filters of a block's channels as float32.

    Shared memory has the axes (filter of a channel, round, tap, channel).
    """
    patch, filters = rounds.patch, rounds.filters
    strides, element = filter_strides(workload), dtype_of(workload.params.dtype).nbytes
    of_filter, of_row, of_column = (strides[axis].outer for axis in "OHW")
    taps, block_channels, threads, channels = rounds.taps, blocks.block_channels, blocks.threads, blocks.channels
    tap_h, tap_w, columns_of_taps = patch.tap_h, patch.tap_w, rounds.columns
    all_taps_h, all_taps_w = patch.rows.taps, patch.columns.taps
    count, taps_first = filters * taps * block_channels, of_filter > 1
    pitch, at_once = rounds.pitch(block_channels), min(FILTERS_AT_ONCE, -(-count // threads))
    load = patch_text.load_weight(patch)

    def place(number: Any) -> Any:
        """(filter of the channel, tap, channel of the block) that a thread copies."""
        if taps_first:  # neighbours in memory
            rest = u32(number // u32(taps))
            tap = u32(number - rest * taps)
            channel = u32(rest // u32(filters))
            return u32(rest - channel * filters), tap, channel
        channel = u32(number % u32(block_channels))
        rest = u32(number // u32(block_channels))
        return u32(rest // u32(taps)), u32(rest % u32(taps)), channel

    def copy_filters(shared: Any, weight: Any, thread: Any, first: Any, operands: Any) -> None:
        values = cuda.local.array(at_once, f32)
        for start in range(i32(thread), i32(count), i32(threads * at_once)):
            for i in range(at_once):
                number = u32(start + i * threads)
                j, tap, channel = place(number)
                one_round = u32(tap // u32(tap_h * tap_w))
                within = u32(tap - one_round * (tap_h * tap_w))
                row = u32(one_round // columns_of_taps * tap_h + within // tap_w)
                column = u32(one_round % columns_of_taps * tap_w + within % tap_w)
                k = i32(first + i32(channel))
                inside = (k < channels) & (row < all_taps_h) & (column < all_taps_w) & (number < count)
                offset = i64(i64(k * filters + i32(j)) * of_filter + i64(row) * of_row + i64(column) * of_column)
                values[i] = load(u64(weight + u64(offset * element)), i32(inside), *zero_points(operands))
            for i in range(at_once):
                number = u32(start + i * threads)
                if number < count:
                    j, tap, channel = place(number)
                    ptx.store_shared_f32(u32(shared + (j * taps + tap) * pitch + channel * SUM_BYTES), values[i])

    return copy_filters
