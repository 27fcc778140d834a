"""Windows along one axis of an image, as the kernels of pool2d need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.ops.pool2d import Pool2dParams, pooled_hw, reached_padding
from schedsearch.templates.parts.casts import i32
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Axis:
    """Windows along h (axis 0) or w (axis 1).

    Attributes:
        size, outputs: pixels of x and of y.
        taps: pixels of a window.
        counts_from, counts_to: the positions that an average counts.
        padded: some window reaches beyond the image.
    """

    size: int
    outputs: int
    taps: int
    stride: int
    dilation: int
    before: int
    counts_from: int
    counts_to: int
    padded: bool

    @classmethod
    def of(cls, workload: Workload[Pool2dParams], axis: int) -> Axis:
        p = workload.params
        before, after = (p.padding[axis], p.padding[axis + 2]) if p.count_include_pad else (0, 0)
        reached, size = reached_padding(p), (p.h, p.w)[axis]
        return cls(
            size,
            pooled_hw(p)[axis],
            (p.r, p.s)[axis],
            p.stride[axis],
            p.dilation[axis],
            p.padding[axis],
            -before,
            size + after,
            reached[axis] + reached[axis + 2] > 0,
        )

    def counted(self) -> Callable[[Any], Any]:
        """`counted(first)` for kernels: how many positions of the window that begins at `first` an average counts."""
        taps, step, start, stop = self.taps, self.dilation, self.counts_from, self.counts_to

        def some(first: Any) -> Any:
            """Those before `stop`, less those before `start`."""
            below = min((stop - first + step - 1) // step, taps)
            before = max((start - first + step - 1) // step, 0)
            return i32(below - before)

        def every(first: Any) -> Any:
            return i32(taps)

        last = (self.outputs - 1) * self.stride - self.before + (taps - 1) * step
        return every if -self.before >= start and last < stop else some
