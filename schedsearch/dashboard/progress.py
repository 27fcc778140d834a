"""What is known of one task after each of its records: counts, best times, the last race. Grows record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schedsearch.measurement import Outcome

_CURVE_POINTS = 40


class Row(NamedTuple):
    """The columns of a record that the overview needs. `config` is JSON."""

    id: int
    template: str
    config: str
    outcome: str
    time_ns: float | None
    race: bool
    run: str
    started_at: float
    finished_at: float
    build_s: float
    run_s: float


COLUMNS = (
    "id", "template", "config", "outcome", "time_ns", "final_race", "run", "started_at", "finished_at", "build_s", "run_s",
)  # fmt: skip
"""The columns of table record that make a `Row`."""


@dataclass
class TemplateProgress:
    trials: int = 0
    failures: int = 0
    best_ns: float | None = None


@dataclass
class RunProgress:
    """What a run did on a task. `measured` are its records with a time, those of the final race included."""

    first_at_s: float
    last_at_s: float
    trials: int = 0
    failures: int = 0
    measured: int = 0
    build_s: float = 0.0
    run_s: float = 0.0

    def add(self, row: Row) -> None:
        self.first_at_s = min(self.first_at_s, row.started_at)
        self.last_at_s = max(self.last_at_s, row.finished_at)
        self.build_s += row.build_s
        self.run_s += row.run_s
        self.measured += row.time_ns is not None
        if not row.race and row.outcome != Outcome.REJECTED:
            self.trials += 1
            self.failures += row.outcome != Outcome.OK


class TuningClock:
    """Seconds of tuning: time in the runs of a task, one run after the other, without the time between them."""

    def __init__(self) -> None:
        self._starts: dict[str, tuple[float, float]] = {}  # run -> its start, seconds of tuning before it
        self.seconds = 0.0

    def at(self, run: str, run_start_s: float | None, started_at: float, finished_at: float) -> float:
        """Seconds of tuning until a record was measured. Records come in the order of appending."""
        if run not in self._starts:
            self._starts[run] = started_at if run_start_s is None else min(run_start_s, started_at), self.seconds
        start_s, before_s = self._starts[run]
        now_s = before_s + max(0.0, finished_at - start_s)
        self.seconds = max(self.seconds, now_s)
        return now_s


@dataclass
class Progress:
    """One task: a (workload, target, mode) of a database.

    Attributes:
        improvements: (trial, best time) whenever the best time of the search got smaller.
        improved_s: seconds of tuning at the last improvement.
        races: run -> the records of its final race.
        configs: template -> the configurations that were tried -> their smallest time in the search, None if they failed.
        defaults: the (template, config) that runs name as defaults; `default` is the fastest of them in the search.
    """

    workload_id: str
    target: str
    mode: str
    defaults: set[tuple[str, str]] = field(default_factory=set)
    rows: int = 0
    trials: int = 0
    valid: int = 0
    rejected: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    templates: dict[str, TemplateProgress] = field(default_factory=dict)
    improvements: list[tuple[int, float]] = field(default_factory=list)
    improved_s: float = 0.0
    best: Row | None = None
    default: Row | None = None
    races: dict[str, list[Row]] = field(default_factory=dict)
    configs: dict[str, dict[str, float | None]] = field(default_factory=dict)
    runs: dict[str, RunProgress] = field(default_factory=dict)
    clock: TuningClock = field(default_factory=TuningClock)

    def add(self, row: Row, run_start_s: float | None) -> None:
        self.rows += 1
        run = self.runs.get(row.run)
        if run is None:
            run = self.runs[row.run] = RunProgress(row.started_at, row.finished_at)
        run.add(row)
        tuning_s = self.clock.at(row.run, run_start_s, row.started_at, row.finished_at)
        if row.race:
            self.races.setdefault(row.run, []).append(row)
            return
        template = self.templates.get(row.template)
        if template is None:
            template = self.templates[row.template] = TemplateProgress()
            self.configs[row.template] = {}
        known_ns = self.configs[row.template].setdefault(row.config, row.time_ns)
        if row.time_ns is not None and (known_ns is None or row.time_ns < known_ns):
            self.configs[row.template][row.config] = row.time_ns
        if row.outcome == Outcome.REJECTED:
            self.rejected += 1
            self.failures[row.outcome] += 1
            return
        self.trials += 1
        template.trials += 1
        if row.time_ns is None:
            self.failures[row.outcome] += 1
            template.failures += 1
            return
        self.valid += 1
        if template.best_ns is None or row.time_ns < template.best_ns:
            template.best_ns = row.time_ns
        if self.best is None or row.time_ns < (self.best.time_ns or 0.0):
            self.best = row
            self.improvements.append((self.trials, row.time_ns))
            self.improved_s = tuning_s
        if (row.template, row.config) in self.defaults and (
            self.default is None or row.time_ns < (self.default.time_ns or 0.0)
        ):
            self.default = row

    @property
    def last_race(self) -> Sequence[Row]:
        """The records of the last final race in which something passed, failures included; [] without one."""
        for rows in reversed(self.races.values()):
            if any(row.time_ns is not None for row in rows):
                return rows
        return []

    @property
    def distinct(self) -> int:
        return sum(map(len, self.configs.values()))

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """The best time at up to 40 trials: improvements, the most recent of each stretch, and the last trial."""
        if not self.improvements:
            return ()
        last = (self.trials, self.improvements[-1][1])
        points = [*self.improvements, last] if self.improvements[-1][0] != self.trials else list(self.improvements)
        if len(points) > _CURVE_POINTS:
            step = (len(points) - 1) / (_CURVE_POINTS - 1)
            points = [points[round(i * step)] for i in range(_CURVE_POINTS)]
        return tuple(points)


def race_winner(rows: Sequence[Row]) -> Row | None:
    """The fastest entrant that passed."""
    return min((row for row in rows if row.time_ns is not None), key=lambda row: (row.time_ns or 0.0, row.id), default=None)


def race_default(rows: Sequence[Row], defaults: set[tuple[str, str]]) -> Row | None:
    """The fastest default that passed."""
    return race_winner([row for row in rows if (row.template, row.config) in defaults])


def counted(failures: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(failures.items(), key=lambda item: (-item[1], item[0])))
