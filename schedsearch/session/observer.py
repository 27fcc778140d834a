"""The events of a tuning run, and `Observer`, which receives them.

Every event is a frozen value, so that an observer can keep, print or send it without any effect on the run.
`event_json` converts events to JSON: the lines of `tune --json`, and the store's information about a run. Each event
contains everything that a reader needs; beside that only the order of events matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.session.summary import RunSummary, TaskSummary, workload_json
from schedsearch.space import SpaceSize
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import Workload


@dataclass(frozen=True)
class ArmStart:
    """One (task, template) pair as the run starts.

    Attributes:
        size: how many configurations the (restricted) space has.
        default: the configuration to start from.
        resumed: trials of earlier runs that count.
    """

    template: str
    size: SpaceSize
    default: Config
    resumed: int

    def to_json(self) -> JsonObject:
        return {
            "template": self.template,
            "size": str(self.size),
            "configurations": self.size.count,
            "exact": self.size.exact,
            "default": dict(self.default),
            "resumed": self.resumed,
        }


@dataclass(frozen=True)
class TaskStart:
    """A task as the run starts; see `schedsearch.task.Task`.

    Attributes:
        target: the key of the devices that it is for; "": the run's.
    """

    workload: Workload
    name: str
    weight: float
    arms: tuple[ArmStart, ...]
    target: str = ""

    def to_json(self) -> JsonObject:
        arms = [arm.to_json() for arm in self.arms]
        row = {"name": self.name, "weight": self.weight, "target": self.target, "templates": arms}
        return {**workload_json(self.workload), **row}


@dataclass(frozen=True)
class RunStart:
    """The run begins. The store keeps its JSON as information about the run (`Store.runs()[i]["info"]`).

    Attributes:
        target: key of the device; of devices of several kinds their keys, joined by " + ".
        tasks: in the order in which later events count them.
        trials: what the run may still spend over all tasks, None without such a limit.
        time_s: for the search and the final races, None without such a limit.
        resumed: trials that earlier runs spent on these tasks and that count.
        device: facts about the device, `Target.facts`; of several the first.
        devices: facts about each device.
        options: how the run searches, the fields of `schedsearch.session.options.Options`.
        toolchain: versions that shape code and times.
    """

    run: str
    target: str
    tasks: tuple[TaskStart, ...]
    trials: int | None
    time_s: float | None
    resumed: int
    device: JsonMapping = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[JsonMapping, ...] = ()

    def to_json(self) -> JsonObject:
        return {
            "run": self.run,
            "target": self.target,
            "trials": self.trials,
            "time_s": self.time_s,
            "resumed": self.resumed,
            "device": dict(self.device),
            "devices": [dict(each) for each in self.devices],
            "options": dict(self.options),
            "toolchain": dict(self.toolchain),
            "tasks": [task.to_json() for task in self.tasks],
        }


PhaseName = Literal["building", "preparing", "reference", "measuring", "racing"]


@dataclass(frozen=True)
class Phase:
    """The run enters a phase. Phases of the search are reported only until the first outcome.

    Attributes:
        name: building: the first candidates are compiled; preparing: inputs and the reference result of a workload are
            made on the device; reference: the reference of a user or of another package is still being computed, which is
            said every few seconds; measuring: candidates are verified and timed; racing: the final races.
    """

    name: PhaseName
    elapsed_s: float

    def to_json(self) -> JsonObject:
        return {"name": self.name, "elapsed_s": self.elapsed_s}


@dataclass(frozen=True)
class Trial:
    """A candidate's outcome.

    Attributes:
        task: index of its task in the run.
        outcome: None if the candidate is a duplicate, whose machine code was measured before.
        time_ns: median time, for a duplicate that of its twin; None unless ok.
        counted: whether it cost a trial.
        done: trials of this run so far, over all tasks.
        best_ns, default_ns: the fastest time of its task after this outcome, and that of the fastest default. Both come from
            the search, which measures every configuration on its own: they show progress, not a speed-up.
        elapsed_s: since the start of the run.
        final_race: whether the outcome is of the final race.
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

    def to_json(self) -> JsonObject:
        return _flat(self) | {"outcome": "duplicate" if self.outcome is None else str(self.outcome)}


@dataclass(frozen=True)
class Best:
    """A task has a new best in the store. `previous_ns` is None for the first."""

    task: int
    workload: Workload
    template: str
    config: Config
    time_ns: float
    previous_ns: float | None
    elapsed_s: float

    def to_json(self) -> JsonObject:
        return _flat(self)


@dataclass(frozen=True)
class DeviceNotice:
    """One of several devices was taken out of the run, or is slower than its equals. `text` says so in a sentence."""

    device: str
    uuid: str
    text: str
    elapsed_s: float

    def to_json(self) -> JsonObject:
        return {"device": self.device, "uuid": self.uuid, "text": self.text, "elapsed_s": self.elapsed_s}


@dataclass(frozen=True)
class TaskEnd:
    """The final race of a task is over. `task` is its index in the run."""

    task: int
    summary: TaskSummary

    def to_json(self) -> JsonObject:
        return {"task": self.task, **self.summary.to_json()}


def _flat(event: Trial | Best) -> JsonObject:
    values = {name: getattr(event, name) for name in event.__dataclass_fields__ if name != "workload"}
    return {**workload_json(event.workload), **values, "config": dict(event.config)}


Event = RunStart | Phase | Trial | Best | DeviceNotice | TaskEnd | RunSummary

_NAMES: dict[type[Event], str] = {
    RunStart: "start",
    Phase: "phase",
    Trial: "trial",
    Best: "best",
    DeviceNotice: "device",
    TaskEnd: "task_end",
    RunSummary: "summary",
}


def event_json(event: Event) -> JsonObject:
    """Any event as one JSON object; its key `event` says which: start, phase, trial, best, device, task_end or
    summary."""
    return {"event": _NAMES[type(event)], **event.to_json()}


class Observer:
    """Watches a run. Override the methods that you need. The thread that runs `tune` calls them in this order.

    An exception in an observer ends the run; the store already has everything that was measured.

    Examples:
        class Curve(schedsearch.Observer):
            def on_best(self, event):
                print(f"{event.elapsed_s:.0f} s: {event.workload.label} takes {event.time_ns / 1e3:.1f} us")
    """

    def on_start(self, event: RunStart) -> None:
        """Before the first candidate."""

    def on_phase(self, event: Phase) -> None:
        """When the run enters another phase."""

    def on_trial(self, event: Trial) -> None:
        """After each outcome was stored, including rejected and duplicate candidates and the final race."""

    def on_best(self, event: Best) -> None:
        """After a new best was promoted in the store."""

    def on_device(self, event: DeviceNotice) -> None:
        """When one of several devices was taken out of the run, or is slower than its equals."""

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        """After the final race of a task."""

    def on_end(self, summary: RunSummary) -> None:
        """Last, after an interruption too."""
