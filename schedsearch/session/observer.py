"""What a tuning run tells while it goes on: `Observer` and its events.

Everything here is a frozen value, so an observer can keep, print or send what it gets; none of it reaches back into the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.session.summary import RunSummary, TaskSummary
from schedsearch.workload import Workload


@dataclass(frozen=True)
class ArmStart:
    """One (task, template) pair as the run starts. `size` is the space's, as text; `resumed` counts earlier trials."""

    template: str
    size: str
    resumed: int


@dataclass(frozen=True)
class TaskStart:
    workload: Workload
    weight: float
    arms: tuple[ArmStart, ...]


@dataclass(frozen=True)
class RunStart:
    """`trials` is what the run may still spend over all tasks, None without such a limit; `resumed` what it already has."""

    run: str
    target: str
    tasks: tuple[TaskStart, ...]
    trials: int | None
    time_s: float | None
    resumed: int


@dataclass(frozen=True)
class Trial:
    """A candidate's outcome.

    Attributes:
        task: index of its task in the run.
        outcome: None when the candidate is a duplicate: its machine code equals one that was already measured.
        time_ns: median time; of a duplicate the time of its twin; None unless ok.
        counted: whether it cost a trial.
        done: trials of this run so far, over all tasks.
        best_ns, default_ns: of its task, after this outcome: the fastest, and the fastest default.
        elapsed_s: since the start of the run.
    """

    task: int
    workload: Workload
    template: str
    config: Config
    outcome: Outcome | None
    time_ns: float | None
    message: str
    counted: bool
    done: int
    best_ns: float | None
    default_ns: float | None
    elapsed_s: float
    final_race: bool = False


@dataclass(frozen=True)
class Best:
    """A task has a new best. `previous_ns` is None for the first."""

    task: int
    workload: Workload
    template: str
    config: Config
    time_ns: float
    previous_ns: float | None
    elapsed_s: float


class Observer:
    """Watches a run. Override what is of interest; every method is called in the thread that runs `tune`, in this order.

    An exception in an observer ends the run; what was measured is in the store by then.
    """

    def on_start(self, event: RunStart) -> None:
        """Before the first candidate."""

    def on_trial(self, event: Trial) -> None:
        """After each outcome was stored; rejected and duplicate candidates and the final race included."""

    def on_best(self, event: Best) -> None:
        """After a new best was promoted in the store."""

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        """After the final race of a task."""

    def on_end(self, summary: RunSummary) -> None:
        """Last, after an interruption too."""
