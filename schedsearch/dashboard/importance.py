"""Which knobs a cost model needs to put the trials of a task in order.

The model is the one of the search (`schedsearch.tuner.model`), trained again on the recorded trials. A run does not store
its models, and those of a search have seen only the trials until then.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.dashboard.effects import Codes, Floats, Searched, rank_correlations
from schedsearch.dashboard.views.importance import ImportanceView, KnobLoss, ModelImportance
from schedsearch.dashboard.views.values import JSON
from schedsearch.tuner.model import XgbCostModel

MOST_TRIALS = 3000  # of a template that a model is trained on, chosen at random; more change the result little
FEWEST_TRIALS = 30  # valid ones
FEWEST_CORRELATION = 0.2  # a model that predicts no better says nothing about knobs
GROWTH = 1.25  # of a task, after which its models are trained again
_FOLDS = 3
_SHUFFLES = 5

Features = NDArray[np.float32]


class Importances:
    """The importance of knobs of tasks. It is kept until a task has a quarter more trials, so a live page costs little.

    Any thread may call it; one model is trained at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[object, ImportanceView]] = {}

    def known(self, key: str, database: object, trials: int) -> ImportanceView | None:
        """What is kept of a task that has `trials` records in this database now."""
        of, view = self._kept.get(key, (None, None))
        return view if view is not None and of == database and view.trials <= trials <= GROWTH * view.trials else None

    def train(self, key: str, database: object, trials: int, searched: Sequence[Searched]) -> ImportanceView:
        with self._lock:
            view = self.known(key, database, trials)  # another thread may have trained it
            if view is None:
                note = why_no_model()
                models = () if note else tuple(map(model_importance, searched))
                view = ImportanceView(trials, note, models)
                self._kept[key] = database, view
            return view


def why_no_model() -> str:
    """Why no model can be trained here; "" if it can."""
    if importlib.util.find_spec("xgboost") is None:
        return "xgboost, which trains the model, is not installed"
    return ""


def model_importance(searched: Searched) -> ModelImportance:
    """How much of a model's rank correlation is lost if the values of one knob are shuffled among trials.

    Each third of the configurations is predicted by a model that learnt from the other two thirds. Shuffling keeps the
    distribution of the knob and breaks its relation to times and to the other knobs, so a knob that matters only together
    with others counts too. If two knobs say the same, both get less than either alone would.

    Source: L. Breiman, "Random Forests", Machine Learning 45 (2001), section 10.
    """
    template = searched.knobs.template
    chosen = _chosen(searched)
    codes, times = searched.codes[chosen], searched.times_ns[chosen]
    valid = int(np.count_nonzero(~np.isnan(times)))

    def without(note: str, correlation: float | None = None) -> ModelImportance:
        return ModelImportance(template, valid, correlation, (), note)

    if valid < FEWEST_TRIALS:
        return without(f"{valid} valid trials are too few for a model; it needs {FEWEST_TRIALS}")
    columns, features = _features(searched.knobs.values, codes)
    rng = np.random.default_rng(0)
    kept, lost = [], []
    for model, held_out in _folds(codes, features, times, rng):
        x, speed = features[held_out], -times[held_out]
        whole = _correlation(model.predict(x), speed)
        kept.append(whole)
        lost.append([whole - _shuffled(model, x, speed, where, rng) for where in columns])
    if not kept:
        return without("the times are too much alike for a model to learn from")
    correlation = float(np.mean(kept))
    if correlation < FEWEST_CORRELATION:
        return without("a model cannot predict the times of these trials, so it says nothing about knobs", correlation)
    shares = np.clip(np.mean(lost, axis=0) / correlation, 0.0, 1.0)
    losses = [KnobLoss(knob, float(share)) for knob, share in zip(searched.knobs.names, shares)]
    return ModelImportance(template, valid, correlation, tuple(sorted(losses, key=lambda each: -each.loss)), "")


def _chosen(searched: Searched) -> NDArray[np.int64]:
    """The positions of at most `MOST_TRIALS` trials; static rejects teach the search's model nothing."""
    trials = np.flatnonzero(~searched.rejected)
    if len(trials) > MOST_TRIALS:
        trials = np.sort(np.random.default_rng(0).choice(trials, MOST_TRIALS, replace=False))
    return trials


def _features(values: Sequence[Sequence[JSON]], codes: Codes) -> tuple[list[slice], Features]:
    """For each knob the columns of its features, and all features. NaN stands for a knob that is missing."""
    columns, parts, width = [], [], 0
    for known, column in zip(values, codes.T):
        table = _table(known)
        columns.append(slice(width, width + table.shape[1]))
        width += table.shape[1]
        part = table[column]
        part[column < 0] = np.nan
        parts.append(part)
    return columns, np.concatenate(parts, axis=1) if parts else np.empty((len(codes), 0), np.float32)


def _table(values: Sequence[JSON]) -> Features:
    """Features of each value, as `ConfigSpace.encode` has them.

    A number is one feature, its log2 if the values span a factor of 4: (values, 1). Others are one-hot: (values, values).
    """
    if not all(type(value) in (bool, int) and abs(value) < 2**60 for value in values):
        return np.eye(max(1, len(values)), dtype=np.float32)
    numbers = np.array([int(value) for value in values], dtype=np.float64)
    low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)
    if low > 0 and high >= 4 * low:
        numbers = np.log2(numbers)
    elif low == 0 and high >= 4:
        numbers = np.log2(1 + numbers)
    return numbers[:, None].astype(np.float32)


def _folds(
    codes: Codes, features: Features, times: Floats, rng: np.random.Generator
) -> Iterator[tuple[XgbCostModel, NDArray[np.int64]]]:
    """Models, and the valid trials of the configurations that each has not seen."""
    _, config = np.unique(codes, axis=0, return_inverse=True)
    config = config.reshape(-1)
    fold = rng.permutation(int(config.max()) + 1)[config] % _FOLDS
    for index in range(_FOLDS):
        held_out = np.flatnonzero((fold == index) & ~np.isnan(times))
        model = XgbCostModel(index)
        if len(held_out) >= 2 and model.fit(features[fold != index], -np.log(times[fold != index])):
            yield model, held_out


def _correlation(predicted: Floats, speed: Floats) -> float:
    ((_, rho),) = rank_correlations(np.zeros(len(speed), dtype=np.int64), predicted, speed)
    return rho or 0.0


def _shuffled(model: XgbCostModel, x: Features, speed: Floats, where: slice, rng: np.random.Generator) -> float:
    """The correlation with the features of one knob shuffled, on average."""
    found: list[Any] = []
    for _ in range(_SHUFFLES):
        mixed = x.copy()
        mixed[:, where] = x[rng.permutation(len(x)), where]
        found.append(_correlation(model.predict(mixed), speed))
    return float(np.mean(found))
