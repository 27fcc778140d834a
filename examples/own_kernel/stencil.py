"""A five-point stencil: the mean of a point's neighbours, one step of Jacobi's method; borders keep their values."""

import numpy as np
from numba import cuda

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
    for j in range(rows):
        i = y * rows + j
        if x < u.shape[1] and i < u.shape[0]:
            if 0 < x < u.shape[1] - 1 and 0 < i < u.shape[0] - 1:
                v[i, x] = np.float32(0.25) * (u[i, x - 1] + u[i, x + 1] + u[i - 1, x] + u[i + 1, x])
            else:
                v[i, x] = u[i, x]


SHAPES = ("8192x8192:float32", "8192x8192:float32")
