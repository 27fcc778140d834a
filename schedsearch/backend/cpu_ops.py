"""What CPU kernels need beyond plain Python: arrays at an address, and tiles of vectors that stay in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import populate_array

from schedsearch.ops.dtypes import dtype as dtype_row
from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

_F32 = ir.FloatType()


@intrinsic
def as_array(typing_context: TypingContext, address: types.Type, shape: types.Type, dtype: types.Type) -> Typed:
    """The C-contiguous array of `shape` (a tuple of ints) and `dtype` (a Numba type) at `address` (an integer).

    No reference is counted and nothing is allocated.
    """
    array = types.Array(dtype.dtype if isinstance(dtype, types.NumberClass) else dtype, len(shape), "C")
    signature = array(address, shape, dtype)

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        word = context.get_value_type(types.intp)
        itemsize = ir.Constant(word, context.get_abi_sizeof(context.get_data_type(array.dtype)))
        extents = [
            context.cast(builder, value, kind, types.intp)
            for value, kind in zip(cgutils.unpack_tuple(builder, args[1]), signature.args[1])
        ]
        strides: list[ir.Value] = []
        stride = itemsize
        for extent in reversed(extents):
            strides.insert(0, stride)
            stride = builder.mul(stride, extent, flags=["nsw"])
        result = context.make_array(array)(context, builder)
        populate_array(
            result,
            data=builder.inttoptr(args[0], result.data.type),
            shape=extents,
            strides=strides,
            itemsize=itemsize,
            meminfo=None,
        )
        return result._getvalue()

    return signature, generate


_ELEMENTS: dict[str, ir.Type] = {"float32": _F32, "int32": ir.IntType(32)}


class VectorTile(types.Type):
    """Numba type of `count` vectors of `lanes` lanes of float32 or int32, held in registers as one value."""

    def __init__(self, count: int, lanes: int, element: str = "float32") -> None:
        self.count, self.lanes, self.element = count, lanes, element
        super().__init__(name=f"VectorTile({count} x {lanes} {element})")

    @property
    def vector(self) -> ir.VectorType:
        """LLVM's type of one vector."""
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


@register_model(VectorTile)
class _VectorTileModel(models.PrimitiveModel):
    def __init__(self, manager: object, kind: VectorTile) -> None:
        super().__init__(manager, kind, ir.ArrayType(kind.vector, kind.count))


@dataclass(frozen=True)
class TileOps:
    """Operations on a register tile. A kernel can call each of them.

    Attributes:
        zero: `zero() -> tile`.
        multiply_add: `multiply_add(tile, x, w) -> tile` for `depth` steps of the reduction, from integer addresses x, w:
            tile[i, j] += x[i, d] * w[d, j] for every d < depth, as fused multiply-adds.
        multiply_add_one: the same with depth 1, for the remainder.
        spill: `spill(tile) -> address` of a (rows, columns * lanes) copy on the stack, valid until the next spill.
    """

    zero: DeviceFunction
    multiply_add: DeviceFunction
    multiply_add_one: DeviceFunction
    spill: DeviceFunction


def tile_ops(
    rows: int, columns: int, lanes: int, depth: int, *, x_row_bytes: int, x_depth_bytes: int, broadcast: bool
) -> TileOps:
    """Operations on a tile of `rows` x `columns` vectors, each of `lanes` float32.

    With `broadcast`, x[i, d] is one float at x + i * x_row_bytes + d * x_depth_bytes for all lanes: an outer product.
    Without, it is a vector per column, x[i, d, j] at + j * lanes * 4 bytes: an elementwise product (depthwise convolution).
    w[d, j] is the vector at w + (d * columns + j) * lanes * 4 bytes. Vectors only need an alignment of 4 bytes.
    """
    tile = VectorTile(rows * columns, lanes)
    vector = ir.VectorType(_F32, lanes)
    vector_bytes = 4 * lanes

    def make_multiply_add(depth: int) -> DeviceFunction:
        @intrinsic
        def multiply_add(typing_context: TypingContext, accumulators: types.Type, x: types.Type, w: types.Type) -> Typed:
            def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
                fma = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
                )
                values = [builder.extract_value(args[0], i) for i in range(rows * columns)]
                for d in range(depth):
                    weights = [
                        load_vector(builder, args[2], (d * columns + j) * vector_bytes, vector) for j in range(columns)
                    ]
                    for i in range(rows):
                        at = i * x_row_bytes + d * x_depth_bytes
                        if broadcast:
                            factors = [splat(builder, load_vector(builder, args[1], at, _F32), vector)] * columns
                        else:
                            factors = [load_vector(builder, args[1], at + j * vector_bytes, vector) for j in range(columns)]
                        for j in range(columns):
                            place = i * columns + j
                            values[place] = builder.call(fma, [factors[j], weights[j], values[place]])
                result = args[0]
                for i, value in enumerate(values):
                    result = builder.insert_value(result, value, i)
                return result

            return tile(tile, x, w), generate

        return multiply_add

    return TileOps(zero_op(tile), make_multiply_add(depth), make_multiply_add(1), spill_op(tile))


def zero_op(tile: VectorTile) -> DeviceFunction:
    """`zero() -> tile` for `TileOps`."""

    @intrinsic
    def zero(typing_context: TypingContext) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            return ir.Constant(context.get_value_type(tile), None)

        return tile(), generate

    return zero


def spill_op(tile: VectorTile) -> DeviceFunction:
    """`spill(tile) -> address` for `TileOps`."""

    @intrinsic
    def spill(typing_context: TypingContext, accumulators: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            memory = cgutils.alloca_once(builder, ir.ArrayType(tile.vector, tile.count))
            memory.align = 64
            for i in range(tile.count):
                value = builder.extract_value(args[0], i)
                builder.store(value, cgutils.gep_inbounds(builder, memory, 0, i)).align = 4
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(tile), generate

    return spill


def load_vector(builder: ir.IRBuilder, base: ir.Value, offset_bytes: int, kind: ir.Type, alignment: int = 4) -> ir.Value:
    """Loads an LLVM value from an integer address; for the bodies of operations."""
    pointer = builder.inttoptr(base, ir.IntType(8).as_pointer())
    pointer = builder.gep(pointer, [ir.Constant(ir.IntType(64), offset_bytes)])
    value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    value.align = alignment
    return value


def splat(builder: ir.IRBuilder, value: ir.Value, vector: ir.VectorType) -> ir.Value:
    """The vector that has `value` in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, first, zeros)


@intrinsic
def round_to_even(typing_context: TypingContext, value: types.Type) -> Typed:
    """The nearest integer of a float32, as a float32; halves round to the even neighbour."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        kind = ir.FunctionType(_F32, [_F32])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.roundeven.f32"), args)

    return types.float32(types.float32), generate


@intrinsic
def rounded_product(typing_context: TypingContext, a: types.Type, b: types.Type) -> Typed:
    """The product of two float32, rounded: never fused with an addition, as other products in kernels may be."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        return builder.fmul(*args, flags=("nsz",))  # an operation with flags gets no others, such as `contract`

    return types.float32(types.float32, types.float32), generate


@intrinsic
def times_power_of_two(typing_context: TypingContext, value: types.Type, shifted: types.Type) -> Typed:
    """value * 2^n for float32 numbers, where `shifted` is 1.5 * 2^23 + n and the result is a normal number."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        word = ir.IntType(32)
        exponent = builder.shl(builder.bitcast(args[1], word), word(23))
        power = builder.bitcast(builder.add(exponent, word(0x3F800000)), _F32)
        return builder.fmul(args[0], power)

    return types.float32(types.float32, types.float32), generate


def widen_op(name: str) -> DeviceFunction:
    """An operation `widen(bits) -> float32` for a number of a 16-bit float format, given as uint16."""

    @intrinsic
    def widen(typing_context: TypingContext, bits: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            if name == "float16":
                return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)
            return _float_of_bits(builder, args[0], name)

        return types.float32(types.uint16), generate

    return widen


def narrow_op(name: str) -> DeviceFunction:
    """An operation `narrow(value) -> uint16`: a float32, rounded half to even to a 16-bit float format, as its bits."""

    @intrinsic
    def narrow(typing_context: TypingContext, value: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            short = ir.IntType(16)
            if name == "float16":
                return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), short)
            bits = builder.bitcast(args[0], ir.IntType(32))
            odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
            rounded = builder.lshr(builder.add(builder.add(bits, bits.type(0x7FFF)), odd), bits.type(16))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])  # the carry of a NaN with a full payload would be zero
            return builder.trunc(builder.select(is_nan, bits.type(0x7FC0), rounded), short)

        return types.uint16(types.float32), generate

    return narrow


_WIDE = {"float64": ir.DoubleType(), "int64": ir.IntType(64)}


def load_op(name: str) -> DeviceFunction:
    """An operation `load(address)` that reads one number of a dtype at an integer address.

    Returns:
        An operation whose result is float64 for a float format and int64 for an integer format.
    """
    row = dtype_row(name)
    stored = {"half": ir.HalfType(), "float": _F32, "double": ir.DoubleType()}.get(row.llvm) or ir.IntType(8 * row.nbytes)
    result = types.float64 if row.is_float else types.int64

    @intrinsic
    def load(typing_context: TypingContext, address: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            value = builder.load(builder.inttoptr(args[0], stored.as_pointer()))
            if not row.is_float:
                extend = builder.sext if row.kind == "int" else builder.zext
                return value if row.nbytes == 8 else extend(value, ir.IntType(64))
            value = _float_of_bits(builder, value, name)
            return value if name == "float64" else builder.fpext(value, ir.DoubleType())

        return result(address), generate

    return load


def _float_of_bits(builder: ir.IRBuilder, value: ir.Value, name: str) -> ir.Value:
    """Turns the bits of a format that LLVM lacks into a half or float; returns other values unchanged."""
    half, bits = ir.HalfType(), ir.IntType(16)
    if name == "bfloat16":
        wide = builder.zext(value, ir.IntType(32))
        return builder.bitcast(builder.shl(wide, wide.type(16)), _F32)
    if name == "float8_e5m2":  # the upper half of a float16
        return builder.bitcast(builder.shl(builder.zext(value, bits), bits(8)), half)
    if name == "float8_e4m3":  # its bits, shifted into a float16, mean the number times 2 ** -8; all ones are NaN
        wide = builder.zext(value, bits)
        magnitude = builder.and_(wide, bits(0x7F))
        sign = builder.shl(builder.and_(wide, bits(0x80)), bits(8))
        shifted = builder.bitcast(builder.or_(sign, builder.shl(magnitude, bits(7))), half)
        number = builder.fmul(builder.fpext(shifted, _F32), _F32(256.0))
        return builder.select(builder.icmp_unsigned("==", magnitude, bits(0x7F)), _F32(float("nan")), number)
    return value


def store_op(wide: str) -> DeviceFunction:
    """An operation `store(address, value)` that writes a float64 or an int64."""
    kind = _WIDE[wide]

    @intrinsic
    def store(typing_context: TypingContext, address: types.Type, value: types.Type) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()))
            return context.get_dummy_value()

        return types.void(address, getattr(types, wide)), generate

    return store


@intrinsic
def note_index(typing_context: TypingContext, address: types.Type, place: types.Type, index: types.Type) -> Typed:
    """Notes a wrong index in two words, unless something is noted there already; see `schedsearch.ops.wrong_index`."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        word = ir.IntType(64)
        first = builder.inttoptr(args[0], word.as_pointer())
        changed = builder.extract_value(builder.cmpxchg(first, word(0), args[1], "monotonic"), 1)
        with builder.if_then(changed, likely=False):
            builder.store(args[2], builder.gep(first, [word(1)]))
        return context.get_dummy_value()

    return types.void(address, types.int64, types.int64), generate


@intrinsic
def unknown(typing_context: TypingContext, value: types.Type) -> Typed:
    """The same int64, which LLVM does not know: it then makes vectors of a short loop, instead of taking it apart first."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        word = ir.IntType(64)
        value = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.asm(ir.FunctionType(word, [word]), "", "=r,0", [value], side_effect=False)

    return types.int64(value), generate


def constant(value: int) -> DeviceFunction:
    """An operation `constant() -> i64` that always returns `value`."""

    @intrinsic
    def constant(typing_context: TypingContext) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            return ir.Constant(ir.IntType(64), value)

        return types.int64(), generate

    return constant
