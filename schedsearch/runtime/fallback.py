"""The fallback levels from a workload to a kernel: exact record, same architecture, shipped record, nearest workload,
rule-based default.

`compile` and `explain` go through the same levels. Each level yields the alternatives that it offers, or says
why it has none. An alternative is first checked, without a device and without compiling, and then loaded or built.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.device import Device, LoadedKernel
from schedsearch.errors import (
    DatabaseError,
    NoRecordError,
    SchedsearchError,
    UnsupportedError,
    UnusableRecordError,
    UsageError,
    WrongResultError,
    did_you_mean,
)
from schedsearch.measurement import OTHER_MODES
from schedsearch.progress import shown
from schedsearch.records.damage import DamageError
from schedsearch.records.lookup import Lookup, LookupRow, NeighbourRow
from schedsearch.records.shipped import Shipped, shipped_records, workload_of
from schedsearch.runtime.alternatives import Alternative, Found, Miss, Refusal
from schedsearch.runtime.kernel import Provenance
from schedsearch.runtime.loading import Build, Relaunch, Stored, cannot_build, plan_of, reuse_of, text_of
from schedsearch.target import Target
from schedsearch.workload import Workload, distance

if TYPE_CHECKING:
    from schedsearch.backend.code_cache import CodeCache
    from schedsearch.space import ConfigSpace
    from schedsearch.template import Template

LEVELS = ("exact", "other_mode", "same_architecture", "shipped", "nearest", "default")
_NEIGHBOURS_TRIED = 4  # each costs a build
_IMPORTED_TRIED = 4
_NEAR = 2.0
_NEAR_GAIN = 1.1
"""A shipped record serves another workload only if it is at most `_NEAR` away (`workload.distance`) and was at least
`_NEAR_GAIN` times as fast as the default of its own: nobody asked for it, and the default rule knows the shape. Own records
serve at any distance."""
_SIMILAR = 32  # shipped records that are looked at: some may be unrelated, or of other kinds of devices


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
        self._defaults: dict[str, Config] = {}
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
                    obstacle = text_of(error)
                else:
                    self._keep(alternative, loaded)
                    taken = (*why, f"{alternative.level}: {alternative.reason}")
                    origin = (
                        alternative.level,
                        alternative.template,
                        alternative.config,
                        alternative.time_ns,
                        alternative.record_id,
                        taken,
                        alternative.mode or self.mode,
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

    def _keep(self, alternative: Alternative, loaded: LoadedKernel) -> None:
        """Keeps a shipped kernel, which was built and verified a moment ago, in the database if there is one that can be
        written, so that it is loaded from there the next time."""
        if alternative.shipped is not None and self._lookup is not None and self._lookup.takes_records:
            from schedsearch.records.kept import keep_shipped

            keep_shipped(self._lookup.path, self.workload, alternative.shipped, self._shipped_records, loaded.artifact)

    def obstacle(self, alternative: Alternative | Miss) -> str | None:
        """Why an alternative cannot be taken, as far as this can be seen without device and compiler; None if it can."""
        if isinstance(alternative, Miss):
            return alternative.reason
        try:
            alternative.check()
        except (SchedsearchError, ImportError, Refusal) as error:
            return text_of(error)
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
        own = {"exact": self._exact, "other_mode": self._other_mode, "same_architecture": self._same_architecture}
        others = {"shipped": self._shipped, "nearest": self._nearest, "default": self._default}
        for level in LEVELS:
            if level not in self._allowed:
                continue
            if level in others:
                yield from others[level]()
            elif self._lookup is None:
                yield Miss(level, f"there is no database {self._db}")
            else:
                yield from own[level](self._lookup)

    def _exact(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        try:
            row = lookup.exact(self.workload.id, self.target.key, self.mode)
        except DamageError as error:
            yield Miss("exact", str(error), recorded=True)
            return
        if row is None:
            yield from self._imported(lookup)
            return
        yield from self._recorded("exact", lookup, row)

    def _other_mode(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        """The best record of this very task that was timed in another mode; see `OTHER_MODES` for their order."""
        found = False
        for mode in OTHER_MODES.get(self.mode, ()):
            try:
                row = lookup.exact(self.workload.id, self.target.key, mode)
            except DamageError as error:
                found = True
                yield Miss("other_mode", str(error), recorded=True)
                continue
            if row is not None:
                found = True
                yield from self._recorded("other_mode", lookup, row)
        if not found:
            yield Miss("other_mode", f"no record of this workload on {self.target.key} in another mode")

    def _recorded(self, level: str, lookup: Lookup, row: LookupRow) -> Iterator[Alternative]:
        """What a best record offers: its stored machine code, and its configuration."""
        config = Config.from_json(row.config_json)
        time_ns = row.time_ns if row.vouched else None  # otherwise anybody may have written it
        measured = "not measured by this machine" if time_ns is None else f"{time_ns / 1e3:.2f} us"
        if row.mode != self.mode:
            measured += f" in mode {row.mode}"
        record = f"record {row.record_id} by {row.template}, {measured}"
        origin = row.template, config
        if row.artifact_sha256 is not None:
            stored = Stored(lookup, row, self.workload, row.verified)
            reason = f"{record}, stored machine code"
            found = Alternative(level, reason, *origin, stored.check, stored.load, time_ns, row.record_id)
            yield replace(found, mode=row.mode)
        build = Build(self, *origin, row.template_version)
        reason = f"{record}, built again from its configuration"
        yield replace(build.alternative(level, reason, time_ns, row.record_id), mode=row.mode)

    def _imported(self, lookup: Lookup) -> Iterator[Alternative | Miss]:
        """What others measured on exactly this task: configurations that are built and verified here."""
        rows = lookup.imported(self.workload.id, self.target.key, self.mode, _IMPORTED_TRIED)
        for row in rows:
            config = Config.from_json(row.config_json)
            build = Build(self, row.template, config, row.template_version)
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
        found, why = False, [f"no machine code of another device for this workload runs on {target.name}"]
        for row in lookup.same_architecture(self.workload.id, self.mode):
            if row.target_key == target.key or row.plan_json is None or row.arch is None:
                continue
            if not row.vouched:
                why.append(f"this machine did not sign record {row.record_id} of {row.target_key}")
                continue
            try:
                plan = plan_of(lookup, row)
            except DatabaseError as error:
                why.append(str(error))
                continue
            if plan.kind != target.kind or not target.runs(row.arch):
                continue
            if max(step.dynamic_shared_bytes for step in plan.steps) > target.shared_bytes_per_block:
                continue
            found = True
            reason = f"record {row.record_id} of {row.target_key} by {row.template}: {row.arch} code runs on {target.name}"
            stored = Stored(lookup, row, self.workload, verified=False)
            config = Config.from_json(row.config_json)
            yield Alternative(
                "same_architecture", reason, row.template, config, stored.check, stored.load, None, row.record_id
            )
        if not found:
            yield Miss("same_architecture", "; ".join(filter(None, [*why[:2], lookup.damage.summary()])))

    def _shipped(self) -> Iterator[Alternative | Miss]:
        """What was measured for the package on this kind of device: a configuration that is built and verified here."""
        target, shipped = self.target, self._shipped_records
        modes = self.mode, *OTHER_MODES.get(self.mode, ())
        try:
            rows = (shipped.exact(self.workload.id, target.key, mode) for mode in modes)
            row = next((row for row in rows if row is not None), None)
        except DamageError as error:
            yield Miss("shipped", str(error))
            return
        if row is None:
            reason = f"no shipped record of this workload on {target.key}"
            yield Miss("shipped", shipped.problem or reason)
            return
        gain = shipped.gain(row.workload_id, row.mode)
        measured = "" if gain is None else ", the default" if gain == 1 else f", {gain:.2f} times as fast as the default"
        reason = f"shipped record by {row.template}{measured} ({shipped.name}), built now from its configuration"
        build = Build(self, row.template, Config.from_json(row.config_json), row.template_version)
        yield build.alternative("shipped", reason, shipped=row)

    @property
    def _shipped_records(self) -> Shipped:
        return shipped_records(self.target.key) if "shipped" in self._allowed else Shipped(None, "they are not allowed")

    def _neighbours(self) -> Iterator[tuple[NeighbourRow, Workload | None, Lookup | None]]:
        """The best own records of the operator with the database that may have their machine code, and the shipped ones that
        are most similar."""
        sought = self.workload.op, self.mode, f"{self.target.kind}:"
        if self._lookup is not None:
            for row in self._lookup.nearest(*sought):
                yield row, workload_of(row), self._lookup
        shipped = self._shipped_records
        for row, other in shipped.similar(self.workload, *sought[1:], _SIMILAR):
            if (shipped.gain(other.id, self.mode) or 1.0) >= _NEAR_GAIN:
                yield row, other, None

    def _nearest(self) -> Iterator[Alternative | Miss]:
        workload, target = self.workload, self.target
        ranked, unreadable = [], 0
        for row, other, lookup in self._neighbours():
            if other is None:
                unreadable += 1
                continue
            far = distance(workload, other)
            if lookup is None and far > _NEAR:
                continue
            if (other != workload or row.target_key != target.key) and far < math.inf:  # else another level has it
                ranked.append((far, row.target_key != target.key, lookup is None, other.label, row, other, lookup))
        ranked.sort(key=lambda entry: entry[:4])
        for far, _, _, label, row, other, lookup in ranked[:_NEIGHBOURS_TRIED]:
            config = Config.from_json(row.config_json)
            if lookup is not None and reuse_of(row.template, workload) != "never":
                again = Relaunch(self, row, config, other, lookup)
                reason = f"machine code of {label} ({row.template}), launched for these sizes"
                verifies = reuse_of(row.template, workload) != "trusted"
                yield Alternative("nearest", reason, row.template, config, again.check, again.load, verifies=verifies)
            build = Build(self, row.template, config, row.template_version)
            of = f"{label}, a shipped record" if lookup is None else label
            yield build.alternative("nearest", f"configuration of {of} ({row.template}, distance {far:.2f}), built now")
        if not ranked:
            more = f" ({unreadable} cannot be read by this version)" if unreadable else ""
            why = f"no record of another {workload.op} on a {target.kind} device in mode {self.mode}{more}"
            if self._lookup is None and self._shipped_records.lookup is None:
                why = f"there is no database {self._db}"
            damage = "" if self._lookup is None else self._lookup.damage.summary()
            yield Miss("nearest", "; ".join(filter(None, [why, damage])))

    def _default(self) -> Iterator[Alternative | Miss]:
        try:
            from schedsearch.template import load_templates

            matching = load_templates().matching(self.workload, self.target)
        except ImportError as error:
            yield Miss("default", cannot_build(error))
            return
        except UnsupportedError as error:
            yield Miss("default", str(error))
            return
        for template in matching:
            build = Build(self, template.name, self._default_of(template), template.version)
            reason = f"rule-based configuration of {template.name}, built now"
            yield build.alternative("default", reason)

    def _default_of(self, template: Template) -> Config:
        """The template's rule-based configuration, found once: that may take 10 ms."""
        if template.name not in self._defaults:
            self._defaults[template.name] = template.default(self.workload, self.target, self.space(template))
        return self._defaults[template.name]

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


def _obstacles(found: Iterable[tuple[str, str]]) -> str:
    """Levels and what stands in their way, each obstacle once, with all levels that it concerns."""
    levels: dict[str, list[str]] = {}
    for level, obstacle in found:
        named = levels.setdefault(obstacle, [])
        if level not in named:
            named.append(level)
    return "; ".join(f"{', '.join(named)}: {obstacle}" for obstacle, named in levels.items())


def _empty_cache() -> CodeCache:
    from schedsearch.backend.code_cache import CodeCache

    return CodeCache()


def check_levels(allow: str | Iterable[str]) -> tuple[str, ...]:
    """The allowed levels. Raises UsageError if one is unknown."""
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for level in allowed:
        if level not in LEVELS:
            raise UsageError(f"unknown fallback level {level!r}{did_you_mean(level, LEVELS)}; allowed: {', '.join(LEVELS)}")
    return allowed
