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


load_four_bytes = device_op(  # from four addresses, as one word; the byte of a negative position is that of `fill`
    "load_four_bytes",
    "{ .reg .pred p; .reg .b64 at; .reg .b32 low, high, b<4>;\n"
    + "\n".join(
        f"setp.ge.s32 p, $position{i}, 0; cvt.s64.s32 at, $position{i}; add.s64 at, at, $row; mov.b32 b{i}, $fill; "
        f"@p ld.global.nc.u8 b{i}, [at];"
        for i in range(4)
    )
    + _JOIN.format("b0", "b1", "b2", "b3", to="word")
    + " }",
    ins={"row": "u64", **{f"position{i}": "i32" for i in range(4)}, "fill": "u32"},
    outs={"word": "u32"},
)

load_halves = device_op(  # two elements from two addresses as one word; an invalid element is zero and is not read
    "load_halves",
    "{ .reg .pred p, q; .reg .b16 l, h; setp.ne.s32 p, $low, 0; setp.ne.s32 q, $high, 0; mov.b16 l, 0; mov.b16 h, 0; "
    "@p ld.global.nc.b16 l, [$low_address]; @q ld.global.nc.b16 h, [$high_address]; mov.b32 $word, {l, h}; }",
    ins={"low_address": "u64", "low": "i32", "high_address": "u64", "high": "i32"},
    outs={"word": "u32"},
)
