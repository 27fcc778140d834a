"""Operators by name: those built in, and those of installed packages (entry-point group `schedsearch.ops`).

An operator is imported when it is first asked for; nothing registers itself by being imported.
"""

from __future__ import annotations

import functools
import importlib

from schedsearch.errors import Problem, UnknownOperatorError, did_you_mean
from schedsearch.ops.base import Op

ENTRY_POINT_GROUP = "schedsearch.ops"

BUILT_IN = {"conv2d": "schedsearch.ops.conv2d:CONV2D"}
RECORDED_ONLY = {"foreign": "schedsearch.ops.foreign:FOREIGN"}  # only records may be about these


def operator(name: str) -> Op:
    """The operator of this name.

    Raises:
        UnknownOperatorError: there is none; the message lists those that there are.
    """
    location = BUILT_IN.get(name) or RECORDED_ONLY.get(name)
    if location is None:
        known = sorted(operator_names())
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        problem = Problem("op", f"unknown operator {name!r}{hint}; allowed: {', '.join(known)}")
        raise UnknownOperatorError([problem], name)
    return _load(location)


def operator_names() -> list[str]:
    """The operators that a workload can be made of, built-in ones first."""
    return list(BUILT_IN)


@functools.cache
def _load(location: str) -> Op:
    module, _, name = location.partition(":")
    found: Op = getattr(importlib.import_module(module), name)
    return found
