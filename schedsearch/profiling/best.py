"""Reads hardware counters of the kernels that deployment serves, and stores them with the records."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.errors import NoRecordError, NoValidConfigError, UnsupportedError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.recheck import machine_code
from schedsearch.measurement import Measurement, Record
from schedsearch.processes.builder import Builder
from schedsearch.profiling import ncu
from schedsearch.profiling.profile import Profile
from schedsearch.target import Target
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.records.rows import Best
    from schedsearch.records.store import Store

PEERS = ("torch",)


@dataclass(frozen=True)
class Profiled:
    """A best record and the profile of its kernel, and then that of a peer if one was requested."""

    record_id: int
    record: Record
    profiles: tuple[Profile, ...]


def check(target: Target, workloads: Iterable[Workload], *, ncu_path: str | None = None, peer: str | None = None) -> str:
    """Checks that workloads can be profiled at all; returns the path of Nsight Compute's program.

    Raises:
        UsageError: the target is not a GPU; or the peer is unknown, not installed, or does not compute an operator.
        DeviceError: Nsight Compute is not installed.
    """
    if target.kind != "cuda":
        raise UnsupportedError(f"profiling needs a CUDA device, got {target.name}; choose one: --target cuda")
    if peer is not None and peer not in PEERS:
        raise UsageError(f"peer {peer!r} is not known; allowed: {', '.join(PEERS)}")
    for workload in workloads:
        if peer is not None and peer not in workload.definition.peers:
            known = ", ".join(workload.definition.peers) or "none"
            raise UsageError(f"operator {workload.op!r} cannot be run by {peer!r}; allowed: {known}. Leave out --peer")
    if peer == "torch" and importlib.util.find_spec("torch") is None:
        raise UsageError("--peer torch needs PyTorch, which is not installed: pip install 'schedsearch[torch]'")
    return ncu.find(ncu_path)


def profile_best(
    store: Store,
    workload: Workload,
    target: Target,
    *,
    mode: str,
    ncu_path: str | None = None,
    peer: str | None = None,
    wait: bool = True,
    on_wait: Callable[[str], None] | None = None,
) -> Profiled:
    """Profiles the kernel of a workload's best record, launched once after a warm-up, and stores the counters.

    If the store has no code of the kernel, it is built from its configuration.

    Args:
        store: opened for writing.
        mode: of the record's timing; caches are flushed before each launch unless it is hot-graph-v1.
        ncu_path, peer: see `check`; a peer computes the same operator without its epilogue.
        wait, on_wait: see `DeviceLock`.

    Raises:
        NoRecordError: the workload has no best record on this kind of device.
        NoValidConfigError: its configuration no longer builds.
        UsageError, DeviceError: see `check`; no permission to read counters; the kernel cannot be launched.
    """
    program = check(target, [workload], ncu_path=ncu_path, peer=peer)
    best = next(store.bests(workload=workload, target=target.key, mode=mode), None)
    if best is None:
        raise NoRecordError(f"no record of {workload.label} on {target.name} in mode {mode}; tune it: schedsearch tune")
    artifact = _artifact(store, best, target, mode)
    subjects: list[Artifact | None] = [artifact, *([None] if peer else [])]
    with contextlib.closing(DeviceLock(target, wait=wait, on_wait=on_wait)):
        profiles = [ncu.profile(workload, subject, target, mode=mode, ncu=program) for subject in subjects]
    for profile in profiles:
        store.add_profile(best.record_id, profile)
    return Profiled(best.record_id, best.record, tuple(profiles))


def _artifact(store: Store, best: Best, target: Target, mode: str) -> Artifact:
    if stored := store.code(best):
        return stored
    with Builder(target, workers=1, mode=mode) as builder:
        built = machine_code(store, builder, best)
    if isinstance(built, Measurement):
        raise NoValidConfigError(
            f"record {best.record_id} no longer builds ({built.outcome}: {built.message}); tune this workload again"
        )
    return built.artifact
