"""Vectorised moves over index rows, shared by the tuners that breed candidates. Results may be illegal: filter them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import ConfigSpace, Rows

CHANGES = 1.5  # mean number of knobs that a mutation changes


def crossover(one: Rows, other: Rows, rng: np.random.Generator) -> Rows:
    """Uniform crossover: every knob comes from one of the two parents, (n, knobs) each."""
    return np.where(rng.random(one.shape) < 0.5, one, other)


def mutate(rows: Rows, space: ConfigSpace, rng: np.random.Generator) -> Rows:
    """Changes at least one knob of every row, `CHANGES` knobs on average.

    Half of the time a numeric knob moves to the next smaller or larger value. Otherwise it moves anywhere, as other knobs
    do. Knobs with a single value never change. If all knobs have a single value, the rows come back unchanged.
    """
    cards = np.array([len(knob.values) for knob in space.knobs])
    free = np.flatnonzero(cards > 1)
    if not len(free):
        return rows
    n = len(rows)
    chosen = rng.random((n, len(free))) < min(1.0, (CHANGES - 1) / len(free))
    chosen[np.arange(n), rng.integers(0, len(free), n)] = True
    jump = _elsewhere(rows[:, free], cards[free], rng)
    step = np.clip(rows[:, free] + np.where(rng.random(chosen.shape) < 0.5, -1, 1), 0, cards[free] - 1)
    numeric = np.array([space.knobs[column].ordered for column in free])
    near = numeric & (rng.random(chosen.shape) < 0.5) & (step != rows[:, free])
    out = rows.copy()
    out[:, free] = np.where(chosen, np.where(near, step, jump), rows[:, free])
    return out


def _elsewhere(indices: NDArray[np.int32], cards: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A different position for every entry, uniformly at random."""
    return (indices + rng.integers(1, cards, size=indices.shape)) % cards
