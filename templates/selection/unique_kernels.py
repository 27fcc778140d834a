"""The kernels of unique on a GPU: they sort the places of elements or slices, and number those that differ from the last.

A pair of a key and a place is sorted by a bitonic network over blocks: steps whose partners are far apart are kernels of
their own, all others run in shared memory. Places make all pairs differ, so that equal elements stay in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.unique import UniqueParams, sliced
from schedsearch.templates.parts.casts import i32, i64
from schedsearch.templates.selection.block import EVERY_LANE, WARP, block_sum
from schedsearch.templates.selection.keys import LAST, key_of
from schedsearch.workload import Workload

TILE = 2048  # pairs of a block in shared memory
THREADS = 256


def wide_key(dtype: str) -> Callable[[Any], Any]:
    """`key(word)` for kernels: an int64 in the order of the elements; all NaNs are one number."""
    ascending = key_of(dtype, False)

    def wide(word: Any) -> Any:
        return i64(ascending(word))

    return _unchanged if dtype_of(dtype).nbytes == 8 else wide


def _unchanged(word: Any) -> Any:
    return i64(word)


def comes_before(p: Workload[UniqueParams]) -> Callable[..., Any]:
    """`before(x, key_a, a, key_b, b)` for kernels: whether element or slice a comes before b. Keys are those of their first
    elements; places from the number of slices on belong to none."""
    outer, count, inner = sliced(p.params)
    key, length = wide_key(p.params.dtype), outer * inner

    def of_elements(x: Any, key_a: Any, a: Any, key_b: Any, b: Any) -> Any:
        return (key_a < key_b) | ((key_a == key_b) & (a < b))

    def of_slices(x: Any, key_a: Any, a: Any, key_b: Any, b: Any) -> Any:
        smaller, larger = key_a < key_b, key_a > key_b
        at = i64(1)
        while (not smaller) & (not larger) & (at < length) & (a < count) & (b < count):
            row = i64(at // inner * count * inner + at % inner)
            one, other = key(x[row + i64(a) * inner]), key(x[row + i64(b) * inner])
            smaller, larger = one < other, one > other
            at = i64(at + 1)
        return smaller | ((not larger) & (a < b))

    return of_elements if length == 1 else of_slices


def differs(p: Workload[UniqueParams]) -> Callable[..., Any]:
    """`other(x, a, b)` for kernels: whether two elements or slices differ."""
    outer, count, inner = sliced(p.params)
    key, length = wide_key(p.params.dtype), outer * inner

    def other(x: Any, a: Any, b: Any) -> Any:
        found, at = False, i64(0)
        while (not found) & (at < length):
            row = i64(at // inner * count * inner + at % inner)
            found = key(x[row + i64(a) * inner]) != key(x[row + i64(b) * inner])
            at = i64(at + 1)
        return found

    return other


def begin_kernel(p: Workload[UniqueParams], size: int) -> Callable[..., None]:
    """The kernel (x, keys, order): pairs in the order of x, and behind them pairs that come last."""
    _, count, inner = sliced(p.params)
    key = wide_key(p.params.dtype)

    def begin(x, keys, order) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < size:
            keys[at] = key(x[at * inner]) if at < count else LAST
            order[at] = at

    return begin


def tile_kernel(p: Workload[UniqueParams], size: int, first_run: int, last_run: int) -> Callable[..., None]:
    """The kernel (x, keys, order): the steps of the runs from first_run to last_run whose partners are in one tile."""
    tile, before = min(size, TILE), comes_before(p)

    def sort_tile(x, keys, order) -> None:  # type: ignore[no-untyped-def]
        of_tile = cuda.shared.array(TILE, i64)
        places = cuda.shared.array(TILE, i32)
        thread, first = i32(cuda.threadIdx.x), i64(i64(cuda.blockIdx.x) * tile)
        for i in range(thread, tile, THREADS):
            of_tile[i] = keys[first + i]
            places[i] = order[first + i]
        cuda.syncthreads()
        run = i64(first_run)
        while run <= last_run:
            stride = i32(min(run, i64(tile)) // 2)
            while stride > 0:
                for i in range(thread, tile // 2, THREADS):
                    low = i32((i & ~(stride - 1)) * 2 + (i & (stride - 1)))
                    high = i32(low + stride)
                    key_low, key_high, a, b = of_tile[low], of_tile[high], places[low], places[high]
                    if before(x, key_high, b, key_low, a) == (((first + low) & run) == 0):
                        of_tile[low], of_tile[high] = key_high, key_low
                        places[low], places[high] = b, a
                cuda.syncthreads()
                stride = i32(stride // 2)
            run = i64(2 * run)
        for i in range(thread, tile, THREADS):
            keys[first + i] = of_tile[i]
            order[first + i] = places[i]

    return sort_tile


def far_kernel(p: Workload[UniqueParams], size: int, run: int, stride: int) -> Callable[..., None]:
    """The kernel (x, keys, order): one step of a run, whose partners are `stride` apart."""
    before = comes_before(p)

    def exchange(x, keys, order) -> None:  # type: ignore[no-untyped-def]
        i = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if i < size // 2:
            low = i64((i & ~i64(stride - 1)) * 2 + (i & (stride - 1)))
            high = i64(low + stride)
            key_low, key_high, a, b = keys[low], keys[high], order[low], order[high]
            if before(x, key_high, b, key_low, a) == ((low & run) == 0):
                keys[low], keys[high] = key_high, key_low
                order[low], order[high] = b, a

    return exchange


def heads_kernel(p: Workload[UniqueParams]) -> Callable[..., None]:
    """The kernel (x, order, marks): 1 for each sorted place whose element differs from the one before, else 0."""
    _, count, _ = sliced(p.params)
    other = differs(p)

    def heads(x, order, marks) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < count:
            head = True
            if at > 0:
                head = other(x, order[at], order[at - 1])
            marks[at] = i32(head)

    return heads


def count_kernel(count: int, part: int) -> Callable[..., None]:
    """The kernel (marks, counts): how many of the marks of a part are not 0."""
    total = block_sum(THREADS)

    def count_marks(marks, counts) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(THREADS, i32)
        thread, first = i32(cuda.threadIdx.x), i64(i64(cuda.blockIdx.x) * part)
        found = i32(0)
        for at in range(first + thread, min(first + part, count), THREADS):
            found += i32(marks[at] != 0)
        found = total(found, partial)
        if thread == 0:
            counts[cuda.blockIdx.x] = found

    return count_marks


def number_kernel(count: int, part: int) -> Callable[..., None]:
    """The kernel (marks, counts, numbers): marks that are not 0, up to and with each place, less one."""
    total, warps = block_sum(THREADS), THREADS // WARP

    def number(marks, counts, numbers) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(THREADS, i32)
        of_warps = cuda.shared.array(warps, i32)
        thread, block = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        warp, lane = thread // WARP, thread % WARP
        before = i32(0)
        for other in range(thread, block, THREADS):
            before += i32(counts[other])
        at = i32(total(before, partial))
        first = i64(block * part)
        stop = i64(min(first + part, count))
        for base in range(first, stop, THREADS):
            place = i64(base + thread)
            flag = False
            if place < stop:
                flag = marks[place] != 0
            votes = i64(cuda.ballot_sync(EVERY_LANE, flag)) & EVERY_LANE
            if lane == 0:
                of_warps[warp] = cuda.popc(votes)
            cuda.syncthreads()
            own, whole = i32(at), i32(0)
            for other in range(warps):
                own = i32(own + of_warps[other]) if other < warp else own
                whole = i32(whole + of_warps[other])
            cuda.syncthreads()
            if place < stop:
                numbers[place] = own + cuda.popc(votes & ((i64(2) << i64(lane)) - 1)) - 1
            at = i32(at + whole)

    return number


def clear_kernel(count: int) -> Callable[..., None]:
    """The kernel (marks): no element is the first of its kind yet."""

    def clear(marks) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < count:
            marks[at] = 0

    return clear


def first_kernel(count: int) -> Callable[..., None]:
    """The kernel (order, numbers, marks): marks the elements that are the first of their kind."""

    def mark_first(order, numbers, marks) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < count:
            head = True
            if at > 0:
                head = numbers[at] != numbers[at - 1]
            if head:
                marks[order[at]] = 1

    return mark_first


def write_kernel(workload: Workload[UniqueParams]) -> Callable[..., None]:
    """The kernel (x, order, numbers, ranks, y, indices, inverse, three arrays of extents, starts): a thread for each sorted
    place. The first of a kind writes it; `starts` are the sorted places of the first of all kinds.
    """
    p = workload.params
    outer, count, inner = sliced(p)
    shape, axis, as_found = workload.outputs[0].shape, 0 if p.flat else p.axis, p.order == "first"

    def write(  # type: ignore[no-untyped-def]
        x, order, numbers, ranks, y, indices, inverse, y_extents, indices_extents, counts_extents, starts
    ) -> None:
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < count:
            number, place = i64(numbers[at]), i64(order[at])
            head = True
            if at > 0:
                head = numbers[at - 1] != numbers[at]
            if head:
                starts[number] = at
                to = number
                if as_found:
                    to = i64(ranks[place])
                indices[to] = place
                for row in range(outer):
                    for i in range(inner):
                        y[(row * count + to) * inner + i] = x[(row * count + place) * inner + i]
            if at == count - 1:
                for i in range(len(shape)):
                    y_extents[i] = number + 1 if i == axis else shape[i]
                indices_extents[0] = number + 1
                counts_extents[0] = number + 1
            if not as_found:
                inverse[place] = number

    return write


def finish_kernel(p: Workload[UniqueParams]) -> Callable[..., None]:
    """The kernel (order, numbers, ranks, starts, inverse, counts): how often each kind occurs, and where each element is."""
    _, count, _ = sliced(p.params)
    as_found = p.params.order == "first"

    def finish(order, numbers, ranks, starts, inverse, counts) -> None:  # type: ignore[no-untyped-def]
        at = i64(i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if at < count:
            number = i64(numbers[at])
            to = number
            if as_found:
                to = i64(ranks[order[starts[number]]])
                inverse[order[at]] = to
            last = True
            if at < count - 1:
                last = numbers[at + 1] != numbers[at]
            if last:
                counts[to] = at + 1 - starts[number]

    return finish
