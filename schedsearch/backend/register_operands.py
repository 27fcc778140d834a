"""Looks for a fault of ptxas in machine code of sm_90: a register that wgmma still reads is overwritten.

wgmma runs asynchronously. Where its first operand is in registers, they must stay as they are until the wait for its group.
ptxas before CUDA 13.3 is known to write to them earlier (https://github.com/triton-lang/triton/issues/11781). The result is
then wrong for some timings only, so that verification may miss it. It shows in the machine code.

An instruction has 16 bytes. NVIDIA does not document the encoding; what is here agrees with `nvdisasm`, which a test asks
where it is installed. An instruction that is not known to write less counts as one that writes four registers, and a call
as one that writes all: this may refuse a good kernel, and does not accept a bad one.

See docs/decisions/269-known-faults-of-ptxas.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from schedsearch.backend.elf import machine_code
from schedsearch.typed import Array

_OPCODE, _FAMILY = 0xFFF, 0x1FF  # the other three bits say where the last operand is
_FROM_REGISTERS = range(0xDF0, 0xDF4)  # HGMMA, IGMMA, BGMMA, QGMMA
_FROM_SHARED = range(0x9F0, 0x9F4)
_OPERAND_REGISTERS = 4
_NO_GROUP = 7
_WARPGROUP, _BRANCH = 0x9C5, 0x147
_NOWHERE = 0xFF  # RZ, which reads as zero

# Families that write no general register: predicates, uniform registers, memory, barriers, control.
_WRITE_NOTHING = frozenset(
    {
        0x004, 0x00B, 0x00C, 0x01C, 0x02A, 0x02D, 0x02E, 0x02F, 0x034, 0x044, 0x082, 0x086, 0x087, 0x08C, 0x090,
        0x091, 0x092, 0x096, 0x097, 0x099, 0x09C, 0x0A4, 0x0A5, 0x0B9, 0x0BD, 0x0CA, 0x118, 0x11A, 0x11D, 0x141,
        0x145, 0x146, 0x147, 0x148, 0x14D, 0x185, 0x186, 0x187, 0x188, 0x18E, 0x18F, 0x192, 0x1AB, 0x1AE, 0x1AF,
        0x1B2, 0x1B4, 0x1B5, 0x1B7, 0x1BA, 0x1C3, 0x1C5, 0x1C6,
    }
)  # fmt: skip
# MOV, P2R, VOTE, SEL, FSEL, FMNMX, IADD3, LEA, LOP3, IABS, PRMT, SHF, FMUL, FADD, FFMA, IMAD, IDP, IMAD.HI, HADD2, HFMA2,
# HMUL2, VIADD, F2FP, I2FP, VIADDMNMX, VIMNMX, FLO, BREV, F2I, I2F, MUFU, POPC, S2R, SHFL, SYNCS
_WRITE_ONE = frozenset(
    {
        0x002, 0x003, 0x006, 0x007, 0x008, 0x009, 0x010, 0x011, 0x012, 0x013, 0x016, 0x019, 0x020, 0x021, 0x023,
        0x024, 0x026, 0x027, 0x030, 0x031, 0x032, 0x036, 0x03E, 0x045, 0x046, 0x048, 0x100, 0x101, 0x105, 0x106,
        0x108, 0x109, 0x119, 0x189, 0x1A7,
    }
)  # fmt: skip
_WRITE_TWO = frozenset({0x005, 0x025, 0x028, 0x029, 0x02B})  # CS2R, IMAD.WIDE, DMUL, DADD, DFMA
_LOADS = frozenset({0x180, 0x181, 0x182, 0x183, 0x184})  # LD, LDG, LDC, LDL, LDS
_ANYWHERE = frozenset({0x143, 0x144, 0x149, 0x14A, 0x14C, 0x150})  # CALL, BRX, JMP, JMX, RET: to code that is not followed
_REGISTERS_OF_SIZE = {5: 2, 6: 4}  # 64 and 128 bits; smaller ones fill one register
_UNKNOWN = 4


class Overwritten(NamedTuple):
    """An instruction that writes to a register while wgmma may still read it.

    Attributes:
        entry: of the kernel.
        offset: of the instruction in it, in bytes.
        register: number of the register.
    """

    entry: str
    offset: int
    register: int

    def __str__(self) -> str:
        return f"R{self.register} at {self.offset:#x} of {self.entry}"


def count_from_registers(cubin: bytes) -> int:
    """How many wgmma instructions take their first operand from registers."""
    return sum(int(np.isin(_words(code)[0] & _OPCODE, _FROM_REGISTERS).sum()) for code in machine_code(cubin).values())


def overwritten(cubin: bytes) -> list[Overwritten]:
    """The instructions that write to an operand of wgmma before the wait for its group, in the order of the code."""
    found: dict[Overwritten, None] = {}
    for entry, code in machine_code(cubin).items():
        low, high = _words(code)
        if not np.isin(low & _OPCODE, _FROM_REGISTERS).any():
            continue
        instructions = list(zip(low.tolist(), high.tolist()))
        for at, register in _scan(instructions):
            found[Overwritten(entry, 16 * at, register)] = None
    return sorted(found)


def _words(code: bytes) -> tuple[Array, Array]:
    """The lower and the upper 64 bits of each instruction."""
    words = np.frombuffer(code, np.uint64).reshape(-1, 2)
    return words[:, 0], words[:, 1]


def _scan(instructions: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(instruction, register) of each early write.

    The code is read in its order, so that what a branch skips counts as executed. A loop whose operands are still read when
    it begins again is read a second time with them.
    """
    pending: list[set[int]] = []  # operands of each group under way, the oldest first
    open_group: set[int] = set()
    for at, (low, high) in enumerate(instructions):
        opcode = low & _OPCODE
        if opcode in _FROM_REGISTERS or opcode in _FROM_SHARED:
            if opcode in _FROM_REGISTERS:
                first = low >> 24 & 0xFF
                open_group |= set(range(first, first + _OPERAND_REGISTERS))
            if high >> 20 & 7 != _NO_GROUP:
                pending.append(open_group)
                open_group = set()
        elif (left := _groups_left(low, high)) is not None:
            pending = pending[len(pending) - left :] if 0 < left <= len(pending) else pending if left else []
        else:
            being_read = open_group.union(*pending)
            early = _written(low, high) & being_read if being_read else ()
            yield from ((at, register) for register in sorted(early))
            if being_read and (target := _backward_target(at, low, high)) is not None:
                yield from _early_writes(instructions, target, at, being_read)


def _early_writes(
    instructions: list[tuple[int, int]], first: int, last: int, being_read: set[int]
) -> Iterator[tuple[int, int]]:
    """Those of a loop that begins again while these registers are read, up to the first wait."""
    for at in range(max(0, first), last):
        low, high = instructions[at]
        if _groups_left(low, high) == 0:
            return
        if low & _OPCODE not in _FROM_REGISTERS and low & _OPCODE not in _FROM_SHARED:
            yield from ((at, register) for register in sorted(_written(low, high) & being_read))


def _groups_left(low: int, high: int) -> int | None:
    """How many groups may still run after WARPGROUP.DEPBAR.LE; None for other instructions."""
    is_wait = low & _OPCODE == _WARPGROUP and low >> 47 & 1
    return high >> 8 & 0xFF if is_wait else None


def _backward_target(at: int, low: int, high: int) -> int | None:
    """The instruction to which a branch goes back; None for others."""
    if low & _FAMILY != _BRANCH:
        return None
    upper = (low | high << 64) >> 34 & (1 << 48) - 1
    if upper < 1 << 47:
        return None
    words = (upper - (1 << 48) << 8) + (low >> 16 & 0xFF)  # of 4 bytes, from the next instruction on
    return at + 1 + words // 4


def _written(low: int, high: int) -> set[int]:
    """The general registers that an instruction writes, or may write."""
    family, first = low & _FAMILY, low >> 16 & 0xFF
    if family in _ANYWHERE:
        return set(range(_NOWHERE))
    if family in _WRITE_NOTHING or first == _NOWHERE:
        return set()
    if family in _LOADS:
        count = _REGISTERS_OF_SIZE.get(high >> 9 & 7, 1)
    else:
        count = 1 if family in _WRITE_ONE else 2 if family in _WRITE_TWO else _UNKNOWN
    return set(range(first, first + count))
