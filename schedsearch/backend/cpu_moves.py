"""What CPU kernels need to move data as fast as memory allows: elements of any size, runs, streams and transposed blocks.

Addresses are a base, which does not change in a loop, and an offset in bytes, so that LLVM sees how accesses follow one
another and can make vectors of them. Nothing needs an alignment. Memory that is read and memory that is written never
overlap; type-based alias analysis tells LLVM so.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_LINE_BYTES = 64


def move_op(nbytes: int) -> DeviceFunction:
    """An operation `move(y, y_at, x, x_at)` that copies one element of `nbytes` bytes from x + x_at to y + y_at."""
    kind = ir.IntType(8 * nbytes) if nbytes in (1, 2, 4, 8) else ir.VectorType(_I8, nbytes)

    @intrinsic
    def move(typing_context: TypingContext, y: types.Type, y_at: types.Type, x: types.Type, x_at: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            y, y_at, x, x_at = args
            _store(builder, y, y_at, _load(builder, x, x_at, kind))
            return context.get_dummy_value()

        return types.void(y, types.int64, x, types.int64), generate

    return move


def fill_op(nbytes: int, bits: int) -> DeviceFunction:
    """An operation `fill(y, y_at)` that writes an element of `nbytes` (1, 2, 4 or 8) with these bits."""

    @intrinsic
    def fill(typing_context: TypingContext, y: types.Type, y_at: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            _store(builder, args[0], args[1], ir.Constant(ir.IntType(8 * nbytes), bits))
            return context.get_dummy_value()

        return types.void(y, types.int64), generate

    return fill


@intrinsic
def copy_run(
    typing_context: TypingContext, y: types.Type, y_at: types.Type, x: types.Type, x_at: types.Type, nbytes: types.Type
) -> Typed:
    """Copies `nbytes` neighbours, as memcpy does."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        to, source = _at(builder, args[0], args[1]), _at(builder, args[2], args[3])
        cgutils.raw_memcpy(builder, to, source, args[4], 1)
        return context.get_dummy_value()

    return types.void(y, types.int64, x, types.int64, types.int64), generate


@intrinsic
def stream_line(typing_context: TypingContext, y: types.Type, y_at: types.Type, x: types.Type, x_at: types.Type) -> Typed:
    """Copies 64 bytes past the caches; y + y_at is a multiple of 64. `finish_streams` makes them visible."""
    kind = ir.VectorType(_I64, _LINE_BYTES // 8)

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        value = _load(builder, args[2], args[3], kind)
        pointer = builder.bitcast(_at(builder, args[0], args[1]), kind.as_pointer())
        stored = builder.store(value, pointer, align=_LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(y, types.int64, x, types.int64), generate


@intrinsic
def finish_streams(typing_context: TypingContext) -> Typed:
    """Waits until what `stream_line` wrote is visible to other threads: x86 does not order such stores by itself."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        if platform.machine() in ("x86_64", "AMD64"):
            fence = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence")
            builder.call(fence, [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def transpose_op(nbytes: int, size: int) -> DeviceFunction:
    """An operation `transpose(y, y_at, x, x_at, x_row, y_row)` on a block of `size` x `size` elements, in registers.

    Row i of x, `size` neighbours at x_at + i * x_row, becomes column i of y, whose rows are at y_at + j * y_row.

    Args:
        nbytes: of an element: 1, 2, 4 or 8.
        size: a power of two.
    """
    vector = ir.VectorType(ir.IntType(8 * nbytes), size)

    @intrinsic
    def transpose(
        typing_context: TypingContext,
        y: types.Type,
        y_at: types.Type,
        x: types.Type,
        x_at: types.Type,
        x_row: types.Type,
        y_row: types.Type,
    ) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            y, y_at, x, x_at, x_row, y_row = args
            rows = [_load(builder, x, _plus(builder, x_at, x_row, i), vector) for i in range(size)]
            for j, column in enumerate(_transposed(builder, rows)):
                _store(builder, y, _plus(builder, y_at, y_row, j), column)
            return context.get_dummy_value()

        return types.void(y, types.int64, x, types.int64, types.int64, types.int64), generate

    return transpose


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of vectors. Each round interleaves two vectors that are half of the square apart.

    After one round the rows of the upper half alternate with those of the lower one; after log2(size) rounds each vector is
    a column.
    """
    size = len(rows)
    word = ir.IntType(32)
    low = [word(i // 2 + i % 2 * size) for i in range(size)]
    high = [word(size // 2 + i // 2 + i % 2 * size) for i in range(size)]
    masks = [ir.Constant(ir.VectorType(word, size), places) for places in (low, high)]
    for _ in range(size.bit_length() - 1):
        half = size // 2
        rows = [builder.shuffle_vector(rows[i], rows[i + half], mask) for i in range(half) for mask in masks]
    return rows


def read_op(element: types.Type) -> DeviceFunction:
    """An operation `read(address, index)`: an element of an array that nothing writes while `write_op` writes another.

    LLVM makes vectors of loops with such reads and writes without looking at run time whether the arrays overlap.
    """

    @intrinsic
    def read(typing_context: TypingContext, address: types.Type, index: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            kind = context.get_data_type(element)
            index = context.cast(builder, args[1], signature.args[1], types.int64)
            array = builder.inttoptr(context.cast(builder, args[0], signature.args[0], types.int64), kind.as_pointer())
            value = builder.load(builder.gep(array, [index], inbounds=True))
            value.align = context.get_abi_sizeof(kind)
            return _tagged(builder, value, "read")

        return element(address, index), generate

    return read


def write_op(element: types.Type) -> DeviceFunction:
    """An operation `write(address, index, value)`: see `read_op`."""

    @intrinsic
    def write(typing_context: TypingContext, address: types.Type, index: types.Type, value: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            kind = context.get_data_type(element)
            index = context.cast(builder, args[1], signature.args[1], types.int64)
            array = builder.inttoptr(context.cast(builder, args[0], signature.args[0], types.int64), kind.as_pointer())
            stored = builder.store(
                context.cast(builder, args[2], signature.args[2], element), builder.gep(array, [index], inbounds=True)
            )
            stored.align = context.get_abi_sizeof(kind)
            _tagged(builder, stored, "written")
            return context.get_dummy_value()

        return types.void(address, index, value), generate

    return write


def _plus(builder: ir.IRBuilder, at: ir.Value, step: ir.Value, times: int) -> ir.Value:
    return builder.add(at, builder.mul(step, _I64(times)))


def _at(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(base, _I8.as_pointer()), [offset], inbounds=True)


def _load(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
    value = builder.load(builder.bitcast(_at(builder, base, offset), kind.as_pointer()))
    value.align = 1
    return _tagged(builder, value, "read")


def _store(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, value: ir.Value) -> None:
    stored = builder.store(value, builder.bitcast(_at(builder, base, offset), value.type.as_pointer()))
    stored.align = 1
    _tagged(builder, stored, "written")


def _tagged(builder: ir.IRBuilder, access: ir.Value, role: str) -> ir.Value:
    """Marks an access for type-based alias analysis: what is read is of another type than what is written."""
    module = builder.module
    root = module.add_metadata(["schedsearch moves"])
    kind = module.add_metadata([role, root, _I64(0)])
    access.set_metadata("tbaa", module.add_metadata([kind, kind, _I64(0)]))
    return access
