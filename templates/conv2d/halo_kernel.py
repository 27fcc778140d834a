"""The kernel of conv2d_halo: it loads each pixel once per tile, and a tap is a shift of the operand's address.

A tile of y is a rectangle of one image. TMA loads the rectangle of x that the tile depends on, halo and padding included, as
one patch of rows of 64 channels. Number its pixels row by row (positions): tap (r, s) reads the positions of tap (0, 0),
shifted by r * dilation_h * patch_w + s * dilation_w. Each tap is therefore the same wgmma operand at another start address.
Between the rows of a tile are the patch's halo columns. They are multiplied too, but never stored.

With a stride the patch is loaded in phases: phase (a, b) has every stride_h-th row from a on, and of these every stride_w-th
pixel from b on. A tap reads one phase and is a shift within it.

wgmma's 64 rows are output channels and its columns are positions: y^T = weight * x^T. An instruction is then wide even with
few channels; at 64 x 64 the tensor cores would wait for shared memory.

A block has consumer warpgroups, which multiply and store, and a producer warpgroup, of which one thread loads patches and
another loads weights, each into its own ring (`pipeline`). docs/kernels/conv2d_halo.md explains more.

In a grouped convolution a tile covers output channels of one group and loads only that group's input channels. Groups of few
channels are merged: several count as one, with weights of zero where input and output channel belong to different groups.
Merged weights stay in shared memory; each block writes them before its first tile.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor".

See docs/decisions/099-element-types-of-conv2d-halo.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d import halo_weights
from schedsearch.templates.conv2d.halo_sizes import (
    WGMMA_CHANNELS,
    Geometry,
    Plan,
    loads_residual,
    stages_y,
)
from schedsearch.templates.conv2d.halo_store import (
    Place,
    Residual,
    Thread,
    load_residual_of,
    releases_late,
    staged_bytes,
    stages_in_place,
    staging_offset_of,
    store_tile_of,
)
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import gather, pipeline, ptx, walk
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.pipeline import Barriers, Ring
from schedsearch.templates.parts.warm import warm_operands
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint
from schedsearch.workload import Workload

# Captured values that Numba must know; see `KernelStep.shaped_by`.
SHAPED_BY = frozenset(
    {"accumulators", "in_turn", "merged", "multiply_tile.merged", "multiply_tile.resident", "residual_index", "staged",
     "store_tile.fused", "store_tile.staged"}
)  # fmt: skip


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> Callable[..., None]:
    """The kernel function of one configuration."""
    geometry, layout = Geometry.of(workload, plan.merged), plan.shared
    chunks, patches, turns, tile_h = geometry.chunks, plan.patches, plan.turns, plan.tile_h
    resident, merged, in_turn = plan.weight_stages == 0, geometry.merged > 1, turns > 1
    # If weights stay, all tiles of a block are in one column of output channels. Its neighbours have the other columns.
    block_columns, tiles = (plan.column_tiles, plan.pixel_tiles) if resident else (1, plan.tiles)
    own_tiles, tile_origin = walk.persistent(block_columns), _tile_origin(geometry, plan)
    own_place = _own_place(geometry, plan, tile_origin)
    # Addresses in shared memory.
    weights_offset, y_offset, residual_offset = map(layout.offset, ("weights", "y", "residual_full"))
    ring_barriers = _ring_barriers(plan)
    staged, staged_residual, warpgroups, stages = stages_y(workload), loads_residual(workload), plan.warpgroups, plan.stages
    warpgroup_y_bytes = staged_bytes(workload, plan)
    row_patch_bytes = 0 if in_turn else tile_h * plan.patch_w * ROW_BYTES  # from a warpgroup to the one below
    load_patches = _load_patches(workload, geometry, plan)
    load_weights = halo_weights.load_weights(workload, geometry, plan, tile_origin)
    merge_weights = halo_weights.merge_weights(workload, geometry, plan, weights_offset)
    # Consumer warpgroups are numbered along a row of `warp_columns`, 64 output channels each.
    warp_columns, consumers = plan.channel_groups, plan.warpgroups * WARPGROUP
    wgmma = Wgmma(workload.params.dtype)
    accumulators, sum_type = wgmma.accumulators(plan.positions), wgmma.accumulator_type
    multiply_tile, staging_offset = _multiply_tile(workload, geometry, plan), staging_offset_of(workload, plan)
    store_tile, residual_index = store_tile_of(workload, geometry, plan, epilogue, zero), epilogue.index("residual")
    warm, idle = _warm(workload, geometry, plan, epilogue, tile_origin), consumers + 64  # a warp without other work

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        residual = operands[residual_index]
        own_column = u32(u32(cuda.blockIdx.x) % u32(block_columns))
        shared = shared_base()
        patch_full, patch_empty, weight_full, weight_empty = ring_barriers(shared)
        thread = i32(cuda.threadIdx.x)
        first_tile, next_tile = own_tiles()
        if thread == 0:
            for buffer in range(turns * patches):
                ptx.mbarrier_init(patch_full + buffer * BARRIER_BYTES, 1)
            for buffer in range(patches):
                ptx.mbarrier_init(patch_empty + buffer * BARRIER_BYTES, warpgroups // turns)
            for stage in range(stages):
                ptx.mbarrier_init(weight_full + stage * BARRIER_BYTES, 1)
                ptx.mbarrier_init(weight_empty + stage * BARRIER_BYTES, warpgroups)
            if staged_residual:
                for number in range(warpgroups):
                    ptx.mbarrier_init(shared + (residual_offset + number * BARRIER_BYTES), 1)
            ptx.mbarrier_init_fence()
        cuda.syncthreads()

        if thread >= consumers:
            # ---- load
            if thread == consumers:
                ptx.prefetch_map(xmap)
                ptx.wait_for_predecessor()
                load_patches(xmap, shared, patch_full, patch_empty, own_column, first_tile, next_tile)
            elif not merged and thread == consumers + 32:
                load_weights(weight, shared + weights_offset, weight_full, weight_empty, own_column, first_tile, next_tile)
            elif thread >= idle and thread < idle + 32 and first_tile < tiles:
                warm(thread & 31, first_tile, own_column, operands)
        else:
            group = thread >> 7
            lane = thread & 31
            leader = (thread & 127) == 0
            warp_row = i32(group // warp_columns)
            own_channel = i32((group - warp_row * warp_columns) * WGMMA_CHANNELS)
            own_row = i32(0 if in_turn else warp_row * tile_h)
            weights_start = u32(shared + weights_offset + own_channel * ROW_BYTES)
            patch_start = u32(shared + (0 if in_turn else warp_row * row_patch_bytes))
            staged_y = u32(shared + y_offset + group * warpgroup_y_bytes)
            warp_channel = i32(((thread >> 5) & 3) * 16)
            matrix_offset = staging_offset(lane, warp_channel)
            if merged:
                merge_weights(weight, shared, thread, own_column)
            ptx.wait_for_predecessor()

            acc = cuda.local.array(accumulators, sum_type)
            if in_turn:
                patch_full = u32(patch_full + warp_row * (patches * BARRIER_BYTES))
            patch_parities = u32(0)
            buffer = u32(warp_row * chunks if in_turn else 0) % u32(patches)
            previous_buffer = buffer
            stage = u32(0)
            previous_stage = stage
            weight_parity = u32(0)
            residual_full = u32(shared + residual_offset + group * BARRIER_BYTES)
            residual_parity = u32(0)
            held = i32(0)  # whether the last tile's patch must still be handed back
            tile = first_tile
            if in_turn:
                tile = i32(tile + warp_row * next_tile)
            while tile < tiles:
                place = own_place(tile, own_column, own_row, own_channel)
                # ---- multiply
                patch_ring, weight_ring = multiply_tile(
                    acc, patch_start, weights_start, patch_full, patch_empty, Barriers(weight_full, weight_empty),
                    leader, held, Ring(buffer, previous_buffer, patch_parities), Ring(stage, previous_stage, weight_parity),
                    Residual(residual, residual_full), staged_y, place,
                )  # fmt: skip
                buffer, previous_buffer, patch_parities = patch_ring
                stage, previous_stage, weight_parity = weight_ring
                # ---- epilogue and store
                staged_y, residual_parity = store_tile(
                    acc, y, operands, shared, Thread(group, lane, leader, warp_channel, matrix_offset), place,
                    patch_empty, previous_buffer, Residual(residual, residual_full), residual_parity, staged_y,
                )  # fmt: skip
                held = i32(1)
                if in_turn:
                    buffer = u32(buffer + (turns - 1) * chunks) % u32(patches)
                tile = i32(tile + next_tile * turns)
            if staged and leader:
                ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel


# --- The functions that the kernel captures ----------------------------------------------------------------------------


def _ring_barriers(plan: Plan) -> Callable[[Any], Any]:
    """Addresses of the barriers of both rings: patches full and empty, weights full and empty."""
    patch_full, patch_empty = plan.shared.offset("patch_full"), plan.shared.offset("patch_empty")
    weight_full, weight_empty = plan.shared.offset("weight_full"), plan.shared.offset("weight_empty")

    def ring_barriers(shared: Any) -> Any:
        patches = u32(shared + patch_full), u32(shared + patch_empty)
        return (*patches, u32(shared + weight_full), u32(shared + weight_empty))

    return ring_barriers


def _own_place(geometry: Geometry, plan: Plan, tile_origin: Callable[..., Any]) -> Callable[..., Any]:
    """`place(tile, own_column, own_row, own_channel)`: where a warpgroup's part of a tile begins."""
    tile_h, out_h = plan.tile_h, geometry.out_h

    def own_place(tile: Any, own_column: Any, own_row: Any, own_channel: Any) -> Any:
        image, row, column, conv_group, channel = tile_origin(tile, own_column)
        row = i32(row + own_row)
        channel = i32(channel + own_channel)
        rows_left = i32(min(tile_h, out_h - row))
        return Place(image, row, column, conv_group, channel, rows_left)

    return own_place


def _multiply_tile(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> Callable[..., Any]:
    """All chunks and taps of a warpgroup's part of a tile.

    A buffer is handed back when the next step has been issued and its own has finished. Returns the state of both rings.
    """
    p = workload.params
    taps, chunks, patches, resident = geometry.taps, geometry.chunks, plan.patches, plan.weight_stages == 0
    patch_bytes, stage_bytes, positions, merged = plan.patch_bytes, plan.bn * ROW_BYTES, plan.positions, geometry.merged > 1
    late_release, in_place = releases_late(workload, geometry, plan), stages_in_place(workload, plan)
    early_residual = loads_residual(workload) and not in_place
    take_patch, advance_patch = pipeline.consumer(patches, phases="some")
    take_weights, advance_weights = pipeline.consumer(plan.stages, phases="first" if resident else "all")
    tap_address, advance_tap = _tap_address(workload, geometry, plan), _advance_tap(p.s)
    load_residual = load_residual_of(geometry, plan)
    wgmma = Wgmma(p.weight_dtype, p.dtype)
    matrix = wgmma.matrix(ROW_BYTES)  # the swizzle depends on addresses only, so an operand may start at any row
    multiply, multiply_last = (wgmma.steps(positions, k_steps) for k_steps in geometry.k_steps)
    whole_chunks = chunks if geometry.k_steps[0] == geometry.k_steps[1] else chunks - 1
    wait_previous, wait_all = wgmma.wait(1, positions), wgmma.wait(0, positions)

    def multiply_tile(  # type: ignore[no-untyped-def]
        acc, patch_start, weights_start, patch_full, patch_empty, of_weights, leader, held, patch_ring, weight_ring,
        residual, staged_y, place,
    ):  # fmt: skip
        buffer, previous_buffer, patch_parities = patch_ring
        stage, previous_stage, weight_parity = weight_ring
        step = i32(0)
        for chunk in range(chunks):
            patch_parities = take_patch(patch_full, buffer, patch_parities)
            patch = u32(patch_start + buffer * patch_bytes)
            tap_h = u32(0)
            tap_w = u32(0)
            for tap in range(taps):
                if not merged:
                    take_weights(of_weights.full, stage, weight_parity)
                a = u32(weights_start + stage * stage_bytes)
                b = tap_address(patch, tap_h, tap_w)
                matrix_a, matrix_b = matrix(a), matrix(b)
                if chunk < whole_chunks:
                    multiply(acc, matrix_a, matrix_b, i32(step > 0))
                else:
                    multiply_last(acc, matrix_a, matrix_b, i32(step > 0))
                wait_previous(acc)
                if leader:
                    if not resident and step > 0:
                        ptx.mbarrier_arrive(of_weights.empty + previous_stage * BARRIER_BYTES)
                    if patches > 1 and tap == 0 and chunk > 0:
                        ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
                    if late_release and held != 0 and step == 0:
                        ptx.bulk_wait_read_all()
                        ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
                    if early_residual and step == 0:
                        ptx.bulk_wait_read_all()  # the previous tile's stores have read staged_y
                        load_residual(residual, staged_y, place)
                tap_h, tap_w = advance_tap(tap_h, tap_w)
                step = i32(step + 1)
                previous_stage = stage
                stage, weight_parity = advance_weights(stage, weight_parity)
            previous_buffer = buffer
            buffer, patch_parities = advance_patch(buffer, patch_parities)
            if patches == 1 and chunk < chunks - 1:  # the next chunk needs this one's buffer
                wait_all(acc)
                if leader:
                    ptx.mbarrier_arrive(patch_empty)
        wait_all(acc)
        if leader:
            if not resident:
                ptx.mbarrier_arrive(of_weights.empty + previous_stage * BARRIER_BYTES)
            if not in_place:
                ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
        return Ring(buffer, previous_buffer, patch_parities), Ring(stage, previous_stage, weight_parity)

    return multiply_tile


def _tile_origin(geometry: Geometry, plan: Plan) -> Callable[..., Any]:
    """`origin(tile, own_column)`: (image, first row, first column, convolution group, first channel of it) of a tile.

    Channels run fastest, unless a block keeps to one column of them; then pixels along a row.
    """
    column_tiles, group_tiles, bn, resident = plan.column_tiles, plan.group_tiles, plan.bn, plan.weight_stages == 0
    pixels = walk.rectangles(plan.row_tiles, plan.strips, plan.block_rows, plan.tile_w)

    def channels(column_tile: Any) -> Any:
        conv_group = u32(column_tile // u32(group_tiles))
        channel = i32((column_tile - conv_group * u32(group_tiles)) * bn)
        return i32(conv_group), channel

    def own_channels(tile: Any, own_column: Any) -> Any:
        conv_group, channel = channels(own_column)
        image, row, column = pixels(tile)
        return image, row, column, conv_group, channel

    def all_channels(tile: Any, own_column: Any) -> Any:
        tile = u32(tile)
        rest = u32(tile // u32(column_tiles))
        conv_group, channel = channels(u32(tile - rest * u32(column_tiles)))
        image, row, column = pixels(rest)
        return image, row, column, conv_group, channel

    return own_channels if resident else all_channels


def _load_patches(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> Callable[..., None]:
    """Loads the patches of all tiles of a block, chunk by chunk."""
    p = workload.params
    (stride_h, stride_w), (top, left) = p.stride, p.padding[:2]
    chunk_channels, chunks, patches, in_turn = geometry.chunk, geometry.chunks, plan.patches, plan.turns > 1
    tiles = plan.pixel_tiles if plan.weight_stages == 0 else plan.tiles
    loaded_bytes = geometry.phases * plan.patch_w * plan.patch_h * ROW_BYTES
    tile_origin = _tile_origin(geometry, plan)
    fill, advance, _ = pipeline.producer(patches, plan.patch_bytes, loaded_bytes)
    load_patch = gather.patch(
        p.stride, p.dilation, geometry.phases, geometry.phases_w, plan.phase_bytes, geometry.groups > 1
    )

    def load_patches(x: Any, shared: Any, full: Any, empty: Any, own_column: Any, first_tile: Any, next_tile: Any) -> None:
        tile = first_tile
        buffer = u32(0)
        parity = u32(1)
        turn_full = full
        while tile < tiles:
            image, row, column, conv_group, _ = tile_origin(tile, own_column)
            row, column = i32(row * stride_h - top), i32(column * stride_w - left)
            for chunk in range(chunks):
                to, barrier = fill(shared, turn_full, empty, buffer, parity)
                load_patch(x, to, chunk * chunk_channels, conv_group, column, row, image, barrier)
                buffer, parity = advance(buffer, parity)
            if in_turn:  # the next warpgroup's barriers
                turn_full = u32(turn_full + patches * BARRIER_BYTES)
                if turn_full == empty:
                    turn_full = full
            tile = i32(tile + next_tile)

    return load_patches


def _warm(
    workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan, epilogue: Epilogue, tile_origin: Callable[..., Any]
) -> Callable[..., None]:  # fmt: skip
    """`warm(lane, tile, own_column, operands)`: a warp brings what belongs to the channels of a tile to L1."""
    outputs, bn, load = geometry.outputs, plan.bn, warm_operands(workload, epilogue.params)

    def warm(lane: Any, tile: Any, own_column: Any, operands: Any) -> None:
        _, _, _, conv_group, channel = tile_origin(tile, own_column)
        load(lane, i32(conv_group * outputs + channel), i32(min(bn, outputs - channel)), operands)

    return warm


def _tap_address(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> Callable[..., Any]:
    """`address(patch, tap_h, tap_w)`: the start of a tap's operand in its patch: the phase, plus the shift within it."""
    (stride_h, stride_w), (dilation_h, dilation_w) = workload.params.stride, workload.params.dilation
    period_h, period_w, phases_w = geometry.period_h, geometry.period_w, geometry.phases_w
    phase_bytes, patch_w = plan.phase_bytes, plan.patch_w

    def address(patch: Any, tap_h: Any, tap_w: Any) -> Any:
        phase = u32(tap_h % u32(period_h) * phases_w + tap_w % u32(period_w))
        shift_h = u32(u32(tap_h * dilation_h) // u32(stride_h))
        shift_w = u32(u32(tap_w * dilation_w) // u32(stride_w))
        return u32(patch + phase * phase_bytes + (shift_h * patch_w + shift_w) * ROW_BYTES)

    return address


def _advance_tap(kernel_w: int) -> Callable[..., Any]:
    def advance(tap_h: Any, tap_w: Any) -> Any:
        tap_w = u32(tap_w + 1)
        if tap_w == kernel_w:
            tap_w = u32(0)
            tap_h = u32(tap_h + 1)
        return tap_h, tap_w

    return advance
