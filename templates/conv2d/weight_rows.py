"""Weights as rows in the order of the reduction: a constant step that templates put before their own.

    rows[k] = for each tap: the input channels of all merged groups, zeros up to `tap` elements; then zeros up to 16 bytes

Channels of other groups than that of k are zero, so merged groups are one convolution with block-diagonal weights. The
weights are constant: a program that prepares its kernel runs the step once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.launch import Grid, Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.template import KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import i32, u32, u64
from schedsearch.workload import Workload

ROWS = "weight_rows"  # the workspace
CHUNK_BYTES = 16
COPY_BYTES = 4  # that a thread copies at most
THREADS = 256


@dataclass(frozen=True)
class WeightRows:
    """The rows of a workload's weights, from any layout with at most one block for each axis.

        >>> rgb = Workload("conv2d", dict(n=1, h=9, w=9, c=3, k=8, r=3, s=3, dtype="int8", layout="NCHW"))
        >>> rows = WeightRows(rgb, multiple=4)
        >>> rows.tap, rows.row, rows.nbytes
        (4, 48, 384)

    Attributes:
        workload: the convolution.
        merged: neighbouring groups that become one; it divides the groups.
        multiple: a tap has a multiple of this number of elements, a power of two.
    """

    workload: Workload[Conv2dParams]
    merged: int = 1
    multiple: int = 1

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.workload.params.weight_dtype).nbytes

    @property
    def group_channels(self) -> int:
        """Input channels of a group of the workload."""
        return int(self.workload.params.c // self.workload.params.groups)

    @property
    def tap(self) -> int:
        """Elements of a tap."""
        return -(-self.merged * self.group_channels // self.multiple) * self.multiple

    @property
    def row(self) -> int:
        """Elements from one row to the next: whole chunks of 16 bytes."""
        chunk = CHUNK_BYTES // self.element_bytes
        return int(-(-self.workload.params.r * self.workload.params.s * self.tap // chunk) * chunk)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return int(self.workload.params.k) * self.row * self.element_bytes

    @property
    def piece(self) -> int:
        """Elements that a thread copies: neighbours in memory, of one tap and one group."""
        run = strides_of(self.workload, "weight")["I"].run(self.group_channels)
        return math.gcd(run, self.group_channels, COPY_BYTES // self.element_bytes)

    @property
    def alignment(self) -> int:
        """Bytes to which the weights must be aligned."""
        return self.piece * self.element_bytes

    def step(self) -> KernelStep:
        """The step that fills the workspace."""
        grid = Grid(-(-self.nbytes // (self.alignment * THREADS)))
        arguments = (Pointer("weight"), Pointer(ROWS))
        return KernelStep(_build_copy(self), arguments, grid, THREADS, constant=True, shaped_by=frozenset())


def _build_copy(rows: WeightRows) -> Callable[..., None]:
    """The kernel (weight, rows): a thread for each piece."""
    w, piece_bytes, row_pieces = rows.workload, rows.alignment, rows.row // rows.piece
    pieces = rows.nbytes // piece_bytes
    count = u64 if pieces + THREADS >= 2**32 else u32
    piece, tap_elements, taps, kernel_w, merged = rows.piece, rows.tap, w.params.r * w.params.s, w.params.s, rows.merged
    group_k, group_c, element_bytes = w.params.k // w.params.groups, rows.group_channels, rows.element_bytes
    along = strides_of(w, "weight")
    of_output, of_input, of_row, of_column = (along[axis].offset() for axis in "OIHW")
    copy = ptx.copy_global(piece_bytes)

    def copy_piece(weight: Any, to: Any) -> None:
        number = count(count(cuda.blockIdx.x) * count(THREADS) + count(cuda.threadIdx.x))
        if number < count(pieces):
            k = u32(number // count(row_pieces))
            place = u32(u32(number - count(k) * count(row_pieces)) * piece)
            tap = u32(place // u32(tap_elements))
            channel = u32(place - tap * tap_elements)  # of the merged groups
            tap_row = u32(tap // u32(kernel_w))
            group = u32(u32(k // u32(group_k)) % u32(merged))  # of the merged ones
            inside = (tap < u32(taps)) & (u32(channel // u32(group_c)) == group)
            within = u32(channel % u32(group_c))
            offset = of_output(k) + of_input(within) + of_row(tap_row) + of_column(tap - tap_row * kernel_w)
            copy(
                u64(to + u64(number) * u64(piece_bytes)),
                u64(weight + u64(offset * element_bytes)),
                i32(inside),
            )

    return copy_piece
