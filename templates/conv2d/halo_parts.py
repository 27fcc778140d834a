"""The functions that both kernels of conv2d_halo capture: places of tiles, loads of patches, the multiplications of a tile.

`halo_kernel` explains positions, patches, phases and taps.

See docs/decisions/050-parts-of-kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d.halo_sizes import Geometry, Plan, loads_residual
from schedsearch.templates.conv2d.halo_store import Place, load_residual_of, releases_late, stages_in_place
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import gather, pipeline, ptx, walk
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import BARRIER_BYTES
from schedsearch.templates.parts.pipeline import Ring
from schedsearch.templates.parts.warm import warm_operands
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.workload import Workload


def ring_barriers_of(plan: Plan) -> Callable[[Any], Any]:
    """Addresses of the barriers of both rings: patches full and empty, weights full and empty."""
    patch_full, patch_empty = plan.shared.offset("patch_full"), plan.shared.offset("patch_empty")
    weight_full, weight_empty = plan.shared.offset("weight_full"), plan.shared.offset("weight_empty")

    def ring_barriers(shared: Any) -> Any:
        patches = u32(shared + patch_full), u32(shared + patch_empty)
        return (*patches, u32(shared + weight_full), u32(shared + weight_empty))

    return ring_barriers


def place_of(geometry: Geometry, plan: Plan, tile_origin: Callable[..., Any]) -> Callable[..., Any]:
    """`place(tile, own_column, own_row, own_channel)`: where a warpgroup's part of a tile begins."""
    tile_h, out_h = plan.tile_h, geometry.out_h

    def own_place(tile: Any, own_column: Any, own_row: Any, own_channel: Any) -> Any:
        image, row, column, conv_group, channel = tile_origin(tile, own_column)
        row = i32(row + own_row)
        channel = i32(channel + own_channel)
        rows_left = i32(min(tile_h, out_h - row))
        return Place(image, row, column, conv_group, channel, rows_left)

    return own_place


def multiply_tile_of(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> Callable[..., Any]:
    """All chunks and taps of a warpgroup's part of a tile.

    A buffer is handed back when the next step has been issued and its own has finished. Returns the state of both rings.
    """
    p = workload.params
    taps, chunks, patches, resident = plan.own_taps, plan.own_chunks, plan.patches, plan.weight_stages == 0
    patch_bytes, stage_bytes, positions, merged = plan.patch_bytes, plan.bn * ROW_BYTES, plan.positions, geometry.merged > 1
    late_release, in_place = releases_late(workload, geometry, plan), stages_in_place(workload, plan)
    early_residual = loads_residual(workload) and not in_place
    take_patch, advance_patch = pipeline.consumer(patches, phases="some")
    take_weights, advance_weights = pipeline.consumer(plan.stages, phases="first" if resident else "all")
    tap_address, advance_tap = _tap_address(workload, geometry, plan), _advance_tap(p.s)
    first_tap = _first_tap(plan, p.s)
    load_residual = load_residual_of(geometry, plan)
    wgmma = Wgmma(p.weight_dtype, p.dtype)
    matrix = wgmma.matrix(ROW_BYTES)  # the swizzle depends on addresses only, so an operand may start at any row
    multiply, multiply_last = (wgmma.steps(positions, k_steps) for k_steps in geometry.k_steps)
    # Of a split tile only one block has a last chunk with fewer channels. TMA fills it with zeros.
    whole_chunks = chunks if geometry.k_steps[0] == geometry.k_steps[1] or plan.split_k > 1 else chunks - 1
    wait_previous, wait_all = wgmma.wait(1, positions), wgmma.wait(0, positions)

    def multiply_tile(  # type: ignore[no-untyped-def]
        acc, patch_start, weights_start, patch_full, patch_empty, of_weights, leader, held, patch_ring, weight_ring,
        residual, staged_y, place, own_column,
    ):  # fmt: skip
        buffer, previous_buffer, patch_parities = patch_ring
        stage, previous_stage, weight_parity = weight_ring
        step = i32(0)
        for chunk in range(chunks):
            patch_parities = take_patch(patch_full, buffer, patch_parities)
            patch = u32(patch_start + buffer * patch_bytes)
            tap_h, tap_w = first_tap(own_column)
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


def tile_origin_of(geometry: Geometry, plan: Plan) -> Callable[..., Any]:
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


def channel_of_chunk(geometry: Geometry, plan: Plan) -> Callable[[Any, Any], Any]:
    """`channel(chunk, own_column)`: the first input channel of a block's chunk. The `own_column` of a block that shares its
    tile is the number of its part of the products: parts of a chunk's taps, then chunks."""
    chunk_channels, part_channels, tap_parts = geometry.chunk, plan.own_chunks * geometry.chunk, plan.tap_parts

    def channel(chunk: Any, own_column: Any) -> Any:
        return chunk * chunk_channels

    def channel_of_part(chunk: Any, own_column: Any) -> Any:
        return i32(u32(own_column // u32(tap_parts)) * part_channels + chunk * chunk_channels)

    return channel if plan.split_k == 1 else channel_of_part


def tap_of_part(plan: Plan) -> Callable[[Any, Any], Any]:
    """`number(tap, own_column)`: the number among all taps of the one with a number among those of a block."""
    own_taps, tap_parts = plan.own_taps, plan.tap_parts

    def same(tap: Any, own_column: Any) -> Any:
        return tap

    def number(tap: Any, own_column: Any) -> Any:
        return i32(u32(own_column % u32(tap_parts)) * own_taps + tap)

    return same if tap_parts == 1 else number


def load_patches_of(workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan) -> Callable[..., None]:
    """Loads the patches of all tiles of a block, chunk by chunk."""
    p = workload.params
    (stride_h, stride_w), (top, left) = p.stride, p.padding[:2]
    chunks, patches, in_turn, channel_of = plan.own_chunks, plan.patches, plan.turns > 1, channel_of_chunk(geometry, plan)
    tiles = plan.pixel_tiles if plan.weight_stages == 0 else plan.tiles
    loaded_bytes = geometry.phases * plan.patch_w * plan.patch_h * ROW_BYTES
    tile_origin = tile_origin_of(geometry, plan)
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
                load_patch(x, to, channel_of(chunk, own_column), conv_group, column, row, image, barrier)
                buffer, parity = advance(buffer, parity)
            if in_turn:  # the next warpgroup's barriers
                turn_full = u32(turn_full + patches * BARRIER_BYTES)
                if turn_full == empty:
                    turn_full = full
            tile = i32(tile + next_tile)

    return load_patches


def warm_of(
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


def _first_tap(plan: Plan, kernel_w: int) -> Callable[[Any], Any]:
    """`first(own_column)`: row and column of the first tap of a block."""
    tap_of = tap_of_part(plan)

    def first(own_column: Any) -> Any:
        return u32(0), u32(0)

    def first_of_part(own_column: Any) -> Any:
        tap = u32(tap_of(0, own_column))
        row = u32(tap // u32(kernel_w))
        return row, u32(tap - row * u32(kernel_w))

    return first if plan.tap_parts == 1 else first_of_part


def _advance_tap(kernel_w: int) -> Callable[..., Any]:
    def advance(tap_h: Any, tap_w: Any) -> Any:
        tap_w = u32(tap_w + 1)
        if tap_w == kernel_w:
            tap_w = u32(0)
            tap_h = u32(tap_h + 1)
        return tap_h, tap_w

    return advance
