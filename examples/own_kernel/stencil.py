"""A five-point stencil: the mean of a point's neighbours, one step of Jacobi's method; borders keep their values. The first
formulation computes one point per thread, the second several rows of a column."""

import numpy as np
from numba import cuda, float32, uint64

import schedsearch


def jacobi(u):
    v = u.copy()
    v[1:-1, 1:-1] = (u[1:-1, :-2] + u[1:-1, 2:] + u[:-2, 1:-1] + u[2:, 1:-1]) / 4
    return np.asarray(v)


@schedsearch.tunable(
    knobs={"width": (32, 64, 128, 256), "height": (8, 1, 2, 4)},
    rules=["width * height <= 1024"],
    grid=lambda u, k: (-(-u.shape[1] // k.width), -(-u.shape[0] // k.height)),
    block=lambda k: (k.width, k.height),
    outputs=["v"],
    reference=jacobi,
)
def stencil(u, v):
    x, y = cuda.grid(2)
    if 0 < x < u.shape[1] - 1 and 0 < y < u.shape[0] - 1:
        v[y, x] = float32(0.25) * (u[y, x - 1] + u[y, x + 1] + (u[y - 1, x] + u[y + 1, x]))
    elif x < u.shape[1] and y < u.shape[0]:
        v[y, x] = u[y, x]


@stencil.alternative(
    knobs={"width": (32, 64, 128, 256), "height": (1, 2, 4, 8), "rows": (2, 4, 8, 16)},
    rules=["width * height <= 1024"],
    grid=lambda u, k: (-(-u.shape[1] // k.width), -(-u.shape[0] // (k.height * k.rows))),
    block=lambda k: (k.width, k.height),
)
def columns(u, v, *, rows):
    x, y = cuda.grid(2)
    column, sides = cuda.local.array(18, float32), cuda.local.array(16, float32)  # for up to 16 rows
    top, height, width = y * rows, u.shape[0], u.shape[1]
    if 0 < x < width - 1 and 0 < top < height - rows:
        at, first = uint64(x), uint64(top)  # Numba tests whether signed indices are negative
        for j in range(rows + 2):  # all loads before the first store, so that they are under way together
            column[j] = u[first + uint64(j) - uint64(1), at]
        for j in range(rows):
            row = first + uint64(j)
            sides[j] = u[row, at - uint64(1)] + u[row, at + uint64(1)]
        for j in range(rows):
            v[first + uint64(j), at] = float32(0.25) * (sides[j] + (column[j] + column[j + 2]))
    elif x < width:
        for i in range(top, min(top + rows, height)):
            if 0 < x < width - 1 and 0 < i < height - 1:
                v[i, x] = float32(0.25) * (u[i, x - 1] + u[i, x + 1] + (u[i - 1, x] + u[i + 1, x]))
            else:
                v[i, x] = u[i, x]


SHAPES = ("4096x8192:float32", "4096x8192:float32")
