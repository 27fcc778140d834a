"""What one thread of the CUDA kernels of depthwise_conv2d computes: a patch of pixels for a vector of channels.

All directions are correlations along two axes. A *target* is a position of y (or of dx), a *source* one of the array that is
read: x (or dy). Target t and tap a of the filter meet in the source

    (t * up + a * tap_step + shift) / down        if that is an integer

- y and dw read x:  p * stride + a * dilation - padding.
- dx reads dy: (h - a * dilation + padding) / stride.

A patch starts at a multiple of its size. So the sources that its targets meet, relative to the first, are known when the
kernel is built, also those of a gradient with a stride, whose taps differ from target to target.

See docs/decisions/095-depthwise-patches.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.window import output_hw
from schedsearch.templates.parts.addressing import AxisStrides, strides_of
from schedsearch.workload import Workload

VECTOR_BYTES = 16  # of the longest load and store


@dataclass(frozen=True)
class Axis:
    """How targets, taps and sources meet along one axis; see above.

    Attributes:
        sources, targets: extents of the two arrays.
        taps: of the filter.
    """

    sources: int
    targets: int
    taps: int
    up: int
    down: int
    tap_step: int
    shift: int

    @classmethod
    def of(cls, workload: Workload[DepthwiseConv2dParams], axis: int) -> Axis:
        """Along h (axis 0) or w (axis 1). For grad_weight the targets are those of dy."""
        p = workload.params
        image, taps = (p.h, p.r) if axis == 0 else (p.w, p.s)
        output = output_hw(p)[axis]
        stride, dilation, before = p.stride[axis], p.dilation[axis], p.padding[axis]
        if p.direction == "grad_input":
            return cls(output, image, taps, 1, stride, -dilation, before)
        return cls(image, output, taps, stride, 1, dilation, -before)

    def meetings(self, tile: int, taps: int) -> dict[int, list[tuple[int, int]]]:
        """source - first source of the tile -> the pairs (target of the tile, tap) that meet there.

        Args:
            tile: targets of a patch, so that tile * up is a multiple of `down`.
            taps: the first ones of the filter. Those from a tap A on meet A * tap_step / down further on.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for target in range(tile):
            for tap in range(taps):
                source, rest = divmod(target * self.up + tap * self.tap_step + self.shift, self.down)
                if not rest:
                    found.setdefault(source, []).append((target, tap))
        return dict(sorted(found.items()))

    def reach(self, targets: Any, taps: int) -> Any:
        """Sources from the first to the last one that neighbouring targets meet, at most."""
        return ((targets - 1) * self.up + (taps - 1) * abs(self.tap_step)) // self.down + 1

    def patches(self, tile: int) -> int:
        """Patches of `tile` targets."""
        return -(-self.targets // tile)

    def outside(self, tile: int, source: int) -> tuple[int, int]:
        """How many of the first patches, and of the last ones, have a source outside of the image.

        Args:
            tile: targets of a patch.
            source: relative to the first one of a patch.
        """
        step, count = tile * self.up // self.down, self.patches(tile)
        before = min(count, max(0, -(source // step)))
        inside = min(count, max(0, -((source - self.sources) // step)))  # patches that start early enough
        return before, count - inside


@dataclass(frozen=True)
class Piece:
    """Neighbours along the columns of a plane that one access moves: `length` elements from `first` on."""

    first: int
    length: int


@dataclass(frozen=True)
class Patch:
    """The patch of one thread.

    Attributes:
        rows, columns: the two axes.
        tile_h, tile_w: targets along them.
        tap_h, tap_w: taps that are unrolled; a larger filter takes several rounds.
        vector: channels, neighbours in memory if there are several.
        dtype: of all arrays; of integers, of the source.
        weight_dtype: of the filters.
        zero_points: names of those that the source and the filters have; see `bytes_text`.
        channels_last: NHWC; otherwise neighbours in memory are columns, and `vector` is 1.
        source, target: strides in elements of rows and columns in the two arrays.
    """

    rows: Axis
    columns: Axis
    tile_h: int
    tile_w: int
    tap_h: int
    tap_w: int
    vector: int
    dtype: str
    channels_last: bool
    source: tuple[int, int]
    target: tuple[int, int]
    weight_dtype: str = ""
    zero_points: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, workload: Workload[DepthwiseConv2dParams], tile_h: int, tile_w: int, tap_h: int, tap_w: int, vector: int
    ) -> Patch:
        p = workload.params
        source, target = (_strides(workload, name) for name in arrays_of(workload)[:2])
        axes = Axis.of(workload, 0), Axis.of(workload, 1)
        channels_last = p.layout == "NHWC"
        found = cls(*axes, tile_h, tile_w, tap_h, tap_w, vector, p.dtype, channels_last, source, target)
        return replace(found, weight_dtype=p.weight_dtype, zero_points=p.zero_points)

    @property
    def nbytes(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).nbytes

    @property
    def sums(self) -> int:
        """Elements of the patch."""
        return self.tile_h * self.tile_w * self.vector

    @cached_property
    def row_meetings(self) -> dict[int, list[tuple[int, int]]]:
        return _existing(self.rows, self.tile_h, self.tap_h)

    @cached_property
    def column_meetings(self) -> dict[int, list[tuple[int, int]]]:
        return _existing(self.columns, self.tile_w, self.tap_w)

    @property
    def target_rows(self) -> int:
        """Rows of the patch, without those that no patch has inside of the image."""
        return min(self.tile_h, self.rows.targets)

    @property
    def target_columns(self) -> int:
        return min(self.tile_w, self.columns.targets)

    @cached_property
    def source_pieces(self) -> tuple[Piece, ...]:
        """Accesses that load a row of sources of a plane; relative to the first source."""
        axis, several = self.columns, self.tap_w < self.columns.taps
        apart = 1 if several else self.tile_w * axis.up // axis.down
        if not several and axis.patches(self.tile_w) == 1:
            apart = 0
        return pieces(self.column_meetings, math.gcd(axis.sources, apart), self.nbytes)

    @cached_property
    def target_pieces(self) -> tuple[Piece, ...]:
        """Accesses that move a row of targets of a plane."""
        columns = self.target_columns
        return pieces(range(columns), math.gcd(self.columns.targets, columns), self.nbytes)

    @property
    def alignments(self) -> tuple[int, int]:
        """Bytes of which the addresses of the source and target must be multiples."""
        if self.channels_last:
            return self.vector * self.nbytes, self.vector * self.nbytes
        source, target = (
            max((piece.length for piece in each), default=1) for each in (self.source_pieces, self.target_pieces)
        )
        return source * self.nbytes, target * self.nbytes


def _existing(axis: Axis, tile: int, taps: int) -> dict[int, list[tuple[int, int]]]:
    """`Axis.meetings`; those inside of the image only, if one patch and one round of taps cover the axis."""
    found = axis.meetings(tile, taps)
    if taps < axis.taps or axis.patches(tile) > 1:
        return found
    inside = {
        source: [(target, tap) for target, tap in pairs if target < axis.targets]
        for source, pairs in found.items()
        if 0 <= source < axis.sources
    }
    return {source: pairs for source, pairs in inside.items() if pairs}


def arrays_of(workload: Workload[DepthwiseConv2dParams]) -> tuple[str, str, str]:
    """Names of the source, the target and the filters; of grad_weight's targets, that is dy."""
    return {
        "forward": ("x", "y", "weight"), "grad_input": ("dy", "dx", "weight"), "grad_weight": ("x", "dy", "dw"),
    }[workload.params.direction]  # fmt: skip


def pieces(wanted: Iterable[int], aligned: int, element_bytes: int) -> tuple[Piece, ...]:
    """The longest aligned accesses that cover some elements of a row, if at least half of their elements are wanted.

    Each is a power of two that divides its start and `aligned`. So it lies inside or outside of a row as a whole if
    `aligned` divides the row's length, and also the place of element 0.
    """
    left, found = sorted(wanted), []
    lengths = [n for n in (1, 2, 4, 8) if n * element_bytes <= VECTOR_BYTES and aligned % n == 0]
    while left:
        reach = {n: sum(each < left[0] // n * n + n for each in left) for n in lengths}
        length = max((n for n in lengths if 2 * reach[n] >= n), key=lambda n: (reach[n], -n))
        found.append(Piece(left[0] // length * length, length))
        left = left[reach[length] :]
    return tuple(found)


def filter_pieces(patch: Patch) -> tuple[Piece, ...]:
    """Accesses to the filters of a thread, which lie one after the other, the taps of each side by side."""
    elements = patch.vector * patch.tap_h * patch.tap_w
    return pieces(range(elements), elements, patch.nbytes)


def _strides(workload: Workload[DepthwiseConv2dParams], name: str) -> tuple[int, int]:
    strides = strides_of(workload, name)
    return strides["H"].outer, strides["W"].outer


def filter_strides(workload: Workload[DepthwiseConv2dParams]) -> dict[str, AxisStrides]:
    """Strides of the weight, or dw: O, H and W."""
    return strides_of(workload, arrays_of(workload)[2])
