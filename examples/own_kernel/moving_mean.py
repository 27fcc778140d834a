"""The mean of n consecutive elements of each column. One thread for each result adds up n numbers; a thread that computes
several results below one another keeps the sum, and adds and subtracts one number for each.

Run this file to tune it on this machine's CPU in less than a minute. With arrays of torch or CuPy it runs on a GPU."""

import numpy as np
from numba import cuda, float32

import schedsearch


def means(x, n):
    sums = np.cumsum(np.vstack([0 * x[:1], x]), axis=0)
    return (sums[n:] - sums[:-n]) / n


@schedsearch.tunable(
    knobs={"each": (1, 4, 16, 64), "threads": (256, 128, 64)},
    grid=lambda y, k: (-(-y.shape[1] // k.threads), -(-y.shape[0] // k.each)),
    block=lambda k: k.threads,
    outputs=["y"],
    reference=means,
    reduction=300,  # additions for one result, which bound its rounding errors
)
def moving_mean(x, n, y, *, each):
    column, part = cuda.grid(2)
    if column < y.shape[1]:
        total = float32(0)
        for i in range(part * each, part * each + n - 1):
            total += x[i, column]
        for i in range(part * each, min(part * each + each, y.shape[0])):
            total += x[i + n - 1, column]
            y[i, column] = total / float32(n)
            total -= x[i, column]


SHAPES = ("1000x1000:float32", 100, "901x1000:float32")

if __name__ == "__main__":
    x = np.random.default_rng(0).random((1_000, 1_000), np.float32)
    y = np.empty((901, 1_000), np.float32)
    print(moving_mean.tune(x, 100, y))
    moving_mean(x, 100, y)
