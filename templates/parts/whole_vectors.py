"""Neighbouring elements of integer formats as int64 numbers in registers: `unpack` and `pack` of `vectors`, for integers.

Longer integers are cut to the last bits of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import i64, u32, u64


def unpack(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    """`unpack(words, at, wholes, to)`: `count` elements in words[at] ... as int64 to wholes[to] ..."""
    row = dtype_of(dtype)
    bits = 8 * row.nbytes
    per_word, mask = max(32 // bits, 1), 2 ** min(bits, 32) - 1
    sign = 2 ** (bits - 1) if row.kind == "int" and bits <= 32 else 0

    def unpack_long(words: Any, at: Any, wholes: Any, to: Any) -> None:
        for i in range(count):
            wholes[to + i] = i64(u64(words[at + 2 * i]) | u64(u64(words[at + 2 * i + 1]) << u64(32)))

    def unpack_parts(words: Any, at: Any, wholes: Any, to: Any) -> None:
        for i in range(count):
            part = i64(u32(u32(words[at + i // per_word]) >> u32(bits * (i % per_word))) & u32(mask))
            wholes[to + i] = i64(i64(part ^ i64(sign)) - i64(sign))

    return unpack_long if bits == 64 else unpack_parts


def pack(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    """`pack(wholes, at, words, to)`: the last bits of `count` int64 in wholes[at] ... into words[to] ..."""
    bits = 8 * dtype_of(dtype).nbytes
    per_word, mask = max(32 // bits, 1), 2 ** min(bits, 32) - 1
    words_out = max(count * bits // 32, 1)
    inside = min(per_word, count)

    def pack_long(wholes: Any, at: Any, words: Any, to: Any) -> None:
        for i in range(count):
            value = u64(wholes[at + i])
            words[to + 2 * i] = u32(value & u64(0xFFFFFFFF))
            words[to + 2 * i + 1] = u32(value >> u64(32))

    def pack_parts(wholes: Any, at: Any, words: Any, to: Any) -> None:
        for i in range(words_out):
            word = u32(0)
            for j in range(inside):
                part = u32(u32(u64(wholes[at + i * per_word + j]) & u64(mask)) << u32(bits * j))
                word = u32(word | part)
            words[to + i] = word

    return pack_long if bits == 64 else pack_parts
