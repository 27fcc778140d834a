"""The matrix product through shared memory of Numba's documentation ("CUDA: Matrix multiplication"), for any size."""

from numba import cuda, float32

import schedsearch


@schedsearch.tunable(
    knobs={"tile": (16, 8, 32), "unroll": (False, True)},
    grid=lambda c, k: (-(-c.shape[1] // k.tile), -(-c.shape[0] // k.tile)),
    block=lambda k: (k.tile, k.tile),
    outputs=["c"],
    reference=lambda a, b: a @ b,
    reduction=lambda a: a.shape[1],
    flops=lambda a, b: 2 * a.size * b.shape[1],
)
def matmul(a, b, c, *, tile, unroll):
    rows = cuda.shared.array((tile, tile), float32)
    columns = cuda.shared.array((tile, tile), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for first in range(0, a.shape[1], tile):
        rows[ty, tx] = 0
        columns[ty, tx] = 0
        if y < a.shape[0] and first + tx < a.shape[1]:
            rows[ty, tx] = a[y, first + tx]
        if x < b.shape[1] and first + ty < b.shape[0]:
            columns[ty, tx] = b[first + ty, x]
        cuda.syncthreads()
        if unroll:
            for i in range(0, tile, 4):
                total += rows[ty, i] * columns[i, tx] + rows[ty, i + 1] * columns[i + 1, tx]
                total += rows[ty, i + 2] * columns[i + 2, tx] + rows[ty, i + 3] * columns[i + 3, tx]
        else:
            for i in range(tile):
                total += rows[ty, i] * columns[i, tx]
        cuda.syncthreads()
    if y < c.shape[0] and x < c.shape[1]:
        c[y, x] = total


SHAPES = ("1024x1024:float32", "1024x1024:float32", "1024x1024:float32")
