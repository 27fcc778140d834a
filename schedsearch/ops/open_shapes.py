"""Operators that put elements into an array whose extents are known only when they run.

    arange      y[i] = start + i * delta, up to limit                                             Range of ONNX
    expand      y[i, j ...] = x[i, j ...], where x is repeated along axes of extent 1             Expand
    reshape     the elements of x in their order, in another shape                                Reshape
    where       y[i, j ...] = a[i, j ...] if c[i, j ...] else b[i, j ...], each repeated likewise   Where
    dyn_concat  x0, x1 ... one after the other along an axis                                      Concat

The extents of y follow from those of the arguments that `dynamic` names, which are read from memory, and from the values of
an argument such as `shape`. y and such arguments have the strides of their bounds; see `ops.bounded`. Where the extents are
impossible or exceed the bound, all of them become 0 and nothing is written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import bounded, extents_of
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown, whole_numbers
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import GivenParams

DTYPES = tuple(name for name, row in ALL_DTYPES.items() if row.nbytes in (1, 2, 4, 8))
_SHAPE = "the number of entries of `shape`; default: one for each extent of bound"
DYNAMIC = Parameter(
    "arguments of which the extents are read from memory at run time; default: none",
    {"type": "array", "items": {"type": "string"}, "default": []},
)
BOUND = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "maxItems": len(AXES)}


class ArrangedParams(Params):
    dtype: str
    dynamic: tuple[str, ...] = ()


A = TypeVar("A", bound=ArrangedParams)


class Arranged(Op[A]):
    """Subclasses say which arrays there are, what y's extents need, and the bound."""

    def problems(self, params: A) -> Iterable[Problem]:
        found = list(self.own_problems(params))
        if found:
            return found
        names = [spec.name for spec in self.arrays(params) if len(spec.shape) and spec.role != "index"]
        for name in params.dynamic:
            if name not in names:
                allowed = f"allowed: {', '.join(names)}"
                found.append(Problem("dynamic", f"dynamic names {name!r}, which is no array of this operator; {allowed}"))
        for spec in (*self.arrays(params), self.result(params)):
            if spec.size > MAX_INT:
                found.append(Problem("bound", f"{spec.name} has up to {spec.size} elements; allowed: up to {MAX_INT}"))
        return found

    def own_problems(self, params: A) -> Iterable[Problem]:
        return ()

    @abstractmethod
    def arrays(self, params: A) -> tuple[ArgSpec, ...]:
        """The arguments without those that hold extents."""

    @abstractmethod
    def result(self, params: A) -> ArgSpec:
        """y with its bound."""

    def arguments(self, params: A) -> tuple[ArgSpec, ...]:
        found = []
        for spec in self.arrays(params):
            if spec.name in params.dynamic:
                name = extents_of(spec.name)
                found += [replace(spec, extents=name), ArgSpec(name, "A", (len(spec.shape),), "int64")]
            else:
                found.append(spec)
        return tuple(found)

    def outputs(self, params: A) -> tuple[ArgSpec, ...]:
        return bounded(self.result(params))

    def equality(self, params: A) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: A) -> Mapping[str, Domain]:
        """Integers, and extents that are the bounds; then one less where there are several."""
        found = {spec.name: whole_numbers(spec.dtype) for spec in self.arrays(params)}
        for spec in self.arrays(params):
            if spec.name in params.dynamic:
                fewer = Domain(tuple(max(1, n - 1) for n in spec.shape), ordered=True)
                found[extents_of(spec.name)] = Domain(spec.shape, ordered=True, second=fewer)
        return found

    def timing_inputs(self, params: A) -> Mapping[str, Domain]:
        """All of the bounds is in use."""
        numbers = self.check_inputs(params)
        return {spec.name: numbers[spec.name] for spec in self.arguments(params) if numbers[spec.name].ordered}

    def work(self, params: A) -> Work:
        read = sum(spec.nbytes for spec in self.arguments(params))
        return Work(0, read + self.result(params).nbytes, least_bytes=0)

    def label(self, params: A) -> str:
        arrays = " ".join(f"{spec.name}={shown(spec.shape)}" for spec in self.arrays(params) if spec.role != "index")
        words = [self.name, arrays, "to", shown(self.result(params).shape)]
        words += [f"axis {params['axis']}"] if "axis" in params else []
        words += [f"dynamic {','.join(params.dynamic)}"] if params.dynamic else []
        return " ".join([*(word for word in words if word), dtype_of(params.dtype).short])


@dataclass(frozen=True, eq=False, kw_only=True)
class ByShapeParams(ArrangedParams):
    """Those that expand and reshape share."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them; upper bounds with dynamic"))
    bound: tuple[int, ...] = declared(Parameter("upper bounds of the extents of y", BOUND | {"minItems": 1}, size=True))
    entries: int = declared(Parameter(_SHAPE, {"type": "integer", "minimum": 1, "maximum": len(AXES)}))
    dtype: str = declared(Parameter.choice("of x and y; default float16", DTYPES, "float16"))
    dynamic: tuple[str, ...] = declared(DYNAMIC)


B = TypeVar("B", bound=ByShapeParams)


class ByShape(Arranged[B]):
    """The argument `shape` says what y's extents are."""

    def defaults(self, params: GivenParams) -> GivenParams:
        return {**super().defaults(params), "entries": len(params.get("bound", ()))}

    def arrays(self, params: B) -> tuple[ArgSpec, ...]:
        x = ArgSpec("x", AXES[: len(params.x)], params.x, params.dtype)
        return x, ArgSpec("shape", "A", (params.entries,), "int64", role="index", below=MAX_INT)

    def result(self, params: B) -> ArgSpec:
        return ArgSpec("y", AXES[: len(params.bound)], params.bound, params.dtype)
