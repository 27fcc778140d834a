"""Kernels written with the names of Numba-CUDA, for numba-cuda-mlir: copies that find its names instead.

Templates and users write `from numba import cuda, types`. numba-cuda-mlir has modules of the same content, whose objects are
others. A copy of a kernel, and of each function that it calls, gets them in the place of Numba's.

The copy is entered through a function of numbers only, whose parameters are those that Numba-CUDA gives the same kernel:
an array in words, a tuple element by element, a literal as a word that nobody reads. Machine code of both compilers is
therefore launched alike.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import CellType, FunctionType, ModuleType
from typing import Any

from numba import types

from schedsearch.backend import mlir_ops
from schedsearch.backend.code_identity import global_names, names_read
from schedsearch.backend.grid_walk import device_function
from schedsearch.backend.mlir_private import named
from schedsearch.backend.ops import operands_and_text, shared_base

_MODULES = {
    "numba.cuda": "numba_cuda_mlir.cuda",
    "numba.types": "numba_cuda_mlir.types",
    "numba.core.types": "numba_cuda_mlir.types",
    "numba": "numba_cuda_mlir",
}


class Untranslatable(Exception):
    """A value that numba-cuda-mlir has no counterpart of."""


def entered(function: Any, signature: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A kernel for numba-cuda-mlir, and its own types of the arguments: numbers only.

    Args:
        signature: Numba types, as `signatures.signature` gives them.

    Raises:
        Untranslatable: the kernel uses a name of Numba that numba-cuda-mlir does not have.
    """
    taken = function.__code__.co_argcount + bool(function.__code__.co_flags & inspect.CO_VARARGS)
    own, late = signature[:taken], signature[taken:]
    names, kinds, given, found = list[str](), list[Any](), list[str](), dict[str, Any]()
    for number, kind in enumerate(own):
        given.append(_passed(kind, f"p{number}", names, kinds, found))
    found["body"] = body = translated(function)
    if body.__code__.co_flags & inspect.CO_VARARGS:  # as Numba sees it: one more argument, which is a tuple
        flags = body.__code__.co_flags & ~inspect.CO_VARARGS
        body.__code__ = body.__code__.replace(co_argcount=taken, co_flags=flags)
    text = (
        f"def make({', '.join(found)}):\n  def kernel({', '.join(names)}):\n    body({', '.join(given)})\n  return kernel\n"
    )
    module: dict[str, Any] = {"__name__": function.__module__}
    exec(text, module)
    entry = module["make"](**found)
    return entry, (*map(counterpart, kinds), *map(counterpart, late))


def _passed(kind: Any, name: str, names: list[str], kinds: list[Any], found: dict[str, Any]) -> str:
    """How the kernel gets an argument of a type: text; adds the parameters of the entry and what the text refers to."""
    if isinstance(kind, types.BaseTuple):
        parts = [_passed(each, f"{name}_{number}", names, kinds, found) for number, each in enumerate(kind.types)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(kind, types.Array):
        parts = [f"{name}_{word}" for word in ("meminfo", "parent", "items", "itemsize", "data")]
        parts += [f"{name}_{word}{axis}" for word in ("shape", "stride") for axis in range(kind.ndim)]
        names += parts
        kinds += [types.uint64] * 2 + [types.int64] * 2 + [types.uint64] + [types.int64] * 2 * kind.ndim
        found[f"as_{name}"] = mlir_ops.array_of(counterpart(kind))
        return f"as_{name}({', '.join(parts[4:])})"
    names.append(name)
    if isinstance(kind, types.StringLiteral | types.BooleanLiteral | types.IntegerLiteral):
        kinds.append(types.int64)
        return repr(kind.literal_value)
    if kind == types.boolean:
        kinds.append(types.uint8)
        return f"({name} != 0)"
    kinds.append(kind)
    return name


def counterpart(kind: Any) -> Any:
    """The type of numba-cuda-mlir for one of Numba. Raises Untranslatable if there is none."""
    others: Any = named("numba_cuda_mlir.types")
    if isinstance(kind, types.Array):
        return others.Array(counterpart(kind.dtype), kind.ndim, kind.layout)
    if isinstance(kind, types.BaseTuple):
        return others.Tuple([counterpart(each) for each in kind.types])
    name = "boolean" if kind == types.boolean else str(kind)
    found = getattr(others, name, None)
    if found is None:
        raise Untranslatable(f"numba-cuda-mlir has no type {kind}")
    return found


def translated(function: Any) -> Any:
    """A copy of a plain function, and of the functions that it calls. Raises Untranslatable."""
    return _copy(function, {})


def _copy(function: Any, made: dict[int, Any]) -> Any:
    if id(function) in made:
        return made[id(function)]
    cells = tuple(CellType() for _ in function.__closure__ or ())
    found = dict(function.__globals__)
    copy = FunctionType(function.__code__, found, function.__name__, function.__defaults__, cells or None)
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    made[id(function)] = copy
    for name in global_names(function.__code__):
        if name in found:
            found[name] = _value(found[name], made, function)
    for cell, own in zip(cells, function.__closure__ or ()):
        cell.cell_contents = _value(own.cell_contents, made, function)
    return copy


def _module(module: ModuleType, made: dict[int, Any], user: Any) -> Any:
    """What a function finds in the place of a module."""
    if module.__name__ in _MODULES:
        return named(_MODULES[module.__name__])
    if _is_known(module.__name__):
        return module
    copy = ModuleType(module.__name__)
    for name in names_read(user):
        if hasattr(module, name):
            vars(copy)[name] = _value(getattr(module, name), made, user)
    return copy


def _is_known(module: str) -> bool:
    """Whether a compiler knows the objects of a module by itself."""
    root = module.partition(".")[0]
    return root in ("numba", "numba_cuda_mlir", "numpy") or root in sys.stdlib_module_names - {"__main__"}


def _value(value: Any, made: dict[int, Any], user: Any) -> Any:
    """What the copy of the function `user` finds in the place of a value."""
    if isinstance(value, ModuleType):
        return _module(value, made, user)
    if value is shared_base:
        return mlir_ops.shared_base()
    declared = operands_and_text(value)
    if declared is not None:
        return mlir_ops.operation(getattr(value, "__name__", "operation"), *declared)
    if isinstance(value, types.Type):
        return counterpart(value)
    plain = device_function(value) or value
    if isinstance(plain, FunctionType) and not _is_known(plain.__module__ or ""):
        return _copy(plain, made)
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return mlir_ops.named_tuple(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_value(each, made, user) for each in value)
    module = getattr(value, "__module__", None) or ""
    if module.startswith("numba.") and not module.startswith("numba.core.typing.builtins"):
        return _by_name(module, getattr(value, "__qualname__", type(value).__qualname__))
    return value


@functools.cache
def _by_name(module: str, name: str) -> Any:
    """An object of Numba-CUDA that a module imported by name, such as `from numba.cuda import grid`."""
    for place in ("numba_cuda_mlir.cuda", "numba_cuda_mlir.types"):
        found = named(place)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    raise Untranslatable(f"numba-cuda-mlir has no counterpart of {module}.{name}")
