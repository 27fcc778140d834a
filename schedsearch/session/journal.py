"""The journal of a run: every outcome is kept in the store, then told to the observers.

The loop (`schedsearch.session.loop`) decides what is tried. It reads from the store what is known from before; all that is
written there and told to observers goes through here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.measurement import Measurement, Record
from schedsearch.session.arms import Arm, Proposal, TaskState
from schedsearch.session.collaborators import StoreLike
from schedsearch.session.observer import ArmStart, Best, Observer, RunStart, TaskStart, Trial
from schedsearch.session.options import Options
from schedsearch.session.summary import RunSummary, Shares
from schedsearch.target import Target

if TYPE_CHECKING:
    from schedsearch.measure.builder import Built


@dataclass(frozen=True)
class Entry:
    """A record in the store, and its number there."""

    record: Record
    id: int


class Journal:
    """Keeps and tells what happens to the tasks of one run, whose clock starts when this is made."""

    def __init__(
        self,
        tasks: Sequence[TaskState],
        store: StoreLike,
        target: Target,
        options: Options,
        toolchain: dict[str, str],
        observers: Sequence[Observer],
        db: str,
    ) -> None:
        self._tasks, self._store, self._target, self._options = tasks, store, target, options
        self._toolchain, self._observers, self._db = toolchain, observers, db
        self._started = time.monotonic()
        self._run = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    # The run

    def open(self, trials: int | None) -> None:
        """The run begins; it may spend so many trials."""
        tasks = [
            {"workload": task.workload.id, "weight": task.weight, "templates": [arm.template.name for arm in task.arms]}
            for task in self._tasks
        ]
        self._run = self._store.start_run(
            {
                "target": self._target.facts() | {"key": self._target.key},
                "toolchain": self._toolchain,
                "options": asdict(self._options),
                "tasks": tasks,
            }
        )
        starts = tuple(
            TaskStart(
                task.workload,
                task.weight,
                tuple(ArmStart(arm.template.name, str(arm.plan.space.size), arm.trials) for arm in task.arms),
            )
            for task in self._tasks
        )
        resumed = sum(task.trials for task in self._tasks)
        event = RunStart(self._run, self._target.key, starts, trials, self._options.time_s, resumed)
        self._tell(lambda observer: observer.on_start(event))

    def end_task(self, task: TaskState) -> None:
        end = task.summary(self._target.key)
        self._tell(lambda observer: observer.on_task_end(task.index, end))

    def close(self, shares: Shares, stopped: str) -> RunSummary:
        """The run has ended; returns what was reached. `shares`, `stopped`: see `RunSummary`."""
        tasks = tuple(task.summary(self._target.key) for task in self._tasks)
        summary = RunSummary(self._run, self._db, self._target.key, tasks, self.elapsed_s, shares, stopped)
        self._store.finish_run(self._run, summary.to_json())
        self._tell(lambda observer: observer.on_end(summary))
        return summary

    # Outcomes

    def keep(self, task: TaskState, arm: Arm, config: Config, measurement: Measurement, proposal: Proposal | None) -> Entry:
        """Stores an outcome; one of the final race where no proposal led to it."""
        now = time.time()
        record = Record(
            workload=task.workload,
            target=self._target.key,
            template=arm.template.name,
            template_version=arm.template.version,
            config=config,
            measurement=measurement,
            toolchain=self._toolchain,
            run=self._run,
            batch=proposal.batch if proposal else 0,
            prediction=proposal.prediction if proposal else None,
            started_at=proposal.started_at if proposal else now - measurement.run_s,
            finished_at=now,
            final_race=proposal is None,
        )
        return Entry(record, self._store.append(record))

    def tell_trial(
        self,
        task: TaskState,
        arm: Arm,
        config: Config,
        measurement: Measurement | None,
        *,
        twin_ns: float | None = None,
        final_race: bool = False,
    ) -> None:
        """Tells an outcome that the task knows of by now. Without a measurement it is a duplicate of what took `twin_ns`."""
        outcome = measurement.outcome if measurement else None
        event = Trial(
            task=task.index,
            workload=task.workload,
            template=arm.template.name,
            config=config,
            outcome=outcome,
            time_ns=measurement.time_ns if measurement else twin_ns,
            message=measurement.message if measurement else "the same machine code as a candidate before",
            counted=outcome is not None and outcome.is_trial and not final_race,
            done=sum(task.new_trials for task in self._tasks),
            best_ns=task.best_ns,
            default_ns=task.default_ns,
            elapsed_s=self.elapsed_s,
            final_race=final_race,
        )
        self._tell(lambda observer: observer.on_trial(event))

    def promote(self, task: TaskState, entry: Entry, built: Built, *, if_faster: bool) -> None:
        """Makes a valid record the store's best of its task; where `if_faster`, unless another run's is faster."""
        if not self._store.promote(entry.id, built.artifact, if_faster=if_faster):
            task.stored_best = self._store.best(task.workload, self._target.key, self._options.mode)
            return
        record, previous_ns = entry.record, task.stored_best_ns
        task.stored_best = record
        assert record.measurement.time_ns is not None
        time_ns = record.measurement.time_ns
        event = Best(task.index, task.workload, record.template, record.config, time_ns, previous_ns, self.elapsed_s)
        self._tell(lambda observer: observer.on_best(event))

    def demote(self, task: TaskState) -> None:
        """Takes away the store's best of a task, because its code turned out to be wrong."""
        self._store.demote(task.workload, self._target.key, self._options.mode)

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            call(observer)
