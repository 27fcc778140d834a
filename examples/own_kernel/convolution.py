"""Kernel Tuner's example "convolution": an image and a 15 x 15 filter, without a border. In the second formulation a block
copies its part of the image into shared memory, and a thread computes several rows of a column from registers."""

import numpy as np
from numba import cuda, float32, uint64

import schedsearch

SIZE = 15


def convolved(image, weights):
    spectrum = np.fft.rfft2(image) * np.conj(np.fft.rfft2(weights, image.shape))
    return np.fft.irfft2(spectrum, image.shape)[: 1 - SIZE, : 1 - SIZE]  # where no window wraps around


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


@convolution.alternative(
    knobs={"width": (32, 64, 128), "height": (4, 2, 8, 16), "each": (4, 2, 8, 16)},
    rules=["width * height <= 1024"],
    grid=lambda out, k: (-(-out.shape[1] // k.width), -(-out.shape[0] // (k.height * k.each))),
    block=lambda k: (k.width, k.height),
    shared=lambda k: 4 * ((k.width + SIZE - 1) * (k.height * k.each + SIZE - 1) + SIZE * SIZE),
)
def tiled(image, weights, out, *, width, height, each):
    memory = cuda.shared.array(0, float32)
    pitch, lines = width + SIZE - 1, height * each + SIZE - 1
    factors = pitch * lines  # where the filter begins
    left, top = cuda.blockIdx.x * width, cuda.blockIdx.y * height * each
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    for at in range(ty * width + tx, SIZE * SIZE, width * height):
        memory[factors + at] = weights[at // SIZE, at % SIZE]
    for i in range(ty, lines, height):
        for j in range(tx, pitch, width):
            if top + i < image.shape[0] and left + j < image.shape[1]:
                memory[uint64(i * pitch + j)] = image[uint64(top + i), uint64(left + j)]
    cuda.syncthreads()
    sums, column = cuda.local.array(each, float32), cuda.local.array(32, float32)
    for i in range(each):
        sums[i] = 0
    first = uint64(ty * each * pitch + tx)
    for s in range(SIZE):
        for i in range(each + SIZE - 1):
            column[i] = memory[first + uint64(i * pitch + s)]
        for r in range(SIZE):
            weight = memory[uint64(factors + r * SIZE + s)]
            for i in range(each):
                sums[i] += weight * column[i + r]
    for i in range(each):
        y, x = top + ty * each + i, left + tx
        if y < out.shape[0] and x < out.shape[1]:
            out[uint64(y), uint64(x)] = sums[i]


SHAPES = ("2062x2062:float32", "15x15:float32", "2048x2048:float32")
