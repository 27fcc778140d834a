"""The fused epilogue of a convolution as one device operation: a short PTX text for each stage, in the workload's order.

It has forms for one value, for a pair of neighbouring channels, and for a thread's whole fragment of a wgmma tile whose
columns or rows are channels. `stages.STAGE_CODES` has the arithmetic of the stages. This module loads operands and chains
stages.

The forms are generated as PTX text, not written as Python functions that a kernel captures. An unrolled Python loop over
64 or more accumulators exceeds NVVM's unroll budget, and the accumulators then end up in memory. A device operation is
opaque to NVVM, and accumulators stay in registers. `StageCode.older` replaces instructions that need sm_80.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numba import types

from schedsearch.backend.ops import device_op
from schedsearch.launch import Param, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.stages import computing
from schedsearch.templates.parts.stages import (
    STAGE_CODES,
    EpilogueOperand,
    epilogue_operands,
    numeric_parameters,
    stage_inputs,
)
from schedsearch.workload import Workload

_WIDEN = {  # 16-bit float -> float32, exact; cvt.f32.bf16 would need sm_90
    "float16": "cvt.f32.f16 {to}, {half};",
    "bfloat16": "mov.b32 {to}, {{zero, {half}}};",
}


class Epilogue:
    """The stages after the accumulation in a CUDA kernel for `workload`.

    A kernel takes the operands as its last argument, `*operands`, and passes them on to the device operations below:
    `operation(..., *operands)`.

    Attributes:
        params: launch parameters of `*operands`: u64 addresses of arrays and f32 scalars, zeros for operands that the
            workload does not have.
        accumulator: int32 if the workload sums whole numbers, else float32; the type of the registers of all operations.
            They hold the bits of float32 numbers after `dequantise`.
        identity: whether no stage computes anything. `pair` and `single` then return the accumulators. `fragments` leaves
            them alone.
        alignments: buffer -> alignment in bytes that `pair` needs; `single` needs one element.
        pair: `pair(v0, v1, valid, k, offset, *operands)` returns two results, the device operation for the accumulators of
            two neighbouring channels. k (i32, even) is the channel of v0, offset (i64, even) its element offset in y and in
            operands like y. With valid (i32) = 0 it touches no memory, and its result is meaningless.
        single: `single(v0, valid, k, offset, *operands)`, the same for one channel, if pairs would not be aligned.
    """

    def __init__(
        self, workload: Workload, further: Sequence[Pointer] = (), capability: tuple[int, int] = (8, 0)
    ) -> None:  # fmt: skip
        """
        Args:
            further: parameters that the operations ignore; they are the last of `*operands`.
            capability: the operations use no instruction that came after this compute capability, or after 8.0.
        """
        self._operands = (
            *epilogue_operands(workload), *(EpilogueOperand(param.buffer, "K", "int32") for param in further)
        )  # fmt: skip
        self._plan = _Plan.of(workload, self._operands, capability < (8, 0))
        self.accumulator = "int32" if self._plan.integer else "float32"
        self.identity = not computing(workload.epilogue)
        self.params: tuple[Param, ...] = tuple(operand.param for operand in self._operands)
        arrays = [operand for operand in self._operands if operand.axes and operand.present]
        self.alignments = {array.name: 2 * dtype_of(array.dtype).nbytes for array in arrays}
        self.pair = _operation(self._plan, 2)
        self.single = _operation(self._plan, 1)

    def index(self, name: str) -> int:
        """The index of the operand `name` in `params` and therefore in a kernel's `*operands`."""
        return [operand.name for operand in self._operands].index(name)

    def fragments(
        self,
        octets: int,
        elements_8_rows: int,
        interleaved: bool = False,
        blocks: tuple[int, int] | None = None,
        order: ChannelOrder | None = None,
    ) -> Callable[..., Any]:
        """A device operation on a thread's fragment of a wgmma tile: `octets` times 8 columns of rows r and r + 8.

        It takes (accumulators[4 * octets], columns, row_inside, row_8_inside, k, offset, *operands) and changes the
        accumulators in place. From each 8 columns the thread holds two neighbours in row r, then the same two in row r + 8.
        k (i32, even) is the channel of the first value. offset (i64, even) is its element offset in y and in operands like
        y, where rows r and r + 8 are `elements_8_rows` apart. `columns` (i32, a multiple of 8, the same in the whole warp)
        counts the columns inside of y, starting at the thread's first 8. Nothing outside of these columns and rows is read.
        Operands of a channel are loaded once for both rows.

        If the columns are `interleaved` (see `store.interleaved`), each 16 columns give the thread four neighbours in each
        row, and k and offset are multiples of 4.

        `blocks` are (columns of a block of y, elements of y from a block to the next), if y has blocks of columns. The
        columns of the fragment fill whole blocks, or lie within one.

        `order` says which channels the columns are, if they are not neighbours. The columns of the fragment then fill whole
        blocks of the order, or lie within one, and no operand is like y.
        """
        block, block_elements = blocks or (8 * octets, 0)
        like = Like(elements_8_rows, block, block_elements, order or ChannelOrder(8 * octets, 1, 0))
        return _fragments_operation(octets, like, self._plan, interleaved)

    def transposed(self, octets: int, tile: TileRows) -> Callable[..., Any]:
        """A device operation on a thread's fragment of a wgmma tile whose rows are channels: `octets` times 8 positions.

        It takes (accumulators[4 * octets], channels, rows, columns, position, staged, k, offset, *operands) and changes the
        accumulators in place. From each 8 positions the thread holds two neighbours in channel k, then the same two in
        channel k + `tile.second`. `channels` (i32) counts the channels from k to the last; their operands are read once.
        `rows` and `columns` (i32) count those of the tile that are inside of y. An operand like y

        - with 16 bits is read from shared memory, in the layout in which `stmatrix_x4_trans` stores y; `staged` is the
          lane's address for it;
        - with 32 bits is read from global memory: offset (i64) is the element offset of (the tile's first pixel, k),
          `position` (i32) the thread's first position.
        """
        return _transposed_operation(octets, tile, self._plan)

    def stages_of_patch(self, channels: int, strides: tuple[int, int]) -> PatchStages:
        """The stages as lines of a larger operation on rows and columns of pixels.

        The operation has the operands k (i32), the first of `channels` channels, offset (i64), the element offset of the
        first pixel at this channel in y and in operands like y, and those of `PatchStages.ins`.

        Args:
            strides: elements from a row and from a column to the next.
        """
        return PatchStages(self._plan, channels, strides)


class PatchStages:
    """Lines of PTX for pixels whose channels a thread holds in registers. Operands of a channel are loaded once.

    Attributes:
        ins: operand -> type of the operation that has these lines, in the order of a kernel's `*operands`.
        begin: lines before those of the first pixel. They declare registers a0 ..., word, low, high and zero.
    """

    def __init__(self, plan: _Plan, channels: int, strides: tuple[int, int]) -> None:
        self.ins = plan.ins
        self._plan, self._channels, self._strides = plan, channels, strides
        vectors = [operand for operand in plan.arrays if operand.axes == "K"]
        self.begin = [
            ".reg .pred always, q; .reg .b32 word; .reg .b16 low, high, zero; .reg .b64 at;",
            *(f".reg .b64 at_{operand.name};" for operand in plan.like_y),
            *(f".reg .f32 {operand.name}_<{channels}>;" for operand in vectors),
            plan.registers(channels),
            "setp.eq.s32 always, $k, $k; mov.b16 zero, 0;",
            *(_address(f"at_{operand.name}", operand) for operand in plan.like_y),
        ]
        for operand in vectors:
            self.begin.append(_address("at", operand))
            for i in range(channels):
                place = f"at+{i * dtype_of(operand.dtype).nbytes}"
                self.begin += _load([f"{operand.name}_{i}"], "always", place, operand.dtype)

    def of_pixel(self, values: Sequence[str], row: int, column: int, inside: str) -> list[str]:
        """The stages on the channels of one pixel; nothing is read if the predicate `inside` is false."""
        elements = row * self._strides[0] + column * self._strides[1]
        lines = []
        for stage in self._plan.stages:
            letters, temporaries = _letters(stage)
            for letter, operand in zip(letters, stage.arrays):
                size = dtype_of(operand.dtype).nbytes
                for i in range(self._channels if operand.axes == "y" else 0):
                    place = f"at_{operand.name}+{(elements + i) * size}"
                    lines += _load([f"{letter}{i}"], inside, place, operand.dtype)
            for i, value in enumerate(values):
                arrays = [
                    f"{letter}{i}" if operand.axes == "y" else f"{operand.name}_{i}"
                    for letter, operand in zip(letters, stage.arrays)
                ]
                lines.append(stage.text(value, arrays, [f"{letter}{i}" for letter in temporaries]))
        return lines


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
            number = types.int32(types.uint32(column) // types.uint32(block))
            return types.int32((column - number * block) * step + number * block_step)

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


_LETTERS = "abcdefgh"  # names of the registers for operands and temporaries of one stage


@dataclass(frozen=True)
class _Stage:
    """One stage of a plan.

    Attributes:
        ptx: as in `StageCode`.
        arrays: operands in memory.
        named: scalar or parameter -> its text in PTX.
        temporaries: number of further registers that it needs.
    """

    ptx: str
    arrays: tuple[EpilogueOperand, ...]
    named: tuple[tuple[str, str], ...]
    temporaries: int

    def text(self, value: str, arrays: Sequence[str], temporaries: Sequence[str]) -> str:
        """The instructions for one value, given the registers of the value, its operands and its temporaries."""
        registers = dict(zip((operand.name for operand in self.arrays), arrays))
        registers |= {f"temporary{number}": register for number, register in enumerate(temporaries)}
        return self.ptx.format(value=value, **registers, **dict(self.named))


@dataclass(frozen=True)
class _Plan:
    """Everything that the text of a device operation depends on.

    Attributes:
        ins: operand -> type, in the order of `*operands`.
        integer: accumulators are 32-bit integers.
    """

    stages: tuple[_Stage, ...]
    ins: tuple[tuple[str, str], ...]
    integer: bool = False

    @classmethod
    def of(cls, workload: Workload, operands: Sequence[EpilogueOperand], older: bool = False) -> _Plan:
        by_name = {operand.name: operand for operand in operands}
        stages = []
        for stage, number in zip(computing(workload.epilogue), stage_inputs(workload)):
            code, of_integer = STAGE_CODES[stage.name], not dtype_of(number).is_float
            named = {scalar.name: f"${scalar.name}" for scalar in stage.kind.scalars}
            named |= {name: _literal(value) for name, value in numeric_parameters(stage).items()}
            named |= {"int": dtype_of(number).ptx} if of_integer else {}
            arrays = tuple(by_name[operand.name] for operand in stage.kind.operands)
            text = code.integer if of_integer else (code.older if older else "") or code.ptx
            stages.append(_Stage(text, arrays, tuple(named.items()), code.temporaries))
        ins = tuple((operand.name, "u64" if operand.axes else "f32") for operand in operands)
        return cls(tuple(stages), ins, not dtype_of(workload.dtype).is_float)

    @property
    def arrays(self) -> tuple[EpilogueOperand, ...]:
        """Operands in memory by name, each once."""
        found = {operand.name: operand for stage in self.stages for operand in stage.arrays}
        return tuple(found[name] for name in sorted(found))

    @property
    def like_y(self) -> list[EpilogueOperand]:
        """The arrays like the output."""
        return [operand for operand in self.arrays if operand.axes == "y"]

    @property
    def pure(self) -> bool:
        return not self.arrays

    def registers(self, count: int) -> str:
        """Declares `count` registers for each letter that a stage uses: a0, a1, ..., b0, b1, ..."""
        letters = max((len(stage.arrays) + stage.temporaries for stage in self.stages), default=0)
        kind = "b32" if self.integer else "f32"
        return "".join(f" .reg .{kind} {letter}<{count}>;" for letter in _LETTERS[:letters])


def _literal(value: int | float) -> str:
    """A number in PTX syntax: a float32 is written by its bits."""
    if isinstance(value, int):
        return str(int(value))
    return "0f" + struct.pack(">f", value).hex().upper()


# --- One value, or a pair ---------------------------------------------------------------------------------------------
@functools.cache
def _operation(plan: _Plan, values: int) -> Callable[..., Any]:
    ins = {"valid": "i32", "k": "i32", "offset": "i64", **dict(plan.ins)}
    kind = "i32" if plan.integer else "f32"
    return device_op(
        "epilogue",
        _naming_all(_lines(plan, values), ins),
        ins={**{f"v{i}": kind for i in range(values)}, **ins},
        outs={f"y{i}": kind for i in range(values)},
        pure=plan.pure,
    )


def _lines(plan: _Plan, values: int) -> list[str]:
    """Operands are copied to local registers first and results are written last, so they may share registers."""
    kind = "b32" if plan.integer else "f32"
    lines = [
        "{ .reg .pred inside, q; .reg .b64 address; .reg .b32 word; .reg .b16 low, high, zero;",
        f".reg .{kind} t0, t1;{plan.registers(values)}",
        "setp.ne.s32 inside, $valid, 0; mov.b16 zero, 0;",
        *(f"mov.{kind} t{i}, $v{i};" for i in range(values)),
    ]
    for stage in plan.stages:
        letters, temporaries = _letters(stage)
        for letter, operand in zip(letters, stage.arrays):
            lines.append(_address("address", operand))
            lines += _load([f"{letter}{i}" for i in range(values)], "inside", "address", operand.dtype)
        for i in range(values):
            lines.append(stage.text(f"t{i}", [f"{x}{i}" for x in letters], [f"{x}{i}" for x in temporaries]))
    return [*lines, *(f"mov.{kind} $y{i}, t{i};" for i in range(values)), "}"]


def _letters(stage: _Stage) -> tuple[str, str]:
    """Names of the registers for the stage's arrays, and for its temporaries."""
    arrays = len(stage.arrays)
    return _LETTERS[:arrays], _LETTERS[arrays : arrays + stage.temporaries]


# --- All accumulators of a thread -------------------------------------------------------------------------------------
_BRANCH_OCTETS = 4  # octets between two branches, whose loads are in flight at once; ptxas would otherwise hoist all loads


@functools.cache
def _fragments_operation(octets: int, like: Like, plan: _Plan, interleaved: bool) -> Callable[..., Any]:
    ins = {"columns": "i32", "row_inside": "i32", "row_8_inside": "i32", "k": "i32", "offset": "i64", **dict(plan.ins)}
    lines = (_interleaved_lines if interleaved else _fragments_lines)(octets, like, plan)
    kind = "i32" if plan.integer else "f32"
    return device_op("epilogue_fragments", _naming_all(lines, ("acc", *ins)), inout={"acc": (kind, 4 * octets)}, ins=ins)


def _fragments_start(elements_8_rows: int, plan: _Plan, values: int) -> list[str]:
    """Declares registers for `values` numbers of each operand, and computes the operands' first addresses in both rows."""
    lines = [
        "{ .reg .pred column, row, row8, inside, inside8, q; .reg .b32 word; .reg .b16 low, high, zero;",
        *(f".reg .b64 at_{operand.name}, at8_{operand.name};" for operand in plan.arrays),
        plan.registers(values),
        "setp.ne.s32 row, $row_inside, 0; setp.ne.s32 row8, $row_8_inside, 0; mov.b16 zero, 0;",
    ]
    lines += [_address(f"at_{operand.name}", operand) for operand in plan.arrays]
    for operand in plan.like_y:
        row_8_bytes = elements_8_rows * dtype_of(operand.dtype).nbytes
        lines.append(f"add.s64 at8_{operand.name}, at_{operand.name}, {row_8_bytes};")
    return lines


def _inside(column: int, plan: _Plan) -> list[str]:
    """Computes whether a column is inside of y, and in which rows; leaves after the last one."""
    lines = [f"setp.gt.s32 column, $columns, {column};"]
    if column // 8 % _BRANCH_OCTETS == 0:
        lines.append("@!column bra done;")
    if plan.like_y:
        lines += ["and.pred inside, column, row;", "and.pred inside8, column, row8;"]
    return lines


def _fragments_lines(octets: int, like: Like, plan: _Plan) -> list[str]:
    lines = _fragments_start(like.elements_8_rows, plan, 4)
    for octet in range(octets):
        column = 8 * octet
        lines += _inside(column, plan)
        for stage in plan.stages:
            letters, temporaries = _letters(stage)
            for letter, operand in zip(letters, stage.arrays):
                at = _place(operand, column, like)
                if operand.axes == "y":
                    lines += _load([f"{letter}0", f"{letter}1"], "inside", f"at_{at}", operand.dtype)
                    lines += _load([f"{letter}2", f"{letter}3"], "inside8", f"at8_{at}", operand.dtype)
                else:
                    lines += _load_channels(letter, f"at_{at}", operand.dtype, like.order.step)
            for i in range(4):
                # Both rows share the operands of a channel.
                places = [i if operand.axes == "y" else i % 2 for operand in stage.arrays]
                arrays = [f"{letter}{place}" for letter, place in zip(letters, places)]
                lines.append(stage.text(f"$acc[{4 * octet + i}]", arrays, [f"{letter}{i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _interleaved_lines(octets: int, like: Like, plan: _Plan) -> list[str]:
    """Of each 16 columns a thread holds four neighbours: value e of octet o is number 2 e + o, in both rows."""
    lines = _fragments_start(like.elements_8_rows, plan, 8)
    for pair in range(octets // 2):
        column = 16 * pair
        lines += _inside(column, plan)
        for stage in plan.stages:
            letters, temporaries = _letters(stage)
            for letter, operand in zip(letters, stage.arrays):
                at = _place(operand, column, like)
                lines += _load_four(letter, 0, "inside" if operand.axes == "y" else "column", f"at_{at}")
                if operand.axes == "y":
                    lines += _load_four(letter, 4, "inside8", f"at8_{at}")
            for octet, i in ((octet, i) for octet in range(2) for i in range(4)):
                number, lower = 2 * (i % 2) + octet, 4 * (i // 2)
                places = [number + lower if operand.axes == "y" else number for operand in stage.arrays]
                arrays = [f"{letter}{place}" for letter, place in zip(letters, places)]
                value = f"$acc[{4 * (2 * pair + octet) + i}]"
                lines.append(stage.text(value, arrays, [f"{letter}{4 * octet + i}" for letter in temporaries]))
    return [*lines, "done: }"]


def _place(operand: EpilogueOperand, column: int, like: Like) -> str:
    """The operand's name, and the bytes from its first element to that of a column."""
    elements = like.offset(column) if operand.axes == "y" else like.order.offset(column)
    return f"{operand.name}+{elements * dtype_of(operand.dtype).nbytes}"


def _load_channels(letter: str, address: str, dtype: str, step: int) -> list[str]:
    """Loads what belongs to the channels of two columns, which are `step` apart; zeros where `column` is false."""
    if step == 1:
        return _load([f"{letter}0", f"{letter}1"], "column", address, dtype)
    further = f"{address}+{step * dtype_of(dtype).nbytes}"
    return _load([f"{letter}0"], "column", address, dtype) + _load([f"{letter}1"], "column", further, dtype)


def _load_four(letter: str, first: int, inside: str, address: str) -> list[str]:
    """Loads four neighbours of 32 bits; zeros where the predicate is false."""
    registers = [f"{letter}{first + i}" for i in range(4)]
    zeros = [f"mov.b32 {register}, 0;" for register in registers]
    return [*zeros, f"@{inside} ld.global.nc.v4.b32 {{{', '.join(registers)}}}, [{address}];"]


# --- The same where rows are channels -----------------------------------------------------------------------------------
_OCTET_BYTES = 8 * 128  # an octet of staged y has 128 bytes per position
_DIVISION_BITS = 20  # p // d == p * ceil(2**20 / d) >> 20 if p * d < 2**20


@functools.cache
def _transposed_operation(octets: int, tile: TileRows, plan: _Plan) -> Callable[..., Any]:
    ins = {
        "channels": "i32", "rows": "i32", "columns": "i32", "position": "i32", "staged": "u32", "k": "i32", "offset": "i64",
        **dict(plan.ins),
    }  # fmt: skip
    lines, kind = _transposed_lines(octets, tile, plan), "i32" if plan.integer else "f32"
    return device_op("epilogue_transposed", _naming_all(lines, ("acc", *ins)), inout={"acc": (kind, 4 * octets)}, ins=ins)


def _transposed_lines(octets: int, tile: TileRows, plan: _Plan) -> list[str]:
    vectors, kind = [operand for operand in plan.arrays if operand.axes == "K"], "b32" if plan.integer else "f32"
    lines = [
        "{ .reg .pred inside, inside8, more, q, in_tile, valid; .reg .b64 at, first; .reg .b16 low, high, zero;",
        f".reg .b32 word, w<4>, p, row, column, stop;{plan.registers(4)}",
        *(f".reg .{kind} {operand.name}_0, {operand.name}_1;" for operand in vectors),
        f"setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside8, $channels, {tile.second}; mov.b16 zero, 0;",
        f"mul.lo.s32 stop, $rows, {tile.patch_w};",
    ]
    for operand in vectors:
        lines.append(_address("at", operand))
        lines += _load([f"{operand.name}_0"], "inside", "at", operand.dtype)
        second = tile.second * tile.step * dtype_of(operand.dtype).nbytes
        lines += _load([f"{operand.name}_1"], "inside8", f"at+{second}", operand.dtype)
    lines += [_address("first", operand) for operand in plan.like_y if dtype_of(operand.dtype).nbytes == 4]
    for octet in range(octets):
        if octet % _BRANCH_OCTETS == 0:
            lines.append(f"setp.gt.s32 more, stop, {8 * octet}; @!more bra done;")
        for stage in plan.stages:
            letters, temporaries = _letters(stage)
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
            lines.append(f"mov.b32 {{low, high}}, w{first + pair};")
            registers = f"{letter}{2 * pair}", f"{letter}{2 * pair + 1}"
            lines += [_WIDEN[dtype].format(to=to, half=half) for to, half in zip(registers, ("low", "high"))]
        return lines
    for neighbour in range(2):
        lines += _address_of_position(8 * octet + neighbour, tile)
        for half, channel in enumerate(("inside", "inside8")):
            lines.append(f"and.pred valid, in_tile, {channel};")
            lines += _load([f"{letter}{2 * half + neighbour}"], "valid", f"at+{4 * tile.second * half}", dtype)
    return lines


def row_and_column(position: int, tile: TileRows) -> list[str]:
    """Computes the `row` and `column` of the thread's `position` in a tile, and whether it is `in_tile`; changes `p`."""
    return [
        f"add.s32 p, $position, {position}; mul.lo.s32 row, p, {-(-(2**_DIVISION_BITS) // tile.patch_w)};",
        f"shr.u32 row, row, {_DIVISION_BITS}; mad.lo.s32 column, row, {-tile.patch_w}, p;",
        "setp.lt.s32 in_tile, row, $rows; setp.lt.and.s32 in_tile, column, $columns, in_tile;",
    ]


def _address_of_position(position: int, tile: TileRows) -> list[str]:
    """Computes the address `at` of 32-bit values at the thread's `position` from `first`, and whether it is `in_tile`."""
    return [
        *row_and_column(position, tile),
        f"cvt.s64.s32 at, row; mad.lo.s64 at, at, {4 * tile.row_elements}, first;",
        f"mad.wide.s32 at, column, {4 * tile.pixel_elements}, at;",
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


# --- What all share --------------------------------------------------------------------------------------------------
def _naming_all(lines: Sequence[str], operands: Iterable[str]) -> str:
    """The text, followed by a comment with the operands that it does not use: an operation must name every operand."""
    text = "\n".join(lines)
    unused = set(operands) - set(re.findall(r"\$(\w+)", text))
    return text + " // unused: " + " ".join(f"${name}" for name in sorted(unused))


def _address(register: str, operand: EpilogueOperand) -> str:
    """Computes the address of the first element of an operand that the thread needs."""
    index, multiply = ("$offset", "mad.lo.s64") if operand.axes == "y" else ("$k", "mad.wide.s32")
    return f"{multiply} {register}, {index}, {dtype_of(operand.dtype).nbytes}, ${operand.name};"


def _load(registers: Sequence[str], inside: str, address: str, dtype: str) -> list[str]:
    """Loads one element, or two neighbours, as float32; zeros where the predicate `inside` is false.

    The non-coherent path lets loads move up past the stores of y. It is correct even if the residual is y itself, because
    only the thread that writes an element reads it, and it reads before it writes.
    """
    single = len(registers) == 1
    if dtype_of(dtype).nbytes == 4:
        vector, target = ("", registers[0]) if single else (".v2", f"{{{', '.join(registers)}}}")
        zeros = [f"mov.f32 {register}, 0f00000000;" for register in registers]
        return [*zeros, f"@{inside} ld.global.nc{vector}.f32 {target}, [{address}];"]
    if single:
        lines = [f"mov.b16 low, zero; @{inside} ld.global.nc.b16 low, [{address}];"]
    else:
        lines = [f"mov.b32 word, 0; @{inside} ld.global.nc.b32 word, [{address}]; mov.b32 {{low, high}}, word;"]
    return lines + [_WIDEN[dtype].format(to=register, half=half) for register, half in zip(registers, ("low", "high"))]
