"""The kernels of gather and scatter on a GPU. Arrays are flat; x, y and updates of moved rows, and wrong_index, are
addresses."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.index_map import ByIndicesParams, IndexMap
from schedsearch.templates.indexing.places import counter, extents_writer, finder, noter
from schedsearch.templates.parts import moves
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.ptx import note_index
from schedsearch.workload import Workload


def gather_kernel(
    workload: Workload[ByIndicesParams], m: IndexMap, vector_bytes: int, lanes: int, each: int, threads: int
) -> Callable[..., None]:
    """The kernel (x, indices, indices_extents, x_extents, y, y_extents, wrong_index). A wrong index gives zeros."""
    p = workload.params
    rows, row_bytes, apart = m.rows, m.run * dtype_of(p.dtype).nbytes, threads // lanes
    words = moves.words_of(vector_bytes)
    held, load, store = words * each, moves.load_global(vector_bytes), moves.store_global(vector_bytes)
    find, counts = finder(m, p.dynamic_x), counter(m, p.dynamic)
    note, write_extents, bounded = noter(m, p.dynamic_x, note_index), extents_writer(workload), p.dynamic or p.dynamic_x

    def gather(x, indices, indices_extents, x_extents, y, y_extents, wrong_index) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(held, u32)
        source = cuda.local.array(each, i64)
        usable = cuda.local.array(each, i32)
        wanted = cuda.local.array(each, i32)
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread % lanes)
        first = i64(i64(cuda.blockIdx.x) * (apart * each) + thread // lanes)
        if bounded and (cuda.blockIdx.x == 0) & (thread == 0):
            write_extents(indices_extents, x_extents, y_extents)
        for e in range(each):
            row = i64(first + e * apart)
            usable[e], wanted[e], source[e] = 0, 0, 0
            if row < rows and counts(row, indices_extents):
                found, inside = find(row, indices, x_extents)
                source[e] = i64(found * row_bytes)
                usable[e], wanted[e] = i32(inside), 1
                if (lane == 0) & (usable[e] == 0):
                    note(row, indices, x_extents, wrong_index)
        for at in range(lane * vector_bytes, row_bytes, lanes * vector_bytes):
            for e in range(each):
                load(word, e * words, u64(x + u64(source[e] + at)), usable[e])
            for e in range(each):
                if wanted[e]:
                    to = i64(i64(first + e * apart) * row_bytes + at)
                    store(word, e * words, u64(y + u64(to)))

    return gather


def replace_kernel(
    workload: Workload[ByIndicesParams], m: IndexMap, vector_bytes: int, lanes: int, each: int, threads: int
) -> Callable[..., None]:
    """The kernel (updates, indices, indices_extents, x_extents, last, y): rows that are the last of their target replace
    it."""
    p = workload.params
    rows, row_bytes, apart = m.rows, m.run * dtype_of(p.dtype).nbytes, threads // lanes
    words = moves.words_of(vector_bytes)
    held, load, store = words * each, moves.load_global(vector_bytes), moves.store_global(vector_bytes)
    find, counts = finder(m, p.dynamic_x), counter(m, p.dynamic)

    def replace(updates, indices, indices_extents, x_extents, last, y) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(held, u32)
        target = cuda.local.array(each, i64)
        usable = cuda.local.array(each, i32)
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread % lanes)
        first = i64(i64(cuda.blockIdx.x) * (apart * each) + thread // lanes)
        for e in range(each):
            row = i64(first + e * apart)
            usable[e], target[e] = 0, 0
            if row < rows and counts(row, indices_extents):
                found, inside = find(row, indices, x_extents)
                if inside:
                    target[e] = i64(found * row_bytes)
                    usable[e] = i32(last[found] == row)
        for at in range(lane * vector_bytes, row_bytes, lanes * vector_bytes):
            for e in range(each):
                source = i64(i64(first + e * apart) * row_bytes + at)
                load(word, e * words, u64(updates + u64(source)), usable[e])
            for e in range(each):
                if usable[e]:
                    store(word, e * words, u64(y + u64(target[e] + at)))

    return replace


def mark_kernel(workload: Workload[ByIndicesParams], m: IndexMap) -> Callable[..., None]:
    """The kernel (indices, indices_extents, x_extents, last, y_extents, wrong_index): the last row of updates for each
    target, and the extents of y."""
    p = workload.params
    rows, find, counts = m.rows, finder(m, p.dynamic_x), counter(m, p.dynamic)
    note, write_extents, bounded = noter(m, p.dynamic_x, note_index), extents_writer(workload), p.dynamic_x

    def mark(indices, indices_extents, x_extents, last, y_extents, wrong_index) -> None:  # type: ignore[no-untyped-def]
        row = i64(i64(cuda.blockIdx.x) * 256 + cuda.threadIdx.x)
        if bounded and row == 0:
            write_extents(indices_extents, x_extents, y_extents)
        if row < rows and counts(row, indices_extents):
            found, inside = find(row, indices, x_extents)
            if inside:
                cuda.atomic.max(last, found, i32(row))
            else:
                note(row, indices, x_extents, wrong_index)

    return mark


def combine_kernel(
    workload: Workload[ByIndicesParams], m: IndexMap, lanes: int, each: int, threads: int
) -> Callable[..., None]:
    """The kernel (indices, indices_extents, x_extents, updates, y, y_extents, wrong_index): rows are combined with their
    targets."""
    p = workload.params
    rows, run, apart = m.rows, m.run, threads // lanes
    find, counts = finder(m, p.dynamic_x), counter(m, p.dynamic)
    note, write_extents, bounded = noter(m, p.dynamic_x, note_index), extents_writer(workload), p.dynamic_x
    adds, raises = p.reduction == "add", p.reduction == "max"

    def combine(  # type: ignore[no-untyped-def]
        indices, indices_extents, x_extents, updates, y, y_extents, wrong_index
    ) -> None:
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread % lanes)
        first = i64(i64(cuda.blockIdx.x) * (apart * each) + thread // lanes)
        if bounded and (cuda.blockIdx.x == 0) & (thread == 0):
            write_extents(indices_extents, x_extents, y_extents)
        for e in range(each):
            row = i64(first + e * apart)
            if row < rows and counts(row, indices_extents):
                found, inside = find(row, indices, x_extents)
                if inside:
                    for i in range(lane, run, lanes):
                        at, value = i64(found * run + i), updates[row * run + i]
                        if adds:
                            cuda.atomic.add(y, at, value)
                        elif raises:
                            cuda.atomic.max(y, at, value)
                        else:
                            cuda.atomic.min(y, at, value)
                elif lane == 0:
                    note(row, indices, x_extents, wrong_index)

    return combine


def fill_kernel(size: int) -> Callable[..., None]:
    """The kernel (last): no row is the last one yet."""

    def fill(last) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * 256 + cuda.threadIdx.x)
        if at < size:
            last[at] = -1

    return fill
