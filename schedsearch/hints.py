"""Warm start across workloads: configurations that were the fastest of similar tasks, to be tried early on a new one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from schedsearch.space import ConfigSpace
from schedsearch.workload import Config, Workload, distance

MAX_HINTS = 4  # each costs a trial


@dataclass(frozen=True)
class Known:
    """The fastest configuration of a template on one task."""

    workload: Workload
    target: str
    config: Config


def hints(workload: Workload, target: str, space: ConfigSpace, known: Iterable[Known]) -> list[Config]:
    """At most `MAX_HINTS` distinct configurations that are legal in the space.

    Those of other workloads on the same target come first, the most similar one (`schedsearch.workload.distance`) before the
    others, then those of other targets. What is known of the very task is no hint: it is a result.

    Args:
        target: key of the task's target.
        known: of the same version of one template; for a task listed twice the first entry counts.
    """
    by_task: dict[tuple[Workload, str], Known] = {}
    for each in known:
        if (each.workload, each.target) != (workload, target):
            by_task.setdefault((each.workload, each.target), each)
    ranked = sorted(
        by_task.values(), key=lambda each: (each.target != target, distance(workload, each.workload), each.workload.json)
    )
    chosen: dict[Config, None] = {}
    for each in ranked:
        if len(chosen) == MAX_HINTS:
            break
        if each.config not in chosen and not space.check(each.config):
            chosen[each.config] = None
    return list(chosen)
