"""The weights of conv2d_halo in shared memory: loaded by TMA, or written by the block if groups are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.templates.conv2d.geometry import channel_order
from schedsearch.templates.conv2d.halo_parts import channel_of_chunk, tap_of_part
from schedsearch.templates.conv2d.halo_sizes import Geometry, Plan, weight_piece
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import pipeline, ptx, store
from schedsearch.templates.parts.casts import i32, u32, u64
from schedsearch.templates.parts.hopper import WARPGROUP
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.workload import Workload


def load_weights(
    workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan, tile_origin: Callable[..., Any]
) -> Callable[..., None]:
    """Loads the weights: all of them once, or those of every tile. `tile_origin` returns a tile's group and channel last."""
    channel_of, load_filters = channel_of_chunk(geometry, plan), _load_filters(workload)
    taps, chunks, outputs, resident = plan.own_taps, plan.own_chunks, geometry.outputs, plan.weight_stages == 0
    tap_of = tap_of_part(plan)
    tiles = plan.pixel_tiles if resident else plan.tiles
    fill, advance, _ = pipeline.producer(plan.stages, plan.bn * ROW_BYTES)

    def load(weight: Any, stages: Any, full: Any, empty: Any, own_column: Any, first_tile: Any, next_tile: Any) -> None:
        tile = first_tile
        stage = u32(0)
        parity = u32(1)
        while tile < tiles:
            _, _, _, conv_group, channel = tile_origin(tile, own_column)
            channel = i32(conv_group * outputs + channel)
            for chunk in range(chunks):
                for tap in range(taps):
                    to, barrier = fill(stages, full, empty, stage, parity)
                    load_filters(to, weight, channel_of(chunk, own_column), tap_of(tap, own_column), channel, barrier)
                    stage, parity = advance(stage, parity)
            tile = i32(tiles if resident else tile + next_tile)

    return load


def _load_filters(workload: Workload[Conv2dParams]) -> Callable[..., None]:
    """`load(to, weight, channel, tap, filter, barrier)`: a box of `maps.filter_map`, or of `ordered_filter_map`."""
    p = workload.params
    order = channel_order(pixel_shuffle(p.epilogue, p.k))
    block = order.block if order else 1

    def load(to: Any, weight: Any, channel: Any, tap: Any, first: Any, barrier: Any) -> None:
        ptx.tma_load_3d(to, weight, channel, tap, first, barrier)

    def load_interleaved(to: Any, weight: Any, channel: Any, tap: Any, first: Any, barrier: Any) -> None:
        ptx.tma_load_5d(to, weight, channel, tap, 0, 0, first >> 4, barrier)

    def load_ordered(to: Any, weight: Any, channel: Any, tap: Any, first: Any, barrier: Any) -> None:
        number = i32(u32(first) // u32(block))
        ptx.tma_load_4d(to, weight, channel, tap, i32(first - number * block), number, barrier)

    if order:
        return load_ordered
    return load_interleaved if store.interleaved(p.out_dtype) else load


def merge_weights(
    workload: Workload[Conv2dParams], geometry: Geometry, plan: Plan, weights_offset: int
) -> Callable[..., None]:
    """Writes the weights of merged groups: zeros, and each group's weights for its own input channels.

    They are copied in pieces that fit in a row of zeros and in a row of one group's weights.
    """
    p = workload.params
    taps, stage_bytes, consumers = geometry.taps, plan.bn * ROW_BYTES, plan.warpgroups * WARPGROUP
    inputs, outputs = p.c // p.groups, p.k // p.groups
    piece, element_bytes = weight_piece(workload), Wgmma(p.dtype).element_bytes
    piece_bytes, row_of = piece * element_bytes, _row_of_output(store.interleaved(p.out_dtype))
    tile_pieces = geometry.outputs * taps * inputs // piece
    copy, wait_copies = ptx.cp_async(piece_bytes), ptx.cp_async_wait(0)
    tap_chunks = geometry.outputs * ROW_BYTES // 16  # number of rows that are stored
    all_consumers = ptx.group_barrier(1, consumers)

    def merge(weight: Any, shared: Any, thread: Any, own_column: Any) -> None:
        zero = u32(0)
        for chunk in range(thread, taps * tap_chunks, consumers):
            tap = u32(u32(chunk) // u32(tap_chunks))
            to = u32(shared + weights_offset + tap * (stage_bytes - tap_chunks * 16) + chunk * 16)
            ptx.store_shared_v4(to, zero, zero, zero, zero)
        all_consumers(0)
        tile_weights = u64(weight + u64(own_column) * u64(tile_pieces * piece_bytes))
        for number in range(thread, tile_pieces, consumers):
            element = u32(number * piece)
            weight_row = u32(element // u32(inputs))
            output = u32(weight_row // u32(taps))
            tap = u32(weight_row - output * u32(taps))
            own_group = u32(output // u32(outputs))
            byte = u32((own_group * inputs + element - weight_row * u32(inputs)) * element_bytes)
            row = row_of(output)
            to = u32(shared + weights_offset + tap * stage_bytes + row * ROW_BYTES)
            copy(to + (byte ^ ((row & 7) << 4)), tile_weights + number * piece_bytes, piece_bytes)
        ptx.cp_async_commit()
        wait_copies()
        ptx.fence_async_shared()
        all_consumers(0)

    return merge


def _row_of_output(interleaved: bool) -> Callable[[Any], Any]:
    """`row(output)`: the row of wgmma's A that is an output channel; see `store_channels.transposed_channels`."""

    def same(output: Any) -> Any:
        return output

    def of_interleaved(output: Any) -> Any:
        return u32((output & ~u32(15)) + ((output & 1) << 3) + ((output >> 1) & 7))

    return of_interleaved if interleaved else same
