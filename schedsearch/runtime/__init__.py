"""Deployment: gets a callable kernel for a workload from a database, without a search.

For a GPU kernel the exact level imports none of Numba, LLVM, XGBoost, SQLAlchemy and the templates. Each name is imported
when it is first used, because executables need little of this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsearch.runtime.arrays import OutputLike, output_like
    from schedsearch.runtime.cache import KernelCache
    from schedsearch.runtime.deploy import compile, explain
    from schedsearch.runtime.explanation import Explanation
    from schedsearch.runtime.fallback import LEVELS
    from schedsearch.runtime.kernel import Kernel, Provenance, Step
    from schedsearch.runtime.prepared import Prepared
    from schedsearch.runtime.range_kernel import RangeKernel

_HOMES = {
    "LEVELS": "fallback",
    "Explanation": "explanation",
    "Kernel": "kernel",
    "KernelCache": "cache",
    "OutputLike": "arrays",
    "Prepared": "prepared",
    "Provenance": "kernel",
    "RangeKernel": "range_kernel",
    "Step": "kernel",
    "compile": "deploy",
    "explain": "deploy",
    "output_like": "arrays",
}

__all__ = [
    "LEVELS",
    "Explanation",
    "Kernel",
    "KernelCache",
    "OutputLike",
    "Prepared",
    "Provenance",
    "RangeKernel",
    "Step",
    "compile",
    "explain",
    "output_like",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"schedsearch.runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'schedsearch.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
