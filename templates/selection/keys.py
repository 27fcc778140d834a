"""Numbers of any format as integers of the same order, from their bits, so that one kernel sorts them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.launch import NumbaArray
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import i64, u32

_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}
_FRACTION = {"float16": 10, "bfloat16": 7, "float32": 23}  # bits
INDEX_BITS = 31
LAST = (1 << 63) - 1  # comes after every pair of a key and an index


def key_bits(dtype: str) -> int:
    return 8 * dtype_of(dtype).nbytes


def words_of(name: str, dtype: str, size: int) -> NumbaArray:
    """An argument as the bits of its elements."""
    nbytes = dtype_of(dtype).nbytes
    return NumbaArray(name, _WORDS[nbytes], (size,), (nbytes,))


def key_of(dtype: str, descending: bool) -> Callable[[Any], Any]:
    """`key(word)` for kernels: a uint32 below 2^bits for each number of up to 32 bits, in their order or its reverse.

    Zeros of both signs have the same key. All NaNs have one, too, whatever their sign: they come after infinity.
    """
    kind, top, whole = dtype_of(dtype).kind, 1 << (key_bits(dtype) - 1), (1 << key_bits(dtype)) - 1
    turned = whole if descending else 0
    if_positive, if_negative = turned ^ top, turned ^ whole
    flipped = if_positive if kind == "int" else turned
    magnitude, infinity, of_nan = top - 1, top - (1 << _FRACTION.get(dtype, 0)), whole ^ turned

    def of_float(word: Any) -> Any:
        bits = u32(0) if word == top else u32(word)
        number = u32(bits ^ (if_negative if bits >= top else if_positive))
        return u32(of_nan) if u32(bits & u32(magnitude)) > infinity else number

    def of_integer(word: Any) -> Any:
        return u32(u32(word) ^ flipped)

    return of_float if kind == "float" else of_integer


def pair(key: Any, index: Any) -> Any:
    """A key and an index below 2^31 as one number: smaller keys first, then smaller indices."""
    return i64((i64(key) << INDEX_BITS) | i64(index))


def index_of(number: Any) -> Any:
    return i64(number & ((1 << INDEX_BITS) - 1))


def is_nonzero(dtype: str) -> Callable[[Any], Any]:
    """`holds(word)` for kernels: whether an element is not zero, of either sign."""
    row = dtype_of(dtype)
    mask = (1 << (8 * row.nbytes - 1)) - 1 if row.is_float else -1

    def holds(word: Any) -> Any:
        return (i64(word) & mask) != 0

    return holds
