"""Fills the view of a task from the columns of its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedsearch.dashboard import effects
from schedsearch.dashboard.knob_pairs import knob_pairs
from schedsearch.dashboard.noise import doubt_of, words_of
from schedsearch.dashboard.overview import last_times, run_key, run_state
from schedsearch.dashboard.source import Source, TaskId
from schedsearch.dashboard.trials import OUTCOMES, Trials
from schedsearch.dashboard.views.overview import TaskRow
from schedsearch.dashboard.views.task import (
    ModelState,
    Noise,
    ProgressWindow,
    RaceEntry,
    Repeated,
    TaskRun,
    TaskView,
    TrialColumns,
)
from schedsearch.measurement import Outcome
from schedsearch.ops.own_kernel import without_reference

_MESSAGE_CHARACTERS = 400
_MESSAGES = 2000
_REPEATED = 50
_FIT_TRIALS = 4
_REJECTED = OUTCOMES.index(str(Outcome.REJECTED))


def task_view(source: Source, task: TaskId, row: TaskRow, now_s: float, keep: set[int] | None = None) -> TaskView:
    """Everything about a task.

    Args:
        row: its row of the overview.
        keep: ids of the trials that the columns show; None shows all.

    Raises:
        SchedsearchError: the database cannot be read now.
    """
    trials = source.trials(task)
    knobs, configs = trials.knobs()
    searched = trials.searched(knobs, configs)
    by_template = [(each, effects.knob_effects(each)) for each in searched]
    shown = [i for i, number in enumerate(trials.id) if keep is None or number in keep]
    models = _Models.found_in(trials)
    message_of, messages = _messages(trials, shown)
    return TaskView(
        row=row,
        database=source.key,
        notes=_notes(row, trials, len(shown)),
        total=len(trials),
        sampled=len(shown) < len(trials),
        outcomes=OUTCOMES,
        runs=_runs(source, trials, now_s),
        knobs=knobs,
        messages=messages,
        trials=_columns(trials, shown, configs, models, message_of),
        models=tuple(models.states),
        agreement=models.agreement,
        agreement_trials=models.agreement_trials,
        knob_effects=tuple(effect for _, found in by_template for effect in found),
        knob_pairs=tuple(pair for each, found in by_template for pair in knob_pairs(each, found)),
        window=progress_window(trials, row.default_ns),
        failures=tuple(
            sorted((group for each in searched for group in effects.failure_groups(each)), key=lambda group: -group.count)
        ),
        race=_race(trials, row),
        noise=_noise(trials),
        pairs=tuple(pair for each in searched for pair in effects.pair_effects(each)),
    )


def _notes(row: TaskRow, trials: Trials, shown: int) -> tuple[str, ...]:
    notes = [row.problem] if row.problem else []
    if unreferenced := without_reference(row.workload.get("params", {})):
        notes.append(unreferenced)
    if not trials.id:
        notes.append("no record of this task can be read")
    elif all(time_ns is None for time_ns in trials.time_ns):
        notes.append("no trial is valid: all of them failed; see the failures for their reasons")
    elif not row.raced:
        notes.append("no final race was held: times are single measurements, so that there is no speed-up to show")
    if trials.id and all(prediction is None for prediction in trials.prediction):
        notes.append("no trial has a prediction: the run had no model, or ended before it was trained")
    if shown < len(trials):
        notes.append(
            f"shows {shown:,} of {len(trials):,} trials: the fastest, the final race and a sample of the others; all "
            "figures are of all trials"
        )
    return tuple(notes)


def _runs(source: Source, trials: Trials, now_s: float) -> tuple[TaskRun, ...]:
    known, last = {run["id"]: run for run in source.runs}, last_times(source)
    found = []
    for run_id in trials.runs:
        if run := known.get(run_id):
            state = run_state(run, last.get(run_id, 0.0), now_s)
            found.append(TaskRun(run_key(source, run_id), run_id, state, run["started_at"]))
        else:
            found.append(TaskRun("", run_id, "finished", 0.0))
    return tuple(found)


def _messages(trials: Trials, shown: Sequence[int]) -> tuple[list[int | None], tuple[str, ...]]:
    """For each shown trial the index of its message, and the messages, shortened."""
    texts: dict[str, int] = {}
    of: list[int | None] = []
    for i in shown:
        text = trials.messages[trials.message[i]]
        text = text if len(text) <= _MESSAGE_CHARACTERS else text[: _MESSAGE_CHARACTERS - 1] + "…"
        room = text in texts or len(texts) < _MESSAGES
        of.append(texts.setdefault(text, len(texts)) if text and room else None)
    return of, tuple(texts)


@dataclass(frozen=True)
class _Models:
    """The states of the cost models; for each trial its state, and its prediction on the scale of time."""

    states: list[ModelState]
    of: list[int | None]
    predicted_ns: list[float | None]
    agreement: float | None
    agreement_trials: int

    @classmethod
    def found_in(cls, trials: Trials) -> _Models:
        where: dict[tuple[int, int, int | None], int] = {}
        firsts, lasts, of, positions = [], [], [], []
        model: list[int | None] = [None] * len(trials)
        for i, prediction in enumerate(trials.prediction):
            if prediction is None:
                continue
            key = trials.run[i], trials.template[i], trials.model[i]
            if key not in where:
                where[key] = len(where)
                firsts.append(i)
                lasts.append(i)
            model[i] = where[key]
            lasts[where[key]] = i
            positions.append(i)
            of.append(where[key])
        if not where:
            return cls([], model, [None] * len(trials), None, 0)
        groups = np.array(of, dtype=np.int64)
        scores = np.array([trials.prediction[i] for i in positions], dtype=np.float64)
        times = np.array([math.nan if (time_ns := trials.time_ns[i]) is None else time_ns for i in positions])
        ok = ~np.isnan(times)
        found = effects.rank_correlations(groups[ok], scores[ok], -times[ok])
        found += [(0, None)] * (len(where) - len(found))
        states = [
            ModelState(run, trials.templates[template], state, *found[index], firsts[index], lasts[index])
            for (run, template, state), index in where.items()
        ]
        predicted: list[float | None] = [None] * len(trials)
        for i, value in zip(positions, _on_the_scale_of_time(groups, scores, times, len(where)).tolist()):
            predicted[i] = None if math.isnan(value) else float(f"{value:.6g}")
        ranked = [(n, rho) for n, rho in found if rho is not None]
        weight = sum(n - 1 for n, _ in ranked)
        pooled = sum((n - 1) * rho for n, rho in ranked) / weight if weight else None
        return cls(states, model, predicted, pooled, sum(n for n, _ in ranked))


def _on_the_scale_of_time(
    groups: NDArray[np.int64], scores: effects.Floats, times: effects.Floats, count: int
) -> effects.Floats:
    """exp(a + b score) with a and b of each group by least squares of log(time) over score; NaN where it cannot."""
    ok = ~np.isnan(times)
    mine, x, y = groups[ok], scores[ok], np.log(times[ok])
    n = np.bincount(mine, minlength=count)
    x_mean, y_mean = (np.bincount(mine, values, count) / np.maximum(n, 1) for values in (x, y))
    dx, dy = x - x_mean[mine], y - y_mean[mine]
    varies = np.bincount(mine, dx * dx, count)
    fits = (n >= _FIT_TRIALS) & (varies > 1e-12)
    slope = np.where(fits, np.bincount(mine, dx * dy, count) / np.where(fits, varies, 1.0), np.nan)
    exponent = y_mean[groups] + slope[groups] * (scores - x_mean[groups])
    exponent[np.abs(exponent) > 600] = np.nan
    predicted: effects.Floats = np.exp(exponent)
    return predicted


def _columns(
    trials: Trials,
    shown: Sequence[int],
    configs: list[list[int | None]],
    models: _Models,
    message: list[int | None],
) -> TrialColumns:
    def of(column: list[effects.T]) -> list[effects.T]:
        return column[:] if len(shown) == len(column) else [column[i] for i in shown]

    def digits(column: list[float | None]) -> list[float | None]:
        """Six significant digits, which is more than any time has."""
        return [None if value is None else float(f"{value:.6g}") for value in of(column)]

    return TrialColumns(
        id=of(trials.id),
        template=of(trials.template),
        config=of(configs),
        outcome=of(trials.outcome),
        counted=[not trials.race[i] and trials.outcome[i] != _REJECTED for i in shown],
        race=of(trials.race),
        time_ns=digits(trials.time_ns),
        spread=of(trials.spread),
        tuning_s=of(trials.tuning_s),
        at_s=of(trials.at_s),
        run=of(trials.run),
        batch=of(trials.batch),
        model=of(models.of),
        prediction=digits(trials.prediction),
        predicted_ns=of(models.predicted_ns),
        registers=of(trials.registers),
        shared_bytes=of(trials.shared_bytes),
        local_bytes=of(trials.local_bytes),
        spill_bytes=of(trials.spill_bytes),
        code_bytes=of(trials.code_bytes),
        build_s=of(trials.build_s),
        run_s=of(trials.run_s),
        sm_mhz=of(trials.sm_mhz),
        temperature_c=of(trials.temperature_c),
        power_w=of(trials.power_w),
        message=message,
    )


def progress_window(trials: Trials, default_ns: float | None) -> ProgressWindow | None:
    """The times between which the search improved: where the curve of the best time can be read."""
    times = [
        time_ns
        for time_ns, race, outcome in zip(trials.time_ns, trials.race, trials.outcome)
        if not race and outcome != _REJECTED
    ]
    valid = [time_ns for time_ns in times if time_ns is not None]
    if not valid:
        return None
    early = [time_ns for time_ns in times[: max(1, len(times) // 8)] if time_ns is not None] or valid[:1]
    low_ns, high_ns = min(valid), max(min(early), default_ns or 0.0, float(np.quantile(valid, 0.25)))
    return ProgressWindow(low_ns, high_ns, sum(time_ns > high_ns for time_ns in valid))


def _race(trials: Trials, row: TaskRow) -> tuple[RaceEntry, ...]:
    """The entrants of the last final race, the fastest first, failures last."""
    last = next((trials.run[i] for i in reversed(range(len(trials))) if trials.race[i] and trials.time_ns[i]), None)
    entrants = [i for i in range(len(trials)) if trials.race[i] and trials.run[i] == last]
    fastest = min((time_ns for i in entrants if (time_ns := trials.time_ns[i]) is not None), default=None)
    default = next((i for i in entrants if trials.id[i] == row.default_id), None)

    def same_as_default(i: int) -> bool:
        return default is not None and (trials.template[i], trials.config_json[i]) == (
            trials.template[default],
            trials.config_json[default],
        )

    def order(i: int) -> tuple[bool, float, int]:
        return trials.time_ns[i] is None, trials.time_ns[i] or 0.0, i

    return tuple(
        RaceEntry(
            id=trials.id[i],
            template=trials.templates[trials.template[i]],
            config=trials.config(i),
            outcome=OUTCOMES[trials.outcome[i]],
            time_ns=trials.time_ns[i],
            times_ns=trials.race_times_ns.get(trials.id[i], ()),
            spread=trials.spread[i],
            ratio=time_ns / fastest if (time_ns := trials.time_ns[i]) is not None and fastest else None,
            doubt=doubt_of(trials.race_times_ns.get(trials.id[i], ())),
            words=words_of(trials.race_times_ns.get(trials.id[i], ())),
            is_default=same_as_default(i),
            is_best=trials.id[i] == row.best_id,
        )
        for i in sorted(entrants, key=order)
    )


def _noise(trials: Trials) -> Noise:
    spreads = np.array([spread for spread in trials.spread if spread is not None])
    measured: dict[tuple[int, str], list[int]] = {}
    for i, time_ns in enumerate(trials.time_ns):
        if time_ns is not None:
            measured.setdefault((trials.template[i], trials.config_json[i]), []).append(i)
    repeated = []
    for (template, _), group in measured.items():
        if len(group) > 1:
            times = tuple(time_ns for i in group if (time_ns := trials.time_ns[i]) is not None)
            ids = tuple(trials.id[i] for i in group)
            ratio = max(times) / min(times)
            repeated.append(Repeated(trials.templates[template], trials.config(group[0]), ids, times, ratio))
    repeated.sort(key=lambda each: -each.ratio)
    reasons = Counter(throttle for throttle in trials.throttle if throttle)
    return Noise(effects.quantiles(spreads), tuple(repeated[:_REPEATED]), reasons.total(), dict(reasons.most_common(20)))
