"""gather: elements of x that indices choose, as Gather, GatherElements and GatherND of ONNX; see `ops.index_map`.

    slices     y[a, m, b] = x[a, indices[m], b], where a, m and b stand for several axes each
    elements   y[a, m, b] = x[a, indices[a, m, b], b]
    tuples     y[a, m, b] = x[a, indices[a, m, 0], indices[a, m, 1] ..., b]

An index out of range gives zeros, and nothing outside of x is read; kernels note it where a caller asks for that, see
`ops.wrong_index`. With `dynamic` the extents of indices are read from `indices_extents`, with `dynamic_x` those of x from
`x_extents`; y is bounded then, see `ops.bounded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.bounded import bounded
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, shown, too_large, whole_numbers
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.index_map import (
    AXIS,
    BATCH_DIMS,
    DYNAMIC,
    DYNAMIC_X,
    INDEX_DTYPE,
    INDICES,
    ByIndices,
    ByIndicesParams,
    X,
    dense_shape,
    index_problems,
)
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

KINDS = ("slices", "elements", "tuples")


@dataclass(frozen=True, eq=False, kw_only=True)
class GatherParams(ByIndicesParams):
    """See `gather`."""

    x: tuple[int, ...] = declared(X)
    indices: tuple[int, ...] = declared(INDICES)
    axis: int = declared(AXIS)
    by: str = declared(Parameter.choice("what an index chooses; default slices", KINDS))
    batch_dims: int = declared(BATCH_DIMS)
    dtype: str = declared(Parameter.choice("of x and y; default float16", tuple(ALL_DTYPES), "float16"))
    index_dtype: str = declared(INDEX_DTYPE)
    dynamic: bool = declared(DYNAMIC)
    dynamic_x: bool = declared(DYNAMIC_X)


class Gather(ByIndices[GatherParams]):
    params_type: ClassVar[type[Params]] = GatherParams
    name: ClassVar[str] = "gather"
    reference: ClassVar[str] = "schedsearch.templates.indexing.reference:GatherReference"
    constructor: ClassVar[str] = "schedsearch:gather"

    def problems(self, params: GatherParams) -> Iterable[Problem]:
        found = list(index_problems(params))
        if found:
            return found
        shape = dense_shape(params.replace(axis=params.axis % len(params.x)))
        if len(shape) > len(AXES):
            return [Problem("indices", f"y has {len(shape)} axes; allowed: up to {len(AXES)}")]
        return too_large("indices", shape, dtype_of(params.dtype).nbytes)

    def outputs(self, params: GatherParams) -> tuple[ArgSpec, ...]:
        shape = dense_shape(params)
        y = ArgSpec("y", AXES[: len(shape)], shape, params.dtype)
        return bounded(y) if _is_open(params) else (y,)

    def shape_functions(self, params: GatherParams) -> Mapping[str, ShapeFunction]:
        if not _is_open(params):
            return {}
        needs = {"x": Dependence.SHAPE, "indices": Dependence.SHAPE}
        return {"y": ShapeFunction(needs, _extent(params))}

    def check_inputs(self, params: GatherParams) -> Mapping[str, Domain]:
        return {"x": whole_numbers(params.dtype), **self.index_inputs(params)}

    def work(self, params: GatherParams) -> Work:
        """Rows that no index chooses need not be read; at worst every index chooses the same one."""
        read = sum(spec.nbytes for spec in self.arguments(params)[1:])
        written = sum(spec.nbytes for spec in self.outputs(params))
        return Work(0, read + 2 * written, least_bytes=0 if _is_open(params) else read + written)

    def label(self, params: GatherParams) -> str:
        p = params
        where = f"axis {p.axis}" if p.by != "tuples" else f"batch_dims {p.batch_dims}"
        words = [f"gather {shown(p.x)} by {p.by} {shown(p.indices)}", where]
        words += [name.replace("_", " ") for name in ("dynamic", "dynamic_x") if p[name]]
        return " ".join([*words, dtype_of(p.dtype).short, *([] if p.index_dtype == "int64" else ["i32"])])


GATHER = Gather()


def _is_open(p: GatherParams) -> bool:
    """Whether extents of y are known at run time only."""
    return bool(p.dynamic or p.dynamic_x)


def _extent(p: GatherParams) -> Callable[..., int]:
    """The shape function of y."""
    if p.by == "tuples":
        leading, skipped = len(p.indices) - 1, p.batch_dims + p.indices[-1]
        scalar = len(dense_shape(p)) > leading and skipped == len(p.x)
        before = leading
    else:
        leading, skipped, scalar = len(p.indices), p.axis + 1, False
        before = p.axis

    def of_slices(axis: int, x: Sequence[int], indices: Sequence[int]) -> int:
        if axis < before:
            return x[axis]
        return indices[axis - before] if axis < before + leading else x[axis - before - leading + skipped]

    def of_tuples(axis: int, x: Sequence[int], indices: Sequence[int]) -> int:
        if scalar:
            return 1
        return indices[axis] if axis < leading else x[axis - leading + skipped]

    def of_elements(axis: int, x: Sequence[int], indices: Sequence[int]) -> int:
        return indices[axis]

    return {"slices": of_slices, "tuples": of_tuples, "elements": of_elements}[p.by]
