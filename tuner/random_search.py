"""Uniform random search without replacement: the yardstick for every other tuner."""

from __future__ import annotations

from schedsearch.space import Rows
from schedsearch.tuner.base import Tuner


class RandomTuner(Tuner):
    """Every legal configuration that is left is equally likely to be next."""

    def _propose(self, n: int) -> Rows:
        return self._fresh(n)
