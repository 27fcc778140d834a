"""The ladder from a workload to a kernel: exact record, same architecture, nearest workload, rule-based default."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schedsearch.config import Config
from schedsearch.device import Device, LoadedKernel, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import (
    DatabaseError,
    NoRecordError,
    SchedsearchError,
    UnsupportedError,
    UsageError,
    did_you_mean,
)
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.records.lookup import Lookup, LookupRow
from schedsearch.runtime.kernel import Kernel, Provenance
from schedsearch.target import Target
from schedsearch.workload import Workload, distance

RUNGS = ("exact", "same_architecture", "nearest", "default")
_NEIGHBOURS_TRIED = 4  # each costs a build


@dataclass(frozen=True)
class _Way:
    """One way to get a kernel: `artifact()` returns machine code and whether it is verified for this workload here."""

    rung: str
    reason: str
    template: str
    config: Config
    artifact: Callable[[Device], tuple[LoadedKernel, bool]]
    time_ns: float | None = None
    record_id: int | None = None


@dataclass(frozen=True)
class Explanation:
    """What `compile` would do. `steps` holds (rung, whether it would serve, why) in the order tried."""

    workload: Workload
    target: Target
    steps: tuple[tuple[str, bool, str], ...]

    @property
    def lines(self) -> list[str]:
        return [f"{'->' if serves else '  '} {rung}: {reason}" for rung, serves, reason in self.steps]

    def __str__(self) -> str:
        return "\n".join([f"{self.workload.label} on {self.target.name}", *(f"  {line}" for line in self.lines)])

    def to_json(self) -> str:
        steps = [{"rung": rung, "serves": serves, "reason": reason} for rung, serves, reason in self.steps]
        return json.dumps({"workload": json.loads(self.workload.json), "target": self.target.key, "rungs": steps})


def compile(
    workload: Workload,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    allow: Iterable[str] = RUNGS,
    mode: str = COLD_GRAPH,
) -> Kernel:
    """Gets the best kernel for a workload without searching.

    Args:
        workload: what to compute.
        db: a live database or one written by `records export --deploy`; it may be missing when `allow` has the rung default.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        allow: the rungs that may be taken, of
            exact: the best record of this workload on this kind of device, its stored machine code;
            same_architecture: the best record on another device whose machine code runs here;
            nearest: the configuration of the most similar workload that is legal here, built now;
            default: the template's rule-based configuration, built now.
            What is built now is verified once against the reference; `Kernel.verified` tells.
        mode: how the records were timed.

    Returns:
        A `Kernel`; its `provenance` says on which rung it stands and why not higher.

    Raises:
        NoRecordError: no allowed rung has a kernel; the message has each one's reason.
        UsageError: an unknown rung, or no Workload.
        DatabaseError, DeviceError: the database or the device cannot be used.
    """
    allowed = _check_rungs(allow)
    if isinstance(target, str):
        target = detect(target)
    device: Device | None = None
    why: list[str] = []
    for way in _ladder(workload, target, Path(db), mode, allowed):
        if isinstance(way, str):
            why.append(way)
            continue
        device = device or open_device(target)
        try:
            loaded, verified = way.artifact(device)
        except (SchedsearchError, ImportError) as error:
            why.append(f"{way.rung}: {error}")
            continue
        provenance = Provenance(
            way.rung, way.template, way.config, way.time_ns, way.record_id, (*why, f"{way.rung}: {way.reason}")
        )
        ordinal = target.ordinal if target.kind == "cuda" else 0
        return Kernel(workload, loaded, (target.kind, ordinal), provenance, verified)
    raise NoRecordError(
        f"no kernel for {workload.label} on {target.name}: {'; '.join(why)}. "
        "Tune it (`schedsearch tune`), or allow more rungs"
    )


def explain(
    workload: Workload,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    mode: str = COLD_GRAPH,
) -> Explanation:
    """Says for every rung whether it would serve and why; builds and loads nothing. Raises as `compile` does."""
    if isinstance(target, str):
        target = detect(target)
    steps = []
    for way in _ladder(workload, target, Path(db), mode, RUNGS):
        if isinstance(way, str):
            rung, _, reason = way.partition(": ")
            steps.append((rung, False, reason))
        else:
            steps.append((way.rung, True, way.reason))
    return Explanation(workload, target, tuple(steps))


def _check_rungs(allow: Iterable[str]) -> tuple[str, ...]:
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for rung in allowed:
        if rung not in RUNGS:
            raise UsageError(f"unknown rung {rung!r}{did_you_mean(rung, RUNGS)}; allowed: {', '.join(RUNGS)}")
    return allowed


def _ladder(workload: Workload, target: Target, db: Path, mode: str, allowed: Iterable[str]) -> Iterator[_Way | str]:
    """Ways in the order of preference; a text in place of a rung that has none."""
    if not isinstance(workload, Workload):
        raise UsageError(f"workload is a {type(workload).__name__}, {workload!r}; give a schedsearch.Workload")
    lookup: Lookup | None = None
    if db.exists() or set(allowed) - {"default"} == set(allowed):
        lookup = _open(db)
    for rung in RUNGS:
        if rung not in allowed:
            continue
        if rung == "default":
            yield from _default(workload, target)
        elif lookup is None:
            yield f"{rung}: there is no database {db}"
        elif rung == "exact":
            yield from _exact(lookup, workload, target, mode)
        elif rung == "same_architecture":
            yield from _same_architecture(lookup, workload, target, mode)
        else:
            yield from _nearest(lookup, workload, target, mode)


_lookups: dict[tuple[str, int, int], Lookup] = {}


def _open(db: Path) -> Lookup:
    """One open reader a file and process; a file that was replaced is opened anew."""
    try:
        identity = (str(db.resolve()), db.stat().st_ino, os.getpid())
    except OSError as error:
        raise DatabaseError(
            f"{db} cannot be opened: {error.strerror}; tune first, or name the database with --db"
        ) from error
    if identity not in _lookups:
        _lookups[identity] = Lookup(db)
    return _lookups[identity]


def _exact(lookup: Lookup, workload: Workload, target: Target, mode: str) -> Iterator[_Way | str]:
    row = lookup.exact(workload.id, target.key, mode)
    if row is None:
        yield f"exact: no record of this workload on {target.key} in mode {mode}"
        return
    config = Config.from_json(row.config_json)
    reason = f"record {row.record_id} by {row.template}, {row.time_ns / 1e3:.2f} us"
    if row.artifact_sha256 is not None:
        stored = _stored(lookup, row)
        yield _Way("exact", f"{reason}, stored machine code", row.template, config, stored, row.time_ns, row.record_id)
    built = _built(workload, target, row.template, config, row.template_version)
    yield _Way(
        "exact", f"{reason}, built again from its configuration", row.template, config, built, row.time_ns, row.record_id
    )


def _same_architecture(lookup: Lookup, workload: Workload, target: Target, mode: str) -> Iterator[_Way | str]:
    found = False
    for row in lookup.same_architecture(workload.id, mode):
        if row.target_key == target.key or row.plan_json is None or row.arch is None:
            continue
        plan = LaunchPlan.from_json(row.plan_json)
        if plan.kind != target.kind or not runs_on(row.arch, target):
            continue
        if max(step.dynamic_shared_bytes for step in plan.steps) > target.shared_bytes_per_block:
            continue
        found = True
        reason = f"record {row.record_id} of {row.target_key} by {row.template}: {row.arch} code runs on {target.name}"
        config = Config.from_json(row.config_json)
        yield _Way("same_architecture", reason, row.template, config, _stored(lookup, row, workload), None, row.record_id)
    if not found:
        yield f"same_architecture: no stored machine code of this workload runs on {target.name}"


def runs_on(arch: str, target: Target) -> bool:
    """Whether machine code for `arch` runs on the target (CUDA C++ Programming Guide, "Binary Compatibility").

    sm_XY runs on the same major version and a minor of at least Y; sm_XYa on exactly X.Y. CPU code is bound to the very CPU
    it was made for, which the exact rung already covers.
    """
    if target.kind != "cuda" or not arch.startswith("sm_"):
        return False
    exact = arch.endswith("a")
    digits = arch.removeprefix("sm_").rstrip("a")
    major, minor = int(digits[:-1]), int(digits[-1])
    here = target.compute_capability
    return here == (major, minor) if exact else here[0] == major and here[1] >= minor


def _nearest(lookup: Lookup, workload: Workload, target: Target, mode: str) -> Iterator[_Way | str]:
    ranked = []
    for row in lookup.nearest(workload.op, mode, f"{target.kind}:"):
        other = _parse(row.workload_json)
        if other is not None and (other != workload or row.target_key != target.key):  # else the exact rung has it
            ranked.append((distance(workload, other), row.target_key != target.key, other.label, row))
    ranked.sort(key=lambda entry: entry[:3])
    for far, _, label, row in ranked[:_NEIGHBOURS_TRIED]:
        config = Config.from_json(row.config_json)
        reason = f"configuration of {label} ({row.template}, distance {far:.2f}), built now"
        build = _built(workload, target, row.template, config, row.template_version)
        yield _Way("nearest", reason, row.template, config, build)
    if not ranked:
        yield f"nearest: no record of any {workload.op} on a {target.kind} device"


def _parse(text: str) -> Workload | None:
    try:
        return Workload.from_json(text)
    except UsageError:  # of an operator or schema that this version does not know
        return None


def _default(workload: Workload, target: Target) -> Iterator[_Way | str]:
    try:
        from schedsearch.template import load_templates

        matching = load_templates().matching(workload, target)
    except ImportError as error:
        yield f"default: {_cannot_build(error)}"
        return
    except UnsupportedError as error:
        yield f"default: {error}"
        return
    for template in matching:
        config = template.default(workload, target, template.space(workload, target))
        build = _built(workload, target, template.name, config, template.version)
        yield _Way("default", f"rule-based configuration of {template.name}, built now", template.name, config, build)


def _cannot_build(error: ImportError) -> str:
    return f"building needs a compiler ({error}); install schedsearch[cu13], or tune this workload beforehand"


def _stored(
    lookup: Lookup, row: LookupRow, verify_for: Workload | None = None
) -> Callable[[Device], tuple[LoadedKernel, bool]]:
    def load(device: Device) -> tuple[LoadedKernel, bool]:
        assert row.artifact_sha256 is not None and row.plan_json is not None
        artifact = Artifact(lookup.code(row.artifact_sha256), LaunchPlan.from_json(row.plan_json))
        return device.load(artifact), row.verified and verify_for is None

    return load


def _built(
    workload: Workload, target: Target, template_name: str, config: Config, version: int
) -> Callable[[Device], tuple[LoadedKernel, bool]]:
    """Builds a configuration here and now, and verifies it once.

    The returned function raises NoRecordError when the template or the compiler is missing, the template has changed
    since, the configuration is not legal here, or the kernel computes something wrong.
    """

    def build(device: Device) -> tuple[LoadedKernel, bool]:
        try:
            from schedsearch.backend import CompileError, RejectedError, compile_source
            from schedsearch.measure.verify import verify_once
            from schedsearch.template import load_template
        except ImportError as error:
            raise NoRecordError(_cannot_build(error)) from error
        template = load_template(template_name)
        if template.version != version:
            raise NoRecordError(f"{template_name} is now version {template.version}, the record is of {version}; tune again")
        if reason := template.validate(workload, target):
            raise NoRecordError(f"{template_name} cannot run it here: {reason}")
        if reasons := template.space(workload, target).check(config):
            raise NoRecordError(f"the configuration is not legal here: {'; '.join(reasons)}")
        try:
            built = compile_source(template.kernel(workload, target, config), target)
        except (CompileError, RejectedError) as error:
            raise NoRecordError(f"the configuration does not build here: {error}") from error
        except ImportError as error:
            raise NoRecordError(_cannot_build(error)) from error
        loaded = device.load(built.artifact)
        problem = verify_once(device, workload, loaded)
        if problem:
            raise NoRecordError(f"the kernel computes wrong values here: {problem}")
        return loaded, True

    return build
