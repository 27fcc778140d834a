"""Predictions for this task from the results of other tasks with the same knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import ConfigSpace, Rows
from schedsearch.tuner.gaussian_process import GaussianProcess
from schedsearch.tuner.portfolio import portfolio

Vector = NDArray[np.float64]

FEWEST = 8  # fewest valid results of a task worth learning from
MOST = 400  # most results used per task, the fastest ones
ROUNDS = 3  # rounds of learning the length scales of a task
TRUST = 4.0  # weight of the prior (the mean of the other tasks), as a number of own results
AGREEMENT = 0.5  # a task is used from this correlation with own results
FEWEST_TO_DOUBT = 4  # fewest own results for this test


@dataclass(frozen=True)
class _Landscape:
    """Another task: its Gaussian process with coordinates, (n, d), and their weights, (n,); and what was measured.

    Attributes:
        rows, values: of all results, (m, knobs) and (m,); the values are standardised, and a failure has the highest.
        valid: which results are no failures, (m,).
        deviation: of the log times, which is the unit of `values`.
    """

    process: GaussianProcess
    X: NDArray[np.float64]
    weights: Vector
    rows: Rows
    values: Vector
    valid: NDArray[np.bool_]
    deviation: float


class OtherTasks:
    """One Gaussian process per other task. The prediction for this task is their weighted sum. The weights depend on how
    well each task fits this task's own results.

    Args:
        space: of this task.
        landscapes: those of the other tasks, made by `learn`.
    """

    def __init__(self, space: ConfigSpace, landscapes: Sequence[_Landscape]) -> None:
        self._space = space
        self._landscapes = landscapes

    @classmethod
    def learn(cls, space: ConfigSpace, sources: Sequence[tuple[Rows, Vector]]) -> OtherTasks:
        """Learns from each task's rows and times in ns or NaN. Tasks with too few valid results are left out."""
        landscapes = []
        for rows, times_ns in sources:
            if np.count_nonzero(~np.isnan(times_ns)) < FEWEST:
                continue
            all_values, valid = standardised(times_ns), ~np.isnan(times_ns)
            fastest = np.argsort(all_values, kind="stable")[:MOST]
            X, values = space.coordinates(rows[fastest]), all_values[fastest]
            process = GaussianProcess(X.shape[1])
            for _ in range(ROUNDS):
                process.learn_scales(X, values)
            deviation = float(log_times(times_ns).std())
            weights = process.weights(X, values)
            landscapes.append(_Landscape(process, X, weights, rows, all_values, valid, deviation))
        return cls(space, landscapes)

    @property
    def known(self) -> bool:
        """Whether there is any task to learn from."""
        return bool(self._landscapes)

    def portfolio(self, size: int) -> Rows:
        """The configurations that together lose least over the tasks, at most `size`, the best one first.

        They are among those that some task ran. What a task did not measure is predicted, as no better than its best.
        """
        if not self.known:
            return np.empty((0, len(self._space.knobs)), dtype=np.int32)
        rows = np.concatenate([one.rows[one.valid] for one in self._landscapes])
        _, first = np.unique(self._space.keys(rows), return_index=True)
        rows = rows[np.sort(first)]
        keys = self._space.keys(rows).tolist()
        regrets = np.empty((len(self._landscapes), len(rows)))
        for regret, one, predicted in zip(regrets, self._landscapes, self.values(rows).T):
            measured = dict(zip(self._space.keys(one.rows).tolist(), one.values.tolist()))
            values = np.array([measured.get(key, value) for key, value in zip(keys, predicted.tolist())])
            regret[:] = one.deviation * np.maximum(values - one.values.min(), 0.0)
        return rows[portfolio(regrets, size)]

    def believed(self, rows: Rows, values: Vector) -> OtherTasks:
        """The tasks whose predictions agree with this task's results; all tasks while there are few results."""
        if len(rows) < FEWEST_TO_DOUBT or not self.known:
            return self
        predicted = self.values(rows)
        predicted, values = predicted - predicted.mean(axis=0), values - values.mean()
        norm = np.sqrt((predicted**2).sum(axis=0) * (values**2).sum())
        agrees = values @ predicted >= AGREEMENT * np.maximum(norm, np.finfo(np.float64).tiny)
        return OtherTasks(self._space, [one for one, good in zip(self._landscapes, agrees) if good])

    def values(self, rows: Rows) -> NDArray[np.float64]:
        """Predicted log times of rows, (n, tasks), standardised per task."""
        X = self._space.coordinates(rows)
        return np.stack([one.process.mean(one.X, one.weights, X) for one in self._landscapes], axis=1)

    def expect(self, rows: Rows, values: Vector, unknown: Rows) -> tuple[Vector, Vector]:
        """Expected values at `rows` and at `unknown`, relative to the mean of `values`.

        A ridge regression of this task's values gives the weights of the tasks. Without results all weights are equal and
        add up to 1. No weight is negative.
        """
        here, there = self.values(rows), self.values(unknown)
        centre = here.mean(axis=0) if len(rows) else 0.0
        here, there = here - centre, there - centre
        tasks = here.shape[1]
        weights = np.linalg.solve(here.T @ here + TRUST * np.eye(tasks), here.T @ values + TRUST / tasks)
        weights = np.maximum(weights, 0.0)
        return here @ weights, there @ weights


def standardised(times_ns: Vector) -> Vector:
    """Log times with mean 0 and variance 1. A failure (NaN) counts as the slowest time.

    If all times are equal, or all are failures, the result is 0.
    """
    values = log_times(times_ns)
    if not len(values):
        return values
    deviation = values.std()
    result: Vector = (values - values.mean()) / (deviation if deviation > 0 else 1)
    return result


def log_times(times_ns: Vector) -> Vector:
    """Logarithms of times; a failure (NaN) counts as the slowest one. All 0 if all are failures."""
    values = np.log(times_ns)
    if not len(values) or np.isnan(values).all():
        return np.zeros(len(values))
    result: Vector = np.where(np.isnan(values), np.nanmax(values), values)
    return result
