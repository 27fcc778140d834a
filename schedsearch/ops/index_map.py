"""Where the rows lie that indices choose: what gather and scatter have in common.

The chosen elements form rows of neighbours. Row r of the dense array (y of gather, updates of scatter) stands for the row

    base(r) + sum over j of index[position(r) * depth + j] * strides[j]

of the indexed array, where base and position are sums of (r // divisor % modulus * factor). A negative index counts from the
end of its extent. An index is out of range if it is outside of [-extent, extent).

Extents may be known at run time only: those of indices with `dynamic`, those of x with `dynamic_x`. Arrays then have the
strides of their bounds, which are the parameters `x` and `indices`. A row is in use if its place in indices is within the
extents of these. The length of a tuple is always that of the parameter.

Indices choose `slices` along an axis (Gather of ONNX), single `elements` along an axis (GatherElements, ScatterElements), or
are `tuples` of the leading indices (GatherND, ScatterND).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.along_axis import AlongAxis, AlongAxisParams, axis_number
from schedsearch.ops.bounded import extents_argument
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, axis_problems, extents, too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter
from schedsearch.ops.specs import ArgSpec
from schedsearch.ops.wrong_index import out_of_range

INDEX_DTYPES = ("int64", "int32")
AXIS = axis_number("the axis that indices count along, from 0, or from -1 backwards", 0)
BATCH_DIMS = Parameter(
    "leading axes that x and indices have in common; of tuples only; default 0",
    {"type": "integer", "minimum": 0, "maximum": len(AXES) - 1, "default": 0},
)
X = extents(f"extents of x, 1 to {len(AXES)} of them")
INDICES = extents("extents of indices; of tuples, the last one is the length of a tuple")
INDEX_DTYPE = Parameter.choice("of indices; default int64", INDEX_DTYPES)
_OPEN = {"type": "boolean", "default": False}
DYNAMIC = Parameter("the extents of indices are read from memory at run time; default false", _OPEN)
DYNAMIC_X = Parameter("the extents of x are read from memory at run time; default false", _OPEN)
Term = tuple[int, int, int]  # (divisor, modulus, factor)


class ByIndicesParams(AlongAxisParams):
    indices: tuple[int, ...]
    by: str
    index_dtype: str
    dynamic: bool
    dynamic_x: bool
    batch_dims: int = 0
    reduction: str = "none"


@dataclass(frozen=True)
class IndexMap:
    """Attributes:
    rows: of the dense array.
    run: elements of a row.
    targets: rows of the indexed array.
    base, position: terms; see the module.
    extents: those that the indices of a row count along.
    axes: the axes of x that they count along.
    strides: rows between neighbours along each of `extents`.
    places: the extents of indices, without that of a tuple: a position counts along them.
    """

    rows: int
    run: int
    targets: int
    base: tuple[Term, ...]
    position: tuple[Term, ...]
    extents: tuple[int, ...]
    axes: tuple[int, ...]
    strides: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.extents)


def index_map(p: ByIndicesParams) -> IndexMap:
    """The map of a workload's parameters. Scatter has no batch_dims."""
    x, indices = p.x, p.indices
    if p.by == "tuples":
        batch, depth = p.batch_dims, indices[-1]
        batches, chosen = math.prod(x[:batch]), x[batch : batch + depth]
        rows = math.prod(indices[:-1])
        of_batch, targets = rows // batches, math.prod(chosen)
        strides = tuple(math.prod(chosen[place + 1 :]) for place in range(depth))
        run = math.prod(x[batch + depth :])
        base = ((of_batch, batches, targets),) if batches > 1 else ()
        axes = tuple(range(batch, batch + depth))
        return IndexMap(rows, run, batches * targets, base, ((1, rows, 1),), chosen, axes, strides, indices[:-1])
    axis = p.axis
    if p.by == "slices":
        outer, extent, count = math.prod(x[:axis]), x[axis], math.prod(indices)
        base = ((count, outer, extent),) if outer > 1 else ()
        rows, run = outer * count, math.prod(x[axis + 1 :])
        return IndexMap(rows, run, outer * extent, base, ((1, count, 1),), (extent,), (axis,), (1,), indices)
    steps = [math.prod(x[place + 1 :]) for place in range(len(x))]
    terms = tuple(
        (math.prod(indices[place + 1 :]), extent, steps[place])
        for place, extent in enumerate(indices)
        if place != axis and extent > 1
    )
    rows = math.prod(indices)
    return IndexMap(rows, 1, math.prod(x), terms, ((1, rows, 1),), (x[axis],), (axis,), (steps[axis],), indices)


def index_problems(p: ByIndicesParams) -> Iterable[Problem]:
    """What is wrong with x, indices, axis and batch_dims."""
    x, indices, by, batch = p.x, p.indices, p.by, p.batch_dims
    if by != "tuples" and batch:
        yield Problem("batch_dims", f"batch_dims is {batch}, but indices are {by}; allowed: 0, or tuples")
    if by == "tuples":
        depth = indices[-1]
        if p.axis:
            yield Problem("axis", f"axis is {p.axis}, but indices are tuples of the leading axes; leave it out")
        if batch >= min(len(x), len(indices)) or x[:batch] != indices[:batch]:
            yield Problem("batch_dims", f"x {x} and indices {indices} do not have {batch} leading axes in common")
        elif batch + depth > len(x):
            allowed = f"allowed: up to {len(x) - batch}"
            yield Problem("indices", f"indices have tuples of {depth}, but x has {len(x)} axes; {allowed}")
    else:
        yield from axis_problems("axis", (p.axis,), len(x))
    if by == "elements":
        axis = p.axis % len(x)
        larger = [place for place, (few, all_) in enumerate(zip(indices, x)) if few > all_ and place != axis]
        if len(indices) != len(x) or larger:
            yield Problem(
                "indices", f"indices {indices} do not fit x {x}; allowed: as many axes, none longer but axis {axis}"
            )
    yield from too_large("x", x, dtype_of(p.dtype).nbytes)
    if math.prod(indices) > MAX_INT:
        yield Problem("indices", f"indices has {math.prod(indices)} elements; allowed: up to {MAX_INT}")


def dense_shape(p: ByIndicesParams) -> tuple[int, ...]:
    """The extents of gather's y, or of scatter's updates."""
    x, indices = p.x, p.indices
    if p.by == "slices":
        return (*x[: p.axis], *indices, *x[p.axis + 1 :])
    if p.by == "elements":
        return tuple(indices)
    return (*indices[:-1], *x[p.batch_dims + indices[-1] :]) or (1,)


Q = TypeVar("Q", bound=ByIndicesParams)


class ByIndices(AlongAxis[Q]):
    """gather and scatter. Their last arguments are the extents that are known at run time only.

    Attributes:
        updated: the output that may have the memory of x.
    """

    updated: ClassVar[str | None] = None

    def arguments(self, params: Q) -> tuple[ArgSpec, ...]:
        shape = params.indices
        x = ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype, aliases=self.updated)
        shortest = min(index_map(params).extents)
        indices = ArgSpec("indices", AXES[: len(shape)], shape, params.index_dtype, role="index", below=shortest)
        is_open = {"indices": params.dynamic, "x": params.dynamic_x}
        return (
            x, indices, *self.more_arguments(params),
            *(extents_argument(each) for each in (indices, x) if is_open[each.name]),
        )  # fmt: skip

    def more_arguments(self, params: Q) -> tuple[ArgSpec, ...]:
        """Those behind indices."""
        return ()

    def index_inputs(self, params: Q) -> Mapping[str, Domain]:
        """Indices of both signs, so that a kernel that does not count from the end is found, and extents below the bounds.
        Some indices lie between the extent and the bound. Then other extents, those of indices at their bounds."""
        shortest = min(index_map(params).extents)
        found = {"indices": Domain(range(-shortest, shortest))}
        if params.dynamic:
            found["indices_extents"] = replace(_fewer(params.indices, 4), second=_all(params.indices))
        if params.dynamic_x:
            shared = _shared_axes(params)
            first = _fewer(params.x, 4, () if params.dynamic else shared)
            found["x_extents"] = replace(first, second=_fewer(params.x, 2, shared))
        return found

    def timing_inputs(self, params: Q) -> Mapping[str, Domain]:
        """All of a bounded array is in use."""
        found = {"indices_extents": _all(params.indices)} if params.dynamic else {}
        return found | ({"x_extents": _all(params.x)} if params.dynamic_x else {})

    def wrong_index(self, params: Q, place: int, index: int, names: Mapping[str, str]) -> str:
        where: list[int] = []
        for extent in reversed(params.indices):
            place, at = divmod(place, extent)
            where.insert(0, at)
        axis = params.batch_dims + where[-1] if params.by == "tuples" else params.axis
        return out_of_range(names["indices"], where, index, axis, names["x"], params.x[axis], is_bound=params.dynamic_x)

    def equality(self, params: Q) -> Literal["exact", "rounded"]:
        return "exact"


def _all(shape: Sequence[int]) -> Domain:
    return Domain(tuple(shape), ordered=True)


def _fewer(shape: Sequence[int], share: int, whole: Iterable[int] = ()) -> Domain:
    """Extents that lack one and a share of the bounds, but are at least 1; along the axes `whole` they are the bounds."""
    extents = (n if axis in whole else max(1, n - n // share - 1) for axis, n in enumerate(shape))
    return Domain(tuple(extents), ordered=True)


def _shared_axes(p: ByIndicesParams) -> tuple[int, ...]:
    """The axes of x that are axes of indices, too: x must not be shorter along them."""
    if p.by == "tuples":
        return tuple(range(p.batch_dims))
    return tuple(axis for axis in range(len(p.x)) if axis != p.axis) if p.by == "elements" else ()
