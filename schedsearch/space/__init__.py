"""The configurations of a template: knobs, constraints, sampling."""

from __future__ import annotations

from schedsearch.space.nearest import closest_legal
from schedsearch.space.space import Columns, ConfigSpace, Constraint, Knob, Rows, SpaceSize, Value

__all__ = ["Columns", "ConfigSpace", "Constraint", "Knob", "Rows", "SpaceSize", "Value", "closest_legal"]
