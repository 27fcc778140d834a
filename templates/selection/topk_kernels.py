"""The kernels of topk on a GPU. Arrays are flat, and x holds the bits of its elements.

A row is one block's, `select_kernel`, or shared by `splits` blocks in several launches: one `digit_kernel` for each digit of
the keys, from the highest on, then `collect_kernel` and `sort_kernel`. Each launch begins with what the last one counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.softmax import along
from schedsearch.ops.topk import TopKParams
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.selection.block import (
    BINS,
    RADIX_BITS,
    WARP,
    collector,
    digit_counter,
    find_digit,
    kth_key,
    next_power,
    pad,
    sorter,
)
from schedsearch.templates.selection.keys import index_of, key_bits, key_of
from schedsearch.workload import Workload


def used_lengths(workload: Workload[TopKParams]) -> Callable[[Any, Any], Any]:
    """`used(row, extents)` for kernels: numbers in use along the axis of a row."""
    p = workload.params
    outer, length, inner = along(p)
    of_first = inner * (outer // p.x[0])  # rows for each index of the first axis, if that is not the axis of the numbers
    by_axis = p.axis == -len(p.x)

    def fixed(row: Any, extents: Any) -> Any:
        return i64(length)

    def shorter(row: Any, extents: Any) -> Any:
        return i64(max(min(i64(extents[0]), length), 0))

    def fewer(row: Any, extents: Any) -> Any:
        return i64(length) if row < i64(extents[0]) * of_first else i64(0)

    return (shorter if by_axis else fewer) if p.dynamic else fixed


def extents_writer(workload: Workload[TopKParams]) -> Callable[[Any, Any], None]:
    """`write(y_extents, extents)` for kernels: the extents in use of y."""
    p = workload.params
    shape, k, by_axis, dynamic = workload.outputs[0].shape, p.k, p.axis == -len(p.x), p.dynamic

    def write(y_extents: Any, extents: Any) -> None:
        for axis in range(len(shape)):
            y_extents[axis] = shape[axis]
        count = i64(extents[0])
        y_extents[0] = min(count, i64(k)) if by_axis else count

    def nothing(y_extents: Any, extents: Any) -> None:
        pass

    return write if dynamic else nothing


def key_reader(p: Workload[TopKParams]) -> Callable[[Any, Any], Any]:
    """`key_at((x, first element of a row), item)` for kernels."""
    _, _, inner = along(p.params)
    key = key_of(p.params.dtype, p.params.largest)

    def key_at(data: Any, item: Any) -> Any:
        words, start = data
        return key(words[u64(start + item * inner)])  # unsigned, as Numba looks for negative indices otherwise

    return key_at


def row_start(p: Workload[TopKParams]) -> Callable[[Any], Any]:
    """`start(row)` for kernels: the first element of a row in x."""
    _, length, inner = along(p.params)

    def start(row: Any) -> Any:
        return i64(row // inner * length * inner + row % inner)

    return start


def best_writer(p: Workload[TopKParams], threads: int) -> Callable[..., None]:
    """`write(x, y, indices, chosen, row, wanted)` for kernels: sorts pairs in shared memory and writes the best."""
    _, _, inner = along(p.params)
    k, room, sort, start = p.params.k, next_power(p.params.k), sorter(threads), row_start(p)

    def write(x: Any, y: Any, indices: Any, chosen: Any, row: Any, wanted: Any) -> None:
        cuda.syncthreads()
        sort(chosen, room)
        for i in range(cuda.threadIdx.x, wanted, threads):
            item = index_of(chosen[i])
            to = i64((row // inner * k + i) * inner + row % inner)
            y[to] = x[start(row) + item * inner]
            indices[to] = item

    return write


def select_kernel(workload: Workload[TopKParams], threads: int, each: int) -> Callable[..., None]:
    """The kernel (x, x_extents, y, indices, y_extents): a block finds, sorts and writes the best k numbers of a row."""
    p = workload.params
    k, room, warps, key_at, start = p.k, next_power(p.k), threads // WARP, key_reader(workload), row_start(workload)
    used, write_extents, write = used_lengths(workload), extents_writer(workload), best_writer(workload, threads)
    find, collect = kth_key(key_bits(p.dtype), threads, each, key_at), collector(threads, each, key_at)

    def select(x, x_extents, y, indices, y_extents) -> None:  # type: ignore[no-untyped-def]
        chosen = cuda.shared.array(0, i64)
        histogram = cuda.shared.array(BINS, i32)
        partial = cuda.shared.array(warps, i32)
        result = cuda.shared.array(3, i32)
        taken = cuda.shared.array(1, i32)
        thread, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        if (row == 0) & (thread == 0):
            write_extents(y_extents, x_extents)
        if thread == 0:
            taken[0] = 0
        stop = i64(used(row, x_extents))
        wanted = i32(min(i64(k), stop))
        pad(chosen, wanted, room, threads)
        if wanted > 0:
            data, first = (x, start(row)), i64(0)
            kth, equals, total = find(data, first, stop, wanted, histogram, result)
            limit, behind = i64(kth), i32(wanted - equals)
            if equals == total:  # no need to number them
                limit, equals = i64(limit + 1), i32(0)
            collect(data, first, stop, limit, 0, equals, chosen, 0, behind, taken, 0, partial)
        write(x, y, indices, chosen, row, wanted)

    return select


def narrower(p: Workload[TopKParams], step: int, splits: int, threads: int) -> Callable[..., Any]:
    """`narrow(row, wanted, counts, states, histogram, result)` for kernels: what `step` counted digits say of a row's k-th
    key. It gives these bits of the key, and how many of the keys that begin like that belong to the best.

    `counts` are the histograms of all blocks, [digits, rows, splits, 256]. `states` [digits, rows, 2] is what narrow gave
    for fewer digits. All threads take part, and result[2] is the number of keys that begin like that.
    """
    outer, _, inner = along(p.params)
    rows, groups = outer * inner, threads // BINS
    share, shift = -(-splits // groups), key_bits(p.params.dtype) - RADIX_BITS * step

    def narrow(row: Any, wanted: Any, counts: Any, states: Any, histogram: Any, result: Any) -> Any:
        thread = i32(cuda.threadIdx.x)
        prefix, rest = u32(0), i32(wanted)
        if step > 1:
            state = i64(((step - 1) * rows + row) * 2)
            prefix, rest = u32(states[state]), i32(states[state + 1])
        if thread < BINS:
            histogram[thread] = 0
        cuda.syncthreads()
        own = i32(0)
        first = i64(((step - 1) * rows + row) * splits)
        for i in range(share):
            split = i32(i * groups + thread // BINS)
            if split < splits:
                own += i32(counts[u64((first + split) * BINS + thread % BINS)])
        cuda.atomic.add(histogram, thread % BINS, own)
        cuda.syncthreads()
        find_digit(histogram, rest, result)
        return u32(prefix | (u32(result[0]) << u32(shift))), i32(rest - result[1])

    def nothing(row: Any, wanted: Any, counts: Any, states: Any, histogram: Any, result: Any) -> Any:
        return u32(0), i32(wanted)

    return narrow if step > 0 else nothing


def digit_kernel(p: Workload[TopKParams], step: int, splits: int, threads: int, each: int) -> Callable[..., None]:
    """The kernel (x, x_extents, y_extents, counts, states, taken): a block counts digit `step` (0, ...) of its part.

    Only keys that begin like the k-th one count. `counts` and `states` are as in `narrower`; `taken` [rows] becomes 0.
    """
    outer, length, inner = along(p.params)
    k, rows, part, key_at, start = p.params.k, outer * inner, -(-length // splits), key_reader(p), row_start(p)
    used, write_extents, narrow = used_lengths(p), extents_writer(p), narrower(p, step, splits, threads)
    count, shift = digit_counter(threads, each, key_at), key_bits(p.params.dtype) - RADIX_BITS * (step + 1)

    def count_digits(x, x_extents, y_extents, counts, states, taken) -> None:  # type: ignore[no-untyped-def]
        histogram = cuda.shared.array(BINS, i32)
        result = cuda.shared.array(3, i32)
        thread, block = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        row, split = i64(block // splits), i64(block % splits)
        if (step == 0) & (block == 0) & (thread == 0):
            write_extents(y_extents, x_extents)
        if (step == 0) & (split == 0) & (thread == 0):
            taken[row] = 0
        length_used = i64(used(row, x_extents))
        wanted = i32(min(i64(k), length_used))
        if wanted > 0:
            prefix, rest = narrow(row, wanted, counts, states, histogram, result)
            if (split == 0) & (thread == 0):
                states[(step * rows + row) * 2] = prefix
                states[(step * rows + row) * 2 + 1] = rest
            first = i64(split * part)
            stop = i64(min(length_used, first + part))
            count((x, start(row)), first, stop, shift, prefix, histogram)
            if thread < BINS:
                counts[((step * rows + row) * splits + split) * BINS + thread] = histogram[thread]

    return count_digits


def collect_kernel(p: Workload[TopKParams], splits: int, threads: int, each: int) -> Callable[..., None]:
    """The kernel (x, x_extents, counts, states, taken, candidates): a block adds the best of its part to those of its row.

    `candidates` [rows, k] are pairs of a key and an index, in any order.
    """
    outer, length, inner = along(p.params)
    k, rows, part, warps, passes = (
        p.params.k,
        outer * inner,
        -(-length // splits),
        threads // WARP,
        key_bits(p.params.dtype) // RADIX_BITS,
    )
    key_at, start, used, narrow = key_reader(p), row_start(p), used_lengths(p), narrower(p, passes, splits, threads)
    collect = collector(threads, each, key_at)

    def collect_best(x, x_extents, counts, states, taken, candidates) -> None:  # type: ignore[no-untyped-def]
        histogram = cuda.shared.array(BINS, i32)
        partial = cuda.shared.array(warps, i32)
        result = cuda.shared.array(3, i32)
        earlier = cuda.shared.array(1, i32)
        thread, block = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        row, split = i64(block // splits), i64(block % splits)
        length_used = i64(used(row, x_extents))
        wanted = i32(min(i64(k), length_used))
        if thread == 0:
            earlier[0] = 0
        if wanted > 0:
            kth, equals = narrow(row, wanted, counts, states, histogram, result)
            limit, behind = i64(kth), i64(row * k + wanted - equals)
            if equals == result[2]:  # no need to number them
                limit, equals = i64(limit + 1), i32(0)
            else:
                before = i64(((passes - 1) * rows + row) * splits)
                for other in range(thread, split, threads):
                    cuda.atomic.add(earlier, 0, counts[(before + other) * BINS + result[0]])
            cuda.syncthreads()
            found, first = i32(earlier[0]), i64(split * part)
            stop = i64(min(length_used, first + part))
            data, at = (x, start(row)), i64(row * k)
            collect(data, first, stop, limit, found, equals, candidates, at, behind, taken, row, partial)

    return collect_best


def sort_kernel(p: Workload[TopKParams], threads: int) -> Callable[..., None]:
    """The kernel (x, x_extents, y, indices, candidates): a block sorts and writes the best of a row."""
    k, room, used, write = p.params.k, next_power(p.params.k), used_lengths(p), best_writer(p, threads)

    def sort_best(x, x_extents, y, indices, candidates) -> None:  # type: ignore[no-untyped-def]
        chosen = cuda.shared.array(0, i64)
        thread, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        wanted = i32(min(i64(k), i64(used(row, x_extents))))
        pad(chosen, wanted, room, threads)
        for i in range(thread, wanted, threads):
            chosen[i] = candidates[row * k + i]
        write(x, y, indices, chosen, row, wanted)

    return sort_best
