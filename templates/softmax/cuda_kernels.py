"""The kernels of softmax on a GPU: rows of neighbours that stay in registers, and any axis in loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.softmax import SoftmaxParams, along
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.groups import over_group
from schedsearch.workload import Workload

LOG2_E = f32(math.log2(math.e))
LOWEST = f32(-math.inf)
SLOTS = 2  # of shared memory: one for the largest numbers, one for the sums


def row_kernel(workload: Workload[SoftmaxParams], vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) for the last axis: `lanes` threads share a row, which they read once and keep in registers.

    Thread t of a row has its vectors t, t + lanes, t + 2 lanes ...
    """
    p = workload.params
    rows, length, _ = along(p)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    parts, rows_of_block = -(-length // (vector * lanes)), threads // lanes
    held, numbers, partials = words * parts, vector * parts, SLOTS * max(threads // 32, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    largest_of, total_of = over_group(lanes, threads, _larger(), 0), over_group(lanes, threads, _added, 1)
    power, larger, log = vectors.power_of_two, vectors.larger, p.log

    def softmax(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, f32)
        word = cuda.local.array(held, u32)
        number = cuda.local.array(numbers, f32)
        thread = i32(cuda.threadIdx.x)
        row = i64(i64(cuda.blockIdx.x) * rows_of_block + thread // lanes)
        first = i32(thread % lanes * vector)
        at = u64(row * i64(length * element))
        for i in range(parts):
            column = i32(first + i * lanes * vector)
            load(word, i * words, x + at + u64(column * element), (row < rows) & (column < length))
        largest = LOWEST
        for i in range(parts):
            unpack(word, i * words, number, i * vector)
            for e in range(vector):
                if first + i * lanes * vector >= length:
                    number[i * vector + e] = LOWEST
                largest = larger(largest, number[i * vector + e])
        largest = largest_of(partial, largest)
        total = f32(0)
        for i in range(numbers):
            distance = f32(number[i] - largest)
            raised = power(f32(distance * LOG2_E))
            total = f32(total + raised)
            number[i] = distance if log else raised
        total = total_of(partial, total)
        factor = f32(f32(1) / total)
        subtrahend = f32(math.log(total))
        for i in range(parts):
            column = i32(first + i * lanes * vector)
            for e in range(vector):
                value = number[i * vector + e]
                number[i * vector + e] = f32(value - subtrahend) if log else f32(value * factor)
            if (row < rows) & (column < length):
                pack(number, i * vector, word, 0)
                store(word, 0, y + at + u64(column * element))

    return softmax


def looped_kernel(workload: Workload[SoftmaxParams], vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) for any axis and length: `lanes` threads share `vector` neighbouring rows along the axis, and
    read them twice.

    A thread keeps the largest number that it has seen and the sum of exponentials relative to it, and scales the sum when it
    sees a larger one (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Where the axis is the last
    one, the threads of a row are neighbours, and otherwise threads of neighbouring rows.
    """
    p = workload.params
    outer, length, inner = along(p)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    items, of_inner, groups = outer * inner // vector, inner // vector, threads // lanes
    partials = 2 * threads * vector
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    power, larger, log, neighbours, sums = vectors.power_of_two, vectors.larger, p.log, inner == 1, threads * vector
    scale = _scale()

    def softmax(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, f32)
        word = cuda.local.array(words, u32)
        number = cuda.local.array(vector, f32)
        largest = cuda.local.array(vector, f32)
        total = cuda.local.array(vector, f32)
        thread = i32(cuda.threadIdx.x)
        lane, group = thread // groups, thread % groups
        if neighbours:
            lane, group = thread % lanes, thread // lanes
        item = i64(i64(cuda.blockIdx.x) * groups + group)
        exists = item < items
        start = (item // of_inner * length * inner + item % of_inner * vector) * element
        for e in range(vector):
            largest[e], total[e] = LOWEST, f32(0)
        for i in range(lane, length, lanes):
            load(word, 0, x + u64(start + i64(i) * (inner * element)), exists)
            unpack(word, 0, number, 0)
            for e in range(vector):
                before = largest[e]
                largest[e] = larger(before, number[e])
                total[e] = f32(f32(total[e] * scale(before, largest[e])) + scale(number[e], largest[e]))
        half = i32(lanes // 2)
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
                mine = f32(total[e] * scale(before, largest[e]))
                total[e] = f32(mine + f32(partial[sums + e * threads + other] * scale(theirs, largest[e])))
            cuda.syncthreads()
            half = i32(half // 2)
        if exists:
            for e in range(vector):
                total[e] = f32(math.log(total[e])) if log else f32(f32(1) / total[e])
            for i in range(lane, length, lanes):
                at = u64(start + i64(i) * (inner * element))
                load(word, 0, x + at, exists)
                unpack(word, 0, number, 0)
                for e in range(vector):
                    distance = f32(number[e] - largest[e])
                    number[e] = f32(distance - total[e]) if log else f32(power(f32(distance * LOG2_E)) * total[e])
                pack(number, 0, word, 0)
                store(word, 0, y + at)

    return softmax


def _scale() -> Callable[[Any, Any], Any]:
    """`scale(number, largest)`: the exponential of the difference; 0 for -inf, also if nothing was larger."""
    power = vectors.power_of_two

    def scale(number: Any, largest: Any) -> Any:
        return f32(0) if number == LOWEST else power(f32(f32(number - largest) * LOG2_E))

    return scale


def _larger() -> Callable[[Any, Any], Any]:
    larger = vectors.larger

    def largest(a: Any, b: Any) -> Any:
        return larger(a, b)

    return largest


def _added(a: Any, b: Any) -> Any:
    return f32(a + b)
