"""Loads of 8-bit and 16-bit elements from addresses that are not aligned to 16 bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op

ELEMENT_BYTES = 2
CHUNK = 8  # elements that a thread takes at once, 16 bytes


@functools.cache
def load_run(piece: int) -> Callable[..., Any]:
    """8 neighbouring 16-bit elements as four words, read in pieces of 1 or 2.

    It takes (address, first, stop) and reads only the elements [first, stop); the others are zero. For pieces of 2, both
    numbers are even.
    """
    lines = [f"{{ .reg .pred p<{CHUNK}>; .reg .b16 h<{CHUNK}>; .reg .b32 w<{CHUNK // 2}>;"]
    register, size = ("h", 16) if piece == 1 else ("w", 32)
    for number, element in enumerate(range(0, CHUNK, piece)):
        to = f"{register}{number}"
        lines.append(f"setp.gt.s32 p{element}, $stop, {element}; setp.le.and.s32 p{element}, $first, {element}, p{element};")
        lines.append(f"mov.b{size} {to}, 0; @p{element} ld.global.nc.b{size} {to}, [$address+{element * ELEMENT_BYTES}];")
    for number, word in enumerate("abcd"):
        lines.append(f"mov.b32 ${word}, {f'{{h{2 * number}, h{2 * number + 1}}}' if piece == 1 else f'w{number}'};")
    return device_op(
        "load_run",
        "\n".join([*lines, "}"]),
        ins={"address": "u64", "first": "i32", "stop": "i32"},
        outs=dict.fromkeys("abcd", "u32"),
    )


_JOIN = "prmt.b32 low, {0}, {1}, 0x0040; prmt.b32 high, {2}, {3}, 0x0040; prmt.b32 ${to}, low, high, 0x5410;"


@functools.cache
def load_run_of_bytes(piece: int) -> Callable[..., Any]:
    """16 neighbouring bytes as four words, read in pieces of 1, 2 or 4.

    It takes (address, first, stop, fill) and reads only the bytes [first, stop); the others are those of `fill`, a word of
    four equal bytes. For larger pieces, both numbers are multiples of the piece.
    """
    count = 16 // piece
    lines = [f"{{ .reg .pred p; .reg .b32 low, high, w<{count}>;"]
    for number in range(count):
        at = number * piece
        lines.append(f"setp.gt.s32 p, $stop, {at}; setp.le.and.s32 p, $first, {at}, p; mov.b32 w{number}, $fill;")
        load = {1: "u8", 2: "u16", 4: "b32"}[piece]
        lines.append(f"@p ld.global.nc.{load} w{number}, [$address+{at}];")
    for number, word in enumerate("abcd"):
        registers = [f"w{4 // piece * number + part}" for part in range(4 // piece)]
        if piece == 4:
            lines.append(f"mov.b32 ${word}, {registers[0]};")
        elif piece == 2:
            lines.append(f"prmt.b32 ${word}, {registers[0]}, {registers[1]}, 0x5410;")
        else:
            lines.append(_JOIN.format(*registers, to=word))
    return device_op(
        "load_run_of_bytes",
        "\n".join([*lines, "}"]),
        ins={"address": "u64", "first": "i32", "stop": "i32", "fill": "u32"},
        outs=dict.fromkeys("abcd", "u32"),
    )
