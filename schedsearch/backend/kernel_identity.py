"""Names everything that decides the code of a Python function; the name is the same in every process and every run.

The code of a kernel depends on its bytecode, on the values that it captures, and on the values of global names: numbers,
types, operations, other functions. The name covers all of them by value, as far as they can be reached. Objects of the
compilers or of Python itself enter by name only; the versions of these and the sources of this package enter instead.

Any other value, for example an object of an unknown class, has no name. A kernel that uses it has no name either.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from llvmlite import ir

from schedsearch.backend.code_identity import Walker, inner_codes
from schedsearch.backend.early_launch import SLOW_BLOCKS
from schedsearch.backend.numba_private import definition_of
from schedsearch.identity import sha256_hex

_VERSIONED = ("numba", "numba-cuda", "numba-cuda-mlir", "llvmlite", "numpy")
_REGISTRIES = ("numba.core.typing.templates", "numba.cuda.typing.templates")
_PACKAGES = frozenset({"numba", "numba_cuda", "llvmlite", "numpy"}) | sys.stdlib_module_names


class UnidentifiedError(Exception):
    """A value has no name that is the same in every process; the text says which value."""


def digest(*values: object) -> str:
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
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_") or name == SLOW_BLOCKS}
    return repr((sorted(found.items()), sorted(settings.items()), _OWN_SOURCES))


_OWN_SOURCES = sha256_hex(
    b"\0".join(path.name.encode() + path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)


class _Identifier(Walker):
    """Distinguishes whatever the compilers may: its ids change with every version of this package."""

    def is_known(self, module: str) -> bool:
        return _is_versioned(module)

    def read(self, function: FunctionType) -> frozenset[str]:
        # Not the names of locals: a module's object of the same name may have no identity.
        return frozenset(name for code in (function.__code__, *inner_codes(function.__code__)) for name in code.co_names)

    def empty(self, name: str, where: str) -> Exception:
        return UnidentifiedError(f"{where} captures {name}, a name without value")

    def other(self, value: Any, where: str) -> Any:
        if isinstance(value, ModuleType):
            if _is_versioned(value.__name__):
                # Numba's types have either name, depending on which module is imported first.
                return "module", value.__name__.replace("numba.core.types", "numba.types")
            raise UnidentifiedError(f"module {value.__name__}")
        declared = getattr(value, "schedsearch_declared", None)
        if declared is not None:
            return "operation", repr(declared)
        kind = type(value)
        fields = getattr(value, "_fields", None)
        if isinstance(value, type) and issubclass(value, tuple) and fields is not None:  # Numba reads no more of its class
            defaults = self.of(tuple(getattr(value, "_field_defaults", {}).items()))
            return "named tuple", value.__module__, value.__qualname__, fields, defaults
        if isinstance(value, type | BuiltinFunctionType):
            if _is_ours(value.__module__) or _is_versioned(value.__module__):
                return "named", value.__module__, value.__qualname__
        elif isinstance(value, ir.Type):
            return "llvm", str(value)
        elif definition_of(value) is not None and _is_versioned(kind.__module__):
            return "intrinsic", self.of(definition_of(value))
        elif dataclasses.is_dataclass(value):
            named = [field.name for field in dataclasses.fields(value) if field.metadata.get("in_keys", True)]
            fields = [(name, self.of(getattr(value, name))) for name in named]
            return "dataclass", kind.__module__, kind.__qualname__, fields
        elif _is_numba_type(value) and (_is_ours(kind.__module__) or _is_versioned(kind.__module__)):
            return "type", kind.__qualname__, str(value)
        raise UnidentifiedError(f"{kind.__module__}.{kind.__qualname__}")

    def function(self, function: FunctionType, where: str) -> Any:
        if _has_other_implementation(function):
            raise UnidentifiedError(f"{function.__qualname__}, which Numba implements by other code")
        captured = self.captured(function, function.__qualname__)
        return (
            "function", function.__module__, self.of(function.__code__), captured,
            self.of(function.__defaults__), self.of(function.__kwdefaults__), self.outside(function),
        )  # fmt: skip

    def code(self, code: CodeType, where: str) -> Any:
        return (
            code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_exceptiontable, self.of(code.co_consts),
        )  # fmt: skip


def surroundings(function: Any) -> str:
    """Hex digest of the values of a plain function's global names; it does not cover its code and captured values.

    Raises:
        UnidentifiedError: one of the values has no identity.
    """
    return hashlib.sha256(repr((_compilers(), _Identifier().outside(function))).encode()).hexdigest()


def _is_versioned(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _is_ours(module: str) -> bool:
    return module.startswith("schedsearch.backend.")


def _is_numba_type(value: object) -> bool:
    return any(base.__module__ == "numba.core.types.abstract" and base.__name__ == "Type" for base in type(value).__mro__)


def _has_other_implementation(function: FunctionType) -> bool:
    """Whether Numba was told (for example by `overload`) to compile something else for calls of the function.

    It looks only at what has been registered so far. Loading Numba's own implementations, which are of functions that enter
    by name, takes half a second, and a process that finds all its code in the build cache needs none of them.
    """
    registered = [sys.modules[name].builtin_registry.globals for name in _REGISTRIES if name in sys.modules]
    if any(value is function for each in registered for value, _ in each):
        return True
    contexts = [sys.modules["numba.core.registry"].cpu_target] if "numba.core.registry" in sys.modules else []
    contexts += [sys.modules[name].cuda_target for name in ("numba.cuda.descriptor",) if name in sys.modules]
    for context in (each.typing_context for each in contexts):
        try:
            context.resolve_value_type(function)
        except Exception:  # a plain function has no type; Numba has several exceptions for that
            continue
        return True
    return False
