"""The fused epilogue of a convolution as one device operation: a short PTX text for each stage, in the workload's order.

It has forms for one value, for a pair of neighbouring channels, and for a thread's whole fragment of a wgmma tile whose
columns or rows are channels. `stages.STAGE_CODES` has the arithmetic of the stages. `epilogue_text` loads operands
and chains stages, and `epilogue_fragments` has the forms for fragments.

The forms are generated as PTX text, not written as Python functions that a kernel captures. An unrolled Python loop over
64 or more accumulators exceeds NVVM's unroll budget, and the accumulators then end up in memory. A device operation is
opaque to NVVM, and accumulators stay in registers. `StageCode.older` replaces instructions that need sm_80.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.launch import Param, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import computing
from schedsearch.ops.sum_of_products import FactorParams
from schedsearch.templates.parts.epilogue_fragments import (
    ChannelOrder,
    Like,
    TileRows,
    fragments_operation,
    load_ahead_operation,
    transposed_operation,
    words_ahead,
)
from schedsearch.templates.parts.epilogue_text import (
    EpiloguePlan,
    element_of_word,
    first_address,
    load_elements,
    registers_of,
)
from schedsearch.templates.parts.stages import EpilogueOperand, epilogue_operands
from schedsearch.workload import Workload


class Epilogue:
    """The stages after the accumulation in a CUDA kernel for `workload`.

    A kernel takes the operands as its last argument, `*operands`, and passes them on to the device operations below:
    `operation(..., *operands)`.

    Attributes:
        params: launch parameters of `*operands`: u64 addresses of arrays and f32 scalars, zeros for operands that the
            workload does not have.
        accumulator: int32 if the workload sums integers, else float32; the type of the registers of all operations.
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
        self._plan = EpiloguePlan.of(workload, self._operands, capability < (8, 0))
        self.accumulator = "int32" if self._plan.integer else "float32"
        self.identity = not computing(FactorParams.of(workload.params).epilogue)
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
        singly: bool = False,
        ahead: bool = False,
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

        With `singly`, k, offset and `columns` may be odd: operands are loaded one by one. `columns` then are those from the
        thread's first column on. It may also be so without `singly`, if they are even.

        If the operation is to get words `ahead`, and `words_ahead(octets, interleaved)` is not 0, its second argument is an
        array of so many i32, which `load_ahead` filled. Not with `singly`.
        """
        like = _like(octets, elements_8_rows, blocks, order)
        words = self.words_ahead(octets, interleaved) if ahead else 0
        return fragments_operation(octets, like, self._plan, interleaved, words, singly)

    def words_ahead(self, octets: int, interleaved: bool) -> int:
        """How many words of operands like y a thread may load before `fragments`: of those with 8 bits if the columns are
        interleaved, else of those with 16."""
        return words_ahead(octets, self._plan, interleaved)

    def load_ahead(
        self, octets: int, elements_8_rows: int, blocks: tuple[int, int] | None = None, interleaved: bool = True
    ) -> Callable[..., Any]:
        """A device operation that loads what `fragments` needs of operands like y: long before, it hides the latency.

        It takes (words[words_ahead], columns, row_inside, row_8_inside, k, offset, *operands), of which all but the first
        are those of `fragments`.
        """
        return load_ahead_operation(octets, _like(octets, elements_8_rows, blocks, None), self._plan, interleaved)

    def transposed(self, octets: int, tile: TileRows) -> Callable[..., Any]:
        """A device operation on a thread's fragment of a wgmma tile whose rows are channels: `octets` times 8 positions.

        It takes (accumulators[4 * octets], channels, rows, columns, position, staged, k, offset, *operands) and changes the
        accumulators in place. From each 8 positions the thread holds two neighbours in channel k, then the same two in
        channel k + `tile.second`. `channels` (i32) counts the channels from k to the last; their operands are read once.
        `rows` and `columns` (i32) count those of the tile that are inside of y. An operand like y

        - with 16 bits is read from shared memory, in the layout in which `stmatrix_x4_trans` stores y; `staged` is the
          lane's address for it;
        - with 32 bits or 8 is read from global memory: offset (i64) is the element offset of (the tile's first pixel, k),
          `position` (i32) the thread's first position.
        """
        return transposed_operation(octets, tile, self._plan)

    def stages_of_patch(self, channels: int, strides: tuple[int, int], held: bool = False) -> PatchStages:
        """The stages as lines of a larger operation on rows and columns of pixels.

        The operation has the operands k (i32), the first of `channels` channels, offset (i64), the element offset of the
        first pixel at this channel in y and in operands like y, and those of `PatchStages.ins`.

        Args:
            strides: elements from a row and from a column to the next.
            held: the operands of channels are in registers; see `PatchStages`.
        """
        return PatchStages(self._plan, channels, strides, held)


def _like(
    octets: int, elements_8_rows: int, blocks: tuple[int, int] | None, order: ChannelOrder | None
) -> Like:  # fmt: skip
    block, block_elements = blocks or (8 * octets, 0)
    return Like(elements_8_rows, block, block_elements, order or ChannelOrder(8 * octets, 1, 0))


class PatchStages:
    """Lines of PTX for pixels whose channels a thread holds in registers. Operands of a channel are loaded once.

    Attributes:
        ins: operand -> type of the operation that has these lines, in the order of a kernel's `*operands`.
        begin: lines before those of the first pixel. They declare registers a0 ..., word, low, high and zero.
        words: registers of the operands of channels, as they lie in memory: one for each element.
        load_words: lines that load them into `$words[0]`, `$words[1]`, ... of an operation with the operands k and `ins`. If
            they are held, that operation comes first, and `begin` takes them from its own `$words`.
    """

    def __init__(self, plan: EpiloguePlan, channels: int, strides: tuple[int, int], held: bool = False) -> None:
        self.ins = plan.ins
        self._plan, self._channels, self._strides = plan, channels, strides
        vectors = [operand for operand in plan.arrays if operand.axes == "K"]
        self.words = channels * len(vectors)
        self.load_words = ["{ .reg .b64 at;"]
        self.begin = [
            ".reg .pred always, q; .reg .b32 word; .reg .b16 low, high, zero; .reg .b64 at;",
            *(f".reg .b64 at_{operand.name};" for operand in plan.like_y),
            *(f".reg .{'b32' if plan.integer else 'f32'} {operand.name}_<{channels}>;" for operand in vectors),
            plan.registers(channels),
            "setp.eq.s32 always, $k, $k; mov.b16 zero, 0;",
            *(first_address(f"at_{operand.name}", operand) for operand in plan.like_y),
        ]
        for number, operand in enumerate(vectors):
            address, nbytes = first_address("at", operand), dtype_of(operand.dtype).nbytes
            self.begin += [] if held else [address]
            self.load_words.append(address)
            for i in range(channels):
                register, word = f"{operand.name}_{i}", f"$words[{number * channels + i}]"
                place = f"at+{i * nbytes}"
                self.load_words.append(f"ld.global.u{8 * nbytes} {word}, [{place}];")
                if held:
                    self.begin += element_of_word(register, word, operand.dtype)
                else:
                    self.begin += load_elements([register], "always", place, operand.dtype)
        self.load_words.append("}")

    def of_pixel(self, values: Sequence[str], row: int, column: int, inside: str) -> list[str]:
        """The stages on the channels of one pixel; nothing is read if the predicate `inside` is false."""
        elements = row * self._strides[0] + column * self._strides[1]
        lines = []
        for stage in self._plan.stages:
            letters, temporaries = registers_of(stage)
            for letter, operand in zip(letters, stage.arrays):
                size = dtype_of(operand.dtype).nbytes
                for i in range(self._channels if operand.axes == "y" else 0):
                    place = f"at_{operand.name}+{(elements + i) * size}"
                    lines += load_elements([f"{letter}{i}"], inside, place, operand.dtype)
            for i, value in enumerate(values):
                arrays = [
                    f"{letter}{i}" if operand.axes == "y" else f"{operand.name}_{i}"
                    for letter, operand in zip(letters, stage.arrays)
                ]
                lines.append(stage.text(value, arrays, [f"{letter}{i}" for letter in temporaries]))
        return lines


# --- One value, or a pair ---------------------------------------------------------------------------------------------
@functools.cache
def _operation(plan: EpiloguePlan, values: int) -> Callable[..., Any]:
    ins = {"valid": "i32", "k": "i32", "offset": "i64", **dict(plan.ins)}
    kind = "i32" if plan.integer else "f32"
    return device_op(
        "epilogue",
        "\n".join(_lines(plan, values)),
        ins={**{f"v{i}": kind for i in range(values)}, **ins},
        outs={f"y{i}": kind for i in range(values)},
        unused=ins,
        pure=plan.pure,
    )


def _lines(plan: EpiloguePlan, values: int) -> list[str]:
    """Operands are copied to local registers first and results are written last, so they may share registers."""
    kind = "b32" if plan.integer else "f32"
    lines = [
        "{ .reg .pred inside, q; .reg .b64 address; .reg .b32 word; .reg .b16 low, high, zero;",
        f".reg .{kind} t0, t1;{plan.registers(values)}",
        "setp.ne.s32 inside, $valid, 0; mov.b16 zero, 0;",
        *(f"mov.{kind} t{i}, $v{i};" for i in range(values)),
    ]
    for stage in plan.stages:
        letters, temporaries = registers_of(stage)
        for letter, operand in zip(letters, stage.arrays):
            lines.append(first_address("address", operand))
            lines += load_elements([f"{letter}{i}" for i in range(values)], "inside", "address", operand.dtype)
        for i in range(values):
            lines.append(stage.text(f"t{i}", [f"{x}{i}" for x in letters], [f"{x}{i}" for x in temporaries]))
    return [*lines, *(f"mov.{kind} $y{i}, t{i};" for i in range(values)), "}"]
