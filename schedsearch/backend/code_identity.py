"""A digest of a plain function that a comment, a renamed local or a moved file does not change, but any other edit does.

It covers the bytecode, the values that the function captures and the global names that it reads, and the functions among
them in the same way. Objects of Python, NumPy, Numba and the array libraries enter by name. Line numbers, docstrings, names
of locals and the function's module do not enter. Bytecode differs between minor versions of Python, and so does the digest.
"""

from __future__ import annotations

import abc
import dataclasses
import dis
import enum
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from schedsearch.errors import UsageError

_BY_NAME = {
    "numpy",
    "numba",
    "numba_cuda",
    "numba_cuda_mlir",
    "llvmlite",
    "torch",
    "cupy",
    "cupyx",
    "scipy",
    "math",
    "schedsearch",
}
_DIGITS = 16


def code_digest(exact: Iterable[object], loose: Iterable[object] = ()) -> str:
    """Digest of some functions, numbers and strings, and of lists of these.

    Args:
        exact: every value that these capture must have a stable description.
        loose: values without one enter by their type only.

    Raises:
        UsageError: one of `exact` captures a value that cannot be described; the text says which and what to do.
    """
    strict, lenient = _Describer(strict=True), _Describer(strict=False)
    found = [*(strict.of(each, _name(each)) for each in exact), *(lenient.of(each, _name(each)) for each in loose)]
    return hashlib.sha256(repr((sys.version_info[:2], found)).encode()).hexdigest()[:_DIGITS]


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def names_read(function: Callable[..., object]) -> frozenset[str]:
    """The parameters and attributes that a plain function, or one that is defined inside it, reads."""
    found: set[str] = set()
    for code in _codes(function.__code__) if isinstance(function, FunctionType) else ():
        for instruction in dis.get_instructions(code):
            value = instruction.argval
            if instruction.opcode in dis.hasconst or instruction.opname.startswith("STORE"):
                continue
            found |= {value} if isinstance(value, str) else set(value) if _are_names(value) else set()
    return frozenset(found)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


@functools.lru_cache(1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function, or one defined in it, looks up in its module, sorted."""
    instructions = (instruction for each in _codes(code) for instruction in dis.get_instructions(each))
    return tuple(sorted({each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}))


def inner_codes(code: CodeType) -> list[CodeType]:
    """The code objects of functions defined inside a function, at any depth."""
    own = [each for each in code.co_consts if isinstance(each, CodeType)]
    return own + [inner for each in own for inner in inner_codes(each)]


def _codes(code: CodeType) -> list[CodeType]:
    return [code, *inner_codes(code)]


class Walker(abc.ABC):
    """Walks over a value and what it refers to; functions that refer to each other are followed once.

    Subclasses say which modules are known by name, and what identifies code and any other value.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, value: Any, where: str = "") -> Any:
        """Something whose repr is the same in every process; `where` names the value in messages."""
        if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
            return type(value).__name__, str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, tuple | list):
            return type(value).__name__, [self.of(each, where) for each in value]
        if isinstance(value, set | frozenset):
            return "set", sorted(repr(self.of(each, where)) for each in value)
        if isinstance(value, dict):
            return "dict", [(self.of(key, where), self.of(each, f"{where}[{key!r}]")) for key, each in value.items()]
        if isinstance(value, CodeType):
            return self.code(value, where)
        if isinstance(value, FunctionType):
            if id(value) in self._seen:
                return "seen", self._seen[id(value)]
            self._seen[id(value)] = len(self._seen)
            if self.is_known(value.__module__ or ""):
                return "named", value.__module__, value.__qualname__
            return self.function(value, where)
        return self.other(value, where)

    def captured(self, function: FunctionType, where: str) -> list[Any]:
        """The values that a function captures. Raises what `empty` raises if one of them has no value yet."""
        found = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                found.append(self.of(cell.cell_contents, f"{name}, which {where} captures,"))
            except ValueError:
                raise self.empty(name, where) from None
        return found

    def outside(self, function: FunctionType, where: str = "") -> list[Any]:
        """The values of a function's global names; of modules that are not known by name only the attributes it reads."""
        found: list[Any] = []
        read = self.read(function)
        for name in global_names(function.__code__):
            if name not in function.__globals__:
                continue  # a builtin, or an error that the compiler will report
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and not self.is_known(value.__name__):
                used = sorted(each for each in read if hasattr(value, each))
                found.append((name, [(each, self.of(getattr(value, each), f"{name}.{each}")) for each in used]))
            else:
                found.append((name, self.of(value, f"{name}, which {where} reads,")))
        return found

    def read(self, function: FunctionType) -> frozenset[str]:
        """The attributes that a function may read of a module."""
        return names_read(function)

    @abc.abstractmethod
    def is_known(self, module: str) -> bool:
        """Whether the functions of a module enter by name."""

    @abc.abstractmethod
    def code(self, code: CodeType, where: str) -> Any: ...
    @abc.abstractmethod
    def function(self, function: FunctionType, where: str) -> Any: ...
    @abc.abstractmethod
    def other(self, value: Any, where: str) -> Any:
        """Identifies any other value, or raises what the caller's contract says."""

    @abc.abstractmethod
    def empty(self, name: str, where: str) -> Exception:
        """The error for a captured name that has no value yet."""


class _Describer(Walker):
    """Its ids are in records of own kernels, so what it says of a value never changes."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self._strict = strict

    def is_known(self, module: str) -> bool:
        root = module.partition(".")[0]
        return root in _BY_NAME or (root in sys.stdlib_module_names and root != "__main__")

    def empty(self, name: str, where: str) -> Exception:
        return UsageError(f"{where} captures {name}, which has no value yet; decorate it after {name} is set")

    def other(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(getattr(value, "py_func", None), FunctionType):  # decorated for Numba
            return "compiled", self.of(value.py_func, where)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, enum.EnumMeta):
            members: dict[str, Any] = dict(value.__members__)
            return "enum", value.__qualname__, [(name, self.of(each.value, where)) for name, each in members.items()]
        if isinstance(value, type | BuiltinFunctionType | np.ufunc):
            return "named", getattr(value, "__module__", ""), getattr(value, "__qualname__", None) or repr(value)
        if kind.__module__.partition(".")[0] == "numba":
            return "numba", kind.__qualname__, str(value)
        if isinstance(value, enum.Enum):
            return "enum", kind.__qualname__, repr(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [(each.name, self.of(getattr(value, each.name), where)) for each in dataclasses.fields(value)]
            return "dataclass", kind.__qualname__, fields
        if isinstance(value, SimpleNamespace):
            return "namespace", self.of(vars(value), where)
        if not self._strict:
            return "of type", kind.__module__, kind.__qualname__
        raise UsageError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, whose changes cannot be noticed; a tunable may capture "
            "numbers, text, tuples, NumPy arrays, functions and types: capture one of these, or pass it as an argument"
        )

    def function(self, function: FunctionType, where: str) -> Any:
        captured = self.captured(function, where)
        defaults = self.of((function.__defaults__, function.__kwdefaults__), where)
        return "function", self.code(function.__code__, where), captured, defaults, self.outside(function, where)

    def code(self, code: CodeType, where: str) -> Any:
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return arguments, code.co_argcount, [self._instruction(each, where) for each in dis.get_instructions(code)]

    def _instruction(self, instruction: dis.Instruction, where: str) -> Any:
        if instruction.opcode in dis.hasconst:
            return instruction.opname, self.of(instruction.argval, where)
        if instruction.opcode in dis.hasname:
            return instruction.opname, instruction.argrepr
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return instruction.opname, instruction.argval
        return instruction.opname, instruction.arg
