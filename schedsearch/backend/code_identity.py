"""A digest of a plain function that a comment, a renamed local or a moved file does not change, but any other edit does.

It covers the bytecode, the values that the function captures and the global names that it reads, and the functions among
them in the same way. Objects of Python, NumPy, Numba and the array libraries enter by name. Line numbers, docstrings, names
of locals and the function's module do not enter. Bytecode differs between minor versions of Python, and so does the digest.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import hashlib
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from schedsearch.errors import UsageError

_BY_NAME = {"numpy", "numba", "numba_cuda", "llvmlite", "torch", "cupy", "cupyx", "scipy", "math", "schedsearch"}
_DIGITS = 16


def code_digest(exact: Iterable[Any], loose: Iterable[Any] = ()) -> str:
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


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def names_read(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters and attributes that a plain function, or one that is defined inside it, reads."""
    found: set[str] = set()
    todo = [function.__code__] if isinstance(function, FunctionType) else []
    while todo:
        code = todo.pop()
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
        for instruction in dis.get_instructions(code):
            value = instruction.argval
            if instruction.opcode in dis.hasconst or instruction.opname.startswith("STORE"):
                continue
            found |= {value} if isinstance(value, str) else set(value) if _are_names(value) else set()
    return frozenset(found)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


class _Describer:
    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._seen: dict[int, int] = {}

    def of(self, value: Any, where: str) -> Any:
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
            return self._code(value, where)
        if isinstance(value, FunctionType):
            return self._function(value, where)
        if isinstance(getattr(value, "py_func", None), FunctionType):  # decorated for Numba
            return "compiled", self._function(value.py_func, where)
        return self._other(value, where)

    def _other(self, value: Any, where: str) -> Any:
        kind = type(value)
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

    def _function(self, function: FunctionType, where: str) -> Any:
        if id(function) in self._seen:
            return "seen", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        root = (function.__module__ or "").partition(".")[0]
        if root in _BY_NAME or (root in sys.stdlib_module_names and root != "__main__"):
            return "named", function.__module__, function.__qualname__
        captured = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                captured.append(self.of(cell.cell_contents, f"{name}, which {where} captures,"))
            except ValueError:
                raise UsageError(
                    f"{where} captures {name}, which has no value yet; decorate it after {name} is set"
                ) from None
        defaults = self.of((function.__defaults__, function.__kwdefaults__), where)
        return "function", self._code(function.__code__, where), captured, defaults, self._globals(function, where)

    def _code(self, code: CodeType, where: str) -> Any:
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

    def _globals(self, function: FunctionType, where: str) -> Any:
        """The values of the global names; of the user's own modules only the attributes that are read."""
        found: list[Any] = []
        read = names_read(function)
        for name in sorted(read & set(function.__globals__)):
            if not _is_global(function.__code__, name):
                continue
            value = function.__globals__[name]
            own = (
                isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _BY_NAME | sys.stdlib_module_names
            )
            if own:
                used = sorted(each for each in read if hasattr(value, each))
                found.append((name, [(each, self.of(getattr(value, each), f"{name}.{each}")) for each in used]))
            else:
                found.append((name, self.of(value, f"{name}, which {where} reads,")))
        return found


def _is_global(code: CodeType, name: str) -> bool:
    return any(
        instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == name
        for each in (code, *_inner(code))
        for instruction in dis.get_instructions(each)
    )


def _inner(code: CodeType) -> list[CodeType]:
    own = [each for each in code.co_consts if isinstance(each, CodeType)]
    return own + [inner for each in own for inner in _inner(each)]
