"""Gradient-boosted trees as a cost model: the one file that imports XGBoost."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.tuner.base import CostModel
from schedsearch.typed import Array, JsonObject

MIN_RESULTS = 8  # fewest successes for a ranking; it also needs two different labels
MIN_RESULTS_TO_HOLD_OUT = 40  # with fewer results a held-out fifth is too small to judge by
ROUNDS_WITHOUT_HOLD_OUT = 40
MAX_ROUNDS = 120
LEVELS = 31  # relevance labels of the ranking objective are 1..LEVELS, the fastest highest; a failure is 0
ROWS_PER_THREAD = 8192  # with fewer rows a further thread burns time and gains nothing

PARAMS: JsonObject = {
    "objective": "rank:pairwise",
    "lambdarank_pair_method": "mean",  # pairs from the whole list: after the first batches all of its top is alike
    "lambdarank_num_pair_per_sample": 8,
    "lambdarank_normalization": False,
    "tree_method": "hist",
    "max_bin": 32,  # knobs have fewer values; 64 bins would take half as long again
    "max_depth": 6,
    "eta": 0.15,
    "subsample": 0.9,
    "colsample_bynode": 0.8,
    "min_child_weight": 0.1,  # the hessians of pairs are small, and so are these two
    "lambda": 0.1,
    "verbosity": 0,
}


class XgbCostModel(CostModel):
    """Learns to rank (LambdaMART, Burges, 2010), because only the order of candidates matters to a search.

    The number of trees is the one that ranks a held-out fifth best. It is chosen again whenever the results have grown by
    a quarter. The final trees are grown on all results.

    Args:
        seed: for the samples of rows and features and for the held-out part.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._booster: Any = None
        self._rounds = ROUNDS_WITHOUT_HOLD_OUT
        self._rounds_chosen_at = 0  # number of results at that time

    @staticmethod
    def load() -> None:
        """Imports XGBoost ahead of the first `fit`."""
        import xgboost  # noqa: F401

    def fit(self, X: NDArray[np.float32], y: NDArray[np.float64]) -> bool:
        labels = relevance(y)
        if np.count_nonzero(~np.isnan(y)) < MIN_RESULTS or len(np.unique(labels)) < 2:
            self._booster = None
            return False
        if len(y) >= max(MIN_RESULTS_TO_HOLD_OUT, 1.25 * self._rounds_chosen_at):
            self._rounds = self._choose_rounds(X, labels)
            self._rounds_chosen_at = len(y)
        self._booster = self._train(X, labels, self._rounds)
        return True

    def predict(self, X: NDArray[np.float32]) -> NDArray[np.float64]:
        assert self._booster is not None, "fit() has not succeeded"
        return np.asarray(self._booster.inplace_predict(X, predict_type="margin"), dtype=np.float64)

    def _train(self, X: NDArray[np.float32], labels: NDArray[np.float64], rounds: int) -> Any:
        import xgboost

        threads = max(1, min(4, os.cpu_count() or 1, len(X) // ROWS_PER_THREAD))
        data = xgboost.DMatrix(X, label=labels, group=[len(X)], nthread=threads)
        return xgboost.train({**PARAMS, "seed": self._seed, "nthread": threads}, data, rounds)

    def _choose_rounds(self, X: NDArray[np.float32], labels: NDArray[np.float64]) -> int:
        """The number of trees, grown on four fifths, that puts most pairs of the last fifth in the right order."""
        held_out = np.zeros(len(X), dtype=np.bool_)
        held_out[np.random.default_rng([self._seed, len(X)]).permutation(len(X))[: len(X) // 5]] = True
        booster = self._train(X[~held_out], labels[~held_out], MAX_ROUNDS)
        candidates = range(10, MAX_ROUNDS + 1, 10)
        quality = [
            _ordered_pairs(
                np.asarray(booster.inplace_predict(X[held_out], iteration_range=(0, rounds), predict_type="margin")),
                labels[held_out],
            )
            for rounds in candidates
        ]
        return candidates[int(np.argmax(quality))]


def relevance(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Labels 0..LEVELS for ranking: 0 for a failure (NaN), otherwise by rank. Equal times share a label."""
    labels = np.zeros(len(y))
    valid = ~np.isnan(y)
    if valid.any():
        _, rank = np.unique(y[valid], return_inverse=True)
        labels[valid] = 1 + np.floor((LEVELS - 1) * rank / max(1, rank.max()))
    return labels


def _ordered_pairs(scores: Array, labels: NDArray[np.float64]) -> float:
    """Share of the pairs with different labels that the scores put in the right order."""
    better = labels[:, None] > labels[None, :]
    return float((scores[:, None] > scores[None, :])[better].mean()) if better.any() else 0.0
