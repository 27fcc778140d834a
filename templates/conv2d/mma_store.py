"""The last part of conv2d_mma: a tile of sums in shared memory becomes a part of y.

A thread adds up the slices of neighbouring channels, applies the epilogue and writes them at once. The kernel captures the
functions here, and they become part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d.mma_sizes import Plan
from schedsearch.templates.conv2d.placement import shuffled_offset
from schedsearch.templates.parts import ptx, warp_tiles
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.window_sums import WindowSums
from schedsearch.templates.parts.zero_points import SCALAR, TABLE, ZeroPoint
from schedsearch.workload import Workload


def output(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """`store(y, shared, thread, m_first, m_stop, group, k_first, k_left, operands)` writes the staged tile of y."""
    count = i64 if plan.wide_counts else u32
    bm, threads, vectors = plan.bm, plan.consumers, plan.bn // plan.gemm.vector
    k_total, staged_row_bytes, out_bytes = plan.gemm.k, plan.staged_row_bytes, plan.gemm.out_bytes
    place, offset_of = store_order(workload, plan), offsets(workload, plan)
    finish = {1: one_channel, 2: pairs, 8: pairs, 4: four_bytes}[plan.gemm.vector](workload, plan, epilogue, corrections)
    class_of = corrections.places()

    def store(
        y: Any, shared: Any, thread: Any, m_first: Any, m_stop: Any, group: Any, k_first: Any, k_left: Any, operands: Any
    ) -> None:  # fmt: skip
        for item in range(i32(thread), i32(bm * vectors), i32(threads)):
            out_row, out_column = place(item)
            m = count(m_first + out_row)
            if m < m_stop and out_column < k_left:
                k = i32(group * k_total + k_first + out_column)
                offset = offset_of(m, k)
                address = y + u64(offset * out_bytes)
                staged = u32(shared + out_row * staged_row_bytes + out_column * 4)
                finish(address, staged, k, offset, class_of(m), operands)

    return store


def store_order(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any], Any]:
    """`place(item)` returns the (row, first channel) in the tile of a vector of channels.

    Neighbouring items are neighbours in memory: channels of one block, then pixels, then further blocks.
    """
    bm, bn, vector = plan.bm, plan.bn, plan.gemm.vector
    vectors = bn // vector
    across = vectors
    if workload.params.output_layout != "NHWC":
        across = math.gcd(strides_of(workload, "y")["C"].block, bn) // vector

    def in_rows(item: Any) -> Any:
        out_row = u32(item) // vectors
        return out_row, u32(item) % vectors * vector

    def in_blocks(item: Any) -> Any:
        number = u32(item) // across
        return number % bm, u32((number // bm * across + u32(item) % across) * vector)

    return in_rows if across == vectors else in_blocks


def offsets(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any, Any], Any]:
    """`offset_of(m, k)`: the offset in y of channel k of output pixel m, in elements."""
    count = i64 if plan.wide_counts else u32
    strides, out_pixels, k_all = strides_of(workload, "y"), plan.gemm.pixels, workload.params.slice_of
    image_elements, pixel_elements, channel_of = strides["N"].outer, strides["W"].outer, strides["C"].offset()

    def in_rows(m: Any, k: Any) -> Any:
        return i64(m) * k_all + k

    def in_blocks(m: Any, k: Any) -> Any:
        n = count(m // out_pixels)
        return i64(n) * image_elements + i64(m - n * out_pixels) * pixel_elements + channel_of(k)

    if (shuffle := shuffled_offset(workload)) is not None:
        offset_in_y = shuffle

        def shuffled(m: Any, k: Any) -> Any:
            n = count(m // out_pixels)
            return offset_in_y(n, m - n * out_pixels, k)

        return shuffled
    return in_rows if workload.params.output_layout == "NHWC" else in_blocks


# --- Neighbouring channels of a pixel ---------------------------------------------------------------------------------
# Each function returns `finish(address, staged, k, offset, place, operands)`: from sums in shared memory to y in global
# memory. `place` is what `ChannelCorrections.places` gives for the pixel.


def one_channel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    slices, slice_bytes, single = plan.slices, plan.slice_bytes, epilogue.single
    sum_type, whole = plan.gemm.mma.accumulator_type, plan.gemm.mma.accumulator == "int32"
    load = ptx.load_shared_i32 if whole else ptx.load_shared_f32
    write, correct = _writer(workload, plan), corrections.of(1)

    def finish(address: Any, staged: Any, k: Any, offset: Any, place: Any, operands: Any) -> None:
        a0 = load(staged)
        for other in range(1, slices):
            a0 = sum_type(a0 + load(staged + other * slice_bytes))
        write(address, single(correct(a0, place, k, operands), 1, k, offset, *operands))

    return finish


def _writer(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any, Any], None]:
    """`write(address, value)` writes one element of y."""
    accumulator, out_bytes = plan.gemm.mma.accumulator, plan.gemm.out_bytes
    zero = plan.gemm.mma.accumulator_type(0)
    if out_bytes == 4:
        return ptx.store_global_f32 if accumulator == "float32" else ptx.store_global_u32
    if out_bytes == 2:
        pack_two = ptx.pack_pair(workload.params.out_dtype, accumulator)
        return lambda address, value: ptx.store_global_u16(address, pack_two(value, zero))
    pack_four = ptx.pack_bytes(workload.params.out_dtype)
    return lambda address, value: ptx.store_global_u8(address, pack_four(value, zero, zero, zero))


def pairs(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """8 or 2 channels of 2 bytes, or 2 of 4 bytes."""
    slices, slice_bytes, pair, vector = plan.slices, plan.slice_bytes, epilogue.pair, plan.gemm.vector
    accumulator, sum_type, out_bytes = plan.gemm.mma.accumulator, plan.gemm.mma.accumulator_type, plan.gemm.out_bytes
    whole, number = accumulator == "int32", vector // 2
    load, load_eight = ptx.load_shared_i32x2 if whole else ptx.load_shared_f32x2, warp_tiles.load_eight(accumulator)
    store_words = ptx.store_global_b32x2 if whole else ptx.store_global_f32x2
    pack = ptx.pack_pair(workload.params.out_dtype if out_bytes == 2 else "float16", accumulator)
    correct = corrections.of(2)

    def sums(staged: Any, place: Any, k: Any, operands: Any) -> Any:
        a0, a1 = load(staged)
        for other in range(1, slices):
            b0, b1 = load(staged + other * slice_bytes)
            a0, a1 = sum_type(a0 + b0), sum_type(a1 + b1)
        return correct(a0, a1, place, k, operands)

    def two_words(address: Any, staged: Any, k: Any, offset: Any, place: Any, operands: Any) -> None:
        for i in range(number):
            a0, a1 = sums(staged + i * 8, place, k + i * 2, operands)
            v0, v1 = pair(a0, a1, 1, k + i * 2, offset + i * 2, *operands)
            store_words(address + u64(i * 8), v0, v1)

    def one_word(address: Any, staged: Any, k: Any, offset: Any, place: Any, operands: Any) -> None:
        a0, a1 = sums(staged, place, k, operands)
        v0, v1 = pair(a0, a1, 1, k, offset, *operands)
        ptx.store_global_u32(address, pack(v0, v1))

    def four_words(address: Any, staged: Any, k: Any, offset: Any, place: Any, operands: Any) -> None:
        total = cuda.local.array(8, sum_type)
        total[0], total[1], total[2], total[3], total[4], total[5], total[6], total[7] = load_eight(staged)
        for other in range(1, slices):
            b0, b1, b2, b3, b4, b5, b6, b7 = load_eight(staged + other * slice_bytes)
            total[0], total[1] = sum_type(total[0] + b0), sum_type(total[1] + b1)
            total[2], total[3] = sum_type(total[2] + b2), sum_type(total[3] + b3)
            total[4], total[5] = sum_type(total[4] + b4), sum_type(total[5] + b5)
            total[6], total[7] = sum_type(total[6] + b6), sum_type(total[7] + b7)
        words = cuda.local.array(4, u32)
        for i in range(number):
            a0, a1 = correct(total[2 * i], total[2 * i + 1], place, k + i * 2, operands)
            v0, v1 = pair(a0, a1, 1, k + i * 2, offset + i * 2, *operands)
            words[i] = pack(v0, v1)
        ptx.store_global_v4(address, words[0], words[1], words[2], words[3])

    return two_words if out_bytes == 4 else four_words if vector == 8 else one_word


def four_bytes(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """Four channels of one byte. A warp then reads and writes neighbouring words, without bank conflicts."""
    slices, slice_bytes, pair = plan.slices, plan.slice_bytes, epilogue.pair
    load, pack = ptx.load_shared_i32x4, ptx.pack_bytes(workload.params.out_dtype)
    correct = corrections.of(4)

    def finish(address: Any, staged: Any, k: Any, offset: Any, place: Any, operands: Any) -> None:
        a0, a1, a2, a3 = load(staged)
        for other in range(1, slices):
            b0, b1, b2, b3 = load(staged + other * slice_bytes)
            a0, a1 = i32(a0 + b0), i32(a1 + b1)
            a2, a3 = i32(a2 + b2), i32(a3 + b3)
        a0, a1, a2, a3 = correct(a0, a1, a2, a3, place, k, operands)
        v0, v1 = pair(a0, a1, 1, k, offset, *operands)
        v2, v3 = pair(a2, a3, 1, k + 2, offset + 2, *operands)
        ptx.store_global_u32(address, pack(v0, v1, v2, v3))

    return finish


@dataclass(frozen=True)
class ChannelCorrections:
    """The correction of sums for zero points.

    Attributes:
        epilogue: whose operands have what the corrections read.
        zero: of x, or None.
        windows: of the weight, or None.
    """

    epilogue: Epilogue
    zero: ZeroPoint | None
    windows: WindowSums | None

    def places(self) -> Callable[[Any], Any]:
        """`place(m)`: what the corrections need to know about an output pixel."""
        class_of = self.zero.places() if self.zero else lambda m: i32(0)

        def class_and_pixel(m: Any) -> Any:
            return class_of(m), m

        return class_and_pixel if self.windows else class_of

    def of(self, count: int) -> Callable[..., Any]:
        """`correct(a0, ..., place, k, operands)`: the corrected sums of `count` neighbouring channels."""
        of_x = self._of_x(count)
        if self.windows is None:
            return of_x
        term = self.windows.terms(self.epilogue)

        def one(a0: Any, place: Any, k: Any, operands: Any) -> Any:
            class_place, m = place
            return i32(of_x(a0, class_place, k, operands) + term(m, k, operands))

        def two(a0: Any, a1: Any, place: Any, k: Any, operands: Any) -> Any:
            class_place, m = place
            a0, a1 = of_x(a0, a1, class_place, k, operands)
            return i32(a0 + term(m, k, operands)), i32(a1 + term(m, k + 1, operands))

        def four(a0: Any, a1: Any, a2: Any, a3: Any, place: Any, k: Any, operands: Any) -> Any:
            class_place, m = place
            a0, a1, a2, a3 = of_x(a0, a1, a2, a3, class_place, k, operands)
            a0, a1 = i32(a0 + term(m, k, operands)), i32(a1 + term(m, k + 1, operands))
            return a0, a1, i32(a2 + term(m, k + 2, operands)), i32(a3 + term(m, k + 3, operands))

        corrections: dict[int, Callable[..., Any]] = {1: one, 2: two, 4: four}
        return corrections[count]

    def _of_x(self, count: int) -> Callable[..., Any]:
        """The same for the zero point of x."""
        if self.zero is None:
            same: dict[int, Callable[..., Any]] = {1: _same_one, 2: _same_two, 4: _same_four}
            return same[count]
        table, scalar, values = self.epilogue.index(TABLE), self.epilogue.index(SCALAR), self.zero.values(count)

        def one(a0: Any, place: Any, k: Any, operands: Any) -> Any:
            return values(a0, 1, place, k, operands[table], operands[scalar])

        def two(a0: Any, a1: Any, place: Any, k: Any, operands: Any) -> Any:
            return values(a0, a1, 1, place, k, operands[table], operands[scalar])

        def four(a0: Any, a1: Any, a2: Any, a3: Any, place: Any, k: Any, operands: Any) -> Any:
            return values(a0, a1, a2, a3, 1, place, k, operands[table], operands[scalar])

        corrections: dict[int, Callable[..., Any]] = {1: one, 2: two, 4: four}
        return corrections[count]


def _same_one(a0: Any, place: Any, k: Any, operands: Any) -> Any:
    return a0


def _same_two(a0: Any, a1: Any, place: Any, k: Any, operands: Any) -> Any:
    return a0, a1


def _same_four(a0: Any, a1: Any, a2: Any, a3: Any, place: Any, k: Any, operands: Any) -> Any:
    return a0, a1, a2, a3
