"""What the operators that only move data have in common: exact results, checks of all bits, and work in bytes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import Movement
from schedsearch.ops.params import MAX_INT, Parameter, Params
from schedsearch.ops.slices import slice_problems, without_own_shape
from schedsearch.typed import Array, ParamsByName

ELEMENT_BYTES = (1, 2, 4, 8)
DTYPES = tuple(name for name, row in ALL_DTYPES.items() if row.nbytes in ELEMENT_BYTES and name != "float64")
"""Nothing computes in float64."""
AXES = "ABCDEFGH"  # names of the dimensions of arrays that are not images
DTYPE = Parameter.choice("of every array: any of 1, 2 or 4 bytes, or int64; default float16", DTYPES)
_WIDEST_DATA = 1 << 31


class MovementParams(Params):
    dtype: str
    slice_of: tuple[int, ...]


M = TypeVar("M", bound=MovementParams)


class DataMovement(Op[M]):
    """An operator whose output `y` holds elements of its arguments as they are, bit for bit."""

    reference: ClassVar[str] = "schedsearch.templates.data_movement.reference:DataMovementReference"

    @abstractmethod
    def movement(self, params: M) -> Movement:
        """Which element of an argument becomes which element of y, as kernels need it. If y is a slice, its strides are
        those of the larger array."""

    @abstractmethod
    def sources(self, params: M, flat_indices: Array) -> tuple[Array, Array]:
        """The definition of the operator for single elements; it shares nothing with `movement`.

        Args:
            flat_indices: int64 (p,), positions in y.

        Returns:
            Two int64 arrays of shape (p,): the number of the argument that each element comes from, -1 for the fill; and
            the element's position in it.
        """

    def fill(self, params: M) -> float:
        """The value of elements that come from no argument."""
        return 0.0

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """`slice_of` is empty if it is the shape of y."""
        found, problems = super().normalise(params)
        if not problems:
            y = self.outputs(self.typed(found | {"slice_of": ()}))[0]
            problems = slice_problems(y, found["slice_of"])
            found["slice_of"] = without_own_shape(y, found["slice_of"])
        return found, problems

    def equality(self, params: M) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: M) -> Mapping[str, Domain]:
        """All integers that the format holds exactly, so that every byte of an element counts."""
        return {argument.name: whole_numbers(argument.dtype) for argument in self.arguments(params)}


def whole_numbers(dtype: str) -> Domain:
    """All integers that a format holds exactly."""
    row = dtype_of(dtype)
    limit = min(row.exact_integers, _WIDEST_DATA)
    lowest = -limit if row.is_float else max(int(row.lowest), -limit)
    return Domain(range(lowest, limit + 1))


def extents(doc: str) -> Parameter:
    """A list of extents, one for each dimension of an array."""
    one = {"type": "integer", "minimum": 1, "maximum": MAX_INT}
    return Parameter(doc, {"type": "array", "items": one, "minItems": 1, "maxItems": len(AXES)}, size=True)


def axis_numbers(doc: str, default: Sequence[int] | None = None) -> Parameter:
    """A list of dimensions, counted from 0, or from -1 for the last one backwards."""
    one = {"type": "integer", "minimum": -len(AXES), "maximum": len(AXES) - 1}
    schema: ParamsByName = {"type": "array", "items": one, "maxItems": len(AXES)}
    return Parameter(doc, schema if default is None else {**schema, "default": list(default)})


def axis_problems(name: str, axes: Sequence[int], rank: int) -> list[Problem]:
    """Axes that an array of `rank` dimensions does not have, or that are named twice."""
    outside = [axis for axis in axes if not -rank <= axis < rank]
    if outside:
        allowed = f"allowed: 0 to {rank - 1}, or -{rank} to -1"
        return [Problem(name, f"{name} has {outside[0]}, but x has {rank} dimensions; {allowed}")]
    counted = [axis % rank for axis in axes]
    twice = [axis for place, axis in enumerate(counted) if axis in counted[:place]]
    return [Problem(name, f"{name} names axis {twice[0]} twice; give each axis once")] if twice else []


def too_large(name: str, shape: Sequence[int], element_bytes: int) -> list[Problem]:
    """Arrays whose bytes a 64-bit address cannot count."""
    if math.prod(shape) * element_bytes < 2**63:
        return []
    text = " x ".join(map(str, shape))
    return [Problem(name, f"{name} makes an array of {text} elements, which is 2**63 bytes or more; give smaller extents")]


def shown(shape: Sequence[int]) -> str:
    """Extents for labels, e.g. 2x3x4."""
    return "x".join(map(str, shape))
