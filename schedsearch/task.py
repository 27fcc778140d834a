"""What to tune: a workload, and what the search may do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schedsearch.workload import Workload


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Attributes:
        weight: how much a relative gain counts against that of other tasks, above 0.
        restrict: knob -> the only values to try; a knob must exist in some template of the task.
        templates: names of the only templates to try; None: all that fit.
        name: for tables and messages; the workload's label unless given.
    """

    workload: Workload
    weight: float = 1.0
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)
    templates: Sequence[str] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.workload.label)
