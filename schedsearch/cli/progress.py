"""What a person sees on standard error while a run goes on: a live table on a terminal, a line now and then elsewhere.

Neither draws between results: on the CPU target a drawing thread would disturb what is being measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from schedsearch.cli.render import counts, duration, echo_json
from schedsearch.session.observer import Best, Observer, RunStart, Trial
from schedsearch.session.summary import RunSummary, TaskSummary
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_DRAW_EVERY_S = 0.2
_LINE_EVERY_S = 5.0
_LIVE_ROWS = 16  # tasks shown at most: the ones that changed last


class JsonLines(Observer):
    """Every event as one JSON object a line on standard output; the last is the summary."""

    def on_start(self, event: RunStart) -> None:
        tasks = [
            {
                **_who(task.workload),
                "weight": task.weight,
                "templates": [{"template": arm.template, "size": arm.size, "resumed": arm.resumed} for arm in task.arms],
            }
            for task in event.tasks
        ]
        self._emit(
            "start",
            run=event.run, target=event.target, trials=event.trials, time_s=event.time_s, resumed=event.resumed, tasks=tasks,
        )  # fmt: skip

    def on_trial(self, event: Trial) -> None:
        self._emit(
            "trial",
            task=event.task,
            **_who(event.workload),
            template=event.template,
            config=dict(event.config),
            outcome="duplicate" if event.outcome is None else str(event.outcome),
            time_ns=event.time_ns,
            message=event.message,
            counted=event.counted,
            final_race=event.final_race,
            done=event.done,
            best_ns=event.best_ns,
            elapsed_s=round(event.elapsed_s, 3),
        )

    def on_best(self, event: Best) -> None:
        self._emit(
            "best",
            task=event.task,
            **_who(event.workload),
            template=event.template,
            config=dict(event.config),
            time_ns=event.time_ns,
            previous_ns=event.previous_ns,
            elapsed_s=round(event.elapsed_s, 3),
        )

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        self._emit("task_end", task=index, **summary.to_json())

    def on_end(self, summary: RunSummary) -> None:
        self._emit("summary", **summary.to_json())

    def _emit(self, event: str, **values: Any) -> None:
        echo_json({"event": event, **values})


def _who(workload: Workload) -> dict[str, Any]:
    return {"workload_id": workload.id, "label": workload.label}


@dataclass
class _Row:
    name: str
    trials: int
    default_ns: float | None = None
    best_ns: float | None = None
    last: str = ""
    failures: dict[str, int] = field(default_factory=dict)
    changed_at: float = 0.0


class _Progress(Observer):
    """Keeps what both displays show. `names` maps workload ids to names of tasks."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._rows: list[_Row] = []
        self._total: int | None = None
        self._done = 0
        self._start = time.monotonic()

    def on_start(self, event: RunStart) -> None:
        self._start, self._total = time.monotonic(), event.trials
        self._rows = [
            _Row(self._names.get(task.workload.id, task.workload.label), sum(arm.resumed for arm in task.arms))
            for task in event.tasks
        ]
        if event.resumed:
            click.echo(f"going on after {event.resumed} trials measured before (--fresh ignores them)", err=True)

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
        self._refresh(racing=event.final_race)

    def _headline(self, racing: bool) -> str:
        elapsed = time.monotonic() - self._start
        of = "" if self._total is None else f" of {self._total}"
        phase = "final race" if racing else f"{self._done / elapsed if elapsed else 0:.1f} trials/s"
        return f"{elapsed:.0f} s: {self._done}{of} trials, {phase}"

    def _refresh(self, racing: bool) -> None:
        raise NotImplementedError


class PlainLines(_Progress):
    """A line every few seconds, for logs."""

    _next_at = 0.0

    def on_start(self, event: RunStart) -> None:
        super().on_start(event)
        if event.trials is None or event.trials > 0:
            trials = "as many trials as fit" if event.trials is None else f"up to {event.trials} trials"
            click.echo(f"{trials} on {event.target}; the first are being compiled", err=True)

    def _refresh(self, racing: bool) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _LINE_EVERY_S
        row = max(self._rows, key=lambda row: row.changed_at)
        click.echo(f"{self._headline(racing)}; {row.name}: best {duration(row.best_ns)}", err=True)


class LiveTable(_Progress):
    """One line a task, redrawn in place on a terminal."""

    def __init__(self, names: Mapping[str, str], console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(names)
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def on_start(self, event: RunStart) -> None:
        super().on_start(event)
        self._live.start()
        self._live.update(self._table(racing=False), refresh=True)

    def on_end(self, summary: RunSummary) -> None:
        self._live.stop()

    def close(self) -> None:
        """Leaves the terminal as it was, also after an error."""
        self._live.stop()

    def _refresh(self, racing: bool) -> None:
        if time.monotonic() - self._drawn_at >= _DRAW_EVERY_S:
            self._live.update(self._table(racing), refresh=True)
            self._drawn_at = time.monotonic()

    def _table(self, racing: bool) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._headline(racing), title_justify="left", box=None, pad_edge=False, expand=False)
        for name in ("task", "trials", "default", "best", "speed-up", "last", "failures"):
            table.add_column(
                name, justify="right" if name in ("trials", "default", "best", "speed-up") else "left", no_wrap=True
            )
        recent = sorted(self._rows, key=lambda row: -row.changed_at)[:_LIVE_ROWS]
        for row in [row for row in self._rows if row in recent]:
            speedup = f"{row.default_ns / row.best_ns:.2f}x" if row.default_ns and row.best_ns else "-"
            cells = (
                row.name, str(row.trials), duration(row.default_ns), duration(row.best_ns), speedup, row.last,
                counts(row.failures),
            )  # fmt: skip
            table.add_row(*(Text(cell) for cell in cells))
        if len(self._rows) > len(recent):
            table.caption = f"and {len(self._rows) - len(recent)} tasks more"
        return table
