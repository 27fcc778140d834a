"""The matrix product through shared memory of Numba's documentation ("CUDA: Matrix multiplication"), for any size. In the
second formulation a thread computes several rows and columns, whose sums stay in registers."""

from numba import cuda, float32, uint64

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


@matmul.alternative(
    knobs={"height": (64, 32, 128), "width": (64, 32, 128), "depth": (16, 8, 32), "rows": (4, 8, 2), "columns": (4, 8, 2)},
    rules=["64 <= (height // rows) * (width // columns) <= 256"],
    grid=lambda c, k: (-(-c.shape[1] // k.width), -(-c.shape[0] // k.height)),
    block=lambda k: (k.width // k.columns, k.height // k.rows),
)
def in_registers(a, b, c, *, height, width, depth, rows, columns):
    left, right = cuda.shared.array((depth, height), float32), cuda.shared.array((depth, width), float32)
    sums, row, column = cuda.local.array((8, 8), float32), cuda.local.array(8, float32), cuda.local.array(8, float32)
    across, down = width // columns, height // rows  # threads of the block
    tx, ty = uint64(cuda.threadIdx.x), uint64(cuda.threadIdx.y)
    thread, threads = cuda.threadIdx.y * across + cuda.threadIdx.x, across * down
    top, start = cuda.blockIdx.y * height, cuda.blockIdx.x * width
    for i in range(rows):
        for j in range(columns):
            sums[i, j] = 0
    for first in range(0, a.shape[1], depth):
        for at in range(thread, depth * height, threads):
            i, k = top + at // depth, first + at % depth
            inside = i < a.shape[0] and k < a.shape[1]
            left[uint64(at % depth), uint64(at // depth)] = a[uint64(i), uint64(k)] if inside else float32(0)
        for at in range(thread, depth * width, threads):
            k, j = first + at // width, start + at % width
            inside = k < b.shape[0] and j < b.shape[1]
            right[uint64(at // width), uint64(at % width)] = b[uint64(k), uint64(j)] if inside else float32(0)
        cuda.syncthreads()
        for k in range(depth):
            for i in range(rows):
                row[i] = left[uint64(k), ty + uint64(i * down)]
            for j in range(columns):
                column[j] = right[uint64(k), tx + uint64(j * across)]
            for i in range(rows):
                for j in range(columns):
                    sums[i, j] += row[i] * column[j]
        cuda.syncthreads()
    for i in range(rows):
        for j in range(columns):
            y, x = top + cuda.threadIdx.y + i * down, start + cuda.threadIdx.x + j * across
            if y < c.shape[0] and x < c.shape[1]:
                c[uint64(y), uint64(x)] = sums[i, j]


SHAPES = ("1024x1024:float32", "1024x1024:float32", "1024x1024:float32")
