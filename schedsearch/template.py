"""The contract of a template, and the set of templates that a run uses.

A template says how to run one operator in many ways: which workloads it takes (`validate`), its knobs (`space`), a
rule-based starting point (`default`), and the kernel for one configuration (`kernel`). The reference that it is judged
by belongs to the operator, not to the template: see `Reference`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from schedsearch.errors import UnsupportedError, UsageError, did_you_mean
from schedsearch.launch import Grid, Param
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.workload import Config, Workload

ENTRY_POINT_GROUP = "schedsearch.templates"

# Built-ins by name, imported when first asked for; an import has no side effect.
BUILT_IN = {
    "conv2d_wgmma": "schedsearch.templates.conv2d_wgmma:Conv2dWgmma",
    "conv2d_halo": "schedsearch.templates.conv2d_halo:Conv2dHalo",
    "conv2d_stem": "schedsearch.templates.conv2d_stem:Conv2dStem",
    "conv2d_unfold": "schedsearch.templates.conv2d_unfold:Conv2dUnfold",
    "conv2d_mma": "schedsearch.templates.conv2d_mma:Conv2dMma",
    "conv2d_cpu": "schedsearch.templates.cpu.conv2d_cpu:Conv2dCpu",
}
BUILT_IN_REFERENCES = {"conv2d": "schedsearch.templates.conv2d_reference:Conv2dReference"}


@dataclass(frozen=True)
class KernelStep:
    """One Python function to compile and how it is launched.

    `function` takes one argument per entry of `params`: u64 for a Pointer or TensorMap (the address of the map), i32, i64,
    f32; u64 also for an Int64 whose argument is annotated `types.uint64`, the address of a buffer that may be absent. On the
    CPU two more i64 follow: the half-open range [start, stop) of work items to compute; the device splits the work items
    evenly over `block_threads` threads. Knobs are closure constants.

    `shaped_by` names the captured integers and booleans that decide the code's shape: lengths of local arrays, conditions
    that leave out branches. All others are then mere numbers to the CUDA backend, and kernels that differ in nothing else
    are built several times faster after the first. None: all of them decide.

    Other fields as in `Step`.
    """

    function: Callable[..., None]
    params: tuple[Param, ...]
    grid: Grid
    block_threads: int
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    min_blocks_per_sm: int = 1
    weight_only: bool = False
    shaped_by: frozenset[str] | None = None


@dataclass(frozen=True)
class KernelSource:
    """What a template hands to the backend. Fields as in `LaunchPlan`; `arch` is e.g. sm_80, sm_90a or native."""

    kind: Literal["cuda", "cpu"]
    arch: str
    steps: tuple[KernelStep, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)


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
    def default(self, workload: Workload, target: Target) -> Config:
        """A good configuration by formulas over shape and target; always legal in `space`."""

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


class TemplateSet(Mapping[str, Template]):
    """Templates by name, in the order in which they were added."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._templates: dict[str, Template] = {}
        for template in templates:
            if template.name in self._templates:
                raise UsageError(f"two templates are named {template.name!r}; names must be unique")
            self._templates[template.name] = template

    def __getitem__(self, name: str) -> Template:
        try:
            return self._templates[name]
        except KeyError:
            raise KeyError(f"no template {name!r}{did_you_mean(name, self._templates)}; known: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def matching(self, workload: Workload, target: Target) -> list[Template]:
        """Those that can run the workload on the target.

        Raises:
            UnsupportedError: none can; the message gives each template's reason.
        """
        reasons, found = [], []
        for template in self.values():
            if template.op != workload.op:
                continue
            if template.kind != target.kind:
                reasons.append(f"{template.name} is for {template.kind}")
            elif reason := template.validate(workload, target):
                reasons.append(f"{template.name}: {reason}")
            else:
                found.append(template)
        if not found:
            raise UnsupportedError(f"no template can run {workload.label} on {target.name}: " + "; ".join(reasons))
        return found


def load_template(name: str) -> Template:
    """One template, built-in or installed by a third party, without importing the others.

    Raises:
        UsageError: unknown name.
    """
    if name in BUILT_IN:
        return _load(BUILT_IN[name])  # type: ignore[no-any-return]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return point.load()()  # type: ignore[no-any-return]
    raise UsageError(f"no template {name!r}{did_you_mean(name, template_names())}; known: {', '.join(template_names())}")


def load_templates(names: Iterable[str] | None = None) -> TemplateSet:
    """The templates of these names; all built-in and installed ones by default."""
    return TemplateSet(load_template(name) for name in (template_names() if names is None else names))


def template_names() -> list[str]:
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]))


def load_reference(op: str) -> Reference:
    return _load(BUILT_IN_REFERENCES[op])  # type: ignore[no-any-return]


def _load(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)()
