"""The kernel of conv2d_mma: load by cp.async into a ring of stages, multiply by mma.sync, stage the tile, store.

The kernel captures the functions here, and they become part of it. A thread loads one column of chunks, in rows that are
`row_step` apart. A chunk is 16 bytes along the reduction, one row of an 8x8 ldmatrix.

Sources: PTX ISA, "Warp Level Matrix Instructions" (ldmatrix) and "cp.async".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.conv2d import CONV2D, Conv2dParams, first_channel
from schedsearch.templates.conv2d.mma_sizes import Plan
from schedsearch.templates.conv2d.mma_store import ChannelCorrections, output
from schedsearch.templates.conv2d.ring import CHUNK_BYTES, OUTSIDE, filter_sets, swizzle
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.warm import warm_operands
from schedsearch.workload import Workload

# Names that the kernel and its functions capture; see `KernelStep`.
SHAPED_BY = frozenset({"accumulators", "rows_x", "of_a", "of_b"})


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """The kernel of one configuration. It takes (x, weight, y, *epilogue.params); addresses are u64."""
    index = i64 if plan.wide_counts else i32
    tiles, steps, stages, persistent = plan.tiling.tiles, plan.steps, plan.stages, plan.persistent
    mma, accumulators, rows_x = plan.gemm.mma, plan.accumulators, plan.rows_x
    warps, warps_n, wm, wn, slices = plan.warps, plan.warps_n, plan.wm, plan.wn, plan.slices
    row_bytes, stage_bytes = plan.row_bytes, plan.stage_bytes
    staged_row_bytes, slice_bytes, chunks = plan.staged_row_bytes, plan.slice_bytes, plan.chunks
    parts = plan.bk // mma.k // slices  # instructions along k of one warp within a step
    sum_type = mma.accumulator_type

    place, locate_pixels, locate_filters = tile_walk(plan), pixels(workload, plan), filters(plan)
    place_in_x = load_order(workload, plan)
    load_x, load_w = pixel_loads(workload, plan), filter_loads(plan)
    commit, wait_stage, wait_all = ptx.cp_async_commit, ptx.cp_async_wait(stages - 2), ptx.cp_async_wait(0)
    image_of = images(plan)
    operands_of, of_a, of_b = first_operands(plan), wm // 4, wn // 4
    load, multiply = mma.load(wm, wn, row_bytes), mma.multiply(wm, wn, row_bytes)
    stage_tile = mma.stage(wm, wn, staged_row_bytes)
    set_of, stop_of, store = filter_sets(plan, _count(plan)), image_end(plan), output(workload, plan, epilogue, corrections)
    warm, bn, group_channels = warm_operands(workload, epilogue.params), plan.bn, plan.gemm.k
    weights_ahead = not plan.own_weights

    def kernel(x: Any, weight: Any, y: Any, *operands: Any) -> None:
        shared = shared_base()
        thread = u32(cuda.threadIdx.x)  # unsigned: a division by a power of two is then a shift
        lane, warp = u32(thread % 32), u32(thread // 32)
        part_first, warp = u32(warp // warps * parts), u32(warp % warps)
        out_slice = u32(shared + part_first // parts * slice_bytes)
        warp_m, warp_n = u32(warp // warps_n * wm), u32(warp % warps_n * wn)

        # Where this thread writes its chunks and reads its fragments.
        column = u32(thread % chunks)
        row = u32(thread // chunks)
        row_of_x, column_of_x = place_in_x(thread)
        x_first, w_start = operands_of(shared, lane, warp_m, warp_n, part_first)
        a = cuda.local.array(of_a, u32)
        b = cuda.local.array(of_b, u32)
        next_b = cuda.local.array(of_b, u32)

        h0 = cuda.local.array(rows_x, i32)  # row of the pixel's first tap, may be negative
        w0 = cuda.local.array(rows_x, i32)
        x_rows = cuda.local.array(rows_x, u64)
        acc = cuda.local.array(accumulators, sum_type)

        for tile in range(index(cuda.blockIdx.x), index(tiles), index(cuda.gridDim.x)):
            m_first, group, k_first = place(tile)
            m_stop = stop_of(m_first)
            locate_pixels(x, m_first, m_stop, row_of_x, group, h0, w0, x_rows)
            w_first, k_left = locate_filters(weight, row, set_of(image_of(m_first), group), k_first)

            # ---- load and multiply
            for i in range(accumulators):
                acc[i] = sum_type(0)
            if not weights_ahead:
                ptx.wait_for_predecessor()
            for step in range(stages - 1):
                load_w(u32(shared + step * stage_bytes), i32(step), row, column, w_first, k_left)
            if weights_ahead:
                ptx.wait_for_predecessor()
            for step in range(stages - 1):
                load_x(u32(shared + step * stage_bytes), i32(step), row_of_x, column_of_x, h0, w0, x_rows)
                commit()  # the first group has the weights of all these stages
            if thread < 32:  # this warp would wait for the first stage anyway
                warm(lane, i32(group * group_channels + k_first), i32(min(bn, k_left)), operands)
            read, write = i32(0), i32(stages - 1)
            wait_stage()
            cuda.syncthreads()
            load(a, b, x_first, w_start)
            for step in range(i32(steps)):
                filled = u32(shared + write * stage_bytes)  # beyond the last step with zeros, without reading
                load_x(filled, i32(step + stages - 1), row_of_x, column_of_x, h0, w0, x_rows)
                load_w(filled, i32(step + stages - 1), row, column, w_first, k_left)
                commit()
                at = u32(read * stage_bytes)
                for part in range(1, parts):  # the operands of each are loaded while those before are multiplied
                    flips = u32(part * 32)  # bits of a chunk's number, which the swizzle only flips
                    multiply(acc, a, b, next_b, (x_first + at) ^ flips, (w_start + at) ^ flips)
                    for i in range(of_b):
                        b[i] = next_b[i]
                wait_stage()
                cuda.syncthreads()  # all threads have read the stage that is filled next; the last step reads zeros
                read = i32(read + 1 if read + 1 < stages else 0)
                write = i32(write + 1 if write + 1 < stages else 0)
                multiply(acc, a, b, next_b, x_first + u32(read * stage_bytes), w_start + u32(read * stage_bytes))
                for i in range(of_b):
                    b[i] = next_b[i]
            wait_all()
            cuda.syncthreads()

            # ---- store
            stage_tile(acc, out_slice + (warp_m + lane // 4) * staged_row_bytes + (warp_n + lane % 4 * 2) * 4)
            cuda.syncthreads()
            store(y, shared, thread, m_first, m_stop, group, k_first, k_left, operands)
            if persistent:
                cuda.syncthreads()  # all threads must have read the result before the ring is filled again

    return kernel


def first_operands(plan: Plan) -> Callable[..., Any]:
    """`operands_of(shared, lane, m, n, part)`: where a lane's ldmatrix of x and of the weights begin in the first stage.

    The warp's tile begins with the block's pixel m and channel n, its part of a step with the instruction `part` along k.
    """
    row_bytes, x_bytes, flip = plan.row_bytes, plan.x_bytes, swizzle(plan.chunks)

    def operands_of(shared: Any, lane: Any, m: Any, n: Any, part: Any) -> Any:
        x_row = u32(lane % 16)
        w_row = u32(lane % 8 + lane // 16 * 8)
        x_chunk = u32((part * 2 + lane // 16) ^ flip(x_row))
        w_chunk = u32((part * 2 + lane // 8 % 2) ^ flip(w_row))
        x_first = u32(shared + (m + x_row) * row_bytes + x_chunk * 16)
        return x_first, u32(shared + x_bytes + (n + w_row) * row_bytes + w_chunk * 16)

    return operands_of


# --- Walk -------------------------------------------------------------------------------------------------------------
def tile_walk(plan: Plan) -> Callable[..., Any]:
    """`place(tile)` returns (first output pixel, group, first channel in the group).

    Tiles are walked in bands of `plan.band` pixel tiles. Within a band, pixels run fastest, then channels, then groups.
    """
    count = _count(plan)
    tiling, band, bm, bn, out_pixels = plan.tiling, plan.band, plan.bm, plan.bn, plan.tiling.pixels
    tiles_m, tiles_n, image_tiles, group_tiles = tiling.tiles_m, tiling.tiles_n, tiling.image_tiles, tiling.group_tiles

    def of_all_images(tile_m: Any) -> Any:
        return count(tile_m * bm)

    def of_one_image(tile_m: Any) -> Any:
        image = count(tile_m // image_tiles)
        return count(image * out_pixels + (tile_m - image * image_tiles) * bm)

    first_pixel = of_one_image if plan.bound else of_all_images

    def place(tile: Any) -> Any:
        first = count(count(tile) // (band * tiles_n) * band)
        height = count(min(tiles_m - first, band))
        inside_band = count(count(tile) % (band * tiles_n))
        tile_n = count(inside_band // height)
        tile_m = count(first + inside_band % height)
        group = count(tile_n // group_tiles)
        return first_pixel(tile_m), group, i32((tile_n - group * group_tiles) * bn)

    return place


def image_end(plan: Plan) -> Callable[[Any], Any]:
    """`stop_of(m_first)`: the first output pixel after those that the tile at `m_first` may have."""
    count, m_total, out_pixels = _count(plan), plan.gemm.m, plan.tiling.pixels

    def of_all_images(m_first: Any) -> Any:
        return m_total

    def of_one_image(m_first: Any) -> Any:
        return count((m_first // out_pixels + 1) * out_pixels)

    return of_one_image if plan.bound else of_all_images


def images(plan: Plan) -> Callable[[Any], Any]:
    """`image_of(m_first)`: the image of the tile at `m_first`, if tiles are bound."""
    count, out_pixels = _count(plan), plan.gemm.pixels

    def image_of(m_first: Any) -> Any:
        return count(m_first // out_pixels)

    return image_of


def _count(plan: Plan) -> Any:
    return i64 if plan.wide_counts else u32


# --- Load -------------------------------------------------------------------------------------------------------------
def load_order(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any], Any]:
    """`place_in_x(thread)` returns the (row, column of chunks) of x that a thread loads first.

    Neighbouring threads load neighbours in memory: chunks of one block of channels, then pixels, then further blocks.
    """
    chunks, row_step = plan.chunks, plan.row_step
    run_chunks = math.gcd(strides_of(workload, "x")["C"].run(plan.gemm.c) // plan.gemm.mma.chunk, chunks) or 1
    across = chunks if workload.params.layout == "NHWC" else run_chunks
    if across == chunks:
        return lambda thread: (u32(thread // chunks), u32(thread % chunks))

    def by_blocks(thread: Any) -> Any:
        column = u32(thread // (across * row_step) * across + thread % across)
        return u32(thread // across % row_step), column

    return by_blocks


def pixels(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`locate(x, m_first, m_stop, row, group, h0, w0, x_rows)` finds the pixels that a thread loads.

    It writes for each of the thread's rows the coordinates of the first tap and that element's address.
    """
    count, rows, row_step, element_bytes = _count(plan), plan.rows_x, plan.row_step, plan.gemm.element_bytes
    out_w, out_pixels = CONV2D.output_hw(workload.params)[1], plan.gemm.pixels
    (stride_h, stride_w), (pad_top, pad_left) = workload.params.stride, workload.params.padding[:2]
    pixel_of, group_elements = _first_pixel(workload), _group_elements(workload, plan)

    def locate(
        x: Any, m_first: Any, m_stop: Any, row: Any, group: Any, h0: Any, w0: Any, x_rows: Any
    ) -> None:  # fmt: skip
        for i in range(rows):
            m = count(m_first + row + i * row_step)
            n = count(m // out_pixels)
            pixel = count(m - n * out_pixels)
            p = count(pixel // out_w)
            down = i32(p * stride_h - pad_top)
            right = i32((pixel - p * out_w) * stride_w - pad_left)
            h0[i] = down if m < m_stop else i32(OUTSIDE)
            w0[i] = right
            x_rows[i] = x + u64(
                (pixel_of(n, down, right) + i64(group) * group_elements) * element_bytes
            )  # fmt: skip

    return locate


def _pixel(workload: Workload[Conv2dParams]) -> Callable[[Any, Any, Any], Any]:
    """`pixel_of(n, row, column)`: offset in x of a pixel's first channel; the pixel may lie outside of the image."""
    strides = strides_of(workload, "x")
    rows, columns = strides["N"].outer // strides["H"].outer, strides["H"].outer // strides["W"].outer
    pixel_elements = strides["W"].outer

    def pixel_of(n: Any, row: Any, column: Any) -> Any:
        return ((i64(n) * rows + row) * columns + column) * pixel_elements

    return pixel_of


def _first_pixel(workload: Workload[Conv2dParams]) -> Callable[[Any, Any, Any], Any]:
    """As `_pixel`, of the array that has x: of the first channel of x in it."""
    pixel_of, of_slice = _pixel(workload), first_channel(workload.params)
    first = strides_of(workload, "x")["C"].outer * of_slice

    def first_of(n: Any, row: Any, column: Any) -> Any:
        return pixel_of(n, row, column) + first

    return first_of if of_slice else pixel_of


def _group_elements(workload: Workload[Conv2dParams], plan: Plan) -> int:
    """Elements of x from one group of channels to the next. A group has whole blocks, if there are blocks."""
    channels = strides_of(workload, "x")["C"]
    return plan.gemm.c // channels.block * channels.outer


def pixel_loads(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`load(stage, step, row, column, h0, w0, x_rows)` loads the thread's chunks of x, and zeros outside of the image."""
    p = workload.params
    rows, row_step, bm, bk, row_bytes = plan.rows_x, plan.row_step, plan.bm, plan.bk, plan.row_bytes
    piece, c_group, kk_total, flip = plan.gemm.piece_x, plan.gemm.c, plan.gemm.depth, swizzle(plan.chunks)
    chunk, element_bytes = plan.gemm.mma.chunk, plan.gemm.element_bytes
    pieces, copy, ragged = chunk // piece, ptx.cp_async(piece * element_bytes), bm % row_step != 0
    h, w, kernel_w, padded = p.h, p.w, p.s, any(p.padding)
    pixel_of, channel_of = _pixel(workload), strides_of(workload, "x")["C"].offset()
    dilation_h, dilation_w = p.dilation
    one_tap = c_group % bk == 0  # a step then lies within one tap, and all threads do the same arithmetic

    def load(stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any) -> None:
        for number in range(pieces):
            kk = u32(step * bk + column * chunk + number * piece)
            tap = u32(u32(step * bk) if one_tap else kk) // c_group
            tap_h = tap // kernel_w
            down = i32(tap_h * dilation_h)
            right = i32((tap - tap_h * kernel_w) * dilation_w)
            offset = pixel_of(0, down, right) + channel_of(kk - tap * c_group)
            for i in range(rows):
                to_row = u32(row + i * row_step)
                if not ragged or to_row < bm:
                    inside = (u32(h0[i] + down) < u32(h)) & (kk < u32(kk_total))
                    if padded:
                        inside = inside & (u32(w0[i] + right) < u32(w))
                    at = u32((column ^ flip(to_row)) * CHUNK_BYTES + number * piece * element_bytes)
                    to = u32(stage + to_row * row_bytes) + at
                    copy(to, x_rows[i] + u64(offset * element_bytes), piece * element_bytes if inside else 0)

    return load


def filters(plan: Plan) -> Callable[..., Any]:
    """`locate(weight, row, group, k_first)` returns the address of the thread's first filter and the channels left."""
    k_total, filter_elements, element_bytes = plan.gemm.k, plan.gemm.row, plan.gemm.element_bytes

    def locate(weight: Any, row: Any, group: Any, k_first: Any) -> Any:
        first = weight + u64((i64(group) * k_total + k_first + row) * filter_elements * element_bytes)
        return first, i32(k_total - k_first)

    return locate


def filter_loads(plan: Plan) -> Callable[..., None]:
    """`load(stage, step, row, column, w_first, k_left)` loads the thread's chunks of the weights."""
    rows, row_step, bn, bk, row_bytes = plan.rows_w, plan.row_step, plan.bn, plan.bk, plan.row_bytes
    piece, filter_elements, flip = plan.gemm.piece_w, plan.gemm.row, swizzle(plan.chunks)
    chunk, element_bytes = plan.gemm.mma.chunk, plan.gemm.element_bytes
    pieces, copy, ragged, x_bytes = chunk // piece, ptx.cp_async(piece * element_bytes), bn % row_step != 0, plan.x_bytes

    def load(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any) -> None:
        for number in range(pieces):
            kk = u32(step * bk + column * chunk + number * piece)
            for i in range(rows):
                to_row = u32(row + i * row_step)
                if not ragged or to_row < bn:
                    inside = (i32(to_row) < k_left) & (kk < u32(filter_elements))
                    offset = i64(i * row_step) * filter_elements + kk
                    at = u32((column ^ flip(to_row)) * CHUNK_BYTES + number * piece * element_bytes)
                    to = u32(stage + x_bytes + to_row * row_bytes) + at
                    copy(to, w_first + u64(offset * element_bytes), piece * element_bytes if inside else 0)

    return load
