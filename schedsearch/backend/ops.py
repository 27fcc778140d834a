"""Makes Numba-CUDA intrinsics out of device operations declared as data.

A declaration names the operands and gives the PTX::

    ldmatrix_x4 = device_op(
        "ldmatrix_x4",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$a, $b, $c, $d}, [$address];",
        ins={"address": "u32"},
        outs={"a": "u32", "b": "u32", "c": "u32", "d": "u32"},
    )

In a kernel, `ldmatrix_x4(address)` then returns a tuple of four. An `inout` operand is a local array whose first
elements live in registers across the operation; in the PTX its name stands for the comma-separated registers, and
`$name[i]` for the i-th of them.

One operation should hold a whole tile step: NVVM neither looks into nor schedules across the text.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError

from schedsearch.backend.compilers import COMPILERS
from schedsearch.backend.early_launch import WAIT
from schedsearch.typed import DeviceFunction

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values


@dataclass(frozen=True)
class Declared:
    """An operation that no compiler has seen: numba-cuda-mlir makes its own of the declaration (`mlir_ops`)."""

    __name__: str


def _declared_only(definition: Any) -> Any:
    return Declared(definition.__name__)


intrinsic: Any = (
    _declared_only
    if COMPILERS["numba-cuda"].installed is None
    else importlib.import_module("numba.cuda.extending").intrinsic
)

# name -> Numba type, LLVM type, constraint letter of inline PTX
_TYPES: dict[str, tuple[Any, ir.Type, str]] = {
    "u16": (types.uint16, ir.IntType(16), "h"),
    "i32": (types.int32, ir.IntType(32), "r"),
    "u32": (types.uint32, ir.IntType(32), "r"),
    "i64": (types.int64, ir.IntType(64), "l"),
    "u64": (types.uint64, ir.IntType(64), "l"),
    "f32": (types.float32, ir.FloatType(), "f"),
    "f64": (types.float64, ir.DoubleType(), "d"),
}


@dataclass(frozen=True)
class Operands:
    """The part of a device operation that Numba sees: name -> type, or (type, count) for `inout`; and how it may be
    moved.
    """

    ins: tuple[tuple[str, str], ...]
    outs: tuple[tuple[str, str], ...]
    inout: tuple[tuple[str, tuple[str, int]], ...]
    pure: bool
    convergent: bool


def device_op(
    name: str,
    ptx: str,
    *,
    ins: Mapping[str, str] | None = None,
    outs: Mapping[str, str] | None = None,
    inout: Mapping[str, tuple[str, int]] | None = None,
    unused: Iterable[str] = (),
    pure: bool = False,
    convergent: bool = False,
) -> DeviceFunction:
    """Declares a device operation.

    Args:
        name: for messages.
        ptx: its text; `$operand` stands for an operand's register(s). Local registers and labels go into braces.
        ins: operand -> type (u16, i32, u32, i64, u64, f32, f64); integers are converted from any integer.
        outs: operand -> type of results; the call returns nothing, one value, or a tuple.
        inout: operand -> (type, count): the first `count` elements of a local array that is passed.
        unused: operands that the text may leave out, so that operations with and without them are called in one way.
        pure: neither reads nor writes memory and has no other effect, so that the compiler may move or drop it.
        convergent: all threads of a warp must execute it together, so that the compiler must not copy it into branches.

    Returns:
        An intrinsic whose arguments are the `inout` arrays, then the `ins`, in the order of declaration.

    Raises:
        ValueError: the text names an operand that is not declared, or leaves one out that is not in `unused`.
    """
    ins, outs, inout = dict(ins or {}), dict(outs or {}), dict(inout or {})
    operands = Operands(tuple(ins.items()), tuple(outs.items()), tuple(inout.items()), pure, convergent)
    return _operation(name, _numbered(name, ptx, outs, inout, ins, frozenset(unused)), operands)


def operands_and_text(value: object) -> tuple[Operands, str] | None:
    """The PTX of a device operation, with LLVM's `$n` for operands; None for any other value."""
    declared: tuple[Operands, str] | None = getattr(value, "schedsearch_declared", None)
    return declared


@functools.cache
def stand_in(operands: Operands, text: str) -> DeviceFunction:
    """A device operation with another text, which only LLVM's printer gets to see."""
    return _operation("stand_in", text, operands)


def _operation(name: str, text: str, operands: Operands) -> DeviceFunction:
    ins, outs, inout = dict(operands.ins), dict(operands.outs), dict(operands.inout)
    pure, convergent = operands.pure, operands.convergent
    constraints = constraints_of(operands)
    in_types = [_TYPES[kind] for kind in ins.values()]
    result_kinds = [*outs.values(), *(kind for kind, count in inout.values() for _ in range(count))]
    result_llvm = [_TYPES[kind][1] for kind in result_kinds]

    def definition(typingctx: TypingContext, *args: types.Type) -> Typed:
        arrays, values = args[: len(inout)], args[len(inout) :]
        for (operand, kind), value in zip(ins.items(), values):
            _check_argument(name, operand, kind, value)
        for (operand, (kind, count)), array in zip(inout.items(), arrays):
            if not isinstance(array, types.Array) or array.dtype != _TYPES[kind][0]:
                raise TypingError(f"{name}: {operand} must be a local array of at least {count} {kind}, got {array}")
        returned = [_TYPES[kind][0] for kind in outs.values()]
        return_type = types.void if not returned else returned[0] if len(returned) == 1 else types.Tuple(returned)
        signature = return_type(*arrays, *(numba_type for numba_type, _, _ in in_types))

        def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, llvm_args: Values) -> ir.Value:
            pointers = []
            for (_, count), array_type, array in zip(inout.values(), sig.args, llvm_args):
                data = context.make_array(array_type)(context, builder, array).data
                pointers += [builder.gep(data, [ir.Constant(ir.IntType(32), i)]) for i in range(count)]
            tied = [builder.load(pointer) for pointer in pointers]
            operands = [*llvm_args[len(inout) :], *tied]
            llvm_return = (
                ir.VoidType()
                if not result_llvm
                else result_llvm[0]
                if len(result_llvm) == 1
                else ir.LiteralStructType(result_llvm)
            )
            function_type = ir.FunctionType(llvm_return, [operand.type for operand in operands])
            block = ir.InlineAsm(function_type, text, constraints, side_effect=not pure)
            call = builder.call(block, operands, attrs=("convergent",) if convergent else ())
            results = [call] if len(result_llvm) == 1 else [builder.extract_value(call, i) for i in range(len(result_llvm))]
            for pointer, value in zip(pointers, results[len(outs) :]):
                builder.store(value, pointer)
            if not outs:
                return context.get_dummy_value()
            return results[0] if len(outs) == 1 else context.make_tuple(builder, sig.return_type, results[: len(outs)])

        return signature, codegen

    definition.__name__ = name
    names = ["typingctx", *inout, *ins]
    definition.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(operand, inspect.Parameter.POSITIONAL_OR_KEYWORD) for operand in names]
    )
    operation: DeviceFunction = intrinsic(definition)
    object.__setattr__(operation, "schedsearch_declared", (operands, text))
    return operation


def _check_argument(name: str, operand: str, kind: str, value: object) -> None:
    wants_float = kind in ("f32", "f64")
    fits = (
        isinstance(value, (types.Float, types.Integer)) if wants_float else isinstance(value, (types.Integer, types.Boolean))
    )
    if not fits:
        raise TypingError(f"{name}: {operand} must be {kind}, got {value}; convert it explicitly")


def _numbered(
    name: str,
    ptx: str,
    outs: Mapping[str, str],
    inout: Mapping[str, tuple[str, int]],
    ins: Mapping[str, str],
    unused: frozenset[str],
) -> str:
    """Replaces `$operand` and `$operand[i]` by LLVM's `$n`: outputs come first, then tied outputs, then inputs."""
    numbers: dict[str, list[str]] = {}
    position = 0
    for operand, count in [*((o, 1) for o in outs), *((o, c) for o, (_, c) in inout.items()), *((o, 1) for o in ins)]:
        numbers[operand] = [f"${position + i}" for i in range(count)]
        position += count
    named = set(re.findall(r"\$([A-Za-z_]\w*)", ptx))
    if named | unused & set(numbers) != set(numbers):
        raise ValueError(
            f"{name}: the PTX names {sorted(named)}, declared are {sorted(numbers)}; they must be the same, "
            f"except those declared as unused{': ' + str(sorted(unused)) if unused else ''}"
        )

    def registers(match: re.Match[str]) -> str:
        of_operand = numbers[match[1]]
        return ", ".join(of_operand) if match[2] is None else of_operand[int(match[2])]

    return re.sub(r"\$([A-Za-z_]\w*)(?:\[(\d+)\])?", registers, ptx)


def constraints_of(operands: Operands) -> str:
    """The constraints of inline PTX, for LLVM."""
    inout = [kind for _, (kind, count) in operands.inout for _ in range(count)]
    written = [f"={_TYPES[kind][2]}" for _, kind in operands.outs]
    # Early-clobber: the text may write elements before it has read all operands. LLVM would otherwise give an operand the
    # register of an element that is not initialised.
    written += [f"=&{_TYPES[kind][2]}" for kind in inout]
    read = [_TYPES[kind][2] for _, kind in operands.ins]
    tied = [str(len(operands.outs) + i) for i in range(len(inout))]
    return ",".join([*written, *read, *tied, *([] if operands.pure else ["~{memory}"])])


@intrinsic
def shared_base(typingctx: TypingContext) -> Typed:
    """The u32 shared-window address of dynamic shared memory: 1024-byte aligned when a kernel has no static array."""
    signature = types.uint32()

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        module = builder.module
        symbol = module.globals.get("schedsearch_dynamic_shared")
        if symbol is None:
            symbol = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "schedsearch_dynamic_shared", addrspace=3)
            symbol.linkage = "external"
            symbol.align = 1024
        return builder.ptrtoint(symbol, ir.IntType(32))

    return signature, codegen


# Waits for the kernel before this one in the stream, then lets the one behind it begin. A thread that reads what is not in
# `KernelStep.ahead`, or writes to global memory, must have called it, or be ordered behind a thread that has by a barrier.
wait_for_predecessor = device_op("wait_for_predecessor", WAIT)
