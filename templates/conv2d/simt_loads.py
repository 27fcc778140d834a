"""How chunks of x and of the weight come to shared memory in conv2d_simt: by cp.async, or through registers.

The kernel captures the functions here, and they become part of it. A thread loads one column of chunks, in rows that are
`row_step` apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.conv2d.ring import CHUNK_BYTES, OUTSIDE, swizzle
from schedsearch.templates.conv2d.simt_sizes import Gemm, Plan
from schedsearch.templates.conv2d.tiles import ceil_div
from schedsearch.templates.parts import ptx, simt
from schedsearch.templates.parts.addressing import AxisStrides, strides_of
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.simt import CHUNK
from schedsearch.workload import Workload

# Lengths of local arrays; the compiler drops elements that a configuration does not use. Constant lengths let more
# configurations share a run of Numba.
MOST_ROWS = 16  # rows of x that a thread loads, and rows or columns that it multiplies
MOST_HELD = 64  # words on their way through registers, of both operands together


def pixel_of(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any, Any], Any]:
    """`pixel_of(image, m)` returns (image, pixel in it) of place m on the axis of pixels that tiles are cut from."""
    image_pixels = plan.gemm.pixels

    def bound(image: Any, m: Any) -> Any:
        return u32(image), u32(m)

    def folded(image: Any, m: Any) -> Any:
        number = u32(u32(m) // u32(image_pixels))
        return number, u32(m - number * image_pixels)

    return bound if plan.bound or plan.gemm.images == 1 else folded


class Loads(NamedTuple):
    """How chunks of one operand come to a stage.

    Attributes:
        begin: starts to copy a step's chunks to a stage, or loads them into registers.
        finish: stores to the stage what is in registers.
    """

    begin: Callable[..., None]
    finish: Callable[..., None]


def place_of_load(plan: Plan, rows_first: bool) -> Callable[[Any], Any]:
    """`place(thread)`: the row and the column of a thread's first chunk. Neighbouring threads have neighbouring chunks of a
    row, or rows.
    """
    chunks, row_step = plan.chunks, plan.row_step

    def along_row(thread: Any) -> Any:
        return u32(thread // chunks), u32(thread % chunks)

    def along_column(thread: Any) -> Any:
        return u32(thread % row_step), u32(thread // row_step)

    return along_column if rows_first else along_row


def filling(gemm: Gemm) -> Callable[[Any], Any]:
    """`outside(x_zero_point)`: the word that stands for padding, the zero point in each byte."""

    def zero(x_zero_point: Any) -> Any:
        return u32(0)

    def zero_points(x_zero_point: Any) -> Any:
        return u32((i32(x_zero_point) & 255) * simt.ONES)

    return zero_points if gemm.fills_padding else zero


def pixels(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`locate(x, image, m_first, row, group, h0, w0, x_rows)` finds the pixels that a thread loads.

    It writes for each of the thread's rows the coordinates of the first tap and the address of the group's first channel
    there.
    """
    rows, row_step, m_total, c_group = plan.rows_x, plan.row_step, plan.pixels, plan.gemm.c
    (stride_h, stride_w), (pad_top, pad_left) = workload.params.stride, workload.params.padding[:2]
    strides, size, out_w = (
        strides_of(workload, "x"),
        dtype_of(workload.params.dtype).nbytes,
        CONV2D.output_hw(workload.params)[1],
    )
    per_image, per_row, per_pixel = strides["N"].outer, strides["H"].outer, strides["W"].outer
    of_pixel, of_channel = pixel_of(workload, plan), strides["C"].offset()

    def locate(x: Any, image: Any, m_first: Any, row: Any, group: Any, h0: Any, w0: Any, x_rows: Any) -> None:
        first = of_channel(group * c_group)
        for i in range(rows):
            m = u32(m_first + row + i * row_step)
            n, pixel = of_pixel(image, m)
            p = u32(pixel // u32(out_w))
            down = i32(p * stride_h - pad_top)
            right = i32((pixel - p * out_w) * stride_w - pad_left)
            h0[i] = down if m < m_total else i32(OUTSIDE)
            w0[i] = right
            offset = i64(n) * per_image + i64(down) * per_row + i64(right) * per_pixel + first
            x_rows[i] = u64(x + u64(offset * size))

    return locate


def word_loads(product: simt.Product, piece: int, channels: AxisStrides, c: int) -> Callable[..., None]:
    """`fetch(words, at, address, channel, inside, fill)`: `piece` words of neighbouring channels from `channel` on.

    `address` is that of channel 0. If `piece` is 0, it is one word of single bytes, with zeros for channels from `c` on.
    """
    of_channel, size = channels.offset(), simt.WORD_BYTES // product.elements
    load = simt.load_words(max(piece, 1))

    def one(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at] = load(address + u64(of_channel(channel) * size), inside, fill)

    def two(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at], words[at + 1] = load(address + u64(of_channel(channel) * size), inside, fill)

    def four(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at], words[at + 1], words[at + 2], words[at + 3] = load(
            address + u64(of_channel(channel) * size), inside, fill
        )

    def single_bytes(words: Any, at: Any, address: Any, channel: Any, inside: Any, fill: Any) -> None:
        words[at] = simt.load_bytes(
            address + u64(of_channel(channel)),
            address + u64(of_channel(channel + 1)),
            address + u64(of_channel(channel + 2)),
            address + u64(of_channel(channel + 3)),
            i32(c - channel),
            inside,
            fill,
        )

    return {0: single_bytes, 1: one, 2: two, 4: four}[piece]


def taps(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any], Any]:
    """`tap(kk)` of a word of the reduction: (rows down, columns right, offset in x in elements, channel in the group)."""
    gemm, strides = plan.gemm, strides_of(workload, "x")
    elements, tap_words, kernel_w = gemm.product.elements, gemm.tap_words, workload.params.s
    (dilation_h, dilation_w), per_row, per_pixel = workload.params.dilation, strides["H"].outer, strides["W"].outer

    def tap(kk: Any) -> Any:
        number = u32(kk // u32(tap_words))
        tap_h = u32(number // u32(kernel_w))
        down = i32(tap_h * dilation_h)
        right = i32((number - tap_h * kernel_w) * dilation_w)
        offset = i64(down) * per_row + i64(right) * per_pixel
        return down, right, offset, u32((kk - number * tap_words) * elements)

    return tap


def pixel_loads(workload: Workload[Conv2dParams], plan: Plan) -> Loads:
    """`begin(stage, step, row, column, h0, w0, x_rows, held, fill)` and `finish(stage, row, column, held)` for x."""
    p = workload.params
    gemm, size = plan.gemm, dtype_of(p.dtype).nbytes
    rows, row_step, bm, bk, row_bytes, flip = (
        plan.rows_x, plan.row_step, plan.bm, plan.bk, plan.row_bytes, swizzle(plan.chunks),
    )  # fmt: skip
    words, ragged, h, w = gemm.depth, plan.bm % plan.row_step != 0, p.h, p.w
    piece = max(gemm.piece, 1)
    pieces, piece_bytes = CHUNK // piece, piece * simt.WORD_BYTES
    tap, of_channel = taps(workload, plan), strides_of(workload, "x")["C"].offset()
    fetch, copy = word_loads(gemm.product, gemm.piece, strides_of(workload, "x")["C"], gemm.c), ptx.cp_async(piece_bytes)
    # Weights are zero beyond the last word, but sums of x must not count what fills the padding there.
    ends = gemm.fills_padding and gemm.depth % plan.bk != 0

    def inside_x(h0: Any, w0: Any, down: Any, right: Any, kk: Any) -> Any:
        return (u32(h0 + down) < u32(h)) & (u32(w0 + right) < u32(w)) & (kk < u32(words))

    def begin_copies(
        stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any, held: Any, fill: Any
    ) -> None:  # fmt: skip
        for number in range(pieces):
            kk = u32(step * bk + column * CHUNK + number * piece)
            down, right, offset, channel = tap(kk)
            offset = i64(offset + of_channel(channel))
            for i in range(rows):
                to_row = u32(row + i * row_step)
                if not ragged or to_row < bm:
                    at = u32((column ^ flip(to_row)) * CHUNK_BYTES + number * piece_bytes)
                    inside = inside_x(h0[i], w0[i], down, right, kk)
                    to = u32(stage + to_row * row_bytes + at)
                    copy(to, x_rows[i] + u64(offset * size), piece_bytes if inside else 0)

    def begin_registers(
        stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any, held: Any, fill: Any
    ) -> None:  # fmt: skip
        for number in range(pieces):
            kk = u32(step * bk + column * CHUNK + number * piece)
            down, right, offset, channel = tap(kk)
            filled = u32(0) if ends and kk >= u32(words) else fill
            for i in range(rows):
                inside = inside_x(h0[i], w0[i], down, right, kk)
                if ragged:
                    inside = inside & (row + i * row_step < bm)
                address = u64(x_rows[i] + u64(offset * size))
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
            to_row = u32(row + i * row_step)
            if not ragged or to_row < tile_rows:
                to = u32(stage + first_byte + to_row * row_bytes + (column ^ flip(to_row)) * CHUNK_BYTES)
                ptx.store_shared_v4(to, held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3])

    return finish


def filters(plan: Plan) -> Callable[..., Any]:
    """`locate(weight_rows, row, group, k_first)` returns the address of the thread's first filter and the channels left."""
    k_total, filter_bytes = plan.gemm.k, plan.gemm.chunks * CHUNK_BYTES

    def locate(weight_rows: Any, row: Any, group: Any, k_first: Any) -> Any:
        number = i64(group) * k_total + i64(k_first + row)
        return u64(weight_rows + u64(number * filter_bytes)), i32(k_total - k_first)

    return locate


def filter_loads(plan: Plan) -> Loads:
    """`begin(stage, step, row, column, w_first, k_left, held)` and `finish(stage, row, column, held)` for the weight."""
    rows, row_step, bn, row_bytes, flip = plan.rows_w, plan.row_step, plan.bn, plan.row_bytes, swizzle(plan.chunks)
    chunks, total, x_bytes, ragged = plan.chunks, plan.gemm.chunks, plan.x_bytes, plan.bn % plan.row_step != 0
    copy, load = ptx.cp_async(CHUNK_BYTES), simt.load_words(CHUNK)

    def begin_copies(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any, held: Any) -> None:
        chunk = u32(step * chunks + column)
        for i in range(rows):
            to_row = u32(row + i * row_step)
            if not ragged or to_row < bn:
                inside = (i32(to_row) < k_left) & (chunk < u32(total))
                offset = (i64(i * row_step) * total + chunk) * CHUNK_BYTES
                to = u32(stage + x_bytes + to_row * row_bytes + (column ^ flip(to_row)) * CHUNK_BYTES)
                copy(to, w_first + u64(offset), CHUNK_BYTES if inside else 0)

    def begin_registers(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any, held: Any) -> None:
        chunk = u32(step * chunks + column)
        for i in range(rows):
            to_row = u32(row + i * row_step)
            inside = (i32(to_row) < k_left) & (chunk < u32(total))
            if ragged:
                inside = inside & (to_row < bn)
            offset = (i64(i * row_step) * total + chunk) * CHUNK_BYTES
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = load(w_first + u64(offset), inside, u32(0))

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
