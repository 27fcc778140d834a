"""The contract of a template, and that of an operator's reference.

A template says how to run an operator, or several that are alike, in many ways: which workloads it takes (`validate`), its
knobs (`space`), a rule-based starting point (`default`), and the kernel for one configuration (`kernel`). The reference that
verifies its kernels belongs to the operator, not to the template: see `Reference`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

from schedsearch.config import Config
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template.renamed import Renamed, current_config, current_restriction
from schedsearch.template.source import KernelSource
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", bound=Mapping[str, Any], default=Any)
else:  # bare `Template` means `Template[Any]`; Python 3.11 cannot say that
    from typing import TypeVar

    P = TypeVar("P")


class Template(ABC, Generic[P]):
    """Stateless. Subclasses set the class attributes and implement the four methods.

    Attributes:
        name: unique; in records and on the command line.
        version: part of a record's identity. Raise it when a config no longer means the same kernel.
        op: name of the operator. A template of several overrides `ops`, and `op` is one of them.
        kind: cuda or cpu.
        renamed: a knob's earlier name -> its name today, or earlier value -> the knobs and values that say the same. Records
            that have the earlier names are still read; see `current`.
        added: knobs that earlier records lack -> the value that says the same.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    op: ClassVar[str]
    kind: ClassVar[Literal["cuda", "cpu"]]
    renamed: ClassVar[Renamed] = {}
    added: ClassVar[Mapping[str, int | str | bool]] = {}

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of all operators that it serves."""
        return (self.op,)

    @abstractmethod
    def validate(self, workload: Workload[P], target: Target) -> str | None:
        """Why this template cannot run the workload on the target (one sentence: what, got, allowed), or None."""

    @abstractmethod
    def space(self, workload: Workload[P], target: Target) -> ConfigSpace:
        """All legal configurations; never empty when `validate` returns None."""

    @abstractmethod
    def default(self, workload: Workload[P], target: Target, space: ConfigSpace) -> Config:
        """A good configuration by formulas over shape and target.

        Args:
            space: what `space(workload, target)` returned.

        Returns:
            A configuration that is legal in `space`.
        """

    def plain(self, workload: Workload[P], target: Target, space: ConfigSpace) -> Config | None:
        """The configuration that one would write without tuning: no tiles, one element or vector at a time; legal in
        `space`.

        The final race times it beside the default, so that the result shows what the choice of a configuration is worth.
        Returns None, also by default, if the template has no such configuration.
        """
        return None

    @abstractmethod
    def kernel(self, workload: Workload[P], target: Target, config: Config) -> KernelSource:
        """The kernel for one legal configuration. Plain Python: compiles nothing."""

    def current(self, config: Mapping[str, int | str | bool]) -> Config:
        """A configuration of any version of the names of knobs, under today's names; see `renamed` and `added`."""
        now = current_config(config, self.renamed)
        return Config({**self.added, **now}) if self.added else now

    def restricted(self, space: ConfigSpace, restrict: Mapping[str, Sequence[int | str | bool]]) -> ConfigSpace:
        """The space with only these values of its knobs, named as today or earlier. It ignores other templates' knobs.

        Raises:
            ConfigError: as `ConfigSpace.restrict`.
        """
        applicable = current_restriction(restrict, self.renamed, space.values)
        return space.restrict(applicable) if applicable else space

    def reuse(self, workload: Workload[P]) -> Literal["never", "verified", "trusted"]:
        """Whether machine code that was made for another workload may serve this one, if both kernels have the same
        functions and types of parameters, and only their launches differ: never, after it was verified for this workload, or
        as it is. Such kernels take sizes as numbers, and `kernel` returns the same function objects for all workloads.
        """
        return "never"

    def representative(self, workload: Workload[P]) -> Workload[P]:
        """A small workload whose kernel of the same configuration has the same machine code, if there is one: code that may
        serve other workloads as it is (`reuse`) is verified on it. By default the workload itself.
        """
        return workload


class Reference(ABC, Generic[P]):
    """The independent truth about one operator, with which every candidate is compared. Stateless.

    It is computed twice: by a naive kernel for all elements, and in NumPy for a few random ones. Both must agree.
    `schedsearch.templates.parts.reference` has the parts that such kernels share; docs/operators.md shows one.

    Attributes:
        pointwise: False if `truths` gives the truth, and `points` is never called.
    """

    pointwise: ClassVar[bool] = True

    def truths(
        self,
        workload: Workload[P],
        arrays: Mapping[str, object],
        scalars: Mapping[str, float],
        run: Callable[[KernelSource], Mapping[str, Any]],
        target: Target,
    ) -> Mapping[str, Any]:
        """The truth about whole outputs, if the reference is not `pointwise`.

        Args:
            arrays: as in `points`.
            run: launches a kernel of the workload on the same arrays; returns output -> array in its shape in memory.

        Returns:
            Output -> array of numbers in its shape in memory. Kernels may differ from the truth by rounding errors relative
            to the largest number of the output.
        """
        raise NotImplementedError

    @abstractmethod
    def kernel(self, workload: Workload[P], target: Target) -> KernelSource:
        """A naive kernel that writes the truth and bounds of rounding errors.

        Its parameters are named buffers and scalars of the workload, in any order:

        - a pointer for each argument of `workload.signature`;
        - for each output a pointer of its name, to the truth in the output's shape: float64 before rounding for a float
          format; int64 after rounding and saturation for an integer format, which must be met exactly;
        - for each output of a float format, unless the operator's equality is `exact`, a pointer to float64 that is named
          `magnitude_of(output)`: `magnitude * reduction * 2**-24` bounds the error of a correct kernel that computes in
          float32. For a sum of products it is the sum of |x| |weight|, and epilogues add to it;
        - the call-time scalars (float32).
        """

    @abstractmethod
    def points(
        self,
        workload: Workload[P],
        arrays: Mapping[str, object],
        scalars: Mapping[str, float],
        flat_indices: object,
        output: str,
    ) -> Any:
        """The truth about single elements, computed in NumPy by code that shares nothing with `kernel`.

        Args:
            arrays: the workload's arguments by name, in their shapes, of NumPy dtypes that hold every number exactly
                (float32 for bfloat16 and float8).
            scalars: the call-time scalars.
            flat_indices: int64 (p,), into the output in its order in memory.
            output: name of the output.

        Returns:
            Shape (p,): float64 before rounding for a float format; integers, rounded and saturated, for an integer one.
        """


def magnitude_of(output: str) -> str:
    """Name of the buffer in which a reference's kernel bounds the rounding errors of an output."""
    return f"magnitude_of_{output}"
