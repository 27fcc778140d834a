"""The user's kernel whose record is in own_kernel.sql."""

from __future__ import annotations

from typing import Any

from numba import cuda

import schedsearch


def smoothed(x: Any, weight: Any) -> Any:
    y = x.copy()
    y[1:-1] = weight * x[1:-1] + (1 - weight) * (x[:-2] + x[2:]) / 2
    return y


@schedsearch.tunable(
    knobs={"threads": (64, 128), "each": (2, 4)},
    grid=lambda x, k: -(-x.size // (k.threads * k.each)),
    block=lambda k: k.threads,
    outputs=["y"],
    reference=smoothed,
    db="own.db",
)
def smooth(x: Any, weight: Any, y: Any, *, each: int) -> None:
    first = cuda.grid(1) * each
    for i in range(first, first + each):
        if 0 < i < x.size - 1:
            y[i] = weight * x[i] + (1 - weight) * (x[i - 1] + x[i + 1]) / 2
        elif i < x.size:
            y[i] = x[i]
