"""The kernels of nonzero on a GPU. Arrays are flat, and x holds the bits of its elements."""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda, types

from schedsearch.templates.selection.block import EVERY_LANE, WARP, block_sum
from schedsearch.templates.selection.keys import is_nonzero
from schedsearch.workload import Workload


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
