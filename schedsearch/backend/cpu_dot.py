"""Register tiles of 32-bit integers for CPU kernels that multiply bytes.

A lane sums products of four unsigned bytes of x and four signed bytes of w. AVX512-VNNI and AVX-VNNI have an instruction
for it, vpdpbusd, whose sum of four products is exact. Other x86 processors use vpmaddwd on the even and on the odd bytes,
which is exact too; the shorter vpmaddubsw would saturate. Processors without either use plain multiplications.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD and PMADDWD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from schedsearch.backend.cpu_ops import TileOps, VectorTile, load_vector, spill_op, splat, zero_op
from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_FLIP = 0x80808080  # adds 128 to each byte of a word, modulo 256
QUAD = 4  # bytes in a lane
DOT_INSTRUCTIONS = ("vpdpbusd", "vpmaddwd", "plain")
_MADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def dot_instruction(features: Mapping[str, bool] | None = None) -> str:
    """The best of `DOT_INSTRUCTIONS` that a processor has.

    Args:
        features: LLVM's names of what the processor has; default: those of the processor at hand.

    Examples:
        >>> dot_instruction({"avx2": True, "sse2": True})
        'vpmaddwd'
    """
    found = llvm.get_host_cpu_features() if features is None else features
    if found.get("avxvnni") or (found.get("avx512vnni") and found.get("avx512vl")):
        return "vpdpbusd"
    return "vpmaddwd" if found.get("sse2") else "plain"


def _widest(instruction: str) -> int:
    """Lanes of the widest vector for which the processor at hand has the instruction."""
    has = llvm.get_host_cpu_features().get
    if has("avx512vnni") if instruction == "vpdpbusd" else has("avx512bw"):
        return 16
    return 8 if has("avx2") else 4


def dot_tile_ops(
    rows: int, columns: int, lanes: int, depth: int, *, x_row_bytes: int, flip_x: bool, x_sums: bool, instruction: str
) -> TileOps:
    """Operations on a tile of `rows` x `columns` vectors, each of `lanes` int32.

    tile[i, j, lane] += sum over b of x[i, d, b] * w[d, j, lane, b], for each step d and each of the four bytes b. Sums wrap
    modulo 2^32. The four unsigned bytes x[i, d] are at x + i * x_row_bytes + 4 * d, for all lanes. The signed bytes w[d, j]
    are at w + (d * columns + j) * lanes * 4. Nothing needs an alignment.

    Args:
        flip_x: x in memory is signed, and 128 is added to every byte of it.
        x_sums: the tile has one more column, whose lanes sum x itself.
        instruction: one of `DOT_INSTRUCTIONS`; the processor must have it.
    """
    width = columns + x_sums
    tile = VectorTile(rows * width, lanes, "int32")
    vector = ir.VectorType(_I32, lanes)
    dot = _dot(lanes, instruction)

    def make_multiply_add(depth: int) -> DeviceFunction:
        @intrinsic
        def multiply_add(typing_context: TypingContext, accumulators: types.Type, x: types.Type, w: types.Type) -> Typed:
            def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
                values = [builder.extract_value(args[0], i) for i in range(rows * width)]
                ones = [ir.Constant(vector, [0x01010101] * lanes)] * x_sums
                for d in range(depth):
                    at = d * columns * lanes * QUAD
                    weights = [load_vector(builder, args[2], at + j * lanes * QUAD, vector, 1) for j in range(columns)]
                    for i in range(rows):
                        word = load_vector(builder, args[1], i * x_row_bytes + d * QUAD, _I32, 1)
                        # Flipped before it is copied to all lanes: LLVM 22 does not end on a flipped vector of copies.
                        factor = splat(builder, builder.xor(word, _I32(_FLIP)) if flip_x else word, vector)
                        for j, weight in enumerate([*weights, *ones]):
                            place = i * width + j
                            values[place] = dot(builder, values[place], factor, weight)
                result = args[0]
                for i, value in enumerate(values):
                    result = builder.insert_value(result, value, i)
                return result

            return tile(tile, x, w), generate

        return multiply_add

    return TileOps(zero_op(tile), make_multiply_add(depth), make_multiply_add(1), spill_op(tile))


def byte_tile_ops(rows: int, columns: int, lanes: int, *, x_row_bytes: int, flip_x: bool) -> TileOps:
    """Operations on a tile of `rows` x `columns` vectors of `lanes` int32, elementwise: for depthwise convolutions.

    multiply_add(tile, x, w, w_zero): tile[i, j, lane] += x[i, j, lane] * (w[j, lane] - w_zero). The unsigned bytes x[i, j]
    are at x + i * x_row_bytes + j * lanes, the signed bytes w[j] at w + j * lanes; |w - w_zero| is less than 2^15.

    Args:
        flip_x: as in `dot_tile_ops`.
    """
    tile = VectorTile(rows * columns, lanes, "int32")
    bytes_, words, vector = (ir.VectorType(kind, lanes) for kind in (_I8, _I16, _I32))

    @intrinsic
    def multiply_add(
        typing_context: TypingContext, accumulators: types.Type, x: types.Type, w: types.Type, w_zero: types.Type
    ) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            w_zero = splat(builder, builder.trunc(args[3], _I16), words)
            weights = []
            for j in range(columns):
                weight = builder.sext(load_vector(builder, args[2], j * lanes, bytes_, 1), words)
                weights.append(builder.sext(builder.sub(weight, w_zero), vector))
            result = args[0]
            for i in range(rows):
                for j in range(columns):
                    value = load_vector(builder, args[1], i * x_row_bytes + j * lanes, bytes_, 1)
                    if flip_x:
                        value = builder.xor(value, ir.Constant(bytes_, [0x80] * lanes))
                    place = i * columns + j
                    product = builder.mul(builder.zext(value, vector), weights[j])
                    result = builder.insert_value(result, builder.add(builder.extract_value(args[0], place), product), place)
            return result

        return tile(tile, x, w, w_zero), generate

    return TileOps(zero_op(tile), multiply_add, multiply_add, spill_op(tile))


# (builder, sums, four unsigned bytes per lane, four signed bytes per lane) -> sums
_Dot = Callable[[Any, Any, Any, Any], Any]


def _dot(lanes: int, instruction: str) -> _Dot:
    if instruction == "plain" or lanes < 4:
        return _plain
    chunk = min(lanes, _widest(instruction))
    one = _vpdpbusd if instruction == "vpdpbusd" else _vpmaddwd

    def dot(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
        if chunk == lanes:
            return one(builder, sums, x, w)
        parts = []
        for start in range(0, lanes, chunk):
            places = ir.Constant(ir.VectorType(_I32, chunk), list(range(start, start + chunk)))
            parts.append(one(builder, *(builder.shuffle_vector(each, each, places) for each in (sums, x, w))))
        while len(parts) > 1:
            many = ir.VectorType(_I32, 2 * parts[0].type.count)
            places = ir.Constant(many, list(range(many.count)))
            parts = [builder.shuffle_vector(low, high, places) for low, high in zip(parts[::2], parts[1::2])]
        return parts[0]

    return dot


def _vpdpbusd(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    bits = 32 * sums.type.count
    kind = ir.FunctionType(sums.type, [sums.type] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.vpdpbusd.{bits}"), [sums, x, w]
    )


def _vpmaddwd(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    """The even bytes of x and w as 16-bit numbers, then the odd ones; each instruction adds two products to a lane."""
    lanes = sums.type.count
    halves = ir.VectorType(_I16, 2 * lanes)
    eight = ir.Constant(halves, [8] * halves.count)
    x, w = builder.bitcast(x, halves), builder.bitcast(w, halves)
    even = builder.and_(x, ir.Constant(halves, [0xFF] * halves.count)), builder.ashr(builder.shl(w, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(w, eight)
    madd = cgutils.get_or_insert_function(builder.module, ir.FunctionType(sums.type, [halves] * 2), _MADD[lanes])
    for pair in (even, odd):
        sums = builder.add(sums, builder.call(madd, pair))
    return sums


def _plain(builder: ir.IRBuilder, sums: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    def shift(bits: int) -> Any:
        return ir.Constant(sums.type, [bits] * sums.type.count)

    for byte in range(QUAD):
        unsigned = builder.lshr(builder.shl(x, shift(24 - 8 * byte)), shift(24))
        signed = builder.ashr(builder.shl(w, shift(24 - 8 * byte)), shift(24))
        sums = builder.add(sums, builder.mul(unsigned, signed))
    return sums
