"""How well a model ranked configurations before they were measured: Spearman's correlation, pooled over its states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RankAgreement:
    """A sum over groups of trials. A group has the predictions of one state of a model, as only these are comparable.

    Attributes:
        trials: number of trials in groups of two or more, which have an order to predict.
        weight: degrees of freedom, n - 1 for a group of n.
        weighted: sum over the groups of Spearman's correlation times n - 1.
    """

    trials: int = 0
    weight: float = 0.0
    weighted: float = 0.0

    @classmethod
    def of(cls, groups: Iterable[Sequence[tuple[float, float]]]) -> RankAgreement:
        """From (predicted score, measured speed) pairs, group by group; both grow with speed, in any unit."""
        total = cls()
        for group in groups:
            if len(group) < 2:
                continue
            predicted, measured = (_ranks(np.array(side)) for side in zip(*group))
            spread = float(predicted.std() * measured.std())
            if spread:  # otherwise all values of one side are equal, which says nothing
                rho = float(((predicted - predicted.mean()) * (measured - measured.mean())).mean()) / spread
                total += cls(len(group), len(group) - 1, rho * (len(group) - 1))
        return total

    def __add__(self, other: RankAgreement) -> RankAgreement:
        return RankAgreement(self.trials + other.trials, self.weight + other.weight, self.weighted + other.weighted)

    @property
    def correlation(self) -> float | None:
        """From -1 to 1, where 0 means chance. None if there was nothing to compare."""
        return self.weighted / self.weight if self.weight else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Equal values share the mean of their ranks."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: NDArray[np.float64] = (ends - (counts - 1) / 2)[where]
    return shared
