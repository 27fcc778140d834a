"""The fallback levels from a workload to a kernel: exact record, same architecture, nearest workload, rule-based default.

`compile` and `explain` go through the same levels. Each level yields the alternatives that it offers, or says
why it has none. An alternative is first checked, without a device and without compiling, and then loaded or built.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.device import Device, LoadedKernel
from schedsearch.errors import (
    DatabaseError,
    NoRecordError,
    PlanError,
    SchedsearchError,
    UnsupportedError,
    UnusableRecordError,
    UsageError,
    WrongResultError,
    did_you_mean,
)
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.progress import shown
from schedsearch.records.damage import DamageError
from schedsearch.records.lookup import Lookup, LookupRow, NeighbourRow
from schedsearch.runtime.alternatives import Alternative, Found, Miss, Refusal
from schedsearch.runtime.kernel import Provenance
from schedsearch.target import Target
from schedsearch.workload import Workload, distance

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.backend.code_cache import CodeCache
    from schedsearch.runtime.ahead import Recipe
    from schedsearch.space import ConfigSpace
    from schedsearch.template import Template

LEVELS = ("exact", "same_architecture", "nearest", "default")
_NEIGHBOURS_TRIED = 4  # each costs a build
_IMPORTED_TRIED = 4

# The modules that a build imports, by kind of target. They are looked up, not imported, so that `explain` stays quick.
_COMPILERS = {"cpu": ("numba", "llvmlite"), "cuda": ("numba", "numba_cuda", "cuda.bindings.nvjitlink")}


class Fallback:
    """The alternatives to run one workload on one target.

    Args:
        lookup: the database; None if there is no file at `db`.
        db: its path, for messages.
        mode: how the records were timed.
        allowed: the levels that may serve.
        code: gives what was compiled ahead, and keeps what is compiled now; default: a cache of its own.
    """

    def __init__(
        self,
        workload: Workload,
        target: Target,
        lookup: Lookup | None,
        db: Path,
        mode: str,
        allowed: Collection[str],
        code: Callable[[], CodeCache] | None = None,
    ) -> None:
        self.workload, self.target, self._lookup, self._db = workload, target, lookup, db
        self.mode, self._allowed = mode, allowed
        self._spaces: dict[str, ConfigSpace] = {}
        self.code = code or functools.cache(_empty_cache)

    def serve(self, device: Callable[[], Device]) -> Found:
        """The first alternative that can be taken. `device` opens the device; it is called when a kernel is to be loaded.

        Raises:
            WrongResultError: kernels were built, but computed wrong values, and no other alternative was left.
            UnusableRecordError: there is a record of this workload on this kind of device, but none can be taken; it
                says why.
            NoRecordError: the same without such a record.
            DeviceError: the device cannot be opened.
        """
        why: list[str] = []
        tried: list[tuple[str, str]] = []
        missed: list[tuple[str, str]] = []
        wrong = recorded = False
        for alternative in self.alternatives():
            recorded = recorded or (alternative.level == "exact" and alternative.recorded)
            obstacle = self.obstacle(alternative)
            if obstacle is None:
                assert isinstance(alternative, Alternative)
                opened = device()
                try:
                    with _told(alternative, self.workload):
                        loaded, verified = alternative.load(opened)
                except (SchedsearchError, ImportError, Refusal) as error:
                    wrong = wrong or isinstance(error, WrongResultError)
                    obstacle = _text(error)
                else:
                    taken = (*why, f"{alternative.level}: {alternative.reason}")
                    origin = (
                        alternative.level,
                        alternative.template,
                        alternative.config,
                        alternative.time_ns,
                        alternative.record_id,
                        taken,
                        self.mode,
                    )
                    return Found(loaded, verified, Provenance(*origin))
            why.append(f"{alternative.level}: {obstacle}")
            (missed if isinstance(alternative, Miss) else tried).append((alternative.level, obstacle))
        text = f"no kernel for {self.workload.label} on {self.target.name}: {_obstacles(tried + missed)}. "
        if wrong and self.workload.op == "own_kernel":
            raise WrongResultError(f"{text}Correct the kernel, or its reference")
        if wrong:
            raise WrongResultError(f"{text}Tune it here (`schedsearch tune`), and report the template that is wrong")
        if recorded:
            raise UnusableRecordError(f"{text}Tune it here (`schedsearch tune`), or allow more levels")
        raise NoRecordError(f"{text}Tune it (`schedsearch tune`), or allow more levels")

    def obstacle(self, alternative: Alternative | Miss) -> str | None:
        """Why an alternative cannot be taken, as far as this can be seen without device and compiler; None if it can."""
        if isinstance(alternative, Miss):
            return alternative.reason
        try:
            alternative.check()
        except (SchedsearchError, ImportError, Refusal) as error:
            return _text(error)
        return None

    def viable(self) -> Iterator[Alternative]:
        """The alternatives that can be taken, as far as this can be seen without device and compiler."""
        return (
            alternative
            for alternative in self.alternatives()
            if isinstance(alternative, Alternative) and self.obstacle(alternative) is None
        )

    def alternatives(self) -> Iterator[Alternative | Miss]:
        """The alternatives in the order of preference, with a `Miss` for each level that has none."""
        levels = {
            "exact": self._exact,
            "same_architecture": self._same_architecture,
            "nearest": self._nearest,
        }
        for level in LEVELS:
            if level not in self._allowed:
                continue
            if level == "default":
                yield from self._default()
            elif self._lookup is None:
                yield Miss(level, f"there is no database {self._db}")
            else:
                yield from levels[level](self._lookup)

    def _exact(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        try:
            row = lookup.exact(self.workload.id, self.target.key, self.mode)
        except DamageError as error:
            yield Miss("exact", str(error), recorded=True)
            return
        if row is None:
            yield from self._imported(lookup)
            return
        config = Config.from_json(row.config_json)
        time_ns = row.time_ns if row.vouched else None  # otherwise anybody may have written it
        measured = "not measured by this machine" if time_ns is None else f"{time_ns / 1e3:.2f} us"
        record = f"record {row.record_id} by {row.template}, {measured}"
        origin = row.template, config
        if row.artifact_sha256 is not None:
            stored = _Stored(lookup, row, self.workload, row.verified)
            reason = f"{record}, stored machine code"
            yield Alternative("exact", reason, *origin, stored.check, stored.load, time_ns, row.record_id)
        build = _Build(self, *origin, row.template_version)
        reason = f"{record}, built again from its configuration"
        yield build.alternative("exact", reason, time_ns, row.record_id)

    def _imported(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        """What others measured on exactly this task: configurations that are built and verified here."""
        rows = lookup.imported(self.workload.id, self.target.key, self.mode, _IMPORTED_TRIED)
        for row in rows:
            config = Config.from_json(row.config_json)
            build = _Build(self, row.template, config, row.template_version)
            reason = (
                f"imported record {row.record_id} by {row.template} (from {row.source}), built now from its configuration"
            )
            yield Alternative(
                "exact", reason, row.template, config, build.check, build.load, None, row.record_id, True, build.recipe
            )
        if not rows:
            why = f"no record of this workload on {self.target.key} in mode {self.mode}"
            yield Miss("exact", "; ".join(filter(None, [why, lookup.damage.summary()])))

    def _same_architecture(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        target = self.target
        found, why = False, [f"no stored machine code of this workload runs on {target.name}"]
        for row in lookup.same_architecture(self.workload.id, self.mode):
            if row.target_key == target.key or row.plan_json is None or row.arch is None:
                continue
            if not row.vouched:
                why.append(f"this machine did not sign record {row.record_id} of {row.target_key}")
                continue
            try:
                plan = _plan(lookup, row)
            except DatabaseError as error:
                why.append(str(error))
                continue
            if plan.kind != target.kind or not target.runs(row.arch):
                continue
            if max(step.dynamic_shared_bytes for step in plan.steps) > target.shared_bytes_per_block:
                continue
            found = True
            reason = f"record {row.record_id} of {row.target_key} by {row.template}: {row.arch} code runs on {target.name}"
            stored = _Stored(lookup, row, self.workload, verified=False)
            config = Config.from_json(row.config_json)
            yield Alternative(
                "same_architecture", reason, row.template, config, stored.check, stored.load, None, row.record_id
            )
        if not found:
            yield Miss("same_architecture", "; ".join(filter(None, [*why[:2], lookup.damage.summary()])))

    def _nearest(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        workload, target = self.workload, self.target
        ranked, unreadable = [], 0
        for row in lookup.nearest(workload.op, self.mode, f"{target.kind}:"):
            try:
                other = Workload.from_json(row.workload_json)
            except UsageError:  # of an operator or a version that this installation does not know
                unreadable += 1
                continue
            far = distance(workload, other)
            if (other != workload or row.target_key != target.key) and far < math.inf:  # else the exact level has it
                ranked.append((far, row.target_key != target.key, other.label, row, other))
        ranked.sort(key=lambda entry: entry[:3])
        for far, _, label, row, other in ranked[:_NEIGHBOURS_TRIED]:
            config = Config.from_json(row.config_json)
            if _reuse(row.template, workload) != "never":
                again = _Relaunch(self, row, config, other, lookup)
                reason = f"machine code of {label} ({row.template}), launched for these sizes"
                verifies = _reuse(row.template, workload) != "trusted"
                yield Alternative("nearest", reason, row.template, config, again.check, again.load, verifies=verifies)
            build = _Build(self, row.template, config, row.template_version)
            reason = f"configuration of {label} ({row.template}, distance {far:.2f}), built now"
            yield build.alternative("nearest", reason)
        if not ranked:
            more = f" ({unreadable} cannot be read by this version)" if unreadable else ""
            why = f"no record of another {workload.op} on a {target.kind} device in mode {self.mode}{more}"
            yield Miss("nearest", "; ".join(filter(None, [why, lookup.damage.summary()])))

    def _default(self) -> Iterator[Alternative | Miss]:
        try:
            from schedsearch.template import load_templates

            matching = load_templates().matching(self.workload, self.target)
        except ImportError as error:
            yield Miss("default", _cannot_build(error))
            return
        except UnsupportedError as error:
            yield Miss("default", str(error))
            return
        for template in matching:
            config = template.default(self.workload, self.target, self.space(template))
            build = _Build(self, template.name, config, template.version)
            reason = f"rule-based configuration of {template.name}, built now"
            yield build.alternative("default", reason)

    def space(self, template: Template) -> ConfigSpace:
        """The template's configurations for the workload, made once."""
        if template.name not in self._spaces:
            self._spaces[template.name] = template.space(self.workload, self.target)
        return self._spaces[template.name]


@contextlib.contextmanager
def _told(alternative: Alternative, workload: Workload) -> Iterator[None]:
    """Shows what takes long: compiling and verifying."""
    if alternative.recipe is None and not alternative.verifies:
        yield
        return
    with shown() as display:
        display.stage(f"{alternative.reason}: {workload.label}")
        yield


@dataclass(frozen=True)
class _Stored:
    """Machine code in the database."""

    lookup: Lookup
    row: LookupRow
    workload: Workload
    verified: bool

    def _artifact(self) -> Artifact:
        """Raises DatabaseError if the code is not trusted, was pruned, is damaged, or is not that of the workload."""
        code = self.lookup.code(self.row)  # also checks that the plan is the one that was signed
        return Artifact(code, _plan(self.lookup, self.row, self.workload))

    def check(self) -> None:
        self._artifact()

    def load(self, device: Device) -> tuple[LoadedKernel, bool]:
        return device.load(self._artifact()), self.verified


def _plan(lookup: Lookup, row: LookupRow, workload: Workload | None = None) -> LaunchPlan:
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
class _Relaunch:
    """Stored machine code of another workload, whose kernel takes its sizes at run time."""

    fallback: Fallback
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
        plan = _plan(self.lookup, row, self.other)
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
        if _reuse(self.row.template, workload) == "trusted":
            return loaded, False
        return _verified(device, self.fallback, loaded), True


def _obstacles(found: Iterable[tuple[str, str]]) -> str:
    """Levels and what stands in their way, each obstacle once, with all levels that it concerns."""
    levels: dict[str, list[str]] = {}
    for level, obstacle in found:
        named = levels.setdefault(obstacle, [])
        if level not in named:
            named.append(level)
    return "; ".join(f"{', '.join(named)}: {obstacle}" for obstacle, named in levels.items())


def _reuse(template: str, workload: Workload) -> str:
    """`Template.reuse`; never if the template cannot be loaded here."""
    from schedsearch.template import load_template

    try:
        return load_template(template).reuse(workload)
    except (SchedsearchError, ImportError):
        return "never"


def _empty_cache() -> CodeCache:
    from schedsearch.backend.code_cache import CodeCache

    return CodeCache()


def _verified(device: Device, fallback: Fallback, loaded: LoadedKernel) -> LoadedKernel:
    """Raises WrongResultError, after unloading it, if a kernel computes something else than the reference."""
    from schedsearch.backend import RejectedError
    from schedsearch.verification.verify import verify_once

    try:
        problem = verify_once(device, fallback.workload, loaded, fallback.code())
    except RejectedError as error:  # of what verifies it, which another process could not compile
        loaded.close()
        raise Refusal(f"the kernel cannot be verified here: {error}") from error
    if problem:
        loaded.close()
        raise WrongResultError(f"the kernel computes wrong values here: {problem}")
    return loaded


@dataclass(frozen=True)
class _Build:
    """A configuration that is built now and verified once."""

    fallback: Fallback
    template: str
    config: Config
    version: int

    def alternative(
        self, level: str, reason: str, time_ns: float | None = None, record_id: int | None = None
    ) -> Alternative:
        origin = self.template, self.config
        return Alternative(level, reason, *origin, self.check, self.load, time_ns, record_id, True, self.recipe)

    def check(self) -> None:
        """Raises Refusal, SchedsearchError or ImportError if the configuration cannot be built here."""
        target = self.fallback.target
        for module in _COMPILERS[target.kind]:
            if not _is_installed(module):
                raise Refusal(_cannot_build(f"there is no module {module}"))
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
            artifact = self.recipe().artifact(self.fallback.code(), self.fallback.target)
        except (CompileError, RejectedError) as error:
            raise Refusal(f"the configuration does not build here: {error}") from error
        return _verified(device, self.fallback, device.load(artifact)), True


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it
        return False


def _text(error: Exception) -> str:
    return _cannot_build(error) if isinstance(error, ImportError) else str(error)


def _cannot_build(reason: object) -> str:
    return (
        f"building needs a compiler ({reason}); install schedsearch with its dependencies (for a GPU with the extra cu13 or "
        "cu12), or tune this workload beforehand"
    )


def check_levels(allow: str | Iterable[str]) -> tuple[str, ...]:
    """The allowed levels. Raises UsageError if one is unknown."""
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for level in allowed:
        if level not in LEVELS:
            raise UsageError(f"unknown fallback level {level!r}{did_you_mean(level, LEVELS)}; allowed: {', '.join(LEVELS)}")
    return allowed
