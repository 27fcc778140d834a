"""Where an element lies in memory: offsets for kernels, from layouts with and without blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.ops import ArgSpec
from schedsearch.ops.layout import Layout


def plain_strides(spec: ArgSpec, order: str) -> tuple[int, ...]:
    """Elements between neighbours along each axis in `order`; meaningless for an axis with blocks."""
    layout = Layout.parse(spec.axes)
    strides = dict(zip(layout.dimensions, _row_major(spec.shape)))
    return tuple(strides[axis] for axis in order)


def offset_along(axis: str, spec: ArgSpec, nbytes: int = 1) -> Callable[[Any], Any]:
    """`offset(index)` for kernels: what an index along an axis adds to an address, in units of `nbytes`."""
    layout = Layout.parse(spec.axes)
    strides, block = dict(zip(layout.dimensions, _row_major(spec.shape))), layout.block(axis)
    outer, inner = nbytes * strides[axis], nbytes * strides.get(axis.lower(), 0)

    def plain(index: Any) -> Any:
        return index * outer

    def blocked(index: Any) -> Any:
        return index // block * outer + index % block * inner

    return plain if block == 1 else blocked


def channel_runs(axis: str, spec: ArgSpec) -> tuple[int, int]:
    """(length, stride): within a block of `length` indices along an axis, neighbours are `stride` elements apart. The
    length is 0 if the axis has no blocks, so that it is one run."""
    layout = Layout.parse(spec.axes)
    strides, block = dict(zip(layout.dimensions, _row_major(spec.shape))), layout.block(axis)
    return (0, strides[axis]) if block == 1 else (block, strides[axis.lower()])


def _row_major(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]
