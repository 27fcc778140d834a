"""reshape: the elements of x in their order, in a shape that is on the device. Reshape of ONNX; see `ops.open_shapes`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.open_shapes import ByShape, ByShapeParams
from schedsearch.ops.params import Parameter, Params, declared


@dataclass(frozen=True, eq=False, kw_only=True)
class ReshapeParams(ByShapeParams):
    """See `reshape`."""

    allowzero: bool = declared(
        Parameter("a 0 in shape is an extent of 0, not that of x; default false", {"type": "boolean", "default": False})
    )


class Reshape(ByShape[ReshapeParams]):
    params_type: ClassVar[type[Params]] = ReshapeParams
    name: ClassVar[str] = "reshape"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:ReshapeReference"
    constructor: ClassVar[str] = "schedsearch:reshape"

    def own_problems(self, params: ReshapeParams) -> Iterable[Problem]:
        if len(params.bound) != params.entries:
            yield Problem("bound", f"bound has {len(params.bound)} extents, shape {params.entries}; give as many")

    def shape_functions(self, params: ReshapeParams) -> Mapping[str, ShapeFunction]:
        allowzero = int(params.allowzero)

        def extent(axis: int, x: Sequence[int], shape: Sequence[int]) -> int:
            if shape[axis] > 0 or (shape[axis] == 0 and allowzero != 0):
                return shape[axis]
            if shape[axis] == 0:
                return x[min(axis, len(x) - 1)]
            size, rest = 1, 1
            for each in range(len(x)):
                size = size * x[each]
            for each in range(len(shape)):
                if each != axis:
                    rest = rest * (x[each] if shape[each] == 0 and allowzero == 0 else shape[each])
            return size // rest if rest > 0 else 0

        def problem(x: Sequence[int], shape: Sequence[int]) -> int:
            size, rest, open_axes = 1, 1, 0
            for each in range(len(x)):
                size = size * x[each]
            for each in range(len(shape)):
                if shape[each] < -1 or (shape[each] == 0 and allowzero == 0 and each >= len(x)):
                    return 1
                if shape[each] == -1:
                    open_axes = open_axes + 1
                elif shape[each] == 0 and allowzero == 0:
                    rest = rest * x[each]
                else:
                    rest = rest * shape[each]
            if open_axes > 1 or (open_axes == 0 and rest != size):
                return 1
            if open_axes == 1 and (size != 0 if rest == 0 else size % max(rest, 1) != 0):
                return 1
            return 0

        message = "x does not fit shape; allowed: as many elements, with at most one -1 for all that is left"
        needs = {"x": Dependence.SHAPE, "shape": Dependence.VALUE}
        return {"y": ShapeFunction(needs, extent, problem, (message,))}

    def check_inputs(self, params: ReshapeParams) -> Mapping[str, Domain]:
        """Extents of y where x fits them, otherwise all elements along the first axis that has room for them."""
        found, bound, size = super().check_inputs(params), params.bound, math.prod(params.x)
        wanted: tuple[int, ...] = bound
        if math.prod(bound) != size:
            room = next((axis for axis, most in enumerate(bound) if most >= size), 0)
            wanted = tuple(-1 if axis == room else 1 for axis in range(len(bound)))
        second = (-1, *wanted[1:]) if -1 not in wanted else wanted
        return {**found, "shape": Domain(wanted, ordered=True, second=Domain(second, ordered=True))}


RESHAPE = Reshape()
