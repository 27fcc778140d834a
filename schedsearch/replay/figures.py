"""Figures of replayed searches: means over seeds and spaces with bootstrap intervals, and differences between tuners.

They are fractions of the optimum: best known time over best time so far, 0 while nothing valid was found.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.replay.recorded import RecordedSpace
from schedsearch.typed import JsonObject

FLOOR = 0.001  # least fraction of a space in the geometric mean, because a space without a result would make the mean 0
NEAR = 1.05  # "within 5 %": at most this times the best known time
RESAMPLES, CONFIDENCE = 2000, 0.95  # of the bootstrap


@dataclass(frozen=True)
class Run:
    """The result of one run of a tuner over one space.

    Attributes:
        fractions: (evaluations,), the fraction of the optimum after each evaluation.
        proposals, cpu_s: how many configurations the tuner proposed, and the CPU seconds it spent, fitting included.
        times_ns: the recorded time of each evaluation, NaN for a failure; fewer where the space was exhausted.
    """

    fractions: NDArray[np.float64]
    proposals: int
    cpu_s: float
    times_ns: tuple[float, ...] = ()


@dataclass(frozen=True)
class SpaceResult:
    """Figures of one space, by budget: `fractions` is the mean over seeds, `low` and `high` its bootstrap interval,
    `within_5` the share of runs within 5 % of the optimum."""

    file: str
    name: str
    configurations: int
    valid: int
    best_ns: float
    fractions: dict[int, float]
    low: dict[int, float]
    high: dict[int, float]
    within_5: dict[int, float]
    cpu_s_per_64: float


@dataclass(frozen=True)
class Report:
    """Figures of a replay; `geomean` is over the spaces, `geomean_low` and `geomean_high` its bootstrap interval."""

    tuner: str
    seeds: int
    spaces: tuple[SpaceResult, ...]
    geomean: dict[int, float]
    geomean_low: dict[int, float]
    geomean_high: dict[int, float]
    cpu_s_per_64: float


def summarise(
    spaces: Sequence[RecordedSpace], tuner: str, evaluations: Sequence[int], runs: Sequence[Sequence[Run]]
) -> Report:
    """Figures of runs that were made already, for each space one per seed, as long as the greatest budget or the space."""
    budgets = sorted(set(evaluations))
    fractions = _fractions(runs, budgets)
    means = fractions.mean(axis=1)
    resampled = _resample(fractions)  # (resamples, spaces, budgets)
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(resampled, tails, axis=0)
    near = (fractions >= 1 / NEAR).mean(axis=1)
    geomean = _geometric_mean(means)
    geomean_low, geomean_high = np.quantile(_geometric_mean(resampled), tails, axis=0)

    by_budget = functools.partial(_by_budget, budgets)
    results = tuple(
        SpaceResult(
            file=space.file,
            name=space.name,
            configurations=len(space.rows),
            valid=int(np.count_nonzero(~np.isnan(space.times_ns))),
            best_ns=space.best_ns,
            fractions=by_budget(means[i]),
            low=by_budget(low[i]),
            high=by_budget(high[i]),
            within_5=by_budget(near[i]),
            cpu_s_per_64=_cpu_s_per_64(runs[i]),
        )
        for i, space in enumerate(spaces)
    )
    return Report(
        tuner=tuner,
        seeds=len(runs[0]),
        spaces=results,
        geomean=by_budget(geomean),
        geomean_low=by_budget(geomean_low),
        geomean_high=by_budget(geomean_high),
        cpu_s_per_64=_cpu_s_per_64([one for of_space in runs for one in of_space]),
    )


@dataclass(frozen=True)
class Difference:
    """By how much one tuner's fraction of the optimum exceeds another's, by budget: `mean`, and the ends `low` and `high` of
    its bootstrap interval, in which runs of the same seed stay together. `of` is a space's name, or "geometric mean"."""

    of: str
    mean: dict[int, float]
    low: dict[int, float]
    high: dict[int, float]


def differences(
    spaces: Sequence[RecordedSpace],
    ours: Sequence[Sequence[Run]],
    theirs: Sequence[Sequence[Run]],
    evaluations: Sequence[int],
) -> list[Difference]:
    """Compares runs of two tuners, for each space one per seed: space by space, and last the geometric means."""
    budgets = sorted(set(evaluations))
    mine, other = _fractions(ours, budgets), _fractions(theirs, budgets)
    means, other_means = mine.mean(axis=1), other.mean(axis=1)
    drawn, other_drawn = _resample(mine), _resample(other)  # the same seeds are drawn for both
    names = [*(f"{space.file}: {space.name}" for space in spaces), "geometric mean"]
    mean = [*(means - other_means), _geometric_mean(means) - _geometric_mean(other_means)]
    spread = [*np.moveaxis(drawn - other_drawn, 1, 0), _geometric_mean(drawn) - _geometric_mean(other_drawn)]
    ends = [np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0) for resampled in spread]
    by_budget = functools.partial(_by_budget, budgets)
    return [
        Difference(name, by_budget(exact), by_budget(low), by_budget(high))
        for name, exact, (low, high) in zip(names, mean, ends)
    ]


def _fractions(runs: Sequence[Sequence[Run]], budgets: Sequence[int]) -> NDArray[np.float64]:
    """(spaces, seeds, budgets)"""
    # A run over a space that holds no more ends, and stays at its last fraction.
    return np.array(
        [[[one.fractions[min(b, len(one.fractions)) - 1] for b in budgets] for one in of_space] for of_space in runs]
    )


def _by_budget(budgets: Sequence[int], values: NDArray[np.float64]) -> dict[int, float]:
    return {budget: float(value) for budget, value in zip(budgets, values)}


def _geometric_mean(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the spaces, the last axis but one."""
    result: NDArray[np.float64] = np.exp(np.log(np.maximum(means, FLOOR)).mean(axis=-2))
    return result


def _resample(fractions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bootstrap: the means over seeds drawn with replacement, of each space apart; (resamples, spaces, budgets)."""
    rng = np.random.default_rng(0)
    n_spaces, n_seeds, n_budgets = fractions.shape
    out = np.empty((RESAMPLES, n_spaces, n_budgets))
    for i in range(n_spaces):
        chosen = rng.integers(0, n_seeds, size=(RESAMPLES, n_seeds))
        out[:, i] = fractions[i][chosen].mean(axis=1)
    return out


def _cpu_s_per_64(runs: Sequence[Run]) -> float:
    return 64 * sum(one.cpu_s for one in runs) / max(1, sum(one.proposals for one in runs))


def to_json(report: Report) -> JsonObject:
    """The object of `schedsearch replay --json`; budgets are keys as text."""

    def plain(value: object) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return [plain(vars(item)) for item in value]
        return value

    return {name: plain(value) for name, value in vars(report).items()}
