"""A genetic algorithm: it needs no model and few assumptions, and a proposal is cheap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import Rows
from schedsearch.tuner.base import Tuner
from schedsearch.tuner.moves import crossover, mutate

POPULATION = 24  # number of fastest results to breed from; also the number of random ones at the start
TOURNAMENT = 3  # contestants for each parent
CROSSOVER_SHARE = 0.7  # share of the children that have two parents; the others are mutated copies of one parent
MUTATION_SHARE = 0.5  # share of the crossed children that are also mutated
ROUNDS = 6  # rounds of breeding per `ask`; random rows fill up the rest


class GaTuner(Tuner):
    """Steady state: the population is the fastest results so far, from any source, and every `ask` breeds from it.

    Tournaments select the parents. Uniform crossover and mutation make the children; illegal and known children are
    dropped. A failure counts as slower than every time.
    """

    def _propose(self, n: int) -> Rows:
        if len(self._results) < POPULATION:
            return self._fresh(n)
        parents = self._population()
        children = self._no_rows()
        for _ in range(ROUNDS):
            bred = self._breed(parents, 4 * n + 16)
            children = self._unseen(np.concatenate([children, bred[self.space.legal(bred)]]))[:n]
            if len(children) == n:
                return children
        return np.concatenate([children, self._fresh(n - len(children), besides=children)])

    def _population(self) -> Rows:
        """Fastest first."""
        rows, times = self._result_arrays()
        return rows[np.argsort(np.where(np.isnan(times), np.inf, times), kind="stable")[:POPULATION]]

    def _breed(self, parents: Rows, n: int) -> Rows:
        one, other = parents[self._winners(len(parents), n)], parents[self._winners(len(parents), n)]
        crossed = self.rng.random(n) < CROSSOVER_SHARE
        children = np.where(crossed[:, None], crossover(one, other, self.rng), one)
        mutated = ~crossed | (self.rng.random(n) < MUTATION_SHARE)
        return np.where(mutated[:, None], mutate(children, self.space, self.rng), children)

    def _winners(self, population: int, n: int) -> NDArray[np.int64]:
        """Positions in a population sorted by fitness: the smallest of a few random ones wins."""
        contestants = self.rng.integers(0, population, size=(n, TOURNAMENT))
        best: NDArray[np.int64] = contestants.min(axis=1)
        return best
