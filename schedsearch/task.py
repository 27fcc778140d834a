"""What to tune: a workload, and the limits of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.workload import Workload, WorkloadRange


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Attributes:
        weight: how much a relative gain counts compared with other tasks; above 0.
        restrict: knob -> the only values to try; each knob must exist in some template of the task.
        templates: names of the only templates to try; None: all that fit.
        name: for tables and messages; default: the workload's label.
        of_range: the range whose kernels the task's results choose; see `range_tasks`.
    """

    workload: Workload
    weight: float = 1.0
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)
    templates: Sequence[str] | None = None
    name: str = ""
    of_range: WorkloadRange | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.workload.label)


def range_tasks(of_range: WorkloadRange, task: Task | None = None) -> list[Task]:
    """The tasks of the sizes of a range that are searched.

    Args:
        task: gives weight, restrictions, templates and name.
    """
    like = task or Task(of_range.workload)
    name = of_range.parameter if task is None or not task.name else f"{task.name}, {of_range.parameter}"
    return [
        replace(like, workload=of_range.at(size), name=f"{name} = {size}" if task else "", of_range=of_range)
        for size in of_range.samples()
    ]
