"""arange: y[i] = start + i * delta, up to limit, of numbers on the device. Range of ONNX; see `ops.open_shapes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from schedsearch.ops.base import ArgSpec, Parameter
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.open_shapes import Arranged

if TYPE_CHECKING:
    from schedsearch.workload import Workload


class Arange(Arranged):
    name: ClassVar[str] = "arange"
    reference: ClassVar[str] = "schedsearch.templates.arrange.reference:ArangeReference"
    constructor: ClassVar[str] = "schedsearch:arange"

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            "bound": Parameter.count("numbers at most"),
            "dtype": Parameter.choice("of the arguments and y; default int64", ("int64", "int32", "float32"), "int64"),
        }

    def arrays(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return tuple(ArgSpec(name, "A", (1,), params["dtype"]) for name in ("start", "limit", "delta"))

    def result(self, params: Mapping[str, Any]) -> ArgSpec:
        return ArgSpec("y", "A", (params["bound"],), params["dtype"])

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
        names = ("start", "limit", "delta")
        if dtype_of(params["dtype"]).is_float:  # only the kernel can count by floats
            return {"y": ShapeFunction(dict.fromkeys(names, Dependence.NOTHING), _at_most(params["bound"]), counted=True)}
        message = "delta is 0; allowed: positive numbers, or negative ones to count backwards"
        return {"y": ShapeFunction(dict.fromkeys(names, Dependence.VALUE), _steps, _no_step, (message,))}

    def check_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
        """As many numbers as fit; then fewer, backwards."""
        most = min(params["bound"], 1 << 20)
        return {
            "start": Domain((3,), ordered=True, second=Domain((2,), ordered=True)),
            "limit": Domain((3 + most,), ordered=True, second=Domain((2 - most // 2,), ordered=True)),
            "delta": Domain((1,), ordered=True, second=Domain((-1,), ordered=True)),
        }


ARANGE = Arange()


def _steps(axis: int, start: Sequence[int], limit: Sequence[int], delta: Sequence[int]) -> int:
    step = delta[0]
    distance = limit[0] - start[0] if step > 0 else start[0] - limit[0]
    size = abs(step)
    return max(0, (distance + size - 1) // size)


def _no_step(start: Sequence[int], limit: Sequence[int], delta: Sequence[int]) -> int:
    return 1 if delta[0] == 0 else 0


def _at_most(bound: int) -> Callable[..., int]:
    def extent(axis: int) -> int:
        return bound

    return extent


def arange(*, bound: int, dtype: str = "int64") -> Workload:
    """start, start + delta ... up to before limit, numbers that are on the device: y, and how many there are.

    Args:
        bound: how many there are at most.
        dtype: of the arguments start, limit and delta, one number each, and of y: int64, int32 or float32.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Example:
        >>> [argument.name for argument in arange(bound=100).signature]
        ['start', 'limit', 'delta']
    """
    from schedsearch.workload import Workload

    return Workload("arange", dict(bound=bound, dtype=dtype))
