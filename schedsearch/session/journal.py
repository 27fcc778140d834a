"""The journal of a run: it stores every outcome and then tells the observers.

The loop (`schedsearch.session.loop`) decides what to try, and reads earlier records from the store. The journal does all
writing to the store and sends all events to observers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.identity import canonical_json
from schedsearch.measurement import Anchor, Measurement, Record, Verdict
from schedsearch.session.arms import Arm
from schedsearch.session.collaborators import StoreLike
from schedsearch.session.observer import (
    ArmStart,
    Best,
    DeviceNotice,
    Observer,
    Phase,
    PhaseName,
    RunStart,
    TaskStart,
    Trial,
)
from schedsearch.session.options import Options
from schedsearch.session.summary import DeviceSummary, RunSummary, Shares, name_of
from schedsearch.session.task_state import Proposal, TaskState
from schedsearch.target import Target
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

NOTE_EVERY_S = 1.0
_REFERENCE_EVERY_S = 5.0


@dataclass(frozen=True)
class Ended:
    """An outcome.

    Attributes:
        proposal: None for an outcome of the final race.
        anchor: the time of `TaskState.anchor` in the same race.
        verdict: of that race.
        built: what was measured in the search; None if it could not be built.
    """

    task: TaskState
    arm: Arm
    config: Config
    measurement: Measurement
    proposal: Proposal | None = None
    anchor: Anchor | None = None
    verdict: Verdict = Verdict.NONE
    built: Built | None = None

    @classmethod
    def of(cls, proposal: Proposal, measurement: Measurement, built: Built | None = None) -> Ended:
        """The outcome of a proposal of the search."""
        return cls(proposal.task, proposal.arm, proposal.config, measurement, proposal, built=built)


@dataclass(frozen=True)
class Entry:
    """A record in the store, and its number there."""

    record: Record
    id: int

    @property
    def time_ns(self) -> float:
        """The time of a record that is ok."""
        time_ns = self.record.measurement.time_ns
        assert time_ns is not None
        return time_ns


class Journal:
    """Stores and reports the events of one run. The run's clock starts when the journal is made.

    Args:
        shares: tells the shares of the wall time so far, given in seconds. The store learns them with an outcome, at most
            once in `NOTE_EVERY_S`, so that whoever reads the database sees where the time of a running run goes.
        devices: on which the run measures.
        states: tells what each device does now; the store learns it with the shares.
    """

    def __init__(
        self,
        tasks: Sequence[TaskState],
        store: StoreLike,
        options: Options,
        toolchain: dict[str, str],
        observers: Sequence[Observer],
        db: str,
        shares: Callable[[float], Shares],
        devices: Sequence[Target],
        states: Callable[[], list[JsonObject]],
    ) -> None:
        self._tasks, self._store, self._options = tasks, store, options
        self._toolchain, self._observers, self._db = toolchain, observers, db
        self._shares, self._devices, self._states = shares, devices, states
        self._started = time.monotonic()
        self._noted_s = -math.inf
        self._run = ""
        self._phase = ""
        self._reference_told_s = 0.0

    @property
    def _kinds(self) -> str:
        """The keys of the devices."""
        return " + ".join(dict.fromkeys(device.key for device in self._devices))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    # The run

    def open(self, trials: int | None) -> None:
        """The run begins; it may spend this many trials."""
        event = RunStart(
            run="",
            target=self._kinds,
            tasks=tuple(self._start_of(task) for task in self._tasks),
            trials=trials,
            time_s=self._options.time_s,
            resumed=sum(task.trials for task in self._tasks),
            device=json.loads(canonical_json(self._devices[0].facts())),
            devices=tuple(json.loads(canonical_json(device.facts())) for device in self._devices),
            options=asdict(self._options),
            toolchain=self._toolchain,
        )
        info = event.to_json()
        del info["run"]  # the store gives it
        self._run = self._store.start_run(info)
        started = replace(event, run=self._run)
        self._tell(lambda observer: observer.on_start(started))

    def _start_of(self, task: TaskState) -> TaskStart:
        arms = [ArmStart(arm.template.name, arm.plan.space.size, arm.plan.default, arm.trials) for arm in task.arms]
        return TaskStart(task.workload, task.name, task.weight, tuple(arms), task.kind)

    def enter(self, phase: PhaseName) -> None:
        """The run enters a phase; observers are told if it is a new one."""
        if phase != self._phase:
            self._phase = phase
            event = Phase(phase, self.elapsed_s)
            self._tell(lambda observer: observer.on_phase(event))

    def tell_reference(self, seconds: float) -> None:
        """Tells observers, every few seconds, that the reference of a user or of another package is still being computed.

        Args:
            seconds: for which it has been.
        """
        if seconds < _REFERENCE_EVERY_S:
            self._reference_told_s = 0.0
        elif seconds - self._reference_told_s >= _REFERENCE_EVERY_S:
            self._reference_told_s = seconds
            event = Phase("reference", self.elapsed_s)
            self._tell(lambda observer: observer.on_phase(event))

    def end_task(self, task: TaskState) -> None:
        end = task.summary()
        self._tell(lambda observer: observer.on_task_end(task.index, end))

    def tell_device(self, device: Target, text: str) -> None:
        """Reports something about one of several devices."""
        event = DeviceNotice(name_of(device), device.uuid, text, self.elapsed_s)
        self._tell(lambda observer: observer.on_device(event))

    def close(self, summaries: Callable[[float], tuple[DeviceSummary, ...]], stopped: str) -> RunSummary:
        """The run has ended; returns its summary. `stopped`: see `RunSummary`.

        Args:
            summaries: tells what each device did in the wall time so far, given in seconds.
        """
        tasks, wall_s = tuple(task.summary() for task in self._tasks), self.elapsed_s
        summary = RunSummary(
            self._run, self._db, self._kinds, tasks, wall_s, self._shares(wall_s), stopped, devices=summaries(wall_s)
        )
        self._store.finish_run(self._run, summary.to_json())
        self._tell(lambda observer: observer.on_end(summary))
        return summary

    # Outcomes

    def keep(self, ended: Sequence[Ended]) -> list[Entry]:
        """Stores outcomes, all in one transaction, which takes the disk as long as one of them."""
        if not ended:
            return []
        now = time.time()
        records = [self._record(each, now) for each in ended]
        return list(map(Entry, records, self._store.append_all(records, self._so_far())))

    def _record(self, ended: Ended, now: float) -> Record:
        task, template, proposal = ended.task, ended.arm.template, ended.proposal
        return Record(
            workload=task.workload,
            target=task.kind,
            template=template.name,
            template_version=template.version,
            config=ended.config,
            measurement=ended.measurement,
            toolchain=self._toolchain,
            run=self._run,
            batch=proposal.batch if proposal else 0,
            prediction=proposal.prediction if proposal else None,
            started_at=proposal.started_at if proposal else now - ended.measurement.run_s,
            finished_at=now,
            final_race=proposal is None,
            model=proposal.model if proposal and proposal.prediction is not None else None,
            anchor=ended.anchor,
            verdict=ended.verdict,
        )

    def _so_far(self) -> JsonObject | None:
        """What the run says about itself while it goes on; None if it did so a moment ago."""
        elapsed_s = self.elapsed_s
        if elapsed_s - self._noted_s < NOTE_EVERY_S:
            return None
        self._noted_s = elapsed_s
        shares = asdict(self._shares(elapsed_s))
        return {"wall_s": elapsed_s, "phase": self._phase, "shares": shares, "devices": self._states()}

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
        """Reports an outcome that the task knows already. Without a measurement it duplicates a candidate of `twin_ns`."""
        outcome = measurement.outcome if measurement else None
        event = Trial(
            task=task.index,
            workload=task.workload,
            template=arm.template.name,
            config=config,
            outcome=outcome,
            time_ns=measurement.time_ns if measurement else twin_ns,
            message=measurement.message if measurement else "the same machine code as an earlier candidate",
            counted=outcome is not None and outcome.is_trial and not final_race,
            done=sum(task.new_trials for task in self._tasks),
            best_ns=task.best_ns,
            default_ns=task.default_ns,
            elapsed_s=self.elapsed_s,
            final_race=final_race,
        )
        self._tell(lambda observer: observer.on_trial(event))

    def promote(self, task: TaskState, entry: Entry, built: Built, raced: Sequence[Record] = ()) -> None:
        """Makes a valid record the store's best of its task, unless another is faster that was not in the same race."""
        if not self._store.promote(entry.id, built.artifact, if_faster=True, raced=raced):
            task.stored_best = self._store.best(task.workload, task.kind, self._options.mode)
            return
        record, previous_ns = entry.record, task.stored_best_ns
        task.stored_best = record
        event = Best(task.index, task.workload, record.template, record.config, entry.time_ns, previous_ns, self.elapsed_s)
        self._tell(lambda observer: observer.on_best(event))

    def demote(self, best: Record) -> None:
        """Demotes a best of the store, because its code proved wrong."""
        self._store.demote(best)

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            call(observer)
