"""Small kernels for the CPU, which tests of its backend and device run."""

from __future__ import annotations

from numba import types

from schedsearch.backend.cpu_ops import as_array
from schedsearch.device.detect import detect
from schedsearch.launch import Grid, Pointer, Scalar
from schedsearch.template import KernelSource, KernelStep

N = 1000
F32 = types.float32
TARGET = detect("cpu")


def add_scaled(x, y, factor, start, stop):
    source, target = as_array(x, (N,), F32), as_array(y, (N,), F32)
    for i in range(start, stop):
        target[i] = source[i] * factor


def reverse(y, z, start, stop):
    """Reads the values that other threads wrote in the previous step."""
    source, target = as_array(y, (N,), F32), as_array(z, (N,), F32)
    for i in range(start, stop):
        target[i] = source[N - 1 - i]


def two_steps(threads: int) -> KernelSource:
    return KernelSource(
        "cpu",
        "native",
        (
            KernelStep(add_scaled, (Pointer("x"), Pointer("between"), Scalar("factor")), Grid(N), threads),
            KernelStep(reverse, (Pointer("between"), Pointer("y")), Grid(N), threads),
        ),
        workspaces={"between": 4 * N},
        alignments={"x": 4, "y": 64},
    )


Y = (Pointer("y"),)


def simple(function, params=Y, items=1, threads=1) -> KernelSource:
    return KernelSource("cpu", "native", (KernelStep(function, params, Grid(items), threads),))
