"""dyn_concat: x0, x1 ... one after the other along an axis. Concat of ONNX; see `ops.open_shapes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.along_axis import axis_number
from schedsearch.ops.data_movement import AXES, axis_problems
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.open_shapes import DTYPES, DYNAMIC, Arranged, ArrangedParams
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec
from schedsearch.typed import ParamsByName

MOST_PARTS = 4
_EXTENTS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "minItems": 1}
_PARTS = {"type": "array", "items": _EXTENTS, "minItems": 2, "maxItems": MOST_PARTS}


@dataclass(frozen=True, eq=False, kw_only=True)
class DynConcatParams(ArrangedParams):
    """See `dyn_concat`."""

    x: tuple[tuple[int, ...], ...] = declared(
        Parameter(f"extents of each of 2 to {MOST_PARTS} arrays; upper bounds with dynamic", _PARTS, size=True)
    )
    axis: int = declared(axis_number("the axis along which they follow one another, from 0, or from -1 backwards", 0))
    dtype: str = declared(Parameter.choice("of all; default float16", DTYPES, "float16"))
    dynamic: tuple[str, ...] = declared(DYNAMIC)


class DynConcat(Arranged[DynConcatParams]):
    params_type: ClassVar[type[Params]] = DynConcatParams
    name: ClassVar[str] = "dyn_concat"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:DynConcatReference"
    constructor: ClassVar[str] = "schedsearch:dyn_concat"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        found, problems = super().normalise(params)
        if not problems:
            found["axis"] %= len(found["x"][0])
        return found, problems

    def own_problems(self, params: DynConcatParams) -> Iterable[Problem]:
        first = params.x[0]
        if any(len(shape) != len(first) for shape in params.x) or len(first) > len(AXES):
            return [Problem("x", f"x has arrays of different rank; allowed: equal ones of up to {len(AXES)} axes")]
        return axis_problems("axis", (params.axis,), len(first))

    def arrays(self, params: DynConcatParams) -> tuple[ArgSpec, ...]:
        return tuple(ArgSpec(f"x{number}", AXES[: len(shape)], shape, params.dtype) for number, shape in enumerate(params.x))

    def result(self, params: DynConcatParams) -> ArgSpec:
        axis, shape = params.axis % len(params.x[0]), [max(extents) for extents in zip(*params.x)]
        shape[axis] = sum(each[axis] for each in params.x)
        return ArgSpec("y", AXES[: len(shape)], tuple(shape), params.dtype)

    def shape_functions(self, params: DynConcatParams) -> Mapping[str, ShapeFunction]:
        along, rank = params.axis % len(params.x[0]), len(params.x[0])

        def differ(x: Sequence[int], y: Sequence[int]) -> int:
            for axis in range(rank):
                if axis != along and x[axis] != y[axis]:
                    return 1
            return 0

        def two(axis: int, x0: Sequence[int], x1: Sequence[int]) -> int:
            return x0[axis] + x1[axis] if axis == along else x0[axis]

        def wrong_two(x0: Sequence[int], x1: Sequence[int]) -> int:
            return differ(x0, x1)

        def three(axis: int, x0: Sequence[int], x1: Sequence[int], x2: Sequence[int]) -> int:
            return x0[axis] + x1[axis] + x2[axis] if axis == along else x0[axis]

        def wrong_three(x0: Sequence[int], x1: Sequence[int], x2: Sequence[int]) -> int:
            return max(differ(x0, x1), differ(x0, x2))

        def four(axis: int, x0: Sequence[int], x1: Sequence[int], x2: Sequence[int], x3: Sequence[int]) -> int:
            return x0[axis] + x1[axis] + x2[axis] + x3[axis] if axis == along else x0[axis]

        def wrong_four(x0: Sequence[int], x1: Sequence[int], x2: Sequence[int], x3: Sequence[int]) -> int:
            return max(differ(x0, x1), max(differ(x0, x2), differ(x0, x3)))

        extent, problem = ((two, wrong_two), (three, wrong_three), (four, wrong_four))[len(params.x) - 2]
        message = "the arrays do not fit one another; allowed: equal extents along all other axes"
        needs = {spec.name: Dependence.SHAPE for spec in self.arrays(params)}
        return {"y": ShapeFunction(needs, extent, problem, (message,))}


DYN_CONCAT = DynConcat()
