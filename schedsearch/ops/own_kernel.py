"""own_kernel: a kernel that a user wrote and decorated with `schedsearch.tunable`.

Its parameters describe the call completely, so that a process that only deploys needs nothing of the user's module. The
function itself travels between the processes of a run beside the workload (`Op.carried`); no database holds it.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.dtypes import DTYPES, MAX_RANK, SCALAR_FORMATS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, ScalarSpec, Work
from schedsearch.typed import ParamsByName

Role = Literal["in", "out", "inout", "fixed", "scalar"]
ARRAY_ROLES = ("in", "out", "inout")
_ROLES = (*ARRAY_ROLES, "fixed", "scalar")
AFTER = "_after"  # of an in-place argument x, x_after is the output

_SIZE = {"type": "integer", "minimum": 0, "maximum": 2**40}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 64}
_LISTS = {"type": "array", "items": {"type": "array", "items": _SIZE, "maxItems": MAX_RANK}, "maxItems": 64}


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnKernelParams(Params):
    """See `own_kernel`."""

    kernel: str = declared(Parameter("qualified name of the function", {"type": "string"}))
    code: str = declared(Parameter("digest of its code and of the constants that it captures", {"type": "string"}))
    arguments: tuple[str, ...] = declared(
        Parameter("name:dtype:role of each argument; roles: in, out, inout, fixed, scalar", _TEXTS)
    )
    sizes: tuple[tuple[int, ...], ...] = declared(Parameter("extents of each array, in the order of the arguments", _LISTS))
    strides: tuple[tuple[int, ...], ...] = declared(
        Parameter("strides of each array in elements; an empty list: contiguous", {**_LISTS, "default": []})
    )
    fixed: tuple[int, ...] = declared(
        Parameter(
            "values of the fixed scalars, which the grid depends on",
            {"type": "array", "items": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "default": []},
        )
    )
    verified_by: str = declared(Parameter.choice("what kernels are compared with", ["reference", "default"]))


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    Attributes:
        role: in, out, inout: an array that the kernel reads, fills, or updates; fixed: a scalar that belongs to the
            workload; scalar: one that is given at call time.
        shape, strides: of an array, in elements; empty for scalars.
        value: of a fixed scalar.
    """

    name: str
    dtype: str
    role: Role
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    value: int = 0

    @property
    def is_array(self) -> bool:
        return self.role in ARRAY_ROLES

    @property
    def text(self) -> str:
        """As in the parameter `arguments`."""
        return f"{self.name}:{self.dtype}:{self.role}"

    @property
    def buffer(self) -> str:
        """The buffer that the kernel gets: an output for an argument that it updates."""
        return self.name + AFTER if self.role == "inout" else self.name

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the contiguous array in memory: axes in the order of their strides, or flat if there are gaps."""
        order = self.memory_order
        return tuple(self.shape[axis] for axis in order) if order is not None else (self.span,)

    @property
    def memory_order(self) -> tuple[int, ...] | None:
        """The axes in the order in memory, slowest first; None if elements are skipped or shared."""
        order = sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis))
        step = 1
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != step:
                return None
            step *= self.shape[axis]
        return tuple(order)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides))

    def spec(self, name: str, below: int | None = None) -> ArgSpec:
        axes = self.memory_order or (0,)  # letters in the order of memory, so that messages name the caller's index
        letters = "".join(string.ascii_uppercase[axis] for axis in axes)
        return ArgSpec(name, letters, self.memory_shape, self.dtype, below=below)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def arguments_of(params: OwnKernelParams) -> tuple[Argument, ...]:
    """The arguments in the order of the function's parameters, from normalised parameters of a workload."""
    sizes, fixed = iter(params.sizes), iter(params.fixed)
    strides = iter(params.strides or [()] * len(params.sizes))
    found = []
    for text in params.arguments:
        name, dtype, word = text.split(":")
        role = cast(Role, word)
        if role in ARRAY_ROLES:
            shape = next(sizes)
            found.append(Argument(name, dtype, role, shape, next(strides) or contiguous(shape)))
        else:
            found.append(Argument(name, dtype, role, value=next(fixed) if role == "fixed" else 0))
    return tuple(found)


def parameters_of(kernel: str, code: str, arguments: Iterable[Argument], verified_by: str) -> ParamsByName:
    """The inverse of `arguments_of`: parameters for a `Workload`."""
    given = tuple(arguments)
    arrays = [argument for argument in given if argument.is_array]
    strides = [() if each.strides == contiguous(each.shape) else each.strides for each in arrays]
    return {
        "kernel": kernel,
        "code": code,
        "arguments": tuple(argument.text for argument in given),
        "sizes": tuple(argument.shape for argument in arrays),
        "strides": tuple(strides) if any(strides) else (),
        "fixed": tuple(argument.value for argument in given if argument.role == "fixed"),
        "verified_by": verified_by,
    }


@dataclass(frozen=True)
class Hints:
    """What a definition adds to a workload beyond its identity.

    Attributes:
        flops: of one launch; 0 if it does not matter.
        reduction: addends of one output element.
        ranges: argument -> (lowest, highest) number to verify with; integers for integers.
        scalars: scalar -> value for verification and timing.
    """

    flops: int = 0
    reduction: int = 1
    ranges: Mapping[str, tuple[float, float]] = ()  # type: ignore[assignment]
    scalars: Mapping[str, float] = ()  # type: ignore[assignment]


class OwnKernel(Op[OwnKernelParams]):
    """Attributes:
    sources: digest of the code -> a function that pickles the definition.
    received: digest of the code -> the pickled definition, as another process sent it.
    hints: made by the layer that knows definitions; takes the parameters of a workload.
    """

    params_type: ClassVar[type[Params]] = OwnKernelParams
    name: ClassVar[str] = "own_kernel"
    reference: ClassVar[str] = "schedsearch.templates.own_kernel.reference:OwnKernelReference"

    def __init__(self) -> None:
        self.sources: dict[str, Callable[[], bytes]] = {}
        self.received: dict[str, bytes] = {}
        self.hints: Callable[[OwnKernelParams], Hints] = lambda params: Hints()

    def problems(self, params: OwnKernelParams) -> Iterable[Problem]:
        found = [problem for text in params.arguments if (problem := _argument_problem(text))]
        if found:
            return found
        roles = [text.split(":")[2] for text in params.arguments]
        arrays = sum(role in ARRAY_ROLES for role in roles)
        if len(params.sizes) != arrays:
            found.append(Problem("sizes", f"sizes has {len(params.sizes)} lists; allowed: {arrays}, one for each array"))
        if len(params.fixed) != roles.count("fixed"):
            found.append(Problem("fixed", f"fixed has {len(params.fixed)} values; allowed: {roles.count('fixed')}"))
        if params.strides and len(params.strides) != arrays:
            found.append(Problem("strides", f"strides has {len(params.strides)} lists; allowed: none, or {arrays}"))
        if not {"out", "inout"} & set(roles):
            found.append(Problem("arguments", "no argument is an output; give one the role out or inout"))
        return found or _array_problems(arguments_of(params))

    def arguments(self, params: OwnKernelParams) -> tuple[ArgSpec, ...]:
        ranges = dict(self.hints(params).ranges)
        return tuple(
            each.spec(each.name, _below(each, ranges)) for each in arguments_of(params) if each.role in ("in", "inout")
        )

    def outputs(self, params: OwnKernelParams) -> tuple[ArgSpec, ...]:
        return tuple(each.spec(each.buffer) for each in arguments_of(params) if each.role in ("out", "inout"))

    def scalars(self, params: OwnKernelParams) -> tuple[ScalarSpec, ...]:
        values = dict(self.hints(params).scalars)
        found = [each for each in arguments_of(params) if each.role == "scalar"]
        return tuple(ScalarSpec(each.name, values.get(each.name, 1), dtype=each.dtype) for each in found)

    def work(self, params: OwnKernelParams) -> Work:
        hints = self.hints(params)
        return Work(hints.flops, super().work(params).nbytes, reduction=hints.reduction, least_bytes=1)

    def check_inputs(self, params: OwnKernelParams) -> Mapping[str, Domain]:
        """The ranges that the definition gives. Otherwise multiples of 1/4 up to 4 for floats, and small integers."""
        ranges = dict(self.hints(params).ranges)
        return {
            each.name: _domain(each.dtype, ranges.get(each.name))
            for each in arguments_of(params)
            if each.role in ("in", "inout")
        }

    def carried(self, params: OwnKernelParams) -> bytes | None:
        source = self.sources.get(params.code)
        return self.received.get(params.code) if source is None else source()

    def receive(self, params: OwnKernelParams, carried: bytes) -> None:
        self.received[params.code] = carried

    def unrelated(self, params: OwnKernelParams, others: OwnKernelParams) -> bool:
        """Kernels of different names have different knobs."""
        return bool(params.kernel != others.kernel)

    def label(self, params: OwnKernelParams) -> str:
        words = [params.kernel]
        for each in arguments_of(params):
            if each.is_array:
                order = "" if each.strides == contiguous(each.shape) else "s"
                words.append(f"{each.name}={'x'.join(map(str, each.shape))}:{dtype_of(each.dtype).short}{order}")
            elif each.role == "fixed":
                words.append(f"{each.name}={each.value}")
        return " ".join(words)


OWN_KERNEL = OwnKernel()


def without_reference(params: Mapping[str, object]) -> str:
    """What a kernel of a workload with these parameters was compared with, in words, if its author gave no reference; ""
    if there was one, and for other operators, which all have one. The parameters may come from any database."""
    return "compared with its own first run, no reference was given" if params.get("verified_by") == "default" else ""


def _argument_problem(text: str) -> Problem | None:
    name, *rest = text.split(":")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name) or len(rest) != 2 or rest[1] not in _ROLES:
        return Problem("arguments", f"{text!r} is not an argument; write name:dtype:role, roles: {', '.join(_ROLES)}")
    formats = DTYPES if rest[1] in ARRAY_ROLES else SCALAR_FORMATS
    if rest[0] not in formats:
        return Problem("arguments", f"{name} has dtype {rest[0]!r}; allowed: {', '.join(formats)}")
    return None


def _array_problems(arguments: tuple[Argument, ...]) -> list[Problem]:
    found = []
    names = [each.name for each in arguments]
    for each in arguments:
        if names.count(each.name) > 1 or (each.role == "inout" and each.buffer in names):
            found.append(Problem("arguments", f"the name {each.name} or {each.buffer} occurs twice; rename an argument"))
        if not each.is_array:
            continue
        if not each.shape or min(each.shape) < 1 or math.prod(each.shape) > MAX_INT * 64:
            found.append(Problem("sizes", f"{each.name} has shape {each.shape}; allowed: one axis or more, with elements"))
        elif len(each.strides) != len(each.shape):
            found.append(Problem("strides", f"{each.name} has {len(each.strides)} strides for {len(each.shape)} axes"))
        elif each.role != "in" and each.memory_order is None:
            found.append(
                Problem("strides", f"{each.name} has strides {each.strides}; an array that is written must have no gaps")
            )
    return found


def _below(argument: Argument, ranges: Mapping[str, tuple[float, float]]) -> int | None:
    """The bound of an integer argument that holds no negative number, so that the timing's numbers obey it as well."""
    if argument.name not in ranges or dtype_of(argument.dtype).is_float:
        return None
    low, high = ranges[argument.name]
    return int(high) + 1 if low >= 0 else None


def _domain(dtype: str, limits: tuple[float, float] | None) -> Domain:
    row = dtype_of(dtype)
    if not row.is_float:
        low, high = limits or (0, min(100, row.largest))
        return Domain(range(int(low), int(high) + 1))
    low, high = limits or (-4.0, 4.0)
    count = 33 if row.nbytes > 1 else 9
    return Domain(tuple(low + (high - low) * i / (count - 1) for i in range(count)))
