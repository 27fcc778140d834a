"""What a tuning run will try: the templates of each task, their spaces and the configurations to start from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from schedsearch.config import Config
from schedsearch.errors import ConfigError, SeveralErrors, TaskPart, UnsupportedError, UsageError, did_you_mean
from schedsearch.measurement import Record
from schedsearch.space import ConfigSpace, closest_legal
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import Template, TemplateSet
from schedsearch.workload import Workload, WorkloadRange

RANGE_SHARE = 3  # trials of a range, in budgets of one size: search, choice of kernels and their verification
SEARCH_SHARE = 2  # of these for the search
FEWEST_TO_VERIFY = 4  # trials: both ends of a range, just before its end, and the middle
_KEPT_TO_VERIFY = 2 * FEWEST_TO_VERIFY  # a small budget's search leaves as much


@dataclass(frozen=True)
class ArmPlan:
    """A template that will be tried on a task, its (restricted) space and the configuration to start from.

    `plain` is the template's plain configuration (`Template.plain`); None if it has none, or restrictions exclude it.
    """

    template: Template
    space: ConfigSpace
    default: Config
    plain: Config | None = None

    def known(self, records: Mapping[Config, Record]) -> dict[Config, Record]:
        """The records of the space's configurations, by configuration, with today's names of knobs.

        If a configuration was also recorded under earlier names, the record with today's names counts, which is newer.
        """
        named = [(recorded, self.template.current(recorded)) for recorded in records]
        newest = [(recorded, config) for recorded, config in named if recorded == config or config not in records]
        found: dict[Config, Record] = {}
        for at in self.space.legal_among(config for _, config in newest)[1].tolist():
            recorded, config = newest[at]
            found[config] = records[recorded] if recorded == config else replace(records[recorded], config=config)
        return found


@dataclass(frozen=True)
class TaskPlan:
    """A task with the templates that fit it, made by `plan_tasks` for one target."""

    task: Task
    arms: tuple[ArmPlan, ...]
    target: Target


def plan_tasks(tasks: Sequence[Task | Workload], templates: TemplateSet, target: Target) -> list[TaskPlan]:
    """Chooses the templates of each task and restricts their spaces. Compiles and measures nothing.

    Every space and every default is computed once here; a run that gets the plans does not compute them again.

    Raises:
        UsageError: there is no task, a task occurs twice, a template name is unknown, or a weight is not above 0.
        UnsupportedError: no template can run a task on the target.
        ConfigError: a restriction does not name a knob of any template, or leaves nothing legal.
        SeveralErrors: several of them.

    The error's `where` says which task is wrong and which part of it.
    """
    if not tasks:
        raise UsageError("there is nothing to tune: the list of workloads is empty")
    plans: list[TaskPlan] = []
    problems: list[UsageError] = []
    first: dict[Workload, int] = {}
    for index, given in enumerate(tasks):
        task = given if isinstance(given, Task) else Task(given)
        if first.setdefault(task.workload, index) != index:
            problems.append(
                UsageError(
                    f"{task.workload.label} is listed more than once; list each workload once and give it a weight",
                    where=TaskPart(index),
                )
            )
            continue
        planner = _Planner(index, task, target, problems)
        if (arms := planner.arms(templates)) is not None:
            plans.append(TaskPlan(task, arms, target))
    if problems:
        raise problems[0] if len(problems) == 1 else SeveralErrors.of(problems)
    return plans


@dataclass(frozen=True)
class _Planner:
    """Plans one task, and adds what is wrong with it to `problems`."""

    index: int
    task: Task
    target: Target
    problems: list[UsageError]

    def arms(self, templates: TemplateSet) -> tuple[ArmPlan, ...] | None:
        """The templates that fit with their restricted spaces; None after adding problems."""
        task, before = self.task, len(self.problems)
        if not task.weight > 0 or not math.isfinite(task.weight):
            self._add(f"weight {task.weight} of {task.workload.label} is not possible; allowed: numbers above 0", "weight")
        try:
            matching = self._chosen(templates).matching(task.workload, self.target)
        except UnsupportedError as error:
            error.where = TaskPart(self.index, "" if task.templates is None else "templates")
            self.problems.append(error)
            return None
        arms = self._restricted([(template, template.space(task.workload, self.target)) for template in matching])
        return tuple(arms) if len(self.problems) == before else None

    def _chosen(self, templates: TemplateSet) -> TemplateSet:
        """The templates that the task names; if none of them exists, all, so that restrictions can be looked at."""
        if self.task.templates is None:
            return templates
        for place, name in enumerate(self.task.templates):
            if name not in templates:
                self._add(templates.why_missing(name, self.task.workload.op), "templates", place)
        known = [templates[name] for name in self.task.templates if name in templates]
        return TemplateSet(known) if known else templates

    def _restricted(self, spaces: Sequence[tuple[Template, ConfigSpace]]) -> list[ArmPlan]:
        task = self.task
        names = ", ".join(template.name for template, _ in spaces)
        knobs = {template.name: {*space.names, *template.renamed} for template, space in spaces}
        known = {name for each in knobs.values() for name in each}
        for knob in (name for name in task.restrict if name not in known):
            self._add(
                f"restriction of unknown knob {knob!r}{did_you_mean(knob, known)} of {task.workload.label}; "
                f"knobs of {names}: {', '.join(sorted(known))}",
                "restrict",
                knob,
                ConfigError,
            )
        arms, failures = [], []
        for template, space in spaces:
            try:
                restricted = template.restricted(space, task.restrict)
            except ConfigError as error:
                failures.append(f"{template.name}: {error}")
                continue
            default = closest_legal(restricted, template.default(task.workload, self.target, space))
            plain = template.plain(task.workload, self.target, space)
            if plain is not None and restricted.check(plain):
                plain = None
            arms.append(ArmPlan(template, restricted, default, plain))
        kept = {name for arm in arms for name in knobs[arm.template.name]}
        if failures and not (arms and kept.issuperset(task.restrict.keys() & known)):
            what = f"the restrictions of {task.workload.label} cannot be met: {'; '.join(failures)}"
            self._add(what, "restrict", error=ConfigError)
        return arms

    def _add(self, message: str, part: str, item: str | int | None = None, error: type[UsageError] = UsageError) -> None:
        self.problems.append(error(message, where=TaskPart(self.index, part, item)))


def ranges_of(plans: Sequence[TaskPlan]) -> dict[WorkloadRange, list[TaskPlan]]:
    """The ranges among the tasks of a run, with the plans of their sizes."""
    found: dict[WorkloadRange, list[TaskPlan]] = {}
    for plan in plans:
        if plan.task.of_range is not None:
            found.setdefault(plan.task.of_range, []).append(plan)
    return found


def trials_per_task(trials: int, plans: Sequence[TaskPlan]) -> int:
    """The budget of each task of a run's search, so that a range leaves the rest of its budget to the choice of kernels.

    Raises:
        UsageError: the budget of a range is too small to try each searched size and to verify one kernel.
    """
    ranges = ranges_of(plans)
    total = trials * sum(plan.task.of_range is None for plan in plans)
    for of_range, own in ranges.items():
        fewest = -(-(len(own) + FEWEST_TO_VERIFY) // RANGE_SHARE)
        if trials < fewest:
            raise UsageError(
                f"{trials} trials do not suffice for {of_range.label}: {len(own)} sizes are searched, and a kernel is "
                f"verified for {FEWEST_TO_VERIFY}, with {RANGE_SHARE} times the trials of one size; give {fewest} or more"
            )
        total += max(len(own), min(SEARCH_SHARE * trials, RANGE_SHARE * trials - _KEPT_TO_VERIFY))
    return max(1, total // len(plans)) if plans else trials


def trials_to_choose(trials: int, searched: int, sizes: int) -> int:
    """The trials that the choice of a range's kernels may take.

    Args:
        trials: the budget of one size.
        searched, sizes: the search took `searched` trials for each of so many sizes.
    """
    return RANGE_SHARE * trials - searched * sizes


def search_time_s(time_s: float, plans: Sequence[TaskPlan]) -> float:
    """The part of a time limit after which the search ends, because the kernels of ranges must be chosen."""
    ranges = len(ranges_of(plans))
    single = sum(plan.task.of_range is None for plan in plans)
    return time_s * (single + SEARCH_SHARE * ranges) / (single + RANGE_SHARE * ranges)
