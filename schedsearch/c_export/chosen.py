"""Which kernels of a database become C, and why the others do not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schedsearch.c_export.text import PREFIX, identifier
from schedsearch.device.objects import check_elf
from schedsearch.errors import DatabaseError, DeviceError, NoRecordError, PlanError
from schedsearch.launch import BUFFER_PARAMS, Artifact, LaunchPlan
from schedsearch.records import claims
from schedsearch.records.rows import Best
from schedsearch.records.store import Store
from schedsearch.target import Architecture
from schedsearch.workload import Workload

# The sizes of arrays in runtime/schedsearch_code.h.
MAX_POINTERS, MAX_ADDRESSES, MAX_PARAMS, MAX_MAPS = 64, 128, 512, 16


_OF_RANGES = "it is for a range of sizes, and a C export holds kernels of single sizes; tune the sizes as tasks of their own"


@dataclass(frozen=True)
class Chosen:
    """A kernel that is exported.

    Attributes:
        name: of its C function.
    """

    best: Best
    workload: Workload
    artifact: Artifact
    name: str

    @property
    def plan(self) -> LaunchPlan:
        return self.artifact.plan

    @property
    def time_ns(self) -> float:
        time_ns = self.best.row.measurement.time_ns
        assert time_ns is not None  # a best has times
        return time_ns


@dataclass(frozen=True)
class LeftOut:
    """A kernel of the database that is not exported, and why."""

    label: str
    workload_id: str
    target: str
    reason: str


def choose(
    store: Store, *, workloads: Sequence[str], target: str | None, mode: str, prefix: str = PREFIX
) -> tuple[tuple[Chosen, ...], tuple[LeftOut, ...]]:
    """The kernels to export, those of one workload together and the fastest first, and the others.

    Args:
        workloads: labels, or beginnings of ids; empty for all.
        target: key of the only target, or None.
        mode: how the records were timed.
        prefix: with which the names of functions begin, unless it is the usual one.

    Raises:
        NoRecordError: the database has no best record of a named workload, or of any.
    """
    bests = [best for best in store.bests(target=target, mode=mode) if not workloads or _named(best, workloads)]
    for wanted in workloads:
        if not any(_named(best, (wanted,)) for best in bests):
            raise NoRecordError(
                f"{store.name} has no best record of {wanted!r:.80}{f' on {target}' if target else ''} in mode {mode}; "
                f"look with: schedsearch records best --db {store.name}"
            )
    found = [_checked(store, best, prefix) for best in bests]
    chosen = [each for each in found if isinstance(each, Chosen)]
    left_out = [each for each in found if isinstance(each, LeftOut)]
    if not workloads:
        left_out += [
            LeftOut(row.label, row.family, row.target_key, _OF_RANGES)
            for row in store.ranges(target=target)
            if row.mode == mode
        ]
    chosen.sort(key=lambda each: (identifier(each.workload.label), each.workload.id, each.time_ns, each.name))
    return tuple(chosen), tuple(left_out)


def _named(best: Best, workloads: Sequence[str]) -> bool:
    return any(best.row.label == each or (each and best.row.workload_id.startswith(each)) for each in workloads)


def _checked(store: Store, best: Best, prefix: str) -> Chosen | LeftOut:
    def left_out(reason: str) -> LeftOut:
        return LeftOut(best.row.label, best.row.workload_id, best.row.target, reason)

    if best.row.problem:
        return left_out(best.row.problem)
    if not best.row.target.startswith("cuda:"):
        return left_out(
            "it is for a CPU, and a C export holds GPU kernels; deploy it with: schedsearch records export --deploy"
        )
    if not best.verified:
        return left_out(f"its results were never verified; schedsearch records verify --db {store.name}")
    if best.artifact_sha256 is None:
        return left_out("the database holds no machine code of it; tune it again")
    if not best.vouched:
        return left_out(_untrusted(store, best))
    try:
        artifact = store.code(best)
        if artifact is None:
            return left_out("its machine code was pruned; tune it again")
        artifact.plan.check(best.row.workload)
        check_elf(artifact.code, f"the code for {artifact.plan.arch}")
    except (DatabaseError, PlanError, DeviceError) as error:
        return left_out(str(error))
    chosen = Chosen(best, best.row.workload, artifact, _name(best, artifact.plan, prefix))
    problem = next(_limits(chosen), None)
    return left_out(problem) if problem else chosen


def _untrusted(store: Store, best: Best) -> str:
    if claims.is_revoked(best.claim):
        return "its machine code turned out wrong on this machine; tune it again"
    return (
        "this machine did not sign its machine code; verify and sign it here (schedsearch records verify), or trust its "
        f"origin: schedsearch records trust {store.name}"
    )


def _limits(chosen: Chosen) -> Iterator[str]:
    """What the C launcher has no room for. No template comes near these numbers."""
    plan, workload = chosen.plan, chosen.workload
    try:
        Architecture.parse(plan.arch)
    except ValueError:
        yield f"its machine code is for {plan.arch}, which the C launcher does not know"
    pointers = len(workload.signature) + len(workload.outputs)
    counts = [(pointers, MAX_POINTERS, "arrays"), (pointers + len(plan.workspaces), MAX_ADDRESSES, "arrays and workspaces")]
    for step in plan.steps:
        words = sum(len(param.words) if param.kind == "array" else 1 for param in step.params)
        maps = sum(param.kind == "tensor_map" for param in step.params)
        counts += [(words, MAX_PARAMS, "parameters of a step"), (maps, MAX_MAPS, "tensor maps of a step")]
    for count, most, what in counts:
        if count > most:
            yield f"it has {count} {what}; a C export has room for {most}"


def _name(best: Best, plan: LaunchPlan, prefix: str) -> str:
    """The same in each export: of the prefix, the label, the architecture and eight digits of the task."""
    digest = hashlib.sha256("\0".join(best.task).encode()).hexdigest()[:8]
    first = "" if prefix == PREFIX else f"{prefix}_"
    return f"{first}{identifier(best.row.label)}_{plan.arch.replace('_', '')}_{digest}"


def pointer_names(workload: Workload) -> tuple[str, ...]:
    """Names of the arrays that a call gets: arguments, then outputs."""
    return tuple(spec.name for spec in (*workload.signature, *workload.outputs))


def needed(plan: LaunchPlan, names: Sequence[str], *, constant: bool | None = None) -> tuple[str, ...]:
    """Those of `names` that steps of the plan use: all steps, or only the constant or the other ones."""
    steps = [step for step in plan.steps if constant is None or step.constant == constant]
    used = {param.buffer for step in steps for param in step.params if isinstance(param, BUFFER_PARAMS)}
    return tuple(name for name in names if name in used)
