"""What to tune: a workload, and the limits of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schedsearch.workload import Workload


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Attributes:
        weight: how much a relative gain counts compared with other tasks; above 0.
        restrict: knob -> the only values to try; each knob must exist in some template of the task.
        templates: names of the only templates to try; None: all that fit.
        name: for tables and messages; default: the workload's label.
    """

    workload: Workload
    weight: float = 1.0
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)
    templates: Sequence[str] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.workload.label)
