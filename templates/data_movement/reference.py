"""The reference of all operators that only move data: their boxes element by element, and their definitions in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.launch import Pointer
from schedsearch.ops import decode, encode
from schedsearch.ops.data_movement import DataMovement
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.movement import Box, Factor
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import elements, reader, reference_step, sharer, writer
from schedsearch.workload import Workload

Place = Callable[[Any], Any]


class DataMovementReference(Reference):
    """The kernel has a step for each box, and an item for each of its elements. The points ask `DataMovement.sources`."""

    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        op = _definition(workload)
        is_float = dtype(workload.output.dtype).is_float
        read, items = reader(target, workload.output.dtype), sharer(target)
        write = writer(target, "float64" if is_float else "int64")
        fill = _fill(workload)

        def moved(box: Box) -> Callable[..., None]:
            place = _place_of(box)

            def move(x: Any, y: Any, start: Any, stop: Any) -> None:
                for item in items(start, stop):
                    x_at, y_at, is_read = place(item)
                    if is_read:
                        write(y, y_at, read(x, x_at))
                    else:
                        write(y, y_at, fill)

            return move

        boxes = op.movement(op.typed({**workload.params, "slice_of": ()})).boxes  # truths have no gaps
        steps = [reference_step(target, moved(box), (Pointer(box.x), Pointer("y")), box.size) for box in boxes]
        if not steps:  # y is empty
            steps.append(reference_step(target, _nothing, (Pointer("x"), Pointer("y")), 1))
        return KernelSource(target.kind, "native", tuple(steps))

    def points(
        self,
        workload: Workload,
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        flat_indices = np.asarray(flat_indices, np.int64)
        numbers, positions = _definition(workload).sources(workload.params, flat_indices)
        kind = np.float64 if dtype(workload.output.dtype).is_float else np.int64
        values = np.full(flat_indices.shape, _fill(workload), kind)
        for number, argument in enumerate(workload.signature):
            here = numbers == number
            values[here] = elements(arrays, argument, positions[here])
        return values


def _nothing(x: Any, y: Any, start: Any, stop: Any) -> None:
    pass


def _definition(workload: Workload) -> DataMovement[Any]:
    definition = workload.definition
    assert isinstance(definition, DataMovement)
    return definition


def _fill(workload: Workload) -> float:
    """The value of elements that come from no argument, as the format holds it: an int of integers."""
    wanted, name = np.array([_definition(workload).fill(workload.params)]), workload.output.dtype
    (held,) = decode(encode(wanted, name), name)
    return float(held) if dtype(name).is_float else int(held)


def _place_of(box: Box) -> Place:
    """`place(item)` for kernels: positions in x and y of an element of the box, and whether it is in x."""
    x_start, y_start = box.x_start, box.y_start

    def at_start(item: Any) -> Any:
        return i64(x_start), i64(y_start), True

    place: Place = at_start
    below = 1
    for factor in reversed(box.factors):
        place = _then_digit(place, below, factor)
        below *= factor.extent
    for axis, limits in enumerate(box.ragged):
        place = _then_limits(place, _index_along(box, axis), limits.first, limits.read)
    return place


def _then_digit(before: Place, below: int, factor: Factor) -> Place:
    extent, x, y = factor.extent, factor.x, factor.y

    def place(item: Any) -> Any:
        x_at, y_at, is_read = before(item)
        digit = item // below % extent
        return x_at + digit * x, y_at + digit * y, is_read

    return place


def _then_limits(before: Place, index_of: Place, first: int, end: int) -> Place:
    def place(item: Any) -> Any:
        x_at, y_at, is_read = before(item)
        index = index_of(item)
        return x_at, y_at, is_read & (index >= first) & (index < end)

    return place


def _index_along(box: Box, axis: int) -> Place:
    """`index(item)` for kernels: the index along a ragged axis."""

    def zero(item: Any) -> Any:
        return i64(0)

    index: Place = zero
    below = 1
    for factor in reversed(box.factors):
        if factor.axis == axis:
            index = _then_index(index, below, factor.extent, factor.unit)
        below *= factor.extent
    return index


def _then_index(before: Place, below: int, extent: int, unit: int) -> Place:
    def index(item: Any) -> Any:
        return before(item) + item // below % extent * unit

    return index
