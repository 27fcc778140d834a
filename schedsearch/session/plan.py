"""What a tuning run will try: the templates of each task, their spaces and the configurations to start from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schedsearch.config import Config
from schedsearch.errors import ConfigError, UsageError, did_you_mean
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import Template, TemplateSet
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Attributes:
        weight: how much a relative gain counts against that of other tasks, above 0.
        restrict: knob -> the only values to try; a knob must exist in some template of the task.
        templates: names of the only templates to try; None: all that fit.
    """

    workload: Workload
    weight: float = 1.0
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)
    templates: Sequence[str] | None = None


@dataclass(frozen=True)
class ArmPlan:
    """A template that will be tried on a task, its (restricted) space and the configuration to start from."""

    template: Template
    space: ConfigSpace
    default: Config


@dataclass(frozen=True)
class TaskPlan:
    task: Task
    arms: tuple[ArmPlan, ...]


def plan_tasks(tasks: Sequence[Task | Workload], templates: TemplateSet, target: Target) -> list[TaskPlan]:
    """Chooses the templates of each task and restricts their spaces. Compiles and measures nothing.

    Raises:
        UsageError: no task, a task twice, an unknown template name, a weight that is not above 0.
        UnsupportedError: no template can run a task on the target.
        ConfigError: a restriction names no knob of any template, or leaves nothing legal.
    """
    if not tasks:
        raise UsageError("there is nothing to tune: the list of workloads is empty")
    full = [task if isinstance(task, Task) else Task(task) for task in tasks]
    for workload, count in Counter(task.workload for task in full).items():
        if count > 1:
            raise UsageError(f"{workload.label} is listed {count} times; list each workload once and give it a weight")
    return [_plan_task(task, templates, target) for task in full]


def _plan_task(task: Task, templates: TemplateSet, target: Target) -> TaskPlan:
    if not task.weight > 0 or not math.isfinite(task.weight):
        raise UsageError(f"weight {task.weight} of {task.workload.label} is not possible; allowed: numbers above 0")
    if task.templates is not None:
        for name in task.templates:
            if name not in templates:
                raise UsageError(f"no template {name!r}{did_you_mean(name, templates)}; known: {', '.join(templates)}")
        templates = TemplateSet(templates[name] for name in task.templates)
    arms, failures = [], []
    matching = templates.matching(task.workload, target)
    spaces = [template.space(task.workload, target) for template in matching]
    known = {name for space in spaces for name in space.names}
    for knob in task.restrict:
        if knob not in known:
            raise ConfigError(
                f"restriction of unknown knob {knob!r}{did_you_mean(knob, known)} of {task.workload.label}; "
                f"knobs of {', '.join(template.name for template in matching)}: {', '.join(sorted(known))}"
            )
    for template, space in zip(matching, spaces):
        applicable = {knob: list(values) for knob, values in task.restrict.items() if knob in space.names}
        try:
            restricted = space.restrict(applicable) if applicable else space
        except ConfigError as error:
            failures.append(f"{template.name}: {error}")
            continue
        default = _closest_legal(restricted, template.default(task.workload, target))
        arms.append(ArmPlan(template, restricted, default))
    kept = {name for arm in arms for name in arm.space.names}
    if failures and not (arms and kept.issuperset(task.restrict)):
        raise ConfigError(f"the restrictions of {task.workload.label} cannot be met: {'; '.join(failures)}")
    return TaskPlan(task, tuple(arms))


def _closest_legal(space: ConfigSpace, config: Config) -> Config:
    """`config`, or where restrictions rule it out a legal one that shares as many of its values as can be found."""
    if not space.check(config):
        return config
    drawn = space.sample(512, np.random.default_rng(0))
    return max(drawn, key=lambda other: (sum(other[name] == config[name] for name in space.names), other.json))
