"""The kernels of softmax on a GPU: rows of neighbours that stay in registers, and any axis in loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.softmax import along
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.groups import over_group
from schedsearch.workload import Workload

F32 = types.float32
LOG2_E = F32(math.log2(math.e))
LOWEST = F32(-math.inf)
SLOTS = 2  # of shared memory: one for the largest numbers, one for the sums


def row_kernel(p: Workload, vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) for the last axis: `lanes` threads share a row, which they read once and keep in registers.

    Thread t of a row has its vectors t, t + lanes, t + 2 lanes ...
    """
    rows, length, _ = along(p.params)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    parts, rows_of_block = -(-length // (vector * lanes)), threads // lanes
    held, numbers, partials = words * parts, vector * parts, SLOTS * max(threads // 32, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    largest_of, total_of = over_group(lanes, threads, _larger(), 0), over_group(lanes, threads, _added, 1)
    power, larger, log = vectors.power_of_two, vectors.larger, p.log

    def softmax(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, types.float32)
        word = cuda.local.array(held, types.uint32)
        number = cuda.local.array(numbers, types.float32)
        thread = types.int32(cuda.threadIdx.x)
        row = types.int64(types.int64(cuda.blockIdx.x) * rows_of_block + thread // lanes)
        first = types.int32(thread % lanes * vector)
        at = types.uint64(row * types.int64(length * element))
        for i in range(parts):
            column = types.int32(first + i * lanes * vector)
            load(word, i * words, x + at + types.uint64(column * element), (row < rows) & (column < length))
        largest = LOWEST
        for i in range(parts):
            unpack(word, i * words, number, i * vector)
            for e in range(vector):
                if first + i * lanes * vector >= length:
                    number[i * vector + e] = LOWEST
                largest = larger(largest, number[i * vector + e])
        largest = largest_of(partial, largest)
        total = F32(0)
        for i in range(numbers):
            distance = F32(number[i] - largest)
            raised = power(F32(distance * LOG2_E))
            total = F32(total + raised)
            number[i] = distance if log else raised
        total = total_of(partial, total)
        factor = F32(F32(1) / total)
        subtrahend = F32(math.log(total))
        for i in range(parts):
            column = types.int32(first + i * lanes * vector)
            for e in range(vector):
                value = number[i * vector + e]
                number[i * vector + e] = F32(value - subtrahend) if log else F32(value * factor)
            if (row < rows) & (column < length):
                pack(number, i * vector, word, 0)
                store(word, 0, y + at + types.uint64(column * element))

    return softmax


def looped_kernel(p: Workload, vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) for any axis and length: `lanes` threads share `vector` neighbouring rows along the axis, and
    read them twice.

    A thread keeps the largest number that it has seen and the sum of exponentials relative to it, and scales the sum when it
    sees a larger one (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Where the axis is the last
    one, the threads of a row are neighbours, and otherwise threads of neighbouring rows.
    """
    outer, length, inner = along(p.params)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    items, of_inner, groups = outer * inner // vector, inner // vector, threads // lanes
    partials = 2 * threads * vector
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    power, larger, log, neighbours, sums = vectors.power_of_two, vectors.larger, p.log, inner == 1, threads * vector
    scale = _scale()

    def softmax(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, types.float32)
        word = cuda.local.array(words, types.uint32)
        number = cuda.local.array(vector, types.float32)
        largest = cuda.local.array(vector, types.float32)
        total = cuda.local.array(vector, types.float32)
        thread = types.int32(cuda.threadIdx.x)
        lane, group = thread // groups, thread % groups
        if neighbours:
            lane, group = thread % lanes, thread // lanes
        item = types.int64(types.int64(cuda.blockIdx.x) * groups + group)
        exists = item < items
        start = (item // of_inner * length * inner + item % of_inner * vector) * element
        for e in range(vector):
            largest[e], total[e] = LOWEST, F32(0)
        for i in range(lane, length, lanes):
            load(word, 0, x + types.uint64(start + types.int64(i) * (inner * element)), exists)
            unpack(word, 0, number, 0)
            for e in range(vector):
                before = largest[e]
                largest[e] = larger(before, number[e])
                total[e] = F32(F32(total[e] * scale(before, largest[e])) + scale(number[e], largest[e]))
        half = types.int32(lanes // 2)
        while half > 0:
            for e in range(vector):
                partial[e * threads + thread] = largest[e]
                partial[sums + e * threads + thread] = total[e]
            cuda.syncthreads()
            other = thread ^ half
            if not neighbours:
                other = (lane ^ half) * groups + group
            for e in range(vector):
                theirs, before = partial[e * threads + other], largest[e]
                largest[e] = larger(before, theirs)
                mine = F32(total[e] * scale(before, largest[e]))
                total[e] = F32(mine + F32(partial[sums + e * threads + other] * scale(theirs, largest[e])))
            cuda.syncthreads()
            half = types.int32(half // 2)
        if exists:
            for e in range(vector):
                total[e] = F32(math.log(total[e])) if log else F32(F32(1) / total[e])
            for i in range(lane, length, lanes):
                at = types.uint64(start + types.int64(i) * (inner * element))
                load(word, 0, x + at, exists)
                unpack(word, 0, number, 0)
                for e in range(vector):
                    distance = F32(number[e] - largest[e])
                    number[e] = F32(distance - total[e]) if log else F32(power(F32(distance * LOG2_E)) * total[e])
                pack(number, 0, word, 0)
                store(word, 0, y + at)

    return softmax


def _scale() -> Callable[[Any, Any], Any]:
    """`scale(number, largest)`: the exponential of the difference; 0 for -inf, also if nothing was larger."""
    power = vectors.power_of_two

    def scale(number: Any, largest: Any) -> Any:
        return F32(0) if number == LOWEST else power(F32(F32(number - largest) * LOG2_E))

    return scale


def _larger() -> Callable[[Any, Any], Any]:
    larger = vectors.larger

    def largest(a: Any, b: Any) -> Any:
        return larger(a, b)

    return largest


def _added(a: Any, b: Any) -> Any:
    return F32(a + b)
