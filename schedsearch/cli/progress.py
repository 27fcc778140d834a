"""The display of a run on standard error: a live table on a terminal, otherwise a line every few seconds.

Neither draws between events: on the CPU target a drawing thread would disturb the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.cli.render import counted, counts, duration, echo_json, say
from schedsearch.session.observer import Best, Observer, Phase, RunStart, TaskEnd, Trial, event_json
from schedsearch.session.summary import RunSummary, TaskSummary
from schedsearch.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_DRAW_EVERY_S = 0.2
_LINE_EVERY_S = 5.0
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


class JsonLines(Observer):
    """Prints every event as one JSON object per line on standard output; the last is the summary."""

    def on_start(self, event: RunStart) -> None:
        echo_json(event_json(event))

    def on_phase(self, event: Phase) -> None:
        echo_json(event_json(event))

    def on_trial(self, event: Trial) -> None:
        echo_json(event_json(event))

    def on_best(self, event: Best) -> None:
        echo_json(event_json(event))

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        echo_json(event_json(TaskEnd(index, summary)))

    def on_end(self, summary: RunSummary) -> None:
        echo_json(event_json(summary))


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


class _Progress(Observer):
    """Keeps the state that both displays show. `names` maps workload ids to names of tasks."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._rows: list[_Row] = []
        self._total: int | None = None
        self._done = 0
        self._start = time.monotonic()
        self._phase = ""

    def on_start(self, event: RunStart) -> None:
        self._start, self._total, self._phase = time.monotonic(), event.trials, ""
        self._rows = [
            _Row(self._names.get(task.workload.id, task.workload.label), sum(arm.resumed for arm in task.arms))
            for task in event.tasks
        ]
        if event.resumed:
            say(f"going on after {counted(event.resumed, 'trial')} measured before (--fresh ignores them)", err=True)

    def on_phase(self, event: Phase) -> None:
        self._phase = _PHASES[event.name]
        self._refresh(now=True)

    def on_trial(self, event: Trial) -> None:
        row = self._rows[event.task]
        row.trials += event.counted
        row.best_ns = event.best_ns
        row.default_ns = event.default_ns
        row.changed_at = time.monotonic()
        what = "duplicate" if event.outcome is None else str(event.outcome)
        row.last = f"{event.template} " + (duration(event.time_ns) if event.time_ns is not None else what)
        if event.outcome is not None and event.outcome.value != "ok":
            row.failures[what] = row.failures.get(what, 0) + 1
        self._done = event.done
        if self._phase == _PHASES["reference"]:
            self._phase = _PHASES["measuring"]
        self._refresh()

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        row = self._rows[index]
        row.default_ns, row.best_ns, row.speedup = summary.default_ns, summary.best_ns, summary.speedup
        self._refresh(now=True)

    def _headline(self) -> str:
        """What the run is doing, and its progress so far; the rate appears once it is known."""
        elapsed = time.monotonic() - self._start
        if not self._done or self._phase == _PHASES["reference"]:
            return f"{elapsed:.0f} s: {self._phase or 'starting'}"
        trials = counted(self._done, "trial") if self._total is None else f"{self._done} of {counted(self._total, 'trial')}"
        rate = f"{self._done / elapsed:.1f} trials/s" if elapsed else ""
        return f"{elapsed:.0f} s: {trials}, {rate if self._phase != _PHASES['racing'] else self._phase}"

    def _refresh(self, now: bool = False) -> None:
        """Shows the new state: at once if `now`, else if the last time was long enough ago."""
        raise NotImplementedError


class PlainLines(_Progress):
    """A line every few seconds, for logs."""

    _next_at = 0.0

    def on_start(self, event: RunStart) -> None:
        super().on_start(event)
        if event.trials is None or event.trials > 0:
            trials = "as many trials as fit" if event.trials is None else f"up to {counted(event.trials, 'trial')}"
            say(f"{trials} on {event.target}; the first are being compiled", err=True)

    def _refresh(self, now: bool = False) -> None:
        at = time.monotonic()
        waits = self._phase == _PHASES["reference"]
        if at < self._next_at or not (self._done or waits):
            return
        self._next_at = at + _LINE_EVERY_S
        if waits:
            say(self._headline(), err=True)
            return
        row = max(self._rows, key=lambda row: row.changed_at)
        say(f"{self._headline()}; {row.name}: best {duration(row.best_ns)}", err=True)


class LiveTable(_Progress):
    """One line per task, redrawn in place on a terminal, and no wider than the terminal."""

    def __init__(self, names: Mapping[str, str], console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(names)
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def say(self, what: str) -> None:
        """Shows one line before the run begins, which says what it waits for."""
        self._phase = what
        self._live.start()
        self._refresh(now=True)

    def on_start(self, event: RunStart) -> None:
        super().on_start(event)
        self._live.start()
        self._refresh(now=True)

    def on_end(self, summary: RunSummary) -> None:
        self._live.stop()

    def close(self) -> None:
        """Restores the terminal, also after an error."""
        self._live.stop()

    def _refresh(self, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn_at >= _DRAW_EVERY_S:
            self._live.update(self._screen(), refresh=True)
            self._drawn_at = time.monotonic()

    def _screen(self) -> Text:
        from rich.text import Text

        recent = sorted(self._rows, key=lambda row: -row.changed_at)[:_LIVE_ROWS]
        lines = table_lines([row for row in self._rows if row in recent], self._console.width) if self._done else []
        if self._done and len(self._rows) > len(recent):
            lines.append(f"and {counted(len(self._rows) - len(recent), 'task')} more")
        return Text("\n".join([_cut(self._headline(), self._console.width), *lines]), no_wrap=True)


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
    cells["task"] = [_cut(name, max(room, _NARROW_NAME)) for name in cells["task"]]
    widths = {name: max(map(len, [name, *column])) for name, column in cells.items()}
    lines = []
    for line in [list(cells), *zip(*cells.values())]:
        padded = [
            cell.ljust(widths[name]) if name in ("task", "failures", "last") else cell.rjust(widths[name])
            for name, cell in zip(cells, line)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
