"""unique: the different elements of x, or its different slices along an axis, as Unique of ONNX.

y holds each of them once, sorted or in the order in which they first occur. `indices` says where each occurs first, `counts`
how often, and `inverse` for each element of x where it is in y. Slices are compared element by element, as tuples are. A NaN
equals itself and comes last; zeros of both signs are equal. How many there are only the kernel knows: y, indices and counts
have room for all elements, and y_extents, indices_extents and counts_extents say how much is in use; see `ops.bounded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.along_axis import AlongAxis, AlongAxisParams, axis_number
from schedsearch.ops.bounded import bounded
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, axis_problems, extents, shown
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec
from schedsearch.ops.topk import DTYPES as SHORT_DTYPES
from schedsearch.typed import ParamsByName

DTYPES = (*SHORT_DTYPES, "int64")
ORDERS = ("sorted", "first")


@dataclass(frozen=True, eq=False, kw_only=True)
class UniqueParams(AlongAxisParams):
    """See `unique`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    flat: bool = declared(Parameter("elements of all axes, not slices; default true", {"type": "boolean", "default": True}))
    axis: int = declared(axis_number("the axis along which slices are compared, from 0, or from -1 backwards", 0))
    order: str = declared(Parameter.choice("of y: sorted, or as they occur first; default sorted", ORDERS))
    dtype: str = declared(Parameter.choice("of x and y; default float32", DTYPES, "float32"))


class Unique(AlongAxis[UniqueParams]):
    params_type: ClassVar[type[Params]] = UniqueParams
    name: ClassVar[str] = "unique"
    reference: ClassVar[str] = "schedsearch.templates.selection.reference:UniqueReference"
    constructor: ClassVar[str] = "schedsearch:unique"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """An array of one axis is flat."""
        found, problems = super().normalise(params)
        if not problems:
            found["flat"] = found["flat"] or len(found["x"]) == 1
        return found, problems

    def problems(self, params: UniqueParams) -> Iterable[Problem]:
        if params.flat and params.axis % len(params.x):
            yield Problem("axis", f"axis is {params.axis}, but elements of all axes are compared; give flat: false")
        yield from axis_problems("axis", (params.axis,), len(params.x))
        if (size := math.prod(params.x)) > MAX_INT:
            yield Problem("x", f"x has {size} elements; allowed: up to {MAX_INT}")

    def arguments(self, params: UniqueParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: UniqueParams) -> tuple[ArgSpec, ...]:
        _, count, _ = sliced(params)
        shape = (count,) if params.flat else params.x
        y, y_extents = bounded(ArgSpec("y", AXES[: len(shape)], shape, params.dtype))
        indices, indices_extents = bounded(ArgSpec("indices", "A", (count,), "int64"))
        counts, counts_extents = bounded(replace(indices, name="counts"))
        inverse = ArgSpec("inverse", "A", (count,), "int64")
        return y, indices, inverse, counts, y_extents, indices_extents, counts_extents

    def shape_functions(self, params: UniqueParams) -> Mapping[str, ShapeFunction]:
        needs = {"x": Dependence.SHAPE}
        whole = ShapeFunction(needs, _total if params.flat else _same, counted=True)
        along = ShapeFunction(needs, _total if params.flat else _along(params.axis), counted=True)
        return {"y": whole, "indices": along, "counts": along}

    def equality(self, params: UniqueParams) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: UniqueParams) -> Mapping[str, Domain]:
        """Few different numbers for slices, so that some are equal; more for elements."""
        most = 60 if params.flat else 1
        return {"x": Domain(range(0 if dtype_of(params.dtype).kind == "uint" else -most, most + 1))}

    def timing_inputs(self, params: UniqueParams) -> Mapping[str, Domain]:
        return {"x": Domain(range(101))}

    def label(self, params: UniqueParams) -> str:
        p = params
        words = [f"unique {shown(p.x)}", *([] if p.flat else [f"axis {p.axis}"])]
        return " ".join([*words, *([] if p.order == "sorted" else ["as they occur"]), dtype_of(p.dtype).short])


UNIQUE = Unique()


def sliced(p: UniqueParams) -> tuple[int, int, int]:
    """(outer, count, inner): x as an array of three dimensions whose second one numbers what is compared."""
    shape, axis = p.x, p.axis
    if p.flat:
        return 1, math.prod(shape), 1
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _total(axis: int, x: Sequence[int]) -> int:
    """The bound of extents: all elements."""
    size = 1
    for place in range(len(x)):
        size = size * x[place]
    return size


def _same(axis: int, x: Sequence[int]) -> int:
    return x[axis]


def _along(chosen: int) -> Callable[..., int]:
    def extent(axis: int, x: Sequence[int]) -> int:
        return x[chosen]

    return extent
