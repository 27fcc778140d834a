"""The sum of an array in two launches: blocks write their sums into a workspace, and one block adds these up. In the second
formulation a launch clears the result, and blocks add their sums to it by atomics."""

import numpy as np
from numba import cuda, float32, uint64

import schedsearch


def sum_of_block(own, threads):
    """The sum over all threads of a block, right in its first thread."""
    shared = cuda.shared.array(32, float32)
    thread = cuda.threadIdx.x
    for step in (16, 8, 4, 2, 1):
        own += cuda.shfl_xor_sync(0xFFFFFFFF, own, step)
    if thread % 32 == 0:
        shared[thread // 32] = own
    cuda.syncthreads()
    if thread == 0:
        for i in range(1, threads // 32):
            own += shared[i]
    return own


def sum_of_thread(x, threads, each):
    first = cuda.blockIdx.x * threads * each + cuda.threadIdx.x
    own = float32(0)
    for i in range(each):
        at = first + i * threads
        if at < x.size:
            own += x[uint64(at)]  # Numba tests whether signed indices are negative
    return own


def block_sums(x, sums, *, threads, each):
    own = sum_of_block(sum_of_thread(x, threads, each), threads)
    if cuda.threadIdx.x == 0:
        sums[cuda.blockIdx.x] = own


def blocks(x, k):
    return -(-x.size // (k.threads * k.each))


@schedsearch.tunable(
    knobs={"threads": (256, 128, 512, 1024), "each": (16, 4, 64, 256), "last": (256, 1024)},
    before=[schedsearch.Launch(block_sums, grid=blocks, block=lambda k: k.threads)],
    workspaces={"sums": lambda x, k: (blocks(x, k), "float32")},
    grid=1,
    block=lambda k: k.last,
    outputs=["result"],
    reference=lambda x: np.sum(x, keepdims=True),
    reduction=lambda x: x.size,
)
def total(sums, result, *, last):
    own = float32(0)
    for i in range(cuda.threadIdx.x, sums.size, last):
        own += sums[i]
    own = sum_of_block(own, last)
    if cuda.threadIdx.x == 0:
        result[0] = own


def clear(result):
    result[0] = 0


@total.alternative(
    knobs={"threads": (256, 128, 512, 1024), "each": (16, 64, 256)},
    before=[schedsearch.Launch(clear, grid=1, block=1)],
    grid=blocks,
    block=lambda k: k.threads,
)
def by_atomics(x, result, *, threads, each):
    own = sum_of_block(sum_of_thread(x, threads, each), threads)
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(result, 0, own)


SHAPES = ("67108864:float32", "1:float32")
