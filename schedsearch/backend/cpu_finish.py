"""The end of a CPU kernel that has its sums in vector registers: stages on whole vectors, and the stores.

A stage is a function `stage(math, value, operands) -> value` of vectors of float32. It names operations of `VectorMath`, so
that whoever writes one needs to know nothing of LLVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from schedsearch.backend.cpu_ops import VectorTile, load_vector, splat
from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_CONTRACT = ("contract", "nsz")  # as all of a kernel's arithmetic
_LOG2_E = 1.4426950408889634
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4
# e^r for |r| <= ln(2) / 2, from r^2 / 2 on. Source: Cephes, expf.c (Moshier).
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LEAST, _EXP_MOST = -104.0, 88.8  # below is 0, above infinity


class VectorMath:
    """Arithmetic of vectors of float32; comparisons give vectors of truths. Every operation keeps NaN if it should."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self._builder, self.vector, self._words = builder, ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)
        self._lanes = lanes

    def number(self, value: float) -> Any:
        """The same number in all lanes."""
        return ir.Constant(self.vector, [float(value)] * self._lanes)

    def add(self, a: Any, b: Any) -> Any:
        return self._builder.fadd(a, b, flags=_CONTRACT)

    def subtract(self, a: Any, b: Any) -> Any:
        return self._builder.fsub(a, b, flags=_CONTRACT)

    def multiply(self, a: Any, b: Any) -> Any:
        return self._builder.fmul(a, b, flags=_CONTRACT)

    def divide(self, a: Any, b: Any) -> Any:
        return self._builder.fdiv(a, b, flags=("nsz",))

    def less(self, a: Any, b: Any) -> Any:
        """False where one is NaN."""
        return self._builder.fcmp_ordered("<", a, b)

    def where(self, truths: Any, a: Any, b: Any) -> Any:
        return self._builder.select(truths, a, b)

    def larger(self, a: Any, least: Any) -> Any:
        """`a`, but `least` where it is less; NaN stays."""
        return self.where(self.less(a, least), least, a)

    def smaller(self, a: Any, most: Any) -> Any:
        return self.where(self.less(most, a), most, a)

    def exp(self, a: Any) -> Any:
        """e^a, with an error of two units in the last place at most."""
        builder, words = self._builder, self._words
        x = self.smaller(self.larger(a, self.number(_EXP_LEAST)), self.number(_EXP_MOST))
        kind = ir.FunctionType(self.vector, [self.vector])
        nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.roundeven.v{self._lanes}f32")
        power = builder.call(nearest, [self.multiply(x, self.number(_LOG2_E))])
        rest = self.subtract(x, self.multiply(power, self.number(_LN_2_HIGH)))
        rest = self.subtract(rest, self.multiply(power, self.number(_LN_2_LOW)))
        found = self.number(_EXP_POLYNOMIAL[0])
        for factor in _EXP_POLYNOMIAL[1:]:
            found = self.add(self.multiply(found, rest), self.number(factor))
        found = self.add(self.multiply(found, self.multiply(rest, rest)), self.add(rest, self.number(1.0)))
        whole = builder.fptosi(power, words)
        half = builder.ashr(whole, words([1] * self._lanes))
        for part in (half, builder.sub(whole, half)):  # 2^power itself may be no normal number
            bits = builder.shl(builder.add(part, words([127] * self._lanes)), words([23] * self._lanes))
            found = builder.fmul(found, builder.bitcast(bits, self.vector))
        found = self.where(self.less(self.number(_EXP_MOST), a), self.number(math.inf), found)
        return self.where(builder.fcmp_unordered("uno", a, a), a, found)


Stage = Callable[[VectorMath, Any, Sequence[Any]], Any]


@dataclass(frozen=True)
class StageOperand:
    """What a stage takes beside its value.

    Attributes:
        kind: channels: an array of float32 for each channel; elements: one like y; scalar: a float32; constant.
        index: of an array's address or a scalar among the kernel's `*operands`.
        value: of a constant.
    """

    kind: Literal["channels", "elements", "scalar", "constant"]
    index: int = 0
    value: float = 0.0


Stages = Sequence[tuple[Stage, tuple[StageOperand, ...]]]


def finish_op(
    stages: Stages,
    pixels: int,
    lanes: int,
    channels: int,
    pixel_stride: int,
) -> DeviceFunction:
    """An operation `finish(sums, y, at, k, operands)`: applies the stages to a tile of `pixels` rows and stores float32.

    Args:
        stages: with their operands.
        lanes: of a vector.
        channels: of a row that are stored; those beyond are left out, and their memory is neither read nor written.
        pixel_stride: elements of y from row to row.

    The operation takes the sums, as a `VectorTile` or as the address of its vectors in memory; the address of y; the element
    of y where the first row's first channel lies; that channel's number; and the kernel's tuple of operands.
    """

    @intrinsic
    def finish(
        typing_context: TypingContext, sums: types.Type, y: types.Type, at: types.Type, k: types.Type, operands: types.Type
    ) -> Typed:
        def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
            tile = signature.args[0]
            columns = tile.count // pixels if isinstance(tile, VectorTile) else -(-channels // lanes)
            widths = [min(lanes, channels - column * lanes) for column in range(columns)]
            arithmetic = VectorMath(builder, lanes)
            y, at, k = (context.cast(builder, args[n], signature.args[n], types.int64) for n in (1, 2, 3))
            kinds = list(signature.args[4])
            given = cgutils.unpack_tuple(builder, args[4], len(kinds)) if kinds else []

            def address(base: ir.Value, element: ir.Value, offset: int) -> ir.Value:
                array = builder.inttoptr(base, _F32.as_pointer())
                pointer = builder.gep(array, [builder.add(element, _I64(offset))])
                return builder.bitcast(pointer, arithmetic.vector.as_pointer())

            def operand(each: StageOperand, row: int, column: int) -> ir.Value:
                if each.kind == "constant":
                    return arithmetic.number(each.value)
                if each.kind == "scalar":
                    return splat(builder, given[each.index], arithmetic.vector)
                base = context.cast(builder, given[each.index], kinds[each.index], types.int64)
                offset = column * lanes + (row * pixel_stride if each.kind == "elements" else 0)
                place = address(base, at if each.kind == "elements" else k, offset)
                return _load(builder, place, widths[column])

            for column, width in enumerate(widths):
                if width <= 0:
                    continue
                per_column = {
                    each: operand(each, 0, column) for _, named in stages for each in named if each.kind != "elements"
                }
                for row in range(pixels):
                    number = row * columns + column
                    if isinstance(tile, VectorTile):
                        value = builder.extract_value(args[0], number)
                    else:
                        value = load_vector(builder, args[0], 4 * lanes * number, arithmetic.vector)
                    for stage, named in stages:
                        found = [per_column[each] if each in per_column else operand(each, row, column) for each in named]
                        value = stage(arithmetic, value, found)
                    _store(builder, address(y, at, row * pixel_stride + column * lanes), value, width)
            return context.get_dummy_value()

        return types.void(sums, y, at, k, operands), generate

    return finish


def _mask(lanes: int, width: int) -> ir.Value:
    return ir.Constant(ir.VectorType(ir.IntType(1), lanes), [int(lane < width) for lane in range(lanes)])


def _load(builder: ir.IRBuilder, pointer: ir.Value, width: int) -> ir.Value:
    vector = pointer.type.pointee
    if width >= vector.count:
        value = builder.load(pointer)
        value.align = 4
        return value
    kind = ir.FunctionType(vector, [vector.as_pointer(), _I32, ir.VectorType(ir.IntType(1), vector.count), vector])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{vector.count}f32.p0")
    return builder.call(load, [pointer, _I32(4), _mask(vector.count, width), ir.Constant(vector, None)])


def _store(builder: ir.IRBuilder, pointer: ir.Value, value: ir.Value, width: int) -> None:
    vector = value.type
    if width >= vector.count:
        builder.store(value, pointer).align = 4
        return
    mask = ir.VectorType(ir.IntType(1), vector.count)
    kind = ir.FunctionType(ir.VoidType(), [vector, vector.as_pointer(), _I32, mask])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{vector.count}f32.p0")
    builder.call(store, [value, pointer, _I32(4), _mask(vector.count, width)])
