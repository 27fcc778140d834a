"""A step that copies an array several times, one copy after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.launch import Grid, Pointer
from schedsearch.template import KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, u64

THREADS = 256
MOST_BYTES = 4  # that a thread copies at once


def repeat_step(source: str, to: str, nbytes: int, times: int) -> tuple[KernelStep, int]:
    """The launch that writes `times` copies of buffer `source`, which has `nbytes`, and the alignment that it needs."""
    piece = math.gcd(nbytes, MOST_BYTES)
    grid = Grid(-(-nbytes // (piece * THREADS)))
    function = _copy(nbytes // piece, piece, times)
    return KernelStep(function, (Pointer(source), Pointer(to)), grid, THREADS, shaped_by=frozenset()), piece


def _copy(pieces: int, piece_bytes: int, times: int) -> Callable[..., None]:
    """The kernel (source, to): a thread for each piece writes all of its copies."""
    copy = ptx.copy_global(piece_bytes)

    def repeat(source: Any, to: Any) -> None:
        number = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        if number < u64(pieces):
            address = u64(source + number * u64(piece_bytes))
            for time in range(i32(times)):
                place = u64(time) * u64(pieces) + number
                copy(u64(to + place * u64(piece_bytes)), address, i32(1))

    return repeat
