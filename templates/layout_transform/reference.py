"""The reference of layout_transform: index arithmetic from the definition of a layout, element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.ops import Layout
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout_transform import LayoutTransformParams, sizes
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import gather, reader, reference_source, sharer, writer
from schedsearch.workload import Workload


class LayoutTransformReference(Reference[LayoutTransformParams]):
    """Each item is a position in y. Its dimensions give the index along every axis, and these the position in x."""

    def kernel(self, workload: Workload[LayoutTransformParams], target: Target) -> KernelSource:
        is_float = dtype(workload.params.dtype).is_float
        read, items = reader(target, workload.params.dtype), sharer(target)
        write, zero = writer(target, "float64" if is_float else "int64"), 0.0 if is_float else 0
        source_of = _source_of(workload)

        def transform(x: Any, y: Any, start: Any, stop: Any) -> None:
            for item in items(start, stop):
                position = source_of(item)
                if position >= 0:
                    write(y, item, read(x, position))
                else:
                    write(y, item, zero)

        return reference_source(workload, target, transform, workload.output.size)

    def points(
        self,
        workload: Workload[LayoutTransformParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        x, extents = workload.signature[0], sizes(workload.params)
        index = _logical(Layout.parse(workload.params.to), workload.output.shape, np.asarray(flat_indices, np.int64))
        inside = np.all([index[axis] < extent for axis, extent in extents.items()], axis=0)
        clipped = {axis: np.minimum(index[axis], extent - 1) for axis, extent in extents.items()}
        values = np.where(inside, gather(arrays, x, Layout.parse(x.axes).offset(extents, clipped)), 0.0)
        return values if dtype(workload.params.dtype).is_float else values.astype(np.int64)


def _logical(layout: Layout, shape: tuple[int, ...], flat: Any) -> dict[str, Any]:
    """The index along each axis of positions in memory; it is beyond the axis in the padding."""
    places = np.unravel_index(flat, shape)
    index = dict.fromkeys(layout.axes, 0)
    for (axis, unit), place in zip(_dimensions(layout), places):
        index[axis] = index[axis] + unit * place
    return index


def _dimensions(layout: Layout) -> list[tuple[str, int]]:
    """(axis, its index's step) of each dimension in memory."""
    left = {axis: list(layout.units(axis)) for axis in layout.axes}
    return [(axis, left[axis].pop(0)) for axis in (letter.upper() for letter in layout.dimensions)]


def _source_of(workload: Workload[LayoutTransformParams]) -> Callable[[Any], Any]:
    """`source_of(position in y)` for kernels: the position in x, or -1 in the padding."""
    extents, to, source = sizes(workload.params), Layout.parse(workload.params.to), Layout.parse(workload.params.layout)
    find: Callable[[Any], Any] = _found
    for axis in to.axes:
        find = _then_axis(find, _index_along(to, workload.output.shape, axis), extents[axis], _offset(source, extents, axis))
    return find


def _found(position: Any) -> Any:
    return i64(0)


def _then_axis(before: Callable[[Any], Any], index_of: Any, extent: int, offset_of: Any) -> Callable[[Any], Any]:
    def find(position: Any) -> Any:
        index, offset = index_of(position), before(position)
        if offset < 0 or index >= extent:
            offset = i64(-1)
        else:
            offset += offset_of(index)
        return offset

    return find


def _index_along(layout: Layout, shape: tuple[int, ...], axis: str) -> Callable[[Any], Any]:
    """`index(position)` for kernels: the index along an axis of a position in memory."""
    index: Callable[[Any], Any] = _no_index
    for place, (name, unit) in enumerate(_dimensions(layout)):
        if name == axis:
            stride = 1
            for extent in shape[place + 1 :]:
                stride *= extent
            index = _then_digit(index, stride, shape[place], unit)
    return index


def _no_index(position: Any) -> Any:
    return i64(0)


def _then_digit(before: Callable[[Any], Any], stride: int, extent: int, unit: int) -> Callable[[Any], Any]:
    def index(position: Any) -> Any:
        return before(position) + position // stride % extent * unit

    return index


def _offset(layout: Layout, extents: Mapping[str, int], axis: str) -> Callable[[Any], Any]:
    """`offset(index)` for kernels: what an index along an axis adds to the position in memory."""
    offset: Callable[[Any], Any] = _no_index
    whole = 0
    for (name, unit), stride in zip(_dimensions(layout), layout.strides(extents)):
        if name == axis:
            offset = _then_place(offset, unit, stride, whole)
            whole = unit
    return offset


def _then_place(before: Callable[[Any], Any], unit: int, stride: int, whole: int) -> Callable[[Any], Any]:
    def outermost(index: Any) -> Any:
        return before(index) + index // unit * stride

    def inner(index: Any) -> Any:
        return before(index) + index % whole // unit * stride

    return inner if whole else outermost
