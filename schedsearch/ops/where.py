"""where: y[i, j ...] = a[i, j ...] if c[i, j ...] else b[i, j ...], each repeated along axes of extent 1. Where of ONNX; see
`ops.open_shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.open_shapes import DTYPES, DYNAMIC, Arranged, ArrangedParams
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class WhereParams(ArrangedParams):
    """See `where`."""

    c: tuple[int, ...] = declared(extents("extents of c; upper bounds with dynamic"))
    a: tuple[int, ...] = declared(extents("extents of a; upper bounds with dynamic"))
    b: tuple[int, ...] = declared(extents("extents of b; upper bounds with dynamic"))
    dtype: str = declared(Parameter.choice("of a, b and y; default float16", DTYPES, "float16"))
    dynamic: tuple[str, ...] = declared(DYNAMIC)


class Where(Arranged[WhereParams]):
    params_type: ClassVar[type[Params]] = WhereParams
    name: ClassVar[str] = "where"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:WhereReference"
    constructor: ClassVar[str] = "schedsearch:where"

    def own_problems(self, params: WhereParams) -> Iterable[Problem]:
        if _broadcast(*(params[name] for name in "cab")) is None:
            shapes = ", ".join(shown(params[name]) for name in "cab")
            yield Problem("c", f"c, a and b have the extents {shapes}; allowed: from the last one on, equal ones or 1")

    def arrays(self, params: WhereParams) -> tuple[ArgSpec, ...]:
        dtypes = ("uint8", params.dtype, params.dtype)
        return tuple(ArgSpec(name, AXES[: len(params[name])], params[name], dtype) for name, dtype in zip("cab", dtypes))

    def result(self, params: WhereParams) -> ArgSpec:
        shape = _broadcast(*(params[name] for name in "cab")) or ()
        return ArgSpec("y", AXES[: len(shape)], shape, params.dtype)

    def shape_functions(self, params: WhereParams) -> Mapping[str, ShapeFunction]:
        rank = len(self.result(params).shape)
        skip_c, skip_a, skip_b = (rank - len(params[name]) for name in "cab")

        def extent(axis: int, c: Sequence[int], a: Sequence[int], b: Sequence[int]) -> int:
            of_c = c[axis - skip_c] if axis >= skip_c else 1
            of_a = a[axis - skip_a] if axis >= skip_a else 1
            of_b = b[axis - skip_b] if axis >= skip_b else 1
            if of_c != 1:
                return of_c
            return of_a if of_a != 1 else of_b

        def problem(c: Sequence[int], a: Sequence[int], b: Sequence[int]) -> int:
            for axis in range(rank):
                of_c = c[axis - skip_c] if axis >= skip_c else 1
                of_a = a[axis - skip_a] if axis >= skip_a else 1
                of_b = b[axis - skip_b] if axis >= skip_b else 1
                if (of_c != 1 and of_a != 1 and of_c != of_a) or (of_c != 1 and of_b != 1 and of_c != of_b):
                    return 1
                if of_a != 1 and of_b != 1 and of_a != of_b:
                    return 1
            return 0

        message = "c, a and b do not fit one another; allowed: from the last extent on, equal ones or 1"
        return {"y": ShapeFunction(dict.fromkeys("cab", Dependence.SHAPE), extent, problem, (message,))}

    def check_inputs(self, params: WhereParams) -> Mapping[str, Domain]:
        return {**super().check_inputs(params), "c": Domain(range(2))}


WHERE = Where()


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The extents of an array that all broadcast to."""
    found: list[int] = []
    for back in range(1, max(map(len, shapes)) + 1):
        several = {shape[-back] for shape in shapes if len(shape) >= back} - {1}
        if len(several) > 1:
            return None
        found.append(several.pop() if several else 1)
    return tuple(reversed(found))
