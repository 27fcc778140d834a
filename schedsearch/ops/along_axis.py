"""Operators with one parameter `axis`: they count it in one way, so that equal workloads have equal ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op, Parameter
from schedsearch.ops.data_movement import AXES


def axis_number(doc: str, default: int) -> Parameter:
    """One dimension of x, counted from 0, or from -1 for the last one backwards."""
    return Parameter(
        f"{doc}; default {default}",
        {"type": "integer", "minimum": -len(AXES), "maximum": len(AXES) - 1, "default": default},
    )


class AlongAxis(Op):
    """An operator with the parameters `x` and `axis`.

    Attributes:
        counts_backwards: workloads have their axis counted from -1 backwards, not from 0.
    """

    counts_backwards: ClassVar[bool] = False

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        found, problems = super().normalise(params)
        if not problems:
            rank = len(found["x"])
            found["axis"] = found["axis"] % rank - (rank if self.counts_backwards else 0)
        return found, problems
