"""nonzero: the places of the elements of x that are not zero, in their order, as NonZero of ONNX.

y has a row for each axis of x and a column for each such element. How many there are only the kernel knows: y has room for
all elements of x, and `y_extents` says how much of it is in use; see `ops.bounded`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import bounded
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

DTYPES = tuple(name for name in ALL_DTYPES if not name.startswith("float8"))


@dataclass(frozen=True, eq=False, kw_only=True)
class NonZeroParams(Params):
    """See `nonzero`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    dtype: str = declared(Parameter.choice("of x; uint8 stands for bool; default float32", DTYPES, "float32"))


class NonZero(Op[NonZeroParams]):
    params_type: ClassVar[type[Params]] = NonZeroParams
    name: ClassVar[str] = "nonzero"
    reference: ClassVar[str] = "schedsearch.templates.selection.reference:NonZeroReference"
    constructor: ClassVar[str] = "schedsearch:nonzero"

    def problems(self, params: NonZeroParams) -> Iterable[Problem]:
        if (size := math.prod(params.x)) > MAX_INT:
            yield Problem("x", f"x has {size} elements; allowed: up to {MAX_INT}")

    def arguments(self, params: NonZeroParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype),)

    def outputs(self, params: NonZeroParams) -> tuple[ArgSpec, ...]:
        return bounded(ArgSpec("y", "AB", (len(params.x), math.prod(params.x)), "int64"))

    def shape_functions(self, params: NonZeroParams) -> Mapping[str, ShapeFunction]:
        return {"y": ShapeFunction({"x": Dependence.SHAPE}, _extent, counted=True)}

    def check_inputs(self, params: NonZeroParams) -> Mapping[str, Domain]:
        """Most are zero; then most are not."""
        return {"x": Domain((1, 2, 3, 100), density=0.3, second=Domain((1, 2, 3, 100), density=0.9))}

    def timing_inputs(self, params: NonZeroParams) -> Mapping[str, Domain]:
        """A tenth is not zero."""
        return {"x": Domain((1,), density=0.1)}

    def work(self, params: NonZeroParams) -> Work:
        """The bytes of x; how much is written depends on them."""
        (x,) = self.arguments(params)
        return Work(0, x.nbytes, least_bytes=x.nbytes)

    def label(self, params: NonZeroParams) -> str:
        return f"nonzero {shown(params.x)} {dtype_of(params.dtype).short}"


NONZERO = NonZero()


def _extent(axis: int, x: Sequence[int]) -> int:
    """The bound of y's extents."""
    size = 1
    for place in range(len(x)):
        size = size * x[place]
    return len(x) if axis == 0 else size
