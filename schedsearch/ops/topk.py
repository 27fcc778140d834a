"""topk: the k largest, or smallest, numbers along one axis of x and their places, as TopK of ONNX.

The best number comes first; of equal ones, that with the lower index. A NaN is larger than all numbers, and -0.0 equals 0.0.
With `dynamic` only the first `x_extents[0]` elements along the first axis of x are in use: see `ops.bounded`. If that is the
axis of the numbers and has fewer than k, all of them are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.along_axis import AlongAxis, AlongAxisParams, axis_number
from schedsearch.ops.bounded import DYNAMIC, bounded, count_argument
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, axis_problems, extents, shown, too_large
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32")


@dataclass(frozen=True, eq=False, kw_only=True)
class TopKParams(AlongAxisParams):
    """See `topk`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    k: int = declared(Parameter.count("numbers to find along the axis"))
    axis: int = declared(axis_number("the axis of the numbers, from 0, or from -1 for the last one backwards", -1))
    largest: bool = declared(
        Parameter("the largest numbers, not the smallest; default true", {"type": "boolean", "default": True})
    )
    dtype: str = declared(Parameter.choice("of x and y; default float32", DTYPES, "float32"))
    dynamic: bool = declared(DYNAMIC)


class TopK(AlongAxis[TopKParams]):
    params_type: ClassVar[type[Params]] = TopKParams
    name: ClassVar[str] = "topk"
    reference: ClassVar[str] = "schedsearch.templates.selection.reference:TopKReference"
    constructor: ClassVar[str] = "schedsearch:topk"
    counts_backwards: ClassVar[bool] = True

    def problems(self, params: TopKParams) -> Iterable[Problem]:
        found = axis_problems("axis", (params.axis,), len(params.x))
        if found:
            return found
        if params.k > (length := params.x[params.axis]):
            return [Problem("k", f"k is {params.k}, but x has {length} numbers along the axis; allowed: up to {length}")]
        return too_large("x", params.x, dtype_of(params.dtype).nbytes)

    def arguments(self, params: TopKParams) -> tuple[ArgSpec, ...]:
        x = ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype)
        return (x, count_argument(x)) if params.dynamic else (x,)

    def outputs(self, params: TopKParams) -> tuple[ArgSpec, ...]:
        shape, axis = list(params.x), params.axis
        shape[axis] = params.k
        y = ArgSpec("y", AXES[: len(shape)], tuple(shape), params.dtype)
        indices = replace(y, name="indices", dtype="int64")
        if not params.dynamic:
            return y, indices
        y, counted = bounded(y)
        return y, replace(indices, extents=y.extents), counted

    def shape_functions(self, params: TopKParams) -> Mapping[str, ShapeFunction]:
        if not params.dynamic:
            return {}
        function = ShapeFunction({"x": Dependence.SHAPE}, _extent(params.axis + len(params.x), params.k))
        return {"y": function, "indices": function}

    def equality(self, params: TopKParams) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: TopKParams) -> Mapping[str, Domain]:
        """Integers of both signs, of which many are equal."""
        row = dtype_of(params.dtype)
        found = {"x": Domain(range(0 if row.kind == "uint" else -100, 101))}
        if params.dynamic:
            found["x_extents"] = Domain(range(params.x[0] + 1))
        return found

    def timing_inputs(self, params: TopKParams) -> Mapping[str, Domain]:
        """All of a bounded array is in use."""
        return {"x_extents": Domain((params.x[0],))} if params.dynamic else {}

    def work(self, params: TopKParams) -> Work:
        nbytes = super().work(params).nbytes
        return Work(0, nbytes, least_bytes=0 if params.dynamic else nbytes)

    def label(self, params: TopKParams) -> str:
        p = params
        words = [f"topk {shown(p.x)} k {p.k}", *([f"axis {p.axis}"] if p.axis != -1 else [])]
        words += [] if p.largest else ["smallest"]
        return " ".join([*words, *(["dynamic"] if p.dynamic else []), dtype_of(p.dtype).short])


TOPK = TopK()


def _extent(along: int, k: int) -> Callable[..., int]:
    """The shape function of y and indices."""

    def extent(axis: int, x: Sequence[int]) -> int:
        return min(k, x[axis]) if axis == along else x[axis]

    return extent
