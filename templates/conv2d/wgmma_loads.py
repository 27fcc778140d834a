"""The loads of conv2d_wgmma: one thread fills the ring with pixels of a block's tiles, another with weights, step by step.

Weights are constants of a network. Their thread fills its part of the ring while the kernel in front still runs, and what
comes late holds up only its own operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.conv2d.wgmma_sizes import Plan, output_of
from schedsearch.templates.parts import cluster, gather, pipeline, ptx, store, walk
from schedsearch.templates.parts.casts import i32, u16, u32
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.sharing import ClusterTiles
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.workload import Workload


def tile_origin(plan: Plan) -> Callable[..., Any]:
    """`origin(tile, cluster_row, cluster_column)`: (first row, first column) of a block's tile in the tile's cluster."""
    bm, bn, cluster_m, cluster_n = plan.bm, plan.bn, plan.cluster_m, plan.cluster_n
    place_of_cluster = walk.banded(plan.cluster_rows, plan.cluster_columns, plan.band)

    def origin(tile: Any, cluster_row: Any, cluster_column: Any) -> Any:
        row, column = place_of_cluster(tile)
        return i32((row * cluster_m + cluster_row) * bm), i32((column * cluster_n + cluster_column) * bn)

    return origin


def own_part_of(gemm: Im2col, plan: Plan) -> Callable[..., Any]:
    """`own_part(tile, part, cluster_row, cluster_column)`: (first row, first column, columns inside of y) of what a block of
    a split tile stores."""
    own_octets, bn, columns, origin = plan.own_octets, plan.bn, gemm.columns, tile_origin(plan)

    def own_part(tile: Any, part: Any, cluster_row: Any, cluster_column: Any) -> Any:
        row, column = origin(tile, cluster_row, cluster_column)
        first = i32(part * own_octets * 8)
        return row, i32(column + first), i32(min(columns - column, bn) - first)

    return own_part


def load_of(
    workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan, warm: Callable[..., None]
) -> Callable[..., None]:  # fmt: skip
    """What the warps behind the consumers do: one loads pixels, one loads weights, and one brings what belongs to the
    channels of the first tile to L1, by `warm(lane, column, columns, operands)`."""
    consumers, bn, columns, weights_ahead = plan.warpgroups * WARPGROUP, plan.bn, gemm.columns, not gemm.own_weights
    idle, origin = consumers + 64, tile_origin(plan)
    load_pixels, load_weights = _load_pixels(workload, gemm, plan), _load_weights(workload, gemm, plan)

    def load(  # type: ignore[no-untyped-def]
        xmap, wmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step, stop_step,
        thread, lane, operands,
    ):  # fmt: skip
        if thread == consumers:
            ptx.prefetch_map(xmap)
            load_pixels(
                xmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step, stop_step
            )
        elif thread == consumers + 32:
            if not weights_ahead:
                ptx.wait_for_predecessor()
            load_weights(
                wmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step, stop_step
            )
        elif thread >= idle and thread < idle + 32:
            _, column = origin(first_tile, cluster_row, cluster_column)
            warm(lane, column, i32(min(bn, columns - column)), operands)

    return load


def _load_pixels(workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan) -> Callable[..., None]:
    """One thread loads this block's part of the pixels of all its tiles, step by step."""
    bk, in_turn = plan.bk, plan.turns > 1
    row_bytes = bk * Wgmma(workload.params.dtype).element_bytes
    own_pixels = plan.bm // plan.cluster_n  # the part that a block loads
    dilation_h, dilation_w = gemm.dilation
    clusters, tiles, origin = plan.cluster_rows * plan.cluster_columns, _cluster_tiles(plan), tile_origin(plan)
    masks, multicasts = tiles.masks(), tiles.multicasts
    fill, advance, drain = pipeline.producer(plan.stages, (plan.bm + plan.bn) * row_bytes, plan.bm * row_bytes)
    next_barriers = _next_barriers(plan)
    base_pixel, first_load, next_load = _k_steps(gemm, plan)
    load_image, first_channel = _load_image(gemm, bk, tiles.n > 1), _first_channel(gemm, bk)

    def load_pixels(  # type: ignore[no-untyped-def]
        xmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step, stop_step
    ):  # fmt: skip
        stage = u32(0)
        parity = u32(1)
        same_rows, _ = masks(part, cluster_row, cluster_column)
        offset = u32(cluster_column * own_pixels * row_bytes)
        tile = first_tile
        while tile < clusters:
            row, column = origin(tile, cluster_row, cluster_column)
            image, h, w = base_pixel(i32(row + cluster_column * own_pixels))
            group_channel = first_channel(column)
            tap, channel, tap_h, tap_w = first_load(first_step)
            if tile == first_tile:
                ptx.wait_for_predecessor()
            for _ in range(first_step, stop_step):
                to, barrier = fill(shared, full, empty, stage, parity)
                tap_x, tap_y = u16(tap_w * dilation_w), u16(tap_h * dilation_h)
                load_image(to + offset, xmap, i32(group_channel + channel), w, h, image, barrier, tap_x, tap_y, same_rows)
                tap, channel, tap_h, tap_w = next_load(tap, channel, tap_h, tap_w)
                stage, parity = advance(stage, parity)
            if in_turn:
                full = next_barriers(shared, full, empty)
            tile = i32(tile + next_tile)
        if multicasts:  # other blocks' consumers arrive here and still read the data that was sent: stay until all are done
            drain(empty, stage, parity)

    return load_pixels


def _load_weights(workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan) -> Callable[..., None]:
    """Another thread loads this block's part of the weights of the same tiles."""
    bk, in_turn = plan.bk, plan.turns > 1
    row_bytes = bk * Wgmma(workload.params.dtype).element_bytes
    own_filters = plan.bn // plan.cluster_m  # the part that a block loads
    clusters, tiles, origin = plan.cluster_rows * plan.cluster_columns, _cluster_tiles(plan), tile_origin(plan)
    masks, filters_offset = tiles.masks(), plan.bm * row_bytes
    fill, advance, _ = pipeline.producer(plan.stages, (plan.bm + plan.bn) * row_bytes, plan.bn * row_bytes)
    next_barriers = _next_barriers(plan)
    base_pixel, first_load, next_load = _k_steps(gemm, plan)
    first_filter = _first_filter(gemm)
    if gemm.filter_block:
        load_filters = _load_blocked_filters(workload, gemm, plan)
    elif gemm.order:
        load_filters = _load_ordered_filters(gemm.order.block, tiles.m > 1)
    else:
        load_filters = _load_filters(gemm, bk, tiles.m > 1, store.interleaved(workload.params.out_dtype))

    def load_weights(  # type: ignore[no-untyped-def]
        wmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step, stop_step
    ):  # fmt: skip
        stage = u32(0)
        parity = u32(1)
        _, same_columns = masks(part, cluster_row, cluster_column)
        offset = u32(filters_offset + cluster_row * own_filters * row_bytes)
        tile = first_tile
        while tile < clusters:
            row, column = origin(tile, cluster_row, cluster_column)
            image, _, _ = base_pixel(row)
            filters = first_filter(i32(column + cluster_row * own_filters), image)
            tap, channel, tap_h, tap_w = first_load(first_step)
            for _ in range(first_step, stop_step):
                to, barrier = fill(shared, full, empty, stage, parity)
                load_filters(to + offset, wmap, channel, tap, filters, barrier, same_columns)
                tap, channel, tap_h, tap_w = next_load(tap, channel, tap_h, tap_w)
                stage, parity = advance(stage, parity)
            if in_turn:
                full = next_barriers(shared, full, empty)
            tile = i32(tile + next_tile)

    return load_weights


def _cluster_tiles(plan: Plan) -> ClusterTiles:
    return ClusterTiles(plan.cluster_m, plan.cluster_n, plan.split_k)


def _k_steps(gemm: Im2col, plan: Plan) -> gather.Im2colSteps:
    bk = plan.bk
    return gather.im2col(
        gemm.out_w, gemm.out_h * gemm.out_w, gemm.stride, (-gemm.lower[1], -gemm.lower[0]),
        gemm.channels if gemm.x.plain else gemm.channel_steps(bk) * bk, bk, gemm.kernel_w,
        output_of(gemm, plan.bm).padded_rows if gemm.images > 1 else 0,
    )  # fmt: skip


def _next_barriers(plan: Plan) -> Callable[[Any, Any, Any], Any]:
    """`next_barriers(shared, full, empty)`: the barriers of the half that takes the next tile."""
    stages, full_offset = plan.stages, plan.shared.offset("full")

    def next_barriers(shared: Any, full: Any, empty: Any) -> Any:
        full = u32(full + stages * BARRIER_BYTES)
        if full == empty:
            full = u32(shared + full_offset)
        return full

    return next_barriers


def _load_image(gemm: Im2col, bk: int, multicast: bool) -> Callable[..., Any]:
    """`load(to, xmap, channel, w, h, image, barrier, tap_x, tap_y, blocks)`: loads a column of `maps.image_map`.

    Channels are numbered through all blocks, and each block has a multiple of bk.
    """
    load, split = cluster.tma_load_im2col(multicast), _channel_in_block(gemm, bk)
    image_step, block_step = gemm.x.image_step, gemm.x.block_step

    def load_block(
        to: Any, xmap: Any, channel: Any, w: Any, h: Any, image: Any, barrier: Any, tap_x: Any, tap_y: Any, blocks: Any
    ) -> None:
        block, within = split(channel)
        load(to, xmap, within, w, h, i32(image * image_step + block * block_step), barrier, tap_x, tap_y, blocks)

    return load if gemm.x.plain else load_block


def _first_channel(gemm: Im2col, bk: int) -> Callable[[Any], Any]:
    """`first(column)`: the first input channel of an output channel's group, numbered as in `_load_image`."""
    group_columns = gemm.columns // gemm.groups
    channels = gemm.channels if gemm.x.plain else gemm.channel_steps(bk) * bk

    def first(column: Any) -> Any:
        return i32(u32(column) // u32(group_columns) * u32(channels))

    def of_one_group(column: Any) -> Any:
        return i32(0)

    of_slice = gemm.first_channel

    def of_a_slice(column: Any) -> Any:
        return i32(of_slice)

    return first if gemm.groups > 1 else of_a_slice if of_slice else of_one_group


def _first_filter(gemm: Im2col) -> Callable[[Any, Any], Any]:
    """`first(column, image)`: the first filter of a tile's columns among those of all images."""
    columns = gemm.columns

    def first(column: Any, image: Any) -> Any:
        return column

    def of_image(column: Any, image: Any) -> Any:
        return i32(column + image * columns)

    return of_image if gemm.own_weights else first


def _channel_in_block(gemm: Im2col, bk: int) -> Callable[[Any], Any]:
    """`split(channel)`: a channel's block of x and its place in it. Channels are numbered as in `_load_image`."""
    padded = math.ceil(gemm.x.size / bk) * bk

    def split(channel: Any) -> Any:
        block = i32(u32(channel) // u32(padded))
        return block, i32(channel - block * padded)

    return split


def _load_filters(gemm: Im2col, bk: int, multicast: bool, interleaved: bool) -> Callable[..., Any]:
    """`load(to, wmap, channel, tap, column, barrier, blocks)`: loads a box of `maps.filter_map`."""
    load_five, load_three = cluster.tma_load_interleaved(multicast), cluster.tma_load_tiled(multicast)

    def load(to: Any, wmap: Any, channel: Any, tap: Any, column: Any, barrier: Any, blocks: Any) -> None:
        load_five(to, wmap, channel, tap, i32(column >> 4), barrier, blocks)

    load_box = load if interleaved else load_three
    split, block_size = _channel_in_block(gemm, bk), gemm.x.size

    def load_of_block(to: Any, wmap: Any, channel: Any, tap: Any, column: Any, barrier: Any, blocks: Any) -> None:
        block, within = split(channel)
        load_box(to, wmap, i32(block * block_size + within), tap, column, barrier, blocks)

    return load_box if gemm.x.plain else load_of_block


def _load_blocked_filters(workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan) -> Callable[..., Any]:
    """As `_load_filters`: loads the boxes of `maps.blocked_filter_map` for a block's part of the tile's columns."""
    bk, block, taps = plan.bk, gemm.filter_block, gemm.taps
    inputs, own_filters = gemm.channels // block * taps, plan.bn // plan.cluster_m
    boxes, box_columns = max(1, own_filters // block), min(own_filters, block)
    box_bytes = box_columns * bk * Wgmma(workload.params.dtype).element_bytes
    split, columns_are_interleaved = _channel_in_block(gemm, bk), store.interleaved(workload.params.out_dtype)
    load_box = cluster.tma_load_boxes(5 if columns_are_interleaved else 4, plan.cluster_m > 1)

    def load_interleaved(
        to: Any, wmap: Any, channel: Any, tap: Any, column: Any, barrier: Any, blocks: Any
    ) -> None:  # fmt: skip
        number, within = split(channel)
        of_columns = i32(u32(column) // u32(block))
        sixteen = i32((column - of_columns * block) >> 4)
        first = i32(of_columns * inputs + number * taps + tap)
        for box in range(boxes):
            at = u32(to + box * box_bytes)
            load_box(at, wmap, within, 0, 0, sixteen, i32(first + box * inputs), barrier, blocks)

    def load(to: Any, wmap: Any, channel: Any, tap: Any, column: Any, barrier: Any, blocks: Any) -> None:
        number, within = split(channel)
        of_columns = i32(u32(column) // u32(block))
        of_block = i32(column - of_columns * block)
        load_box(to, wmap, within, of_block, i32(number * taps + tap), of_columns, barrier, blocks)

    return load_interleaved if columns_are_interleaved else load


def _load_ordered_filters(block: int, multicast: bool) -> Callable[..., Any]:
    """As `_load_filters`: loads a box of `maps.ordered_filter_map`."""
    load_box = cluster.tma_load_boxes(4, multicast)

    def load(to: Any, wmap: Any, channel: Any, tap: Any, column: Any, barrier: Any, blocks: Any) -> None:
        number = i32(u32(column) // u32(block))
        load_box(to, wmap, channel, tap, i32(column - number * block), number, barrier, blocks)

    return load
