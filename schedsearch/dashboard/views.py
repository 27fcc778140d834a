"""The values that the pages draw. `to_json` gives the JSON; the fields below are the contract with the pages.

Every answer has one path. The server gives it under `/api/PATH`, a report holds it under the same path:

    overview            Overview
    task/KEY            TaskView       KEY of `TaskRow.key`
    trial/KEY           TrialView      KEY is `TaskView.database + "." + id`, for any id of `TrialColumns`
    compare/A/B         CompareView    A and B of `Side.key`; a report holds the pairs in `Overview.compared`
    records             RecordsView    live also with a query: see `RecordsView`
    replay              ReplayView

Units are in the names: `_ns`, `_s` (seconds; `_at_s` are seconds since 1970), `_bytes`, `_mhz`. Ratios and shares are plain
numbers, where 0.5 is 50 %. Unknown is null. There is no NaN and no infinity. Texts are foreign: a page shows them as text.

Keys consist of letters, digits, `.` and `-`. They stay the same while the server runs and between reports of the same files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schedsearch.text import printable

JSON = Any  # what `json.dumps` takes

RunState = Literal["running", "silent", "finished", "interrupted"]


@dataclass(frozen=True)
class DatabaseRow:
    """One file that was named.

    Attributes:
        key: "0" for the first file, "1" for the second, ...
        path: as given; `name` is its last part.
        problem: why nothing can be read from it now (missing, empty, newer, not a database); "" if it can be read. What
            was read before it went wrong is still shown.
        notes: damage that was skipped, and other remarks; at most 20 texts.
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
    """What of a run's budget went to a task. `task` is a `TaskRow.key`."""

    task: str
    trials: int
    share_of_trials: float
    share_of_seconds: float


@dataclass(frozen=True)
class RunRow:
    """One `tune`.

    Attributes:
        state: running: it has no end yet and measured something in the last minutes; silent: it has no end and is quiet,
            so it was probably killed; finished; interrupted by its user.
        last_at_s: when its last record was stored.
        phase: what a running run was doing when it last said so: building, preparing, measuring or racing; "" if not known.
        stopped: why the search ended: trials, time, exhausted or interrupted; "" without an end.
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
        best_id, default_id: their trials (`TrialColumns.id`).
        rate: 1e9 operations (`rate_unit` GFLOP/s) or bytes (GB/s) per second of the best.
        limit_ns: no kernel that does all the work is faster on this device; `limit_share` is `limit_ns / best_ns`, the
            share of the device's limit that the best reaches.
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
        geomean_speedup: over the tasks that had a final race; `raced_tasks` of them.
        compared: pairs of `Side.key` that a report holds; live any pair can be asked for.
        replays: names of the replay files.
    """

    revision: int
    version: str
    now_s: float
    notes: tuple[str, ...]
    databases: tuple[DatabaseRow, ...]
    runs: tuple[RunRow, ...]
    tasks: tuple[TaskRow, ...]
    sides: tuple[Side, ...]
    compared: tuple[tuple[str, str], ...]
    replays: tuple[str, ...]
    geomean_speedup: float | None
    raced_tasks: int


@dataclass(frozen=True)
class Knobs:
    """The knobs of one template, as they occur in the records. `values[i]` are those of knob `names[i]`, ascending."""

    template: str
    names: tuple[str, ...]
    values: tuple[tuple[JSON, ...], ...]


@dataclass(frozen=True)
class TrialColumns:
    """Trials in the order of their measurement, column by column: all lists have the same length.

    Attributes:
        id: number of the record in its database. The trial's key is `database + "." + id`.
        template: index into `TaskView.knobs`.
        config: for each trial the indices of its values in `Knobs.values`, in the order of `Knobs.names`; null where the
            config lacks the knob.
        outcome: index into `TaskView.outcomes`.
        counted: whether it cost a trial: neither a static reject nor of a final race.
        race: whether it is of a final race.
        time_ns: median of its repetitions; null unless ok. `spread` is their interquartile range over the median, null
            with fewer than four repetitions.
        tuning_s: seconds of tuning until it was measured: since its run's start, plus the earlier runs on this task.
        at_s: when it was measured.
        run: index into `TaskView.runs`.
        model: index into `TaskView.models`; null without a prediction. `prediction` is the model's score, higher is
            faster, comparable within one state only. `predicted_ns` is the score on the scale of time: the line that fits
            log(time) of its state best; null with fewer than four valid trials in the state.
        registers, shared_bytes, local_bytes, spill_bytes, code_bytes: of the kernel; null if it was not built.
        build_s, run_s: seconds of building, and of verifying and timing.
        sm_mhz, temperature_c, power_w: of the card after timing, null if not known.
        message: index into `TaskView.messages`; null without one.
    """

    id: list[int]
    template: list[int]
    config: list[list[int | None]]
    outcome: list[int]
    counted: list[bool]
    race: list[bool]
    time_ns: list[float | None]
    spread: list[float | None]
    tuning_s: list[float]
    at_s: list[float]
    run: list[int]
    batch: list[int]
    model: list[int | None]
    prediction: list[float | None]
    predicted_ns: list[float | None]
    registers: list[int | None]
    shared_bytes: list[int | None]
    local_bytes: list[int | None]
    spill_bytes: list[int | None]
    code_bytes: list[int | None]
    build_s: list[float]
    run_s: list[float]
    sm_mhz: list[float | None]
    temperature_c: list[float | None]
    power_w: list[float | None]
    message: list[int | None]


@dataclass(frozen=True)
class ModelState:
    """One state of a run's cost model on a template, and how well it ranked what was measured next.

    Attributes:
        run: index into `TaskView.runs`.
        state: its number within run and template; each training makes a new one. None in old records.
        trials: valid trials with a prediction of this state.
        correlation: Spearman's rank correlation of predicted and measured speed: 1 perfect, 0 chance. None with fewer
            than two trials, or if all predictions or times are equal.
        first_trial, last_trial: positions in `TrialColumns`.
    """

    run: int
    template: str
    state: int | None
    trials: int
    correlation: float | None
    first_trial: int
    last_trial: int


@dataclass(frozen=True)
class ValueEffect:
    """The trials that have one value of a knob.

    Attributes:
        value: of the knob.
        trials, failures, rejected: how many have it, how many of them failed, how many were rejected unmeasured.
        quantiles_ns: least, lower quartile, median, upper quartile and greatest time; None without a valid trial.
    """

    value: JSON
    trials: int
    failures: int
    rejected: int
    quantiles_ns: tuple[float, float, float, float, float] | None


@dataclass(frozen=True)
class KnobEffect:
    """What a knob of a template does, over all its trials of the search.

    Attributes:
        importance: share of the variance of log(time) that the knob alone explains (epsilon squared, which is 0 on
            average if the knob does nothing); None with too few trials.
        failure_importance: the same for failing or not.
        values: in ascending order.
    """

    template: str
    knob: str
    importance: float | None
    failure_importance: float | None
    values: tuple[ValueEffect, ...]


@dataclass(frozen=True)
class SharedKnob:
    """A value that a group of failures has more often than the other trials. Shares are of trials of the same template."""

    knob: str
    value: JSON
    share_in_group: float
    share_elsewhere: float


@dataclass(frozen=True)
class FailureGroup:
    """Failures of a template with the same outcome and the same message except for its numbers.

    Attributes:
        stage: build, check (static rejects), launch, run or verify.
        reason: the first line of the message with numbers as #; `message` is one whole message.
        ids: up to 20 of the trials, the first ones.
        shared: what they have in common, the most telling first.
    """

    template: str
    outcome: str
    stage: str
    reason: str
    message: str
    count: int
    ids: tuple[int, ...]
    shared: tuple[SharedKnob, ...]


@dataclass(frozen=True)
class RaceEntry:
    """An entrant of the last final race. `ratio` is its time over that of the fastest; None if it failed."""

    id: int
    template: str
    config: Mapping[str, JSON]
    outcome: str
    time_ns: float | None
    times_ns: tuple[float, ...]
    spread: float | None
    ratio: float | None
    is_default: bool
    is_best: bool


@dataclass(frozen=True)
class Repeated:
    """A config that was measured several times. `ratio` is the slowest over the fastest time."""

    template: str
    config: Mapping[str, JSON]
    ids: tuple[int, ...]
    times_ns: tuple[float, ...]
    ratio: float


@dataclass(frozen=True)
class Noise:
    """How far times can be trusted.

    Attributes:
        spread_quantiles: least, quartiles and greatest of the trials' spreads; None without any.
        repeated: configs with several measurements, those that differ most first, at most 50.
        throttled: how many trials found the card throttled; `throttle_reasons` -> count.
    """

    spread_quantiles: tuple[float, float, float, float, float] | None
    repeated: tuple[Repeated, ...]
    throttled: int
    throttle_reasons: Mapping[str, int]


@dataclass(frozen=True)
class PairEffect:
    """Pairs of valid trials of a template that differ in one knob only.

    Attributes:
        ratio: median of time with `to` over time with `of`: below 1, `to` is faster. `low` and `high` are the quartiles.
        pairs: how many there are.
    """

    template: str
    knob: str
    of: JSON
    to: JSON
    pairs: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskRun:
    """A run that measured something of this task. `key`, `state`: of `RunRow`, "" and "finished" for imported records."""

    key: str
    id: str
    state: RunState
    started_at_s: float


@dataclass(frozen=True)
class TaskView:
    """Everything about a task.

    Attributes:
        notes: what the reader must know: that the operator is not installed, that only a sample is shown, ...
        sampled: `trials` leaves some out; `total` is their whole number. All other figures are of all trials.
        agreement: Spearman's correlation pooled over the states of the models, of `agreement_trials`; None if unknown.
    """

    row: TaskRow
    database: str
    notes: tuple[str, ...]
    total: int
    sampled: bool
    outcomes: tuple[str, ...]
    runs: tuple[TaskRun, ...]
    knobs: tuple[Knobs, ...]
    messages: tuple[str, ...]
    trials: TrialColumns
    models: tuple[ModelState, ...]
    agreement: float | None
    agreement_trials: int
    knob_effects: tuple[KnobEffect, ...]
    failures: tuple[FailureGroup, ...]
    race: tuple[RaceEntry, ...]
    noise: Noise
    pairs: tuple[PairEffect, ...]


@dataclass(frozen=True)
class Difference:
    """A knob in which a trial differs from the best one. `here` or `best` is None if that template lacks the knob.

    Attributes:
        ratio: what the change from `here` to `best` does to the time (see `PairEffect`); None without a measured pair.
    """

    knob: str
    here: JSON
    best: JSON
    ratio: float | None
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True)
class Command:
    """A command to copy, and what it is for."""

    purpose: str
    command: str


@dataclass(frozen=True)
class Fact:
    """A name and a text to show in a table."""

    name: str
    value: str


@dataclass(frozen=True)
class TrialView:
    """Everything about a trial.

    Attributes:
        times_ns: every repetition in the order of measurement.
        ratio_to_best: its time over that of the best trial that compares with it; None without a time.
        occupancy: blocks per multiprocessor times threads per block over what the device allows, as registers and shared
            memory limit it; None if block size or device are not known. `blocks_per_sm` belongs to it.
        facts: toolchain, clocks, host, card, source, hashes, time stamps, as texts.
        plan: the launch plan as JSON if the code is stored, otherwise None.
        code: listings of stored code: "SASS" or "Assembly" -> text; empty without any. `code_note` says why there is none,
            or that it was cut.
        differences: from the best trial; [] if it is the best. `other_template`: the best is of another template, so that
            configs cannot be compared knob by knob.
        profiles: what Nsight Compute read, as JSON (`schedsearch records show --json`).
    """

    key: str
    task: str
    task_name: str
    database: str
    id: int
    template: str
    template_version: int
    config: Mapping[str, JSON]
    outcome: str
    message: str
    time_ns: float | None
    times_ns: tuple[float, ...]
    spread: float | None
    race: bool
    best: bool
    best_key: str | None
    best_ns: float | None
    ratio_to_best: float | None
    prediction: float | None
    model: int | None
    batch: int
    max_error: float | None
    registers: int
    shared_bytes: int
    local_bytes: int
    spill_bytes: int
    code_bytes: int
    occupancy: float | None
    blocks_per_sm: int | None
    build_s: float
    run_s: float
    started_at_s: float
    finished_at_s: float
    facts: tuple[Fact, ...]
    clocks: Mapping[str, JSON]
    plan: JSON
    code: Mapping[str, str]
    code_note: str
    other_template: bool
    differences: tuple[Difference, ...]
    commands: tuple[Command, ...]
    profiles: tuple[JSON, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ComparedBest:
    """The best trial of one side."""

    task: str
    trial: str
    template: str
    config: Mapping[str, JSON]
    time_ns: float
    raced: bool


@dataclass(frozen=True)
class CompareRow:
    """A task that both sides have.

    Attributes:
        ratio: time of A over time of B: above 1, B is faster. `low`, `high`: its 95 % interval, from the repetitions of
            both (bootstrap of medians); None with fewer than four on a side.
        verdict: faster or slower says that the whole interval is on one side of 1 and the ratio is more than 2 % away;
            otherwise same, or unknown without an interval. It speaks of B.
        differences: knobs in which the best configs differ; `here` is A's, `best` is B's value.
        a_on_b_ns: time on B of A's best config (what transfers), None if B did not measure it; `b_on_a_ns` the reverse.
    """

    name: str
    label: str
    target_a: str
    target_b: str
    mode: str
    a: ComparedBest
    b: ComparedBest
    ratio: float
    low: float | None
    high: float | None
    verdict: Literal["faster", "slower", "same", "unknown"]
    differences: tuple[Difference, ...]
    a_on_b_ns: float | None
    b_on_a_ns: float | None


@dataclass(frozen=True)
class CompareView:
    """Two sides. `geomean` is the geometric mean of the ratios with its 95 % bootstrap interval over tasks (None with
    fewer than three tasks); `only_a`, `only_b` name tasks that have no partner, or no valid trial on one side."""

    a: Side
    b: Side
    rows: tuple[CompareRow, ...]
    geomean: float | None
    low: float | None
    high: float | None
    regressions: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RecordColumns:
    """Records column by column. `task` is an index into `RecordsView.tasks`, `outcome` a name, `config` a text of
    name=value, `message` its first 200 characters. The record's key is `database of its task + "." + id`."""

    id: list[int]
    task: list[int]
    template: list[str]
    outcome: list[str]
    time_ns: list[float | None]
    race: list[bool]
    config: list[str]
    message: list[str]
    run: list[str]
    at_s: list[float]


@dataclass(frozen=True)
class RecordsView:
    """Records of all databases, the newest first. `total` matched; these are `offset` and following.

    Without a query the path `records` gives the newest 1,000 (all of them in a report). Live, the query narrows and sorts:
    task=KEY, template=NAME, outcome=NAME (or `failed`), run=ID, text=WORDS (in config or message), sort=time_ns|at_s|id,
    descending=0|1, offset=N, limit=N (at most 5,000).
    """

    total: int
    offset: int
    tasks: tuple[TaskRow, ...]
    records: RecordColumns
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ReplaySpace:
    """A recorded space under a tuner; lists go with `ReplayFile.budgets`."""

    name: str
    configurations: int
    valid: int
    best_ns: float
    fractions: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    within_5: tuple[float, ...]


@dataclass(frozen=True)
class ReplayFile:
    """One file of `schedsearch replay --json`. Fractions are of the optimum: 1 is the best known configuration. `low`,
    `high` are 95 % bootstrap intervals."""

    name: str
    tuner: str
    seeds: int
    budgets: tuple[int, ...]
    geomean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    cpu_s_per_64: float
    spaces: tuple[ReplaySpace, ...]


@dataclass(frozen=True)
class ReplayView:
    """All replay files; `problems` are texts about files that could not be read."""

    files: tuple[ReplayFile, ...]
    problems: tuple[str, ...]


def to_json(value: Any) -> JSON:
    """A view as JSON values: dataclasses become objects, tuples lists, numbers that are not finite null.

    Characters that do not show as themselves, such as controls and bidirectional overrides, become escapes, except line
    breaks and tabs. A list is a column, whose values are taken as they are.
    """
    if isinstance(value, str):
        return printable(value, lines=True)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int | list):
        return value
    if dataclasses.is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {printable(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise TypeError(f"a view holds {type(value).__name__}, which JSON does not have")
