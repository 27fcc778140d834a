"""Choices among configurations by the formulas of their space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.space import Columns, ConfigSpace


def least_predicted(space: ConfigSpace, ties: Callable[[Columns], Sequence[Any]]) -> Config:
    """The configuration with the least `predicted_cycles`; among equals, with the least `ties`, the most important first."""
    rows = np.concatenate(list(space.walk()))
    q: dict[str, Any] = {knob.name: np.array(knob.values)[rows[:, i]] for i, knob in enumerate(space.knobs)}
    for name, formula in space.derived.items():
        q[name] = formula(q)
    order = np.lexsort((*reversed(ties(q)), np.round(q["predicted_cycles"])))
    return space.config(rows[order[0]])


def evaluated(formulas: Mapping[str, Callable[[Columns], Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of one configuration with its derived quantities, as ints."""
    values = dict(config)
    for name, formula in formulas.items():
        values[name] = int(formula(values))
    return values
