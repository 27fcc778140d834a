"""A histogram: every block counts in shared memory and then adds its counts to the result. In the second formulation a
thread reads four numbers at once (x must begin at a multiple of four bytes), and the warps of a block share several
histograms."""

import numpy as np
from numba import cuda, int32, uint32, uint64

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


@histogram.alternative(
    knobs={"threads": (256, 512, 1024), "copies": (1, 2, 4, 8), "each": (4, 8, 16), "per_sm": (1, 2, 4, 8)},
    rules=["threads * per_sm <= 2048"],
    grid=lambda x, k: -(-x.size // (k.threads * 4 * k.each)),
    block=lambda k: k.threads,
    blocks_per_sm=lambda k: k.per_sm,
)
def by_words(x, bins, *, threads, copies, each):
    counts = cuda.shared.array((copies, 256), int32)
    thread = cuda.threadIdx.x
    copy, count = uint32(thread // 32 % copies), x.size // 4
    for i in range(thread, copies * 256, threads):
        counts[i // 256, i % 256] = 0
    cuda.syncthreads()
    words, read = x[: count * 4].view(np.uint32), cuda.local.array(each, uint32)
    for first in range(cuda.blockIdx.x * threads * each, count, cuda.gridDim.x * threads * each):
        if first + threads * each <= count:
            for i in range(each):
                read[i] = words[uint64(first + i * threads + thread)]
            for i in range(each):
                for byte in range(4):
                    cuda.atomic.add(counts, (copy, (read[i] >> uint32(8 * byte)) & uint32(255)), 1)
        else:
            for at in range(first + thread, count, threads):
                for byte in range(4):
                    cuda.atomic.add(counts, (copy, (words[at] >> uint32(8 * byte)) & uint32(255)), 1)
    if cuda.blockIdx.x == 0 and thread < x.size - count * 4:
        cuda.atomic.add(counts, (copy, uint32(x[count * 4 + thread])), 1)
    cuda.syncthreads()
    for i in range(thread, 256, threads):
        added = counts[0, i]
        for other in range(1, copies):
            added += counts[other, i]
        cuda.atomic.add(bins, i, added)


SHAPES = ("33554432:uint8", "256:int32")
