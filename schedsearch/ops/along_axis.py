"""Operators with one parameter `axis`: they count it in one way, so that equal workloads have equal ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.data_movement import AXES, axis_problems, too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import Parameter, Params
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import ParamsByName


def axis_number(doc: str, default: int) -> Parameter:
    """One dimension of x, counted from 0, or from -1 for the last one backwards."""
    return Parameter(
        f"{doc}; default {default}",
        {"type": "integer", "minimum": -len(AXES), "maximum": len(AXES) - 1, "default": default},
    )


class AlongAxisParams(Params):
    x: tuple[int, ...]
    axis: int
    dtype: str


A = TypeVar("A", bound=AlongAxisParams)


class AlongAxis(Op[A]):
    """An operator with the parameters `x` and `axis`.

    Attributes:
        counts_backwards: workloads have their axis counted from -1 backwards, not from 0.
    """

    counts_backwards: ClassVar[bool] = False

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        found, problems = super().normalise(params)
        if not problems:
            rank = len(found["x"])
            found["axis"] = found["axis"] % rank - (rank if self.counts_backwards else 0)
        return found, problems


class Normalisation(AlongAxis[A]):
    """y has the extents and the format of x. Each of its numbers depends on a row of x: the numbers of one or more axes."""

    counts_backwards: ClassVar[bool] = True

    @abstractmethod
    def row_length(self, params: A) -> int:
        """The numbers of a row."""

    def problems(self, params: A) -> Iterable[Problem]:
        found = axis_problems("axis", (params.axis,), len(params.x))
        return found or too_large("x", params.x, dtype_of(params.dtype).nbytes)

    def arguments(self, params: A) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: A) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", AXES[: len(params.x)], params.x, params.dtype),)

    def work(self, params: A) -> Work:
        nbytes = super().work(params).nbytes
        return Work(0, nbytes, self.row_length(params), least_bytes=nbytes)
