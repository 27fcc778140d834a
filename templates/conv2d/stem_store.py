"""The end of a tile of conv2d_stem: the zero point, the epilogue and the store of the 64 pixels of a warpgroup.

In every 8 output channels (an octet) a thread holds two neighbours of its two pixels; in every 16 four, if the channels are
interleaved (`store.interleaved`). Numbers of 16 and 8 bits go through shared memory and TMA, those of 32 bits straight from
registers.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d.stem_sizes import Plan, Staging
from schedsearch.templates.parts import ptx, store, walk
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import WARPGROUP
from schedsearch.templates.parts.store_rows import StagedRows
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import SCALAR, TABLE, ZeroPoint, correct_fragments, no_correction
from schedsearch.workload import Workload


def channel_of_column(out_dtype: str) -> Callable[[Any], Any]:
    """`channel_of(column)`: the output channel of a column of wgmma's result, see `store.interleaved`."""

    def same(column: Any) -> Any:
        return column

    def of_interleaved(column: Any) -> Any:
        return i32((column & ~15) | (column & 7) << 1 | (column >> 3 & 1))

    return of_interleaved if store.interleaved(out_dtype) else same


def place_in_tile(tile_w: int) -> Callable[[Any], Any]:
    """`place_of(pixel)`: (row, column) of a pixel of a tile."""

    def place_of(pixel: Any) -> Any:
        row = i32(u32(pixel) // u32(tile_w))
        return row, i32(pixel - row * tile_w)

    return place_of


def rows_of(workload: Workload[Conv2dParams], plan: Plan) -> StagedRows | None:
    """How the pixels of a warpgroup are stored if TMA cannot store them, or None."""
    p = workload.params
    if not Staging.of(workload).sums_bytes:
        return None
    return StagedRows(plan.columns // 8, p.k, p.slice_of or p.k, plan.shared.offset("y"))


def end_of_tile(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """The functions of the end of a tile: (words_ahead, load_ahead, finish).

    `finish(acc, ahead, y, tile, group, lane, leader, places, staged_at, operands)` applies the epilogue to a thread's
    accumulators and stores them. `places` are rows and columns of the thread's two pixels in the tile: (row, column, row_8,
    column_8). `staged_at` is (group_y, matrix_address, matrix_row): the shared addresses of the warpgroup's y and of the
    row in it that the lane gives to stmatrix, and that row's number. If there are `words_ahead`,
    `load_ahead(ahead, tile, lane, places, operands)` must have loaded them.
    """
    if rows := rows_of(workload, plan):
        return _end_of_rows(workload, plan, epilogue, rows)
    out_channels, tile_w, columns = workload.output.shape[3], plan.tile_w, plan.columns
    octets, interleaved, accumulator = out_channels // 8, store.interleaved(workload.params.out_dtype), epilogue.accumulator
    pixels_8 = workload.output.shape[2] if tile_w == 8 else 8  # from pixel lane / 4 of a warp to the one after 8
    fragment_of, correct = _fragment_of(workload, plan), _correction(zero, epilogue, octets, interleaved, pixels_8)
    words_ahead, fused = epilogue.words_ahead(octets, interleaved) if interleaved else 0, not epilogue.identity
    fuse = epilogue.fragments(octets, pixels_8 * out_channels, interleaved, ahead=words_ahead > 0)
    load: Any = epilogue.load_ahead(octets, pixels_8 * out_channels) if words_ahead else None
    staging = Staging.of(workload)
    staged, segments, channels, segment_bytes = (
        staging.segments > 0,
        staging.segments,
        staging.channels,
        staging.segment_bytes,
    )
    flip_of, stage_y = _flip_of(staging), _stage(workload, staging, columns // 8, accumulator)
    store_direct = _store_direct(octets, pixels_8 * out_channels, Wgmma(workload.params.dtype).accumulator)
    group_barrier = ptx.group_barrier(plan.warpgroups, WARPGROUP)

    def load_ahead(ahead: Any, tile: Any, lane: Any, places: Any, operands: Any) -> None:
        _, _, _, _, k, offset, inside, inside_8 = fragment_of(tile, lane, places)
        load(ahead, out_channels, inside, inside_8, k, offset, *operands)

    def finish(
        acc: Any, ahead: Any, y: Any, tile: Any, group: Any, lane: Any, leader: Any, places: Any, staged_at: Any,
        operands: Any,
    ) -> None:  # fmt: skip
        group_y, matrix_address, matrix_row = staged_at
        image, row, column, pixel, k, offset, inside, inside_8 = fragment_of(tile, lane, places)
        correct(acc, out_channels, pixel, k, operands)
        if words_ahead:
            fuse(acc, ahead, out_channels, inside, inside_8, k, offset, *operands)
        elif fused:
            fuse(acc, out_channels, inside, inside_8, k, offset, *operands)
        if staged:
            stage_y(acc, lane, matrix_address, flip_of(matrix_row), columns)
            ptx.fence_async_shared()
            group_barrier(group)
            if leader:
                for segment in range(segments):
                    ptx.tma_store_4d(y, group_y + segment * segment_bytes, segment * channels, column, row, image)
                ptx.bulk_commit()
        else:
            store_direct(acc, y, inside, inside_8, offset)

    return words_ahead, load_ahead, finish


def _end_of_rows(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, rows: StagedRows
) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """As `end_of_tile`, for `rows_of`: the epilogue works on neighbours of a pixel, when they leave shared memory."""
    _, out_h, out_w, out_channels = workload.output.shape
    tile_origin = walk.rectangles(plan.row_tiles, plan.strips, plan.tile_h, plan.tile_w)
    place_of, begin = place_in_tile(plan.tile_w), rows.begin()

    def pixel_of(tile: Any, pixel: Any) -> Any:
        image, first_row, first_column = tile
        row, column = place_of(pixel)
        row, column = i32(first_row + row), i32(first_column + column)
        return i64(i64(image * out_h + row) * out_w + column), row < out_h and column < out_w

    store_rows = rows.store(epilogue, workload.params.out_dtype, pixel_of)

    def load_ahead(ahead: Any, tile: Any, lane: Any, places: Any, operands: Any) -> None:
        pass

    def finish(
        acc: Any, ahead: Any, y: Any, tile: Any, group: Any, lane: Any, leader: Any, places: Any, staged_at: Any,
        operands: Any,
    ) -> None:  # fmt: skip
        _, _, matrix_row = staged_at
        place = begin(group, lane, i32(matrix_row - (lane & 15)))
        store_rows(acc, y, place, tile_origin(tile), i32(0), i32(out_channels), operands)

    return 0, load_ahead, finish


def _fragment_of(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., Any]:
    """`fragment_of(tile, lane, places)`: (image, row, column) of the tile, (pixel, k, offset) of the thread's first value,
    and whether its two pixels are inside of y."""
    _, out_h, out_w, out_channels = workload.output.shape
    tile_origin = walk.rectangles(plan.row_tiles, plan.strips, plan.tile_h, plan.tile_w)
    neighbours = 4 if store.interleaved(workload.params.out_dtype) else 2

    def fragment_of(tile: Any, lane: Any, places: Any) -> Any:
        tile_row, tile_column, tile_row_8, tile_column_8 = places
        image, row, column = tile_origin(tile)
        k = i32((lane & 3) * neighbours)
        pixel = i64(i64(image * out_h + row + tile_row) * out_w + (column + tile_column))
        offset = i64(pixel * out_channels + k)
        inside = (row + tile_row < out_h) & (column + tile_column < out_w)
        inside_8 = (row + tile_row_8 < out_h) & (column + tile_column_8 < out_w)
        return image, row, column, pixel, k, offset, inside, inside_8

    return fragment_of


def _correction(
    zero: ZeroPoint | None, epilogue: Epilogue, octets: int, interleaved: bool, pixels_8: int
) -> Callable[..., None]:
    """`correct(values, columns, pixel, k, operands)`, as `ZeroPoint.correction`; pixels are those of `pixels_8` apart."""
    if zero is None:
        return no_correction
    place, correct = zero.places(), correct_fragments(octets, interleaved)
    table, scalar = epilogue.index(TABLE), epilogue.index(SCALAR)

    def correct_sums(values: Any, columns: Any, pixel: Any, k: Any, operands: Any) -> None:
        correct(values, columns, place(pixel), place(pixel + pixels_8), k, operands[table], operands[scalar])

    return correct_sums


def _flip_of(staging: Staging) -> Callable[[Any], Any]:
    """`flip_of(row)`: what the chunks of a row of a segment are swizzled by, the number of its 128-byte line."""
    row_bytes, chunks = staging.row_bytes, staging.row_bytes // 16

    def flip_of(row: Any) -> Any:
        return u32((row * row_bytes >> 7) & (chunks - 1))

    return flip_of


def _stage(workload: Workload[Conv2dParams], staging: Staging, octets: int, accumulator: str) -> Callable[..., None]:
    """Packs accumulators into rows of segments, see `store.stage_pairs`."""
    p = workload.params
    chunks, segment_bytes = staging.row_bytes // 16, staging.segment_bytes
    if store.interleaved(p.out_dtype):
        return store.stage_bytes(p.out_dtype, octets, chunks, segment_bytes)
    out_dtype = p.out_dtype if staging.segments else "float16"  # not used for numbers of 32 bits
    return store.stage_pairs(out_dtype, octets, 8, segment_bytes, accumulator)


def _store_direct(octets: int, pixel_8_elements: int, accumulator: str) -> Callable[..., None]:
    """Stores the 32 bits of registers."""
    store_two = ptx.store_global_f32x2 if accumulator == "float32" else ptx.store_global_b32x2

    def store_direct(acc: Any, y: Any, inside: Any, inside_8: Any, offset: Any) -> None:
        for octet in range(octets):
            if inside:
                store_two(y + u64((offset + octet * 8) * 4), acc[4 * octet], acc[4 * octet + 1])
            if inside_8:
                store_two(y + u64((offset + (pixel_8_elements + octet * 8)) * 4), acc[4 * octet + 2], acc[4 * octet + 3])

    return store_direct
