"""The epilogue on a thread's whole fragment of a wgmma tile, whose columns or rows are channels, as one device operation.

`Epilogue.fragments` and `Epilogue.transposed` are the way to these operations; here are their strings, and the places of a
fragment's operands. Loads of several octets are in flight at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue_text import (
    WIDEN,
    EpiloguePlan,
    bytes_of,
    first_address,
    load_elements,
    registers_of,
)
from schedsearch.templates.parts.stages import BYTES, EpilogueOperand


@dataclass(frozen=True)
class TileRows:
    """How positions map to pixels: position p is row p // patch_w and column p % patch_w of a tile.

    Attributes:
        patch_w: positions per row, at most 256.
        row_elements, pixel_elements: elements of y from one row of pixels to the next, and from one pixel to the next.
        second: channels from a thread's first to its second: 8, or 1 if rows are interleaved (`store.interleaved`).
        step: distance of neighbouring channels in operands of a channel (`ChannelOrder.step`).
    """

    patch_w: int
    row_elements: int
    pixel_elements: int
    second: int = 8
    step: int = 1


@dataclass(frozen=True)
class ChannelOrder:
    """The channels of a tile's columns: blocks of `block` columns, whose channels are `step` apart.

    Attributes:
        block, step: columns of a block, and channels from a column to the next.
        block_step: channels from a block to the next.
    """

    block: int
    step: int
    block_step: int

    def channel(self) -> Callable[[Any], Any]:
        """`channel(column)`: the channel of a column of the whole output."""
        block, step, block_step = self.block, self.step, self.block_step

        def channel(column: Any) -> Any:
            number = i32(u32(column) // u32(block))
            return i32((column - number * block) * step + number * block_step)

        return channel

    def offset(self, column: int) -> int:
        """Channels from a part's first column to another, both multiples of 8."""
        return column // self.block * self.block_step + column % self.block * self.step


@dataclass(frozen=True)
class Like:
    """Where a fragment's operands lie from a thread's first element on.

    Attributes:
        elements_8_rows: elements of an operand like y from a row to the row 8 below.
        block, block_elements: columns of a block of y, and elements from a block to the next.
        order: the channels of the columns.
    """

    elements_8_rows: int
    block: int
    block_elements: int
    order: ChannelOrder

    def offset(self, column: int) -> int:
        """Elements to a column, both in multiples of 8."""
        return column // self.block * self.block_elements + column % self.block


# --- Columns are channels ----------------------------------------------------------------------------------------------
_BRANCH_OCTETS = 4  # octets between two branches, whose loads are in flight at once; ptxas would otherwise hoist all loads


@functools.cache
def fragments_operation(
    octets: int, like: Like, plan: EpiloguePlan, interleaved: bool, ahead: int, singly: bool = False
) -> Callable[..., Any]:
    if interleaved:
        lines = _interleaved_lines(octets, like, plan)
    else:
        lines = _single_lines(octets, like, plan) if singly else _fragments_lines(octets, like, plan, ahead > 0)
    inout = {"acc": ("i32" if plan.integer else "f32", 4 * octets)}
    inout |= {"ahead": ("i32", ahead)} if ahead else {}
    ins = _FRAGMENT_INS | dict(plan.ins)
    return device_op("epilogue_fragments", "\n".join(lines), inout=inout, ins=ins, unused=(*inout, *ins))


_FRAGMENT_INS = {"columns": "i32", "row_inside": "i32", "row_8_inside": "i32", "k": "i32", "offset": "i64"}


def words_ahead(octets: int, plan: EpiloguePlan, interleaved: bool) -> int:
    """How many words `load_ahead_operation` loads: one for each 16 interleaved columns of a row, or for each 8 others."""
    return len(_operands_ahead(plan, interleaved)) * octets * (1 if interleaved else 2)


def _operands_ahead(plan: EpiloguePlan, interleaved: bool) -> list[EpilogueOperand]:
    """The operands like y of which a thread has a word for each group of columns."""
    return [operand for operand in plan.like_y if (operand.dtype in BYTES if interleaved else operand.dtype in WIDEN)]


@functools.cache
def load_ahead_operation(octets: int, like: Like, plan: EpiloguePlan, interleaved: bool) -> Callable[..., Any]:
    """Loads operands like y of a fragment for `fragments_operation`: those with 8 bits if the columns are interleaved, else
    those with 16.

    Not by ld.global.nc: ptxas moves such loads down, behind the wait for the first tile and its products.
    """
    lines = [
        "{ .reg .pred column, row, row8, inside, inside8;",
        *(f".reg .b64 at_{operand.name}, at8_{operand.name};" for operand in plan.like_y),
        "setp.ne.s32 row, $row_inside, 0; setp.ne.s32 row8, $row_8_inside, 0;",
        *_first_addresses(like.elements_8_rows, plan.like_y),
    ]
    step = 16 if interleaved else 8
    words = [(col, operand) for operand in _operands_ahead(plan, interleaved) for col in range(0, 8 * octets, step)]
    for number, (column, operand) in enumerate(words):
        at = _place(operand, column, like)
        lines.append(f"setp.gt.s32 column, $columns, {column};")
        for half, (inside, row) in enumerate((("inside", "row"), ("inside8", "row8"))):
            word = f"$ahead[{2 * number + half}]"
            load = f"@{inside} ld.global.b32 {word}, [at{'8' * half}_{at}];"
            lines.append(f"and.pred {inside}, column, {row}; mov.b32 {word}, 0; {load}")
    inout, ins = {"ahead": ("i32", words_ahead(octets, plan, interleaved))}, _FRAGMENT_INS | dict(plan.ins)
    return device_op("load_ahead", "\n".join([*lines, "}"]), inout=inout, ins=ins, unused=(*inout, *ins))


def _fragments_start(elements_8_rows: int, plan: EpiloguePlan, values: int) -> list[str]:
    """Declares registers for `values` numbers of each operand, and computes the operands' first addresses in both rows."""
    lines = [
        "{ .reg .pred column, row, row8, inside, inside8, q; .reg .b32 word; .reg .b16 low, high, zero;",
        *(f".reg .b64 at_{operand.name}, at8_{operand.name};" for operand in plan.arrays),
        plan.registers(values),
        "setp.ne.s32 row, $row_inside, 0; setp.ne.s32 row8, $row_8_inside, 0; mov.b16 zero, 0;",
    ]
    return lines + _first_addresses(elements_8_rows, plan.arrays)


def _first_addresses(elements_8_rows: int, operands: Sequence[EpilogueOperand]) -> list[str]:
    """The operands' first addresses, of those like y in both rows."""
    lines = [first_address(f"at_{operand.name}", operand) for operand in operands]
    for operand in operands:
        if operand.axes == "y":
            row_8_bytes = elements_8_rows * dtype_of(operand.dtype).nbytes
            lines.append(f"add.s64 at8_{operand.name}, at_{operand.name}, {row_8_bytes};")
    return lines


def _inside(column: int, plan: EpiloguePlan) -> list[str]:
    """Computes whether a column is inside of y, and in which rows; leaves after the last one."""
    lines = [f"setp.gt.s32 column, $columns, {column};"]
    if column // 8 % _BRANCH_OCTETS == 0:
        lines.append("@!column bra done;")
    if plan.like_y:
        lines += ["and.pred inside, column, row;", "and.pred inside8, column, row8;"]
    return lines


def _fragments_lines(octets: int, like: Like, plan: EpiloguePlan, are_ahead: bool) -> list[str]:
    lines = _fragments_start(like.elements_8_rows, plan, 4)
    ahead = _operands_ahead(plan, interleaved=False) if are_ahead else []
    for octet in range(octets):
        column = 8 * octet
        lines += _inside(column, plan)
        for stage in plan.stages:
            letters, temporaries = registers_of(stage)
            for letter, operand in zip(letters, stage.arrays):
                at = _place(operand, column, like)
                if operand in ahead:
                    word = 2 * (ahead.index(operand) * octets + octet)
                    for half in range(2):
                        lines += _widened(
                            (f"{letter}{2 * half}", f"{letter}{2 * half + 1}"), f"$ahead[{word + half}]", operand.dtype
                        )
                elif operand.axes == "y":
                    lines += load_elements([f"{letter}0", f"{letter}1"], "inside", f"at_{at}", operand.dtype)
                    lines += load_elements([f"{letter}2", f"{letter}3"], "inside8", f"at8_{at}", operand.dtype)
                else:
                    lines += _load_channels(letter, f"at_{at}", operand.dtype, like.order.step)
            for i in range(4):
                # Both rows share the operands of a channel.
                places = [i if operand.axes == "y" else i % 2 for operand in stage.arrays]
                arrays = [f"{letter}{place}" for letter, place in zip(letters, places)]
                lines.append(stage.text(f"$acc[{4 * octet + i}]", arrays, [f"{letter}{i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _single_lines(octets: int, like: Like, plan: EpiloguePlan) -> list[str]:
    """As `_fragments_lines`, for numbers of channels that may be odd: each element is loaded by itself."""
    lines = _fragments_start(like.elements_8_rows, plan, 4)
    for column in range(0, 8 * octets, 8):
        lines += _inside(column, plan)
        for number in range(2):
            lines += [f"setp.gt.s32 column, $columns, {column + number};"]
            if plan.like_y:
                lines += ["and.pred inside, column, row;", "and.pred inside8, column, row8;"]
            for stage in plan.stages:
                letters, temporaries = registers_of(stage)
                for letter, operand in zip(letters, stage.arrays):
                    at = _place(operand, column, like, number)
                    if operand.axes == "y":
                        lines += load_elements([f"{letter}{number}"], "inside", f"at_{at}", operand.dtype)
                        lines += load_elements([f"{letter}{number + 2}"], "inside8", f"at8_{at}", operand.dtype)
                    else:
                        lines += load_elements([f"{letter}{number}"], "column", f"at_{at}", operand.dtype)
                for i in (number, number + 2):
                    places = [i if operand.axes == "y" else number for operand in stage.arrays]
                    arrays = [f"{letter}{place}" for letter, place in zip(letters, places)]
                    value = f"$acc[{column // 2 + i}]"
                    lines.append(stage.text(value, arrays, [f"{letter}{i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _interleaved_lines(octets: int, like: Like, plan: EpiloguePlan) -> list[str]:
    """Of each 16 columns a thread holds four neighbours: value e of octet o is number 2 e + o, in both rows.

    Operands of 8 bits are there already, as words of `$ahead`.
    """
    lines, ahead = (
        _fragments_start(like.elements_8_rows, plan, 8),
        [operand for operand in plan.like_y if operand.dtype in BYTES],
    )
    for pair in range(octets // 2):
        column = 16 * pair
        lines += _inside(column, plan)
        for stage in plan.stages:
            letters, temporaries = registers_of(stage)
            for letter, operand in zip(letters, stage.arrays):
                at = _place(operand, column, like)
                if operand in ahead:
                    word = ahead.index(operand) * octets + 2 * pair
                    for half in range(2):
                        registers = [f"{letter}{4 * half + i}" for i in range(4)]
                        lines += bytes_of(registers, f"$ahead[{word + half}]", operand.dtype)
                elif operand.axes == "y":
                    lines += _load_four(letter, 0, "inside", f"at_{at}") + _load_four(letter, 4, "inside8", f"at8_{at}")
                else:
                    lines += _load_four(letter, 0, "column", f"at_{at}")
            for octet, i in ((octet, i) for octet in range(2) for i in range(4)):
                number, lower = 2 * (i % 2) + octet, 4 * (i // 2)
                places = [number + lower if operand.axes == "y" else number for operand in stage.arrays]
                arrays = [f"{letter}{place}" for letter, place in zip(letters, places)]
                value = f"$acc[{4 * (2 * pair + octet) + i}]"
                lines.append(stage.text(value, arrays, [f"{letter}{4 * octet + i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _place(operand: EpilogueOperand, column: int, like: Like, neighbour: int = 0) -> str:
    """The operand's name, and the bytes from its first element to that of a column, or of its right neighbour."""
    of_y = operand.axes == "y"
    elements = like.offset(column) if of_y else like.order.offset(column)
    elements += neighbour * (1 if of_y else like.order.step)
    return f"{operand.name}+{elements * dtype_of(operand.dtype).nbytes}"


def _load_channels(letter: str, address: str, dtype: str, step: int) -> list[str]:
    """Loads what belongs to the channels of two columns, which are `step` apart; zeros where `column` is false."""
    if step == 1:
        return load_elements([f"{letter}0", f"{letter}1"], "column", address, dtype)
    further = f"{address}+{step * dtype_of(dtype).nbytes}"
    return load_elements([f"{letter}0"], "column", address, dtype) + load_elements([f"{letter}1"], "column", further, dtype)


def _load_four(letter: str, first: int, inside: str, address: str) -> list[str]:
    """Loads four neighbours of 32 bits; zeros where the predicate is false."""
    registers = [f"{letter}{first + i}" for i in range(4)]
    zeros = [f"mov.b32 {register}, 0;" for register in registers]
    return [*zeros, f"@{inside} ld.global.nc.v4.b32 {{{', '.join(registers)}}}, [{address}];"]


# --- Rows are channels ----------------------------------------------------------------------------------------------------
_OCTET_BYTES = 8 * 128  # an octet of staged y has 128 bytes per position
_DIVISION_BITS = 20  # p // d == p * ceil(2**20 / d) >> 20 if p * d < 2**20


@functools.cache
def transposed_operation(octets: int, tile: TileRows, plan: EpiloguePlan) -> Callable[..., Any]:
    ins = {
        "channels": "i32", "rows": "i32", "columns": "i32", "position": "i32", "staged": "u32", "k": "i32", "offset": "i64",
        **dict(plan.ins),
    }  # fmt: skip
    lines, kind = _transposed_lines(octets, tile, plan), "i32" if plan.integer else "f32"
    return device_op(
        "epilogue_transposed", "\n".join(lines), inout={"acc": (kind, 4 * octets)}, ins=ins, unused=("acc", *ins)
    )


def _transposed_lines(octets: int, tile: TileRows, plan: EpiloguePlan) -> list[str]:
    vectors, kind = [operand for operand in plan.arrays if operand.axes == "K"], "b32" if plan.integer else "f32"
    lines = [
        "{ .reg .pred inside, inside8, more, q, in_tile, valid; .reg .b64 at, first; .reg .b16 low, high, zero;",
        f".reg .b32 word, w<4>, p, row, column, stop;{plan.registers(4)}",
        *(f".reg .{kind} {operand.name}_0, {operand.name}_1;" for operand in vectors),
        f"setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside8, $channels, {tile.second}; mov.b16 zero, 0;",
        f"mul.lo.s32 stop, $rows, {tile.patch_w};",
    ]
    for operand in vectors:
        lines.append(first_address("at", operand))
        lines += load_elements([f"{operand.name}_0"], "inside", "at", operand.dtype)
        second = tile.second * tile.step * dtype_of(operand.dtype).nbytes
        lines += load_elements([f"{operand.name}_1"], "inside8", f"at+{second}", operand.dtype)
    lines += [first_address("first", operand) for operand in plan.like_y if dtype_of(operand.dtype).nbytes != 2]
    for octet in range(octets):
        if octet % _BRANCH_OCTETS == 0:
            lines.append(f"setp.gt.s32 more, stop, {8 * octet}; @!more bra done;")
        for stage in plan.stages:
            letters, temporaries = registers_of(stage)
            for letter, operand in zip(letters, stage.arrays):
                lines += _operand_of_octet(letter, octet, octets, tile, operand.dtype) if operand.axes == "y" else []
            for i in range(4):
                arrays = [
                    f"{letter}{i}" if operand.axes == "y" else f"{operand.name}_{i // 2}"
                    for letter, operand in zip(letters, stage.arrays)
                ]
                lines.append(stage.text(f"$acc[{4 * octet + i}]", arrays, [f"{letter}{i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _operand_of_octet(letter: str, octet: int, octets: int, tile: TileRows, dtype: str) -> list[str]:
    """Loads an operand like y into letter0 ... letter3: two neighbouring positions of a channel, then of the second one."""
    lines = []
    if dtype_of(dtype).nbytes == 2:
        address, first = f"[$staged+{octet * _OCTET_BYTES}]", 2 * (octet % 2)
        load = "ldmatrix.sync.aligned.m8n8.{}.trans.shared.b16 {{{}}}, {};"
        if octet % 2 == 0:
            number = 4 if octet + 1 < octets else 2
            lines.append(load.format(f"x{number}", ", ".join(f"w{i}" for i in range(number)), address))
        for pair in range(2):
            lines += _widened((f"{letter}{2 * pair}", f"{letter}{2 * pair + 1}"), f"w{first + pair}", dtype)
        return lines
    nbytes = dtype_of(dtype).nbytes
    for neighbour in range(2):
        lines += _address_of_position(8 * octet + neighbour, tile, nbytes)
        for half, channel in enumerate(("inside", "inside8")):
            lines.append(f"and.pred valid, in_tile, {channel};")
            place = f"at+{nbytes * tile.second * half}"
            lines += load_elements([f"{letter}{2 * half + neighbour}"], "valid", place, dtype)
    return lines


def _widened(registers: tuple[str, str], word: str, dtype: str) -> list[str]:
    """The two 16-bit floats of a word as float32."""
    halves = zip(registers, ("low", "high"))
    return [f"mov.b32 {{low, high}}, {word};", *(WIDEN[dtype].format(to=to, half=half) for to, half in halves)]


def row_and_column(position: int, tile: TileRows) -> list[str]:
    """Computes the `row` and `column` of the thread's `position` in a tile, and whether it is `in_tile`; changes `p`."""
    return [
        f"add.s32 p, $position, {position}; mul.lo.s32 row, p, {-(-(2**_DIVISION_BITS) // tile.patch_w)};",
        f"shr.u32 row, row, {_DIVISION_BITS}; mad.lo.s32 column, row, {-tile.patch_w}, p;",
        "setp.lt.s32 in_tile, row, $rows; setp.lt.and.s32 in_tile, column, $columns, in_tile;",
    ]


def _address_of_position(position: int, tile: TileRows, nbytes: int = 4) -> list[str]:
    """Computes the address `at` of `nbytes` at the thread's `position` from `first`, and whether it is `in_tile`."""
    return [
        *row_and_column(position, tile),
        f"cvt.s64.s32 at, row; mad.lo.s64 at, at, {nbytes * tile.row_elements}, first;",
        f"mad.wide.s32 at, column, {nbytes * tile.pixel_elements}, at;",
    ]


@functools.cache
def store_transposed(octets: int, tile: TileRows, accumulator: str = "float32") -> Callable[..., Any]:
    """Stores the accumulators of `Epilogue.transposed`, 32 bits each, in sectors of 32 bytes.

    `accumulator` is the type of their registers; see `Epilogue.accumulator`. The operation takes (accumulators[4 * octets],
    y, channels, rows, columns, position, offset): y is an address, all others are as in `Epilogue.transposed`.
    """
    kind, stored = ("f32", "f32") if accumulator == "float32" else ("i32", "b32")
    lines = [
        "{ .reg .pred inside, inside8, more, in_tile, valid; .reg .b64 at, first; .reg .b32 p, row, column, stop;",
        "setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside8, $channels, 8; mad.lo.s64 first, $offset, 4, $y;",
        f"mul.lo.s32 stop, $rows, {tile.patch_w};",
    ]
    for octet in range(octets):
        if octet % _BRANCH_OCTETS == 0:
            lines.append(f"setp.gt.s32 more, stop, {8 * octet}; @!more bra done;")
        for neighbour in range(2):
            lines += _address_of_position(8 * octet + neighbour, tile)
            for half, channel in enumerate(("inside", "inside8")):
                value = f"$acc[{4 * octet + 2 * half + neighbour}]"
                lines.append(f"and.pred valid, in_tile, {channel}; @valid st.global.{stored} [at+{32 * half}], {value};")
    return device_op(
        "store_transposed",
        "\n".join([*lines, "done: }"]),
        inout={"acc": (kind, 4 * octets)},
        ins={"y": "u64", "channels": "i32", "rows": "i32", "columns": "i32", "position": "i32", "offset": "i64"},
    )
