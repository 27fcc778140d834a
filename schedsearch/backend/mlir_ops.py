"""Device operations as intrinsics of numba-cuda-mlir: the same declarations and texts as for Numba-CUDA (`ops`)."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from schedsearch.backend.mlir_private import CONVERGENT, named
from schedsearch.backend.ops import Operands, constraints_of
from schedsearch.typed import DeviceFunction

# name -> numba-cuda-mlir's name of the type, and MLIR's
_TYPES = {
    "u16": ("uint16", "i16"),
    "i32": ("int32", "i32"),
    "u32": ("uint32", "i32"),
    "i64": ("int64", "i64"),
    "u64": ("uint64", "i64"),
    "f32": ("float32", "f32"),
    "f64": ("float64", "f64"),
}
_SYMBOL = "schedsearch_dynamic_shared"
_DYNAMIC = re.compile(r"(?m)^\s*\.shared \.align \d+ \.b8\s+__dynamic_shmem__0;\n")


@functools.cache
def operation(name: str, operands: Operands, text: str) -> DeviceFunction:
    """An intrinsic with the operands and the text of a device operation."""
    types, llvm, memref = _modules()
    ins, outs, inout = dict(operands.ins), dict(operands.outs), dict(operands.inout)
    constraints = constraints_of(operands)
    text = f"{text} {CONVERGENT}" if operands.convergent else text

    def definition(typingctx: Any, *args: Any) -> Any:
        arrays = args[: len(inout)]
        for (operand, (kind, count)), array in zip(inout.items(), arrays):
            if not isinstance(array, types.Array) or array.dtype != getattr(types, _TYPES[kind][0]):
                raise TypeError(f"{name}: {operand} must be a local array of at least {count} {kind}, got {array}")
        returned = [getattr(types, _TYPES[kind][0]) for kind in outs.values()]
        result = types.void if not returned else returned[0] if len(returned) == 1 else types.Tuple(returned)
        signature = result(*arrays, *(getattr(types, _TYPES[kind][0]) for kind in ins.values()))

        def codegen(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
            values = builder.load_vars(args)
            places = [(array, _index(at)) for array, (_, count) in zip(values, inout.values()) for at in range(count)]
            tied = [memref.load(array, [at]) for array, at in places]
            given = [
                _converted(value, kind, arg)
                for value, kind, arg in zip(values[len(inout) :], ins.values(), args[len(inout) :])
            ]
            kinds = [*outs.values(), *(kind for kind, count in inout.values() for _ in range(count))]
            made = [_mlir(kind) for kind in kinds]
            of_all = None if not made else made[0] if len(made) == 1 else llvm.StructType.get_literal(made)
            call = llvm.inline_asm(of_all, [*given, *tied], text, constraints, has_side_effects=not operands.pure)
            results = [call] if len(made) == 1 else [llvm.extractvalue(each, call, [at]) for at, each in enumerate(made)]
            for (array, at), value in zip(places, results[len(outs) :]):
                memref.store(value, array, [at])
            builder.store_var(target, None if not outs else results[0] if len(outs) == 1 else tuple(results[: len(outs)]))

        return signature, codegen

    return _intrinsic(name, definition, [*inout, *ins])


@functools.cache
def shared_base() -> DeviceFunction:
    """As `ops.shared_base`."""
    types, llvm, _ = _modules()

    def definition(typingctx: Any) -> Any:
        def codegen(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
            text = f"mov.u32 $0, {_SYMBOL};"
            builder.store_var(target, llvm.inline_asm(_mlir("u32"), [], text, "=r", has_side_effects=False))

        return types.uint32(), codegen

    return _intrinsic("shared_base", definition, [])


def with_dynamic_shared(ptx: str) -> str:
    """PTX in which dynamic shared memory is declared as such.

    For `shared_base` there is no declaration yet. The compiler's own, for arrays of length 0, is a static byte, so that they
    would begin there, amid the static arrays.
    """
    head, entry, rest = ptx.partition(".visible .entry")
    rest, own = _DYNAMIC.subn("", rest)
    head, more = _DYNAMIC.subn("", head)
    names = [*(["__dynamic_shmem__0"] if own or more else []), *([_SYMBOL] if f", {_SYMBOL};" in ptx else [])]
    declared = "".join(f".extern .shared .align {1024 if name == _SYMBOL else 16} .b8 {name}[];\n" for name in names)
    return f"{head}{declared}{entry}{rest}"


@functools.cache
def named_tuple(cls: type) -> DeviceFunction:
    """An intrinsic that makes a named tuple, which numba-cuda-mlir types but does not lower."""
    types, _, _ = _modules()
    fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]

    def definition(typingctx: Any, *args: Any) -> Any:
        def codegen(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
            builder.store_var(target, tuple(builder.load_vars(args)))

        return types.BaseTuple.from_types(args, cls)(*args), codegen

    return _intrinsic(cls.__name__, definition, list(fields))


@functools.cache
def array_of(kind: Any) -> DeviceFunction:
    """An intrinsic that makes an array of address, shape and strides in bytes.

    Args:
        kind: numba-cuda-mlir's type of the array.
    """
    types, _, _ = _modules()
    ndim = kind.ndim

    def definition(typingctx: Any, *args: Any) -> Any:
        signature = kind(types.uint64, *[types.int64] * (2 * ndim))

        def codegen(builder: Any, target: Any, args: Any, kwargs: Any) -> None:
            address, *words = builder.load_vars(args)
            builder.store_var(target, _memref(builder, kind, address, words[:ndim], words[ndim:]))

        return signature, codegen

    axes = [f"{word}{axis}" for word in ("shape", "stride") for axis in range(ndim)]
    return _intrinsic(f"array_of_{ndim}", definition, ["data", *axes])


def _memref(builder: Any, kind: Any, address: Any, shape: list[Any], strides: list[Any]) -> Any:
    """MLIR's view of memory, from its descriptor: two pointers, an offset, sizes, and strides in elements."""
    _, llvm, _ = _modules()
    arith, builtin = named("numba_cuda_mlir._mlir.dialects.arith"), named("numba_cuda_mlir._mlir.dialects.builtin")
    ir = named("numba_cuda_mlir._mlir.ir")
    word = _mlir("i64")
    view = builder.get_argument_type(kind)
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), _converted(address, "u64"))
    nbytes = arith.constant(word, kind.dtype.bitwidth // 8)
    numbers = [_converted(each, "i64") for each in shape]
    numbers += [arith.divsi(_converted(each, "i64"), nbytes) for each in strides]
    count = len(shape)
    descriptor = ir.Type.parse(f"!llvm.struct<(ptr, ptr, i64, array<{count} x i64>, array<{count} x i64>)>")
    made = llvm.mlir_undef(descriptor)
    for place in ([0], [1]):
        made = llvm.insertvalue(made, pointer, place)
    made = llvm.insertvalue(made, arith.constant(word, 0), [2])
    for number, value in enumerate(numbers):
        made = llvm.insertvalue(made, value, [3 + number // count, number % count])
    return builtin.unrealized_conversion_cast([view], [made])


def _intrinsic(name: str, definition: Any, parameters: list[str]) -> DeviceFunction:
    definition.__name__ = name
    definition.__signature__ = inspect.Signature(
        [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("typingctx", *parameters)]
    )
    made: DeviceFunction = named("numba_cuda_mlir.numba_cuda.extending.intrinsic")(definition)
    named("numba_cuda_mlir.extending.refresh_registries")()
    return made


def _modules() -> tuple[Any, Any, Any]:
    dialects = "numba_cuda_mlir._mlir.dialects"
    return named("numba_cuda_mlir.types"), named(f"{dialects}.llvm"), named(f"{dialects}.memref")


def _mlir(kind: str) -> Any:
    return getattr(named("numba_cuda_mlir._mlir.extras.types"), _TYPES[kind][1])()


def _index(number: int) -> Any:
    return named("numba_cuda_mlir.lowering_utilities.index_of")(number)


def _converted(value: Any, kind: str, arg: Any = None) -> Any:
    return named("numba_cuda_mlir.lowering_utilities.convert")(value, _mlir(kind), signed=kind[0] == "i")
