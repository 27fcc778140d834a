"""expand: y[i, j ...] = x[i, j ...], where x is repeated along axes of extent 1. Expand of ONNX; see `ops.open_shapes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.open_shapes import ByShape, ByShapeParams
from schedsearch.ops.params import Params


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpandParams(ByShapeParams):
    """See `expand`."""


class Expand(ByShape[ExpandParams]):
    params_type: ClassVar[type[Params]] = ExpandParams
    name: ClassVar[str] = "expand"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:ExpandReference"
    constructor: ClassVar[str] = "schedsearch:expand"

    def own_problems(self, params: ExpandParams) -> Iterable[Problem]:
        rank, bound = max(len(params.x), params.entries), params.bound
        if len(bound) != rank:
            yield Problem("bound", f"bound has {len(bound)} extents; y has {rank}, the more of x's and shape's")

    def shape_functions(self, params: ExpandParams) -> Mapping[str, ShapeFunction]:
        rank, of_x, of_shape = len(params.bound), len(params.x), params.entries
        skip_x, skip_shape = rank - of_x, rank - of_shape

        def extent(axis: int, x: Sequence[int], shape: Sequence[int]) -> int:
            wanted = shape[axis - skip_shape] if axis >= skip_shape else 1
            mine = x[axis - skip_x] if axis >= skip_x else 1
            return wanted if mine == 1 else mine

        def problem(x: Sequence[int], shape: Sequence[int]) -> int:
            for axis in range(rank):
                mine = x[axis - skip_x] if axis >= skip_x else 1
                wanted = shape[axis - skip_shape] if axis >= skip_shape else 1
                if wanted < 0:
                    return 2
                if mine != 1 and wanted != 1 and mine != wanted:
                    return 1
            return 0

        messages = (
            "x cannot be expanded to shape; allowed: from the last extent on, equal ones, or 1 on either side",
            "shape has a negative number; allowed: 0 and above",
        )
        needs = {"x": Dependence.SHAPE, "shape": Dependence.VALUE}
        return {"y": ShapeFunction(needs, extent, problem, messages)}

    def check_inputs(self, params: ExpandParams) -> Mapping[str, Domain]:
        wanted = params.bound[-params.entries :]
        return {**super().check_inputs(params), "shape": Domain(wanted, ordered=True)}


EXPAND = Expand()
