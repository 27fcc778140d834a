"""What the threads of a block do together: number the elements that they keep, find the k-th smallest key, and sort.

Sources: Harris and Garland, "Optimizing Parallel Prefix Operations for the Fermi Architecture" (GPU Computing Gems, 2012),
for positions by votes; Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012), for radix
selection; Batcher, "Sorting networks and their applications" (1968).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.templates.parts.casts import i32, i64, u32
from schedsearch.templates.selection.keys import LAST, pair

WARP = 32
EVERY_LANE = 0xFFFFFFFF
RADIX_BITS = 8
BINS = 1 << RADIX_BITS
_BINS_OF_LANE = BINS // WARP


def positions(threads: int) -> Callable[[Any, Any], Any]:
    """`place(flag, partial)` for kernels: (flags of the threads before, flags of the block). All threads take part.

    `partial` is a shared array of `threads // 32` int32, which may be used again at once.
    """
    warps = threads // WARP

    def place(flag: Any, partial: Any) -> Any:
        thread = i32(cuda.threadIdx.x)
        warp, lane = thread // WARP, thread % WARP
        votes = i64(cuda.ballot_sync(EVERY_LANE, flag)) & EVERY_LANE
        if lane == 0:
            partial[warp] = cuda.popc(votes)
        cuda.syncthreads()
        before = i32(cuda.popc(votes & ((i64(1) << i64(lane)) - 1)))
        total = i32(0)
        for other in range(warps):
            count = i32(partial[other])
            before = i32(before + count) if other < warp else before
            total = i32(total + count)
        cuda.syncthreads()
        return before, total

    return place


def block_sum(threads: int) -> Callable[[Any, Any], Any]:
    """`total(value, partial)` for kernels: the sum of a number of every thread; `partial` has `threads` int32."""

    def total(value: Any, partial: Any) -> Any:
        thread = i32(cuda.threadIdx.x)
        partial[thread] = value
        cuda.syncthreads()
        half = i32(threads // 2)
        while half > 0:
            if thread < half:
                partial[thread] += partial[thread + half]
            cuda.syncthreads()
            half = i32(half // 2)
        found = i32(partial[0])
        cuda.syncthreads()
        return found

    return total


def loader(threads: int, each: int, key_at: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any, Any], None]:
    """`load(data, base, stop, keys)` for kernels: keys[e] is that of the item base + e * threads + thread, or of the item
    before stop. No load depends on a condition, so that all are in flight together.

    `key_at` is (data, item) -> key; keys and items are uint32.
    """

    def load(data: Any, base: Any, stop: Any, keys: Any) -> None:
        last = u32(stop - 1)
        for e in range(each):
            keys[e] = key_at(data, min(u32(base + e * threads + cuda.threadIdx.x), last))

    return load


def digit_counter(threads: int, each: int, key_at: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """`count(data, first, stop, shift, prefix, histogram)` for kernels: how often each digit, the 8 bits of a key from bit
    `shift` on, occurs in the items from first up to stop whose higher bits are those of `prefix`.

    All threads take part, at least 256; `histogram` is a shared array of 256 int32. The hardware adds up the lanes of a warp
    that count the same digit.
    """
    load, tile = loader(threads, each, key_at), threads * each

    def count(data: Any, first: Any, stop: Any, shift: Any, prefix: Any, histogram: Any) -> None:
        keys = cuda.local.array(each, u32)
        higher = u32(i64(-1) << i64(shift + RADIX_BITS))
        if cuda.threadIdx.x < BINS:
            histogram[cuda.threadIdx.x] = 0
        cuda.syncthreads()
        base, end = u32(first), u32(stop)
        while base < end:
            load(data, base, end, keys)
            for e in range(each):
                if (u32(base + e * threads + cuda.threadIdx.x) < end) & ((keys[e] & higher) == prefix):
                    cuda.atomic.add(histogram, u32(keys[e] >> u32(shift)) & u32(BINS - 1), 1)
            base = u32(base + tile)
        cuda.syncthreads()

    return count


def find_digit(histogram: Any, wanted: Any, result: Any) -> None:
    """For kernels: the digit of the number that is the `wanted`-th smallest, from 1, of those in a histogram.

    All threads take part. `result`, three shared int32, receives the digit, how many numbers have smaller digits, and how
    many have this one.
    """
    lane = i32(cuda.threadIdx.x)
    if lane < WARP:
        first, own = lane * _BINS_OF_LANE, i32(0)
        for i in range(_BINS_OF_LANE):
            own += i32(histogram[first + i])
        before, distance = i32(own), i32(1)
        while distance < WARP:
            other = i32(cuda.shfl_up_sync(EVERY_LANE, before, distance))
            before = i32(before + other) if lane >= distance else before
            distance = i32(2 * distance)
        before = i32(before - own)
        for i in range(_BINS_OF_LANE):
            count = i32(histogram[first + i])
            if (before < wanted) & (before + count >= wanted):
                result[0], result[1], result[2] = first + i, before, count
            before = i32(before + count)
    cuda.syncthreads()


def kth_key(bits: int, threads: int, each: int, key_at: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`find(data, first, stop, k, histogram, result)` for kernels: the k-th smallest key of the items from first up to stop,
    how many of its equals belong to the k smallest, and how many equals there are. All threads take part; k is at
    least 1 and at most the number of items.

    Args:
        bits: of a key, a multiple of 8.
        threads: of the block, at least 256.
        each: items of a thread whose loads are in flight together.
        key_at: (data, item) -> key.

    `histogram` is a shared array of 256 int32, `result` of 3.
    """
    passes, count = bits // RADIX_BITS, digit_counter(threads, each, key_at)

    def find(data: Any, first: Any, stop: Any, k: Any, histogram: Any, result: Any) -> Any:
        prefix, wanted = u32(0), i32(k)
        for step in range(passes):
            shift = i32(bits - RADIX_BITS * (step + 1))
            count(data, first, stop, shift, prefix, histogram)
            find_digit(histogram, wanted, result)
            prefix = u32(prefix | (u32(result[0]) << u32(shift)))
            wanted = i32(wanted - result[1])
        return prefix, wanted, i32(result[2])

    return find


def collector(threads: int, each: int, key_at: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """`collect(data, first, stop, limit, found, equals, chosen, at, behind, taken, slot, partial)` for kernels: the best
    items from first up to stop as pairs. All threads take part.

    Keys below `limit`, an int64, go to chosen[at] and so on in any order; taken[slot] counts them, also those of other
    blocks. Of the keys equal to it, the first `equals` in the order of their items belong to the best, and `found` lie
    before `first`: they go to chosen[behind] and so on. `partial` is a shared array of `threads // 32` int32.
    """
    load, place, tile = loader(threads, each, key_at), positions(threads), threads * each

    def collect(
        data: Any, first: Any, stop: Any, limit: Any, found: Any, equals: Any, chosen: Any, at: Any, behind: Any,
        taken: Any, slot: Any, partial: Any,
    ) -> None:  # fmt: skip
        keys = cuda.local.array(each, u32)
        base, end, seen = u32(first), u32(stop), i32(found)
        while base < end:
            load(data, base, end, keys)
            for e in range(each):
                item = u32(base + e * threads + cuda.threadIdx.x)
                if (item < end) & (i64(keys[e]) < limit):
                    chosen[at + cuda.atomic.add(taken, slot, 1)] = pair(keys[e], item)
            base = u32(base + tile)
        base = u32(first)
        while (base < end) & (seen < equals):
            item, same = u32(base + cuda.threadIdx.x), False
            if item < end:
                same = i64(key_at(data, item)) == limit
            before, total = place(same, partial)
            if same & (seen + before < equals):
                chosen[behind + seen + before] = pair(limit, item)
            seen = i32(seen + total)
            base = u32(base + threads)

    return collect


def sorter(threads: int) -> Callable[[Any, Any], Any]:
    """`sort(numbers, size)` for kernels: the shared int64 numbers[0] ... numbers[size - 1] in ascending order, by a bitonic
    network. `size` is a power of two, equal in all threads, which all take part.

    Numbers that are up to a warp's width apart stay in 64 neighbours that one warp exchanges, so only it waits.
    """

    def sort(numbers: Any, size: Any) -> None:
        thread = i32(cuda.threadIdx.x)
        run = i32(2)
        while run <= size:
            stride = i32(run // 2)
            while stride > 0:
                for i in range(thread, size // 2, threads):
                    low = i32((i & ~(stride - 1)) * 2 + (i & (stride - 1)))
                    a, b = numbers[low], numbers[low + stride]
                    if (a > b) == ((low & run) == 0):
                        numbers[low], numbers[low + stride] = b, a
                if (stride > WARP) | ((stride == 1) & (run > WARP)):
                    cuda.syncthreads()
                else:
                    cuda.syncwarp()
                stride = i32(stride // 2)
            run = i32(2 * run)
        cuda.syncthreads()

    return sort


def next_power(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 2."""
    return max(2, 1 << (count - 1).bit_length())


def pad(numbers: Any, first: Any, stop: Any, threads: Any) -> None:
    """Fills shared numbers with one that comes last."""
    for i in range(first + cuda.threadIdx.x, stop, threads):
        numbers[i] = LAST
