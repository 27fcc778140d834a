"""The step of conv2d_mma that repacks weights: any layout becomes rows of whole chunks in the order of the reduction.

A row has the weights of one output channel, tap by tap, with the input channels of a tap next to each other, and zeros up
to a whole chunk. If groups are merged, the row has the channels of all of them, with zeros for the other groups. The weights
are constant, so a program that prepares its kernel runs this step once.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, types

from schedsearch.launch import Grid, Pointer
from schedsearch.ops.layout import Layout
from schedsearch.template import KernelStep
from schedsearch.templates.conv2d.mma_sizes import Gemm, ceil_div
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import offsets_along
from schedsearch.workload import Workload

ROWS = "weight_rows"  # the workspace
THREADS = 256


def rows_bytes(workload: Workload, gemm: Gemm) -> int:
    """Bytes of the workspace."""
    return int(workload.k) * gemm.row * gemm.mma.element_bytes


def repack_step(workload: Workload, gemm: Gemm) -> KernelStep:
    """The step that fills the workspace, one element per thread."""
    grid = Grid(int(ceil_div(workload.k * gemm.row, THREADS)))
    arguments = (Pointer("weight"), Pointer(ROWS))
    return KernelStep(repack(workload, gemm), arguments, grid, THREADS, constant=True)


def repack(workload: Workload, gemm: Gemm) -> Callable[..., None]:
    """The kernel: (weight, rows)."""
    w, elements, row_elements = workload, workload.k * gemm.row, gemm.row
    count = types.int64 if elements + THREADS >= 2**31 else types.uint32
    kernel_w, kk, c, merged = w.s, gemm.kk, gemm.c, gemm.merged
    group_k, group_c, element_bytes = w.k // w.groups, w.c // w.groups, gemm.mma.element_bytes
    sizes = {"O": w.k, "I": group_c, "H": w.r, "W": w.s}
    along = offsets_along(Layout.parse(w.weight_layout), sizes)
    of_output, of_input, of_row, of_column = (along[axis] for axis in "OIHW")
    copy = ptx.copy_global(element_bytes)

    def kernel(weight, rows) -> None:  # type: ignore[no-untyped-def]
        number = count(count(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)
        if number < elements:
            k = types.uint32(number // row_elements)
            place = types.uint32(number - count(k) * row_elements)
            tap = types.uint32(place // c)
            channel = types.uint32(place - tap * c)  # of the merged groups
            tap_row = types.uint32(tap // kernel_w)
            group = types.uint32(k // group_k % merged)  # of the merged ones
            inside = (place < kk) & (channel // group_c == group)
            offset = of_output(k) + of_input(channel % group_c) + of_row(tap_row) + of_column(tap - tap_row * kernel_w)
            copy(
                types.uint64(rows + types.uint64(number) * element_bytes),
                types.uint64(weight + types.uint64(offset * element_bytes)),
                types.int32(inside),
            )

    return kernel
