"""The kernel of layer_norm on a GPU: groups of threads share rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layer_norm import rows_of
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.groups import over_group
from schedsearch.workload import Workload

F32 = types.float32
MOST_HELD = 32  # numbers of a row that a thread keeps in registers
SLOTS = 2  # of shared memory: one for the sums, one for the squares


def rows_kernel(p: Workload, vector: int, lanes: int, threads: int) -> Callable[..., None]:
    """The kernel (x, scale, bias, y): `lanes` threads share a row.

    Thread t of a row has its vectors t, t + lanes, t + 2 lanes ... They stay in registers if there are few, and are read
    again for each pass otherwise. The variance is the mean square of distances from the mean, which loses no digits.
    """
    rows, length = rows_of(p.params)
    element, words = dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    parts, rows_of_block = -(-length // (vector * lanes)), threads // lanes
    stays = parts * vector <= MOST_HELD
    held_words, held = (words * parts, vector * parts) if stays else (words, vector)
    partials = SLOTS * max(threads // 32, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    load_floats, as_floats = vectors.load("float32", vector), vectors.unpack("float32", vector)
    sum_of, square_of = over_group(lanes, threads, _added, 0), over_group(lanes, threads, _added, 1)
    centred, has_bias, epsilon, share = p.centred, p.bias, F32(p.epsilon), F32(1 / length)

    def layer_norm(x, scale, bias, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(partials, types.float32)
        word = cuda.local.array(held_words, types.uint32)
        number = cuda.local.array(held, types.float32)
        operand_word = cuda.local.array(vector, types.uint32)
        operand = cuda.local.array(vector, types.float32)
        thread = types.int32(cuda.threadIdx.x)
        row = types.int64(types.int64(cuda.blockIdx.x) * rows_of_block + thread // lanes)
        first = types.int32(thread % lanes * vector)
        at = types.uint64(row * types.int64(length * element))
        exists = row < rows
        if stays:
            for i in range(parts):
                column = types.int32(first + i * lanes * vector)
                load(word, i * words, x + at + types.uint64(column * element), exists & (column < length))
        total = F32(0)
        for i in range(parts):
            column = types.int32(first + i * lanes * vector)
            own = i if stays else 0
            if not stays:
                load(word, 0, x + at + types.uint64(column * element), exists & (column < length))
            unpack(word, own * words, number, own * vector)
            for e in range(vector):
                total = F32(total + number[own * vector + e])
        mean = F32(sum_of(partial, total) * share) if centred else F32(0)
        square = F32(0)
        for i in range(parts):
            column = types.int32(first + i * lanes * vector)
            own = i if stays else 0
            if not stays:
                load(word, 0, x + at + types.uint64(column * element), exists & (column < length))
                unpack(word, 0, number, 0)
            if column < length:
                for e in range(vector):
                    distance = F32(number[own * vector + e] - mean)
                    square = F32(square + F32(distance * distance))
        inverse = F32(F32(1) / F32(math.sqrt(F32(F32(square_of(partial, square) * share) + epsilon))))
        for i in range(parts):
            column = types.int32(first + i * lanes * vector)
            own = i if stays else 0
            if exists & (column < length):
                if not stays:
                    load(word, 0, x + at + types.uint64(column * element), True)
                    unpack(word, 0, number, 0)
                load_floats(operand_word, 0, scale + types.uint64(column * 4), True)
                as_floats(operand_word, 0, operand, 0)
                for e in range(vector):
                    distance = F32(F32(number[own * vector + e] - mean) * inverse)
                    number[own * vector + e] = F32(distance * operand[e])
                if has_bias:
                    load_floats(operand_word, 0, bias + types.uint64(column * 4), True)
                    as_floats(operand_word, 0, operand, 0)
                    for e in range(vector):
                        number[own * vector + e] = F32(number[own * vector + e] + operand[e])
                pack(number, own * vector, word, 0)
                store(word, 0, y + at + types.uint64(column * element))

    return layer_norm


def _added(a: Any, b: Any) -> Any:
    return F32(a + b)
