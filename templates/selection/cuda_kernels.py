"""The kernels of topk and nonzero on a GPU. Arrays are flat, and x holds the bits of its elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.ops.softmax import along
from schedsearch.templates.selection.block import (
    BINS,
    EVERY_LANE,
    WARP,
    block_sum,
    kth_key,
    next_power,
    pad,
    positions,
    sorter,
)
from schedsearch.templates.selection.keys import LAST, index_of, is_nonzero, key_bits, key_of, pair
from schedsearch.workload import Workload


def used_lengths(p: Workload) -> Callable[[Any, Any], Any]:
    """`used(row, extents)` for kernels: numbers in use along the axis of a row."""
    outer, length, inner = along(p.params)
    of_first = inner * (outer // p.x[0])  # rows for each index of the first axis, if that is not the axis of the numbers
    by_axis = p.axis == -len(p.x)

    def fixed(row: Any, extents: Any) -> Any:
        return types.int64(length)

    def shorter(row: Any, extents: Any) -> Any:
        return types.int64(min(types.int64(extents[0]), length))

    def fewer(row: Any, extents: Any) -> Any:
        return types.int64(length) if row < types.int64(extents[0]) * of_first else types.int64(0)

    return (shorter if by_axis else fewer) if p.dynamic else fixed


def extents_writer(p: Workload) -> Callable[[Any, Any], None]:
    """`write(y_extents, extents)` for kernels: the extents in use of y."""
    shape, k, by_axis, dynamic = p.outputs[0].shape, p.k, p.axis == -len(p.x), p.dynamic

    def write(y_extents: Any, extents: Any) -> None:
        for axis in range(len(shape)):
            y_extents[axis] = shape[axis]
        count = types.int64(extents[0])
        y_extents[0] = min(count, types.int64(k)) if by_axis else count

    def nothing(y_extents: Any, extents: Any) -> None:
        pass

    return write if dynamic else nothing


def select_kernel(p: Workload, splits: int, threads: int) -> Callable[..., None]:
    """The kernel (x, x_extents, y, indices, y_extents, candidates): a block finds the best k numbers of a part of a row.

    Without splits it sorts them and writes y. Otherwise they become candidates, which `merge_kernel` sorts.
    """
    _, length, inner = along(p.params)
    k, part, room = p.k, -(-length // splits), next_power(p.k)
    key, used, write_extents = key_of(p.dtype, p.largest), used_lengths(p), extents_writer(p)
    place, sort, whole = positions(threads), sorter(threads), splits == 1
    warps, histogram_size = threads // WARP, 2 * BINS

    def key_at(data: Any, item: Any) -> Any:
        words, start = data
        return key(words[start + item * inner])

    find = kth_key(key_bits(p.dtype), threads, key_at)

    def select(x, x_extents, y, indices, y_extents, candidates) -> None:  # type: ignore[no-untyped-def]
        chosen = cuda.shared.array(0, types.int64)
        histogram = cuda.shared.array(histogram_size, types.int32)
        partial = cuda.shared.array(warps, types.int32)
        result = cuda.shared.array(2, types.int32)
        taken = cuda.shared.array(1, types.int32)
        thread, block = types.int32(cuda.threadIdx.x), types.int64(cuda.blockIdx.x)
        row, split = types.int64(block // splits), types.int64(block % splits)
        if (block == 0) & (thread == 0):
            write_extents(y_extents, x_extents)
        start = types.int64(row // inner * length * inner + row % inner)
        first = types.int64(split * part)
        stop = types.int64(min(used(row, x_extents), first + part))
        wanted = types.int32(max(types.int64(0), min(types.int64(k), stop - first)))
        pad(chosen, wanted, room, threads)
        if wanted > 0:
            limit, equals = find((x, start), first, stop, wanted, histogram, result)
            if thread == 0:
                taken[0] = 0
            cuda.syncthreads()
            found = types.int32(0)
            for base in range(first, stop, threads):
                item = types.int64(base + thread)
                same, own = False, types.int64(0)
                if item < stop:
                    own = key_at((x, start), item)
                    same = own == limit
                    if own < limit:
                        chosen[cuda.atomic.add(taken, 0, 1)] = pair(own, item)
                if found < equals:
                    before, total = place(same, partial)
                    if same & (found + before < equals):
                        chosen[wanted - equals + found + before] = pair(own, item)
                    found = types.int32(found + total)
        cuda.syncthreads()
        if whole:
            sort(chosen, room)
            for i in range(thread, wanted, threads):
                item = index_of(chosen[i])
                to = types.int64((row // inner * k + i) * inner + row % inner)
                y[to] = x[start + item * inner]
                indices[to] = item
        else:
            for i in range(thread, k, threads):
                candidates[block * k + i] = chosen[i] if i < wanted else LAST

    return select


def merge_kernel(p: Workload, splits: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y, indices, candidates): a block sorts the candidates of a row and writes the best k."""
    _, length, inner = along(p.params)
    k, count = p.k, splits * p.k
    room, sort = next_power(count), sorter(threads)

    def merge(x, y, indices, candidates) -> None:  # type: ignore[no-untyped-def]
        chosen = cuda.shared.array(0, types.int64)
        thread, row = types.int32(cuda.threadIdx.x), types.int64(cuda.blockIdx.x)
        for i in range(thread, room, threads):
            chosen[i] = candidates[row * count + i] if i < count else LAST
        cuda.syncthreads()
        sort(chosen, room)
        start = types.int64(row // inner * length * inner + row % inner)
        for i in range(thread, k, threads):
            if chosen[i] != LAST:
                item = index_of(chosen[i])
                to = types.int64((row // inner * k + i) * inner + row % inner)
                y[to] = x[start + item * inner]
                indices[to] = item

    return merge


def count_kernel(p: Workload, part: int, threads: int) -> Callable[..., None]:
    """The kernel (x, counts): a block counts the elements of its part that are not zero."""
    size, holds, total = math.prod(p.x), is_nonzero(p.dtype), block_sum(threads)

    def count(x, counts) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(threads, types.int32)
        thread, block = types.int32(cuda.threadIdx.x), types.int64(cuda.blockIdx.x)
        first = types.int64(block * part)
        found = types.int32(0)
        for item in range(first + thread, min(first + part, size), threads):
            found += types.int32(holds(x[item]))
        found = total(found, partial)
        if thread == 0:
            counts[block] = found

    return count


def place_kernel(p: Workload, part: int, each: int, threads: int) -> Callable[..., None]:
    """The kernel (x, counts, y, y_extents): a block writes the places of the elements of its part that are not zero.

    A warp takes `each` times 32 neighbours, so that the block numbers them once for all of them.
    """
    shape, size, rank = p.x, math.prod(p.x), len(p.x)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(rank))
    blocks, tile, warps = -(-size // part), threads * each, threads // WARP
    holds, total = is_nonzero(p.dtype), block_sum(threads)

    def places(x, counts, y, y_extents) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(threads, types.int32)
        of_warps = cuda.shared.array(warps, types.int32)
        votes = cuda.local.array(each, types.int64)
        thread, block = types.int32(cuda.threadIdx.x), types.int64(cuda.blockIdx.x)
        warp, lane = thread // WARP, thread % WARP
        before = types.int32(0)
        for other in range(thread, block, threads):
            before += types.int32(counts[other])
        at = types.int64(total(before, partial))
        if (block == blocks - 1) & (thread == 0):
            y_extents[0] = rank
            y_extents[1] = at + counts[block]
        first = types.int64(block * part)
        stop = types.int64(min(first + part, size))
        for base in range(first, stop, tile):
            own = types.int64(base + warp * (WARP * each) + lane)
            found = types.int32(0)
            for e in range(each):
                item = types.int64(own + e * WARP)
                flag = False
                if item < stop:
                    flag = holds(x[item])
                votes[e] = types.int64(cuda.ballot_sync(EVERY_LANE, flag)) & EVERY_LANE
                found += types.int32(cuda.popc(votes[e]))
            if lane == 0:
                of_warps[warp] = found
            cuda.syncthreads()
            to, whole = types.int64(at), types.int32(0)
            for other in range(warps):
                to = types.int64(to + of_warps[other]) if other < warp else to
                whole += types.int32(of_warps[other])
            cuda.syncthreads()
            for e in range(each):
                if (votes[e] >> types.int64(lane)) & 1:
                    ahead = types.int64(cuda.popc(votes[e] & ((types.int64(1) << types.int64(lane)) - 1)))
                    rest = types.int64(own + e * WARP)
                    for axis in range(rank):
                        y[axis * size + to + ahead] = rest // strides[axis]
                        rest = types.int64(rest % strides[axis])
                to = types.int64(to + cuda.popc(votes[e]))
            at = types.int64(at + whole)

    return places
