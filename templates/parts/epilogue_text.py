"""The stages of an epilogue as PTX text: what the device operations of `epilogue` and `epilogue_fragments` share.

An `EpiloguePlan` has the stages of a workload in order. An operation loads their operands into registers named a0, a1, ...,
b0, b1, ... and adds the text of each stage for each of its values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import computing
from schedsearch.ops.sum_of_products import FactorParams
from schedsearch.templates.parts.stages import (
    BYTES,
    STAGE_CODES,
    EpilogueOperand,
    format_limits,
    numeric_parameters,
    stage_inputs,
)
from schedsearch.workload import Workload

WIDEN = {  # 16-bit float -> float32, exact; cvt.f32.bf16 would need sm_90
    "float16": "cvt.f32.f16 {to}, {half};",
    "bfloat16": "mov.b32 {to}, {{zero, {half}}};",
}
_LETTERS = "abcdefgh"  # names of the registers for operands and temporaries of one stage


@dataclass(frozen=True)
class StageText:
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
class EpiloguePlan:
    """Everything that the text of a device operation depends on.

    Attributes:
        ins: operand -> type, in the order of `*operands`.
        integer: accumulators are 32-bit integers.
    """

    stages: tuple[StageText, ...]
    ins: tuple[tuple[str, str], ...]
    integer: bool = False

    @classmethod
    def of(cls, workload: Workload, operands: Sequence[EpilogueOperand], older: bool = False) -> EpiloguePlan:
        by_name = {operand.name: operand for operand in operands}
        stages, before = [], ""
        for stage, number in zip(computing(FactorParams.of(workload.params).epilogue), stage_inputs(workload)):
            code, of_integer = STAGE_CODES[stage.name], not dtype_of(number).is_float
            named = {scalar.name: f"${scalar.name}" for scalar in stage.kind.scalars}
            named |= {name: _literal(value) for name, value in numeric_parameters(stage).items()}
            named |= {name: _literal(float(value)) for name, value in format_limits(stage).items()}
            named |= {"int": dtype_of(number).ptx} if of_integer else {}
            arrays = tuple(by_name[operand.name] for operand in stage.kind.operands)
            if of_integer:
                text = (code.with_relu if stage.params.get("relu") else "") or (code.after_relu if before == "relu" else "")
                text = text or code.integer
            else:
                text = (code.older if older else "") or code.ptx
            before = stage.name
            stages.append(StageText(text, arrays, tuple(named.items()), code.temporaries))
        ins = tuple((operand.name, "u64" if operand.axes else "f32") for operand in operands)
        return cls(tuple(stages), ins, not dtype_of(FactorParams.of(workload.params).dtype).is_float)

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


def registers_of(stage: StageText) -> tuple[str, str]:
    """Names of the registers for the stage's arrays, and for its temporaries."""
    arrays = len(stage.arrays)
    return _LETTERS[:arrays], _LETTERS[arrays : arrays + stage.temporaries]


def first_address(register: str, operand: EpilogueOperand) -> str:
    """Computes the address of the first element of an operand that the thread needs."""
    index, multiply = ("$offset", "mad.lo.s64") if operand.axes == "y" else ("$k", "mad.wide.s32")
    return f"{multiply} {register}, {index}, {dtype_of(operand.dtype).nbytes}, ${operand.name};"


def load_elements(registers: Sequence[str], inside: str, address: str, dtype: str) -> list[str]:
    """Loads one element, or two neighbours; zeros where the predicate `inside` is false.

    16-bit floats become float32, 8-bit integers the numbers of `load_bytes`, elements of 32 bits stay as they are.

    The non-coherent path lets loads move up past the stores of y. It is correct even if the residual is y itself, because
    only the thread that writes an element reads it, and it reads before it writes.
    """
    single = len(registers) == 1
    if dtype in BYTES:
        return load_bytes(registers, inside, address, dtype)
    if dtype_of(dtype).nbytes == 4:
        vector, target = ("", registers[0]) if single else (".v2", f"{{{', '.join(registers)}}}")
        zeros = [f"mov.f32 {register}, 0f00000000;" for register in registers]
        return [*zeros, f"@{inside} ld.global.nc{vector}.f32 {target}, [{address}];"]
    if single:
        lines = [f"mov.b16 low, zero; @{inside} ld.global.nc.b16 low, [{address}];"]
    else:
        lines = [f"mov.b32 word, 0; @{inside} ld.global.nc.b32 word, [{address}]; mov.b32 {{low, high}}, word;"]
    return lines + [WIDEN[dtype].format(to=register, half=half) for register, half in zip(registers, ("low", "high"))]


def element_of_word(register: str, word: str, dtype: str) -> list[str]:
    """What `load_elements` makes of one element, from a register that has it as it lies in memory."""
    if dtype in BYTES:
        return [f"mov.b32 word, {word};", *bytes_of([register], "word", dtype)]
    if dtype_of(dtype).nbytes == 4:
        return [f"mov.b32 {register}, {word};"]
    return [f"mov.b32 {{low, high}}, {word};", WIDEN[dtype].format(to=register, half="low")]


def load_bytes(registers: Sequence[str], inside: str, address: str, dtype: str) -> list[str]:
    """Loads 1, 2 or 4 neighbouring 8-bit integers; any numbers where the predicate is false.

    The registers get float32 numbers: 2^23 more than a uint8, 2^23 + 128 more than an int8 (`stages.format_limits` has these
    bases). Their bits are 0x4B000000 and the byte, whose sign is flipped: one instruction makes them of a word.
    """
    count = len(registers)
    kind, word = {1: "u8", 2: "u16", 4: "b32"}[count], "word"
    return [f"mov.b32 {word}, 0; @{inside} ld.global.nc.{kind} {word}, [{address}];", *bytes_of(registers, word, dtype)]


def bytes_of(registers: Sequence[str], word: str, dtype: str) -> list[str]:
    """The numbers of `load_bytes` from the word that it loads; changes `word` if they are signed."""
    flipped = [f"xor.b32 {word}, {word}, 0x80808080;"] if dtype == "int8" else []
    return flipped + [f"prmt.b32 {register}, {word}, 0x4B000000, {0x7440 + n};" for n, register in enumerate(registers)]
