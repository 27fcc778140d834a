"""Ratios of times with intervals, and the verdict that follows from an interval. Nothing else decides a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedsearch.dashboard.noise import modes_of
from schedsearch.dashboard.views.compare import Verdict

NEAR = 0.02  # how far two measurements of one kernel on different days are apart, which repetitions do not show
_RESAMPLES = 2000
_LEAST_REPETITIONS = 4
_LEAST_TASKS = 3

Draws = NDArray[np.float64]


class Interval(NamedTuple):
    """A ratio of times with its 95 % interval; `low` and `high` are None if it is not known."""

    ratio: float | None
    low: float | None
    high: float | None


def verdict_of(low: float | None, high: float | None) -> Verdict:
    """What an interval of time of A over time of B says about B: no difference is shown as long as it contains 1."""
    if low is None or high is None:
        return "unknown"
    return "faster" if low > 1 else "slower" if high < 1 else "same"


@lru_cache(maxsize=4096)
def median_ratio(a_ns: tuple[float, ...], b_ns: tuple[float, ...]) -> Interval:
    """Median of `a_ns` over median of `b_ns`.

    There is no interval with fewer than four repetitions on a side, nor where those of a side fall into two groups: a median
    between the groups says nothing.

    The interval is that of a percentile bootstrap (B. Efron, Annals of Statistics 7 (1979) 1), widened by `NEAR` on both
    sides.
    """
    ratio = float(np.median(a_ns) / np.median(b_ns)) if a_ns and b_ns else None
    drawn = _log_draws(a_ns, b_ns)
    return Interval(ratio, None, None) if drawn is None or ratio is None else _interval(ratio, drawn)


def mean_ratio(pairs: Sequence[tuple[tuple[float, ...], tuple[float, ...]]], ratios: Sequence[float]) -> Interval:
    """Geometric mean of the ratios of several tasks.

    Its bootstrap draws tasks, and for each drawn task its repetitions. With fewer than three tasks it draws repetitions
    only, so the interval of one task is that of `median_ratio`.

    Args:
        pairs: for each task all repetitions of A and of B.
        ratios: of the tasks; a task with too few repetitions enters with its ratio. With fewer than three tasks there is
            then no interval.
    """
    if not ratios:
        return Interval(None, None, None)
    ratio = math.exp(float(np.mean(np.log(ratios))))
    drawn = [_log_draws(a, b, seed) for seed, (a, b) in enumerate(pairs)]
    if len(ratios) < _LEAST_TASKS:
        if any(each is None for each in drawn):
            return Interval(ratio, None, None)
        return _interval(ratio, np.mean([each for each in drawn if each is not None], axis=0))
    logs = np.array([np.full(_RESAMPLES, math.log(r)) if each is None else each for each, r in zip(drawn, ratios)])
    chosen = np.random.default_rng(len(ratios)).integers(0, len(logs), (_RESAMPLES, len(logs)))
    return _interval(ratio, np.take_along_axis(logs.T, chosen, axis=1).mean(axis=1))


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


@lru_cache(maxsize=256)
def _log_draws(a_ns: tuple[float, ...], b_ns: tuple[float, ...], seed: int = 0) -> Draws | None:
    if min(len(a_ns), len(b_ns)) < _LEAST_REPETITIONS or modes_of(a_ns) or modes_of(b_ns):
        return None
    rng = np.random.default_rng(seed)
    one, other = (
        np.median(np.array(times)[rng.integers(0, len(times), (_RESAMPLES, len(times)))], axis=1) for times in (a_ns, b_ns)
    )
    drawn: Draws = np.log(one / other)
    return drawn


def _interval(ratio: float, drawn: Draws) -> Interval:
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975))).tolist()
    return Interval(ratio, min(low, ratio) / (1 + NEAR), max(high, ratio) * (1 + NEAR))
