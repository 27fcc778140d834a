"""A softmax of each row, formulated twice: a block takes a row of any length; or a block takes several rows, whose length
the knobs must meet, so that every number stays in a register and no index is tested."""

import math

import numpy as np
from numba import cuda, float32, uint64
from numba.cuda import libdevice

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


@softmax.alternative(
    knobs={
        "threads": (32, 64, 128, 256, 512, 1024),
        "each": (4, 8, 16, 32, 64),
        "rows": (1, 2, 4, 8),
        "fast": (True, False),
    },
    rules=["threads * rows <= 1024"],
    grid=lambda x, k: x.shape[0] // k.rows if x.shape[0] % k.rows == 0 and x.shape[1] == k.threads * k.each else 0,
    block=lambda k: (k.threads, k.rows),
    fastmath=lambda k: k.fast,
)
def whole_rows(x, y, *, threads, each, rows):
    largests, totals = cuda.shared.array((rows, 32), float32), cuda.shared.array((rows, 32), float32)
    kept = cuda.local.array(each, float32)
    place, thread = cuda.threadIdx.y, cuda.threadIdx.x
    row, first = uint64(cuda.blockIdx.x * rows + place), uint64(thread)  # Numba tests whether signed indices are negative
    for i in range(each):
        kept[i] = x[row, first + uint64(i * threads)]
    largest = kept[0]
    for i in range(1, each):
        largest = libdevice.fmaxf(largest, kept[i])
    for step in (16, 8, 4, 2, 1):
        largest = libdevice.fmaxf(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, step))
    if threads > 32:
        if thread % 32 == 0:
            largests[place, thread // 32] = largest
        cuda.syncthreads()
        for i in range(threads // 32):
            largest = libdevice.fmaxf(largest, largests[place, i])
    total = float32(0)
    for i in range(each):
        kept[i] = math.exp(kept[i] - largest)
        total += kept[i]
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
    if threads > 32:
        if thread % 32 == 0:
            totals[place, thread // 32] = total
        cuda.syncthreads()
        total = float32(0)
        for i in range(threads // 32):
            total += totals[place, i]
    factor = float32(1) / total
    for i in range(each):
        y[row, first + uint64(i * threads)] = kept[i] * factor


SHAPES = ("8192x4096:float32", "8192x4096:float32")
