"""Model-guided search: learn to rank what was measured, breed candidates by the model, measure the most promising."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import ConfigSpace, Rows
from schedsearch.tuner.base import CostModel, Tuner
from schedsearch.tuner.model import XgbCostModel
from schedsearch.tuner.moves import crossover, mutate
from schedsearch.workload import Config

INITIAL = 16  # space-filling proposals before the model is asked
SPREAD = 8  # random rows to choose each space-filling one from
EPSILON = 0.1  # share of random proposals afterwards
BATCH, MAX_BATCH = 8, 32  # a batch is an eighth of the results so far, within these
PARENTS = 64  # rows that each generation breeds from
CHILDREN = 384  # rows that each generation breeds, before illegal ones are dropped
GENERATIONS = 8
BORROW = 32  # own results from which on those of other tasks are left out: they point to another task's optimum
POLISH = 2  # fastest results whose single-knob neighbours are always candidates


class XgbTuner(Tuner):
    """Proposals in order of the model's score, with a share at random.

    It starts with a space-filling design. From then on, whenever a batch of new results is in, it fits the model and
    breeds candidates from the fastest results and the best predictions, all in vectorised steps over index rows.
    While the model cannot be trained (too few successes) proposals are random.
    """

    def __init__(
        self,
        space: ConfigSpace,
        *,
        seed: int,
        default: Config | None = None,
        exclude: Collection[Config] = (),
        hints: Sequence[Config] = (),
        model: CostModel | None = None,
    ) -> None:
        super().__init__(space, seed=seed, default=default, exclude=exclude, hints=hints)
        self.model = XgbCostModel(seed % 2**31) if model is None else model
        self._trained = False
        self._unlearnt = 0  # results since the last fit
        self._queue = self._no_rows()  # candidates by score, the best first
        self._designed = 0  # proposals of the space-filling design so far

    @property
    def batch(self) -> int:  # type: ignore[override]
        return int(np.clip(len(self._results) // 8, BATCH, MAX_BATCH))

    def predict(self, configs: Sequence[Config]) -> NDArray[np.float64] | None:
        if not self._trained or not configs:
            return None
        return self.model.predict(self.space.encode(self.space.indices(configs)))

    def _learn(self, rows: Rows, times_ns: NDArray[np.float64]) -> None:
        self._unlearnt += len(rows)

    def _propose(self, n: int) -> Rows:
        initial = 0 if self._elsewhere else INITIAL  # a model of other tasks beats a blind start
        planned = min(n, max(0, initial - max(self._designed, len(self._results))))
        rows = self._spread(planned) if planned else self._no_rows()
        self._designed += len(rows)
        if len(rows) < n:
            rows = np.concatenate([rows, self._by_model(n - len(rows), besides=rows)])
        return np.concatenate([rows, self._fresh(n - len(rows), besides=rows)])

    def _spread(self, n: int) -> Rows:
        """n rows at random, each the farthest of `SPREAD` from what is taken or chosen, in units of the features' spread."""
        pool = self._fresh(n * SPREAD)
        if len(pool) <= n:
            return pool
        measured, _ = self._result_arrays()
        features = self.space.encode(np.concatenate([pool, measured])).astype(np.float64)
        features = np.nan_to_num(features - np.nanmean(features, axis=0)) / (np.nanstd(features, axis=0) + 1e-9)
        candidates, known = features[: len(pool)], features[len(pool) :]
        distance = np.full(len(pool), np.inf)
        for point in known:
            distance = np.minimum(distance, ((candidates - point) ** 2).sum(axis=1))
        chosen: list[int] = []
        for i in range(n):
            block = slice(i * SPREAD, (i + 1) * SPREAD)
            best = i * SPREAD + int(np.argmax(distance[block])) if i * SPREAD < len(pool) else -1
            if best < 0 or best in chosen:
                best = int(np.argmax(np.where(np.isin(np.arange(len(pool)), chosen), -1, distance)))
            chosen.append(best)
            distance = np.minimum(distance, ((candidates - candidates[best]) ** 2).sum(axis=1))
        return pool[chosen]

    def _by_model(self, n: int, besides: Rows) -> Rows:
        """At most n rows, the best by the model except for a random share; none when there is no model."""
        if self._unlearnt >= BATCH or ((self._unlearnt or self._elsewhere) and not self._trained):
            self._fit()
        if not self._trained:
            return self._no_rows()
        random = self._fresh(int(self.rng.binomial(n, EPSILON)), besides)
        besides = np.concatenate([besides, random])
        best = self._from_queue(n - len(random), besides)
        return np.concatenate([best, random])

    def _from_queue(self, n: int, besides: Rows) -> Rows:
        for refill in (False, True):
            if refill:
                self._queue = self._search()
            taken = set(self._keys(besides))
            self._queue = self._unseen(self._queue)
            free = np.array([key not in taken for key in self._keys(self._queue)], dtype=np.bool_)
            if free.sum() >= n or refill:
                chosen = np.flatnonzero(free)[:n]
                rows, self._queue = self._queue[chosen], np.delete(self._queue, chosen, axis=0)
                return rows
        raise AssertionError("unreachable")

    def _fit(self) -> None:
        if len(self._results) >= BORROW:
            self._elsewhere = []
        tasks = [self._result_arrays(), *self._elsewhere]
        rows = np.concatenate([rows for rows, _ in tasks])
        times_ns = np.concatenate([times_ns for _, times_ns in tasks])
        group = np.repeat(np.arange(len(tasks)), [len(rows) for rows, _ in tasks])
        self._trained = self.model.fit(self.space.encode(rows), -np.log(times_ns), group)
        self._unlearnt = 0
        self._queue = self._no_rows()

    def _search(self) -> Rows:
        """Unseen rows by descending score: what a few generations of breeding under the model came upon."""
        measured, times_ns = self._result_arrays()
        order = np.argsort(np.where(np.isnan(times_ns), np.inf, times_ns), kind="stable")
        fastest = measured[order[: PARENTS // 2]]
        polish = [self.space.neighbours(row) for row in fastest[:POLISH]]
        elsewhere = [rows[np.argsort(times, kind="stable")[: PARENTS // 2]] for rows, times in self._elsewhere]
        pool = np.concatenate([fastest, *polish, *elsewhere, self.space.sample_indices(PARENTS, self.rng)])
        keys, first = np.unique(self.space.keys(pool), return_index=True)
        pool = pool[first]
        scores = self.model.predict(self.space.encode(pool))
        for _ in range(GENERATIONS):
            parents = pool[np.argsort(-scores, kind="stable")[:PARENTS]]
            one, other = parents[self.rng.integers(0, len(parents), size=(2, CHILDREN))]
            crossed = np.where(self.rng.random(CHILDREN)[:, None] < 0.5, crossover(one, other, self.rng), one)
            children = mutate(crossed, self.space, self.rng)
            children = children[self.space.legal(children)]
            child_keys, first = np.unique(self.space.keys(children), return_index=True)
            new = ~np.isin(child_keys, keys)
            children = children[first[new]]
            if len(children):
                keys = np.concatenate([keys, child_keys[new]])
                pool = np.concatenate([pool, children])
                scores = np.concatenate([scores, self.model.predict(self.space.encode(children))])
        return self._unseen(pool[np.argsort(-scores, kind="stable")])[: 4 * MAX_BATCH]
