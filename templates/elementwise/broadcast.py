"""Where the element of an input is that belongs to an element of y, if the input is repeated along some dimensions or is a
slice of a larger array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.ops.elementwise import Read


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
        runs: outermost first; neighbouring ones cannot be one run.
        first: elements of the array before the input's first one, if the input is a slice.
    """

    runs: tuple[Run, ...]
    first: int = 0

    @classmethod
    def of(cls, read: Read, y: Sequence[int]) -> Spread:
        """
        Examples:
            >>> Spread.of(Read("a", "float16", (8, 1, 1)), (2, 8, 7, 7)).runs
            (Run(extent=2, step=0), Run(extent=8, step=1), Run(extent=49, step=0))
            >>> Spread.of(Read("a", "float16", (9, 1), (9, 4), (0, 2), (1, 1)), (9, 1))
            Spread(runs=(Run(extent=9, step=4),), first=2)
        """
        steps, first = [], 0
        size = 1  # of the array, in the dimensions so far
        for whole, begin, stride in zip(read.array[::-1], read.starts[::-1], read.steps[::-1]):
            steps.append(size * stride)
            first += size * begin
            size *= whole
        runs: list[Run] = []
        for own, step, of_y in itertools.zip_longest(read.shape[::-1], steps, reversed(y), fillvalue=1):
            if of_y == 1:
                continue
            found = Run(of_y, 0 if own == 1 else step)
            if runs and found.step == runs[0].step * (runs[0].extent if runs[0].step else 1):
                runs[0] = Run(runs[0].extent * of_y, runs[0].step)
            else:
                runs.insert(0, found)
        return cls(tuple(runs) or (Run(1, 0),), first)

    @property
    def inner(self) -> int:
        """Elements of y along which the input has equal steps."""
        return self.runs[-1].extent

    @property
    def step(self) -> int:
        """Elements of the array from the input's element to that of y's next one; 0 where the input is repeated."""
        return self.runs[-1].step

    def pieces(self, vector: int) -> tuple[int, int]:
        """(neighbours of a load, number of loads) with which a kernel takes the elements of a vector of y. Loads are aligned
        to their size."""
        if self.step == 0:
            return 1, 1
        together = math.gcd(vector, self.first, *(run.step for run in self.runs[:-1])) if self.step == 1 else 1
        return together, vector // together

    def offset(self, position: Any) -> Callable[[Any], Any]:
        """`offset(place in y)` for kernels: the element of the input, of the type `position`."""
        found: Callable[[Any], Any] = _from(position(self.first)) if self.first else _nothing
        inner, size = 1, math.prod(run.extent for run in self.runs)
        for run in reversed(self.runs):
            if run.step:
                found = _plus(found, inner, run.extent, run.step, inner * run.extent < size, position)
            inner *= run.extent
        return found


def _nothing(place: Any) -> Any:
    return 0


def _from(first: Any) -> Callable[[Any], Any]:
    def begin(place: Any) -> Any:
        return first

    return begin


def _plus(before: Any, inner: int, extent: int, step: int, wraps: bool, position: Any) -> Callable[[Any], Any]:
    def wrapped(place: Any) -> Any:
        return before(place) + position(position(place // position(inner)) % position(extent)) * position(step)

    def outermost(place: Any) -> Any:
        return before(place) + position(place // position(inner)) * position(step)

    return wrapped if wraps else outermost
