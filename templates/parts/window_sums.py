"""The zero point of the weight in kernels that multiply the weights as they are: a correction of their sums.

    sum of (x - zx) * (w - zw)  =  sum of (x - zx) * w  -  zw * (sum of x - zx over the window)

The first sum is that of a weight without a zero point; see `zero_points`. The second one depends on the output pixel and on
the group of channels only. A step writes it to a workspace before the kernel runs. It reads x, so it runs with every call.
Padding counts as zx and adds nothing. All arithmetic wraps around at 32 bits, like the sums themselves.

A template

1. asks `window_sums_problem` in `validate`, and makes `WindowSums.of(workload)`, None if the weight has no zero point;
2. gives `Epilogue` its `params`, and puts the step before its own by `before(source)`;
3. captures `correction(...)`, which corrects a thread's fragment of a wgmma tile before `Epilogue.fragments`; or
   `terms(...)`, which gives what to add to single sums before `Epilogue.pair` or `single`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda

from schedsearch.backend.ops import device_op
from schedsearch.launch import Float32, Grid, Param, Pointer, Scalar
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.workload import Workload

SUMS = "x_window_sums"  # the workspace
SCALAR = "weight_zero_point"
THREADS = 128  # of a block of the step that writes it
LANES = 32
MAX_ENTRIES = 2**27  # threads of all lanes have numbers below 2**32
_BRANCH_OCTETS = 4  # octets between two branches, whose loads are in flight at once


@dataclass(frozen=True)
class WindowSums:
    """The sums of x over each window, for `workload`: one for each output pixel (n, p, q) and group, in this order.

    Attributes:
        params: further parameters of the kernel's epilogue.
        workspaces: name -> bytes of the sums.
    """

    workload: Workload[Conv2dParams]

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> WindowSums | None:
        """The sums, or None if the weight has no zero point."""
        return cls(workload) if "weight" in workload.params.zero_points else None

    @property
    def entries(self) -> int:
        out_h, out_w = CONV2D.output_hw(self.workload.params)
        return int(self.workload.params.n * out_h * out_w * self.workload.params.groups)

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
        return 4 if strides_of(w, "x")["C"].run(w.params.c // w.params.groups) % 4 == 0 else 1

    def step(self) -> KernelStep:
        """The step that writes the sums. Lanes of a warp share a sum if channels are neighbours in memory; otherwise
        pixels are, and each thread has a sum of its own."""
        zero: Param = Scalar("x_zero_point") if "x" in self.workload.params.zero_points else Float32(0.0)
        lanes = LANES if self.run > 1 else 1
        return KernelStep(
            _build_sums(self, lanes),
            (Pointer("x"), Pointer(SUMS), zero),
            Grid(-(-self.entries * lanes // THREADS)),
            THREADS,
            shaped_by=frozenset(),
        )

    def before(self, source: KernelSource) -> KernelSource:
        """The source, preceded by the step that writes the sums. The step reads the argument x of `workload`."""
        alignments = {**source.alignments, "x": max(source.alignments.get("x", 1), self.run)}
        workspaces = {**source.workspaces, **self.workspaces}
        return replace(source, steps=(self.step(), *source.steps), workspaces=workspaces, alignments=alignments)

    def correction(self, epilogue: Epilogue, octets: int, interleaved: bool, one_group: bool) -> Callable[..., None]:
        """`correct(values, columns, rows, pixel, k, operands)`: corrects a thread's fragment of a wgmma tile in place.

        values, columns and k are as in `Epilogue.fragments`, and `operands` are those of `epilogue`. `pixel` (i32) is the
        output pixel of the fragment's first row, numbered (n, p, q); the pixel of the other row is `pixel` + 8. `rows` (i32)
        counts the rows from `pixel` on that lie inside of y; it may be negative. Sums of other rows stay as they are.

        Args:
            octets, interleaved: as in `Epilogue.fragments`.
            one_group: all columns of a tile are output channels of one group.
        """
        w, table, scalar = self.workload, epilogue.index(SUMS), epilogue.index(SCALAR)
        groups, outputs = w.params.groups, w.params.k // w.params.groups
        correct_tile, correct_each = correct_rows(octets, groups), correct_channels(octets, interleaved, groups, outputs)

        def correct_pixels(values: Any, columns: Any, rows: Any, pixel: Any, k: Any, operands: Any) -> None:
            correct_tile(values, columns, rows, pixel, operands[table], operands[scalar])

        def correct_group(values: Any, columns: Any, rows: Any, pixel: Any, k: Any, operands: Any) -> None:
            entry = i32(pixel * groups + i32(u32(k) // u32(outputs)))
            correct_tile(values, columns, rows, entry, operands[table], operands[scalar])

        def correct_groups(values: Any, columns: Any, rows: Any, pixel: Any, k: Any, operands: Any) -> None:
            entry = i32(pixel * groups)
            correct_each(values, columns, rows, entry, k, operands[table], operands[scalar])

        if not one_group:
            return correct_groups
        return correct_pixels if groups == 1 else correct_group

    def terms(self, epilogue: Epilogue) -> Callable[..., Any]:
        """`term(pixel, k, operands)`: what is added to the sum of output channel k of a pixel (i32).

        Pixels are numbered (n, p, q). `operands` are those of `epilogue`.
        """
        w, table, scalar = self.workload, epilogue.index(SUMS), epilogue.index(SCALAR)
        groups, outputs = w.params.groups, w.params.k // w.params.groups

        def term(pixel: Any, k: Any, operands: Any) -> Any:
            entry = u64(u64(pixel) * groups + u32(k) // u32(outputs))
            total = i32(ptx.load_global_u32(u64(operands[table] + 4 * entry)))
            return i32(i32(-i32(operands[scalar])) * total)

        return term


def no_window_correction(values: Any, columns: Any, rows: Any, pixel: Any, k: Any, operands: Any) -> None:
    """In the place of `WindowSums.correction` if the weight has no zero point."""


def window_sums_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why the sums of a weight with a zero point cannot be corrected (one sentence), or None."""
    sums = WindowSums.of(workload)
    if sums and sums.entries > MAX_ENTRIES:
        return f"the zero point of the weight needs {sums.entries} sums of x; allowed: up to {MAX_ENTRIES}"
    return None


def _build_sums(sums: WindowSums, lanes: int) -> Callable[..., None]:
    """The kernel (x, sums, zero point of x)."""
    w, run, entries = sums.workload.params, sums.run, sums.entries
    out_h, out_w = CONV2D.output_hw(w)
    groups, channels, height, width, kernel_h, kernel_w = w.groups, w.c // w.groups, w.h, w.w, w.r, w.s
    (stride_h, stride_w), (dilation_h, dilation_w), (top, left, *_) = w.stride, w.dilation, w.padding
    strides, runs = strides_of(sums.workload, "x"), channels // run
    of_image, of_row, of_column, of_channel = (strides[axis].offset() for axis in "NHWC")
    add, sum_lanes = ptx.add_bytes(w.dtype, run), ptx.warp_sum if lanes > 1 else _own

    def sum_windows(x: Any, sums: Any, x_zero_point: Any) -> None:
        thread = u32(u32(cuda.blockIdx.x) * THREADS + u32(cuda.threadIdx.x))
        entry = u32(thread // u32(lanes))
        lane = i32(thread - entry * u32(lanes))
        if entry < entries:
            pixel = u32(entry // u32(groups))
            first_channel = i32((entry - pixel * u32(groups)) * u32(channels))
            row = u32(pixel // u32(out_w))
            image = u32(row // u32(out_h))
            first_h = i32(i32(row - image * u32(out_h)) * stride_h - top)
            first_w = i32(i32(pixel - row * u32(out_w)) * stride_w - left)
            total, taps = i32(0), i32(0)
            for tap_h in range(i32(kernel_h)):
                h = i32(first_h + tap_h * dilation_h)
                for tap_w in range(i32(kernel_w)):
                    at_w = i32(first_w + tap_w * dilation_w)
                    if (h >= 0) & (h < height) & (at_w >= 0) & (at_w < width):
                        taps = i32(taps + 1)
                        at_pixel = of_image(image) + of_row(h) + of_column(at_w)
                        for number in range(i32(lane), i32(runs), i32(lanes)):
                            at = i64(at_pixel + of_channel(i32(first_channel + number * run)))
                            total = add(u64(x + u64(at)), total)
            total = i32(sum_lanes(total))
            if lane == 0:
                without = i32(total - i32(x_zero_point) * i32(taps * channels))
                ptx.store_global_u32(u64(sums + 4 * u64(entry)), u32(without))

    return sum_windows


def _own(total: Any) -> Any:
    """The sum of a thread that shares it with no other."""
    return total


# --- The correction of fragments --------------------------------------------------------------------------------------
_INS = {"table": "u64", "zero_point": "f32"}


@functools.cache
def correct_rows(octets: int, groups: int) -> Callable[..., Any]:
    """(accumulators[4 * octets], columns, rows, entry, table, zero_point), for rows r and r + 8 of a fragment.

    `entry` (i32) is that of row r in the table. All channels of a row share it, so the operation loads two numbers.
    """
    lines = [
        "{ .reg .pred column, inside, inside8; .reg .b32 factor, s0, s1; .reg .b64 at;",
        "cvt.rni.s32.f32 factor, $zero_point; mad.wide.s32 at, $entry, 4, $table; mov.b32 s0, 0; mov.b32 s1, 0;",
        *_inside("inside", "inside8"),
        "setp.gt.s32 column, $columns, 0; and.pred inside, column, inside; and.pred inside8, column, inside8;",
        f"@inside ld.global.nc.b32 s0, [at]; @inside8 ld.global.nc.b32 s1, [at+{_row_8_bytes(groups)}];",
        "mul.lo.s32 s0, factor, s0; mul.lo.s32 s1, factor, s1;",
        *(f"sub.s32 $acc[{i}], $acc[{i}], s{i // 2 % 2};" for i in range(4 * octets)),
    ]
    return device_op(
        "correct_rows",
        "\n".join([*lines, "}"]),
        inout={"acc": ("i32", 4 * octets)},
        ins={"columns": "i32", "rows": "i32", "entry": "i32", **_INS},
    )


@functools.cache
def correct_channels(octets: int, interleaved: bool, groups: int, outputs: int) -> Callable[..., Any]:
    """(accumulators[4 * octets], columns, rows, entry, k, table, zero_point): the same with several groups in a row.

    `entry` is that of group 0. A group has `outputs` channels; neighbours that a thread holds share a load if they are of
    one group.
    """
    count, step = (4, 2) if interleaved else (2, 1)
    loads = 1 if outputs % count == 0 else count  # k is a multiple of count
    lines = [
        f"{{ .reg .pred column, inside, inside8, q; .reg .b32 factor, group, s<{2 * loads}>; .reg .b64 at, first;",
        "cvt.rni.s32.f32 factor, $zero_point; mad.wide.s32 first, $entry, 4, $table;",
        *_inside("inside", "inside8"),
    ]
    for octet in range(0, octets // step * step, step):
        lines.append(f"setp.gt.s32 column, $columns, {8 * octet};")
        if octet % _BRANCH_OCTETS == 0:
            lines.append("@!column bra done;")
        for load in range(loads):
            lines.append(f"add.s32 group, $k, {8 * octet + load}; div.u32 group, group, {outputs};")
            lines.append("mad.wide.s32 at, group, 4, first;")
            for row, inside in enumerate(("inside", "inside8")):
                total, offset = f"s{row * loads + load}", row * _row_8_bytes(groups)
                lines.append(f"mov.b32 {total}, 0; and.pred q, column, {inside};")
                lines.append(f"@q ld.global.nc.b32 {total}, [at+{offset}]; mul.lo.s32 {total}, factor, {total};")
        for part in range(step):
            for i in range(4):
                neighbour = 2 * (i % 2) + part if interleaved else i % 2
                value = f"$acc[{4 * (octet + part) + i}]"
                lines.append(f"sub.s32 {value}, {value}, s{i // 2 * loads + neighbour % loads};")
    return device_op(
        "correct_channels",
        "\n".join([*lines, "done: }"]),
        inout={"acc": ("i32", 4 * octets)},
        ins={"columns": "i32", "rows": "i32", "entry": "i32", "k": "i32", **_INS},
    )


def _inside(row: str, row_8: str) -> list[str]:
    """Whether the rows of a fragment lie inside of y."""
    return [f"setp.gt.s32 {row}, $rows, 0; setp.gt.s32 {row_8}, $rows, 8;"]


def _row_8_bytes(groups: int) -> int:
    """Bytes of the table from the entry of a row to that of the row 8 below."""
    return 4 * 8 * groups
