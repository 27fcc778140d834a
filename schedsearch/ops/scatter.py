"""scatter: x with some elements replaced, or combined with updates, as ScatterElements and ScatterND of ONNX.

y is x at first. Then each row of updates goes to the row of y that its indices choose (see `ops.index_map`): it replaces the
row, or is added to it, or their maximum or minimum stays. Where several rows replace the same one, the last of them stays.
Additions of floats happen in any order. An index out of range changes nothing; kernels note it where a caller asks for that,
see `ops.wrong_index`. With `dynamic` the extents of indices are read from `indices_extents`, and those of updates follow.
With `dynamic_x` the extents of x are read from `x_extents`, and y is bounded: see `ops.bounded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.bounded import bounded
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, shown, whole_numbers
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.index_map import (
    AXIS,
    DYNAMIC,
    DYNAMIC_X,
    INDEX_DTYPE,
    INDICES,
    ByIndices,
    ByIndicesParams,
    X,
    dense_shape,
    index_map,
    index_problems,
)
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

KINDS = ("elements", "tuples")
REDUCTIONS = ("none", "add", "max", "min")
REDUCED_DTYPES = ("float32", "float64", "int32", "int64")
_LARGEST = 64  # of integers to verify with: their sums are exact


@dataclass(frozen=True, eq=False, kw_only=True)
class ScatterParams(ByIndicesParams):
    """See `scatter`."""

    x: tuple[int, ...] = declared(X)
    indices: tuple[int, ...] = declared(INDICES)
    axis: int = declared(AXIS)
    by: str = declared(Parameter.choice("what an index chooses; default elements", KINDS))
    reduction: str = declared(
        Parameter.choice("what becomes of an update and what is there already; default none", REDUCTIONS)
    )
    dtype: str = declared(Parameter.choice("of x, updates and y; default float32", tuple(ALL_DTYPES), "float32"))
    index_dtype: str = declared(INDEX_DTYPE)
    dynamic: bool = declared(DYNAMIC)
    dynamic_x: bool = declared(DYNAMIC_X)


class Scatter(ByIndices[ScatterParams]):
    params_type: ClassVar[type[Params]] = ScatterParams
    name: ClassVar[str] = "scatter"
    reference: ClassVar[str] = "schedsearch.templates.indexing.reference:ScatterReference"
    constructor: ClassVar[str] = "schedsearch:scatter"
    updated: ClassVar[str | None] = "y"

    def problems(self, params: ScatterParams) -> Iterable[Problem]:
        found = list(index_problems(params))
        if params.reduction != "none" and params.dtype not in REDUCED_DTYPES:
            allowed = ", ".join(REDUCED_DTYPES)
            found.append(Problem("dtype", f"reduction {params.reduction} of {params.dtype}; allowed: {allowed}"))
        if found:
            return found
        p = params.replace(axis=params.axis % len(params.x))
        if len(dense_shape(p)) > len(AXES):
            return [Problem("indices", f"updates have {len(dense_shape(p))} axes; allowed: up to {len(AXES)}")]
        if (targets := index_map(p).targets) > MAX_INT:
            return [Problem("x", f"x has {targets} rows; allowed: up to {MAX_INT}")]
        return []

    def more_arguments(self, params: ScatterParams) -> tuple[ArgSpec, ...]:
        shape = dense_shape(params)
        return (ArgSpec("updates", AXES[: len(shape)], shape, params.dtype),)

    def outputs(self, params: ScatterParams) -> tuple[ArgSpec, ...]:
        y = ArgSpec("y", AXES[: len(params.x)], params.x, params.dtype)
        return bounded(y) if params.dynamic_x else (y,)

    def shape_functions(self, params: ScatterParams) -> Mapping[str, ShapeFunction]:
        needs = {"x": Dependence.SHAPE, "indices": Dependence.NOTHING, "updates": Dependence.NOTHING}
        return {"y": ShapeFunction(needs, _extent)} if params.dynamic_x else {}

    def check_inputs(self, params: ScatterParams) -> Mapping[str, Domain]:
        """Several updates have the same target. Sums of these numbers are exact in any order."""
        whole = whole_numbers(params.dtype) if params.reduction == "none" else Domain(range(-_LARGEST, _LARGEST + 1))
        return {"x": whole, "updates": whole, **self.index_inputs(params)}

    def work(self, params: ScatterParams) -> Work:
        x, *others = self.arguments(params)
        return Work(
            0, 2 * x.nbytes + 2 * sum(spec.nbytes for spec in others), least_bytes=0 if params.dynamic_x else x.nbytes
        )

    def label(self, params: ScatterParams) -> str:
        p = params
        words = [f"scatter {shown(p.x)} by {p.by} {shown(p.indices)}"]
        words += [f"axis {p.axis}"] if p.by == "elements" else []
        words += [p.reduction] if p.reduction != "none" else []
        words += [name.replace("_", " ") for name in ("dynamic", "dynamic_x") if p[name]]
        return " ".join([*words, dtype_of(p.dtype).short, *([] if p.index_dtype == "int64" else ["i32"])])


SCATTER = Scatter()


def _extent(axis: int, x: Sequence[int]) -> int:
    """The shape function of y."""
    return x[axis]
