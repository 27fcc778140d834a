"""A task: its trials column by column, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedsearch.dashboard.views.noise import Doubt
from schedsearch.dashboard.views.overview import RunState, TaskRow
from schedsearch.dashboard.views.values import JSON


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
class KnobCells:
    """The pairs of values that occur, column by column: cell `i` has value `first[i]` of the one knob and `second[i]` of the
    other, as indices of `Knobs.values`.

    Attributes:
        trials, failures: how many trials have both values, and how many of these failed; static rejects are left out.
        best_ns, median_ns: over the valid ones; null without any. `best_id` is the trial with the best time.
    """

    first: list[int]
    second: list[int]
    trials: list[int]
    failures: list[int]
    best_ns: list[float | None]
    median_ns: list[float | None]
    best_id: list[int | None]


@dataclass(frozen=True)
class KnobPair:
    """Two knobs of a template, and the times of their pairs of values.

    Attributes:
        importance: share of the variance of log(time) that both explain together (epsilon squared, as `KnobEffect`); None
            with fewer than two valid trials for each pair of values on average.
        gain: how much that is more than the better one of them explains alone.
    """

    template: str
    first: str
    second: str
    importance: float | None
    gain: float | None
    cells: KnobCells


@dataclass(frozen=True)
class ProgressWindow:
    """The times between which the search improved.

    Attributes:
        low_ns, high_ns: the best time, and the slowest of these: the default, what was best after the first eighth of the
            trials, and the lower quartile of all times.
        above: valid trials that are slower than `high_ns`.
    """

    low_ns: float
    high_ns: float
    above: int


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
    """An entrant of the last final race. `ratio` is its time over that of the fastest; None if it failed. `doubt` says why
    its time is not to be trusted, `words` in a sentence."""

    id: int
    template: str
    config: Mapping[str, JSON]
    outcome: str
    time_ns: float | None
    times_ns: tuple[float, ...]
    spread: float | None
    ratio: float | None
    doubt: Doubt
    words: str
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
        sampled: `trials` leaves some out; `total` is their integer. All other figures are of all trials.
        knob_pairs: of the knobs that matter most, the most important pair first.
        window: None without a valid trial of the search.
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
    knob_pairs: tuple[KnobPair, ...]
    window: ProgressWindow | None
    failures: tuple[FailureGroup, ...]
    race: tuple[RaceEntry, ...]
    noise: Noise
    pairs: tuple[PairEffect, ...]
