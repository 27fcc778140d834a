"""Model-guided search: a Gaussian process, which estimates its uncertainty, and boosted trees, which rank, take turns.

See docs/decisions/020-xgb-tuner.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from schedsearch.config import Config
from schedsearch.space import ConfigSpace, Rows
from schedsearch.tuner.base import CostModel, Tuner
from schedsearch.tuner.gaussian_process import GaussianProcess, representatives
from schedsearch.tuner.model import XgbCostModel
from schedsearch.tuner.moves import crossover, mutate
from schedsearch.tuner.transfer import OtherTasks, standardised

Vector = NDArray[np.float64]

INITIAL = 4  # space-filling proposals before the first of a model
PORTFOLIO = 6  # proposals that lose least over other tasks, before anything else but the default and the hints
INITIAL_WARM = 2  # space-filling proposals after them
SPREAD = 8  # random rows from which each space-filling one is chosen
BATCH, MAX_BATCH, RESULTS_PER_PROPOSAL = 2, 8, 25  # a batch is a 25th of the results so far, within these bounds
TREES_FROM, TREES_EVERY = 16, 3  # the trees propose every third batch, from this number of results on
CHILDREN, PARENTS = 500, 20  # candidates bred from the fastest results
STRANGERS = 1000  # random candidates
POLISH = 6  # fastest results whose single-knob neighbours are candidates
MOST_RESULTS = 400  # most results for the Gaussian process, the fastest half and some others; its cost is cubic in them
GROWTH = 1.1  # its length scales are learnt again when the number of results has grown by this factor
BORROW = 16  # other tasks are ignored from this number of own results on: they point to another task's optimum
FORGET = 48  # from this number of results on, results that a disbelieved task led to count too: other valleys are known then


class XgbTuner(Tuner):
    """Two models of the same results propose in turn, among the same candidates.

    The Gaussian process maximises the expected improvement of log time, so it also explores where little is known. A failure
    counts as the slowest time. The trees choose the best rank. Candidates are bred from the fastest results, or differ from
    one of the best in one knob, or are random.
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
        self.trees = XgbCostModel(seed % 2**31) if model is None else model
        self._process = GaussianProcess(space.coordinates(self._no_rows()).shape[1])
        self._scales_learnt_at = 0  # number of results at that time
        self._others: OtherTasks | None = None
        self._believed: OtherTasks | None = None  # the tasks that agree with the results so far
        self._led = set(self._keys(space.legal_among(hints)[0]))  # keys of the rows that other tasks led to
        self._portfolio: Rows | None = None  # what is left of it; None until it is asked for
        self._designed = 0  # number of proposals of the space-filling design so far
        self._batches = 0  # number of batches that a model proposed so far
        self._blas = ThreadpoolController()  # with matrices this small, further threads only burn time

    @classmethod
    def load(cls) -> None:
        XgbCostModel.load()

    @property
    def batch(self) -> int:  # type: ignore[override]
        return int(np.clip(len(self._results) // RESULTS_PER_PROPOSAL, BATCH, MAX_BATCH))

    def predict(self, configs: Sequence[Config]) -> Vector | None:
        rows, times_ns = self._result_arrays()
        if not self._scales_learnt_at or not configs or np.isnan(times_ns).all():
            return None
        values = standardised(times_ns)
        kept = representatives(values, MOST_RESULTS)
        at = self.space.coordinates(self.space.indices(configs))
        with self._blas.limit(limits=1, user_api="blas"):
            return -self._process.posterior(self.space.coordinates(rows[kept]), values[kept], at).mean

    def _propose(self, n: int) -> Rows:
        rows = self._from_portfolio(n)
        if len(rows) == n:
            return rows
        known = self._designed if self._elsewhere else max(self._designed, len(self._results))
        design = INITIAL_WARM if self._others is not None and self._others.known else INITIAL
        planned = min(n - len(rows), max(0, design - known))  # other tasks tell nothing about the rest of the space
        if planned:
            rows = np.concatenate([rows, self._spread(planned, besides=rows)])
            self._designed += planned
        if len(rows) < n:
            with self._blas.limit(limits=1, user_api="blas"):
                rows = np.concatenate([rows, self._by_model(n - len(rows), besides=rows)])
        return np.concatenate([rows, self._fresh(n - len(rows), besides=rows)])

    def _from_portfolio(self, n: int) -> Rows:
        """At most n rows that lose least over the other tasks; none without other tasks."""
        if self._portfolio is None:
            others = self._learnt_others()
            with self._blas.limit(limits=1, user_api="blas"):
                self._portfolio = self._no_rows() if others is None else others.portfolio(PORTFOLIO)
            self._led.update(self._keys(self._portfolio))
        unseen = self._unseen(self._portfolio)
        self._portfolio = unseen[n:]
        return unseen[:n]

    def _spread(self, n: int, besides: Rows) -> Rows:
        """n space-filling rows, each the farthest of `SPREAD` random rows from all rows measured, pending, chosen or in
        `besides`."""
        pool = self._fresh(n * SPREAD, besides)
        if len(pool) <= n:
            return pool
        candidates = self.space.coordinates(pool)
        distance = np.full(len(pool), np.inf)
        for point in self.space.coordinates(np.concatenate([self._result_arrays()[0], self._pending_rows(), besides])):
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
        """At most n rows from the model whose turn it is; none while there is nothing to learn from."""
        others = self._advisers()
        rows, times_ns = self._own_arrays()
        if np.isnan(times_ns).all() and others is None:
            return self._no_rows()
        values = standardised(times_ns)
        candidates = self._candidates(rows[np.argsort(values, kind="stable")], besides, others)
        self._batches += 1
        trees_turn = len(rows) >= TREES_FROM and self._batches % TREES_EVERY == 0
        if trees_turn and self.trees.fit(self.space.encode(rows), -np.log(times_ns)):
            scores = self.trees.predict(self.space.encode(candidates))
            return candidates[np.argsort(-scores, kind="stable")[:n]]
        chosen = candidates[self._most_promising(n, rows, values, candidates, besides, others)]
        if others is not None:
            self._led.update(self._keys(chosen))
        return chosen

    def _advisers(self) -> OtherTasks | None:
        """The other tasks to use: those that agree with the results, as long as there are few results."""
        others = self._learnt_others() if len(self._results) < BORROW else None
        if others is None:
            return None
        rows, times_ns = self._result_arrays()
        self._believed = others.believed(rows, standardised(times_ns))
        return self._believed if self._believed.known else None

    def _learnt_others(self) -> OtherTasks | None:
        """What the results of other tasks teach; None without any."""
        if self._others is None and self._elsewhere:
            with self._blas.limit(limits=1, user_api="blas"):
                self._others = OtherTasks.learn(self.space, self._elsewhere)
        return self._others

    def _own_arrays(self) -> tuple[Rows, Vector]:
        """The results to learn from: all, except those that the other tasks led to while none of these tasks is believed.

        Two good results in the valley of another task's best would hold a search there for a hundred evaluations.
        """
        rows, times_ns = self._result_arrays()
        doubted = self._others is not None and self._others.known and not (self._believed and self._believed.known)
        if not doubted or len(rows) >= FORGET:
            return rows, times_ns
        own = np.array([key not in self._led for key in self._keys(rows)], dtype=np.bool_)
        return (rows[own], times_ns[own]) if np.count_nonzero(own) >= INITIAL_WARM else (rows, times_ns)

    def _candidates(self, ranked: Rows, besides: Rows, others: OtherTasks | None) -> Rows:
        """Rows to choose from, none of them taken or in `besides`. The given results start with the fastest."""
        pool = [self.space.sample_indices(STRANGERS, self.rng)]
        if others is not None:
            drawn = self.space.sample_indices(4 * STRANGERS, self.rng)
            pool.append(drawn[np.argsort(others.values(drawn).mean(axis=1), kind="stable")[: STRANGERS // 4]])
        if len(ranked):
            parents = ranked[:PARENTS]
            one, other = parents[self.rng.integers(0, len(parents), size=(2, CHILDREN))]
            crossed = np.where(self.rng.random(CHILDREN)[:, None] < 0.5, crossover(one, other, self.rng), one)
            children = mutate(crossed, self.space, self.rng)
            pool.append(children[self.space.legal(children)])
            pool.append(self.space.neighbours(ranked[:POLISH]))
        unseen = self._unseen(np.concatenate(pool))
        chosen = set(self._keys(besides))
        return unseen[[key not in chosen for key in self._keys(unseen)]] if chosen else unseen

    def _most_promising(
        self, n: int, rows: Rows, values: Vector, candidates: Rows, besides: Rows, others: OtherTasks | None
    ) -> list[int]:
        """Positions of the n candidates with the greatest expected improvement. Each choice believes in the earlier ones.

        If other tasks are used, the process models what they do not explain.
        """
        kept = representatives(values, MOST_RESULTS)
        rows, values = rows[kept], values[kept]
        unknown = np.concatenate([candidates, besides, self._pending_rows()])
        at_rows, at_unknown = (
            others.expect(rows, values, unknown) if others else (np.zeros(len(rows)), np.zeros(len(unknown)))
        )
        X = self.space.coordinates(rows)
        if len(self._results) >= GROWTH * self._scales_learnt_at:
            self._process.learn_scales(X, values - at_rows)
            self._scales_learnt_at = len(self._results)
        posterior = self._process.posterior(X, values - at_rows, self.space.coordinates(unknown))
        posterior.mean += at_unknown
        for at in range(len(candidates), len(unknown)):
            posterior.believe(at)
        best = values.min(initial=np.inf)
        chosen: list[int] = []
        for _ in range(min(n, len(candidates))):
            gain = posterior.expected_improvement(best) if len(values) else -posterior.mean
            gain = gain[: len(candidates)]
            gain[chosen] = -np.inf
            chosen.append(int(np.argmax(gain)))
            posterior.believe(chosen[-1])
        return chosen
