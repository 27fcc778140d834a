"""The contract of a template, and that of an operator's reference.

A template says how to run one operator in many ways: which workloads it takes (`validate`), its knobs (`space`), a
rule-based starting point (`default`), and the kernel for one configuration (`kernel`). The reference that it is judged
by belongs to the operator, not to the template: see `Reference`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from schedsearch.config import Config
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template.source import KernelSource
from schedsearch.workload import Workload


class Template(ABC):
    """Stateless. Subclasses set the class attributes and implement the four methods.

    Attributes:
        name: unique; in records and on the command line.
        version: raise it when a config no longer means the same kernel; part of a record's identity.
        op: name of the operator.
        kind: cuda or cpu.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    op: ClassVar[str]
    kind: ClassVar[Literal["cuda", "cpu"]]

    @abstractmethod
    def validate(self, workload: Workload, target: Target) -> str | None:
        """Why this template cannot run the workload on the target (one sentence: what, got, allowed), or None."""

    @abstractmethod
    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        """All legal configurations; never empty when `validate` returns None."""

    @abstractmethod
    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """A good configuration by formulas over shape and target.

        Args:
            space: what `space(workload, target)` returned.

        Returns:
            A configuration that is legal in `space`.
        """

    def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
        """What somebody would write who tunes nothing: no tiles, one element or vector at a time; legal in `space`.

        Tuning races it beside the default, so that its result shows what the choice of a configuration is worth. None,
        which is what a template returns unless it says otherwise, where it has no such configuration.
        """
        return None

    @abstractmethod
    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        """The kernel for one legal configuration. Plain Python: compiles nothing."""


class Reference(ABC):
    """The independent truth about one operator."""

    op: ClassVar[str]

    @abstractmethod
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        """A naive kernel with the workload's parameters in its order (pointers of `signature`, then of `y` as float64,
        then of `magnitude` as float64, then the scalars) that computes y in float64 before the cast to out_dtype, and
        magnitude = sum |x||weight| (epilogue magnitudes added), which bounds the rounding error."""

    @abstractmethod
    def points(self, workload: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float], flat_indices: Any) -> Any:
        """The same in NumPy float64, at some flat indices into the output only: shape (len(flat_indices),)."""
