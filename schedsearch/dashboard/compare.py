"""Compares the best trials of two sides: databases, devices of one, or runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import get_args

from schedsearch.dashboard import loose
from schedsearch.dashboard.noise import doubt_of, words_of
from schedsearch.dashboard.overview import run_key, target_key
from schedsearch.dashboard.progress import Progress, Row, race_winner
from schedsearch.dashboard.ratios import mean_ratio, median_ratio, verdict_of
from schedsearch.dashboard.source import Source, TaskId
from schedsearch.dashboard.trial import differences
from schedsearch.dashboard.views.compare import ComparedBest, CompareRow, CompareView, Verdict
from schedsearch.dashboard.views.overview import Side, TaskRow


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
    counts = Counter(row.verdict for row in compared)
    trusted = [(pair, row) for pair, row in zip(pairs, compared) if "bimodal" not in (row.a.doubt, row.b.doubt)]
    times = [(_times(one), _times(other)) for (one, other), _ in trusted]
    geomean, low, high = mean_ratio(times, [row.ratio for _, row in trusted])
    paired_left, paired_right = ({key(pair[i]) for pair in pairs} for i in (0, 1))
    notes = () if compared else ("no task has a valid trial on both sides, so there is nothing to compare",)
    return CompareView(
        a=side_a[1],
        b=side_b[1],
        rows=tuple(sorted(compared, key=lambda row: row.ratio)),
        geomean=geomean,
        low=low,
        high=high,
        verdict=verdict_of(low, high),
        trusted_tasks=len(trusted),
        counts={verdict: counts[verdict] for verdict in get_args(Verdict)},
        regressions=counts["slower"],
        doubtful=sum(bool(row.a.doubt or row.b.doubt) for row in compared),
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
    _, low, high = median_ratio(_times(a), _times(b))
    one, other = _best(a, a.best), _best(b, b.best)
    same_template = a.best.template == b.best.template
    return CompareRow(
        name=a.row.name,
        label=a.row.label,
        target_a=a.task[1],
        target_b=b.task[1],
        mode=a.task[2],
        a=one,
        b=other,
        ratio=one.time_ns / other.time_ns,
        low=low,
        high=high,
        verdict=verdict_of(low, high),
        differences=differences(a.best.template, dict(one.config), dict(other.config), ()) if same_template else (),
        a_on_b_ns=b.progress.configs.get(a.best.template, {}).get(a.best.config),
        b_on_a_ns=a.progress.configs.get(b.best.template, {}).get(b.best.config),
    )


def _best(entry: _Entry, best: Row) -> ComparedBest:
    times = _times(entry)
    return ComparedBest(
        task=entry.row.key,
        trial=f"{entry.source.key}.{best.id}",
        template=best.template,
        config=loose.mapping(loose.parsed(best.config)),
        time_ns=best.time_ns or 0.0,
        raced=entry.raced,
        doubt=doubt_of(times),
        words=words_of(times),
    )


def _times(entry: _Entry) -> tuple[float, ...]:
    """All repetitions of the best trial; () if they cannot be read now."""
    return entry.source.repetitions(entry.best.id) if entry.best else ()
