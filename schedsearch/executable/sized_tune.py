"""Tunes the kernels of networks whose sizes are known at run time only: those of a table of sizes, and of dynamic graphs.

A layer of a table is tuned for the range of its sizes if there is time for that, and at the largest size otherwise. A layer
whose sizes are no range, such as a matrix product with the pixels of all images as its rows, is always tuned at the largest
size, and a call of a dynamic graph at its bound. The table takes such a configuration for all sizes that it serves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import Deadline
from schedsearch.executable.timely import TASKS_A_SECOND, TUNED, time_to_tune, tuned
from schedsearch.network.graph import Network
from schedsearch.network.plan import missing
from schedsearch.session.plan import RANGE_SHARE, SEARCH_SHARE
from schedsearch.target import Target
from schedsearch.task import Task, range_tasks
from schedsearch.text import counted
from schedsearch.workload import Workload, WorkloadRange

if TYPE_CHECKING:
    from schedsearch.network.costs import Cost, Costs

_FEW = 3  # names in a line


@dataclass(frozen=True)
class Group:
    """What is tuned together: the searched sizes of a range, or one workload.

    Attributes:
        label: for messages.
        largest: the task of the largest size alone.
        largest_known: whether the database has a record of it.
    """

    label: str
    tasks: tuple[Task, ...]
    largest: Task
    largest_known: bool = False

    @classmethod
    def of(cls, task: Task, of_range: WorkloadRange | None = None, largest_known: bool = False) -> Group:
        if of_range is None:
            return cls(task.workload.label, (task,), task)
        return cls(of_range.label, tuple(range_tasks(of_range, task)), task, largest_known)

    @property
    def is_range(self) -> bool:
        return self.tasks[0].of_range is not None

    @property
    def seconds(self) -> float:
        """The least time that is worth spending on it."""
        share = RANGE_SHARE / SEARCH_SHARE if self.is_range else 1.0
        return share * len(self.tasks) / TASKS_A_SECOND

    @property
    def least_seconds(self) -> float:
        """The same for its largest size alone."""
        return 0.0 if self.largest_known else 1.0 / TASKS_A_SECOND


@dataclass(frozen=True)
class Division:
    """What a time is enough for.

    Attributes:
        whole: tuned with all their tasks.
        largest: ranges that are tuned at their largest size only, or were before.
        left: not tuned.
    """

    whole: tuple[Group, ...]
    largest: tuple[Group, ...]
    left: tuple[Group, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], time_s: float) -> Division:
        """Every group has its largest size tuned before any range has its others: a range takes as long as ten layers at one
        size, and layers with default kernels lose more than those whose kernels were tuned for the largest size. Something
        is tuned in any case."""
        begun: list[Group] = []
        left_s = time_s
        for group in groups:
            if begun and group.least_seconds > left_s:
                break
            left_s -= group.least_seconds
            begun.append(group)
        whole: list[Group] = []
        idle = all(group.largest_known for group in begun)
        for group in begun:
            more_s = group.seconds - group.least_seconds
            if group.is_range and more_s > left_s and (whole or not idle):
                break
            left_s -= more_s
            whole.append(group)
        rest = begun[len(whole) :]
        whole += [group for group in rest if not group.is_range]
        return cls(tuple(whole), tuple(group for group in rest if group.is_range), tuple(groups[len(begun) :]))

    @property
    def tasks(self) -> list[Task]:
        """Each workload once."""
        tasks: dict[Workload, Task] = {}
        for task in itertools.chain.from_iterable(group.tasks for group in self.whole):
            tasks.setdefault(task.workload, task)
        for group in self.largest:
            if not group.largest_known:
                tasks.setdefault(group.largest.workload, group.largest)
        return list(tasks.values())


def missing_ranges(
    largest: Network,
    costs: Costs,
    columns: Iterable[Mapping[int, Workload]],
    range_of: Callable[[Mapping[int, Workload]], WorkloadRange | None],
    is_tuned: Callable[[WorkloadRange], bool],
) -> list[Group]:
    """What is worth tuning for a table of sizes, the most telling first, by the costs at the largest size.

    Args:
        largest: the network of the largest size.
        columns: size -> workload, of all calls that a plan may have.
        range_of: the range that a column is, if it is one.
        is_tuned: whether the database has kernels of a range.
    """
    ranges: dict[Workload, WorkloadRange] = {}
    for column in columns:
        workload = column[max(column)]
        if workload not in ranges and (of_range := range_of(column)) is not None:
            ranges[workload] = of_range
    tuned = {each for each in dict.fromkeys(ranges.values()) if is_tuned(each)}

    def cost(workload: Workload) -> Cost:
        found, of_range = costs(workload), ranges.get(workload)
        # A record of the largest size alone serves the others less well than kernels of the range.
        lacks = found.measured and of_range is not None and of_range not in tuned
        return replace(found, origin="scaled") if lacks else found

    tasks = [task for task in missing(largest, cost) if ranges.get(task.workload) not in tuned]
    return [Group.of(task, ranges.get(task.workload), costs(task.workload).measured) for task in tasks]


def missing_calls(workloads: Iterable[Workload], others: Iterable[Workload], costs: Costs) -> list[Group]:
    """What is worth tuning for a graph, the most telling first.

    Args:
        workloads: of all calls, each as often as it is called.
        others: those that could take their place.
    """
    weights = Counter(workloads)
    weights.update(set(others) - set(weights))
    found = [(costs(workload), workload, weight) for workload, weight in weights.items()]
    able = [
        (weight * (cost.time_ns - cost.least_ns), Task(workload, weight=weight))
        for cost, workload, weight in found
        if not cost.measured and math.isfinite(cost.time_ns)
    ]
    return [Group.of(task) for _, task in sorted(able, key=lambda each: (-each[0], each[1].workload.id))]


def tune_groups(
    groups: Sequence[Group], db: Path, target: Target, deadline: Deadline, mode: str, say: Callable[[str], None]
) -> None:
    """Tunes as much as the time is enough for, as `Division` says, and says what is left.

    Raises: as `schedsearch.tune`.
    """
    if not groups:
        say("every kernel of the plan was tuned; nothing to tune")
        return
    until = time_to_tune(deadline, len(groups), say)
    if until is None:
        return
    division = Division.of(groups, until.left_s)
    tasks = division.tasks
    chosen = len(division.whole) + sum(not group.largest_known for group in division.largest)
    ranges = sum(group.is_range for group in division.whole)
    of_ranges = f", {ranges} of them for a range of sizes" if ranges else ""
    say(f"tuning {chosen} of {counted(len(groups), 'kernel')} that were not tuned{of_ranges}, for {until.left_s:.0f} s")
    summary = tuned(tasks, db, target, mode, until, say)
    if summary is None:
        return
    for each in summary.ranges:
        if each.table is None:
            say(f"not tuned: {each.of_range.label}: {each.problem}")
    needed = math.ceil(sum(group.seconds for group in groups) / TUNED)
    for what, rest in (
        ("tuned at the largest size only, for want of time", division.largest),
        ("not tuned, for want of time", division.left),
    ):
        if rest:
            more = f" and {len(rest) - _FEW} more" if len(rest) > _FEW else ""
            labels = "; ".join(group.label for group in rest[:_FEW])
            say(f"{what}: {labels}{more}; --tune {needed}s tries all, or build again")
