"""The truth about dyn_strided_slice: one element after the other, and NumPy's own slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.launch import Pointer
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.dyn_strided_slice import DynStridedSliceParams, sliced_by
from schedsearch.ops.movement import row_strides
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import gather, reader, reference_step, sharer, writer
from schedsearch.workload import Workload

_UNDEFINED = -(2**63)  # the truth of an integer beyond the extents; NaN is that of a float


class DynStridedSliceReference(Reference[DynStridedSliceParams]):
    """An item for each element of y within its bound. Each finds its own position."""

    def kernel(self, workload: Workload[DynStridedSliceParams], target: Target) -> KernelSource:
        p = workload.params
        shape, bound, entry_of, rank = p.x, p.bound, sliced_by(p), len(p.x)
        x_steps, y_steps, entries = row_strides(shape), row_strides(bound), p.entries
        dynamic, strided, by_size = p.dynamic, p.strided, p.mode == "size"
        is_float = dtype(p.dtype).is_float
        read, items = reader(target, p.dtype), sharer(target)
        read_position, read_extent = reader(target, p.index_dtype), reader(target, "int64")
        write, write_extent = writer(target, "float64" if is_float else "int64"), writer(target, "int64")
        undefined = np.nan if is_float else _UNDEFINED
        size = workload.outputs[0].size

        def slice_along(axis: Any, x_extents: Any, begin: Any, end: Any, strides: Any) -> Any:
            """(first position, step, count)"""
            extent = i64(shape[axis])
            if dynamic:
                extent = min(extent, read_extent(x_extents, axis))
            entry = entry_of[axis]
            if entry < 0:
                return i64(0), i64(1), extent
            step = i64(1)
            if strided:
                step = read_position(strides, entry)
            first, last = read_position(begin, entry), read_position(end, entry)
            lowest, highest = (i64(0), extent) if step > 0 else (i64(-1), extent - 1)
            first = min(max(first + extent if first < 0 else first, lowest), highest)
            if by_size:
                return first, step, extent - first if last == -1 else min(last, extent - first)
            last = min(max(last + extent if last < 0 else last, lowest), highest)
            distance = last - first if step > 0 else first - last
            if distance <= 0 or step == 0:
                return first, step, i64(0)
            stride = step if step > 0 else -step
            return first, step, (distance - 1) // stride + 1

        def slice_all(
            x: Any, x_extents: Any, begin: Any, end: Any, strides: Any, y: Any, y_extents: Any, start: Any, stop: Any
        ) -> None:
            possible = True
            for axis in range(rank):
                _, _, count = slice_along(axis, x_extents, begin, end, strides)
                possible = possible and 0 <= count <= bound[axis]
            for entry in range(entries):
                if strided and read_position(strides, entry) == 0:
                    possible = False
                if by_size and read_position(end, entry) < -1:
                    possible = False
            for item in items(start, stop):
                at, inside = i64(0), possible
                for axis in range(rank):
                    first, step, count = slice_along(axis, x_extents, begin, end, strides)
                    place = i64(item // y_steps[axis] % bound[axis])
                    inside = inside and place < count
                    at += (first + place * step) * x_steps[axis]
                    if item == 0:
                        write_extent(y_extents, axis, count if possible else i64(0))
                if inside:
                    write(y, item, read(x, at))
                else:
                    write(y, item, undefined)

        names = ("x", "x_extents", "begin", "end", "strides", "y", "y_extents")
        params = [Pointer(name, optional=name in ("x_extents", "strides")) for name in names]
        return KernelSource(target.kind, "native", (reference_step(target, slice_all, params, size),))

    def points(
        self,
        workload: Workload[DynStridedSliceParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        places = positions(workload, arrays)
        if output == "y_extents":
            extents: np.ndarray[Any, np.dtype[Any]] = np.array([len(each) for each in places], np.int64)
            return extents[np.asarray(flat_indices, np.int64)]
        index = np.unravel_index(np.asarray(flat_indices, np.int64), workload.params.bound)
        inside = np.logical_and.reduce([digit < len(each) for digit, each in zip(index, places)])
        is_float = dtype(workload.params.dtype).is_float
        number, undefined = (np.float64, np.nan) if is_float else (np.int64, _UNDEFINED)
        found: np.ndarray[Any, np.dtype[Any]] = np.full(index[0].shape, undefined, number)
        if inside.any():
            at = tuple(np.asarray(each)[digit[inside]] for digit, each in zip(index, places))
            found[inside] = gather(arrays, workload.signature[0], at)
        return found


def positions(workload: Workload[DynStridedSliceParams], arrays: Mapping[str, Any]) -> list[range]:
    """The positions in x along each dimension; empty ones if the slice is impossible."""
    p = workload.params
    extents = [int(n) for n in arrays.get("x_extents", p.x)]
    found, possible = [], True
    for axis, (entry, most) in enumerate(zip(sliced_by(p), p.x)):
        extent = min(extents[axis], most)
        if entry < 0:
            found.append(range(extent))
            continue
        begin, end = int(arrays["begin"][entry]), int(arrays["end"][entry])
        step = int(arrays["strides"][entry]) if p.strided else 1
        possible = possible and step != 0 and (p.mode == "end" or end >= -1)
        if p.mode == "size":
            chosen = range(extent)[begin:]
            found.append(chosen if end == -1 else chosen[: max(end, 0)])
        else:
            found.append(range(extent)[begin : end : step or 1])
    possible = possible and all(len(each) <= most for each, most in zip(found, p.bound))
    return found if possible else [range(0)] * len(found)
