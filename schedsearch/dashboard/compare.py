"""Compares the best trials of two sides: databases, devices of one, or runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schedsearch.dashboard import loose
from schedsearch.dashboard.overview import geometric_mean, run_key, target_key
from schedsearch.dashboard.progress import Progress, Row, race_winner
from schedsearch.dashboard.source import Source, TaskId
from schedsearch.dashboard.trial import differences
from schedsearch.dashboard.views.compare import ComparedBest, CompareRow, CompareView
from schedsearch.dashboard.views.overview import Side, TaskRow
from schedsearch.errors import SchedsearchError

RESAMPLES = 2000
NEAR = 0.02  # a smaller difference is none: that is how far two measurements of one kernel may be apart
_LEAST_REPETITIONS = 4
_LEAST_TASKS = 3


@dataclass(frozen=True)
class _Entry:
    """A task on one side."""

    source: Source
    task: TaskId
    row: TaskRow
    progress: Progress
    best: Row | None
    raced: bool

    @property
    def workload_and_mode(self) -> tuple[str, str]:
        return self.task[0], self.task[2]


def compare_view(
    side_a: tuple[Source, Side], side_b: tuple[Source, Side], rows: dict[str, dict[TaskId, TaskRow]]
) -> CompareView:
    """Task by task, where both sides have the same workload and mode; and the same device, if they share any.

    Args:
        side_a, side_b: sources with the side.
        rows: the tasks' rows of the overview, by source key.
    """
    left, right = _entries(*side_a, rows), _entries(*side_b, rows)
    same_device = {entry.task[1] for entry in left} & {entry.task[1] for entry in right}

    def key(entry: _Entry) -> tuple[str, ...]:
        return (*entry.workload_and_mode, entry.task[1]) if same_device else entry.workload_and_mode

    # Where a side has a task on several devices of which the other has none, its first one counts.
    on_left, on_right = ({key(entry): entry for entry in reversed(entries) if entry.best} for entries in (left, right))
    pairs = [(on_left[each], on_right[each]) for each in on_left if each in on_right]
    compared = [_row(one, other) for one, other in pairs]
    ratios = [row.ratio for row in compared]
    low, high = _mean_interval(ratios)
    paired_left, paired_right = ({key(pair[i]) for pair in pairs} for i in (0, 1))
    notes = () if compared else ("no task has a valid trial on both sides, so there is nothing to compare",)
    return CompareView(
        a=side_a[1],
        b=side_b[1],
        rows=tuple(sorted(compared, key=lambda row: row.ratio)),
        geomean=geometric_mean(ratios),
        low=low,
        high=high,
        regressions=sum(row.verdict == "slower" for row in compared),
        only_a=tuple(entry.row.name for entry in left if key(entry) not in paired_left),
        only_b=tuple(entry.row.name for entry in right if key(entry) not in paired_right),
        notes=notes,
    )


def _entries(source: Source, side: Side, rows: dict[str, dict[TaskId, TaskRow]]) -> list[_Entry]:
    found = []
    run = next((run["id"] for run in source.runs if run_key(source, run["id"]) == side.key), None)
    for task, progress in source.tasks.items():
        if side.kind == "target" and target_key(source, task[1]) != side.key:
            continue
        if side.kind == "run" and (run is None or run not in progress.runs):
            continue
        race = progress.last_race
        best = race_winner(race) if race else progress.best
        if side.kind == "run" and len(progress.runs) > 1 and run is not None:
            race = progress.races.get(run, [])
            best = race_winner(race) or _best_of_run(source, task, run)
        raced = best is not None and best.race
        found.append(_Entry(source, task, rows[source.key][task], progress, best, raced))
    return found


def _best_of_run(source: Source, task: TaskId, run: str) -> Row | None:
    """The fastest trial of a run's search."""
    trials = source.trials(task)
    mine = [
        (time_ns, i) for i, time_ns in enumerate(trials.time_ns) if time_ns is not None and trials.runs[trials.run[i]] == run
    ]
    if not mine:
        return None
    time_ns, i = min(mine)
    template = trials.templates[trials.template[i]]
    return Row(trials.id[i], template, trials.config_json[i], "ok", time_ns, trials.race[i], run, 0.0, 0.0, 0.0, 0.0)


def _row(a: _Entry, b: _Entry) -> CompareRow:
    assert a.best is not None and b.best is not None and a.best.time_ns and b.best.time_ns
    ratio = a.best.time_ns / b.best.time_ns
    low, high = ratio_interval(_times(a, a.best), _times(b, b.best))
    config_a, config_b = (loose.mapping(loose.parsed(best.config)) for best in (a.best, b.best))
    same_template = a.best.template == b.best.template
    return CompareRow(
        name=a.row.name,
        label=a.row.label,
        target_a=a.task[1],
        target_b=b.task[1],
        mode=a.task[2],
        a=ComparedBest(a.row.key, f"{a.source.key}.{a.best.id}", a.best.template, config_a, a.best.time_ns, a.raced),
        b=ComparedBest(b.row.key, f"{b.source.key}.{b.best.id}", b.best.template, config_b, b.best.time_ns, b.raced),
        ratio=ratio,
        low=low,
        high=high,
        verdict=_verdict(ratio, low, high),
        differences=differences(a.best.template, config_a, config_b, ()) if same_template else (),
        a_on_b_ns=b.progress.configs.get(a.best.template, {}).get(a.best.config),
        b_on_a_ns=a.progress.configs.get(b.best.template, {}).get(b.best.config),
    )


def _times(entry: _Entry, best: Row) -> Sequence[float]:
    """All repetitions of a trial; [] if they cannot be read now."""
    try:
        return entry.source.store.row(best.id).measurement.times_ns if entry.source.store else ()
    except SchedsearchError:
        return ()


def ratio_interval(a_ns: Sequence[float], b_ns: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % bootstrap interval of median(a) / median(b); None with fewer than four repetitions on a side."""
    if min(len(a_ns), len(b_ns)) < _LEAST_REPETITIONS:
        return None, None
    rng = np.random.default_rng(0)
    drawn = [
        np.median(np.array(times)[rng.integers(0, len(times), (RESAMPLES, len(times)))], axis=1) for times in (a_ns, b_ns)
    ]
    low, high = np.quantile(drawn[0] / drawn[1], (0.025, 0.975)).tolist()
    return low, high


def _mean_interval(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % bootstrap interval of the geometric mean over tasks; None with fewer than three."""
    if len(ratios) < _LEAST_TASKS:
        return None, None
    logs = np.log(np.array(ratios))
    drawn = logs[np.random.default_rng(0).integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return math.exp(low), math.exp(high)


def _verdict(ratio: float, low: float | None, high: float | None) -> Literal["faster", "slower", "same", "unknown"]:
    if low is None or high is None:
        return "unknown"
    if low > 1 and ratio > 1 + NEAR:
        return "faster"
    if high < 1 and ratio < 1 / (1 + NEAR):
        return "slower"
    return "same"
