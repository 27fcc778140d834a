"""The zero point of the weight in kernels that multiply the weights as they are: a correction of their sums.

    sum of (x - zx) * (w - zw)  =  sum of (x - zx) * w  -  zw * (sum of x - zx over the window)

The first sum is that of a weight without a zero point; see `zero_points`. The second one depends on the output pixel and on
the group of channels only. A step writes it to a workspace before the kernel runs. It reads x, so it runs with every call.
Padding counts as zx and adds nothing. All arithmetic wraps around at 32 bits, like the sums themselves.

A template asks `window_sums_problem` in `validate`, makes `WindowSums.of(workload)`, gives `Epilogue` its `params`, puts
`step()` before its own step, merges `workspaces`, and adds `terms(...)` to its sums before the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from schedsearch.launch import Float32, Grid, Param, Pointer, Scalar
from schedsearch.ops.conv2d import CONV2D
from schedsearch.template import KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload

SUMS = "x_window_sums"  # the workspace
SCALAR = "weight_zero_point"
THREADS = 128  # of a block of the step that writes it
LANES = 32
MAX_ENTRIES = 2**27  # threads of all lanes have numbers below 2**32


@dataclass(frozen=True)
class WindowSums:
    """The sums of x over each window, for `workload`: one for each output pixel (n, p, q) and group, in this order.

    Attributes:
        params: further parameters of the kernel's epilogue.
        workspaces: name -> bytes of the sums.
    """

    workload: Workload

    @classmethod
    def of(cls, workload: Workload) -> WindowSums | None:
        """The sums, or None if the weight has no zero point."""
        return cls(workload) if "weight" in workload.zero_points else None

    @property
    def entries(self) -> int:
        out_h, out_w = CONV2D.output_hw(self.workload.params)
        return int(self.workload.n * out_h * out_w * self.workload.groups)

    @property
    def params(self) -> tuple[Pointer, ...]:
        return (Pointer(SUMS),)

    @property
    def workspaces(self) -> dict[str, int]:
        return {SUMS: 4 * self.entries}

    @property
    def run(self) -> int:
        """Neighbouring channels that one load takes, 4 or 1; x is aligned to as many bytes."""
        w = self.workload
        return 4 if strides_of(w, "x")["C"].run(w.c // w.groups) % 4 == 0 else 1

    def step(self) -> KernelStep:
        """The step that writes the sums. Lanes of a warp share a sum if channels are neighbours in memory; otherwise
        pixels are, and each thread has a sum of its own."""
        zero: Param = Scalar("x_zero_point") if "x" in self.workload.zero_points else Float32(0.0)
        lanes = LANES if self.run > 1 else 1
        return KernelStep(
            _build_sums(self, lanes),
            (Pointer("x"), Pointer(SUMS), zero),
            Grid(-(-self.entries * lanes // THREADS)),
            THREADS,
            shaped_by=frozenset(),
        )

    def terms(self, epilogue: Epilogue) -> Callable[..., Any]:
        """`term(pixel, k, operands)`: what is added to the sum of output channel k of a pixel (i32).

        Pixels are numbered (n, p, q). `operands` are those of `epilogue`.
        """
        w, table, scalar = self.workload, epilogue.index(SUMS), epilogue.index(SCALAR)
        groups, outputs = w.groups, w.k // w.groups

        def term(pixel: Any, k: Any, operands: Any) -> Any:
            entry = types.uint64(types.uint64(pixel) * groups + types.uint32(k) // types.uint32(outputs))
            total = types.int32(ptx.load_global_u32(types.uint64(operands[table] + 4 * entry)))
            return types.int32(types.int32(-types.int32(operands[scalar])) * total)

        return term


def window_sums_problem(workload: Workload) -> str | None:
    """Why the sums of a weight with a zero point cannot be corrected (one sentence), or None."""
    sums = WindowSums.of(workload)
    if sums and sums.entries > MAX_ENTRIES:
        return f"the zero point of the weight needs {sums.entries} sums of x; allowed: up to {MAX_ENTRIES}"
    return None


def _build_sums(sums: WindowSums, lanes: int) -> Callable[..., None]:
    """The kernel (x, sums, zero point of x)."""
    w, run, entries = sums.workload, sums.run, sums.entries
    out_h, out_w = CONV2D.output_hw(w.params)
    groups, channels, height, width, kernel_h, kernel_w = w.groups, w.c // w.groups, w.h, w.w, w.r, w.s
    (stride_h, stride_w), (dilation_h, dilation_w), (top, left, *_) = w.stride, w.dilation, w.padding
    strides, runs = strides_of(w, "x"), channels // run
    of_image, of_row, of_column, of_channel = (strides[axis].offset() for axis in "NHWC")
    add, sum_lanes = ptx.add_bytes(w.dtype, run), ptx.warp_sum if lanes > 1 else _own

    def sum_windows(x: Any, sums: Any, x_zero_point: Any) -> None:
        thread = types.uint32(types.uint32(cuda.blockIdx.x) * THREADS + types.uint32(cuda.threadIdx.x))
        entry = types.uint32(thread // types.uint32(lanes))
        lane = types.int32(thread - entry * types.uint32(lanes))
        if entry < entries:
            pixel = types.uint32(entry // types.uint32(groups))
            first_channel = types.int32((entry - pixel * types.uint32(groups)) * types.uint32(channels))
            row = types.uint32(pixel // types.uint32(out_w))
            image = types.uint32(row // types.uint32(out_h))
            first_h = types.int32(types.int32(row - image * types.uint32(out_h)) * stride_h - top)
            first_w = types.int32(types.int32(pixel - row * types.uint32(out_w)) * stride_w - left)
            total, taps = types.int32(0), types.int32(0)
            for tap_h in range(types.int32(kernel_h)):
                h = types.int32(first_h + tap_h * dilation_h)
                for tap_w in range(types.int32(kernel_w)):
                    at_w = types.int32(first_w + tap_w * dilation_w)
                    if (h >= 0) & (h < height) & (at_w >= 0) & (at_w < width):
                        taps = types.int32(taps + 1)
                        at_pixel = of_image(image) + of_row(h) + of_column(at_w)
                        for number in range(types.int32(lane), types.int32(runs), types.int32(lanes)):
                            at = types.int64(at_pixel + of_channel(types.int32(first_channel + number * run)))
                            total = add(types.uint64(x + types.uint64(at)), total)
            total = types.int32(sum_lanes(total))
            if lane == 0:
                without = types.int32(total - types.int32(x_zero_point) * types.int32(taps * channels))
                ptx.store_global_u32(types.uint64(sums + 4 * types.uint64(entry)), types.uint32(without))

    return sum_windows


def _own(total: Any) -> Any:
    """The sum of a thread that shares it with no other."""
    return total
