"""What the threads of a block do together: number the elements that they keep, find the k-th smallest key, and sort.

Sources: Harris and Garland, "Optimizing Parallel Prefix Operations for the Fermi Architecture" (GPU Computing Gems, 2012),
for positions by votes; Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012), for radix
selection; Batcher, "Sorting networks and their applications" (1968).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.templates.selection.keys import LAST

WARP = 32
EVERY_LANE = 0xFFFFFFFF
RADIX_BITS = 8
BINS = 1 << RADIX_BITS
_SHARED_VOTES = 2  # rounds in which lanes with the same digit count together


def positions(threads: int) -> Callable[[Any, Any], Any]:
    """`place(flag, partial)` for kernels: (flags of the threads before, flags of the block). All threads take part.

    `partial` is a shared array of `threads // 32` int32, which may be used again at once.
    """
    warps = threads // WARP

    def place(flag: Any, partial: Any) -> Any:
        thread = types.int32(cuda.threadIdx.x)
        warp, lane = thread // WARP, thread % WARP
        votes = types.int64(cuda.ballot_sync(EVERY_LANE, flag)) & EVERY_LANE
        if lane == 0:
            partial[warp] = cuda.popc(votes)
        cuda.syncthreads()
        before = types.int32(cuda.popc(votes & ((types.int64(1) << types.int64(lane)) - 1)))
        total = types.int32(0)
        for other in range(warps):
            count = types.int32(partial[other])
            before = types.int32(before + count) if other < warp else before
            total = types.int32(total + count)
        cuda.syncthreads()
        return before, total

    return place


def block_sum(threads: int) -> Callable[[Any, Any], Any]:
    """`total(value, partial)` for kernels: the sum of a number of every thread; `partial` has `threads` int32."""

    def total(value: Any, partial: Any) -> Any:
        thread = types.int32(cuda.threadIdx.x)
        partial[thread] = value
        cuda.syncthreads()
        half = types.int32(threads // 2)
        while half > 0:
            if thread < half:
                partial[thread] += partial[thread + half]
            cuda.syncthreads()
            half = types.int32(half // 2)
        found = types.int32(partial[0])
        cuda.syncthreads()
        return found

    return total


def kth_key(bits: int, threads: int, key_at: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`find(data, first, stop, k, histogram, result)` for kernels: (the k-th smallest key of the items from first up to
    stop, how many of its equals belong to the k smallest). All threads take part; k is at least 1 and at most
    the number of items.

    Args:
        bits: of a key, a multiple of 8.
        threads: of the block, at least 256.
        key_at: (data, item) -> key.

    `histogram` is a shared array of 512 int32, `result` of 2.
    """
    passes, vote_rounds = bits // RADIX_BITS, _SHARED_VOTES

    def find(data: Any, first: Any, stop: Any, k: Any, histogram: Any, result: Any) -> Any:
        thread = types.int32(cuda.threadIdx.x)
        lane = thread % WARP
        prefix, wanted = types.int64(0), types.int32(k)
        for step in range(passes):
            shift = types.int64(bits - RADIX_BITS * (step + 1))
            if thread < BINS:
                histogram[thread] = 0
            cuda.syncthreads()
            for base in range(first, stop, threads):
                item = types.int64(base + thread)
                digit, pending = types.int32(0), False
                if item < stop:
                    key = key_at(data, item)
                    pending = (key >> (shift + RADIX_BITS)) == prefix
                    digit = types.int32((key >> shift) & (BINS - 1))
                for _ in range(vote_rounds):
                    votes = types.int64(cuda.ballot_sync(EVERY_LANE, pending)) & EVERY_LANE
                    if votes != 0:
                        leader = types.int32(cuda.ffs(votes) - 1)
                        common = types.int32(cuda.shfl_sync(EVERY_LANE, digit, leader))
                        same = types.int64(cuda.ballot_sync(EVERY_LANE, pending & (digit == common))) & EVERY_LANE
                        if lane == leader:
                            cuda.atomic.add(histogram, common, types.int32(cuda.popc(same)))
                        pending = pending & (digit != common)
                if pending:
                    cuda.atomic.add(histogram, digit, 1)
            cuda.syncthreads()
            source, step_size = types.int32(0), types.int32(1)
            while step_size < BINS:  # inclusive sums
                if thread < BINS:
                    value = histogram[source + thread]
                    if thread >= step_size:
                        value += histogram[source + thread - step_size]
                    histogram[BINS - source + thread] = value
                cuda.syncthreads()
                source, step_size = types.int32(BINS - source), types.int32(2 * step_size)
            if thread < BINS:
                before = types.int32(histogram[source + thread - 1]) if thread > 0 else types.int32(0)
                if (before < wanted) & (histogram[source + thread] >= wanted):
                    result[0], result[1] = thread, before
            cuda.syncthreads()
            prefix = types.int64((prefix << RADIX_BITS) | types.int64(result[0]))
            wanted = types.int32(wanted - result[1])
            cuda.syncthreads()
        return prefix, wanted

    return find


def sorter(threads: int) -> Callable[[Any, Any], Any]:
    """`sort(numbers, size)` for kernels: the shared int64 numbers[0] ... numbers[size - 1] in ascending order, by a bitonic
    network. `size` is a power of two, equal in all threads, which all take part."""

    def sort(numbers: Any, size: Any) -> None:
        thread = types.int32(cuda.threadIdx.x)
        run = types.int32(2)
        while run <= size:
            stride = types.int32(run // 2)
            while stride > 0:
                for i in range(thread, size // 2, threads):
                    low = types.int32((i & ~(stride - 1)) * 2 + (i & (stride - 1)))
                    a, b = numbers[low], numbers[low + stride]
                    if (a > b) == ((low & run) == 0):
                        numbers[low], numbers[low + stride] = b, a
                cuda.syncthreads()
                stride = types.int32(stride // 2)
            run = types.int32(2 * run)

    return sort


def next_power(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 2."""
    return max(2, 1 << (count - 1).bit_length())


def pad(numbers: Any, first: Any, stop: Any, threads: Any) -> None:
    """Fills shared numbers with one that comes last."""
    for i in range(first + cuda.threadIdx.x, stop, threads):
        numbers[i] = LAST
