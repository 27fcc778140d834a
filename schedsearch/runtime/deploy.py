"""`compile` and `explain`: one kernel, or one explanation. `KernelCache` is for programs that need several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import overload

from schedsearch.device.detect import detect
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.records.location import require_file
from schedsearch.runtime.cache import KernelCache, LazyDevice, check_workload, make_kernel, open_lookup
from schedsearch.runtime.explanation import Explanation
from schedsearch.runtime.fallback import LEVELS, Fallback, check_levels
from schedsearch.runtime.kernel import Kernel
from schedsearch.runtime.range_kernel import RangeKernel, compile_range, explain_range
from schedsearch.target import Target
from schedsearch.workload import Workload, WorkloadRange


@overload
def compile(
    workload: Workload,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    allow: Iterable[str] = LEVELS,
    mode: str = COLD_GRAPH,
) -> Kernel: ...
@overload
def compile(
    workload: WorkloadRange,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    allow: Iterable[str] = LEVELS,
    mode: str = COLD_GRAPH,
) -> RangeKernel: ...
def compile(
    workload: Workload | WorkloadRange,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    allow: Iterable[str] = LEVELS,
    mode: str = COLD_GRAPH,
) -> Kernel | RangeKernel:
    """Gets the best kernel for a workload without a search.

    Each call reads the database and loads the kernel again. A program that asks repeatedly should keep a `KernelCache`.

    Args:
        workload: what to compute; or a range of sizes (`Workload.with_dynamic`), which the level exact serves only.
        db: a live database or one written by `records export --deploy`; it may be missing if `allow` has the level default,
            or shipped and there are shipped records of this kind of device.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        allow: the levels that may serve:
            exact: the best record of this workload on this kind of device, its stored machine code;
            other_mode: the best record of this workload on this kind of device that was timed in another mode, in the
                order of `schedsearch.measurement.OTHER_MODES`;
            same_architecture: the best record on another device whose machine code runs here;
            shipped: the configuration of this workload that comes with the package for this kind of device, built now, and
                kept in the database if there is one;
            nearest: the configuration of the most similar workload, recorded or shipped, that is legal here, built now;
            default: the template's rule-based configuration, built now.
            A kernel that is built now is verified once against the reference; `Kernel.verified` says so.
        mode: how the records were timed. A kernel that was tuned in `cold-graph-prepared-v1` takes plain arrays, too, but
            reaches its recorded time only with the result of `Kernel.prepare`.

    Returns:
        A `Kernel`, or for a range a `RangeKernel`, which takes arrays of any of its sizes. A kernel's
        `provenance` names the level that served and says why no higher one did. `Kernel.close` frees code and
        device.

    Raises:
        NoRecordError: there is no record, and no allowed level has a kernel; the message has the reason for each.
        UnusableRecordError: the same, although there is a record of this workload for this kind of device.
        WrongResultError: kernels were built, but computed wrong values, and no other level was left.
        UsageError: a level is unknown, or `workload` is not a Workload.
        DatabaseError, DeviceError: the database or the device cannot be used.
    """
    allowed = check_levels(allow)
    if isinstance(workload, WorkloadRange):
        target = detect(target) if isinstance(target, str) else target
        opened = LazyDevice(target)
        return compile_range(workload, require_file(db), target, mode, opened.open, opened.close)
    check_workload(workload)
    target = detect(target) if isinstance(target, str) else target
    lookup, device = open_lookup(require_file(db), allowed, target), LazyDevice(target)
    try:
        found = Fallback(workload, target, lookup, require_file(db), mode, allowed).serve(device.open)
    except BaseException:
        device.close()
        raise
    finally:
        if lookup is not None:
            lookup.close()
    return make_kernel(workload, target, found, on_close=device.close)


def explain(
    workload: Workload | WorkloadRange,
    db: str | os.PathLike[str] = DEFAULT_DB,
    *,
    target: str | Target = "auto",
    allow: Iterable[str] = LEVELS,
    mode: str = COLD_GRAPH,
) -> Explanation:
    """Says for every allowed level whether `compile` would use it and why; builds and loads nothing.

    It makes the same checks as `compile`, including trust in the stored code and the presence of a compiler. It cannot see
    failures of loading, building and verifying. Args and Raises are those of `compile`.
    """
    if isinstance(workload, WorkloadRange):
        check_levels(allow)
        return explain_range(workload, require_file(db), detect(target) if isinstance(target, str) else target, mode)
    with KernelCache(db, target, allow=allow, mode=mode) as cache:
        return cache.explain(workload)
