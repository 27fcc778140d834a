"""Where the element of an input is that belongs to an element of y, if the input is repeated along some dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """Neighbouring dimensions of y along which an input moves alike.

    Attributes:
        extent: product of their extents.
        step: elements of the input from one position to the next; 0 where it is repeated.
    """

    extent: int
    step: int


@dataclass(frozen=True)
class Spread:
    """How an input lies along y.

    Attributes:
        runs: outermost first; repeated and moving ones alternate.
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, extents: Sequence[int], y: Sequence[int]) -> Spread:
        """
        Example:
            >>> Spread.of((8, 1, 1), (2, 8, 7, 7)).runs
            (Run(extent=2, step=0), Run(extent=8, step=1), Run(extent=49, step=0))
        """
        full = (1,) * (len(y) - len(extents)) + tuple(extents)
        runs: list[Run] = []
        size = 1  # of the input, in the dimensions so far
        for own, of_y in zip(reversed(full), reversed(y)):
            if of_y == 1:
                continue
            step = 0 if own == 1 else size
            if runs and (runs[0].step == 0) == (step == 0):
                runs[0] = Run(runs[0].extent * of_y, runs[0].step)
            else:
                runs.insert(0, Run(of_y, step))
            size *= own
        return cls(tuple(runs) or (Run(1, 0),))

    @property
    def inner(self) -> int:
        """Elements of y along which the input is one run of neighbours, or one element."""
        return self.runs[-1].extent

    @property
    def moves(self) -> bool:
        """Whether neighbours of y have neighbours of the input."""
        return self.runs[-1].step == 1

    def offset(self, position: Any) -> Callable[[Any], Any]:
        """`offset(place in y)` for kernels: the element of the input, of the type `position`."""
        found: Callable[[Any], Any] = _nothing
        inner, size = 1, math.prod(run.extent for run in self.runs)
        for run in reversed(self.runs):
            if run.step:
                found = _plus(found, inner, run.extent, run.step, inner * run.extent < size, position)
            inner *= run.extent
        return found


def _nothing(place: Any) -> Any:
    return 0


def _plus(before: Any, inner: int, extent: int, step: int, wraps: bool, position: Any) -> Callable[[Any], Any]:
    def wrapped(place: Any) -> Any:
        return before(place) + position(position(place // position(inner)) % position(extent)) * position(step)

    def outermost(place: Any) -> Any:
        return before(place) + position(place // position(inner)) * position(step)

    return wrapped if wraps else outermost
