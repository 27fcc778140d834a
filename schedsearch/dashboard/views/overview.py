"""The overview: databases, runs and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedsearch.dashboard.views.noise import Doubt
from schedsearch.dashboard.views.values import JSON

RunState = Literal["running", "silent", "finished", "interrupted"]


@dataclass(frozen=True)
class DatabaseRow:
    """One file that was named.

    Attributes:
        key: "0" for the first file, "1" for the second, ...
        path: as given; `name` is its last part.
        problem: why nothing can be read from it now (missing, empty, newer, not a database); "" if it can be read. What
            was read before it went wrong is still shown.
        notes: damage that was skipped, and other remarks; at most 20 strings.
        geomean_speedup, raced_tasks, trusted_tasks: as in `Overview`, of its own tasks.
    """

    key: str
    path: str
    name: str
    problem: str
    notes: tuple[str, ...]
    records: int
    tasks: int
    runs: int
    size_bytes: int
    trials: int
    failures: int
    geomean_speedup: float | None
    raced_tasks: int
    trusted_tasks: int


@dataclass(frozen=True)
class Shares:
    """Fractions of a run's wall time.

    Attributes:
        device: it verified and timed candidates.
        build, tuner: it was idle because it waited for a build, or for a proposal. None if the run did not say, because it
            has no outcome yet, or because an older schedsearch did not finish it.
        preparing: inputs and references were made. None if the run did not say.
        other: the remaining part. None if the run did not say.
        builders_busy: how many builders were at work on average.
    """

    device: float
    build: float | None
    tuner: float | None
    preparing: float | None
    other: float | None
    builders_busy: float


@dataclass(frozen=True)
class RunTask:
    """The part of a run's budget that went to a task. `task` is a `TaskRow.key`."""

    task: str
    trials: int
    share_of_trials: float
    share_of_seconds: float


@dataclass(frozen=True)
class RunRow:
    """One `tune`.

    Attributes:
        state: running: it has no end yet and measured something in the last minutes; silent: it has no end and is quiet,
            so it was probably killed; finished; interrupted by its user, or because its last device was lost.
        last_at_s: when its last record was stored.
        phase: what a running run was doing when it last said so: building, preparing, measuring or racing; "" if not known.
        stopped: why the search ended: trials, time, exhausted, interrupted or lost; "" without an end.
        trials: measured so far. `budget_trials`, `budget_s`: what it may spend; None without such a limit.
        trials_per_s: over the last minute of a running run, otherwise over the whole run.
        left_s: an estimate of what is left until the budget is spent; None unless it is running.
    """

    key: str
    database: str
    id: str
    state: RunState
    target: str
    tuner: str
    seed: int | None
    started_at_s: float
    finished_at_s: float | None
    last_at_s: float
    wall_s: float
    phase: str
    stopped: str
    trials: int
    failures: int
    budget_trials: int | None
    budget_s: float | None
    trials_per_s: float | None
    left_s: float | None
    shares: Shares | None
    tasks: tuple[RunTask, ...]
    options: Mapping[str, JSON]
    toolchain: Mapping[str, str]


@dataclass(frozen=True)
class TemplateRow:
    """One template on a task; times are single measurements of the search."""

    template: str
    trials: int
    failures: int
    best_ns: float | None


@dataclass(frozen=True)
class TaskRow:
    """One task: a workload on a device with a timing mode, in one database.

    Attributes:
        key: names it in paths.
        name: from the workload file, otherwise the label.
        problem: why the workload cannot be read here (its operator is not installed); "" if it can. Then `rate`,
            `limit_ns` and `limit_share` are None.
        template: the template of the best trial; None if none is valid.
        raced: `default_ns`, `best_ns` and `plain_ns` are of the last final race and can be compared. Otherwise they are
            single measurements of the search, and `speedup` is None.
        speedup_low, speedup_high: the 95 % interval of the speed-up (`compare.CompareRow`); None if it is not known.
        default_spread, best_spread: interquartile range of the repetitions over their median; None with fewer than four.
        doubt: the worse doubt about both times; `doubts` has a sentence about each time that is doubtful.
        best_id, default_id: their trials (`TrialColumns.id`).
        rate: 1e9 operations (`rate_unit` GFLOP/s) or bytes (GB/s) per second of the best.
        limit_ns: no kernel that does all the work is faster on this device; `limit_share` is `limit_ns / best_ns`, the
            share of the device's limit that the best reaches. Both are None for devices whose peaks are not known, such as
            CPUs.
        trials: candidates that cost a trial; `valid` of them have a time. `rejected` cost none.
        failures: outcome -> count, for all outcomes but ok.
        configurations: size of the space over all templates, None if no run says; `measured_share` is the part measured.
        since_improvement_trials, since_improvement_s: trials and seconds of tuning since the best time was found.
        curve: [trial, best time so far in ns] at up to 40 trials, the last one included. [] without a valid trial.
        live: a run that has not ended works on it.
    """

    key: str
    database: str
    name: str
    label: str
    op: str
    target: str
    mode: str
    workload: JSON
    problem: str
    template: str | None
    default_ns: float | None
    best_ns: float | None
    plain_ns: float | None
    raced: bool
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    default_spread: float | None
    best_spread: float | None
    doubt: Doubt
    doubts: tuple[str, ...]
    over_plain: float | None
    best_id: int | None
    default_id: int | None
    rate: float | None
    rate_unit: str
    limit_ns: float | None
    limit_share: float | None
    trials: int
    valid: int
    rejected: int
    failures: Mapping[str, int]
    templates: tuple[TemplateRow, ...]
    configurations: int | None
    measured_share: float | None
    since_improvement_trials: int | None
    since_improvement_s: float | None
    seconds: float
    last_at_s: float
    curve: tuple[tuple[int, float], ...]
    live: bool


@dataclass(frozen=True)
class Side:
    """What Compare takes on one side: a whole database, one device of it, or one run."""

    key: str
    kind: Literal["database", "target", "run"]
    label: str


@dataclass(frozen=True)
class Overview:
    """Everything on one page.

    Attributes:
        revision: grows whenever something changed; the events of the server carry it too.
        version: of schedsearch.
        now_s: when this was made.
        notes: what the reader must know, e.g. that a report holds a sample only.
        pages: the pages on which there is something to see, for the navigation.
        geomean_speedup: over the tasks that had a final race whose times can be trusted; None without any.
        raced_tasks, trusted_tasks: how many tasks had a race, and how many of these are in the mean.
        compared: pairs of `Side.key` that have a task in common, as a report holds them; live any pair can be asked for.
        replays: names of the replay files.
    """

    revision: int
    version: str
    now_s: float
    notes: tuple[str, ...]
    pages: tuple[str, ...]
    databases: tuple[DatabaseRow, ...]
    runs: tuple[RunRow, ...]
    tasks: tuple[TaskRow, ...]
    sides: tuple[Side, ...]
    compared: tuple[tuple[str, str], ...]
    replays: tuple[str, ...]
    geomean_speedup: float | None
    raced_tasks: int
    trusted_tasks: int
