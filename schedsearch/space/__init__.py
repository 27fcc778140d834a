"""Configuration spaces: which configurations does a template have?

Knobs, constraints and sampling, as numbers. What a knob does to a kernel belongs in its template.
"""

from __future__ import annotations

from schedsearch.space.knob import Knob, Value
from schedsearch.space.nearest import closest_legal
from schedsearch.space.space import Columns, ConfigSpace, Constraint, Rows, SpaceSize

__all__ = ["Columns", "ConfigSpace", "Constraint", "Knob", "Rows", "SpaceSize", "Value", "closest_legal"]
