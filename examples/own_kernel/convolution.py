"""Kernel Tuner's example "convolution": an image and a 15 x 15 filter, without a border."""

import numpy as np
from numba import cuda, float32

import schedsearch

SIZE = 15


def convolved(image, weights):
    windows = np.lib.stride_tricks.sliding_window_view(image, (SIZE, SIZE))
    return np.einsum("ijkl,kl->ij", windows, weights, optimize=True)


@schedsearch.tunable(
    knobs={"width": (16, 32, 64, 128), "height": (16, 1, 2, 4, 8), "each": (1, 2, 4, 8)},
    rules=["width * height <= 1024"],
    grid=lambda out, k: (-(-out.shape[1] // (k.width * k.each)), -(-out.shape[0] // k.height)),
    block=lambda k: (k.width, k.height),
    outputs=["out"],
    reference=convolved,
    reduction=SIZE * SIZE,
    flops=lambda out: 2 * out.size * SIZE * SIZE,
)
def convolution(image, weights, out, *, width, height, each):
    x = cuda.blockIdx.x * width * each + cuda.threadIdx.x
    y = cuda.blockIdx.y * height + cuda.threadIdx.y
    if y < out.shape[0]:
        sums = cuda.local.array(each, float32)
        for j in range(each):
            sums[j] = 0
        for r in range(SIZE):
            for s in range(SIZE):
                weight = weights[r, s]
                for j in range(each):
                    if x + j * width < out.shape[1]:
                        sums[j] += weight * image[y + r, x + j * width + s]
        for j in range(each):
            if x + j * width < out.shape[1]:
                out[y, x + j * width] = sums[j]


SHAPES = ("4110x4110:float32", "15x15:float32", "4096x4096:float32")
