"""concat: y holds several arrays, one after the other along one dimension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.data_movement import AXES, DTYPE, DataMovement, MovementParams, axis_problems, extents, shown, too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import Box, Factor, Movement, row_strides
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.slices import SLICE_OF, slice_words, sliced
from schedsearch.ops.specs import ArgSpec
from schedsearch.typed import Array, ParamsByName

MOST_ARGUMENTS = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class ConcatParams(MovementParams):
    """See `concat`."""

    x: tuple[tuple[int, ...], ...] = declared(
        Parameter(
            f"extents of each argument, 1 to {MOST_ARGUMENTS} lists; they differ along the axis only",
            {"type": "array", "items": extents("").schema, "minItems": 1, "maxItems": MOST_ARGUMENTS},
            size=True,
        )
    )
    axis: int = declared(
        Parameter(
            "dimension along which the arguments follow one another; negative ones count from the last",
            {"type": "integer", "minimum": -len(AXES), "maximum": len(AXES) - 1},
        )
    )
    dtype: str = declared(DTYPE)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


class Concat(DataMovement[ConcatParams]):
    """As ONNX's Concat. The arguments are x0, x1, ..."""

    params_type: ClassVar[type[Params]] = ConcatParams
    name: ClassVar[str] = "concat"
    constructor: ClassVar[str] = "schedsearch:concat"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Counts the axis from 0."""
        found, problems = super().normalise(params)
        if not problems:
            found["axis"] %= len(found["x"][0])
        return found, problems

    def problems(self, params: ConcatParams) -> Iterable[Problem]:
        first, axis = params.x[0], params.axis
        rank = len(first)
        if found := axis_problems("axis", [axis], rank):
            return found
        for number, shape in enumerate(params.x):
            if len(shape) != rank:
                return [Problem("x", f"x{number} has {len(shape)} dimensions, x0 has {rank}; give as many for each")]
            unequal = [place for place in range(rank) if place != axis % rank and shape[place] != first[place]]
            if unequal:
                place = unequal[0]
                return [
                    Problem(
                        "x",
                        f"x{number} has {shape[place]} along dimension {place}, x0 has {first[place]}; "
                        f"only dimension {axis % rank}, the axis, may differ",
                    )
                ]
        y = self._shape(params)
        if max(y) > MAX_INT:
            return [Problem("x", f"y has {max(y)} along dimension {y.index(max(y))}; allowed: up to {MAX_INT}")]
        return too_large("x", y, dtype_of(params.dtype).nbytes)

    def _shape(self, params: ConcatParams) -> tuple[int, ...]:
        shape = list(params.x[0])
        shape[params.axis] = sum(each[params.axis] for each in params.x)
        return tuple(shape)

    def arguments(self, params: ConcatParams) -> tuple[ArgSpec, ...]:
        axes = AXES[: len(params.x[0])]
        return tuple(ArgSpec(f"x{number}", axes, shape, params.dtype) for number, shape in enumerate(params.x))

    def outputs(self, params: ConcatParams) -> tuple[ArgSpec, ...]:
        shape = self._shape(params)
        return (sliced(ArgSpec("y", AXES[: len(shape)], shape, params.dtype), params),)

    def movement(self, params: ConcatParams) -> Movement:
        axis, in_y = params.axis, row_strides(params.slice_of or self._shape(params))
        boxes, before = [], 0
        for number, shape in enumerate(params.x):
            factors = [Factor(extent, x, y) for extent, x, y in zip(shape, row_strides(shape), in_y)]
            boxes.append(Box.of(f"x{number}", factors, y_start=before * in_y[axis]))
            before += shape[axis]
        return Movement(dtype_of(params.dtype).nbytes, tuple(boxes))

    def sources(self, params: ConcatParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        axis = params.axis
        index = list(np.unravel_index(flat_indices, self._shape(params)))
        ends = np.cumsum([shape[axis] for shape in params.x])
        numbers = np.searchsorted(ends, index[axis], side="right")
        index[axis] = index[axis] - np.concatenate([[0], ends])[numbers]
        positions = np.zeros_like(flat_indices)
        for number, shape in enumerate(params.x):
            here = numbers == number
            positions[here] = np.ravel_multi_index([along[here] for along in index], shape)
        return numbers, positions

    def label(self, params: ConcatParams) -> str:
        shapes = params.x
        if len(shapes) > 1 and len(set(shapes)) == 1:
            arrays = f"{len(shapes)} of {shown(shapes[0])}"
        else:
            arrays = " + ".join(map(shown, shapes)) if len(shapes) < 5 else f"{len(shapes)} to {shown(self._shape(params))}"
        label = f"concat {arrays} along {params.axis} {dtype_of(params.dtype).short}"
        return " ".join([label, *slice_words(params)])


CONCAT = Concat()
