"""Names everything that decides the code of a Python function; the name is the same in every process and every run.

The code of a kernel depends on its bytecode, on the values that it captures, and on the values of global names: numbers,
types, operations, other functions. The name covers all of them by value, as far as they can be reached. Objects of the
compilers or of Python itself enter by name only; the versions of these and the sources of this package enter instead.

Any other value, for example an object of an unknown class, has no name. A kernel that uses it has no name either.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir

from schedsearch.backend.inlining import inner_codes
from schedsearch.identity import sha256_hex

_VERSIONED = ("numba", "numba-cuda", "llvmlite", "numpy")
_PACKAGES = frozenset({"numba", "numba_cuda", "llvmlite", "numpy"}) | sys.stdlib_module_names


class UnidentifiedError(Exception):
    """A value has no name that is the same in every process; the text says which value."""


def digest(*values: Any) -> str:
    """Hex digest of the identities of `values`, and of the compilers that will see them.

    Raises:
        UnidentifiedError: one of them has no identity.
    """
    return hashlib.sha256(repr((_compilers(), [_Identifier().of(value) for value in values])).encode()).hexdigest()


def identity(value: Any) -> str:
    """What `digest` hashes of a value, without the compilers. Raises UnidentifiedError if it has no identity."""
    return repr(_Identifier().of(value))


@functools.cache
def _compilers() -> str:
    """Versions and settings of everything that turns a function into LLVM IR, and the sources of this package."""
    found = {"python": sys.version}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    return repr((sorted(found.items()), sorted(settings.items()), _OWN_SOURCES))


_OWN_SOURCES = sha256_hex(
    b"\0".join(path.name.encode() + path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)


class _Identifier:
    """Walks over values; functions that refer to each other are followed once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """Something whose repr is the same in every process."""
        if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
            return type(value).__name__, str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, tuple | list):
            return type(value).__name__, [self.of(item) for item in value]
        if isinstance(value, set | frozenset):
            return type(value).__name__, sorted(repr(self.of(item)) for item in value)
        if isinstance(value, dict):
            return "dict", [(self.of(key), self.of(item)) for key, item in value.items()]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, ModuleType):
            if _is_versioned(value.__name__):
                # Numba's types have either name, depending on which module is imported first.
                return "module", value.__name__.replace("numba.core.types", "numba.types")
            raise UnidentifiedError(f"module {value.__name__}")
        return self._object(value)

    def _object(self, value: Any) -> Any:
        declared = getattr(value, "schedsearch_declared", None)
        if declared is not None:
            return "operation", repr(declared)
        kind = type(value)
        if isinstance(value, type | BuiltinFunctionType):
            if _is_ours(value.__module__) or _is_versioned(value.__module__):
                return "named", value.__module__, value.__qualname__
        elif isinstance(value, ir.Type):
            return "llvm", str(value)
        elif hasattr(value, "_defn") and _is_versioned(kind.__module__):  # an intrinsic of Numba
            return "intrinsic", self.of(value._defn)
        elif dataclasses.is_dataclass(value):
            named = [field.name for field in dataclasses.fields(value) if field.metadata.get("in_keys", True)]
            fields = [(name, self.of(getattr(value, name))) for name in named]
            return "dataclass", kind.__module__, kind.__qualname__, fields
        elif _is_numba_type(value) and (_is_ours(kind.__module__) or _is_versioned(kind.__module__)):
            return "type", kind.__qualname__, str(value)
        raise UnidentifiedError(f"{kind.__module__}.{kind.__qualname__}")

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self._seen:
            return "seen", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        if _is_versioned(function.__module__ or ""):
            return "named", function.__module__, function.__qualname__
        if _has_other_implementation(function):
            raise UnidentifiedError(f"{function.__qualname__}, which Numba implements by other code")
        try:
            captured = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            raise UnidentifiedError(f"{function.__qualname__} captures a name without value") from None
        return (
            "function", function.__module__, self.of(function.__code__), self.of(captured),
            self.of(function.__defaults__), self.of(function.__kwdefaults__), self.outside(function),
        )  # fmt: skip

    def _code(self, code: CodeType) -> Any:
        return (
            code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable, self.of(code.co_consts),
        )  # fmt: skip

    def outside(self, function: FunctionType) -> Any:
        """The values of a function's global names. For a module whose version is unknown, only the attributes it uses."""
        found: list[Any] = []
        attributes = {name for code in (function.__code__, *inner_codes(function.__code__)) for name in code.co_names}
        for name in global_names(function.__code__):
            value = function.__globals__.get(name, _ABSENT)
            if value is _ABSENT:
                continue  # a builtin, or an error that the compiler will report
            if isinstance(value, ModuleType) and not _is_versioned(value.__name__):
                used = sorted(attribute for attribute in attributes if hasattr(value, attribute))
                found.append((name, value.__name__, [(each, self.of(getattr(value, each))) for each in used]))
            else:
                found.append((name, self.of(value)))
        return found


_ABSENT = object()


def surroundings(function: Any) -> str:
    """Hex digest of the values of a plain function's global names; it does not cover its code and captured values.

    Raises:
        UnidentifiedError: one of the values has no identity.
    """
    return hashlib.sha256(repr((_compilers(), _Identifier().outside(function))).encode()).hexdigest()


@functools.lru_cache(1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function, or one defined in it, looks up in its module, sorted."""
    return tuple(sorted(set(_loaded(code))))


def _loaded(code: CodeType) -> Iterator[str]:
    for each in (code, *inner_codes(code)):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval


def _is_versioned(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _is_ours(module: str) -> bool:
    return module.startswith("schedsearch.backend.")


def _is_numba_type(value: Any) -> bool:
    return any(base.__module__ == "numba.core.types.abstract" and base.__name__ == "Type" for base in type(value).__mro__)


def _has_other_implementation(function: FunctionType) -> bool:
    """Whether Numba was told (for example by `overload`) to compile something else for calls of the function."""
    contexts = [sys.modules["numba.core.registry"].cpu_target] if "numba.core.registry" in sys.modules else []
    contexts += [sys.modules[name].cuda_target for name in ("numba.cuda.descriptor",) if name in sys.modules]
    for context in (each.typing_context for each in contexts):
        context.refresh()
        try:
            context.resolve_value_type(function)
        except Exception:  # a plain function has no type; Numba has several exceptions for that
            continue
        return True
    return False
