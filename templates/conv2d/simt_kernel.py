"""The kernels of conv2d_simt: pack the weight, then load, multiply on CUDA cores, store.

The kernels capture the functions here, and they become part of them. Both operands of a step lie in shared memory in rows
along the reduction: `bm` pixels of x, then `bn` filters. A row has chunks of four words, 16 bytes. A thread loads one column
of chunks, in rows that are `row_step` apart, and multiplies `tm` pixels, `threads_m` apart, with `tn` filters, `threads_n`
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layout import Layout
from schedsearch.templates.conv2d.simt_sizes import (
    CHUNK_BYTES,
    WARP_COLUMNS,
    WARP_ROWS,
    Gemm,
    Plan,
    ceil_div,
    channel_strides,
    image_strides,
    output_hw,
)
from schedsearch.templates.parts import ptx, simt
from schedsearch.templates.parts.addressing import AxisStrides
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.simt import CHUNK
from schedsearch.templates.parts.walk import banded
from schedsearch.workload import Workload

OUTSIDE = -(2**30)  # a row coordinate that no tap can bring back into the image
# Lengths of local arrays; the compiler drops elements that a configuration does not use. Constant lengths let more
# configurations share a run of Numba.
MOST_ROWS = 16  # rows of x that a thread loads, and rows or columns that it multiplies
MOST_HELD = 64  # words on their way through registers, of both operands together
SHAPED_BY = frozenset({"sums_count"})  # names that the kernel and its functions capture; see `KernelStep`


def build_kernel(workload: Workload, plan: Plan, epilogue: Epilogue, capability: tuple[int, int]) -> Callable[..., None]:
    """The kernel of one configuration.

    It takes (x, packed, weight_sums, y, x_zero_point, weight_zero_point, *epilogue.params): addresses are u64, zero points
    f32. `packed` is what `build_pack` writes, `weight_sums` what `build_sums` writes; it is read if x has a zero point.
    """
    tiles, steps, stages, chunks, part_rows = plan.tiles, plan.steps, plan.stages, plan.chunks, plan.part_rows
    tm, parts = plan.tm, plan.tm // plan.part_rows
    sums_count, warps_n = plan.tm * plan.tn, plan.threads_n // WARP_COLUMNS
    row_bytes, stage_bytes, x_bytes, staged_row_bytes = plan.row_bytes, plan.stage_bytes, plan.x_bytes, plan.staged_row_bytes

    place, place_x, place_w = tile_walk(plan), place_of_load(plan, plan.gemm.pixels_first), place_of_load(plan, False)
    locate_pixels, locate_filters, outside = pixels(workload, plan), filters(plan), filling(plan.gemm)
    load_x, load_w = pixel_loads(workload, plan), filter_loads(plan)
    begin_x, finish_x, begin_w, finish_w = load_x.begin, load_x.finish, load_w.begin, load_w.finish
    commit, wait_stage, wait_all = waits(plan)
    flip, zero, multiply = swizzle(chunks), zeros(plan.gemm), products(workload, plan)
    correct = correction(workload, plan)
    stage_part = simt.store_rows(
        plan.gemm.product, tm, plan.tn, part_rows, plan.threads_m * staged_row_bytes, plan.threads_n * simt.WORD_BYTES
    )
    store = output(workload, plan, epilogue, capability)

    def kernel(
        x: Any, packed: Any, weight_sums: Any, y: Any, x_zero_point: Any, weight_zero_point: Any, *operands: Any
    ) -> None:
        shared = shared_base()
        thread = types.uint32(cuda.threadIdx.x)  # unsigned: a division by a power of two is then a shift
        lane, warp = types.uint32(thread % 32), types.uint32(thread // 32)
        own_row = types.uint32(warp // warps_n * WARP_ROWS + lane // WARP_COLUMNS)
        own_column = types.uint32(warp % warps_n * WARP_COLUMNS + lane % WARP_COLUMNS)
        x_row = types.uint32(shared + own_row * row_bytes)
        w_row = types.uint32(shared + x_bytes + own_column * row_bytes)
        x_flip = types.uint32(flip(own_row) * CHUNK_BYTES)
        w_flip = types.uint32(flip(own_column) * CHUNK_BYTES)
        staged = types.uint32(shared + own_row * staged_row_bytes + own_column * 4)
        fill = outside(x_zero_point)

        row, column = place_x(thread)
        filter_row, filter_column = place_w(thread)
        h0 = cuda.local.array(MOST_ROWS, types.int32)  # row of the pixel's first tap, may be negative
        w0 = cuda.local.array(MOST_ROWS, types.int32)
        x_rows = cuda.local.array(MOST_ROWS, types.uint64)
        x_held = cuda.local.array(MOST_HELD, types.uint32)  # words on their way through registers
        w_held = cuda.local.array(MOST_HELD, types.uint32)
        row_sums = cuda.local.array(MOST_ROWS, types.int32)
        column_sums = cuda.local.array(MOST_ROWS, types.int32)
        sums = cuda.local.array(sums_count, zero)

        for tile in range(types.int32(cuda.blockIdx.x), types.int32(tiles), types.int32(cuda.gridDim.x)):
            image, m_first, group, k_first = place(tile)
            locate_pixels(x, image, m_first, row, group, h0, w0, x_rows)
            w_first, k_left = locate_filters(packed, filter_row, group, k_first)

            # ---- load and multiply
            for i in range(sums_count):
                sums[i] = zero(0)
            for i in range(tm):
                row_sums[i] = types.int32(0)
            for step in range(stages - 1):
                stage = types.uint32(shared + step * stage_bytes)
                begin_x(stage, types.int32(step), row, column, h0, w0, x_rows, x_held, fill)
                begin_w(stage, types.int32(step), filter_row, filter_column, w_first, k_left, w_held)
                commit()
                finish_x(stage, row, column, x_held)
                finish_w(stage, filter_row, filter_column, w_held)
            read, write = types.int32(0), types.int32(stages - 1)
            for step in range(types.int32(steps)):
                wait_stage()
                cuda.syncthreads()
                # Beyond the last step this writes zeros and reads nothing.
                stage = types.uint32(shared + write * stage_bytes)
                begin_x(stage, types.int32(step + stages - 1), row, column, h0, w0, x_rows, x_held, fill)
                begin_w(stage, types.int32(step + stages - 1), filter_row, filter_column, w_first, k_left, w_held)
                commit()
                for part in range(chunks):
                    x_chunk = types.uint32(x_row + read * stage_bytes + (types.uint32(part * CHUNK_BYTES) ^ x_flip))
                    w_chunk = types.uint32(w_row + read * stage_bytes + (types.uint32(part * CHUNK_BYTES) ^ w_flip))
                    multiply(sums, row_sums, x_chunk, w_chunk)
                finish_x(stage, row, column, x_held)
                finish_w(stage, filter_row, filter_column, w_held)
                read = types.int32(read + 1 if read + 1 < stages else 0)
                write = types.int32(write + 1 if write + 1 < stages else 0)
            wait_all()
            correct(sums, row_sums, column_sums, weight_sums, group, k_first + own_column, x_zero_point, weight_zero_point)

            # ---- store
            for part in range(types.int32(parts)):
                cuda.syncthreads()  # the ring, or the part before, has been read
                stage_part(sums, staged, part)
                cuda.syncthreads()
                store(y, shared, thread, part, image, m_first, group, k_first, operands)
            cuda.syncthreads()  # the last part has been read

    return kernel


# --- Walk -------------------------------------------------------------------------------------------------------------
def tile_walk(plan: Plan) -> Callable[..., Any]:
    """`place(tile)` returns (image, first output pixel, group, first channel in the group).

    Tiles are walked in panels of `plan.panel` pixel tiles. Within a panel, pixels run fastest, then channels, then groups.
    If the batch is folded into the pixels, the image is 0.
    """
    walk = banded(plan.tiles_m, plan.tiles_n, plan.panel)
    image_tiles, group_tiles, bm, bn = plan.image_tiles, plan.group_tiles, plan.bm, plan.bn

    def place(tile: Any) -> Any:
        tile_m, tile_n = walk(tile)
        image = types.uint32(tile_m // types.uint32(image_tiles))
        group = types.uint32(tile_n // types.uint32(group_tiles))
        m_first = types.uint32((tile_m - image * image_tiles) * bm)
        return image, m_first, group, types.uint32((tile_n - group * group_tiles) * bn)

    return place


def pixel_of(workload: Workload, plan: Plan) -> Callable[[Any, Any], Any]:
    """`pixel_of(image, m)` returns (image, pixel in it) of place m on the axis of pixels that tiles are cut from."""
    image_pixels = plan.gemm.pixels

    def bound(image: Any, m: Any) -> Any:
        return types.uint32(image), types.uint32(m)

    def folded(image: Any, m: Any) -> Any:
        number = types.uint32(types.uint32(m) // types.uint32(image_pixels))
        return number, types.uint32(m - number * image_pixels)

    return bound if plan.bound or plan.gemm.images == 1 else folded


# --- Load -------------------------------------------------------------------------------------------------------------
class Loads(NamedTuple):
    """How chunks of one operand come to a stage.

    Attributes:
        begin: starts to copy a step's chunks to a stage, or loads them into registers.
        finish: stores to the stage what is in registers.
    """

    begin: Callable[..., None]
    finish: Callable[..., None]


def swizzle(chunks: int) -> Callable[[Any], Any]:
    """`flip(row)`: the number of a chunk XOR `flip(row)` is its place in a shared row of `chunks` chunks.

    Any 8 consecutive rows of one column of chunks then use all 32 banks. Rows whose distance is a multiple of 8 agree.
    """
    band, patterns = max(8 // chunks, 1), min(chunks, 8)  # rows that share 128 bytes, and distinct patterns

    def flip(row: Any) -> Any:
        return types.uint32(row // band % patterns)

    return flip


def place_of_load(plan: Plan, rows_first: bool) -> Callable[[Any], Any]:
    """`place(thread)`: the row and the column of a thread's first chunk. Neighbouring threads have neighbouring chunks of a
    row, or rows.
    """
    chunks, row_step = plan.chunks, plan.row_step

    def along_row(thread: Any) -> Any:
        return types.uint32(thread // chunks), types.uint32(thread % chunks)

    def along_column(thread: Any) -> Any:
        return types.uint32(thread % row_step), types.uint32(thread // row_step)

    return along_column if rows_first else along_row


def filling(gemm: Gemm) -> Callable[[Any], Any]:
    """`outside(x_zero_point)`: the word that stands for padding, the zero point in each byte."""

    def zero(x_zero_point: Any) -> Any:
        return types.uint32(0)

    def zero_points(x_zero_point: Any) -> Any:
        return types.uint32((types.int32(x_zero_point) & 255) * simt.ONES)

    return zero_points if gemm.fills_padding else zero


def pixels(workload: Workload, plan: Plan) -> Callable[..., None]:
    """`locate(x, image, m_first, row, group, h0, w0, x_rows)` finds the pixels that a thread loads.

    It writes for each of the thread's rows the coordinates of the first tap and the address of the group's first channel
    there.
    """
    rows, row_step, m_total, c_group = plan.rows_x, plan.row_step, plan.pixels, plan.gemm.c
    (stride_h, stride_w), (pad_top, pad_left) = workload.stride, workload.padding[:2]
    strides, size, out_w = image_strides(workload, "x"), dtype_of(workload.dtype).nbytes, output_hw(workload)[1]
    per_image, per_row, per_pixel = strides["N"].outer, strides["H"].outer, strides["W"].outer
    of_pixel, of_channel = pixel_of(workload, plan), strides["C"].offset()

    def locate(x: Any, image: Any, m_first: Any, row: Any, group: Any, h0: Any, w0: Any, x_rows: Any) -> None:
        first = of_channel(group * c_group)
        for i in range(rows):
            m = types.uint32(m_first + row + i * row_step)
            n, pixel = of_pixel(image, m)
            p = types.uint32(pixel // types.uint32(out_w))
            down = types.int32(p * stride_h - pad_top)
            right = types.int32((pixel - p * out_w) * stride_w - pad_left)
            h0[i] = down if m < m_total else types.int32(OUTSIDE)
            w0[i] = right
            offset = types.int64(n) * per_image + types.int64(down) * per_row + types.int64(right) * per_pixel + first
            x_rows[i] = types.uint64(x + types.uint64(offset * size))

    return locate


def word_loads(product: simt.Product, piece: int, channels: AxisStrides, c: int) -> Callable[..., None]:
    """`fetch(words, at, address, channel, inside, fill)`: `piece` words of neighbouring channels from `channel` on.

    `address` is that of channel 0. If `piece` is 0, it is one word of single bytes, with zeros for channels from `c` on.
    """
    of_channel, size = channels.offset(), simt.WORD_BYTES // product.elements
    load = simt.load_words(max(piece, 1))

    def one(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at] = load(address + types.uint64(of_channel(channel) * size), inside, fill)

    def two(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at], words[at + 1] = load(address + types.uint64(of_channel(channel) * size), inside, fill)

    def four(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at], words[at + 1], words[at + 2], words[at + 3] = load(
            address + types.uint64(of_channel(channel) * size), inside, fill
        )

    def single_bytes(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at] = simt.load_bytes(
            address + types.uint64(of_channel(channel)),
            address + types.uint64(of_channel(channel + 1)),
            address + types.uint64(of_channel(channel + 2)),
            address + types.uint64(of_channel(channel + 3)),
            types.int32(c - channel),
            inside,
            fill,
        )

    return {0: single_bytes, 1: one, 2: two, 4: four}[piece]


def taps(workload: Workload, plan: Plan) -> Callable[[Any], Any]:
    """`tap(kk)` of a word of the reduction: (rows down, columns right, offset in x in elements, channel in the group)."""
    gemm, strides = plan.gemm, image_strides(workload, "x")
    elements, tap_words, kernel_w = gemm.product.elements, gemm.tap_words, workload.s
    (dilation_h, dilation_w), per_row, per_pixel = workload.dilation, strides["H"].outer, strides["W"].outer

    def tap(kk: Any) -> Any:
        number = types.uint32(kk // types.uint32(tap_words))
        tap_h = types.uint32(number // types.uint32(kernel_w))
        down = types.int32(tap_h * dilation_h)
        right = types.int32((number - tap_h * kernel_w) * dilation_w)
        offset = types.int64(down) * per_row + types.int64(right) * per_pixel
        return down, right, offset, types.uint32((kk - number * tap_words) * elements)

    return tap


def pixel_loads(workload: Workload, plan: Plan) -> Loads:
    """`begin(stage, step, row, column, h0, w0, x_rows, held, fill)` and `finish(stage, row, column, held)` for x."""
    gemm, size = plan.gemm, dtype_of(workload.dtype).nbytes
    rows, row_step, bm, bk, row_bytes, flip = (
        plan.rows_x,
        plan.row_step,
        plan.bm,
        plan.bk,
        plan.row_bytes,
        swizzle(plan.chunks),
    )
    words, ragged, h, w = gemm.words, plan.bm % plan.row_step != 0, workload.h, workload.w
    piece = max(gemm.piece, 1)
    pieces, piece_bytes = CHUNK // piece, piece * simt.WORD_BYTES
    tap, of_channel = taps(workload, plan), channel_strides(workload, "x").offset()
    fetch, copy = word_loads(gemm.product, gemm.piece, channel_strides(workload, "x"), gemm.c), ptx.cp_async(piece_bytes)
    # Weights are zero beyond the last word, but sums of x must not count what fills the padding there.
    ends = gemm.fills_padding and gemm.words % plan.bk != 0

    def inside_x(h0: Any, w0: Any, down: Any, right: Any, kk: Any) -> Any:
        return (
            (types.uint32(h0 + down) < types.uint32(h))
            & (types.uint32(w0 + right) < types.uint32(w))
            & (kk < types.uint32(words))
        )

    def begin_copies(
        stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any, held: Any, fill: Any
    ) -> None:  # fmt: skip
        for number in range(pieces):
            kk = types.uint32(step * bk + column * CHUNK + number * piece)
            down, right, offset, channel = tap(kk)
            offset = types.int64(offset + of_channel(channel))
            for i in range(rows):
                to_row = types.uint32(row + i * row_step)
                if not ragged or to_row < bm:
                    at = types.uint32((column ^ flip(to_row)) * CHUNK_BYTES + number * piece_bytes)
                    inside = inside_x(h0[i], w0[i], down, right, kk)
                    to = types.uint32(stage + to_row * row_bytes + at)
                    copy(to, x_rows[i] + types.uint64(offset * size), piece_bytes if inside else 0)

    def begin_registers(
        stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any, held: Any, fill: Any
    ) -> None:  # fmt: skip
        for number in range(pieces):
            kk = types.uint32(step * bk + column * CHUNK + number * piece)
            down, right, offset, channel = tap(kk)
            filled = types.uint32(0) if ends and kk >= types.uint32(words) else fill
            for i in range(rows):
                inside = inside_x(h0[i], w0[i], down, right, kk)
                if ragged:
                    inside = inside & (row + i * row_step < bm)
                address = types.uint64(x_rows[i] + types.uint64(offset * size))
                fetch(held, CHUNK * i + number * piece, address, channel, inside, filled)

    finish_registers = held_stores(plan, plan.bm, 0)

    def finish(stage: Any, row: Any, column: Any, held: Any) -> None:
        pass

    return Loads(begin_copies, finish) if plan.asynchronous else Loads(begin_registers, finish_registers)


def held_stores(plan: Plan, tile_rows: int, first_byte: int) -> Callable[..., None]:
    """`finish(stage, row, column, held)`: stores the chunks that a thread holds."""
    rows, row_step, row_bytes, flip = ceil_div(tile_rows, plan.row_step), plan.row_step, plan.row_bytes, swizzle(plan.chunks)
    ragged = tile_rows % plan.row_step != 0

    def finish(stage: Any, row: Any, column: Any, held: Any) -> None:
        for i in range(rows):
            to_row = types.uint32(row + i * row_step)
            if not ragged or to_row < tile_rows:
                to = types.uint32(stage + first_byte + to_row * row_bytes + (column ^ flip(to_row)) * CHUNK_BYTES)
                ptx.store_shared_v4(to, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return finish


def filters(plan: Plan) -> Callable[..., Any]:
    """`locate(packed, row, group, k_first)` returns the address of the thread's first filter and the channels left."""
    k_total, filter_bytes = plan.gemm.k, plan.gemm.chunks * CHUNK_BYTES

    def locate(packed: Any, row: Any, group: Any, k_first: Any) -> Any:
        number = types.int64(group) * k_total + types.int64(k_first + row)
        return types.uint64(packed + types.uint64(number * filter_bytes)), types.int32(k_total - k_first)

    return locate


def filter_loads(plan: Plan) -> Loads:
    """`begin(stage, step, row, column, w_first, k_left, held)` and `finish(stage, row, column, held)` for the weight."""
    rows, row_step, bn, row_bytes, flip = plan.rows_w, plan.row_step, plan.bn, plan.row_bytes, swizzle(plan.chunks)
    chunks, total, x_bytes, ragged = plan.chunks, plan.gemm.chunks, plan.x_bytes, plan.bn % plan.row_step != 0
    copy, load = ptx.cp_async(CHUNK_BYTES), simt.load_words(CHUNK)

    def begin_copies(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any, held: Any) -> None:
        chunk = types.uint32(step * chunks + column)
        for i in range(rows):
            to_row = types.uint32(row + i * row_step)
            if not ragged or to_row < bn:
                inside = (types.int32(to_row) < k_left) & (chunk < types.uint32(total))
                offset = (types.int64(i * row_step) * total + chunk) * CHUNK_BYTES
                to = types.uint32(stage + x_bytes + to_row * row_bytes + (column ^ flip(to_row)) * CHUNK_BYTES)
                copy(to, w_first + types.uint64(offset), CHUNK_BYTES if inside else 0)

    def begin_registers(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any, held: Any) -> None:
        chunk = types.uint32(step * chunks + column)
        for i in range(rows):
            to_row = types.uint32(row + i * row_step)
            inside = (types.int32(to_row) < k_left) & (chunk < types.uint32(total))
            if ragged:
                inside = inside & (to_row < bn)
            offset = (types.int64(i * row_step) * total + chunk) * CHUNK_BYTES
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load(
                w_first + types.uint64(offset), inside, types.uint32(0)
            )

    def finish(stage: Any, row: Any, column: Any, held: Any) -> None:
        pass

    return Loads(begin_copies, finish) if plan.asynchronous else Loads(begin_registers, held_stores(plan, bn, x_bytes))


def waits(plan: Plan) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """(commit the copies of a step, wait until the next step has arrived, wait for all copies)."""

    def nothing() -> None:
        pass

    if not plan.asynchronous:
        return nothing, nothing, nothing
    return ptx.cp_async_commit, ptx.cp_async_wait(plan.stages - 2), ptx.cp_async_wait(0)


# --- Multiply ---------------------------------------------------------------------------------------------------------
def zeros(gemm: Gemm) -> Any:
    """The type of a sum; called with 0 it gives the first one."""
    return types.float32 if gemm.product.accumulator == "float32" else types.int32


def products(workload: Workload, plan: Plan) -> Callable[..., None]:
    """`multiply(sums, row_sums, x_chunk, w_chunk)`: one chunk of a step. It adds up x if the weight has a zero point."""
    summed = "weight" in workload.zero_points
    distances = plan.threads_m * plan.row_bytes, plan.threads_n * plan.row_bytes
    multiply_chunk = simt.multiply_chunk(plan.gemm.product, plan.tm, plan.tn, *distances, summed)

    def multiply(sums: Any, row_sums: Any, x_chunk: Any, w_chunk: Any) -> None:
        multiply_chunk(sums, x_chunk, w_chunk)

    def multiply_and_sum(sums: Any, row_sums: Any, x_chunk: Any, w_chunk: Any) -> None:
        multiply_chunk(sums, row_sums, x_chunk, w_chunk)

    return multiply_and_sum if summed else multiply


def correction(workload: Workload, plan: Plan) -> Callable[..., None]:
    """`correct(sums, row_sums, column_sums, weight_sums, group, k, x_zero_point, weight_zero_point)`: zero points.

    `k` is the thread's first channel in the group. All sums are exact: they wrap around at 32 bits, as those of a 32-bit
    integer do.
    """
    gemm, tn, threads_n, of_x = plan.gemm, plan.tn, plan.threads_n, "x" in workload.zero_points
    k_total, count = gemm.k, gemm.c * workload.r * workload.s
    subtract, load = simt.subtract_zero_points(plan.tm, plan.tn), simt.load_words(1)

    def correct(
        sums: Any, row_sums: Any, column_sums: Any, weight_sums: Any, group: Any, k: Any, x_zero: Any, weight_zero: Any
    ) -> None:  # fmt: skip
        for j in range(tn):
            channel = types.uint32(k + j * threads_n)
            at = types.uint64(types.uint64(group) * k_total + channel)
            inside = (channel < k_total) & of_x
            column_sums[j] = types.int32(load(weight_sums + at * 4, inside, types.uint32(0)))
        subtract(sums, row_sums, column_sums, types.int32(x_zero), types.int32(weight_zero), count)

    def nothing(
        sums: Any, row_sums: Any, column_sums: Any, weight_sums: Any, group: Any, k: Any, x_zero: Any, weight_zero: Any
    ) -> None:  # fmt: skip
        pass

    return correct if workload.zero_points else nothing


# --- Store ------------------------------------------------------------------------------------------------------------
def output(workload: Workload, plan: Plan, epilogue: Epilogue, capability: tuple[int, int]) -> Callable[..., None]:
    """`store(y, shared, thread, part, image, m_first, group, k_first, operands)` writes a staged part of the tile to y.

    It applies the epilogue to `vector` channels at once.
    """
    gemm, threads, m_total, out_dtype = plan.gemm, plan.threads, plan.pixels, workload.output.dtype
    k_total, vector, out_bytes = gemm.k, gemm.vector, dtype_of(out_dtype).nbytes
    rows, vectors, staged_row_bytes = plan.part_rows * plan.threads_m, plan.bn // gemm.vector, plan.staged_row_bytes
    strides, of_pixel = image_strides(workload, "y"), pixel_of(workload, plan)
    per_image, per_pixel, of_channel = strides["N"].outer, strides["W"].outer, strides["C"].offset()
    pair, single, accumulator = epilogue.pair, epilogue.single, gemm.product.accumulator
    load, write = simt.load_shared(vector, accumulator), simt.store_global(vector, out_dtype, accumulator, capability)

    def along_row(item: Any) -> Any:
        return types.uint32(item // vectors), types.uint32(item % vectors * vector)

    def along_column(item: Any) -> Any:
        return types.uint32(item % rows), types.uint32(item // rows * vector)

    def store_one(address: Any, staged: Any, k: Any, offset: Any, operands: Any) -> None:
        write(address, single(load(staged), 1, k, offset, *operands))

    def store_four(address: Any, staged: Any, k: Any, offset: Any, operands: Any) -> None:
        a, b, c, d = load(staged)
        a, b = pair(a, b, 1, k, offset, *operands)
        c, d = pair(c, d, 1, types.int32(k + 2), types.int64(offset + 2), *operands)
        write(address, a, b, c, d)

    place = along_column if gemm.pixels_first_out else along_row
    store_vector = store_one if vector == 1 else store_four

    def store(
        y: Any, shared: Any, thread: Any, part: Any, image: Any, m_first: Any, group: Any, k_first: Any, operands: Any
    ) -> None:  # fmt: skip
        for item in range(types.int32(thread), types.int32(rows * vectors), types.int32(threads)):
            row, column = place(types.uint32(item))
            m = types.uint32(m_first + part * rows + row)
            if m < m_total and types.uint32(k_first + column) < k_total:
                n, pixel = of_pixel(image, m)
                k = types.int32(group * k_total + k_first + column)
                offset = types.int64(types.int64(n) * per_image + types.int64(pixel) * per_pixel + of_channel(k))
                staged = types.uint32(shared + row * staged_row_bytes + column * 4)
                store_vector(types.uint64(y + types.uint64(offset * out_bytes)), staged, k, offset, operands)

    return store


# --- The weight -------------------------------------------------------------------------------------------------------
def build_pack(workload: Workload, gemm: Gemm, threads: int) -> Callable[..., None]:
    """The kernel (weight, packed): filters as rows of chunks, (r, s, c) with c fastest. A thread writes a chunk.

    Zeros fill up each tap to whole words and each filter to whole chunks.
    """
    sizes = {"O": workload.k, "I": gemm.c, "H": workload.r, "W": workload.s}
    strides, size = AxisStrides.of(Layout.parse(workload.weight_layout), sizes), dtype_of(workload.weight_dtype).nbytes
    of_filter, per_row, per_column = strides["O"].offset(), strides["H"].outer, strides["W"].outer
    chunks, words, tap_words, kernel_w = gemm.chunks, gemm.words, gemm.tap_words, workload.s
    elements, total = gemm.product.elements, workload.k * gemm.chunks
    fetch = word_loads(gemm.product, 0 if gemm.product.elements > 1 else 1, strides["I"], gemm.c)

    def pack(weight: Any, packed: Any) -> None:
        at = types.uint64(types.uint64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        if at < types.uint64(total):
            number = types.uint64(at // types.uint64(chunks))
            chunk = types.uint32(at - number * chunks)
            held = cuda.local.array(CHUNK, types.uint32)
            for q in range(CHUNK):
                kk = types.uint32(chunk * CHUNK + q)
                tap = types.uint32(kk // types.uint32(tap_words))
                row = types.uint32(tap // types.uint32(kernel_w))
                offset = of_filter(number) + types.int64(row) * per_row
                offset = types.int64(offset + types.int64(tap - row * kernel_w) * per_column)
                channel = types.uint32((kk - tap * tap_words) * elements)
                address = types.uint64(weight + types.uint64(offset * size))
                fetch(held, q, address, channel, kk < types.uint32(words), types.uint32(0))
            to = types.uint64(packed + at * CHUNK_BYTES)
            ptx.store_global_v4(to, held[0], held[1], held[2], held[3])

    return pack


def build_sums(workload: Workload, gemm: Gemm) -> Callable[..., None]:
    """The kernel (packed, weight_sums): the sum of each filter's elements, int32. A block of 32 threads has a filter."""
    chunks, load, add = gemm.chunks, simt.load_words(CHUNK), simt.sum_of_elements[workload.weight_dtype]
    load_sum = simt.load_shared(1, "int32")

    def add_up(packed: Any, weight_sums: Any) -> None:
        thread, number = types.uint32(cuda.threadIdx.x), types.uint64(cuda.blockIdx.x)
        first = types.uint64(packed + number * (chunks * CHUNK_BYTES))
        total = types.int32(0)
        for chunk in range(types.int32(thread), types.int32(chunks), types.int32(32)):
            a, b, c, d = load(types.uint64(first + types.uint64(chunk) * CHUNK_BYTES), 1, types.uint32(0))
            total = add(a, b, c, d, total)
        shared = shared_base()
        ptx.store_shared_v4(types.uint32(shared + thread * CHUNK_BYTES), types.uint32(total), 0, 0, 0)
        cuda.syncthreads()
        if thread == 0:
            for other in range(types.int32(1), types.int32(32)):
                total = types.int32(total + load_sum(types.uint32(shared + other * CHUNK_BYTES)))
            ptx.store_global_u32(types.uint64(weight_sums + number * 4), types.uint32(total))

    return add_up
