"""A run as a display shows it: how far it is, the best so far, the time that is left, and a table of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedsearch.progress import Display, cut
from schedsearch.session.observer import DeviceNotice, Observer, Phase, RunStart, Trial
from schedsearch.session.summary import RunSummary, TaskSummary
from schedsearch.text import counted, counts, duration, printable, seconds

_LIVE_ROWS = 16  # tasks shown at most: those that changed last
_WIDE_NAME, _NARROW_NAME = (
    24,
    8,
)  # a task's name is cut to the first width before columns are left out, and to the second after

_PHASES = {
    "building": "compiling the first candidates",
    "preparing": "preparing inputs and the reference result",
    "reference": "computing the reference",
    "measuring": "measuring",
    "racing": "final race",
}


@dataclass
class _Row:
    """A task on the screen. `speedup` is the final race's."""

    name: str
    trials: int
    default_ns: float | None = None
    best_ns: float | None = None
    speedup: float | None = None
    last: str = ""
    failures: dict[str, int] = field(default_factory=dict)
    changed_at: float = 0.0


class RunProgress(Observer):
    """Shows a run on a display.

    Attributes:
        measured: indices of the tasks that have an outcome.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._rows: list[_Row] = []
        self._total: int | None = None
        self._time_s: float | None = None
        self._done = 0
        self._start_s = 0.0  # of the run, after the call began
        self._phase = ""
        self.measured: set[int] = set()

    def on_start(self, event: RunStart) -> None:
        with self._display.lock:
            self._start_s, self._phase = self._display.elapsed_s, ""
            self._total, self._time_s = _most_trials(event), event.time_s
            self._rows = [_Row(task.name, sum(arm.resumed for arm in task.arms)) for task in event.tasks]
        if event.resumed:
            self._display.say(
                f"going on after {counted(event.resumed, 'trial')} measured before (resume=False, --fresh: ignore them)"
            )
        self._display.show(self)

    def on_phase(self, event: Phase) -> None:
        with self._display.lock:
            self._phase = _PHASES[event.name]
        self._display.refresh()

    def on_trial(self, event: Trial) -> None:
        with self._display.lock:
            row = self._rows[event.task]
            row.trials += event.counted
            row.best_ns = event.best_ns
            row.default_ns = event.default_ns
            row.changed_at = self._display.elapsed_s
            what = "duplicate" if event.outcome is None else str(event.outcome)
            row.last = f"{event.template} " + (duration(event.time_ns) if event.time_ns is not None else what)
            if event.outcome is not None and event.outcome.value != "ok":
                row.failures[what] = row.failures.get(what, 0) + 1
            self._done = event.done
            self.measured.add(event.task)
            if self._phase == _PHASES["reference"]:
                self._phase = _PHASES["measuring"]
        self._display.refresh()

    def on_device(self, event: DeviceNotice) -> None:
        self._display.say(f"warning: {event.text}")

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        with self._display.lock:
            row = self._rows[index]
            row.default_ns, row.best_ns, row.speedup = summary.default_ns, summary.best_ns, summary.speedup
        self._display.refresh()

    def on_end(self, summary: RunSummary) -> None:
        self._display.stage("ending the processes of the run")

    # What is shown

    def headline(self) -> str:
        """What the run is doing, how far it is and the time that is left; rate and best appear once they are known."""
        now = f"{self._display.elapsed_s:.0f} s"
        elapsed = self._display.elapsed_s - self._start_s
        if not self._done or self._phase == _PHASES["reference"]:
            return f"{now}: {self._phase or 'starting'}"
        trials = counted(self._done, "trial") if self._total is None else f"{self._done} of {counted(self._total, 'trial')}"
        if self._phase == _PHASES["racing"]:
            return f"{now}: {trials}, {self._phase}"
        rate = f", {self._done / elapsed:.1f} trials/s" if elapsed else ""
        return f"{now}: {trials}{rate}{self._left(elapsed)}"

    def line(self) -> str:
        """The headline and the task that changed last."""
        if not self._done or self._phase == _PHASES["reference"]:
            return self.headline()
        row = max(self._rows, key=lambda row: row.changed_at)
        return f"{self.headline()}; {row.name}: best {duration(row.best_ns)}"

    def table(self, width: int) -> Sequence[str]:
        if not self._done:
            return ()
        recent = sorted(self._rows, key=lambda row: -row.changed_at)[:_LIVE_ROWS]
        lines = table_lines([row for row in self._rows if row in recent], width)
        if len(self._rows) > len(recent):
            lines.append(f"and {counted(len(self._rows) - len(recent), 'task')} more")
        return lines

    def _left(self, elapsed: float) -> str:
        """The time that the rest of the budget will take at the rate so far; the search may end before."""
        left = []
        if self._total is not None:
            left.append((self._total - self._done) * elapsed / self._done)
        if self._time_s is not None:
            left.append(self._time_s - elapsed)
        return f", at most {seconds(min(left))} left" if left and min(left) > 0 else ""


def _most_trials(event: RunStart) -> int | None:
    """The trials of a run: its budget, or all configurations if these are fewer. None if there is no limit."""
    arms = [arm for task in event.tasks for arm in task.arms]
    if event.trials is None or not all(arm.size.exact for arm in arms):
        return event.trials
    return min(event.trials, sum(arm.size.count - arm.resumed for arm in arms))


def table_lines(rows: Sequence[_Row], width: int) -> list[str]:
    """A header and one line for each task, at most `width` characters wide.

    Digits and units are never cut. Names are cut first; then whole columns are left out, the least informative first.
    """
    cells: dict[str, list[str]] = {
        "task": [printable(row.name) for row in rows],
        "trials": [str(row.trials) for row in rows],
        "default": [duration(row.default_ns) for row in rows],
        "best": [duration(row.best_ns) for row in rows],
        "speed-up": ["" if row.speedup is None else f"{row.speedup:.2f}x" for row in rows],
        "failures": [counts(row.failures) for row in rows],
        "last": [row.last for row in rows],
    }
    if not any(cells["speed-up"]):  # shown once a final race was held
        del cells["speed-up"]
    tallies = [str(sum(row.failures.values()) or "-") for row in rows]
    for given_up in ("", "last", "kinds of failures", "failures", "default", "speed-up", "trials"):
        if given_up == "kinds of failures":
            cells["failures"] = tallies
        else:
            cells.pop(given_up, None)
        rest = sum(2 + max(map(len, [name, *column])) for name, column in cells.items() if name != "task")
        room = width - rest
        if room >= min(_WIDE_NAME, max(map(len, ["task", *cells["task"]]))):
            break
    cells["task"] = [cut(name, max(room, _NARROW_NAME)) for name in cells["task"]]
    widths = {name: max(map(len, [name, *column])) for name, column in cells.items()}
    lines = []
    for line in [list(cells), *zip(*cells.values())]:
        padded = [
            cell.ljust(widths[name]) if name in ("task", "failures", "last") else cell.rjust(widths[name])
            for name, cell in zip(cells, line)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
