"""Register tiles for CPU kernels that sum a few taps of an image, and memory on the stack.

A tap is a place in memory at a fixed distance from where a vector of results begins, with a weight. Distances are constants
of the machine code, so a tap costs one load and one fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from schedsearch.backend.cpu_ops import load_vector, splat
from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)


def stack_memory(nbytes: int) -> DeviceFunction:
    """An operation `memory() -> address` of `nbytes` bytes on the stack, aligned to 64; the same ones in every call."""

    @intrinsic
    def memory(typing_context: TypingContext) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            with builder.goto_entry_block():  # Numba's alloca_once would store zeros, as one value that LLVM takes apart
                found = builder.alloca(ir.ArrayType(_I8, nbytes))
            found.align = 64
            return builder.ptrtoint(found, _I64)

        return types.int64(), generate

    return memory


@dataclass(frozen=True)
class MoveOps:
    """Copies of neighbouring numbers between an array of any float format and float32. Addresses are integers.

    Attributes:
        fetch: `fetch(array, numbers)`: from the array's format to float32.
        put: `put(numbers, array)`: from float32, rounded half to even.
    """

    fetch: DeviceFunction
    put: DeviceFunction


_STORED: dict[str, ir.Type] = {
    "float32": _F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16), "int8": _I8, "uint8": _I8,
}  # fmt: skip


def _as_float32(builder: ir.IRBuilder, value: ir.Value, dtype: str) -> ir.Value:
    """A vector of numbers as they are stored, as float32."""
    vector, words = (ir.VectorType(kind, value.type.count) for kind in (_F32, _I32))
    if dtype == "float16":
        return builder.fpext(value, vector)
    if dtype == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(value, words), words([16] * value.type.count)), vector)
    if dtype in ("int8", "uint8"):
        return builder.sitofp((builder.sext if dtype == "int8" else builder.zext)(value, words), vector)
    return value


def _by_vectors(builder: ir.IRBuilder, count: int, lanes: int, apply: Callable[[ir.Value, int], None]) -> None:
    """Calls `apply(first, width)` so that vectors of `lanes`, and shorter ones at the end, cover `count` numbers."""
    done = count - count % lanes
    if done == lanes:
        apply(_I64(0), lanes)
    elif done:
        with cgutils.for_range(builder, _I64(done // lanes)) as loop:
            apply(builder.mul(loop.index, _I64(lanes)), lanes)
    width = lanes // 2
    while done < count:
        if count - done >= width:
            apply(_I64(done), width)
            done += width
        else:
            width //= 2


def combine_op(dtype: str, lanes: int, count: int, *, largest: bool) -> DeviceFunction:
    """An operation `combine(array, numbers)` on addresses: adds each of `count` neighbours of an array of any format to the
    float32 at its place, or keeps the larger of both; NaN is larger than all."""
    stored = _STORED[dtype]
    nbytes = {_F32: 4, _I8: 1}.get(stored, 2)

    @intrinsic
    def combine(typing_context: TypingContext, array: types.Type, numbers: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            def apply(first: ir.Value, width: int) -> None:
                source = builder.add(args[0], builder.mul(first, _I64(nbytes)))
                target = builder.add(args[1], builder.mul(first, _I64(4)))
                value = _as_float32(builder, load_vector(builder, source, 0, ir.VectorType(stored, width), nbytes), dtype)
                before = load_vector(builder, target, 0, ir.VectorType(_F32, width))
                if largest:
                    is_nan = builder.fcmp_unordered("uno", value, value)
                    replaces = builder.or_(builder.fcmp_ordered(">", value, before), is_nan)
                    result = builder.select(replaces, value, before)
                else:
                    result = builder.fadd(before, value)
                _store_vector(builder, target, 0, result)

            _by_vectors(builder, count, lanes, apply)
            return context.get_dummy_value()

        return types.void(array, numbers), generate

    return combine


def move_ops(dtype: str, lanes: int, count: int, step: int = 1) -> MoveOps:
    """Operations for `count` numbers of float32, float16 or bfloat16, in vectors of `lanes` and shorter ones at the end.

    Args:
        step: 1, or 2: `fetch` takes every second number of the array and reads none beyond the last one that it takes, and
            `put` writes every second one and leaves those between them alone.
    """
    stored = _STORED[dtype]
    nbytes = 4 if dtype == "float32" else 2

    def fetch_vector(builder: ir.IRBuilder, array: ir.Value, numbers: ir.Value, width: int) -> None:
        words = ir.VectorType(_I32, width)
        memory = ir.VectorType(stored, width)
        value = load_vector(builder, array, 0, memory, nbytes)
        if step == 2 and width > 1:
            rest = load_vector(builder, builder.add(array, _I64((width - 1) * nbytes)), 0, memory, nbytes)
            places = [2 * i if 2 * i < width else 2 * i + 1 for i in range(width)]  # `rest` begins at number width - 1
            value = builder.shuffle_vector(value, rest, words(places))
        _store_vector(builder, numbers, 0, _as_float32(builder, value, dtype))

    def put_vector(builder: ir.IRBuilder, numbers: ir.Value, array: ir.Value, width: int) -> None:
        memory, words = ir.VectorType(stored, width), ir.VectorType(_I32, width)
        value = load_vector(builder, numbers, 0, ir.VectorType(_F32, width))
        if dtype == "float16":
            value = builder.fptrunc(value, memory)
        elif dtype == "bfloat16":
            half, one, least, nan = (words([number] * width) for number in (16, 1, 0x7FFF, 0x7FC0))
            bits = builder.bitcast(value, words)
            odd = builder.and_(builder.lshr(bits, half), one)
            rounded = builder.lshr(builder.add(builder.add(bits, least), odd), half)
            is_nan = builder.fcmp_unordered("uno", value, value)  # the carry of a NaN could be zero
            value = builder.trunc(builder.select(is_nan, nan, rounded), memory)
        if step == 2 and width > 1:
            _store_every_second(builder, array, value, nbytes)
        else:
            builder.store(value, _pointer(builder, array, 0, memory)).align = nbytes

    def make(move: Any, from_bytes: int, to_bytes: int) -> DeviceFunction:
        @intrinsic
        def operation(typing_context: TypingContext, source: types.Type, target: types.Type) -> Typed:
            def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
                def apply(first: ir.Value, width: int) -> None:
                    steps = (builder.mul(first, _I64(size)) for size in (from_bytes, to_bytes))
                    move(builder, *(builder.add(arg, step) for arg, step in zip(args, steps)), width)

                _by_vectors(builder, count, lanes, apply)
                return context.get_dummy_value()

            return types.void(source, target), generate

        return operation

    return MoveOps(make(fetch_vector, step * nbytes, 4), make(put_vector, 4, step * nbytes))


@dataclass(frozen=True)
class Tap:
    """Attributes:
    weight: index of its weight.
    offset: float32 elements from the place that belongs to a result.
    """

    weight: int
    offset: int


def correlate_op(
    taps: Sequence[Tap], lanes: int, vectors: int, tiles: int, *, x_step: int, broadcast: bool, more: bool
) -> DeviceFunction:
    """An operation `correlate(x, y, weights)` on addresses, for `tiles * vectors` vectors of `lanes` float32.

    The vector number i of y becomes the sum over taps of x[i * x_step + tap.offset] * weight. `vectors` of them are computed
    together, so that their additions overlap.

    Args:
        x_step: float32 elements between what neighbouring vectors read. Those of y follow one another.
        broadcast: a weight is one float32 for all lanes; otherwise it is a vector.
        more: adds the sums to what is at y.
    """
    vector = ir.VectorType(_F32, lanes)

    @intrinsic
    def correlate(typing_context: TypingContext, x: types.Type, y: types.Type, weights: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            fma = _fma(builder, vector)
            if broadcast:
                factors = [splat(builder, load_vector(builder, args[2], 4 * tap.weight, _F32), vector) for tap in taps]
            else:
                factors = [load_vector(builder, args[2], 4 * lanes * tap.weight, vector) for tap in taps]
            with cgutils.for_range(builder, _I64(tiles)) as loop:
                image = builder.add(args[0], builder.mul(loop.index, _I64(4 * vectors * x_step)))
                result = builder.add(args[1], builder.mul(loop.index, _I64(4 * vectors * lanes)))
                sums = [
                    load_vector(builder, result, 4 * lanes * i, vector) if more else ir.Constant(vector, None)
                    for i in range(vectors)
                ]
                for tap, factor in zip(taps, factors):
                    for i in range(vectors):
                        value = load_vector(builder, image, 4 * (i * x_step + tap.offset), vector)
                        sums[i] = builder.call(fma, [value, factor, sums[i]])
                for i, value in enumerate(sums):
                    _store_vector(builder, result, 4 * lanes * i, value)
            return context.get_dummy_value()

        return types.void(x, y, weights), generate

    return correlate


def reduce_op(
    taps: Sequence[Tap], lanes: int, full: int, part: int, *, x_steps: tuple[int, int], dy_row: int
) -> DeviceFunction:
    """An operation `reduce(x, dy, sums, rows)`, for three addresses and a number of rows.

    It adds the sum over all places of x[place + tap.offset] * dy[place] to the vector of `lanes` float32 at
    sums[tap.weight]. A row has `full` vectors of dy, and then one of which only the first `part` lanes are read.

    Args:
        x_steps: float32 elements of x from row to row, and from vector to vector. dy_row: of dy, from row to row.
    """
    vector = ir.VectorType(_F32, lanes)

    @intrinsic
    def reduce(typing_context: TypingContext, x: types.Type, dy: types.Type, sums: types.Type, rows: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            fma = _fma(builder, vector)
            totals = [cgutils.alloca_once(builder, vector) for _ in taps]
            for total in totals:
                builder.store(ir.Constant(vector, None), total)

            def add_products(image: object, gradient: object, count: int) -> None:
                factor = _load_part(builder, gradient, 0, vector, count)
                for tap, total in zip(taps, totals):
                    value = _load_part(builder, image, 4 * tap.offset, vector, count)
                    builder.store(builder.call(fma, [value, factor, builder.load(total)]), total)

            rows = context.cast(builder, args[3], signature.args[3], types.int64)
            with cgutils.for_range(builder, rows) as row:
                image = builder.add(args[0], builder.mul(row.index, _I64(4 * x_steps[0])))
                gradient = builder.add(args[1], builder.mul(row.index, _I64(4 * dy_row)))
                with cgutils.for_range(builder, _I64(full)) as loop:
                    add_products(
                        builder.add(image, builder.mul(loop.index, _I64(4 * x_steps[1]))),
                        builder.add(gradient, builder.mul(loop.index, _I64(4 * lanes))),
                        lanes,
                    )
                if part:
                    add_products(
                        builder.add(image, _I64(4 * full * x_steps[1])), builder.add(gradient, _I64(4 * full * lanes)), part
                    )
            for tap, total in zip(taps, totals):
                before = load_vector(builder, args[2], 4 * lanes * tap.weight, vector)
                _store_vector(builder, args[2], 4 * lanes * tap.weight, builder.fadd(before, builder.load(total)))
            return context.get_dummy_value()

        return types.void(x, dy, sums, rows), generate

    return reduce


def _fma(builder: ir.IRBuilder, vector: ir.VectorType) -> ir.Value:
    kind = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{vector.count}f32")


def _pointer(builder: ir.IRBuilder, base: ir.Value, offset_bytes: int, kind: ir.Type) -> ir.Value:
    pointer = builder.gep(builder.inttoptr(base, _I8.as_pointer()), [_I64(offset_bytes)])
    return builder.bitcast(pointer, kind.as_pointer())


def _store_vector(builder: ir.IRBuilder, base: ir.Value, offset_bytes: int, value: ir.Value) -> None:
    builder.store(value, _pointer(builder, base, offset_bytes, value.type)).align = 4


def _store_every_second(builder: ir.IRBuilder, base: ir.Value, value: ir.Value, nbytes: int) -> None:
    """Stores lane i at number 2 i of an array of numbers of `nbytes` bytes."""
    width, element = value.type.count, value.type.element
    wide, mask = ir.VectorType(element, 2 * width), ir.VectorType(ir.IntType(1), 2 * width)
    places = ir.Constant(ir.VectorType(_I32, 2 * width), [i // 2 for i in range(2 * width)])
    spread = builder.shuffle_vector(value, value, places)
    name = {"float": "f32", "half": "f16", "i16": "i16"}[str(element)]
    kind = ir.FunctionType(ir.VoidType(), [wide, wide.as_pointer(), _I32, mask])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{2 * width}{name}.p0")
    lanes = ir.Constant(mask, [1 - i % 2 for i in range(2 * width)])
    builder.call(store, [spread, _pointer(builder, base, 0, wide), _I32(nbytes), lanes])


def _load_part(builder: ir.IRBuilder, base: ir.Value, offset_bytes: int, vector: ir.VectorType, part: int) -> ir.Value:
    """The first `part` lanes; the others are zero, and their memory is not read."""
    if part == vector.count:
        return load_vector(builder, base, offset_bytes, vector)
    mask = ir.VectorType(ir.IntType(1), vector.count)
    kind = ir.FunctionType(vector, [vector.as_pointer(), _I32, mask, vector])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{vector.count}f32.p0")
    lanes = ir.Constant(mask, [int(lane < part) for lane in range(vector.count)])
    pointer = _pointer(builder, base, offset_bytes, vector)
    return builder.call(load, [pointer, _I32(4), lanes, ir.Constant(vector, None)])
