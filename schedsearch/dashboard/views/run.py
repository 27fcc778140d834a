"""A run: when each of its candidates was under way."""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.dashboard.views.overview import RunRow


@dataclass(frozen=True)
class DeviceLane:
    """A device of a run.

    Attributes:
        name: with its host if that is another machine; "device" if the run does not say.
        state: while the run goes on busy, preparing, waiting, lost (it is away) or quarantined; later "" or quarantined.
        note: why it is quarantined.
        trials: measurements of the search there; None if the run does not say.
    """

    name: str
    state: str = ""
    note: str = ""
    trials: int | None = None


@dataclass(frozen=True)
class Bars:
    """Stretches of a run's time, column by column.

    Attributes:
        lane: the first ones are the devices. The others hold candidates from their proposal until a device takes them: they
            wait or are built. No two stretches of a lane overlap.
        start_s, end_s: seconds since the run's start.
        task: index into `RunView.tasks`; -1 where neighbours of several tasks were joined.
        outcome: of the candidate; "" where neighbours with several outcomes were joined.
        race: whether it belongs to a final race.
        trial: key of the trial; "" where several were joined.
        count: how many stretches were joined to one, because they are too near to one another to be told apart.
    """

    lane: list[int]
    start_s: list[float]
    end_s: list[float]
    task: list[int]
    outcome: list[str]
    race: list[bool]
    trial: list[str]
    count: list[int]


@dataclass(frozen=True)
class RunView:
    """A run and its timeline.

    Attributes:
        tasks: the names of its tasks, in the order of `row.tasks`; `keys` are their `TaskRow.key`.
        devices: whose lanes are the first.
        lanes: how many there are, those of devices included.
        seconds: the timeline's length.
        joined: whether neighbours were joined.
        notes: what the reader must know.
    """

    row: RunRow
    tasks: tuple[str, ...]
    keys: tuple[str, ...]
    devices: tuple[DeviceLane, ...]
    lanes: int
    seconds: float
    joined: bool
    bars: Bars
    notes: tuple[str, ...]
