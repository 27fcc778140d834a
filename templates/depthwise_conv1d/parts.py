"""Device code that the kernels of depthwise_conv1d share: single elements, silu and its derivative, and the sums of parts.

Sizes reach these kernels at run time, so that one machine code serves every length, batch and number of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.workload import Workload

REDUCE_THREADS = 256
_COLUMNS = 32  # sums of a block of the last kernel, which its threads share
_MINUS_LOG2_E = -1.4426950408889634


def small(workload: Workload[DepthwiseConv1dParams]) -> Workload[DepthwiseConv1dParams]:
    """A workload whose kernels have the same machine code: vectors of channels as wide, but few of them."""
    p = workload.params
    vector = math.gcd(p.c, 8)
    return workload.replace(n=2, c=41 * vector, t=p.reach + 150)


def reader(dtype: str) -> Callable[..., Any]:
    """`read(words, numbers, array, index, valid)`: one element as float32; 0 if not `valid`. The two are local arrays of
    one entry."""
    load, unpack, nbytes = vectors.load(dtype, 1), vectors.unpack(dtype, 1), dtype_of(dtype).nbytes

    def read(words: Any, numbers: Any, array: Any, index: Any, valid: Any) -> Any:
        load(words, 0, u64(array + u64(i64(index) * nbytes)), valid)
        unpack(words, 0, numbers, 0)
        return numbers[0]

    return read


def writer(dtype: str) -> Callable[..., None]:
    """`write(words, numbers, array, index, value)`: rounds one float32."""
    pack, store, nbytes = vectors.pack(dtype, 1), vectors.store(dtype, 1), dtype_of(dtype).nbytes

    def write(words: Any, numbers: Any, array: Any, index: Any, value: Any) -> None:
        numbers[0] = value
        pack(numbers, 0, words, 0)
        store(words, 0, u64(array + u64(i64(index) * nbytes)))

    return write


def gate() -> Callable[[Any], Any]:
    """`gate(z)`: 1 / (1 + exp(-z)), within some units in the last place."""
    power, inverse = vectors.power_of_two, vectors.reciprocal
    factor = f32(_MINUS_LOG2_E)

    def sigmoid(z: Any) -> Any:
        return inverse(f32(f32(1) + power(f32(z * factor))))

    return sigmoid


def divided() -> Callable[[Any, Any], Any]:
    """`split(a, b)`: quotient and remainder of numbers that are not negative. Numba's own operators call a division of 64
    bits, and a kernel with calls is slower everywhere: it moves an access's descriptor into place each time."""

    def split(a: Any, b: Any) -> Any:
        quotient = i32(u32(a) // u32(b))
        return quotient, i32(a - quotient * b)

    return split


def reduce_kernel(taps: int, weight_dtype: str, has_bias: bool) -> Callable[..., None]:
    """The kernel (parts, dw, db, count, channels) that adds up the parts [count][taps + 1][channels] of both gradients,
    in one order."""
    read, write, rows, split = reader("float32"), writer(weight_dtype), REDUCE_THREADS // _COLUMNS, divided()

    def reduce(parts, dw, db, count, channels) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(REDUCE_THREADS, f32)
        word = cuda.local.array(1, u32)
        number = cuda.local.array(1, f32)
        thread = i32(cuda.threadIdx.x)
        row, column = split(thread, _COLUMNS)
        place = i32(i32(cuda.blockIdx.x) * _COLUMNS + column)
        sums = i32((taps + 1) * channels)
        total = f32(0)
        for part in range(row, count, rows):
            total = f32(total + read(word, number, parts, i64(i64(part) * sums + place), place < sums))
        partial[thread] = total
        cuda.syncthreads()
        if (row == 0) & (place < sums):
            for other in range(1, rows):
                total = f32(total + partial[other * _COLUMNS + column])
            tap, channel = split(place, channels)
            if tap < taps:
                write(word, number, dw, i64(i64(channel) * taps + tap), total)
            elif has_bias:
                write(word, number, db, channel, total)

    return reduce


def reduce_blocks(taps: int, channels: int) -> int:
    """Blocks of the last kernel."""
    return -(-(taps + 1) * channels // _COLUMNS)
