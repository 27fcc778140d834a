"""The end of a tile of conv2d_halo: the residual, the epilogue, and the store of a warpgroup's part of y.

Its state passes in named tuples, which the kernel makes where it calls: a tuple that goes around the loop over tiles would
give other machine code.

See docs/decisions/050-parts-of-kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.templates.conv2d.geometry import channel_order
from schedsearch.templates.conv2d.halo_sizes import Geometry, Plan, loads_residual, stages_y, store_segment
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import gather, ptx, store_channels
from schedsearch.templates.parts.casts import i32, i64, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.epilogue_fragments import TileRows, store_transposed
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint, no_transposed_correction
from schedsearch.workload import Workload


class Place(NamedTuple):
    """Where a warpgroup's part of a tile begins.

    Attributes:
        conv_group, channel: group of the convolution, and the first output channel in it.
        rows_left: rows of the part that are inside of y; 0 or less if none is.
    """

    image: Any
    row: Any
    column: Any
    conv_group: Any
    channel: Any
    rows_left: Any


class Thread(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        group, lane: numbers of its warpgroup and within its warp.
        leader: whether it acts for the warpgroup.
        warp_channel: first channel of its warp among those of the warpgroup.
        matrix_offset: where it writes its part of a matrix of y that is staged.
    """

    group: Any
    lane: Any
    leader: Any
    warp_channel: Any
    matrix_offset: Any


class Residual(NamedTuple):
    """The residual, and the barrier of its part of a tile."""

    array: Any
    full: Any


def staging_offset_of(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., Any]:
    """Where a thread writes its part of a matrix of y that is staged."""
    p = workload.params
    if pixel_shuffle(p.epilogue, p.k):
        return store_channels.segment_offset(store_segment(workload), plan.positions)
    return store_channels.transposed_offset(p.out_dtype)


def staged_bytes(workload: Workload[Conv2dParams], plan: Plan) -> int:
    """Bytes of shared memory in which a warpgroup stages its y; 0 if it does so in the patch, or not at all."""
    if not stages_y(workload) or stages_in_place(workload, plan):
        return 0
    return int(plan.own_positions * store_channels.position_bytes(workload.params.out_dtype))


def releases_late(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> bool:
    """Whether a warpgroup hands a patch, in which it stages y, back only during its next tile.

    This needs enough other patches: the next tile's last chunk but one must not need this patch.
    """
    return stages_in_place(workload, plan) and plan.patches >= (plan.turns - 1) * geometry.chunks + 2


def stages_in_place(workload: Workload[Conv2dParams], plan: Plan) -> bool:
    """Whether y is staged in the patch that it was computed from."""
    return stages_y(workload) and plan.turns > 1


def store_tile_of(
    workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> Callable[..., Any]:
    """Epilogue and store of a warpgroup's part of a tile, or of the rows of it that a block of a split tile adds up.

    Returns where it staged y, and the residual's parity.
    """
    p = workload.params
    out_h, out_w, out_channels, outputs = geometry.out_h, geometry.out_w, p.k, geometry.outputs
    tile_w, patch_bytes, octets = plan.tile_w, plan.patch_bytes, plan.own_positions // 8
    staged, staged_residual, accumulator = stages_y(workload), loads_residual(workload), Wgmma(p.dtype).accumulator
    late_release, in_place = releases_late(workload, geometry, plan), stages_in_place(workload, plan)
    channel_step, second = store_channels.transposed_channels(p.out_dtype)
    shuffle, segment = pixel_shuffle(p.epilogue, p.k), store_segment(workload)
    order = channel_order(shuffle)
    channel_of, step = (order.channel(), order.step) if order else (_same, 1)
    tile_rows = TileRows(plan.patch_w, out_w * out_channels, out_channels, second, step)
    fuse, store_direct = epilogue.transposed(octets, tile_rows), store_transposed(octets, tile_rows, accumulator)
    correct = zero.transposed_correction(epilogue, octets, tile_rows) if zero else no_transposed_correction
    fused = not epilogue.identity
    load_residual = load_residual_of(geometry, plan)
    stage_y = store_channels.stage_transposed(p.out_dtype if staged else "float16", octets, accumulator, segment)
    send_y = store_channels.send_rows(geometry.groups > 1, plan.patch_w * store_channels.position_bytes(p.out_dtype))
    if shuffle:
        run = out_channels // shuffle.block
        send_y = store_channels.send_segments(segment, plan.positions, plan.patch_w, out_h, out_channels, run)
    group_barrier = ptx.group_barrier(plan.warpgroups, WARPGROUP)

    def store_tile(  # type: ignore[no-untyped-def]
        acc, y, operands, shared, own, place, patch_empty, previous_buffer, residual, residual_parity, staged_y
    ):
        image, row, column, conv_group, channel, rows_left = place
        columns_left = i32(min(tile_w, out_w - column))
        if in_place:
            staged_y = u32(shared + previous_buffer * patch_bytes)
            group_barrier(own.group)  # all warps have read the patch
            if staged_residual and own.leader:
                load_residual(residual, staged_y, place)
        elif staged and not staged_residual:
            if own.leader:
                ptx.bulk_wait_read_all()  # the previous tile's stores have read staged_y
            group_barrier(own.group)
        if staged_residual:
            ptx.mbarrier_wait(residual.full, residual_parity)
            residual_parity = u32(residual_parity ^ 1)
        k = i32(channel + own.warp_channel + (own.lane >> 2) * channel_step)  # within its convolution group, then among all
        channels_left, position = i32(outputs - k), i32((own.lane & 3) * 2)
        k = i32(k + conv_group * outputs)
        offset = i64(i64((image * out_h + row) * out_w + column) * out_channels + k)
        correct(acc, channels_left, rows_left, columns_left, position, row, column, channel_of(k), operands)
        if fused:
            fuse(
                acc, channels_left, rows_left, columns_left, position, staged_y + own.matrix_offset, channel_of(k), offset,
                *operands,
            )  # fmt: skip
        if staged:
            stage_y(acc, staged_y + own.matrix_offset)
            ptx.fence_async_shared()
            group_barrier(own.group)
            if own.leader:
                if channel < outputs:
                    send_y(y, staged_y, rows_left, channel, conv_group, column, row, image)
                ptx.bulk_commit()
                if in_place and not late_release:
                    ptx.bulk_wait_read_all()
                    ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
        else:
            store_direct(acc, y, channels_left, rows_left, columns_left, position, offset)
        return staged_y, residual_parity

    return store_tile


def _same(channel: Any) -> Any:
    """The channel of a row if rows are channels."""
    return channel


def load_residual_of(geometry: Geometry, plan: Plan) -> Callable[..., None]:
    """One thread loads a tile's residual to the place where its y will be staged, and nothing outside of y."""
    outputs, row_bytes, patch_row_bytes = geometry.outputs, plan.tile_w * ROW_BYTES, plan.patch_w * ROW_BYTES
    load_pixels = gather.pixels(geometry.groups > 1)

    def load_residual(residual: Any, to: Any, place: Any) -> None:
        image, row, column, conv_group, channel, rows = place
        rows = i32(max(rows, 0) if channel < outputs else 0)
        ptx.mbarrier_expect_bytes(residual.full, rows * row_bytes)
        for tile_row in range(rows):
            load_pixels(
                to + tile_row * patch_row_bytes,
                residual.array,
                channel,
                conv_group,
                column,
                row + tile_row,
                image,
                residual.full,
            )

    return load_residual
