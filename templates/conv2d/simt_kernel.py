"""The kernels of conv2d_simt: load (`simt_loads`), multiply on CUDA cores, store; and the sums of filters for zero points.

The kernels capture the functions here, and they become part of them. Both operands of a step lie in shared memory in rows
along the reduction: `bm` pixels of x, then `bn` filters. A row has chunks of four words, 16 bytes. A thread loads one column
of chunks, in rows that are `row_step` apart, and multiplies `tm` pixels, `threads_m` apart, with `tn` filters, `threads_n`
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.conv2d.placement import shuffled_offset
from schedsearch.templates.conv2d.ring import CHUNK_BYTES, filter_sets, swizzle
from schedsearch.templates.conv2d.simt_loads import (
    MOST_HELD,
    MOST_ROWS,
    Loads,
    filling,
    filter_loads,
    filters,
    pixel_loads,
    pixel_of,
    pixels,
    place_of_load,
    waits,
)
from schedsearch.templates.conv2d.simt_sizes import WARP_COLUMNS, WARP_ROWS, Gemm, Plan
from schedsearch.templates.parts import ptx, simt
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.simt import CHUNK
from schedsearch.templates.parts.walk import banded
from schedsearch.workload import Workload

SHAPED_BY = frozenset({"sums_count"})  # names that the kernel and its functions capture; see `KernelStep`


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, capability: tuple[int, int]
) -> Callable[..., None]:
    """The kernel of one configuration.

    It takes (x, rows, weight_sums, y, x_zero_point, weight_zero_point, *epilogue.params): addresses are u64, zero points
    f32. `rows` is what `WeightRows.step` writes, `weight_sums` what `build_sums` writes; it is read if x has a zero point.
    """
    tiles, steps, stages, chunks, part_rows = plan.tiling.tiles, plan.steps, plan.stages, plan.chunks, plan.part_rows
    tm, parts = plan.tm, plan.tm // plan.part_rows
    sums_count, warps_n = plan.tm * plan.tn, plan.threads_n // WARP_COLUMNS
    row_bytes, stage_bytes, x_bytes, staged_row_bytes = plan.row_bytes, plan.stage_bytes, plan.x_bytes, plan.staged_row_bytes

    place, place_x, place_w = tile_walk(plan), place_of_load(plan, plan.gemm.pixels_first), place_of_load(plan, False)
    locate_pixels, locate_filters, outside = pixels(workload, plan), filters(plan), filling(plan.gemm)
    load_x, load_w = pixel_loads(workload, plan), filter_loads(plan)
    begin_x, finish_x, begin_w, finish_w = load_x.begin, load_x.finish, load_w.begin, load_w.finish
    commit, wait_stage, wait_all = waits(plan)
    flip, zero, multiply = swizzle(chunks), zeros(plan.gemm), products(workload, plan)
    set_of, correct = filter_sets(plan), correction(workload, plan)
    stage_part = simt.store_rows(
        plan.gemm.product, tm, plan.tn, part_rows, plan.threads_m * staged_row_bytes, plan.threads_n * simt.WORD_BYTES
    )
    store, load_first_stages = output(workload, plan, epilogue, capability), first_stages(plan, load_x, load_w)

    def kernel(
        x: Any, rows: Any, weight_sums: Any, y: Any, x_zero_point: Any, weight_zero_point: Any, *operands: Any
    ) -> None:
        shared = shared_base()
        thread = u32(cuda.threadIdx.x)  # unsigned: a division by a power of two is then a shift
        lane, warp = u32(thread % 32), u32(thread // 32)
        own_row = u32(warp // warps_n * WARP_ROWS + lane // WARP_COLUMNS)
        own_column = u32(warp % warps_n * WARP_COLUMNS + lane % WARP_COLUMNS)
        x_row = u32(shared + own_row * row_bytes)
        w_row = u32(shared + x_bytes + own_column * row_bytes)
        x_flip = u32(flip(own_row) * CHUNK_BYTES)
        w_flip = u32(flip(own_column) * CHUNK_BYTES)
        staged = u32(shared + own_row * staged_row_bytes + own_column * 4)
        fill = outside(x_zero_point)

        row, column = place_x(thread)
        filter_row, filter_column = place_w(thread)
        h0 = cuda.local.array(MOST_ROWS, i32)  # row of the pixel's first tap, may be negative
        w0 = cuda.local.array(MOST_ROWS, i32)
        x_rows = cuda.local.array(MOST_ROWS, u64)
        x_held = cuda.local.array(MOST_HELD, u32)  # words on their way through registers
        w_held = cuda.local.array(MOST_HELD, u32)
        row_sums = cuda.local.array(MOST_ROWS, i32)
        column_sums = cuda.local.array(MOST_ROWS, i32)
        sums = cuda.local.array(sums_count, zero)

        for tile in range(i32(cuda.blockIdx.x), i32(tiles), i32(cuda.gridDim.x)):
            image, m_first, group, k_first = place(tile)
            locate_pixels(x, image, m_first, row, group, h0, w0, x_rows)
            filter_set = set_of(image, group)
            w_first, k_left = locate_filters(rows, filter_row, filter_set, k_first)

            # ---- load and multiply
            for i in range(sums_count):
                sums[i] = zero(0)
            for i in range(tm):
                row_sums[i] = i32(0)
            begin_pixels = row, column, h0, w0, x_rows, x_held, fill
            begin_filters = filter_row, filter_column, w_first, k_left, w_held
            load_first_stages(shared, begin_pixels, begin_filters)
            read, write = i32(0), i32(stages - 1)
            for step in range(i32(steps)):
                wait_stage()
                cuda.syncthreads()
                # Beyond the last step this writes zeros and reads nothing.
                stage = u32(shared + write * stage_bytes)
                begin_x(stage, i32(step + stages - 1), row, column, h0, w0, x_rows, x_held, fill)
                begin_w(stage, i32(step + stages - 1), filter_row, filter_column, w_first, k_left, w_held)
                commit()
                for part in range(chunks):
                    x_chunk = u32(x_row + read * stage_bytes + (u32(part * CHUNK_BYTES) ^ x_flip))
                    w_chunk = u32(w_row + read * stage_bytes + (u32(part * CHUNK_BYTES) ^ w_flip))
                    multiply(sums, row_sums, x_chunk, w_chunk)
                finish_x(stage, row, column, x_held)
                finish_w(stage, filter_row, filter_column, w_held)
                read = i32(read + 1 if read + 1 < stages else 0)
                write = i32(write + 1 if write + 1 < stages else 0)
            wait_all()
            correct(
                sums, row_sums, column_sums, weight_sums, filter_set, k_first + own_column, x_zero_point, weight_zero_point
            )

            # ---- store
            for part in range(i32(parts)):
                cuda.syncthreads()  # the ring, or the part before, has been read
                stage_part(sums, staged, part)
                cuda.syncthreads()
                store(y, shared, thread, part, image, m_first, group, k_first, operands)
            cuda.syncthreads()  # the last part has been read

    return kernel


def reads_ahead(plan: Plan) -> bool:
    """Whether the weights of the first stages are loaded before the wait for the kernel in front. Those that pass through
    registers would be waited for, and an image's own weights are no constants."""
    return plan.asynchronous and not plan.own_weights


# --- Load -------------------------------------------------------------------------------------------------------------
def first_stages(plan: Plan, load_x: Loads, load_w: Loads) -> Callable[..., None]:
    """`load(shared, pixels, filters)` fills all stages but one. The tuples have what follows stage and step in
    `load_x.begin` and `load_w.begin`; the thread has then waited for the kernel in front."""
    begin_x, finish_x, begin_w, finish_w = load_x.begin, load_x.finish, load_w.begin, load_w.finish
    stages, stage_bytes, commit, ahead = plan.stages, plan.stage_bytes, waits(plan)[0], reads_ahead(plan)

    def load(shared: Any, pixels: Any, filters: Any) -> None:
        row, column, h0, w0, x_rows, x_held, fill = pixels
        filter_row, filter_column, w_first, k_left, w_held = filters
        if ahead:
            for step in range(stages - 1):
                stage = u32(shared + step * stage_bytes)
                begin_w(stage, i32(step), filter_row, filter_column, w_first, k_left, w_held)
        ptx.wait_for_predecessor()
        for step in range(stages - 1):
            stage = u32(shared + step * stage_bytes)
            begin_x(stage, i32(step), row, column, h0, w0, x_rows, x_held, fill)
            if not ahead:
                begin_w(stage, i32(step), filter_row, filter_column, w_first, k_left, w_held)
            commit()  # weights that went ahead are all in the first group
            finish_x(stage, row, column, x_held)
            finish_w(stage, filter_row, filter_column, w_held)

    return load


# --- Walk -------------------------------------------------------------------------------------------------------------
def tile_walk(plan: Plan) -> Callable[..., Any]:
    """`place(tile)` returns (image, first output pixel, group, first channel in the group).

    Tiles are walked in bands of `plan.band` pixel tiles. Within a band, pixels run fastest, then channels, then groups.
    If the batch is folded into the pixels, the image is 0.
    """
    walk = banded(plan.tiling.tiles_m, plan.tiling.tiles_n, plan.band)
    image_tiles, group_tiles, bm, bn = plan.tiling.image_tiles, plan.tiling.group_tiles, plan.bm, plan.bn

    def place(tile: Any) -> Any:
        tile_m, tile_n = walk(tile)
        image = u32(tile_m // u32(image_tiles))
        group = u32(tile_n // u32(group_tiles))
        m_first = u32((tile_m - image * image_tiles) * bm)
        return image, m_first, group, u32((tile_n - group * group_tiles) * bn)

    return place


# --- Multiply ---------------------------------------------------------------------------------------------------------
def zeros(gemm: Gemm) -> Any:
    """The type of a sum; called with 0 it gives the first one."""
    return f32 if gemm.product.accumulator == "float32" else i32


def products(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`multiply(sums, row_sums, x_chunk, w_chunk)`: one chunk of a step. It adds up x if the weight has a zero point."""
    summed = "weight" in workload.params.zero_points
    distances = plan.threads_m * plan.row_bytes, plan.threads_n * plan.row_bytes
    multiply_chunk = simt.multiply_chunk(plan.gemm.product, plan.tm, plan.tn, *distances, summed)

    def multiply(sums: Any, row_sums: Any, x_chunk: Any, w_chunk: Any) -> None:
        multiply_chunk(sums, x_chunk, w_chunk)

    def multiply_and_sum(sums: Any, row_sums: Any, x_chunk: Any, w_chunk: Any) -> None:
        multiply_chunk(sums, row_sums, x_chunk, w_chunk)

    return multiply_and_sum if summed else multiply


def correction(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`correct(sums, row_sums, column_sums, weight_sums, group, k, x_zero_point, weight_zero_point)`: zero points.

    `k` is the thread's first channel in the group. All sums are exact: they wrap around at 32 bits, as those of a 32-bit
    integer do.
    """
    p = workload.params
    gemm, tn, threads_n, of_x = plan.gemm, plan.tn, plan.threads_n, "x" in p.zero_points
    k_total, count = gemm.k, gemm.c * p.r * p.s
    subtract, load = simt.subtract_zero_points(plan.tm, plan.tn), simt.load_words(1)

    def correct(
        sums: Any, row_sums: Any, column_sums: Any, weight_sums: Any, group: Any, k: Any, x_zero: Any, weight_zero: Any
    ) -> None:  # fmt: skip
        for j in range(tn):
            channel = u32(k + j * threads_n)
            at = u64(u64(group) * k_total + channel)
            inside = (channel < k_total) & of_x
            column_sums[j] = i32(load(weight_sums + at * 4, inside, u32(0)))
        subtract(sums, row_sums, column_sums, i32(x_zero), i32(weight_zero), count)

    def nothing(
        sums: Any, row_sums: Any, column_sums: Any, weight_sums: Any, group: Any, k: Any, x_zero: Any, weight_zero: Any
    ) -> None:  # fmt: skip
        pass

    return correct if p.zero_points else nothing


# --- Store ------------------------------------------------------------------------------------------------------------
def output(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, capability: tuple[int, int]
) -> Callable[..., None]:
    """`store(y, shared, thread, part, image, m_first, group, k_first, operands)` writes a staged part of the tile to y.

    It applies the epilogue to `vector` channels at once.
    """
    gemm, threads, m_total, out_dtype = plan.gemm, plan.threads, plan.pixels, workload.output.dtype
    k_total, vector, out_bytes = gemm.k, gemm.vector, dtype_of(out_dtype).nbytes
    rows, vectors, staged_row_bytes = plan.part_rows * plan.threads_m, plan.bn // gemm.vector, plan.staged_row_bytes
    strides, of_pixel = strides_of(workload, "y"), pixel_of(workload, plan)
    per_image, per_pixel, of_channel = strides["N"].outer, strides["W"].outer, strides["C"].offset()
    pair, single, accumulator = epilogue.pair, epilogue.single, gemm.product.accumulator
    load, write = simt.load_shared(vector, accumulator), simt.store_global(vector, out_dtype, accumulator, capability)

    def along_row(item: Any) -> Any:
        return u32(item // vectors), u32(item % vectors * vector)

    def along_column(item: Any) -> Any:
        return u32(item % rows), u32(item // rows * vector)

    def store_one(address: Any, staged: Any, k: Any, offset: Any, operands: Any) -> None:
        write(address, single(load(staged), 1, k, offset, *operands))

    def store_four(address: Any, staged: Any, k: Any, offset: Any, operands: Any) -> None:
        a, b, c, d = load(staged)
        a, b = pair(a, b, 1, k, offset, *operands)
        c, d = pair(c, d, 1, i32(k + 2), i64(offset + 2), *operands)
        write(address, a, b, c, d)

    shuffle = shuffled_offset(workload)

    def in_layout(n: Any, pixel: Any, k: Any) -> Any:
        return i64(i64(n) * per_image + i64(pixel) * per_pixel + of_channel(k))

    offset_of = in_layout if shuffle is None else shuffle
    place = along_column if gemm.pixels_first_out else along_row
    store_vector = store_one if vector == 1 else store_four

    def store(
        y: Any, shared: Any, thread: Any, part: Any, image: Any, m_first: Any, group: Any, k_first: Any, operands: Any
    ) -> None:  # fmt: skip
        for item in range(i32(thread), i32(rows * vectors), i32(threads)):
            row, column = place(u32(item))
            m = u32(m_first + part * rows + row)
            if m < m_total and u32(k_first + column) < k_total:
                n, pixel = of_pixel(image, m)
                k = i32(group * k_total + k_first + column)
                offset = i64(offset_of(n, pixel, k))
                staged = u32(shared + row * staged_row_bytes + column * 4)
                store_vector(u64(y + u64(offset * out_bytes)), staged, k, offset, operands)

    return store


# --- The sums of filters ----------------------------------------------------------------------------------------------
def build_sums(workload: Workload[Conv2dParams], gemm: Gemm) -> Callable[..., None]:
    """The kernel (rows, weight_sums): the sum of each filter's elements, int32. A block of 32 threads has a filter."""
    chunks, load, add = gemm.chunks, simt.load_words(CHUNK), simt.sum_of_elements[workload.params.weight_dtype]
    load_sum = simt.load_shared(1, "int32")

    def add_up(rows: Any, weight_sums: Any) -> None:
        thread, number = u32(cuda.threadIdx.x), u64(cuda.blockIdx.x)
        first = u64(rows + number * (chunks * CHUNK_BYTES))
        total = i32(0)
        for chunk in range(i32(thread), i32(chunks), i32(32)):
            a, b, c, d = load(u64(first + u64(chunk) * CHUNK_BYTES), 1, u32(0))
            total = add(a, b, c, d, total)
        shared = shared_base()
        ptx.store_shared_v4(u32(shared + thread * CHUNK_BYTES), u32(total), 0, 0, 0)
        cuda.syncthreads()
        if thread == 0:
            for other in range(i32(1), i32(32)):
                total = i32(total + load_sum(u32(shared + other * CHUNK_BYTES)))
            ptx.store_global_u32(u64(weight_sums + number * 4), u32(total))

    return add_up
