"""Deployment: gets a callable kernel for a workload from a database, without a search.

For a GPU kernel the exact rung imports none of Numba, LLVM, XGBoost, SQLAlchemy and the templates.
"""

from __future__ import annotations

from schedsearch.runtime.arrays import OutputLike, output_like
from schedsearch.runtime.cache import KernelCache
from schedsearch.runtime.deploy import compile, explain
from schedsearch.runtime.explain import Explanation
from schedsearch.runtime.kernel import Kernel, Provenance, Step
from schedsearch.runtime.ladder import RUNGS
from schedsearch.runtime.prepared import Prepared
from schedsearch.runtime.range_kernel import RangeKernel

__all__ = [
    "RUNGS",
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
