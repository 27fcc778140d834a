"""Deployment: from a workload and a database to a callable kernel, without searching.

On the exact rung nothing of Numba, LLVM, XGBoost, SQLAlchemy or the templates is imported for a GPU kernel.
"""

from __future__ import annotations

from schedsearch.runtime.deploy import RUNGS, Explanation, compile, explain
from schedsearch.runtime.kernel import Kernel, Provenance, Step

__all__ = ["RUNGS", "Explanation", "Kernel", "Provenance", "Step", "compile", "explain"]
