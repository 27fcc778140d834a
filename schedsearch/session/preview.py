"""What a tuning run would do, before it touches a device: its tasks, its budget, and roughly how long it takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from schedsearch.session.plan import TaskPlan, ranges_of, trials_per_task, trials_to_choose
from schedsearch.target import Target
from schedsearch.typed import JsonObject

# CPU seconds to build a candidate, and device seconds to verify and time it.
_BUILD_S = {"cuda": 0.8, "cpu": 0.7}
_MEASURE_S = {"cuda": 0.07, "cpu": 0.1}
_START_S, _RACE_S = 4.0, 0.5  # the processes of a run and the first build; a task's inputs and final race


@dataclass(frozen=True)
class Preview:
    """A run that has not begun.

    Attributes:
        target: key of the device.
        names, plans: the tasks.
        trials: of each task; None without such a limit.
        to_choose: trials that the choice of kernels for ranges of sizes may take, besides.
        time_s: the limit of the whole run; None without one.
        workers: processes that build.
        estimate_s: roughly how long the run takes, at most `time_s`; infinite only for an endless space without a limit.
    """

    target: str
    names: tuple[str, ...]
    plans: tuple[TaskPlan, ...]
    trials: int | None
    to_choose: int
    time_s: float | None
    workers: int
    estimate_s: float

    @property
    def ranges(self) -> int:
        """The number of ranges of sizes among the tasks."""
        return len(ranges_of(self.plans))

    def to_json(self) -> JsonObject:
        """The event `plan` of `tune --dry-run --json`."""
        return {
            "event": "plan",
            "target": self.target,
            "trials": self.trials,
            "trials_to_choose": self.to_choose,
            "time_s": self.time_s,
            "estimate_s": round(self.estimate_s, 1),
            "tasks": [_task_json(name, plan) for name, plan in zip(self.names, self.plans)],
        }


def preview(
    plans: Sequence[TaskPlan],
    names: Sequence[str],
    target: Target,
    *,
    trials: int | None,
    time_s: float | None,
    workers: int | None = None,
) -> Preview:
    """What a run of `plans` would do.

    Args:
        names: one for each plan.
        trials: the budget of one size, as `tune` takes it.
        workers: processes that build; None for as many as `tune` starts.

    Raises:
        UsageError: the budget is too small for a range of sizes.
    """
    each = None if trials is None else trials_per_task(trials, plans)
    chosen = 0
    if trials is not None and each is not None:
        chosen = sum(trials_to_choose(trials, each, len(own)) for own in ranges_of(plans).values())
    workers = workers or max(1, len(os.sched_getaffinity(0)) - (target.kind == "cuda"))
    build_s, measure_s = _BUILD_S[target.kind] / workers, _MEASURE_S[target.kind]
    candidate_s = build_s + measure_s if target.kind == "cpu" else max(build_s, measure_s)
    sizes = [sum(arm.space.size.count for arm in plan.arms) for plan in plans]
    candidates = chosen + sum(size if each is None else min(each, size) for size in sizes)
    estimate_s = _START_S + len(plans) * _RACE_S + candidates * candidate_s
    estimate_s = min(estimate_s, math.inf if time_s is None else time_s)
    return Preview(target.key, tuple(names), tuple(plans), each, chosen, time_s, workers, estimate_s)


def _task_json(name: str, plan: TaskPlan) -> JsonObject:
    templates = [
        {
            "template": arm.template.name,
            "configurations": arm.space.size.count,
            "exact": arm.space.size.exact,
            "default": dict(arm.default),
        }
        for arm in plan.arms
    ]
    workload = plan.task.workload
    task = {"name": name, "label": workload.label, "workload_id": workload.id, "weight": plan.task.weight}
    return {**task, "templates": templates}
