"""transpose: y holds the elements of x with its dimensions in another order."""

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
from schedsearch.ops.movement import Movement, permuted, row_strides
from schedsearch.ops.params import Params, declared
from schedsearch.ops.slices import SLICE_OF, slice_words, sliced
from schedsearch.ops.specs import ArgSpec
from schedsearch.typed import Array, ParamsByName


@dataclass(frozen=True, eq=False, kw_only=True)
class TransposeParams(MovementParams):
    """See `transpose`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    permutation: tuple[int, ...] = declared(axis_numbers("dimension of x that becomes dimension 0, 1, ... of y; each once"))
    dtype: str = declared(DTYPE)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


class Transpose(DataMovement[TransposeParams]):
    """As NumPy's `transpose` and ONNX's Transpose."""

    params_type: ClassVar[type[Params]] = TransposeParams
    name: ClassVar[str] = "transpose"
    constructor: ClassVar[str] = "schedsearch:transpose"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Counts the dimensions of `permutation` from 0."""
        found, problems = super().normalise(params)
        if not problems:
            found["permutation"] = tuple(axis % len(found["x"]) for axis in found["permutation"])
        return found, problems

    def problems(self, params: TransposeParams) -> Iterable[Problem]:
        rank, order = len(params.x), params.permutation
        if len(order) != rank:
            return [
                Problem(
                    "permutation",
                    f"permutation has {len(order)} dimensions, x has {rank}; give each of 0 to {rank - 1} once",
                )
            ]
        return axis_problems("permutation", order, rank) or too_large("x", params.x, dtype_of(params.dtype).nbytes)

    def arguments(self, params: TransposeParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: TransposeParams) -> tuple[ArgSpec, ...]:
        axes = "".join(AXES[axis] for axis in params.permutation)
        shape = tuple(params.x[axis] for axis in params.permutation)
        return (sliced(ArgSpec("y", axes, shape, params.dtype), params),)

    def movement(self, params: TransposeParams) -> Movement:
        (y,) = self.outputs(params)
        box = permuted("x", params.x, params.permutation, row_strides(y.slice_of or y.shape))
        return Movement(dtype_of(params.dtype).nbytes, (box,))

    def sources(self, params: TransposeParams, flat_indices: Array) -> tuple[Array, Array]:
        import numpy as np

        index = np.unravel_index(flat_indices, self.outputs(params)[0].shape)
        in_x = [index[params.permutation.index(axis)] for axis in range(len(params.x))]
        return np.zeros_like(flat_indices), np.ravel_multi_index(in_x, params.x)

    def label(self, params: TransposeParams) -> str:
        order = ",".join(map(str, params.permutation))
        words = [f"transpose {shown(params.x)} by {order} {dtype_of(params.dtype).short}", *slice_words(params)]
        return " ".join(words)


TRANSPOSE = Transpose()
