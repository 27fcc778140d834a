"""A five-point stencil: the mean of a point's neighbours, one step of Jacobi's method; borders keep their values."""

import numpy as np
from numba import cuda, float32

import schedsearch


def jacobi(u):
    v = u.copy()
    v[1:-1, 1:-1] = (u[1:-1, :-2] + u[1:-1, 2:] + u[:-2, 1:-1] + u[2:, 1:-1]) / 4
    return np.asarray(v)


@schedsearch.tunable(
    knobs={"width": (32, 64, 128, 256), "height": (8, 1, 2, 4), "rows": (1, 2, 4, 8)},
    rules=["width * height <= 1024"],
    grid=lambda u, k: (-(-u.shape[1] // k.width), -(-u.shape[0] // (k.height * k.rows))),
    block=lambda k: (k.width, k.height),
    outputs=["v"],
    reference=jacobi,
)
def stencil(u, v, *, rows):
    x, y = cuda.grid(2)
    column, sides = cuda.local.array(10, float32), cuda.local.array(8, float32)  # for up to 8 rows
    top, height, width = y * rows, u.shape[0], u.shape[1]
    if 0 < x < width - 1 and 0 < top < height - rows:
        for j in range(rows + 2):  # all loads before the first store, so that they are under way together
            column[j] = u[top + j - 1, x]
        for j in range(rows):
            sides[j] = u[top + j, x - 1] + u[top + j, x + 1]
        for j in range(rows):
            v[top + j, x] = float32(0.25) * (sides[j] + (column[j] + column[j + 2]))
    elif x < width:
        for i in range(top, min(top + rows, height)):
            if 0 < x < width - 1 and 0 < i < height - 1:
                v[i, x] = float32(0.25) * (u[i, x - 1] + u[i, x + 1] + (u[i - 1, x] + u[i + 1, x]))
            else:
                v[i, x] = u[i, x]


SHAPES = ("8192x8192:float32", "8192x8192:float32")
