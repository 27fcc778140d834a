"""Uniform random search without replacement: the yardstick for every other tuner."""

from __future__ import annotations

from schedsearch.space import Rows
from schedsearch.tuner.base import Tuner


class RandomTuner(Tuner):
    """Each remaining legal configuration is equally likely to come next."""

    def _propose(self, n: int) -> Rows:
        return self._fresh(n)
