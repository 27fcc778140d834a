"""Where an element of an array lies in memory, for every layout of one block per axis: NHWC, OIHW, NCHW32c, OIHW4o4i ...

    offsets = offsets_along(Layout.parse("NCHW32c"), {"N": 8, "C": 64, "H": 56, "W": 56})
    at = offsets["N"](n) + offsets["H"](h) + offsets["W"](w) + offsets["C"](c)      # elements

A kernel captures the functions, and they become part of it. Each one multiplies by captured strides. Only an axis with
blocks needs a division. The sum is linear in whole blocks: `offset(a + b) = offset(a) + offset(b)` if `a` is a multiple of
the block. A kernel can therefore keep the offset of a group's first channel, and add those of channels inside of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.ops import ArgSpec
from schedsearch.ops.layout import Layout
from schedsearch.templates.parts.casts import i64, u32
from schedsearch.workload import Workload


@dataclass(frozen=True)
class AxisStrides:
    """Steps in memory along one axis, in elements.

    Attributes:
        block: neighbours along the axis that one block holds; 1 without blocks.
        outer: from one block to the next; without blocks from one index to the next.
        inner: from one index to the next inside of a block.
    """

    block: int
    outer: int
    inner: int

    @classmethod
    def of(cls, layout: Layout, sizes: Mapping[str, int]) -> dict[str, AxisStrides]:
        """The strides of every axis of a contiguous array with these extents.

        Raises:
            ValueError: an axis has nested blocks.
        """
        strides = layout.strides(sizes)
        blocked = [axis for axis, _ in layout.blocks]
        if len(set(blocked)) < len(blocked):
            raise ValueError(f"layout {layout} has nested blocks; allowed: one block for each axis")
        inner = {axis: step for axis, step in zip(blocked, strides[len(layout.axes) :]) if layout.block(axis) > 1}
        return {axis: cls(layout.block(axis), stride, inner.get(axis, stride)) for axis, stride in zip(layout.axes, strides)}

    @classmethod
    def of_argument(cls, spec: ArgSpec) -> dict[str, AxisStrides]:
        """The strides of every axis of an argument or output.

        Raises:
            ValueError: an axis has nested blocks.
        """
        layout, extents = Layout.parse(spec.axes), spec.slice_of or spec.shape
        return cls.of(layout, {axis: size * layout.block(axis) for axis, size in zip(layout.axes, extents)})

    def run(self, extent: int) -> int:
        """How many of `extent` elements, from the start of a block, are neighbours in memory."""
        if self.inner != 1:
            return 1
        return min(self.block, extent) if self.block > 1 else extent

    def offset(self) -> Callable[[Any], Any]:
        """`offset(index)`: elements from index 0 to `index` (not negative), int64."""
        block, outer, inner = self.block, self.outer, self.inner

        def plain(index: Any) -> Any:
            return i64(index) * outer

        def blocked(index: Any) -> Any:
            number = u32(index) // block
            return i64(number) * outer + i64(u32(index) - number * block) * inner

        return plain if block == 1 else blocked


def offsets_along(layout: Layout, sizes: Mapping[str, int]) -> dict[str, Callable[[Any], Any]]:
    """axis -> `offset(index)` of `AxisStrides`; an element's offset is the sum over the axes.

    Args:
        layout: with at most one block for each axis.
        sizes: axis -> logical extent, below 2**32.
    """
    return {axis: strides.offset() for axis, strides in AxisStrides.of(layout, sizes).items()}


def strides_of(workload: Workload, name: str) -> dict[str, AxisStrides]:
    """The strides of every axis of the workload's argument or output of this name."""
    return AxisStrides.of_argument(next(spec for spec in (*workload.signature, *workload.outputs) if spec.name == name))


# --- Kernels without narrow integers: references, and templates for CPUs ------------------------------------------------
def plain_strides(spec: ArgSpec, order: str) -> tuple[int, ...]:
    """Elements between neighbours along each axis in `order`, and between blocks along an axis that has them."""
    strides = AxisStrides.of_argument(spec)
    return tuple(strides[axis].outer for axis in order)


def offset_along(axis: str, spec: ArgSpec, nbytes: int = 1) -> Callable[[Any], Any]:
    """`offset(index)`: what an index along an axis adds to an address, in units of `nbytes`, in the index's own type."""
    strides = AxisStrides.of_argument(spec)[axis]
    block, outer, inner = strides.block, nbytes * strides.outer, nbytes * strides.inner

    def plain(index: Any) -> Any:
        return index * outer

    def blocked(index: Any) -> Any:
        return index // block * outer + index % block * inner

    return plain if block == 1 else blocked


def channel_runs(axis: str, spec: ArgSpec) -> tuple[int, int]:
    """(length, stride): within a block of `length` indices along an axis, neighbours are `stride` elements apart. The
    length is 0 if the axis has no blocks, so that it is one run."""
    strides = AxisStrides.of_argument(spec)[axis]
    return (0, strides.outer) if strides.block == 1 else (strides.block, strides.inner)
