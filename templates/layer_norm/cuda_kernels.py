"""The kernel of layer_norm on a GPU: groups of threads share rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layer_norm import LayerNormParams, rows_of
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.groups import over_group
from schedsearch.templates.parts.rows import MOST_HELD
from schedsearch.workload import Workload

SLOTS = 2  # of shared memory: one for the sums, one for the squares


def rows_kernel(workload: Workload[LayerNormParams], vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, scale, bias, y): `lanes` threads share a row.

    Thread t of a row has its vectors t, t + lanes, t + 2 lanes ... They stay in registers if there are few, and are read
    again for each pass otherwise. The variance is the mean square of distances from the mean, which loses no digits.
    """
    p = workload.params
    rows, length = rows_of(p)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    parts, rows_of_block = -(-length // (vector * lanes)), threads // lanes
    stays = parts * vector <= MOST_HELD
    held_words, held = (words * parts, vector * parts) if stays else (words, vector)
    partials = SLOTS * max(threads // 32, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    load_floats, as_floats = vectors.load("float32", vector), vectors.unpack("float32", vector)
    sum_of, square_of = over_group(lanes, threads, _added, 0), over_group(lanes, threads, _added, 1)
    centred, has_bias, epsilon, share = p.centred, p.bias, f32(p.epsilon), f32(1 / length)

    def layer_norm(x, scale, bias, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, f32)
        word = cuda.local.array(held_words, u32)
        number = cuda.local.array(held, f32)
        operand_word = cuda.local.array(vector, u32)
        operand = cuda.local.array(vector, f32)
        thread = i32(cuda.threadIdx.x)
        row = i64(i64(cuda.blockIdx.x) * rows_of_block + thread // lanes)
        first = i32(thread % lanes * vector)
        at = u64(row * i64(length * element))
        exists = row < rows
        if stays:
            for i in range(parts):
                column = i32(first + i * lanes * vector)
                load(word, i * words, x + at + u64(column * element), exists & (column < length))
        total = f32(0)
        for i in range(parts):
            column = i32(first + i * lanes * vector)
            own = i if stays else 0
            if not stays:
                load(word, 0, x + at + u64(column * element), exists & (column < length))
            unpack(word, own * words, number, own * vector)
            for e in range(vector):
                total = f32(total + number[own * vector + e])
        mean = f32(sum_of(partial, total) * share) if centred else f32(0)
        square = f32(0)
        for i in range(parts):
            column = i32(first + i * lanes * vector)
            own = i if stays else 0
            if not stays:
                load(word, 0, x + at + u64(column * element), exists & (column < length))
                unpack(word, 0, number, 0)
            if column < length:
                for e in range(vector):
                    distance = f32(number[own * vector + e] - mean)
                    square = f32(square + f32(distance * distance))
        inverse = f32(f32(1) / f32(math.sqrt(f32(f32(square_of(partial, square) * share) + epsilon))))
        for i in range(parts):
            column = i32(first + i * lanes * vector)
            own = i if stays else 0
            if exists & (column < length):
                if not stays:
                    load(word, 0, x + at + u64(column * element), True)
                    unpack(word, 0, number, 0)
                load_floats(operand_word, 0, scale + u64(column * 4), True)
                as_floats(operand_word, 0, operand, 0)
                for e in range(vector):
                    distance = f32(f32(number[own * vector + e] - mean) * inverse)
                    number[own * vector + e] = f32(distance * operand[e])
                if has_bias:
                    load_floats(operand_word, 0, bias + u64(column * 4), True)
                    as_floats(operand_word, 0, operand, 0)
                    for e in range(vector):
                        number[own * vector + e] = f32(number[own * vector + e] + operand[e])
                pack(number, own * vector, word, 0)
                store(word, 0, y + at + u64(column * element))

    return layer_norm


def _added(a: Any, b: Any) -> Any:
    return f32(a + b)
