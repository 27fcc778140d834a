"""What users of Numba and Triton type on a kernel, and what does the same here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.space import Value

_LAUNCH = "call {call}: grid= and block= of the decorator give the grid of each configuration"
_COMPILED = "the first call compiles it, and {name}.bind(...) compiles it and packs its arguments"
_CODE = "`schedsearch dashboard` shows the machine code of each trial"
_RECORDS = "`schedsearch records list` and `records show ID` say what was compiled and measured"
_SOURCE = "numba.cuda.jit({name}.py_func) has it, once the knobs are given values"
_INSTEAD = {
    "__defaults__": "take off the decorator above it: schedsearch.tunable compiles the function in place of numba.cuda.jit",
    "best_config": "{name}.explain(...) says which configuration a call uses",
    "cache": "`records.db`, or the file db=, keeps what was tuned",
    "compile": _COMPILED,
    "configure": _LAUNCH,
    "fn": "{name}.py_func is the function",
    "forall": _LAUNCH,
    "get_regs_per_thread": _RECORDS,
    "inspect_asm": _CODE,
    "inspect_llvm": _CODE,
    "inspect_sass": _CODE,
    "inspect_types": _SOURCE,
    "overloads": _RECORDS,
    "parallel_diagnostics": _SOURCE,
    "recompile": _COMPILED,
    "run": _LAUNCH,
    "signatures": _RECORDS,
    "specialize": _COMPILED,
    "targetoptions": "fastmath, max_registers and others are options of schedsearch.tunable",
    "warmup": _COMPILED,
}
_DECORATED = ("grid", "block", "shared", "cluster", "blocks_per_sm", "num_warps", "num_stages", "griddim", "blockdim")


class Called:
    """The base of kernels that are called by the names of their arguments, without a grid."""

    __name__: str

    def _parameters(self) -> Sequence[str]:
        """The names of the arguments in their order."""
        raise NotImplementedError

    def _knobs(self) -> Mapping[str, Sequence[Value]]:
        return {}

    def _in_order(self, args: tuple[object, ...], named: Mapping[str, object]) -> tuple[Any, ...]:
        """All arguments in the order of the parameters.

        Raises:
            UsageError: one is missing, unknown or given twice.
        """
        if not named:
            return args
        names = tuple(self._parameters())
        given = dict(zip(names, args))
        for name, value in named.items():
            if name in given:
                raise UsageError(f"{self.__name__} gets {name} twice; give it by place or by name")
            if name not in names:
                raise UsageError(f"{self.__name__} takes {', '.join(names)}, not {name!r}{self._instead_of(name)}")
            given[name] = value
        if missing := [name for name in names if name not in given]:
            raise UsageError(f"{self.__name__} lacks {', '.join(missing)}; it takes {', '.join(names)}")
        return tuple(given[name] for name in names)

    def _instead_of(self, name: str) -> str:
        if name in self._knobs():
            return f"; it is a knob, whose value tuning finds: restrict={{{name!r}: [...]}} of tune limits it"
        if name in _DECORATED:
            return "; the decorator has that for every configuration"
        return did_you_mean(name, self._parameters())

    def __getitem__(self, grid: Any) -> Any:
        """Raises UsageError: a kernel is called without a grid."""
        call = f"{self.__name__}({', '.join(self._parameters())})"
        raise UsageError(
            f"{self.__name__}[grid, block] is not needed: call {call}. Grid and block are part of the configuration: grid= "
            f"and block= of the decorator compute them. For a stream: {call[:-1]}, stream=...)"
        )

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("__name__", type(self).__name__)
        advice = _INSTEAD.get(name)
        if advice is None:
            hint = "" if name.startswith("__") else did_you_mean(name, dir(type(self)))
            raise AttributeError(f"{own} has no attribute {name!r}{hint}", name=name, obj=self)
        call = f"{own}({', '.join(self._parameters())})"
        raise AttributeError(f"{own} has no {name!r}: {advice.format(name=own, call=call)}")
