"""The zero point of x in kernels that multiply x as it is: a correction of their sums.

    sum of (x - z) * w over valid taps  =  sum of x * w  -  z * (sum of w over valid taps and channels)

Padding counts as the zero point, so it adds nothing: kernels load zeros there, and only taps inside of the image are
subtracted. The second sum depends on the output channel and on the taps that are valid. Pixels with the same valid taps form
a *class*: all inner rows are one class of rows, and each row near the upper or lower border is a class of its own; the same
holds for columns. A step that reads nothing but the weights writes a table [class of rows x class of columns, K] of int32.
The kernel adds -z times an entry to each of its sums, before the epilogue. All arithmetic wraps around at 32 bits, like the
sums themselves.

A template

1. asks `zero_point_problem` in `validate`, and makes `ZeroPoint.of(workload)`, which is None if x has no zero point;
2. gives `Epilogue` its `params`, puts `step()` before its own step and merges `workspaces` and `alignments`;
3. captures `correction(...)`, which corrects a thread's fragment of a wgmma tile before `Epilogue.fragments`; or
   `transposed_correction(...)` before `Epilogue.transposed`; or `values(...)`, which corrects the sums of a few channels
   before `Epilogue.pair` or `single`, and `places()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.backend.ops import device_op, shared_base
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.layout import Layout
from schedsearch.template import KernelStep
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import AxisStrides
from schedsearch.templates.parts.casts import i32, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.epilogue_fragments import TileRows, row_and_column
from schedsearch.workload import Workload

TABLE = "x_zero_sums"  # the workspace
SCALAR = "x_zero_point"
THREADS = 128  # of a block of the step that writes the table
MAX_CLASSES = 1024  # of both axes together: 31 x 31 taps
MAX_TAPS = 8192  # whose sums fit into shared memory
MAX_ENTRIES = 2**28  # of the table
_BRANCH_OCTETS = 4  # octets between two branches, whose loads are in flight at once


@dataclass(frozen=True)
class AxisClasses:
    """Classes of output positions along one axis, by the taps that lie inside of the image.

    The first `before` positions and the last `after` ones are classes of their own, all others form one class.

        >>> same = AxisClasses.of(size=8, taps=3, out=8, stride=1, padding=1, dilation=1)
        >>> same.count, [same.of_position(p) for p in range(8)]
        (3, [0, 1, 1, 1, 1, 1, 1, 2])

    Attributes:
        before, after: numbers of positions at both ends that lack a tap.
        last: the last position that is not one of `after`.
        taps, size, stride, padding, dilation: of the axis; `size` is the image's.
    """

    before: int
    after: int
    last: int
    taps: int
    size: int
    stride: int
    padding: int
    dilation: int

    @classmethod
    def of(cls, *, size: int, taps: int, out: int, stride: int, padding: int, dilation: int) -> AxisClasses:
        before = min(out, -(-padding // stride))
        after = out - max(0, min(out, -(-(size + padding - (taps - 1) * dilation) // stride)))
        if before + after >= out:  # no position has all taps
            before, after = out - 1, 0
        return cls(before, after, out - 1 - after, taps, size, stride, padding, dilation)

    @property
    def count(self) -> int:
        return self.before + 1 + self.after

    def of_position(self, position: int) -> int:
        """The class of an output position; the kernel's `class_of` computes the same."""
        return min(position, self.before) + max(position - self.last, 0)


@dataclass(frozen=True)
class ZeroPoint:
    """The correction for the zero point of x in kernels for `workload`.

    Attributes:
        rows, columns: classes of output rows and columns.
        params: further parameters of the kernel's epilogue.
        workspaces: name -> bytes of the table.
        alignments: name -> bytes to which the table is aligned.
    """

    workload: Workload[Conv2dParams]
    rows: AxisClasses
    columns: AxisClasses

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> ZeroPoint | None:
        """The correction, or None if x has no zero point."""
        if "x" not in workload.params.zero_points:
            return None
        w = workload.params
        out = CONV2D.output_hw(w)
        rows, columns = (
            AxisClasses.of(
                size=size,
                taps=taps,
                out=out[axis],
                stride=w.stride[axis],
                padding=w.padding[axis],
                dilation=w.dilation[axis],
            )
            for axis, (size, taps) in enumerate(((w.h, w.r), (w.w, w.s)))
        )
        return cls(workload, rows, columns)

    @property
    def classes(self) -> int:
        return self.rows.count * self.columns.count

    @property
    def params(self) -> tuple[Pointer, ...]:
        return (Pointer(TABLE),)

    @property
    def workspaces(self) -> dict[str, int]:
        return {TABLE: 4 * self.classes * self.workload.params.k}

    @property
    def alignments(self) -> dict[str, int]:
        return {TABLE: 16}

    def step(self, buffer: str = "weight", layout: str = "") -> KernelStep:
        """The step that fills the table. It is constant: with the same weights it need not run again.

        Args:
            buffer: the argument or workspace that holds the weights.
            layout: of the buffer; the workload's weight_layout unless given. The buffer is aligned to 4 bytes if 4 channels
                of a group lie together.
        """
        w = self.workload
        layout = layout or w.params.weight_layout
        return KernelStep(
            _build_table(self, layout),
            (Pointer(buffer), Pointer(TABLE)),
            Grid(w.params.k),
            THREADS,
            4 * w.params.r * w.params.s,
            constant=True,
            shaped_by=frozenset(),
        )

    def places(self) -> Callable[[Any], Any]:
        """`place(pixel)`: the first entry of an output pixel's class in the table (i32). Pixels are numbered (n, p, q)."""
        w, (out_h, out_w) = self.workload, CONV2D.output_hw(self.workload.params)
        out_pixels, columns, k = out_h * out_w, self.columns.count, w.params.k
        row_class, column_class = _class_of(self.rows), _class_of(self.columns)
        count = u32 if (w.params.n + 1) * out_pixels < 2**31 else u64

        def place(pixel: Any) -> Any:
            within = u32(count(pixel) % count(out_pixels))
            p = u32(within // u32(out_w))
            q = i32(within - p * u32(out_w))
            return i32((row_class(i32(p)) * columns + column_class(q)) * k)

        def only_place(pixel: Any) -> Any:
            return i32(0)

        return place if self.classes > 1 else only_place

    def correction(self, epilogue: Epilogue, octets: int, interleaved: bool) -> Callable[..., None]:
        """`correct(values, columns, row, k, operands)`: corrects a thread's fragment of a wgmma tile in place.

        values, columns and k are as in `Epilogue.fragments`. row is the output pixel of the fragment's first row, and
        `operands` are those of `epilogue`.
        """
        place, correct = self.places(), correct_fragments(octets, interleaved)
        table, scalar = epilogue.index(TABLE), epilogue.index(SCALAR)

        def correct_sums(values: Any, columns: Any, row: Any, k: Any, operands: Any) -> None:
            row_8 = i32(row + 8)
            correct(values, columns, place(row), place(row_8), k, operands[table], operands[scalar])

        return correct_sums

    def transposed_correction(self, epilogue: Epilogue, octets: int, tile: TileRows) -> Callable[..., None]:
        """`correct(values, channels, rows, columns, position, row, column, k, operands)`: the same where rows are channels.

        values, channels, rows, columns, position and k are as in `Epilogue.transposed`. (row, column) is the output pixel of
        the tile's first position.
        """
        correct = correct_transposed(octets, tile, self.rows, self.columns, self.workload.params.k)
        table, scalar = epilogue.index(TABLE), epilogue.index(SCALAR)

        def correct_sums(
            values: Any, channels: Any, rows: Any, columns: Any, position: Any, row: Any, column: Any, k: Any, operands: Any
        ) -> None:  # fmt: skip
            correct(values, channels, rows, columns, position, row, column, k, operands[table], operands[scalar])

        return correct_sums

    @staticmethod
    def values(count: int) -> Callable[..., Any]:
        """A device operation on the sums of 1, 2 or 4 neighbouring channels of a pixel; k is a multiple of their number.

        It takes (v0, ..., valid, place, k, table, zero_point) and returns the corrected sums (i32). place (i32) is what
        `places` gives for the pixel, table (u64) and zero_point (f32) are `operands[epilogue.index(TABLE)]` and
        `operands[epilogue.index(SCALAR)]`. With valid = 0 it touches no memory, and its results are meaningless.
        """
        return correct_values(count)


def no_correction(values: Any, columns: Any, row: Any, k: Any, operands: Any) -> None:
    """In the place of `ZeroPoint.correction` if x has no zero point."""


def no_transposed_correction(
    values: Any, channels: Any, rows: Any, columns: Any, position: Any, row: Any, column: Any, k: Any, operands: Any
) -> None:
    """In the place of `ZeroPoint.transposed_correction` if x has no zero point."""


def zero_point_problem(workload: Workload[Conv2dParams], of_weight: bool = False) -> str | None:
    """Why a kernel that multiplies x and the weights as they are cannot correct its sums (one sentence), or None.

    Args:
        of_weight: the kernel corrects for a zero point of the weight too; see `window_sums`.
    """
    p = workload.params
    if "weight" in p.zero_points and not of_weight:
        return (
            "weight has a zero point; allowed: a zero point of x, whose correction depends on the weights only; "
            "conv2d_wgmma, conv2d_mma and conv2d_simt take both"
        )
    zero = ZeroPoint.of(workload)
    if zero is None:
        return None
    if zero.classes > MAX_CLASSES:
        return f"the zero point of x has {zero.classes} classes of borders; allowed: up to {MAX_CLASSES}"
    if p.r * p.s > MAX_TAPS:
        return f"with a zero point of x, r * s is {p.r * p.s}; allowed: up to {MAX_TAPS}"
    if zero.classes * p.k > MAX_ENTRIES:
        return f"the zero point of x needs a table of {zero.classes} x {p.k}; allowed: up to {MAX_ENTRIES} entries"
    return None


def _class_of(axis: AxisClasses) -> Callable[[Any], Any]:
    """`class_of(position)`, as `AxisClasses.of_position`."""
    before, last = axis.before, axis.last

    def class_of(position: Any) -> Any:
        return i32(min(position, i32(before)) + max(i32(position - last), i32(0)))

    def only_class(position: Any) -> Any:
        return i32(0)

    return class_of if axis.count > 1 else only_class


# --- The table --------------------------------------------------------------------------------------------------------
def _build_table(zero: ZeroPoint, layout: str) -> Callable[..., None]:
    """The kernel (weight, table): a block for each output channel. Its warps add up the channels of the taps, one tap each
    at a time; then its threads add up the taps of the classes."""
    w, warps = zero.workload, THREADS // 32
    taps, kernel_w, classes, columns, k = w.params.r * w.params.s, w.params.s, zero.classes, zero.columns.count, w.params.k
    run, offset = _weight_runs(w, layout)
    channels = w.params.c // w.params.groups
    runs = channels // run
    add, row_span, column_span = ptx.add_bytes(w.params.weight_dtype, run), _valid_taps(zero.rows), _valid_taps(zero.columns)

    def sum_weights(weight: Any, table: Any) -> None:
        channel, thread, shared = i32(cuda.blockIdx.x), i32(cuda.threadIdx.x), shared_base()
        for tap in range(i32(thread >> 5), i32(taps), i32(warps)):
            total = i32(0)
            for number in range(i32(thread & 31), i32(runs), i32(32)):
                at = offset(channel, tap, i32(number * run))
                total = add(u64(weight + u64(at)), total)
            total = ptx.warp_sum(total)
            if thread & 31 == 0:
                ptx.store_shared_i32(u32(shared + 4 * tap), total)
        cuda.syncthreads()
        for number in range(thread, i32(classes), i32(THREADS)):
            row_class = i32(u32(number) // u32(columns))
            first_h, stop_h = row_span(row_class)
            first_w, stop_w = column_span(i32(number - row_class * columns))
            total = i32(0)
            for tap_h in range(first_h, stop_h):
                for tap_w in range(first_w, stop_w):
                    total = i32(total + ptx.load_shared_i32(u32(shared + 4 * (tap_h * kernel_w + tap_w))))
            entry = u64(u64(number) * u64(k) + u64(channel))
            ptx.store_global_u32(u64(table + 4 * entry), u32(total))

    return sum_weights


def _valid_taps(axis: AxisClasses) -> Callable[[Any], Any]:
    """`span(class)`: the first tap that lies inside of the image for positions of a class, and the one after the last."""
    before, skipped = axis.before, axis.last - axis.before
    stride, padding, dilation, size, taps = axis.stride, axis.padding, axis.dilation, axis.size, axis.taps

    def span(number: Any) -> Any:
        position = i32(number + (skipped if number > before else 0))
        first_input = i32(position * stride - padding)  # of tap 0
        first = i32((max(-first_input, 0) + dilation - 1) // dilation)
        stop = i32((max(size - first_input, 0) + dilation - 1) // dilation)
        return first, min(stop, i32(taps))

    return span


def _weight_runs(workload: Workload[Conv2dParams], layout: str) -> tuple[int, Callable[..., Any]]:
    """Neighbouring channels that one load takes, 4 or 1; and `offset(k, tap, channel)` of an element in the weights."""
    w = workload.params
    sizes = {"O": w.k, "I": w.c // w.groups, "H": w.r, "W": w.s}
    strides = AxisStrides.of(Layout.parse(layout), sizes)
    along_k, along_channels = strides["O"].offset(), strides["I"].offset()
    along_taps = strides["W"].offset()  # taps are numbered row by row, and lie in memory in that order

    def offset(k: Any, tap: Any, channel: Any) -> Any:
        return along_k(k) + along_taps(tap) + along_channels(channel)

    return 4 if strides["I"].run(sizes["I"]) % 4 == 0 else 1, offset


# --- The correction ----------------------------------------------------------------------------------------------------
_INS = {"k": "i32", "table": "u64", "zero_point": "f32"}
_FACTOR = "cvt.rni.s32.f32 factor, $zero_point; neg.s32 factor, factor;"


@functools.cache
def correct_fragments(octets: int, interleaved: bool) -> Callable[..., Any]:
    """(accumulators[4 * octets], columns, place, place_8, k, table, zero_point), for rows r and r + 8 of a fragment.

    A thread's values of a row are loaded together: 2 of each octet, or 4 of two octets if columns are interleaved. Both
    rows mostly have the same class; then the second load is left out."""
    count, step = (4, 2) if interleaved else (2, 1)
    lines = [
        f"{{ .reg .pred column, differ, q; .reg .b32 factor, first, c<{2 * count}>; .reg .b64 at, at8;",
        _FACTOR,
        "add.s32 first, $place, $k; mad.wide.s32 at, first, 4, $table;",
        "add.s32 first, $place_8, $k; mad.wide.s32 at8, first, 4, $table;",
        "setp.ne.s32 differ, $place, $place_8;",
        *(f"mov.b32 c{i}, 0;" for i in range(2 * count)),
    ]
    row, row_8 = (", ".join(f"c{i}" for i in range(first, first + count)) for first in (0, count))
    for octet in range(0, octets // step * step, step):
        column = 8 * octet
        lines.append(f"setp.gt.s32 column, $columns, {column};")
        if octet % _BRANCH_OCTETS == 0:
            lines.append("@!column bra done;")
        lines.append(f"@column ld.global.nc.v{count}.b32 {{{row}}}, [at+{4 * column}];")
        lines += [f"mov.b32 c{count + i}, c{i};" for i in range(count)]
        lines.append(f"and.pred q, column, differ; @q ld.global.nc.v{count}.b32 {{{row_8}}}, [at8+{4 * column}];")
        for part in range(step):
            for i in range(4):
                entry = i // 2 * count + (2 * (i % 2) + part if interleaved else i % 2)
                value = f"$acc[{4 * (octet + part) + i}]"
                lines.append(f"mad.lo.s32 {value}, factor, c{entry}, {value};")
    return device_op(
        "correct_fragments",
        "\n".join([*lines, "done: }"]),
        inout={"acc": ("i32", 4 * octets)},
        ins={"columns": "i32", "place": "i32", "place_8": "i32", **_INS},
    )


@functools.cache
def correct_transposed(octets: int, tile: TileRows, rows: AxisClasses, columns: AxisClasses, k: int) -> Callable[..., Any]:
    """(accumulators[4 * octets], channels, rows, columns, position, row, column, k, table, zero_point).

    If all pixels of a tile have the inner class, a thread loads an entry for each of its two channels, otherwise for each of
    its values."""
    inner = 4 * k * (rows.before * columns.count + columns.before)
    lines = [
        "{ .reg .pred inside, inside_second, in_tile, valid, q; .reg .b32 factor, c0, c1, p, row, column, stop, place;",
        f".reg .b32 class; .reg .b64 at, first; {_FACTOR}",
        f"setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside_second, $channels, {tile.second};",
        "mad.wide.s32 first, $k, 4, $table;",
    ]
    borders = [(axis, of) for axis, of in ((rows, "row"), (columns, "column")) if axis.count > 1]
    for axis, of in borders:
        lines += [
            f"setp.lt.s32 q, ${of}, {axis.before}; @q bra each;",
            f"add.s32 stop, ${of}, ${of}s; setp.gt.s32 q, stop, {axis.last + 1}; @q bra each;",
        ]
    lines += _entries("first", inner, "inside", "inside_second", tile)
    lines += [f"mad.lo.s32 $acc[{i}], factor, c{i // 2 % 2}, $acc[{i}];" for i in range(4 * octets)]
    if borders:
        lines += ["bra done;", f"each: mul.lo.s32 stop, $rows, {tile.patch_w};"]
        for octet, neighbour in ((octet, neighbour) for octet in range(octets) for neighbour in range(2)):
            if octet % _BRANCH_OCTETS == neighbour == 0:
                lines.append(f"setp.gt.s32 q, stop, {8 * octet}; @!q bra done;")
            lines += row_and_column(8 * octet + neighbour, tile)
            lines += ["mov.b32 place, 0;"] + [line for axis, of in borders for line in _add_class(axis, of, columns.count)]
            lines += [f"mad.wide.s32 at, place, {4 * k}, first;", "and.pred valid, in_tile, inside;"]
            lines += ["and.pred in_tile, in_tile, inside_second;", *_entries("at", 0, "valid", "in_tile", tile)]
            for i in (neighbour, neighbour + 2):
                lines.append(f"mad.lo.s32 $acc[{4 * octet + i}], factor, c{i // 2}, $acc[{4 * octet + i}];")
    names = ("channels", "rows", "columns", "position", "row", "column")
    return device_op(
        "correct_transposed",
        "\n".join([*lines, "done: }"]),
        inout={"acc": ("i32", 4 * octets)},
        ins={**dict.fromkeys(names, "i32"), **_INS},
        unused=names,
    )


def _entries(address: str, offset: int, first: str, second: str, tile: TileRows) -> list[str]:
    """Loads c0 and c1, the entries of a thread's two channels; zeros where their predicates are false."""
    return [
        f"mov.b32 c0, 0; @{first} ld.global.nc.b32 c0, [{address}+{offset}];",
        f"mov.b32 c1, 0; @{second} ld.global.nc.b32 c1, [{address}+{offset + 4 * tile.second * tile.step}];",
    ]


def _add_class(axis: AxisClasses, of: str, columns: int) -> list[str]:
    """Adds the class of a row or column of the tile to `place`; see `AxisClasses.of_position`."""
    factor = columns if of == "row" else 1
    return [
        f"add.s32 p, {of}, ${of}; min.s32 class, p, {axis.before}; sub.s32 p, p, {axis.last}; max.s32 p, p, 0;",
        f"add.s32 class, class, p; mad.lo.s32 place, class, {factor}, place;",
    ]


@functools.cache
def correct_values(count: int) -> Callable[..., Any]:
    """See `ZeroPoint.values`."""
    vector, numbers = {1: "", 2: ".v2", 4: ".v4"}[count], range(count)
    registers = ", ".join(f"c{i}" for i in numbers)
    lines = [
        f"{{ .reg .pred inside; .reg .b32 factor, first, c<{count}>; .reg .b64 at;",
        _FACTOR,
        "setp.ne.s32 inside, $valid, 0; add.s32 first, $place, $k; mad.wide.s32 at, first, 4, $table;",
        *(f"mov.b32 c{i}, 0;" for i in numbers),
        f"@inside ld.global.nc{vector}.b32 {f'{{{registers}}}' if vector else registers}, [at];",
        *(f"mad.lo.s32 c{i}, factor, c{i}, $v{i};" for i in numbers),  # results are written last: they may share registers
        *(f"mov.b32 $y{i}, c{i};" for i in numbers),
        "}",
    ]
    return device_op(
        "correct_values",
        "\n".join(lines),
        ins={**{f"v{i}": "i32" for i in numbers}, "valid": "i32", "place": "i32", **_INS},
        outs={f"y{i}": "i32" for i in numbers},
    )
