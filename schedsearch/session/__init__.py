"""Tuning: the loop, its budget, and its observers."""

from __future__ import annotations

from schedsearch.session.plan import TaskPlan, plan_tasks
from schedsearch.session.tune import BUILD_TIMEOUT_S, REFERENCE_TIMEOUT_S, RUN_TIMEOUT_S, tune
from schedsearch.task import Task

__all__ = ["BUILD_TIMEOUT_S", "REFERENCE_TIMEOUT_S", "RUN_TIMEOUT_S", "Task", "TaskPlan", "plan_tasks", "tune"]
