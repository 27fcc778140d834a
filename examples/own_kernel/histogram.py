"""A histogram: every block counts in shared memory and then adds its counts to the result."""

import numpy as np
from numba import cuda, int32

import schedsearch


@schedsearch.tunable(
    knobs={"threads": (256, 128, 512, 1024), "each": (1, 4, 16, 64)},
    grid=lambda x, k: -(-x.size // (k.threads * k.each)),
    block=lambda k: k.threads,
    inplace=["bins"],
    inputs={"x": (0, 255)},
    reference=lambda x, bins: bins + np.bincount(x, minlength=256),
)
def histogram(x, bins, *, threads, each):
    counts = cuda.shared.array(256, int32)
    thread = cuda.threadIdx.x
    for i in range(thread, 256, threads):
        counts[i] = 0
    cuda.syncthreads()
    first = cuda.blockIdx.x * threads * each + thread
    for i in range(each):
        at = first + i * threads
        if at < x.size:
            cuda.atomic.add(counts, x[at], 1)
    cuda.syncthreads()
    for i in range(thread, 256, threads):
        cuda.atomic.add(bins, i, counts[i])


SHAPES = ("67108864:uint8", "256:int32")
