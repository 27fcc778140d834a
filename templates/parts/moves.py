"""Vectors of 1 to 16 bytes between registers, global and shared memory, and permutations of their bytes.

A vector is one, two or four words of 32 bits in a local array; 1 or 2 bytes are the lowest of a word. Each factory returns a
function for kernels, so that a kernel has one line for every width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op

_NAMES = "abcd"


def words_of(nbytes: int) -> int:
    """Words that hold a vector of `nbytes` bytes."""
    return max(nbytes // 4, 1)


@functools.cache
def load_global(nbytes: int, written: bool = False) -> Callable[..., None]:
    """`load(words, at, address, valid)` into words[at] ...; zeros if not `valid`. The kernel must not write the memory,
    unless it is `written`."""
    count, space = words_of(nbytes), "global" if written else "global.nc"
    zeros = " ".join(f"mov.b32 w{i}, 0;" for i in range(count))
    if nbytes < 4:
        read = f"@p ld.{space}.u{8 * nbytes} h, [$address]; @p cvt.u32.u16 w0, h;"
    else:
        read = f"@p ld.{space}.{_words(count, 'w', '0123')}, [$address];"
    results = " ".join(f"mov.b32 ${name}, w{i};" for i, name in enumerate(_NAMES[:count]))
    operation = device_op(
        f"load_{'written' if written else 'global'}_{nbytes}",
        f"{{ .reg .pred p; .reg .u16 h; .reg .b32 w<4>; setp.ne.s32 p, $valid, 0; {zeros} {read} {results} }}",
        ins={"address": "u64", "valid": "i32"},
        outs=dict.fromkeys(_NAMES[:count], "u32"),
    )

    def load_1(words: Any, at: Any, address: Any, valid: Any) -> None:
        words[at] = operation(address, valid)

    def load_2(words: Any, at: Any, address: Any, valid: Any) -> None:
        words[at], words[at + 1] = operation(address, valid)

    def load_4(words: Any, at: Any, address: Any, valid: Any) -> None:
        words[at], words[at + 1], words[at + 2], words[at + 3] = operation(address, valid)

    return {1: load_1, 2: load_2, 4: load_4}[count]


@functools.cache
def load_shared(nbytes: int) -> Callable[..., None]:
    """`load(words, at, shared)` into words[at] ..."""
    count = words_of(nbytes)
    if nbytes < 4:
        text = f"{{ .reg .u16 h; ld.shared.u{8 * nbytes} h, [$shared]; cvt.u32.u16 $a, h; }}"
    else:
        text = f"ld.shared.{_words(count, '$', _NAMES)}, [$shared];"
    operation = device_op(
        f"load_shared_{nbytes}",
        text,
        ins={"shared": "u32"},
        outs=dict.fromkeys(_NAMES[:count], "u32"),
    )

    def load_1(words: Any, at: Any, shared: Any) -> None:
        words[at] = operation(shared)

    def load_2(words: Any, at: Any, shared: Any) -> None:
        words[at], words[at + 1] = operation(shared)

    def load_4(words: Any, at: Any, shared: Any) -> None:
        words[at], words[at + 1], words[at + 2], words[at + 3] = operation(shared)

    return {1: load_1, 2: load_2, 4: load_4}[count]


@functools.cache
def store_global(nbytes: int, streaming: bool = False) -> Callable[..., None]:
    """`store(words, at, address)`. `streaming` marks the lines as the first to leave the caches (st.global.cs)."""
    return _store(nbytes, "global.cs" if streaming else "global", "u64")


@functools.cache
def store_shared(nbytes: int) -> Callable[..., None]:
    """`store(words, at, shared)`."""
    return _store(nbytes, "shared", "u32")


def _store(nbytes: int, space: str, pointer: str) -> Callable[..., None]:
    count = words_of(nbytes)
    if nbytes < 4:
        text = f"{{ .reg .u16 h; cvt.u16.u32 h, $a; st.{space}.u{8 * nbytes} [$address], h; }}"
    else:
        kind, registers = _words(count, "$", _NAMES).split(" ", 1)
        text = f"st.{space}.{kind} [$address], {registers};"
    operation = device_op(f"store_{nbytes}", text, ins={"address": pointer, **dict.fromkeys(_NAMES[:count], "u32")})

    def store_1(words: Any, at: Any, address: Any) -> None:
        operation(address, words[at])

    def store_2(words: Any, at: Any, address: Any) -> None:
        operation(address, words[at], words[at + 1])

    def store_4(words: Any, at: Any, address: Any) -> None:
        operation(address, words[at], words[at + 1], words[at + 2], words[at + 3])

    return {1: store_1, 2: store_2, 4: store_4}[count]


def _words(count: int, prefix: str, names: str) -> str:
    """Type and registers of an access to `count` words."""
    registers = ", ".join(prefix + name for name in names[:count])
    return f"b32 {registers}" if count == 1 else f"v{count}.b32 {{{registers}}}"


@functools.cache
def permute_bytes(selector: int) -> Callable[..., Any]:
    """`permute(a, b)`: hexadecimal digit i of the selector names byte i of the result, 0 to 3 of a or 4 to 7 of b."""
    return device_op(
        f"permute_{selector:04x}",
        f"prmt.b32 $result, $a, $b, 0x{selector:04x};",
        ins={"a": "u32", "b": "u32"},
        outs={"result": "u32"},
        pure=True,
    )
