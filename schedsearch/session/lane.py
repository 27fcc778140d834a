"""One device of a run: its runner, its thread, and what is under way there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedsearch.errors import OperatorError, PreparationError
from schedsearch.measurement import Measurement
from schedsearch.session.collaborators import FarRunnerLike, RunnerLike
from schedsearch.session.pace import DeviceThread
from schedsearch.session.task_state import Proposal, TaskState
from schedsearch.target import Target

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

OF_TASK = (PreparationError, OperatorError)
"""Errors because of which nothing of a task can be measured."""

Work = tuple[Proposal, "Built"]


@dataclass(frozen=True)
class Measured:
    """A candidate's outcome."""

    proposal: Proposal
    built: Built
    measurement: Measurement


@dataclass(frozen=True)
class GivenUp:
    """Nothing of a task can be measured: its inputs and its reference cannot be made."""

    task: TaskState
    error: Exception


@dataclass(frozen=True)
class Notice:
    """Something about a device that the user wants to know."""

    device: Target
    text: str


@dataclass(eq=False)
class Lane:
    """A device during a run. Owned by the main thread.

    Attributes:
        far: the runner, if its device is elsewhere.
        prepared: the tasks whose inputs and reference are on the device, or on their way.
        measuring, preparing: the calls under way.
        suspects: failures in a row, which count as soon as the device is known to be sound.
        probe: the measurement of a kernel that is known to be right.
        baseline_ns: what the kernel took here that all lanes have measured; None until then.
        problem: why it takes no more work; "" while it does.
    """

    device: Target
    runner: RunnerLike
    thread: DeviceThread
    prepared_before_s: float
    prepared: set[TaskState] = field(default_factory=set)
    measuring: dict[Future[list[Measurement | Exception]], list[Work]] = field(default_factory=dict)
    preparing: tuple[Future[None], TaskState] | None = None
    suspects: list[tuple[Work, Measurement]] = field(default_factory=list)
    probe: Future[Measurement] | None = None
    baseline: Future[Measurement] | None = None
    baseline_ns: float | None = None
    trials: int = 0
    problem: str = ""
    far: FarRunnerLike | None = field(init=False)

    def __post_init__(self) -> None:
        # Once, because the loop asks for each candidate and lane, and looking at a protocol's methods takes microseconds.
        self.far = self.runner if isinstance(self.runner, FarRunnerLike) else None

    @property
    def kind(self) -> str:
        """Lanes of the same kind share tasks."""
        return self.device.key

    @property
    def futures(self) -> list[Future[Any]]:
        others = (self.preparing[0] if self.preparing else None, self.probe, self.baseline)
        return [*self.measuring, *(each for each in others if each is not None)]

    @property
    def prepare_s(self) -> float:
        """Seconds of this run that making inputs and references took here."""
        return self.runner.prepare_s - self.prepared_before_s

    @property
    def is_there(self) -> bool:
        """Whether it takes work now: it has no problem, and its device did not go away."""
        return not self.problem and (self.far is None or self.far.is_there)

    @property
    def state(self) -> str:
        """For those who watch: quarantined, lost (its device is away), busy, preparing, or waiting for a build."""
        if self.problem:
            return "quarantined"
        if not self.is_there:
            return "lost"
        if self.measuring or self.probe or self.baseline:
            return "busy"
        return "preparing" if self.preparing else "waiting"

    @property
    def batch(self) -> int:
        """Candidates that it takes at once."""
        return 1 if self.far is None else self.far.batch

    @property
    def candidates(self) -> int:
        """How many are under way here."""
        return sum(map(len, self.measuring.values()))

    def measure(self, works: Sequence[Work]) -> list[Measurement | Exception]:
        """Runs on the lane's thread, so that the best time is the one at the moment of the measurement. Errors of a task
        stand in the places of its candidates."""
        jobs = [(proposal.task.workload, built, proposal.task.best_ns) for proposal, built in works]
        if self.far is not None:
            return self.far.measure_many(jobs)
        found: list[Measurement | Exception] = []
        for job in jobs:
            try:
                found.append(self.runner.measure(*job))
            except OF_TASK as error:
                found.append(error)
        return found
