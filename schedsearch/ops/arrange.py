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

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.along_axis import axis_number
from schedsearch.ops.base import MAX_INT, ArgSpec, Op, Parameter, Work
from schedsearch.ops.bounded import bounded, extents_of
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, axis_problems, extents, shown, whole_numbers
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES as ALL_DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of

if TYPE_CHECKING:
    from schedsearch.workload import Workload

DTYPES = tuple(name for name, row in ALL_DTYPES.items() if row.nbytes in (1, 2, 4, 8))
MOST_PARTS = 4
_SHAPE = "the number of entries of `shape`; default: one for each extent of bound"
_DYNAMIC = Parameter(
    "arguments of which the extents are read from memory at run time; default: none",
    {"type": "array", "items": {"type": "string"}, "default": []},
)
_BOUND = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "maxItems": len(AXES)}
_REFERENCES = "schedsearch.templates.arrange.reference:"


class Arranged(Op):
    """Subclasses say which arrays there are, what y's extents need, and the bound."""

    def problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        found = list(self.own_problems(params))
        if found:
            return found
        names = [spec.name for spec in self.arrays(params) if len(spec.shape) and spec.role != "index"]
        for name in params.get("dynamic", ()):
            if name not in names:
                allowed = f"allowed: {', '.join(names)}"
                found.append(Problem("dynamic", f"dynamic names {name!r}, which is no array of this operator; {allowed}"))
        for spec in (*self.arrays(params), self.result(params)):
            if spec.size > MAX_INT:
                found.append(Problem("bound", f"{spec.name} has up to {spec.size} elements; allowed: up to {MAX_INT}"))
        return found

    def own_problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        return ()

    @abstractmethod
    def arrays(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        """The arguments without those that hold extents."""

    @abstractmethod
    def result(self, params: Mapping[str, Any]) -> ArgSpec:
        """y with its bound."""

    def arguments(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        found = []
        for spec in self.arrays(params):
            if spec.name in params.get("dynamic", ()):
                name = extents_of(spec.name)
                found += [replace(spec, extents=name), ArgSpec(name, "A", (len(spec.shape),), "int64")]
            else:
                found.append(spec)
        return tuple(found)

    def outputs(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return bounded(self.result(params))

    def equality(self, params: Mapping[str, Any]) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
        """Whole numbers, and extents that are the bounds; then one less where there are several."""
        found = {spec.name: whole_numbers(spec.dtype) for spec in self.arrays(params)}
        for spec in self.arrays(params):
            if spec.name in params.get("dynamic", ()):
                fewer = Domain(tuple(max(1, n - 1) for n in spec.shape), ordered=True)
                found[extents_of(spec.name)] = Domain(spec.shape, ordered=True, second=fewer)
        return found

    def timing_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
        """All of the bounds is in use."""
        numbers = self.check_inputs(params)
        return {spec.name: numbers[spec.name] for spec in self.arguments(params) if numbers[spec.name].ordered}

    def work(self, params: Mapping[str, Any]) -> Work:
        read = sum(spec.nbytes for spec in self.arguments(params))
        return Work(0, read + self.result(params).nbytes, least_bytes=0)

    def label(self, params: Mapping[str, Any]) -> str:
        arrays = " ".join(f"{spec.name}={shown(spec.shape)}" for spec in self.arrays(params) if spec.role != "index")
        words = [self.name, arrays, "to", shown(self.result(params).shape)]
        words += [f"axis {params['axis']}"] if "axis" in params else []
        words += [f"dynamic {','.join(params['dynamic'])}"] if params.get("dynamic") else []
        return " ".join([*(word for word in words if word), dtype_of(params["dtype"]).short])


# ---- arange


class Arange(Arranged):
    name: ClassVar[str] = "arange"
    reference: ClassVar[str] = _REFERENCES + "ArangeReference"
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


# ---- expand and reshape


class _ByShape(Arranged):
    """The argument `shape` says what y's extents are."""

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            "x": extents(f"extents of x, 1 to {len(AXES)} of them; upper bounds with dynamic"),
            "bound": Parameter("upper bounds of the extents of y", _BOUND | {"minItems": 1}, size=True),
            "entries": Parameter(_SHAPE, {"type": "integer", "minimum": 1, "maximum": len(AXES)}),
            "dtype": Parameter.choice("of x and y; default float16", DTYPES, "float16"),
            "dynamic": _DYNAMIC,
        }

    def defaults(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().defaults(params), "entries": len(params.get("bound", ()))}

    def arrays(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        x = ArgSpec("x", AXES[: len(params["x"])], params["x"], params["dtype"])
        return x, ArgSpec("shape", "A", (params["entries"],), "int64", role="index", below=MAX_INT)

    def result(self, params: Mapping[str, Any]) -> ArgSpec:
        return ArgSpec("y", AXES[: len(params["bound"])], params["bound"], params["dtype"])


class Expand(_ByShape):
    name: ClassVar[str] = "expand"
    reference: ClassVar[str] = _REFERENCES + "ExpandReference"
    constructor: ClassVar[str] = "schedsearch:expand"

    def own_problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        rank, bound = max(len(params["x"]), params["entries"]), params["bound"]
        if len(bound) != rank:
            yield Problem("bound", f"bound has {len(bound)} extents; y has {rank}, the more of x's and shape's")

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
        rank, of_x, of_shape = len(params["bound"]), len(params["x"]), params["entries"]
        skip_x, skip_shape = rank - of_x, rank - of_shape

        def extent(axis: int, x: Sequence[int], shape: Sequence[int]) -> int:
            wanted = shape[axis - skip_shape] if axis >= skip_shape else 1
            mine = x[axis - skip_x] if axis >= skip_x else 1
            return wanted if mine == 1 else mine

        def problem(x: Sequence[int], shape: Sequence[int]) -> int:
            for axis in range(rank):
                mine = x[axis - skip_x] if axis >= skip_x else 1
                wanted = shape[axis - skip_shape] if axis >= skip_shape else 1
                if wanted < 0 or (mine != 1 and wanted != 1 and mine != wanted):
                    return 1
            return 0

        message = "x cannot be expanded to shape; allowed: from the last extent on, equal ones, or 1 on either side"
        needs = {"x": Dependence.SHAPE, "shape": Dependence.VALUE}
        return {"y": ShapeFunction(needs, extent, problem, (message,))}

    def check_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
        wanted = params["bound"][-params["entries"] :]
        return {**super().check_inputs(params), "shape": Domain(wanted, ordered=True)}


EXPAND = Expand()


class Reshape(_ByShape):
    name: ClassVar[str] = "reshape"
    reference: ClassVar[str] = _REFERENCES + "ReshapeReference"
    constructor: ClassVar[str] = "schedsearch:reshape"

    def parameters(self) -> Mapping[str, Parameter]:
        zero = "a 0 in shape is an extent of 0, not that of x; default false"
        return {**super().parameters(), "allowzero": Parameter(zero, {"type": "boolean", "default": False})}

    def own_problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        if len(params["bound"]) != params["entries"]:
            yield Problem("bound", f"bound has {len(params['bound'])} extents, shape {params['entries']}; give as many")

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
        allowzero = int(params["allowzero"])

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

    def check_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
        """Extents of y where x fits them, otherwise all elements along the first axis that has room for them."""
        found, bound, size = super().check_inputs(params), params["bound"], math.prod(params["x"])
        wanted: tuple[int, ...] = bound
        if math.prod(bound) != size:
            room = next((axis for axis, most in enumerate(bound) if most >= size), 0)
            wanted = tuple(-1 if axis == room else 1 for axis in range(len(bound)))
        second = (-1, *wanted[1:]) if -1 not in wanted else wanted
        return {**found, "shape": Domain(wanted, ordered=True, second=Domain(second, ordered=True))}


RESHAPE = Reshape()


# ---- where


class Where(Arranged):
    name: ClassVar[str] = "where"
    reference: ClassVar[str] = _REFERENCES + "WhereReference"
    constructor: ClassVar[str] = "schedsearch:where"

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            **{name: extents(f"extents of {name}; upper bounds with dynamic") for name in "cab"},
            "dtype": Parameter.choice("of a, b and y; default float16", DTYPES, "float16"),
            "dynamic": _DYNAMIC,
        }

    def own_problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        if _broadcast(*(params[name] for name in "cab")) is None:
            shapes = ", ".join(shown(params[name]) for name in "cab")
            yield Problem("c", f"c, a and b have the extents {shapes}; allowed: from the last one on, equal ones or 1")

    def arrays(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        dtypes = ("uint8", params["dtype"], params["dtype"])
        return tuple(ArgSpec(name, AXES[: len(params[name])], params[name], dtype) for name, dtype in zip("cab", dtypes))

    def result(self, params: Mapping[str, Any]) -> ArgSpec:
        shape = _broadcast(*(params[name] for name in "cab")) or ()
        return ArgSpec("y", AXES[: len(shape)], shape, params["dtype"])

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
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

    def check_inputs(self, params: Mapping[str, Any]) -> Mapping[str, Domain]:
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


# ---- dyn_concat


class DynConcat(Arranged):
    name: ClassVar[str] = "dyn_concat"
    reference: ClassVar[str] = _REFERENCES + "DynConcatReference"
    constructor: ClassVar[str] = "schedsearch:dyn_concat"

    def parameters(self) -> Mapping[str, Parameter]:
        one = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "minItems": 1}
        parts = {"type": "array", "items": one, "minItems": 2, "maxItems": MOST_PARTS}
        return {
            "x": Parameter(f"extents of each of 2 to {MOST_PARTS} arrays; upper bounds with dynamic", parts, size=True),
            "axis": axis_number("the axis along which they follow one another, from 0, or from -1 backwards", 0),
            "dtype": Parameter.choice("of all; default float16", DTYPES, "float16"),
            "dynamic": _DYNAMIC,
        }

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        found, problems = super().normalise(params)
        if not problems:
            found["axis"] %= len(found["x"][0])
        return found, problems

    def own_problems(self, params: Mapping[str, Any]) -> Iterable[Problem]:
        first = params["x"][0]
        if any(len(shape) != len(first) for shape in params["x"]) or len(first) > len(AXES):
            return [Problem("x", f"x has arrays of different rank; allowed: equal ones of up to {len(AXES)} axes")]
        return axis_problems("axis", (params["axis"],), len(first))

    def arrays(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return tuple(
            ArgSpec(f"x{number}", AXES[: len(shape)], shape, params["dtype"]) for number, shape in enumerate(params["x"])
        )

    def result(self, params: Mapping[str, Any]) -> ArgSpec:
        axis, shape = params["axis"] % len(params["x"][0]), [max(extents) for extents in zip(*params["x"])]
        shape[axis] = sum(each[axis] for each in params["x"])
        return ArgSpec("y", AXES[: len(shape)], tuple(shape), params["dtype"])

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
        along, rank = params["axis"] % len(params["x"][0]), len(params["x"][0])

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

        extent, problem = ((two, wrong_two), (three, wrong_three), (four, wrong_four))[len(params["x"]) - 2]
        message = "the arrays do not fit one another; allowed: equal extents along all other axes"
        needs = {spec.name: Dependence.SHAPE for spec in self.arrays(params)}
        return {"y": ShapeFunction(needs, extent, problem, (message,))}


DYN_CONCAT = DynConcat()


# ---- constructors


def arange(*, bound: int, dtype: str = "int64") -> Workload:
    """start, start + delta ... up to before limit, numbers that are on the device: y, and how many there are.

    Args:
        bound: how many there are at most.
        dtype: of the arguments start, limit and delta, one number each, and of y: int64, int32 or float32.

    Example:
        >>> [argument.name for argument in arange(bound=100).signature]
        ['start', 'limit', 'delta']
    """
    return _workload("arange", bound=bound, dtype=dtype)


def expand(
    *,
    x: Sequence[int],
    bound: Sequence[int],
    entries: int | None = None,
    dtype: str = "float16",
    dynamic: Sequence[str] = (),
) -> Workload:
    """x repeated along axes of extent 1, as NumPy broadcasts it to the extents in `shape`.

    Args:
        x: extents of x.
        bound: upper bounds of y's extents.
        entries: length of the argument shape, int64; default: one for each of bound.
        dynamic: ("x",) if the extents of x are read from memory, too.

    Example:
        >>> expand(x=(1, 8), bound=(100, 8)).outputs[0].shape
        (100, 8)
    """
    optional = {} if entries is None else {"entries": entries}
    return _workload("expand", x=tuple(x), bound=tuple(bound), dtype=dtype, dynamic=tuple(dynamic), **optional)


def reshape(
    *, x: Sequence[int], bound: Sequence[int], allowzero: bool = False, dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload:
    """The elements of x in their order, with the extents in `shape`: -1 stands for all that is left, 0 for an extent of x.

    Args:
        x: extents of x.
        bound: upper bounds of y's extents.
        allowzero: a 0 in shape is an extent of 0.
        dynamic: ("x",) if the extents of x are read from memory, too.

    Example:
        >>> [argument.name for argument in reshape(x=(100, 8), bound=(800,), dynamic=("x",)).signature]
        ['x', 'x_extents', 'shape']
    """
    return _workload("reshape", x=tuple(x), bound=tuple(bound), allowzero=allowzero, dtype=dtype, dynamic=tuple(dynamic))


def where(
    *, c: Sequence[int], a: Sequence[int], b: Sequence[int], dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload:
    """a where c, an array of uint8, is not 0, elsewhere b; each repeated along axes of extent 1.

    Args:
        c, a, b: extents.
        dynamic: those of which the extents are read from memory.

    Example:
        >>> where(c=(100, 1), a=(100, 8), b=(1,)).outputs[0].shape
        (100, 8)
    """
    return _workload("where", c=tuple(c), a=tuple(a), b=tuple(b), dtype=dtype, dynamic=tuple(dynamic))


def dyn_concat(
    *, x: Sequence[Sequence[int]], axis: int = 0, dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload:
    """2 to 4 arrays one after the other along an axis, of which the extents may be on the device.

    Args:
        x: extents of each.
        dynamic: those of x0, x1 ... of which the extents are read from memory.

    Example:
        >>> dyn_concat(x=[(100, 8), (50, 8)], dynamic=("x0", "x1")).outputs[0].shape
        (150, 8)
    """
    return _workload("dyn_concat", x=tuple(map(tuple, x)), axis=axis, dtype=dtype, dynamic=tuple(dynamic))


def _workload(op: str, **params: Any) -> Workload:
    from schedsearch.workload import Workload

    return Workload(op, params)
