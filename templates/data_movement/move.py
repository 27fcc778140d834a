"""What a GPU kernel needs to know about a box of a movement: its factors in as wide elements as possible, and the arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedsearch.ops.movement import Box, Factor, Ragged
from schedsearch.templates.layout_transform.permutation import Permutation

WIDEST_ELEMENT = 8  # bytes


@dataclass(frozen=True)
class Move:
    """A box of a movement on two arrays. Sizes and strides count elements of `element_bytes`.

    Attributes:
        element_bytes: 1, 2, 4 or 8. Neighbours that never part count as one wide element.
        factors, x_start, y_start, ragged: as in `Box`; there is at least one factor.
        x_bytes, y_bytes: of the whole arrays.
        fill: the bits of an element that is outside of x.
    """

    element_bytes: int
    factors: tuple[Factor, ...]
    x_start: int
    y_start: int
    ragged: tuple[Ragged, ...]
    x_bytes: int
    y_bytes: int
    fill: int = 0

    @classmethod
    def of(cls, box: Box, element_bytes: int, x_bytes: int, y_bytes: int, fill: int = 0) -> Move:
        factors = box.factors or (Factor(1, 1, 1),)
        made = cls(element_bytes, factors, box.x_start, box.y_start, box.ragged, x_bytes, y_bytes, fill)
        for width in (8, 4, 2):
            if width > element_bytes and made._goes_in(width // element_bytes):
                return made._widened(width // element_bytes)
        return made

    @classmethod
    def of_permutation(cls, p: Permutation) -> Move:
        """A change of layout. Its short runs are wide elements already."""
        return cls(p.element_bytes, p.factors, 0, 0, p.ragged, p.x_bytes, p.y_bytes)

    @property
    def innermost(self) -> Factor:
        """The factor with the shortest stride in y."""
        return self.factors[-1]

    @property
    def copies(self) -> bool:
        """Whether neighbours in y are neighbours in x."""
        return self.innermost.x == self.innermost.y == 1

    def together(self) -> int:
        """The largest number of neighbours, a power of two up to 16 bytes, that lie together and aligned in both arrays."""
        return next(n for n in (16, 8, 4, 2, 1) if n * self.element_bytes <= 16 and (n == 1 or self._goes_in(n)))

    def _goes_in(self, n: int) -> bool:
        """Whether n neighbours along y's innermost factor always lie together, at multiples of n in both arrays."""
        *others, run = self.factors
        numbers = [run.extent, self.x_start, self.y_start, *(f.x for f in others), *(f.y for f in others)]
        if run.axis >= 0:
            limits = self.ragged[run.axis]
            numbers += [limits.first, limits.read, limits.written, *(f.unit for f in others if f.axis == run.axis)]
        return self.copies and run.unit == 1 and math.gcd(*numbers) % n == 0

    def _widened(self, n: int) -> Move:
        *others, run = self.factors
        ragged, bits = list(self.ragged), 8 * self.element_bytes
        if run.axis >= 0:
            old = ragged[run.axis]
            ragged[run.axis] = Ragged(old.read // n, old.written // n, old.first // n)

        def fewer(f: Factor) -> Factor:
            return replace(f, x=f.x // n, y=f.y // n, unit=f.unit // n if 0 <= f.axis == run.axis else f.unit)

        return Move(
            self.element_bytes * n,
            (*map(fewer, others), replace(run, extent=run.extent // n)),
            self.x_start // n,
            self.y_start // n,
            tuple(ragged),
            self.x_bytes,
            self.y_bytes,
            sum(self.fill << bits * i for i in range(n)),
        )

    def along_x(self) -> Sequence[int]:
        """Numbers of the factors in the order of x, innermost first."""
        return sorted(range(len(self.factors)), key=lambda i: abs(self.factors[i].x))

    def along_y(self) -> Sequence[int]:
        """Numbers of the factors in the order of y, innermost first."""
        return range(len(self.factors) - 1, -1, -1)
