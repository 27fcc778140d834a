"""The kernels that a database of records gives for the workloads of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import NoRecordError, OutOfTimeError, SchedsearchError, UnsupportedError, UnusableRecordError
from schedsearch.executable.program import RECORDED, ChosenKernel, Origin
from schedsearch.launch import Artifact
from schedsearch.measurement import COLD_GRAPH
from schedsearch.progress import stage
from schedsearch.runtime.cache import KernelCache
from schedsearch.runtime.fallback import LEVELS
from schedsearch.runtime.kernel import Kernel
from schedsearch.target import Target
from schedsearch.text import counted
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.runtime.ahead import Compilers, Recipe

FEW = 2  # pieces that are built one after the other, because starting compiler processes takes seconds


def find_kernels(
    workloads: Iterable[Workload],
    db: str | os.PathLike[str],
    target: Target,
    *,
    mode: str = COLD_GRAPH,
    strict: bool = False,
    allow: Iterable[str] = LEVELS,
    also: Iterable[Recipe[BuildResult]] = (),
    known: Mapping[Workload, ChosenKernel] | None = None,
    deadline: Deadline = NEVER,
    compilers: Compilers | None = None,
) -> Kernels:
    """The kernel for each workload, as `schedsearch.compile` finds it. All that must be compiled is compiled at once, in a
    process for each core.

    Args:
        mode: how the records were timed.
        strict: only records of exactly this workload on this kind of device may serve, own and shipped ones.
        allow: unless `strict`: how kernels may be found.
        also: what the caller compiles besides.
        known: kernels that were found before. They serve unless the database has machine code for exactly their workload
            now, so that nothing is compiled or verified twice.
        deadline: of all kernels that must be compiled or verified; machine code in the database is loaded after it, too.
        compilers: processes that may have been started already.

    Returns:
        A mapping from workload to kernel, with the code of `also`.

    Raises:
        NoRecordError: `strict`, and some workloads have no record; the message names them.
        UnsupportedError: some workloads have no kernel, not even a default one; the message names them.
        OutOfTimeError: the deadline passed first; `known` kernels and those of records never cause it.
        DatabaseError, DeviceError: the database or the device cannot be used.
    """
    with KernelCache(db, target, allow=RECORDED if strict else allow, mode=mode) as cache:
        missing = []
        distinct, others = list(dict.fromkeys(workloads)), list(also)
        stored = {each for each in distinct if cache.has_stored(each)}
        found = {each: chosen for each, chosen in (known or {}).items() if each in distinct and each not in stored}
        wanted = sorted((each for each in distinct if each not in found), key=stored.__contains__)
        stage(f"looking for {counted(len(wanted), 'kernel')}")
        if len(wanted) + len(others) > FEW:
            cache.build_ahead(wanted, others, deadline, compilers)
        for place, workload in enumerate(wanted):
            stage(f"verifying or loading kernel {place + 1} of {len(wanted)}: {workload.label}")
            if deadline.passed and workload not in stored:
                left = len(wanted) - len(stored) - place
                raise OutOfTimeError(
                    f"there was no time left to build {left} of {counted(len(distinct), 'kernel')}; what was compiled is "
                    "kept, so that a later call goes on"
                )
            try:
                found[workload] = _chosen(cache.kernel(workload))
            except NoRecordError as error:
                missing.append((workload, error))
        if missing:
            raise _no_kernels(missing, target, strict)
        return Kernels(found, {each: each.artifact(cache.code, target) for each in others})


class Kernels(Mapping[Workload, ChosenKernel]):
    """Workload -> its kernel.

    Attributes:
        others: recipe -> its code.
    """

    def __init__(self, found: Mapping[Workload, ChosenKernel], others: Mapping[Recipe[BuildResult], Artifact]) -> None:
        self._found, self.others = found, others

    def __getitem__(self, workload: Workload) -> ChosenKernel:
        return self._found[workload]

    def __iter__(self) -> Iterator[Workload]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _chosen(kernel: Kernel) -> ChosenKernel:
    origin = kernel.provenance
    return ChosenKernel(
        kernel.artifact,
        Origin(origin.level, origin.template, origin.config.json, origin.time_ns, origin.record_id),
    )


def _no_kernels(missing: list[tuple[Workload, NoRecordError]], target: Target, strict: bool) -> SchedsearchError:
    labels = "; ".join(workload.label for workload, _ in missing)
    if strict and all(isinstance(error, UnusableRecordError) for _, error in missing):
        return UnusableRecordError(f"the records on {target.name} for {labels} cannot be used. The first: {missing[0][1]}")
    if strict:
        return NoRecordError(
            f"no record on {target.name} for {len(missing)} kernels: {labels}. Tune them (build --tune 10m), or build "
            "without --strict, which takes default configurations"
        )
    return UnsupportedError(f"no kernel on {target.name} for {labels}. The first: {missing[0][1]}")
