"""Runs an element-wise Numba-CUDA kernel on the CPU, thread by thread of its grid.

The kernel is compiled into a loop over the threads of the grid. The names of `numba.cuda` that it uses become operations:
`cuda.grid` and `cuda.gridsize` read the number of the thread from the stack of the loop, and `cuda.atomic.add` is an atomic
instruction. All other names are refused, because threads of a block do not run side by side here.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from schedsearch.backend.code_identity import code_digest, global_names, inner_codes

if TYPE_CHECKING:
    from schedsearch.backend.codegen_types import BaseContext, Signature, Typed, TypingContext, Values

ALLOWED = ("grid", "gridsize", "atomic")
_WORD = ir.IntType(64)
_FOREIGN = ("numba.", "numpy.", "schedsearch.")  # modules whose functions need no stand-in
_SLOT = "schedsearch_thread"


def walked(function: Callable[..., None], parameters: tuple[str, ...], threads: tuple[int, int, int]) -> Callable[..., None]:
    """The CPU kernel that computes a half-open range of the threads of a grid.

    Args:
        function: takes the parameters by position.
        parameters: their names.
        threads: of the whole grid along x, y and z.

    Returns:
        The same function for all grids of one axis whose size the kernel does not ask for, so that it is compiled once.
    """
    if threads[1:] == (1, 1) and "gridsize" not in _used_names(function):
        threads = (1, 1, 1)  # the position is the number of the work item
    return _walked(function, parameters, threads, code_digest([], [function]))


@functools.lru_cache(maxsize=256)
def _walked(
    function: Callable[..., None], parameters: tuple[str, ...], threads: tuple[int, int, int], captured: str
) -> Callable[..., None]:
    """`captured`: digest of the function with what it captures now."""
    body = _on_cpu(function, _stand_in(threads), {})
    names = ", ".join(parameters)
    text = (
        f"def make(body, enter):\n  def walk({names}, start, stop):\n    for thread in range(start, stop):\n"
        f"      enter(thread)\n      body({names})\n  return walk\n"
    )
    module: dict[str, Any] = {"__name__": __name__}
    exec(text, module)
    made: Callable[..., None] = module["make"](body, _enter)
    made.__name__ = function.__name__
    return made


def _on_cpu(function: Any, cuda: ModuleType, made: dict[int, FunctionType]) -> FunctionType:
    """A copy of a function that finds `cuda` instead of numba.cuda. Device functions become plain ones, which are compiled
    into the kernel, and so do functions that need either.

    Args:
        made: id of a function -> its copy.
    """

    def stand_in(value: Any) -> Any:
        if _is_cuda(value):
            return cuda
        plain = device_function(value) or value
        return _on_cpu(plain, cuda, made) if isinstance(plain, FunctionType) and needs_stand_in(value) else value

    found = dict(function.__globals__)
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copy = FunctionType(function.__code__, found, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    if id(function) in made:
        return made[id(function)]
    made[id(function)] = copy
    for name in (name for name in global_names(function.__code__) if name in found):
        found[name] = stand_in(found[name])
    for cell, own in zip(cells, function.__closure__ or ()):
        cell.cell_contents = stand_in(own.cell_contents)
    return copy


def device_function(value: object) -> FunctionType | None:
    """The plain function of one that `numba.cuda.jit(device=True)` decorates; None for anything else."""
    plain = getattr(value, "py_func", None)
    is_device = isinstance(plain, FunctionType) and getattr(value, "targetoptions", {}).get("device")
    return plain if is_device else None


def needs_stand_in(value: object) -> bool:
    """Whether a value is a device function, or a plain function that uses one or a name of numba.cuda."""
    return device_function(value) is not None or any(
        (each is not value and device_function(each) is not None) or _own_names(plain) for each, plain in _reached(value)
    )


def _reached(value: object) -> list[tuple[Any, FunctionType]]:
    """A function and the plain and device functions that it calls, however far, with their plain functions."""
    found: dict[int, tuple[Any, FunctionType]] = {}
    todo = [value]
    while todo:
        each = todo.pop()
        plain = device_function(each) or each
        if not isinstance(plain, FunctionType) or id(each) in found or (plain.__module__ or "").startswith(_FOREIGN):
            continue
        found[id(each)] = each, plain
        todo += [plain.__globals__[name] for name in global_names(plain.__code__) if name in plain.__globals__]
        todo += [cell.cell_contents for cell in plain.__closure__ or ()]
    return list(found.values())


def refused_names(function: Callable[..., None]) -> list[str]:
    """The names of `numba.cuda` that the kernel uses and a CPU cannot stand in for."""
    return sorted(_used_names(function) - set(ALLOWED))


def _used_names(function: Callable[..., None]) -> set[str]:
    """The names of `numba.cuda` that the kernel uses, or a function that it calls."""
    return set().union(*(_own_names(plain) for _, plain in _reached(function)))


def _own_names(function: FunctionType) -> set[str]:
    code = function.__code__
    found: set[str] = set()
    for each in (code, *inner_codes(code)):
        instructions = list(dis.get_instructions(each))
        for first, second in itertools.pairwise(instructions):
            is_global = first.opname == "LOAD_GLOBAL" and _is_cuda(function.__globals__.get(first.argval))
            if is_global and second.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.add(second.argval)
    return found


def _is_cuda(value: object) -> bool:
    return isinstance(value, ModuleType) and value is sys.modules.get("numba.cuda")


def _slot(builder: ir.IRBuilder) -> ir.Value:
    """The thread's number on the stack of the function that is being compiled."""
    for instruction in builder.function.entry_basic_block.instructions:
        if isinstance(instruction, ir.AllocaInstr) and instruction.name.startswith(_SLOT):
            return instruction
    return cgutils.alloca_once(builder, _WORD, name=_SLOT)


@intrinsic
def _enter(typing_context: TypingContext, thread: types.Type) -> Typed:
    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        builder.store(args[0], _slot(builder))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _stand_in(threads: tuple[int, int, int]) -> ModuleType:
    @intrinsic
    def grid(typing_context: TypingContext, ndim: types.Type) -> Typed:
        return _places(ndim, lambda builder: _position(builder, threads))

    @intrinsic
    def gridsize(typing_context: TypingContext, ndim: types.Type) -> Typed:
        return _places(ndim, lambda builder: [_WORD(extent) for extent in threads])

    cuda, atomic = ModuleType("cuda_on_a_cpu"), ModuleType("cuda_atomic_on_a_cpu")
    atomic.__dict__.update(add=_atomic_add)
    cuda.__dict__.update(grid=grid, gridsize=gridsize, atomic=atomic)
    return cuda


def _places(ndim: object, values: Callable[[Any], list[Any]]) -> Any:
    """Signature and code of an operation that returns one int64, or a tuple of two or three."""
    if not isinstance(ndim, types.IntegerLiteral) or ndim.literal_value not in (1, 2, 3):
        return None
    count = ndim.literal_value
    result = types.int64 if count == 1 else types.UniTuple(types.int64, count)

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        found = values(builder)[:count]
        return found[0] if count == 1 else context.make_tuple(builder, result, found)

    return result(ndim), generate


def _position(builder: ir.IRBuilder, threads: tuple[int, int, int]) -> list[ir.Value]:
    rest, found = builder.load(_slot(builder)), []
    for place, extent in enumerate(threads):
        if all(other == 1 for other in threads[place + 1 :]):
            found += [rest] + [_WORD(0)] * (2 - place)
            return found
        found.append(builder.urem(rest, _WORD(extent)))
        rest = builder.udiv(rest, _WORD(extent))
    return found


@intrinsic
def _atomic_add(typing_context: TypingContext, array: types.Type, index: types.Type, value: types.Type) -> Typed:
    if not isinstance(array, types.Array):
        return None
    indices = index if isinstance(index, types.UniTuple) else types.UniTuple(types.intp, 1)
    element = array.dtype

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Values) -> ir.Value:
        view = context.make_array(array)(context, builder, args[0])
        given = cgutils.unpack_tuple(builder, args[1]) if isinstance(signature.args[1], types.UniTuple) else [args[1]]
        kinds = indices.dtype if isinstance(signature.args[1], types.UniTuple) else signature.args[1]
        places = [context.cast(builder, each, kinds, types.intp) for each in given]
        address = cgutils.get_item_pointer(context, builder, array, view, places, wraparound=False)
        operation = "fadd" if isinstance(element, types.Float) else "add"
        return builder.atomic_rmw(operation, address, args[2], "monotonic")

    own = index if isinstance(index, types.UniTuple) else types.intp
    return element(array, own, element), generate
