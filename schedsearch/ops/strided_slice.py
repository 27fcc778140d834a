"""strided_slice: y holds every stride-th element of x from `begin` to `end`, along any dimensions.

The rules are those of ONNX's Slice and of NumPy: a negative begin or end counts from the end of its dimension, what lies
beyond the dimension is cut to it, a negative stride goes backwards, and a slice may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.data_movement import (
    AXES,
    DTYPE,
    DataMovement,
    MovementParams,
    axis_numbers,
    axis_problems,
    extents,
    shown,
    too_large,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import Box, Factor, Movement, row_strides
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.slices import SLICE_OF, slice_words, sliced
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import Array, ParamsByName

MODES = ("end", "size")


def _positions(doc: str) -> Parameter:
    one = {"type": "integer", "minimum": -MAX_INT - 1, "maximum": MAX_INT}
    return Parameter(doc, {"type": "array", "items": one, "maxItems": len(AXES), "default": []})


@dataclass(frozen=True, eq=False, kw_only=True)
class StridedSliceParams(MovementParams):
    """See `strided_slice`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    begin: tuple[int, ...] = declared(_positions("first position along each dimension; default: the whole dimension"))
    end: tuple[int, ...] = declared(
        _positions("position after the last one, or with mode size the number of positions, -1 for all that follow")
    )
    strides: tuple[int, ...] = declared(_positions("distance of positions; negative ones go backwards; default 1"))
    axes: tuple[int, ...] = declared(
        axis_numbers("dimensions that begin, end and strides are about; default: 0, 1, ...", default=())
    )
    mode: str = declared(Parameter.choice("what end means: end (a position) or size (a count, as TVM's slice_mode)", MODES))
    dtype: str = declared(DTYPE)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


@dataclass(frozen=True)
class _Cut:
    """A slice of one dimension: `count` positions from `first` on, `stride` apart."""

    first: int
    count: int
    stride: int

    @classmethod
    def of(cls, extent: int, begin: int | None, end: int | None, stride: int) -> _Cut:
        """What Python's own slices select. Slices that select the same are equal."""
        chosen = range(extent)[slice(begin, end, stride)]
        if len(chosen) > 1:
            return cls(chosen[0], len(chosen), stride)
        return cls(chosen[0], 1, 1) if chosen else cls(0, 0, 1)

    def end(self, extent: int) -> int:
        """The position after the last one; -extent - 1 is the one before position 0."""
        after = self.first + (self.count - 1) * self.stride + (1 if self.stride > 0 else -1)
        return after if after >= 0 or not self.count else -extent - 1


class StridedSlice(DataMovement[StridedSliceParams]):
    """As ONNX's Slice with constant inputs, and as TVM's strided_slice.

    Workloads keep begin, end and strides of all dimensions in one form, so that equal slices have equal ids.
    """

    params_type: ClassVar[type[Params]] = StridedSliceParams
    name: ClassVar[str] = "strided_slice"
    constructor: ClassVar[str] = "schedsearch:strided_slice"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        found, problems = super().normalise(params)
        if problems:
            return found, problems
        cuts = _cuts(self.typed(found))
        found["begin"] = tuple(cut.first for cut in cuts)
        found["end"] = tuple(cut.end(extent) if cut.count else 0 for cut, extent in zip(cuts, found["x"]))
        found["strides"] = tuple(cut.stride for cut in cuts)
        found["axes"], found["mode"] = (), "end"
        return found, []

    def problems(self, params: StridedSliceParams) -> Iterable[Problem]:
        rank, axes = len(params.x), params.axes
        found = axis_problems("axes", axes, rank)
        for name in ("begin", "end", "strides"):
            count = len(params[name])
            if axes and count not in (len(axes), 0):
                found.append(Problem(name, f"{name} has {count} entries, axes has {len(axes)}; give one for each of axes"))
            elif count > rank:
                found.append(Problem(name, f"{name} has {count} entries, but x has {rank} dimensions; give at most {rank}"))
        if 0 in params.strides:
            found.append(Problem("strides", "strides has 0; allowed: positive numbers, or negative ones to go backwards"))
        if params.mode == "size":
            found += _size_problems(params)
        return found or too_large("x", params.x, dtype_of(params.dtype).nbytes)

    def arguments(self, params: StridedSliceParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: StridedSliceParams) -> tuple[ArgSpec, ...]:
        return (
            sliced(ArgSpec("y", AXES[: len(params.x)], tuple(cut.count for cut in _cuts(params)), params.dtype), params),
        )

    def work(self, params: StridedSliceParams) -> Work:
        """The elements of y, read and written. Others need not be read."""
        nbytes = 2 * self.outputs(params)[0].nbytes
        return Work(0, nbytes, least_bytes=nbytes)

    def movement(self, params: StridedSliceParams) -> Movement:
        cuts, in_x = _cuts(params), row_strides(params.x)
        in_y = row_strides(params.slice_of or [cut.count for cut in cuts])
        element_bytes = dtype_of(params.dtype).nbytes
        if not all(cut.count for cut in cuts):
            return Movement(element_bytes, ())
        factors = [Factor(cut.count, cut.stride * step, y) for cut, step, y in zip(cuts, in_x, in_y)]
        start = sum(cut.first * step for cut, step in zip(cuts, in_x))
        return Movement(element_bytes, (Box.of("x", factors, x_start=start),))

    def sources(self, params: StridedSliceParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        index = np.unravel_index(flat_indices, self.outputs(params)[0].shape)
        at = [first + place * stride for first, place, stride in zip(params.begin, index, params.strides)]
        return np.zeros_like(flat_indices), np.ravel_multi_index(at, params.x)

    def label(self, params: StridedSliceParams) -> str:
        ends = [stop if stop >= 0 else None for stop in params.end]
        words = [
            f"{first}:{'' if stop is None else stop}" + (f":{stride}" if stride != 1 else "")
            for first, stop, stride in zip(params.begin, ends, params.strides)
        ]
        label = f"strided_slice {shown(params.x)} [{','.join(words)}] {dtype_of(params.dtype).short}"
        return " ".join([label, *slice_words(params)])


STRIDED_SLICE = StridedSlice()


def _cuts(params: StridedSliceParams) -> list[_Cut]:
    """The slice along each dimension of x, of parameters without problems."""
    x, rank = params.x, len(params.x)
    axes = [axis % rank for axis in params.axes] or range(rank)
    begin, end, strides = (dict(zip(axes, params[name])) for name in ("begin", "end", "strides"))
    cuts = []
    for axis, extent in enumerate(x):
        stop = end.get(axis)
        if params.mode == "size" and stop is not None:
            first = range(extent)[slice(begin.get(axis), None)]
            stop = None if stop == -1 else extent - len(first) + stop
        cuts.append(_Cut.of(extent, begin.get(axis), stop, strides.get(axis, 1)))
    return cuts


def _size_problems(params: StridedSliceParams) -> list[Problem]:
    found = []
    if any(size < -1 for size in params.end):
        least = min(params.end)
        found.append(
            Problem("end", f"end has {least}; with mode size allowed: a count, or -1 for all positions that follow")
        )
    if any(stride != 1 for stride in params.strides):
        found.append(
            Problem("strides", f"strides is {list(params.strides)}; mode size counts neighbours: leave strides out")
        )
    return found
