"""Tuning what a model needs: each distinct workload once, and only those that have no record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

import torch

from schedsearch.deadline import Deadline
from schedsearch.errors import (
    DeviceBusyError,
    NoRecordError,
    NoValidConfigError,
    PreparationError,
    UnsupportedError,
    WrongResultError,
    first_line,
)
from schedsearch.measurement import COLD_GRAPH
from schedsearch.progress import shown
from schedsearch.records.lookup import Lookup
from schedsearch.records.shipped import shipped_records
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import TemplateSet, load_templates
from schedsearch.text import counted
from schedsearch.torch.layers.kernel_op import Kernels
from schedsearch.workload import Workload

_log = logging.getLogger("schedsearch.torch")
TUNE_S = 150.0
LEAST_S = 1.0  # in less time nothing is tuned
_FEW = 5  # names in a line


def missing(wanted: Iterable[tuple[str, Workload]], kernels: Kernels) -> list[Task]:
    """The workloads that have no record for this kind of device; each weighted by how often it occurs.

    Args:
        wanted: name of a layer, and its workload.
    """
    counts: dict[Workload, int] = {}
    names: dict[Workload, str] = {}
    for name, workload in wanted:
        counts[workload] = counts.get(workload, 0) + 1
        names.setdefault(workload, name)
    with contextlib.ExitStack() as stack:
        lookup = stack.enter_context(Lookup(kernels.db)) if kernels.db.exists() else None
        sources = [lookup, shipped_records(kernels.target.key) if "shipped" in kernels.allow else None]
        return [
            Task(workload, weight=count, name=names[workload])
            for workload, count in counts.items()
            if not any(each and each.exact(workload.id, kernels.target.key, COLD_GRAPH) for each in sources)
        ]


def tune_missing(wanted: Iterable[tuple[str, Workload]], kernels: Kernels, trials: int, deadline: Deadline) -> str:
    """Tunes the workloads that have no record and that a template can compute, and says what came of it.

    Args:
        wanted: as of `missing`.
        trials: for each of them, shared over the run.
        deadline: of the run.

    Raises:
        DatabaseError, DeviceError, Interrupted: as `schedsearch.tune`.
    """
    from schedsearch.session.progress import RunProgress
    from schedsearch.session.tune import tune_until

    without = missing(wanted, kernels)
    templates = load_templates()
    tasks = [task for task in without if not _no_template(task.workload, kernels.target, templates)]
    if not tasks:
        return f"every layer {'that a template computes ' if without else ''}has a record; nothing was tuned"
    if kernels.device.type == "cuda":
        torch.cuda.synchronize()
    if deadline.left_s < LEAST_S:
        return f"{counted(len(tasks), 'layer')} without a record: there was no time left to tune"
    _log.info("tuning %s for at most %.0f s", counted(len(tasks), "layer"), deadline.left_s)
    measured: set[int] = set()
    try:
        with shown() as display:
            run = RunProgress(display)
            measured = run.measured
            summary = tune_until(
                deadline, tasks, kernels.db, target=kernels.target, trials=trials, on_wait=display.wait, observers=[run]
            )
    except DeviceBusyError as error:  # another run held it until the deadline
        return f"{counted(len(tasks), 'layer')} without a record: not tuned, {error}"
    except (NoValidConfigError, PreparationError, WrongResultError) as error:  # the others have records now
        return f"tuned {len(measured)} of {counted(len(tasks), 'layer')}; {error}"
    late = [each.name for each, found in zip(tasks, summary.tasks) if found.best_ns is None and found.problem]
    done = len(tasks) - len(late)
    text = f"tuned {'' if done == len(tasks) else f'{done} of '}{counted(len(tasks), 'layer')}"
    if late:
        more = f" and {len(late) - _FEW} more" if len(late) > _FEW else ""
        text += f"; there was no time left for {', '.join(late[:_FEW])}{more}"
    return text


def reason_without_kernel(workload: Workload, kernels: Kernels, error: NoRecordError) -> str:
    """Why recorded machine code does not serve a workload, in a few words."""
    dtype = workload.params.get("dtype")
    if kernels.target.kind == "cpu" and dtype not in (None, "float32"):
        return f"it is {dtype}; allowed on a CPU: float32"
    if {"nearest", "default"} & set(kernels.allow) or not kernels.db.exists():
        return str(error).splitlines()[0]
    with Lookup(kernels.db) as lookup:
        known = lookup.exact(workload.id, kernels.target.key, COLD_GRAPH)
    if known is None:
        return _no_template(workload, kernels.target, load_templates()) or "it has no record for this device"
    return str(error).splitlines()[0]


def strange_records(wanted: Iterable[Workload], kernels: Kernels) -> str:
    """Whose records a database has if none of them is for this device; empty if some are, or if other levels may serve."""
    workloads = list(wanted)
    if not workloads or not kernels.db.exists() or {"nearest", "default"} & set(kernels.allow):
        return ""
    with Lookup(kernels.db) as lookup:
        if any(lookup.exact(each.id, kernels.target.key, COLD_GRAPH) for each in workloads):
            return ""
        ops = sorted({each.op for each in workloads})
        devices = {row.target_key for op in ops for row in lookup.nearest(op, COLD_GRAPH)}
    if kernels.target.key in devices:
        return f"{kernels.db} has no record of these layers; tune=True makes them"
    if not devices:
        return f"{kernels.db} has no records of {' and '.join(ops)}; tune=True makes them"
    others = ", ".join(sorted(devices))
    return f"{kernels.db} is of another device ({others}; this is {kernels.target.key}); tune=True makes records"


def _no_template(workload: Workload, target: Target, templates: TemplateSet) -> str:
    """Why no template can compute a workload on a target; empty if one can."""
    try:
        templates.matching(workload, target)
    except UnsupportedError as error:
        return first_line(error)
    return ""
