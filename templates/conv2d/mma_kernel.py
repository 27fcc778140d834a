"""The kernel of conv2d_mma: load by cp.async into a ring of stages, multiply by mma.sync, stage the tile, store.

The kernel captures the functions here, and they become part of it. A thread loads one column of chunks, in rows that are
`row_step` apart. A chunk is 8 elements along the reduction, 16 bytes, one row of an 8x8 ldmatrix.

Sources: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k16, ldmatrix) and "cp.async".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.templates.conv2d.mma_sizes import CHUNK, Plan, ceil_div
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload

OUTSIDE = -(2**30)  # a row coordinate that no tap can bring back into the image
# Names that the kernel and its functions capture; see `KernelStep`.
SHAPED_BY = frozenset({"accumulators", "rows_x", "store.float_out", "store.vector"})
_COPY = {8: ptx.cp_async_16, 4: ptx.cp_async_8, 2: ptx.cp_async_4, 1: ptx.copy_2}


def build_kernel(workload: Workload, plan: Plan, epilogue: Epilogue) -> Callable[..., None]:
    """The kernel of one configuration. It takes (x, weight, y, *epilogue.params); addresses are u64."""
    index = types.int64 if plan.wide_counts else types.int32
    tiles, steps, stages, persistent = plan.tiles, plan.steps, plan.stages, plan.persistent
    accumulators, rows_x = plan.accumulators, ceil_div(plan.bm, plan.row_step)
    warps, warps_n, wm, wn, slices = plan.warps, plan.warps_n, plan.wm, plan.wn, plan.slices
    row_bytes, stage_bytes, x_bytes = plan.row_bytes, plan.stage_bytes, plan.x_bytes
    staged_row_bytes, slice_bytes, chunks = plan.staged_row_bytes, plan.slice_bytes, plan.chunks
    parts = plan.bk // 16 // slices  # k16 steps of one warp within a step

    place, locate_pixels, locate_filters = tile_walk(plan), pixels(workload, plan), filters(plan)
    load_x, load_w = pixel_loads(workload, plan), filter_loads(plan)
    commit, wait_stage, wait_all = ptx.cp_async_commit, ptx.cp_async_wait(stages - 2), ptx.cp_async_wait(0)
    flip, multiply = swizzle(chunks), ptx.mma_warp_tile(wm, wn, row_bytes, workload.dtype)
    stage_tile = ptx.store_warp_tile(wm, wn, staged_row_bytes)
    store = output(workload, plan, epilogue)

    def kernel(x: Any, weight: Any, y: Any, *operands: Any) -> None:
        shared = shared_base()
        thread = types.uint32(cuda.threadIdx.x)  # unsigned: a division by a power of two is then a shift
        lane, warp = types.uint32(thread % 32), types.uint32(thread // 32)
        part_first, warp = types.uint32(warp // warps * parts), types.uint32(warp % warps)
        out_slice = types.uint32(shared + part_first // parts * slice_bytes)
        warp_m, warp_n = types.uint32(warp // warps_n * wm), types.uint32(warp % warps_n * wn)

        # Where this thread writes its chunks and reads its fragments.
        column = types.uint32(thread % chunks)
        row = types.uint32(thread // chunks)
        x_row = types.uint32(lane % 16)
        w_row = types.uint32(lane % 8 + lane // 16 * 8)
        x_fragment = types.uint32(shared + (warp_m + x_row) * row_bytes)
        w_fragment = types.uint32(shared + x_bytes + (warp_n + w_row) * row_bytes)
        x_flip = types.uint32(flip(x_row))
        w_flip = types.uint32(flip(w_row))

        h0 = cuda.local.array(rows_x, types.int32)  # row of the pixel's first tap, may be negative
        w0 = cuda.local.array(rows_x, types.int32)
        x_rows = cuda.local.array(rows_x, types.uint64)
        acc = cuda.local.array(accumulators, types.float32)

        def fill(step: Any, slot: Any, w_first: Any, k_left: Any) -> None:
            """Loads the tiles of one step. Beyond the last step it writes zeros and reads nothing."""
            stage = types.uint32(shared + slot * stage_bytes)
            load_x(stage, step, row, column, h0, w0, x_rows)
            load_w(stage, step, row, column, w_first, k_left)

        for tile in range(index(cuda.blockIdx.x), index(tiles), index(cuda.gridDim.x)):
            m_first, group, k_first = place(tile)
            locate_pixels(x, m_first, row, group, h0, w0, x_rows)
            w_first, k_left = locate_filters(weight, row, group, k_first)

            # ---- load and multiply
            for i in range(accumulators):
                acc[i] = types.float32(0)
            for step in range(stages - 1):
                fill(types.int32(step), types.int32(step), w_first, k_left)
                commit()
            read, write = types.int32(0), types.int32(stages - 1)
            for step in range(types.int32(steps)):
                wait_stage()
                cuda.syncthreads()
                fill(types.int32(step + stages - 1), write, w_first, k_left)
                commit()
                for part in range(parts):
                    x_chunk = types.uint32((((part_first + part) * 2 + lane // 16) ^ x_flip) * 16)
                    w_chunk = types.uint32((((part_first + part) * 2 + lane // 8 % 2) ^ w_flip) * 16)
                    stage = types.uint32(read * stage_bytes)
                    multiply(acc, x_fragment + stage + x_chunk, w_fragment + stage + w_chunk)
                read = types.int32(read + 1 if read + 1 < stages else 0)
                write = types.int32(write + 1 if write + 1 < stages else 0)
            wait_all()
            cuda.syncthreads()

            # ---- store
            stage_tile(acc, out_slice + (warp_m + lane // 4) * staged_row_bytes + (warp_n + lane % 4 * 2) * 4)
            cuda.syncthreads()
            store(y, shared, thread, m_first, group, k_first, k_left, operands)
            if persistent:
                cuda.syncthreads()  # all threads must have read the result before the ring is filled again

    return kernel


# --- Walk -------------------------------------------------------------------------------------------------------------
def tile_walk(plan: Plan) -> Callable[..., Any]:
    """`place(tile)` returns (first output pixel, group, first channel in the group).

    Tiles are walked in panels of `plan.panel` pixel tiles. Within a panel, pixels run fastest, then channels, then groups.
    """
    count = _count(plan)
    panel, tiles_m, tiles_n, group_tiles, bm, bn = plan.panel, plan.tiles_m, plan.tiles_n, plan.group_tiles, plan.bm, plan.bn

    def place(tile: Any) -> Any:
        first = count(count(tile) // (panel * tiles_n) * panel)
        height = count(min(tiles_m - first, panel))
        inside_panel = count(count(tile) % (panel * tiles_n))
        tile_n = count(inside_panel // height)
        tile_m = count(first + inside_panel % height)
        group = count(tile_n // group_tiles)
        return count(tile_m * bm), group, types.int32((tile_n - group * group_tiles) * bn)

    return place


def _count(plan: Plan) -> Any:
    return types.int64 if plan.wide_counts else types.uint32


# --- Load -------------------------------------------------------------------------------------------------------------
def swizzle(chunks: int) -> Callable[[Any], Any]:
    """`flip(row)`: the number of a chunk XOR `flip(row)` is its place in a shared row of `chunks` chunks.

    Any 8 consecutive rows of one column of chunks then use all 32 banks.
    """
    band, patterns = max(8 // chunks, 1), min(chunks, 8)  # rows that share 128 bytes, and distinct patterns

    def flip(row: Any) -> Any:
        return row // band % patterns

    return flip


def pixels(workload: Workload, plan: Plan) -> Callable[..., None]:
    """`locate(x, m_first, row, group, h0, w0, x_rows)` finds the pixels that a thread loads.

    It writes for each of the thread's rows the coordinates of the first tap and that element's address.
    """
    count, rows, row_step, m_total, c_group = _count(plan), _rows(plan.bm, plan), plan.row_step, plan.gemm.m, plan.gemm.c
    _, out_h, out_w, _ = workload.output.shape
    h, w, c_all, out_pixels = workload.h, workload.w, workload.c, out_h * out_w
    (stride_h, stride_w), (pad_top, pad_left) = workload.stride, workload.padding[:2]

    def locate(x: Any, m_first: Any, row: Any, group: Any, h0: Any, w0: Any, x_rows: Any) -> None:
        for i in range(rows):
            m = count(m_first + row + i * row_step)
            n = count(m // out_pixels)
            pixel = count(m - n * out_pixels)
            p = count(pixel // out_w)
            down = types.int32(p * stride_h - pad_top)
            right = types.int32((pixel - p * out_w) * stride_w - pad_left)
            h0[i] = down if m < m_total else types.int32(OUTSIDE)
            w0[i] = right
            x_rows[i] = x + types.uint64(
                (((types.int64(n) * h + down) * w + right) * c_all + types.int64(group) * c_group) * 2
            )

    return locate


def _rows(tile_rows: int, plan: Plan) -> int:
    """The number of a tile's rows that one thread loads."""
    return int(ceil_div(tile_rows, plan.row_step))


def pixel_loads(workload: Workload, plan: Plan) -> Callable[..., None]:
    """`load(stage, step, row, column, h0, w0, x_rows)` loads the thread's chunks of x, and zeros outside of the image."""
    rows, row_step, bm, bk, row_bytes = _rows(plan.bm, plan), plan.row_step, plan.bm, plan.bk, plan.row_bytes
    piece, c_group, kk_total, flip = plan.gemm.piece_x, plan.gemm.c, plan.gemm.kk, swizzle(plan.chunks)
    pieces, copy, ragged = CHUNK // piece, _COPY[piece], bm % row_step != 0
    h, w, c_all, kernel_w, padded = workload.h, workload.w, workload.c, workload.s, any(workload.padding)
    dilation_h, dilation_w = workload.dilation
    one_tap = c_group % bk == 0  # a step then lies within one tap, and all threads do the same arithmetic

    def load(stage: Any, step: Any, row: Any, column: Any, h0: Any, w0: Any, x_rows: Any) -> None:
        for number in range(pieces):
            kk = types.uint32(step * bk + column * CHUNK + number * piece)
            tap = types.uint32(types.uint32(step * bk) if one_tap else kk) // c_group
            tap_h = tap // kernel_w
            down = types.int32(tap_h * dilation_h)
            right = types.int32((tap - tap_h * kernel_w) * dilation_w)
            offset = (types.int64(down) * w + right) * c_all + (kk - tap * c_group)
            for i in range(rows):
                to_row = types.uint32(row + i * row_step)
                if not ragged or to_row < bm:
                    inside = (types.uint32(h0[i] + down) < types.uint32(h)) & (kk < types.uint32(kk_total))
                    if padded:
                        inside = inside & (types.uint32(w0[i] + right) < types.uint32(w))
                    at = types.uint32((column ^ flip(to_row)) * 16 + number * piece * 2)
                    to = types.uint32(stage + to_row * row_bytes) + at
                    copy(to, x_rows[i] + types.uint64(offset * 2), piece * 2 if inside else 0)

    return load


def filters(plan: Plan) -> Callable[..., Any]:
    """`locate(weight, row, group, k_first)` returns the address of the thread's first filter and the channels left."""
    k_total, kk_total = plan.gemm.k, plan.gemm.kk

    def locate(weight: Any, row: Any, group: Any, k_first: Any) -> Any:
        first = weight + types.uint64((types.int64(group) * k_total + k_first + row) * kk_total * 2)
        return first, types.int32(k_total - k_first)

    return locate


def filter_loads(plan: Plan) -> Callable[..., None]:
    """`load(stage, step, row, column, w_first, k_left)` loads the thread's chunks of the weights."""
    rows, row_step, bn, bk, row_bytes = _rows(plan.bn, plan), plan.row_step, plan.bn, plan.bk, plan.row_bytes
    piece, kk_total, flip = plan.gemm.piece_w, plan.gemm.kk, swizzle(plan.chunks)
    pieces, copy, ragged, x_bytes = CHUNK // piece, _COPY[piece], bn % row_step != 0, plan.x_bytes

    def load(stage: Any, step: Any, row: Any, column: Any, w_first: Any, k_left: Any) -> None:
        for number in range(pieces):
            kk = types.uint32(step * bk + column * CHUNK + number * piece)
            for i in range(rows):
                to_row = types.uint32(row + i * row_step)
                if not ragged or to_row < bn:
                    inside = (types.int32(to_row) < k_left) & (kk < types.uint32(kk_total))
                    offset = types.int64(i * row_step) * kk_total + kk
                    at = types.uint32((column ^ flip(to_row)) * 16 + number * piece * 2)
                    to = types.uint32(stage + x_bytes + to_row * row_bytes) + at
                    copy(to, w_first + types.uint64(offset * 2), piece * 2 if inside else 0)

    return load


# --- Store ------------------------------------------------------------------------------------------------------------
def output(workload: Workload, plan: Plan, epilogue: Epilogue) -> Callable[..., None]:
    """`store(y, shared, thread, m_first, group, k_first, k_left, operands)` writes the staged tile of y.

    It adds up the slices and applies the epilogue to `vector` channels at once.
    """
    count, bm, threads, slices = _count(plan), plan.bm, plan.threads, plan.slices
    m_total, k_total, k_all = plan.gemm.m, plan.gemm.k, workload.k
    staged_row_bytes, slice_bytes = plan.staged_row_bytes, plan.slice_bytes
    vector, out_bytes = plan.gemm.vector, plan.gemm.out_bytes
    vectors, float_out = plan.bn // vector, out_bytes == 4
    pair, single = epilogue.pair, epilogue.single
    pack = ptx.pack_pair("float16" if float_out else workload.out_dtype)

    def store(
        y: Any, shared: Any, thread: Any, m_first: Any, group: Any, k_first: Any, k_left: Any, operands: Any
    ) -> None:  # fmt: skip
        for item in range(types.int32(thread), types.int32(bm * vectors), types.int32(threads)):
            out_row = types.uint32(item) // vectors
            out_column = types.uint32(item) % vectors * vector
            m = count(m_first + out_row)
            if m < m_total and out_column < k_left:
                k = types.int32(group * k_total + k_first + out_column)
                offset = types.int64(m) * k_all + k
                address = y + types.uint64(offset * out_bytes)
                staged = types.uint32(shared + out_row * staged_row_bytes + out_column * 4)
                if vector == 1:
                    a0 = ptx.load_shared_f32(staged)
                    for other in range(1, slices):
                        a0 += ptx.load_shared_f32(staged + other * slice_bytes)
                    v0 = single(a0, 1, k, offset, *operands)
                    if float_out:
                        ptx.store_global_f32(address, v0)
                    else:
                        ptx.store_global_u16(address, pack(v0, types.float32(0)))
                else:
                    words = cuda.local.array(4, types.uint32)
                    for i in range(vector // 2):
                        a0, a1 = ptx.load_shared_f32x2(staged + i * 8)
                        for other in range(1, slices):
                            b0, b1 = ptx.load_shared_f32x2(staged + i * 8 + other * slice_bytes)
                            a0, a1 = a0 + b0, a1 + b1
                        v0, v1 = pair(a0, a1, 1, k + i * 2, offset + i * 2, *operands)
                        if float_out:
                            ptx.store_global_f32x2(address, v0, v1)
                        else:
                            words[i] = pack(v0, v1)
                    if vector == 8:
                        ptx.store_global_v4(address, words[0], words[1], words[2], words[3])
                    elif not float_out:
                        ptx.store_global_u32(address, words[0])

    return store
