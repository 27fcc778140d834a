"""What an operator says about itself: parameters, arguments, outputs, work, and what equality means.

Generic code (measuring, records, workload files, deployment) asks the operator and knows no operator by name.

See docs/decisions/001-operators-as-data.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast

from schedsearch.errors import Problem
from schedsearch.ops.checks import Domain, Rounding, by_role, is_sum_of_products
from schedsearch.ops.dependence import ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import (
    Parameter,
    Params,
    frozen,
    judge,
    missing_parameters,
    plain,
    schema_defaults,
    unknown_parameters,
)
from schedsearch.ops.specs import ArgSpec, ScalarSpec, Work
from schedsearch.typed import GivenParams, ParamsByName

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", bound=Mapping[str, Any], default=Any)
else:  # bare `Op` means `Op[Any]`; Python 3.11 cannot say that
    from typing import TypeVar

    P = TypeVar("P")

# Names that a parameter must not have, because `workload.NAME` or a key of a task in a workload file means something else.
RESERVED_NAMES = frozenset(
    {
        "constants", "conv2d", "definition", "flops", "from_json", "id", "json", "label", "min_bytes", "op", "output",
        "outputs", "params", "replace", "scalars", "shape_functions", "signature", "with_dynamic", "work",
        "name", "restrict", "shape", "templates", "weight",
    }
)  # fmt: skip


class Op(ABC, Generic[P]):
    """An operator: one stateless object. Methods take the parameters that `normalise` returned.

    A subclass sets the class attributes and implements `parameters`, `arguments` and `outputs`. The rest has defaults.

    Attributes:
        name: unique; in workloads, records and workload files.
        version: of the parameters' meaning. Raise it when the same parameters no longer describe the same computation;
            records of other versions are then refused. A new parameter with a default needs no new version.
        reference: "module:Class" of its `schedsearch.template.Reference`.
        peers: library -> "module:function" by which `schedsearch profile --peer` runs the operator; for torch see
            `schedsearch.integrations.torch_peer`.
        constructor: "module:function" that takes the parameters as keywords and makes a workload, or "".
        params_type: the dataclass of its parameters; None: they are a plain mapping, and `parameters` is overridden.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    reference: ClassVar[str]
    constructor: ClassVar[str] = ""
    peers: ClassVar[Mapping[str, str]] = {}
    params_type: ClassVar[type[Params] | None] = None

    def parameters(self) -> Mapping[str, Parameter]:
        """Every parameter by name, in the order in which they are shown. No name may be in `RESERVED_NAMES`."""
        if self.params_type is None:
            raise NotImplementedError(f"operator {self.name} has neither params_type nor parameters()")
        return self.params_type.parameters()

    def typed(self, params: Mapping[str, object]) -> P:
        """What `normalise` returned, as the methods and workloads take it: immutable, and of the type `params_type`."""
        made = MappingProxyType(dict(params)) if self.params_type is None else self.params_type(**params)
        return cast(P, made)

    def defaults(self, params: GivenParams) -> GivenParams:
        """The normalised value of each optional parameter that is not given; it may depend on the other parameters.

        A workload's identity leaves out values equal to these. By default they are the defaults of the schemas.
        """
        return schema_defaults(self.parameters())

    def completed(self, params: Mapping[str, object]) -> tuple[ParamsByName, ParamsByName, list[Problem]]:
        """What is given as JSON has it, the same with defaults in the order of `parameters()`, and wrong names."""
        known = self.parameters()
        given = {name: plain(value) for name, value in params.items()}
        optional = self.defaults(given)
        problems = unknown_parameters(self.name, given, known)
        problems += missing_parameters(given, {name: known[name] for name in known if name not in optional})
        whole = {**optional, **given}
        return given, {name: whole[name] for name in known if name in whole}, problems

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Fills in defaults, expands shorthands and makes every value hashable.

        By default it checks each value against its schema and then, if all are possible, asks `problems`.

        Returns:
            The parameters in the order of `parameters()`, and every mistake. If there are mistakes, some parameters are
            missing.
        """
        params, out, found = self.completed(params)
        known = self.parameters()
        for name in (name for name in known if name in params):
            if complaint := judge(out[name], known[name].schema):
                found.append(Problem(name, f"{name} {complaint}"))
        out = {name: frozen(out[name]) for name in known if name in out}
        if not found:
            found += self.problems(self.typed(out))
        return out, found

    def problems(self, params: P) -> Iterable[Problem]:
        """Mistakes in parameters that are possible one by one. The default `normalise` asks for them."""
        return ()

    @abstractmethod
    def arguments(self, params: P) -> tuple[ArgSpec, ...]:
        """The array arguments in the order in which a kernel is called with them."""

    @abstractmethod
    def outputs(self, params: P) -> tuple[ArgSpec, ...]:
        """The arrays that a kernel writes, at least one. Their names differ from each other and from the arguments'."""

    def shape_functions(self, params: P) -> Mapping[str, ShapeFunction]:
        """How the extents of outputs follow from what is known only when the operator is called: output -> function.

        By default no output has one: the shapes are those of `outputs`. For an output that has one, `outputs` gives the
        upper bound, and the extents are in an output `NAME_extents`, int64[rank]. See `schedsearch.ops.dependence`.
        """
        return {}

    def wrong_index(self, params: P, place: int, index: int, names: Mapping[str, str]) -> str:
        """What is wrong with an index that a kernel of this operator noted, and what is allowed; see `ops.wrong_index`.

        Args:
            place: of the index in its array, counted in the order of memory from 0.
            names: argument -> what the caller calls it.
        """
        return f"the index at place {place} is {index}, which is out of range"

    def scalars(self, params: P) -> tuple[ScalarSpec, ...]:
        """Call-time scalars with their defaults; not part of the identity."""
        return ()

    def work(self, params: P) -> Work:
        """The amount of work. By default it has only the bytes of arguments and outputs."""
        return Work(0, sum(array.nbytes for array in (*self.arguments(params), *self.outputs(params))))

    def equality(self, params: P) -> Literal["exact", "rounded"]:
        """When a kernel is correct. `exact`: its result has the same bits as the reference's. `rounded`: its result
        is within the bound of float32 accumulation in any order and one rounding to the output's format. By default integer
        outputs are exact and all others rounded.
        """
        floats = any(dtype_of(output.dtype).is_float for output in self.outputs(params))
        return "rounded" if floats else "exact"

    def rounding(self, params: P) -> Rounding:
        """How kernels may round inside, which the bound of `equality` and the numbers for verification follow. By default
        they multiply factors as they are and add in float32.
        """
        return Rounding()

    def check_inputs(self, params: P) -> Mapping[str, Domain]:
        """The domain that each argument is drawn from for verification, by name. By default the arguments' roles decide, so
        that sums of products are exact: see `schedsearch.ops.checks.by_role`.

        Override it if such numbers do not test the operator. For example, exponentials of numbers that lie up to 127 apart
        are one number and zeros::

            def check_inputs(self, params):
                return {"x": Domain(range(-8, 9))}
        """
        return by_role(self.arguments(params), self.outputs(params), self.work(params).reduction, self.rounding(params))

    def exact_step(self, params: P) -> float | None:
        """How much an output changes at least if a summand other than zero is missing, where `check_inputs` make sums exact
        in the accumulator; None if sums are rounded. Kernels may err by half of it, besides the rounding of the output."""
        return 1.0 if is_sum_of_products(self.arguments(params)) else None

    def timing_inputs(self, params: P) -> Mapping[str, Domain]:
        """The domain of arguments whose numbers decide how much work there is, by name, while kernels are timed. All others
        hold numbers as a network has them. Default: none."""
        return {}

    def check_scalars(self, params: P, spread: float = 1.0) -> Mapping[str, float]:
        """Values of the call-time scalars for verification. By default they are the scalars' defaults.

        Choose other values, so that verification finds a kernel that ignores a scalar.

        Args:
            spread: standard deviation of the sums that the check inputs lead to.
        """
        return {scalar.name: scalar.default for scalar in self.scalars(params)}

    def carried(self, params: P) -> bytes | None:
        """What other processes of a run must get with a workload beyond its parameters; None, as by default: nothing.

        It is not part of the workload's identity, and is never stored.
        """
        return None

    def receive(self, params: P, carried: bytes) -> None:
        """Takes what `carried` returned in the process that sent the workload."""
        raise NotImplementedError(f"operator {self.name} carries something that it cannot receive")

    def unrelated(self, params: P, others: P) -> bool:
        """Whether what is known about one workload says nothing about another, given by its parameters. Default: no."""
        return False

    def label(self, params: P) -> str:
        """A short text for tables. By default it has the name and each parameter that differs from its default."""
        optional = self.defaults(params)
        words = [f"{name}={_words(value)}" for name, value in params.items() if optional.get(name) != value]
        return " ".join([self.name, *words])


def _words(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
