"""Simulated annealing: a few walkers step to neighbours. They sometimes accept a slower one, less and less often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import Rows
from schedsearch.tuner.base import Tuner
from schedsearch.tuner.moves import mutate

WALKERS = 4  # number of steps that can be measured at the same time
HOT, COLD = 0.5, 0.01  # in units of log time: at first a result exp(0.5) times slower is accepted with probability 1/e
COOLING = 0.97  # factor on the temperature per result
PATIENCE = 24  # after this many steps without a better time, a walker continues from the best result of all
TRIES = 16  # random steps to choose an unseen legal one from


@dataclass
class Walker:
    """A walker's position: a row and its log time; None and infinity before its first valid result."""

    row: NDArray[np.int32] | None = None
    log_time: float = math.inf
    best: float = math.inf
    idle: int = 0  # number of results since its best


class AnnealingTuner(Tuner):
    """Several chains of simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983) that share their best result.

    A step changes one knob, sometimes more. Nothing is measured twice, so walkers step over configurations that were
    seen. A failure is never accepted. Walkers start from results that were not asked for, the fastest first.
    """

    batch = WALKERS

    def _set_up(self) -> None:
        self._walkers = [Walker() for _ in range(WALKERS)]
        self._step_of: dict[Any, Walker] = {}  # key of a proposal -> whose step it is
        self._turn = 0

    @property
    def temperature(self) -> float:
        """In units of log time."""
        return max(COLD, HOT * COOLING ** len(self._results))

    def _propose(self, n: int) -> Rows:
        rows = self._no_rows()
        for _ in range(n):
            walker = self._walkers[self._turn % WALKERS]
            self._turn += 1
            step = self._step(walker, besides=rows)
            if not len(step):
                break
            self._step_of[self._keys(step)[0]] = walker
            rows = np.concatenate([rows, step])
        return rows

    def _step(self, walker: Walker, besides: Rows) -> Rows:
        """One unseen row, (1, knobs), near the walker; a random one if it has no position or no unseen neighbour."""
        if walker.row is None:
            return self._fresh(1, besides)
        steps = mutate(np.repeat(walker.row[None], TRIES, axis=0), self.space, self.rng)
        near = self._unseen(np.concatenate([steps[self.space.legal(steps)], self.space.neighbours(walker.row)]))
        taken = set(self._keys(besides))
        free = [i for i, key in enumerate(self._keys(near)) if key not in taken]
        return near[free[:1]] if free else self._fresh(1, besides)

    def _learn(self, rows: Rows, times_ns: NDArray[np.float64]) -> None:
        order = np.argsort(np.where(np.isnan(times_ns), np.inf, times_ns), kind="stable")
        keys = self._keys(rows)
        for at in order.tolist():
            waiting = (walker for walker in self._walkers if walker.row is None)
            walker = self._step_of.pop(keys[at], None) or next(waiting, None)
            if walker is not None:
                self._move(walker, rows[at], math.log(times_ns[at]) if times_ns[at] > 0 else math.inf)

    def _move(self, walker: Walker, row: NDArray[np.int32], log_time: float) -> None:
        slower = log_time - walker.log_time
        if log_time < math.inf and (slower <= 0 or self.rng.random() < math.exp(-slower / self.temperature)):
            walker.row, walker.log_time = row, log_time
        walker.idle = 0 if log_time < walker.best else walker.idle + 1
        walker.best = min(walker.best, log_time)
        if walker.idle >= PATIENCE:
            all_rows, all_times_ns = self._result_arrays()
            if not np.isnan(all_times_ns).all():
                fastest = int(np.nanargmin(all_times_ns))
                walker.row, walker.log_time = all_rows[fastest], math.log(all_times_ns[fastest])
            walker.idle = 0
