"""Which points lie inside a polygon, as in Kernel Tuner's example "pnpoly": it counts the edges that a ray crosses."""

import numpy as np
from numba import cuda

import schedsearch


def inside(points, corners):
    x, y = points
    found = np.zeros(x.shape, bool)
    for (x0, y0), (x1, y1) in zip(np.roll(corners, 1, axis=1).T, corners.T):
        crosses = (y0 > y) != (y1 > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            found ^= crosses & (x < (x0 - x1) * (y - y1) / (y0 - y1) + x1)
    return found.astype(np.int64)


@schedsearch.tunable(
    knobs={"threads": (256, 64, 128, 512, 1024), "each": (1, 2, 4, 8), "branch": (True, False)},
    grid=lambda points, k: -(-points.shape[1] // (k.threads * k.each)),
    block=lambda k: k.threads,
    outputs=["found"],
    reference=inside,
    flops=lambda points, corners: 7 * points.shape[1] * corners.shape[1],
)
def pnpoly(points, corners, found, *, threads, each, branch):
    count = corners.shape[1]
    for i in range(each):
        at = cuda.blockIdx.x * threads * each + i * threads + cuda.threadIdx.x
        if at < points.shape[1]:
            x, y = points[0, at], points[1, at]
            crossed = 0
            for corner in range(count):
                before = corner - 1 if corner > 0 else count - 1
                x0, y0, x1, y1 = corners[0, before], corners[1, before], corners[0, corner], corners[1, corner]
                if branch:
                    if (y0 > y) != (y1 > y) and x < (x0 - x1) * (y - y1) / (y0 - y1) + x1:
                        crossed ^= 1
                else:
                    crossed ^= ((y0 > y) != (y1 > y)) & (x < (x0 - x1) * (y - y1) / (y0 - y1) + x1)
            found[at] = crossed


SHAPES = ("2x1000000:float32", "2x150:float32", "1000000:int32")
