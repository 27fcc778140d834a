"""How an alternative gets its kernel: stored machine code, such code launched for other sizes, or a configuration built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from schedsearch.config import Config
from schedsearch.device import Device, LoadedKernel
from schedsearch.errors import DatabaseError, PlanError, SchedsearchError, WrongResultError
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.records.damage import DamageError
from schedsearch.records.lookup import Lookup, LookupRow, NeighbourRow
from schedsearch.runtime.alternatives import Alternative, Refusal
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.backend.code_cache import CodeCache
    from schedsearch.runtime.ahead import Recipe
    from schedsearch.space import ConfigSpace
    from schedsearch.target import Target
    from schedsearch.template import Template

# The modules that a build imports, by kind of target. They are looked up, not imported, so that `explain` stays quick.
COMPILERS = {"cpu": ("numba", "llvmlite"), "cuda": ("numba", "cuda.bindings.nvjitlink")}


class Seeker(Protocol):
    """What seeks a kernel: its task, the template's spaces for it, and what was compiled."""

    workload: Workload
    target: Target
    mode: str
    code: Callable[[], CodeCache]

    def space(self, template: Template) -> ConfigSpace:
        """The template's configurations for the workload."""


@dataclass(frozen=True)
class Stored:
    """Machine code in the database."""

    lookup: Lookup
    row: LookupRow
    workload: Workload
    verified: bool

    def _artifact(self) -> Artifact:
        """Raises DatabaseError if the code is not trusted, was pruned, is damaged, or is not that of the workload."""
        code = self.lookup.code(self.row)  # also checks that the plan is the one that was signed
        return Artifact(code, plan_of(self.lookup, self.row, self.workload))

    def check(self) -> None:
        self._artifact()

    def load(self, device: Device) -> tuple[LoadedKernel, bool]:
        return device.load(self._artifact()), self.verified


def plan_of(lookup: Lookup, row: LookupRow, workload: Workload | None = None) -> LaunchPlan:
    """The launch plan of stored code. Raises DatabaseError if it is damaged, or does not fit the workload."""
    assert row.plan_json is not None
    try:
        plan = LaunchPlan.from_json(row.plan_json)
        plan.check(workload)
    except PlanError as error:
        place = f"{lookup.path}: table artifact, row {(row.artifact_sha256 or '')[:12]}"
        raise DatabaseError(f"{place}: the launch plan cannot be used: {error}; tune again") from error
    return plan


@dataclass(frozen=True)
class Relaunch:
    """Stored machine code of another workload, whose kernel takes its sizes at run time."""

    fallback: Seeker
    row: NeighbourRow
    config: Config
    other: Workload
    lookup: Lookup

    def check(self) -> None:
        """Raises Refusal, SchedsearchError or ImportError if the code cannot serve here."""
        self._artifact()

    def _stored(self) -> Artifact:
        """Raises Refusal or SchedsearchError if there is no code that this device runs and this machine signed."""
        target, label = self.fallback.target, self.other.label
        try:
            row = self.lookup.exact(self.other.id, self.row.target_key, self.fallback.mode)
        except DamageError as error:
            raise Refusal(str(error)) from error
        if row is None or row.artifact_sha256 is None or row.plan_json is None or row.config_json != self.row.config_json:
            raise Refusal(f"the database has no machine code of {label}")
        if not row.vouched:
            raise Refusal(f"this machine did not sign record {row.record_id} of {label}")
        plan = plan_of(self.lookup, row, self.other)
        if plan.kind != target.kind or (target.kind == "cuda" and not target.runs(plan.arch)):
            raise Refusal(f"machine code of {label} is for {plan.arch}")
        return Artifact(self.lookup.code(row), plan)

    def _artifact(self) -> Artifact:
        from schedsearch.template import load_template

        workload, target = self.fallback.workload, self.fallback.target
        template = load_template(self.row.template)
        if template.version != self.row.template_version:
            raise Refusal(f"{template.name} is now version {template.version}, the record is of {self.row.template_version}")
        if reason := template.validate(workload, target):
            raise Refusal(f"{template.name} cannot run it here: {reason}")
        config = template.current(self.config)
        if reasons := self.fallback.space(template).check(config):
            raise Refusal(f"the configuration is not legal here: {'; '.join(reasons)}")
        from schedsearch.backend.relaunch import relaunched

        sources = [template.kernel(each, target, config) for each in (self.other, workload)]
        found = relaunched(self._stored(), sources[0], sources[1])
        if found is None:
            raise Refusal(f"machine code of {self.other.label} is for other types or launches")
        found.plan.check(workload)
        return found

    def load(self, device: Device) -> tuple[LoadedKernel, bool]:
        workload = self.fallback.workload
        loaded = device.load(self._artifact())
        if reuse_of(self.row.template, workload) == "trusted":
            return loaded, False
        return _verified(device, self.fallback, loaded), True


def reuse_of(template: str, workload: Workload) -> str:
    """`Template.reuse`; never if the template cannot be loaded here."""
    from schedsearch.template import load_template

    try:
        return load_template(template).reuse(workload)
    except (SchedsearchError, ImportError):
        return "never"


def _verified(device: Device, fallback: Seeker, loaded: LoadedKernel, workload: Workload | None = None) -> LoadedKernel:
    """Raises WrongResultError, after unloading it, if a kernel computes something else than the reference.

    Args:
        workload: that the kernel was loaded for; default: that of `fallback`.
    """
    from schedsearch.backend import RejectedError
    from schedsearch.verification.verify import verify_once

    try:
        problem = verify_once(device, workload or fallback.workload, loaded, fallback.code())
    except RejectedError as error:  # of what verifies it, which another process could not compile
        loaded.close()
        raise Refusal(f"the kernel cannot be verified here: {error}") from error
    if problem:
        loaded.close()
        raise WrongResultError(f"the kernel computes wrong values here: {problem}")
    return loaded


@dataclass(frozen=True)
class Build:
    """A configuration that is built now and verified once."""

    fallback: Seeker
    template: str
    config: Config
    version: int

    def alternative(
        self,
        level: str,
        reason: str,
        time_ns: float | None = None,
        record_id: int | None = None,
        shipped: LookupRow | None = None,
    ) -> Alternative:
        origin = self.template, self.config
        return Alternative(level, reason, *origin, self.check, self.load, time_ns, record_id, True, self.recipe, shipped)

    def check(self) -> None:
        """Raises Refusal, SchedsearchError or ImportError if the configuration cannot be built here."""
        target = self.fallback.target
        for module in COMPILERS[target.kind]:
            if not _is_installed(module):
                raise Refusal(cannot_build(f"there is no module {module}"))
        if target.kind == "cuda":
            from schedsearch.backend.compilers import usable

            usable()
        from schedsearch.template import load_template

        template = load_template(self.template)
        if template.version != self.version:
            raise Refusal(f"{self.template} is now version {template.version}, the record is of {self.version}; tune again")
        if reason := template.validate(self.fallback.workload, target):
            raise Refusal(f"{self.template} cannot run it here: {reason}")
        if reasons := self.fallback.space(template).check(template.current(self.config)):
            raise Refusal(f"the configuration is not legal here: {'; '.join(reasons)}")

    def recipe(self) -> Recipe[BuildResult]:
        from schedsearch.runtime.ahead import kernel_recipe
        from schedsearch.template import load_template

        return kernel_recipe(load_template(self.template), self.fallback.workload, self.config)

    def load(self, device: Device) -> tuple[LoadedKernel, bool]:
        from schedsearch.backend import CompileError, RejectedError

        try:
            if reuse_of(self.template, self.fallback.workload) == "trusted" and (found := self._shared(device)) is not None:
                return found
            artifact = self.recipe().artifact(self.fallback.code(), self.fallback.target)
        except (CompileError, RejectedError) as error:
            raise Refusal(f"the configuration does not build here: {error}") from error
        return _verified(device, self.fallback, device.load(artifact)), True

    def _shared(self, device: Device) -> tuple[LoadedKernel, bool] | None:
        """The kernel from machine code that serves workloads of all sizes: it is compiled and verified once, on the small
        workload of its template. None if there is none, or if its code is another."""
        from schedsearch.backend.kept import compile_kept
        from schedsearch.backend.relaunch import code_name, with_launches
        from schedsearch.template import load_template

        workload, target, code = self.fallback.workload, self.fallback.target, self.fallback.code()
        template = load_template(self.template)
        config, small = template.current(self.config), template.representative(workload)
        if small is workload:
            return None
        source, of_small = (template.kernel(each, target, config) for each in (workload, small))
        name = code_name(source)
        if name is None or name != code_name(of_small):
            return None
        artifact = code.get(name, lambda: compile_kept(source, target).artifact)
        if name not in code.verified:
            _verified(device, self.fallback, device.load(with_launches(artifact, of_small)), small).close()
            code.verified.add(name)
        made = with_launches(artifact, source)
        made.plan.check(workload)
        return device.load(made), True


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it
        return False


def text_of(error: Exception) -> str:
    return cannot_build(error) if isinstance(error, ImportError) else str(error)


def cannot_build(reason: object) -> str:
    return (
        f"building needs a compiler ({reason}); install schedsearch with its dependencies (for a GPU with the extra cu13 or "
        "cu12), or tune this workload beforehand"
    )
