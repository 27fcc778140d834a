"""What a cost model says about the knobs of a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnobLoss:
    """`loss` is the share of the model's rank correlation that is lost without what the knob says: 0 does not matter."""

    knob: str
    loss: float


@dataclass(frozen=True)
class ModelImportance:
    """The model of one template.

    Attributes:
        trials: the valid ones that it was trained on and judged by.
        correlation: Spearman's, of its predictions for configurations that it had not seen, and of their speed; None if no
            model was trained.
        knobs: the most important first; [] if `note` says why there are none.
    """

    template: str
    trials: int
    correlation: float | None
    knobs: tuple[KnobLoss, ...]
    note: str


@dataclass(frozen=True)
class ImportanceView:
    """The models of a task's templates.

    Attributes:
        trials: records of the task when the models were trained. They are trained again when these have grown by a quarter.
        note: why there is no model at all; "" otherwise.
    """

    trials: int
    note: str
    models: tuple[ModelImportance, ...]
