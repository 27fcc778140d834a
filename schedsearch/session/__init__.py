"""Tuning: the loop, its budget, and what watches it."""

from __future__ import annotations

from schedsearch.session.plan import Task
from schedsearch.session.tune import BUILD_TIMEOUT_S, RUN_TIMEOUT_S, tune

__all__ = ["BUILD_TIMEOUT_S", "RUN_TIMEOUT_S", "Task", "tune"]
