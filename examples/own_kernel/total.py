"""The sum of an array: every thread adds several numbers, a block adds its threads', and atomics add the blocks'."""

import numpy as np
from numba import cuda, float32

import schedsearch


@schedsearch.tunable(
    knobs={"threads": (256, 128, 512, 1024), "each": (1, 4, 16, 64, 256)},
    grid=lambda x, k: -(-x.size // (k.threads * k.each)),
    block=lambda k: k.threads,
    inplace=["result"],
    reference=lambda x, result: result + np.sum(x),
    reduction=lambda x: x.size,
)
def total(x, result, *, threads, each):
    shared = cuda.shared.array(32, float32)
    thread = cuda.threadIdx.x
    first = cuda.blockIdx.x * threads * each + thread
    own = float32(0)
    for i in range(each):
        at = first + i * threads
        if at < x.size:
            own += x[at]
    for step in (16, 8, 4, 2, 1):
        own += cuda.shfl_xor_sync(0xFFFFFFFF, own, step)
    if thread % 32 == 0:
        shared[thread // 32] = own
    cuda.syncthreads()
    if thread == 0:
        for i in range(1, threads // 32):
            own += shared[i]
        cuda.atomic.add(result, 0, own)


SHAPES = ("67108864:float32", "1:float32")
