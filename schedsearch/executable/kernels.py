"""The kernels that a database of records gives for the workloads of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable

from schedsearch.errors import NoRecordError
from schedsearch.executable.assemble import Chosen
from schedsearch.executable.program import Origin
from schedsearch.measurement import COLD_GRAPH
from schedsearch.runtime import RUNGS, Kernel, KernelCache
from schedsearch.target import Target
from schedsearch.workload import Workload

_FEW = 4  # kernels that are built one after the other, because starting compiler processes takes seconds


def find_kernels(
    workloads: Iterable[Workload],
    db: str | os.PathLike[str],
    target: Target,
    *,
    mode: str = COLD_GRAPH,
    strict: bool = False,
) -> dict[Workload, Chosen]:
    """The kernel for each workload, as `schedsearch.compile` finds it.

    Args:
        mode: how the records were timed.
        strict: only records of exactly this workload on this kind of device may serve.

    Raises:
        NoRecordError: some workloads have no kernel; the message names them.
        DatabaseError, DeviceError: the database or the device cannot be used.
    """
    with KernelCache(db, target, allow=("exact",) if strict else RUNGS, mode=mode) as cache:
        found, missing = {}, []
        distinct = list(dict.fromkeys(workloads))
        if len(distinct) > _FEW:
            cache.build_ahead(distinct)
        for workload in distinct:
            try:
                found[workload] = _chosen(cache.kernel(workload))
            except NoRecordError as error:
                missing.append((workload, error))
        if missing:
            raise _no_kernels(missing, target, strict)
        return found


def _chosen(kernel: Kernel) -> Chosen:
    origin = kernel.provenance
    return Chosen(
        kernel.artifact,
        Origin(origin.rung, origin.template, origin.config.json, origin.time_ns, origin.record_id),
    )


def _no_kernels(missing: list[tuple[Workload, NoRecordError]], target: Target, strict: bool) -> NoRecordError:
    labels = "; ".join(workload.label for workload, _ in missing)
    if strict:
        return NoRecordError(
            f"no record on {target.name} for {len(missing)} kernels: {labels}. Tune them (build --tune 10m), or build "
            "without --strict, which takes default configurations"
        )
    return NoRecordError(f"no kernel on {target.name} for {labels}. The first: {missing[0][1]}")
