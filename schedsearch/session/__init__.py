"""Tuning: which candidate is measured next, and when does a run end?

The loop, its budget and its observers. What makes a candidate right belongs in `measure`, how it is proposed in `tuner`.
"""

from __future__ import annotations

from schedsearch.session.plan import TaskPlan, plan_tasks
from schedsearch.session.tune import BUILD_TIMEOUT_S, REFERENCE_TIMEOUT_S, RUN_TIMEOUT_S, tune
from schedsearch.task import Task

__all__ = ["BUILD_TIMEOUT_S", "REFERENCE_TIMEOUT_S", "RUN_TIMEOUT_S", "Task", "TaskPlan", "plan_tasks", "tune"]
