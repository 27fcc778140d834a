"""Deployment: from a workload and a database to a callable kernel, without searching.

On the exact rung nothing of Numba, LLVM, XGBoost, SQLAlchemy or the templates is imported for a GPU kernel.
"""

from __future__ import annotations

from schedsearch.runtime.arrays import OutputLike, output_like
from schedsearch.runtime.cache import KernelCache
from schedsearch.runtime.deploy import compile, explain
from schedsearch.runtime.explain import Explanation
from schedsearch.runtime.kernel import Kernel, Provenance, Step
from schedsearch.runtime.ladder import RUNGS
from schedsearch.runtime.prepared import Prepared

__all__ = [
    "RUNGS",
    "Explanation",
    "Kernel",
    "KernelCache",
    "OutputLike",
    "Prepared",
    "Provenance",
    "Step",
    "compile",
    "explain",
    "output_like",
]
