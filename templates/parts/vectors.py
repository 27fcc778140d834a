"""Neighbouring elements of any format as float32 numbers in registers: loads that widen, stores that round once.

Elements go from memory to words of 32 bits (`load`), and from there to float32 (`unpack`). A kernel that issues several
loads before it unpacks the first has them in flight together. `pack` and `store` are the way back. Each factory returns a
function for kernels; words and numbers are in local arrays::

    load, unpack = vectors.load("float16", 8), vectors.unpack("float16", 8)
    pack, store = vectors.pack("float16", 8), vectors.store("float16", 8)

    def double(x, y):
        words, numbers = cuda.local.array(4, u32), cuda.local.array(8, f32)
        load(words, 0, x, 1)
        unpack(words, 0, numbers, 0)
        for i in range(8):
            numbers[i] *= 2
        pack(numbers, 0, words, 0)
        store(words, 0, y)

Formats: float16, bfloat16, float32, int8 and uint8. Integers round half to even and saturate; NaN becomes 0.

Source: PTX ISA, "Data Movement: cvt", "cvt.pack"; "Floating Point Instructions: max, ex2".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import moves, ptx
from schedsearch.templates.parts.casts import f32, i32, u32, u64

FORMATS = ("float16", "bfloat16", "float32", "int8", "uint8")
MOST_BYTES = 16  # of one access
LEAST_CAPABILITY = (8, 0)  # conversions to bfloat16, and max.NaN

float_of = device_op("float_of", "mov.b32 $value, $word;", ins={"word": "u32"}, outs={"value": "f32"}, pure=True)
bits_of = device_op("bits_of", "mov.b32 $word, $value;", ins={"value": "f32"}, outs={"word": "u32"}, pure=True)
nearest_integer = device_op(  # half to even; limited to int32
    "nearest_integer", "cvt.rni.s32.f32 $whole, $value;", ins={"value": "f32"}, outs={"whole": "i32"}, pure=True
)
larger = device_op(  # NaN if one of the two is
    "larger", "max.NaN.f32 $value, $a, $b;", ins={"a": "f32", "b": "f32"}, outs={"value": "f32"}, pure=True
)

power_of_two = device_op(  # within two units in the last place; results below 2^-126 become 0
    "power_of_two", "ex2.approx.ftz.f32 $power, $x;", ins={"x": "f32"}, outs={"power": "f32"}, pure=True
)

reciprocal = device_op(  # within one unit in the last place; 0 of infinity
    "reciprocal", "rcp.approx.ftz.f32 $value, $x;", ins={"x": "f32"}, outs={"value": "f32"}, pure=True
)


@functools.cache
def halves(dtype: str) -> Callable[[Any], Any]:
    """`halves(word)`: the two numbers of 16 bits in a word as float32, the lower one first."""
    if dtype == "bfloat16":  # the upper half of a float32
        text = "{ .reg .b32 w; shl.b32 w, $word, 16; mov.b32 $low, w; and.b32 w, $word, 0xffff0000; mov.b32 $high, w; }"
    else:
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, $word; cvt.f32.f16 $low, l; cvt.f32.f16 $high, h; }"
    return device_op(f"halves_{dtype}", text, ins={"word": "u32"}, outs={"low": "f32", "high": "f32"}, pure=True)


def words_of(dtype: str, count: int) -> int:
    """Words that hold `count` elements."""
    return max(count * dtype_of(dtype).nbytes // 4, 1)


def load(dtype: str, count: int, written: bool = False) -> Callable[[Any, Any, Any, Any], None]:
    """`load(words, at, address, valid)`: `count` neighbours into words[at] ..., zeros if not `valid`.

    The address is a multiple of the elements' bytes, or of 16 if there are more. The kernel must not write the memory,
    unless it is `written`.
    """
    nbytes = count * dtype_of(dtype).nbytes
    piece, pieces = min(nbytes, MOST_BYTES), max(nbytes // MOST_BYTES, 1)
    load_piece, words = moves.load_global(piece, written), moves.words_of(piece)

    def load(to: Any, at: Any, address: Any, valid: Any) -> None:
        for i in range(pieces):
            load_piece(to, at + i * words, u64(address + i * piece), i32(valid))

    return load


def store(dtype: str, count: int) -> Callable[[Any, Any, Any], None]:
    """`store(words, at, address)`: the reverse of `load`."""
    nbytes = count * dtype_of(dtype).nbytes
    piece, pieces = min(nbytes, MOST_BYTES), max(nbytes // MOST_BYTES, 1)
    store_piece, words = moves.store_global(piece), moves.words_of(piece)

    def store(source: Any, at: Any, address: Any) -> None:
        for i in range(pieces):
            store_piece(source, at + i * words, u64(address + i * piece))

    return store


def unpack(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    """`unpack(words, at, numbers, to)`: `count` elements in words[at] ... as float32 to numbers[to] ..."""
    per_word = 4 // dtype_of(dtype).nbytes
    sign, to_float = (0x80 if dtype == "int8" else 0), float_of

    def unpack_words(words: Any, at: Any, numbers: Any, to: Any) -> None:
        for i in range(count):
            numbers[to + i] = to_float(words[at + i])

    def unpack_bytes(words: Any, at: Any, numbers: Any, to: Any) -> None:
        for i in range(count):
            byte = i32((words[at + i // per_word] >> u32(8 * (i % per_word))) & u32(0xFF))
            numbers[to + i] = f32(i32((byte ^ sign) - sign))

    if per_word != 2:
        return unpack_words if per_word == 1 else unpack_bytes
    both, pairs = halves(dtype), count // 2

    def unpack_halves(words: Any, at: Any, numbers: Any, to: Any) -> None:
        for i in range(pairs):
            numbers[to + 2 * i], numbers[to + 2 * i + 1] = both(words[at + i])

    def unpack_half(words: Any, at: Any, numbers: Any, to: Any) -> None:
        numbers[to] = both(words[at])[0]

    return unpack_halves if pairs else unpack_half


def pack(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    """`pack(numbers, at, words, to)`: rounds `count` float32 in numbers[at] ... into words[to] ..."""
    if dtype == "float32":
        bits = bits_of

        def pack_words(numbers: Any, at: Any, words: Any, to: Any) -> None:
            for i in range(count):
                words[to + i] = bits(numbers[at + i])

        return pack_words
    if dtype_of(dtype).nbytes == 2:
        return _pack_halves(dtype, count)
    return _pack_bytes(dtype, count)


def _pack_halves(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    pair, pairs = ptx.pack_pair(dtype), count // 2

    def pack_halves(numbers: Any, at: Any, words: Any, to: Any) -> None:
        for i in range(pairs):
            words[to + i] = pair(numbers[at + 2 * i], numbers[at + 2 * i + 1])

    def pack_half(numbers: Any, at: Any, words: Any, to: Any) -> None:
        words[to] = pair(numbers[at], f32(0))

    return pack_halves if pairs else pack_half


def _pack_bytes(dtype: str, count: int) -> Callable[[Any, Any, Any, Any], None]:
    """Bytes that a short vector lacks are copies of its last one."""
    join, whole, words_out, last = ptx.pack_bytes(dtype), nearest_integer, words_of(dtype, count), count - 1

    def pack_bytes(numbers: Any, at: Any, words: Any, to: Any) -> None:
        for i in range(words_out):
            words[to + i] = join(
                whole(numbers[at + min(4 * i, last)]),
                whole(numbers[at + min(4 * i + 1, last)]),
                whole(numbers[at + min(4 * i + 2, last)]),
                whole(numbers[at + min(4 * i + 3, last)]),
            )

    return pack_bytes
