"""arange: y[i] = start + i * delta, up to limit, of numbers on the device. Range of ONNX; see `ops.open_shapes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.open_shapes import Arranged, ArrangedParams
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class ArangeParams(ArrangedParams):
    """See `arange`."""

    bound: int = declared(Parameter.count("numbers at most"))
    dtype: str = declared(Parameter.choice("of the arguments and y; default int64", ("int64", "int32", "float32"), "int64"))


class Arange(Arranged[ArangeParams]):
    params_type: ClassVar[type[Params]] = ArangeParams
    name: ClassVar[str] = "arange"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:ArangeReference"
    constructor: ClassVar[str] = "schedsearch:arange"

    def arrays(self, params: ArangeParams) -> tuple[ArgSpec, ...]:
        return tuple(ArgSpec(name, "A", (1,), params.dtype) for name in ("start", "limit", "delta"))

    def result(self, params: ArangeParams) -> ArgSpec:
        return ArgSpec("y", "A", (params.bound,), params.dtype)

    def shape_functions(self, params: ArangeParams) -> Mapping[str, ShapeFunction]:
        names = ("start", "limit", "delta")
        if dtype_of(params.dtype).is_float:  # only the kernel can count by floats
            return {"y": ShapeFunction(dict.fromkeys(names, Dependence.NOTHING), _at_most(params.bound), counted=True)}
        return {"y": ShapeFunction(dict.fromkeys(names, Dependence.VALUE), _steps, _problem, _MESSAGES)}

    def check_inputs(self, params: ArangeParams) -> Mapping[str, Domain]:
        """As many numbers as fit; then fewer, backwards."""
        most = min(params.bound, 1 << 20)
        return {
            "start": Domain((3,), ordered=True, second=Domain((2,), ordered=True)),
            "limit": Domain((3 + most,), ordered=True, second=Domain((2 - most // 2,), ordered=True)),
            "delta": Domain((1,), ordered=True, second=Domain((-1,), ordered=True)),
        }


ARANGE = Arange()


_MAX = 2**63 - 1
_MESSAGES = (
    "delta is 0; allowed: positive numbers, or negative ones to count backwards",
    "start and limit are too far apart; allowed: less than 2**63",
)


def _steps(axis: int, start: Sequence[int], limit: Sequence[int], delta: Sequence[int]) -> int:
    step = delta[0]
    low, high = (start[0], limit[0]) if step > 0 else (limit[0], start[0])
    if high <= low:
        return 0
    size = step if step > 0 else -max(step, -_MAX)
    distance = high - low
    return distance // size + (1 if distance % size else 0)


def _problem(start: Sequence[int], limit: Sequence[int], delta: Sequence[int]) -> int:
    if delta[0] == 0:
        return 1
    low, high = min(start[0], limit[0]), max(start[0], limit[0])
    forward = (delta[0] > 0) == (start[0] < limit[0])
    return 2 if forward and low < 0 and high > _MAX + low else 0


def _at_most(bound: int) -> Callable[..., int]:
    def extent(axis: int) -> int:
        return bound

    return extent
