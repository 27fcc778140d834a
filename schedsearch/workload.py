"""`Workload`: what to compute, as a value with a stable identity. `WorkloadRange`: workloads that differ in one size.

The JSON that gives the id leaves out parameters at their default. A parameter with a default that is added later therefore
changes no id.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from schedsearch.errors import UsageError, WorkloadError, did_you_mean
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.ops import ArgSpec, Op, ScalarSpec, ShapeFunction, Work, operator
from schedsearch.ops.declared_shapes import declared_shapes
from schedsearch.typed import GivenParams, ParamsByName

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from schedsearch.ops.conv2d import Conv2dParams

    P = TypeVar("P", bound=Mapping[str, Any], default=Mapping[str, Any], covariant=True)
else:  # bare `Workload` is one whose operator is not known; Python 3.11 cannot say that
    from typing import TypeVar

    P = TypeVar("P", covariant=True)


MAX_SIZES = 1024  # of a range
RANGE_TEXT = re.compile(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*")  # 1..64, as workload files write it


class Workload(Generic[P]):
    """An operator with its parameters: shapes, dtypes, layouts and epilogue stages. Immutable and hashable.

    Args:
        op: name of an operator, see `schedsearch.ops.operator`; `foreign` for kernels that another tuner measured.
        params: its parameters; missing ones take the operator's defaults.

    Raises:
        UnknownOperatorError: the operator is not installed here.
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.
    """

    __slots__ = ("__dict__", "op", "params")
    op: str
    params: P

    def __init__(self, op: str, params: GivenParams) -> None:
        normalised, problems = operator(op).normalise(params)
        if problems:
            raise WorkloadError(problems)
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "params", operator(op).typed(normalised))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Workload is immutable: cannot set {name!r}; use replace({name}=...)")

    @classmethod
    def conv2d(cls, **params: object) -> Workload[Conv2dParams]:
        """The same as `schedsearch.conv2d(...)`."""
        module, _, function = operator("conv2d").constructor.partition(":")
        made: Workload[Conv2dParams] = getattr(importlib.import_module(module), function)(**params)
        return made

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Inverse of `json`.

        Raises:
            UnknownOperatorError: the operator is not installed here.
            WorkloadError: this installation does not know the schema version.
        """
        data = json.loads(text)
        op = operator(data["op"])
        if data.get("v", 1) != op.version:
            raise WorkloadError(
                f"{data['op']} has schema version {data.get('v', 1)}, this schedsearch knows {op.version}; upgrade it"
            )
        return cls(data["op"], data["params"])

    @property
    def definition(self) -> Op:
        return operator(self.op)

    @functools.cached_property
    def json(self) -> str:
        """Canonical JSON; the text that `id` hashes."""
        return canonical_json({"op": self.op, "v": self.definition.version, "params": self._given})

    @property
    def _given(self) -> ParamsByName:
        """The parameters that differ from their defaults."""
        defaults = self.definition.defaults(self.params)
        return {name: value for name, value in self.params.items() if defaults.get(name) != value}

    @functools.cached_property
    def id(self) -> str:
        return sha256_hex(self.json)

    @functools.cached_property
    def signature(self) -> tuple[ArgSpec, ...]:
        """The ordered array arguments of a kernel for this workload, outputs excluded."""
        return self.definition.arguments(self.params)

    @functools.cached_property
    def outputs(self) -> tuple[ArgSpec, ...]:
        """The outputs that a kernel for this workload writes, in order."""
        return self.definition.outputs(self.params)

    @property
    def output(self) -> ArgSpec:
        """The only output.

        Raises:
            WorkloadError: there are several; read `outputs`.
        """
        if len(self.outputs) != 1:
            names = ", ".join(output.name for output in self.outputs)
            raise WorkloadError(f"{self.op} has {len(self.outputs)} outputs ({names}); this needs an operator with one")
        return self.outputs[0]

    @functools.cached_property
    def shape_functions(self) -> Mapping[str, ShapeFunction]:
        """Output -> shape function, for outputs whose extents are known only when the operator is called.

        Raises:
            OperatorError: the operator's declaration is wrong; see `schedsearch.ops.declared_shapes`.
        """
        return declared_shapes(self.definition, self.params)

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the arguments whose values do not change between calls."""
        return tuple(argument.name for argument in self.signature if argument.constant)

    @functools.cached_property
    def scalars(self) -> tuple[ScalarSpec, ...]:
        """Call-time scalars (float32) with their defaults; not part of the identity."""
        return self.definition.scalars(self.params)

    @functools.cached_property
    def work(self) -> Work:
        """Operations, bytes and the length of sums."""
        return self.definition.work(self.params)

    @property
    def flops(self) -> int:
        return self.work.flops

    @property
    def min_bytes(self) -> int:
        """Bytes of every argument read once and every output written once."""
        return self.work.nbytes

    @property
    def label(self) -> str:
        """A short text for tables, e.g. 'conv2d 32x56x56x64 k64 3x3 p1 f16 NHWC'."""
        return self.definition.label(self.params)

    def replace(self, **changes: Any) -> Workload[P]:
        """A workload with other parameters. Those at their default follow the changes, as `weight_dtype` follows `dtype`."""
        return Workload(self.op, {**self._given, **changes})

    def with_dynamic(self, parameter: str, low: int, high: int) -> WorkloadRange:
        """This workload for every value of a size, such as the batch n, from `low` to `high`.

        Raises: as `WorkloadRange`.

        Examples:
            >>> schedsearch.tune([workload.with_dynamic("n", 1, 64)])
            >>> kernel = schedsearch.compile(workload.with_dynamic("n", 1, 64))
        """
        return WorkloadRange(self, parameter, low, high)

    if not TYPE_CHECKING:  # typed code reads `workload.params`

        def __getattr__(self, name: str) -> object:
            if not name.startswith("_"):
                try:
                    return self.params[name]
                except KeyError:
                    pass
            raise AttributeError(f"{self.op} workload has no parameter {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        return f"Workload({self.json})"

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self.op, dict(self.params), self.definition.carried(self.params))


@dataclass(frozen=True)
class WorkloadRange:
    """Workloads for every value of one size from `low` to `high`. `Workload.with_dynamic` makes one.

    Attributes:
        workload: the one with the largest size.
        parameter: name of the size.

    Raises:
        UsageError: the parameter cannot be dynamic, or the bounds are impossible.
        WorkloadError: there is no such workload with one of the bounds.
    """

    workload: Workload
    parameter: str
    low: int
    high: int

    def __post_init__(self) -> None:
        name, low, high = self.parameter, self.low, self.high
        parameters = self.workload.definition.parameters()
        sizes = [each for each, parameter in parameters.items() if parameter.size]
        if name not in sizes:
            raise UsageError(
                f"{self.workload.op} has no size {name!r}{did_you_mean(str(name), sizes)}; allowed: {', '.join(sizes)}"
            )
        for what, bound in (("lowest", low), ("highest", high)):
            if type(bound) is not int or bound < 1:
                raise UsageError(f"the {what} {name} is {bound!r}; allowed: an integer, 1 or more")
        if not low < high:
            raise UsageError(f"{name} from {low} to {high} is not a range; give the smaller bound first: {name}: 1..64")
        if high - low >= MAX_SIZES:
            raise UsageError(f"{name} from {low} to {high} has {high - low + 1} sizes; allowed: up to {MAX_SIZES}")
        object.__setattr__(self, "workload", self.workload.replace(**{name: high}))
        ends = zip(self.at(low).signature, self.workload.signature)
        dependent = [(one, other) for one, other in ends if one.shape != other.shape]
        if not dependent:
            raise UsageError(f"no argument's shape depends on {name}, so that a call does not show it; tune each {name}")
        if fixed := [one.name for one, _ in dependent if one.constant]:
            raise UsageError(
                f"{name} cannot be dynamic: {', '.join(fixed)}, which does not change between calls, has a shape that "
                f"depends on it; tune each {name}"
            )

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1)

    def at(self, size: int) -> Workload:
        """The workload of one size."""
        return self.workload.replace(**{self.parameter: size})

    @functools.cached_property
    def json(self) -> str:
        """Canonical JSON; inverse: `from_json`."""
        return canonical_json(
            {"workload": self.workload.json, "parameter": self.parameter, "low": self.low, "high": self.high}
        )

    @property
    def family(self) -> str:
        """Hex digest of everything but the bounds."""
        data = json.loads(self.workload.json)
        del data["params"][self.parameter]
        return sha256_hex(canonical_json({**data, "dynamic": self.parameter}))

    @property
    def label(self) -> str:
        return f"{self.workload.label}, {self.parameter} = {self.low} to {self.high}"

    def samples(self) -> list[int]:
        """The sizes that a search tunes: both ends, and between them in steps of about a factor of two."""
        steps = max(2, math.ceil(math.log2(self.high / self.low)))
        ratio = (self.high / self.low) ** (1 / steps)
        return sorted({self.low, self.high, *(round(self.low * ratio**step) for step in range(1, steps))})


def _received(op: str, params: Mapping[str, object], carried: bytes | None) -> Workload:
    """A workload that another process sent, with what its operator sent along."""
    workload = Workload(op, params)
    if carried is not None:
        workload.definition.receive(workload.params, carried)
    return workload


def between(sizes: Sequence[int]) -> list[int]:
    """The sizes halfway between neighbours.

    >>> between([1, 2, 4, 8])
    [3, 6]
    """
    return [(one + other) // 2 for one, other in itertools.pairwise(sizes) if other - one > 1]


def as_python(workload: Workload) -> tuple[str, str]:
    """The workload as Python: the module to import, and an expression that makes the workload.

    The expression leaves out parameters at their defaults. It calls the operator's `constructor` if there is one, else
    `schedsearch.Workload`.
    """
    defaults = workload.definition.defaults(workload.params)
    values = {name: workload.params[name] for name in workload.definition.parameters() if name in workload.params}
    given = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
    module, _, function = workload.definition.constructor.partition(":")
    if function:
        return module, f"{module}.{function}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    return "schedsearch", f"schedsearch.Workload({workload.op!r}, {given!r})"


def distance(one: Workload, other: Workload) -> float:
    """How much two workloads of one operator differ: |log2| of the ratio of each number, 4 for any other difference.

    Workloads that the operator calls unrelated are infinitely far apart.
    """
    if one.definition.unrelated(one.params, other.params):
        return math.inf
    total = 0.0
    for name in one.params.keys() | other.params.keys():
        mine, theirs = _flat(one.params.get(name)), _flat(other.params.get(name))
        if len(mine) != len(theirs):
            total += 4.0
            continue
        for a, b in zip(mine, theirs):
            if isinstance(a, int) and isinstance(b, int):
                total += _steps(a, b)
            elif a != b:
                total += 4.0
    return total


def _steps(a: int, b: int) -> float:
    """|log2| of the ratio of two numbers, each one larger so that 0 has a place; through 0 if their signs differ."""
    if (a < 0) != (b < 0):
        return _steps(abs(a), 0) + _steps(abs(b), 0)
    return abs(math.log2((abs(a) + 1) / (abs(b) + 1)))


def _flat(value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        return (value,)
    return tuple(each for item in value for each in _flat(item))
