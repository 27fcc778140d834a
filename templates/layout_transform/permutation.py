"""A change of layout as a permutation of factors: one description for kernels of every pair of layouts.

Blocks cut an axis into digits, as in a number of mixed radix. The cuts of both layouts together give *factors*; each has
one stride in x and one in y. NCHW to NCHW32c, for example, in elements:

    factor   extent   stride in x   stride in y
    n        n        C * H * W     ceil(C / 32) * H * W * 32
    c / 32   C / 32   32 * H * W    H * W * 32
    h, w     H * W    1             32
    c % 32   32       H * W         1

Factors that follow one another in both arrays are merged, here h and w. What is left tells which kernel is needed: if the
innermost factor of x is also that of y, runs are copied; otherwise tiles of the two innermost factors are transposed.

Where the last block of an axis is not full, an index beyond the axis is not read, and a zero is written; where y ends
before the last block, nothing is written. Such an axis is *ragged*; factors know by how much they move its index.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from schedsearch.ops import Layout
from schedsearch.ops.movement import Factor, Ragged, merge

WIDEST_ELEMENT = 8  # bytes; longer runs are copied as vectors


@dataclass(frozen=True)
class Permutation:
    """A change of layout.

    Attributes:
        element_bytes: of the elements that factors count: 1, 2, 4 or 8. Short runs count as one wide element.
        factors: all with more than one value (if there is one), in the order of y, outermost first.
        ragged: axes that factors may leave.
        x_bytes, y_bytes: of the whole arrays.
    """

    element_bytes: int
    factors: tuple[Factor, ...]
    ragged: tuple[Ragged, ...]
    x_bytes: int
    y_bytes: int

    @classmethod
    def of(
        cls,
        source: Layout,
        to: Layout,
        sizes: Mapping[str, int],
        element_bytes: int,
        *,
        x_sizes: Mapping[str, int] | None = None,
        y_sizes: Mapping[str, int] | None = None,
    ) -> Permutation:
        """The permutation that changes an array from layout `source` to `to`.

        Args:
            sizes: axis -> logical extent.
            element_bytes: 1, 2 or 4.
            x_sizes, y_sizes: extents of the axes of x or y that are longer: what is beyond `sizes` is not read in x, and
                zero in y.

        Raises:
            ValueError: blocks of the two layouts do not nest.
        """
        in_x, in_y = {**sizes, **(x_sizes or {})}, {**sizes, **(y_sizes or {})}
        ragged: list[Ragged] = []
        factors: list[Factor] = []
        for axis in to.axes:
            units = sorted({*source.units(axis), *to.units(axis)}, reverse=True)
            if any(large % small for large, small in itertools.pairwise(units)):
                raise ValueError(f"blocks of {source} and {to} along {axis} do not nest")
            written = -(-in_y[axis] // to.block(axis)) * to.block(axis)
            outermost = -(-written // units[0])
            extents = [outermost, *(large // small for large, small in itertools.pairwise(units))]
            extents = [min(extent, -(-written // unit)) for extent, unit in zip(extents, units)]
            number = -1
            if not outermost * units[0] == written == sizes[axis]:
                number = len(ragged)
                ragged.append(Ragged(sizes[axis], written))
            for unit, extent in zip(units, extents):
                x, y = _stride(source, in_x, axis, unit), _stride(to, in_y, axis, unit)
                factors.append(Factor(extent, x, y, number, unit))
        x_elements, y_elements = math.prod(source.shape(in_x)), math.prod(to.shape(in_y))
        merged = merge(factors) or (Factor(1, 1, 1),)
        made = cls(element_bytes, merged, tuple(ragged), x_elements * element_bytes, y_elements * element_bytes)
        return made._widened()

    @property
    def x_run(self) -> Factor:
        """The innermost factor of x."""
        return min(self.factors, key=lambda factor: factor.x)

    @property
    def y_run(self) -> Factor:
        """The innermost factor of y."""
        return self.factors[-1]

    @property
    def transposes(self) -> bool:
        """Whether the innermost factor of x is not that of y."""
        return self.x_run is not self.y_run

    @property
    def x_column(self) -> Factor:
        """The innermost factor of x if it is another one than y's; otherwise a single element."""
        return self.x_run if self.transposes else Factor(1, 0, 0)

    @property
    def outer(self) -> tuple[Factor, ...]:
        """All factors but the innermost ones of x and y, in the order of y."""
        return tuple(factor for factor in self.factors if factor not in (self.x_run, self.y_run))

    def x_aligned(self) -> int:
        """The most elements of a run of x that always are aligned and readable together."""
        if self.x_run.x != 1:
            return 1
        others = [factor.x for factor in self.factors if factor is not self.x_run]
        return math.gcd(*others, *self._ends(self.x_run, "read"))

    def y_aligned(self) -> int:
        """The most elements of a run of y that always are aligned and written together."""
        others = [factor.y for factor in self.factors if factor is not self.y_run]
        return math.gcd(*others, *self._ends(self.y_run, "written"))

    def _ends(self, run: Factor, kind: str) -> Iterable[int]:
        """Numbers of elements after which a run may end."""
        return (run.extent, *((getattr(self.ragged[run.axis], kind),) if run.axis >= 0 else ()))

    def _widened(self) -> Permutation:
        """Counts common runs of up to 8 bytes as one element."""
        if self.transposes or self.x_run.x != 1:
            return self
        run = self.y_run
        together = math.gcd(self.x_aligned(), self.y_aligned(), *self._ends(run, "read"))
        if run.extent * self.element_bytes > WIDEST_ELEMENT or together != run.extent or len(self.factors) == 1:
            return self
        wide = run.extent
        if wide & (wide - 1):
            return self
        ragged = list(self.ragged)
        factors = list(self.factors[:-1])
        if run.axis >= 0:
            old = ragged[run.axis]
            ragged[run.axis] = Ragged(old.read // wide, old.written // wide)
        factors = [
            replace(
                factor,
                x=factor.x // wide,
                y=factor.y // wide,
                unit=factor.unit // wide if 0 <= run.axis == factor.axis else factor.unit,
            )
            for factor in factors
        ]
        return replace(self, element_bytes=self.element_bytes * wide, factors=tuple(factors), ragged=tuple(ragged))


def _stride(layout: Layout, sizes: Mapping[str, int], axis: str, unit: int) -> int:
    """Distance in elements of two indices along an axis that are `unit` apart."""
    zero = dict.fromkeys(layout.axes, 0)
    return int(layout.offset(sizes, {**zero, axis: unit}))
