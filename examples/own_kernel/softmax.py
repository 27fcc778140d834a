"""A softmax of each row. A block takes a row, and its threads keep their numbers in registers between the passes."""

import math

import numpy as np
from numba import cuda, float32

import schedsearch


def rowwise(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@schedsearch.tunable(
    knobs={"threads": (256, 32, 64, 128, 512, 1024), "each": (16, 1, 2, 4, 8, 32, 64)},
    grid=lambda x: x.shape[0],
    block=lambda k: k.threads,
    outputs=["y"],
    reference=rowwise,
    reduction=lambda x: 64,
)
def softmax(x, y, *, threads, each):
    shared = cuda.shared.array(32, float32)
    kept = cuda.local.array(each, float32)
    row, thread, columns = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    largest = float32(-math.inf)
    for first in range(0, columns, threads * each):
        for i in range(each):
            column = first + i * threads + thread
            kept[i] = x[row, column] if column < columns else float32(-math.inf)
            largest = max(largest, kept[i])
    for step in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, step))
    if thread % 32 == 0:
        shared[thread // 32] = largest
    cuda.syncthreads()
    for i in range(threads // 32):
        largest = max(largest, shared[i])
    cuda.syncthreads()
    total = float32(0)
    for first in range(0, columns, threads * each):
        for i in range(each):
            if columns > threads * each:  # else the numbers are still there
                column = first + i * threads + thread
                kept[i] = x[row, column] if column < columns else float32(-math.inf)
            kept[i] = math.exp(kept[i] - largest)
            total += kept[i]
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
    if thread % 32 == 0:
        shared[thread // 32] = total
    cuda.syncthreads()
    total = float32(0)
    for i in range(threads // 32):
        total += shared[i]
    factor = float32(1) / total
    for first in range(0, columns, threads * each):
        for i in range(each):
            column = first + i * threads + thread
            if column < columns:
                if columns > threads * each:
                    y[row, column] = math.exp(x[row, column] - largest) * factor
                else:
                    y[row, column] = kept[i] * factor


SHAPES = ("16384x4096:float32", "16384x4096:float32")
