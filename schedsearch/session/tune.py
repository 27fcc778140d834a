"""Tuning from Python: `tune` puts the collaborators of a run together and starts the loop (`schedsearch.session.loop`)."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import NoValidConfigError, UsageError
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB, check_mode
from schedsearch.progress import is_shown, shown
from schedsearch.session.loop import FIRST_BATCH, Session
from schedsearch.session.observer import Observer
from schedsearch.session.options import DEFAULT_TRIALS, Options
from schedsearch.session.pace import StopSignal
from schedsearch.session.places import Place, place_of
from schedsearch.session.plan import TaskPlan, plan_tasks, ranges_of, search_time_s, trials_per_task
from schedsearch.session.progress import RunProgress
from schedsearch.session.summary import RunSummary
from schedsearch.target import Target
from schedsearch.task import Task, range_tasks
from schedsearch.template import Template, TemplateSet, load_template, load_templates
from schedsearch.tuner import load_tuner
from schedsearch.workload import Workload, WorkloadRange

if TYPE_CHECKING:
    from schedsearch.fleet.client import Fleet
    from schedsearch.fleet.connection import Connection

__all__ = ["BUILD_TIMEOUT_S", "REFERENCE_TIMEOUT_S", "RUN_TIMEOUT_S", "Task", "tune"]

BUILD_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 10.0
REFERENCE_TIMEOUT_S = 30.0
_LEAST_S = 0.1


def queue_depth(workers: int, devices: int = 1) -> int:
    """Candidates under way: one in work and one waiting for each builder, and two at each device."""
    return max(8 * devices, 2 * workers + 2 * devices)


def tune(
    workloads: Iterable[Task | Workload | WorkloadRange] | Sequence[TaskPlan],
    db: str | Path = DEFAULT_DB,
    *,
    target: str | Target | Sequence[Target] = "auto",
    trials: int | None = None,
    time_s: float | None = None,
    tuner: str = "xgb",
    seed: int = 0,
    resume: bool = True,
    templates: Sequence[str | Template] | None = None,
    mode: str = COLD_GRAPH,
    workers: int | None = None,
    build_timeout_s: float = BUILD_TIMEOUT_S,
    run_timeout_s: float = RUN_TIMEOUT_S,
    reference_timeout_s: float = REFERENCE_TIMEOUT_S,
    wait_for_device: bool = True,
    on_wait: Callable[[str], None] | None = None,
    observers: Sequence[Observer] = (),
    progress: bool = True,
    scheduler: str | Connection | Fleet | None = None,
    build_on: str | Connection | Fleet | None = None,
) -> RunSummary:
    """Searches for fast configurations of workloads on this machine's device and records everything measured.

    The first Ctrl-C or SIGTERM stops the run cleanly: it finishes the measurement under way and skips the final race. A
    second one kills it. A killed run loses only the trial under way. Run again with the same arguments to continue.

    Args:
        workloads: what to tune; a `Task` adds a weight, knob restrictions and a choice of templates. A list that
            `plan_tasks` made for this target is taken as it is. A `WorkloadRange` gets kernels for all of its sizes, for at
            most three times the trials of one size.
        db: file of the record store; made when missing.
        target: auto, cpu, cuda, cuda:N, or a `Target`. Several GPUs share the work: cuda:all, cuda:0,2, or a list of
            `Target`. Every task is tuned for each kind of them.
        trials, time_s: the budget; the run ends when either is used up. 64 trials a task when neither is given. `time_s`
            are wall seconds from the call to the return, final races included; waiting for a device that another run holds
            is not. At least one result is waited for. A task without a result then says so in its `problem`.
        tuner, seed, resume, mode: as trials and time_s, see `Options`.
        templates: names of the only templates to use, or templates themselves; all by default. Not with plans, which
            have theirs.
        workers: number of builder processes; default: one per CPU core.
        build_timeout_s, run_timeout_s: a candidate that takes longer to build, or to verify and time, has failed.
        reference_timeout_s: the reference of a kernel of your own, or of another package's operator, may take this long to
            compute its answers; then its task is given up.
        wait_for_device: whether to wait while another run holds the device.
        on_wait: called with a string that names the run that this one waits for; default: it is shown.
        observers: watch the run.
        scheduler: of a fleet of workers, tcp://HOST:PORT or tls://HOST:PORT, or a `schedsearch.fleet.Connection`: they build
            and measure. `target` then names devices of the fleet: auto, cpu, cuda, or the name of a card. See docs/fleet.md.
        build_on: the same, for a fleet that only builds, while devices of this machine measure.
        progress: whether to show on standard error what is computed, trials, the best and the time left, and the result at
            the end: in place on a terminal, in the output of a notebook's cell, elsewhere as a line every few seconds.

    Returns:
        The results. A task without any valid configuration has `best_ns` None, and `failure` says why.

    Raises:
        UsageError: an argument is impossible; UnsupportedError or ConfigError, see `plan_tasks`.
        DeviceError: the device does not exist; DeviceBusyError: another run holds it and `wait_for_device` is false.
        DatabaseError: the store cannot be used.
        NoValidConfigError: every trial of every task failed; the text has the first reason, `summary` the results.
        Interrupted: Ctrl-C or SIGTERM; its `summary` has the results so far.
    """
    if isinstance(workloads, Task | Workload | WorkloadRange):
        raise UsageError(f"workloads must be a list, got one {type(workloads).__name__}; give tune([workload], ...)")
    if isinstance(workloads, str | os.PathLike):
        raise UsageError(f"workloads must be a list of Workload, got {workloads!r}; a file is for `schedsearch tune FILE`")
    if trials is None and time_s is None:
        trials = DEFAULT_TRIALS
    options = Options(trials, time_s, tuner, seed, resume, mode)
    deadline = Deadline.within(time_s)
    is_part = is_shown()
    with shown(progress) as display:
        display.stage("looking at the device and the workloads")
        with place_of(target, scheduler, build_on) as place:
            devices = place.devices
            for problem in place.problems:
                display.say(problem)
            if len({device.kind for device in devices}) != 1:
                raise UsageError("target must be a device, or several GPUs; tune CPUs in a run of their own")
            plans = _planned(list(workloads), templates, place.kinds)
            _check_kinds(plans, place)
            counts = Counter(device.name for device in devices)
            where = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
            display.stage(f"starting the processes that compile and measure on {where}")
            summary = _run(
                plans, db, place, options, deadline, workers=workers, build_timeout_s=build_timeout_s,
                run_timeout_s=run_timeout_s, reference_timeout_s=reference_timeout_s, wait_for_device=wait_for_device,
                on_wait=on_wait or display.wait, observers=[*observers, RunProgress(display)],
            )  # fmt: skip
        failed = [task.why_invalid for task in summary.tasks if task.why_invalid]
        if failed and len(failed) == len(summary.tasks):
            raise NoValidConfigError(_all_failed(summary), summary)
        if not is_part:
            for task in summary.tasks:
                if task.why_invalid:
                    display.say(f"{task.workload.label}: {task.why_invalid}")
            display.say(summary.headline)
    return summary


def _all_failed(summary: RunSummary) -> str:
    first = summary.tasks[0]
    others = f" (and of {len(summary.tasks) - 1} more tasks)" if len(summary.tasks) > 1 else ""
    return (
        f"no configuration of {first.workload.label}{others} is valid: {first.why_invalid}; all failures: "
        f"schedsearch records list --db {shlex.quote(summary.db)} --failed"
    )


def tune_until(
    deadline: Deadline,
    workloads: Sequence[Task],
    db: str | Path,
    *,
    target: Target,
    trials: int | None = None,
    mode: str = COLD_GRAPH,
    on_wait: Callable[[str], None] | None = None,
    observers: Sequence[Observer] = (),
) -> RunSummary:
    """As `tune`, as a part of something that has a deadline and a display: nothing is waited for when it has passed.

    Raises:
        DeviceBusyError: another run held the device until then.
    """
    options = Options(
        trials, max(_LEAST_S, deadline.left_s) if deadline.ends_s < math.inf else None, mode=mode, patient=False
    )
    plans = _planned(list(workloads), None, [target])
    return _run(plans, db, Place([target]), options, deadline, on_wait=on_wait, observers=observers)


def _run(
    plans: Sequence[TaskPlan],
    db: str | Path,
    place: Place,
    options: Options,
    deadline: Deadline,
    *,
    workers: int | None = None,
    build_timeout_s: float = BUILD_TIMEOUT_S,
    run_timeout_s: float = RUN_TIMEOUT_S,
    reference_timeout_s: float = REFERENCE_TIMEOUT_S,
    wait_for_device: bool = True,
    on_wait: Callable[[str], None] | None = None,
    observers: Sequence[Observer] = (),
) -> RunSummary:
    """Opens store, builders and devices, and runs a session until the deadline."""
    from schedsearch.records.store import Store

    devices = place.devices
    device, trials, mode = devices[0], options.trials, options.mode
    check_mode(mode, device.kind)
    if trials is not None:
        options = replace(options, trials=trials_per_task(trials, plans))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(db))
        versions = place.toolchain()
        builders = place.builders(workers, build_timeout_s, mode, versions)
        for each in builders.values():
            stack.callback(each.close)
        builder, compilers = builders[device.key], sum(each.workers for each in builders.values())
        # On a CPU target start only the workers of the first batch: a worker that imports the compiler disturbs the timing.
        first = builder.workers if device.kind == "cuda" else min(FIRST_BATCH, builder.workers)

        def get_ready() -> None:
            builder.warm_up(min(first, len(plans) * (trials or first)))
            if device.kind == "cuda":  # it takes a second to open
                think_ahead(plans, options.tuner)

        runners, waited_s = place.runners(
            stack, wait=wait_for_device, on_wait=on_wait, deadline=NEVER if options.patient else deadline,
            mode=mode, timeout_s=run_timeout_s, reference_timeout_s=reference_timeout_s,
            meanwhile=get_ready,
        )  # fmt: skip
        options = replace(options, queue_depth=queue_depth(compilers, len(devices)), tuner_thread=True)
        try:
            if options.time_s is not None:
                if options.patient:
                    deadline = deadline.before(-waited_s)
                options = replace(options, time_s=search_time_s(max(_LEAST_S, deadline.left_s), plans))
            summary = Session(plans, store, builders, runners, device, options, versions, observers, db=str(db)).run()
            if not ranges_of(plans):
                return summary
            from schedsearch.session.ranges import RangeBudget, RangeRun, choose_kernels

            budget = RangeBudget(trials, options.trials, deadline, options.patient)
            sound = [name.uuid for name in summary.devices if not name.problem]
            runner = next(runner for each, runner in runners if each.uuid in sound)
            run = RangeRun(store, builder, runner, device, mode, versions)
            return choose_kernels(summary, plans, run, budget)
        finally:
            with StopSignal():  # a signal that comes now must not disturb the closing of store and processes
                stack.close()


def think_ahead(plans: Sequence[TaskPlan], tuner: str) -> None:
    """Does what a run would do once while its devices wait: imports the tuner, and counts the spaces for its observers."""
    load_tuner(tuner)
    for arm in (arm for plan in plans for arm in plan.arms):
        _ = arm.space.size  # which keeps it


def _check_kinds(plans: Sequence[TaskPlan], place: Place) -> None:
    """Raises UsageError if plans are for devices that the run does not have, or ranges of sizes for several kinds."""
    kinds = {kind.key for kind in place.kinds}
    others = [plan.target.key for plan in plans if plan.target.key not in kinds]
    if others:
        raise UsageError(f"plans are for {others[0]}, and the run is on {', '.join(sorted(kinds))}; plan for its devices")
    if len(kinds) > 1 and ranges_of(plans):
        raise UsageError("kernels of a range of sizes are chosen for one kind of GPU; tune each kind in a run of its own")


def _planned(
    workloads: Sequence[Task | Workload | WorkloadRange | TaskPlan],
    templates: Sequence[str | Template] | None,
    kinds: Sequence[Target],
) -> list[TaskPlan]:
    """The plans of a run, for a device of each kind; existing plans are used as they are."""
    plans = [each for each in workloads if isinstance(each, TaskPlan)]
    if not plans:
        if templates is None:
            chosen = load_templates()
        else:
            chosen = TemplateSet(item if isinstance(item, Template) else load_template(item) for item in templates)
        tasks = [each for each in workloads if not isinstance(each, TaskPlan)]
        sized = (range_tasks(each) if isinstance(each, WorkloadRange) else [each] for each in tasks)
        every = [task for several in sized for task in several]
        return [plan for kind in kinds for plan in plan_tasks(every, chosen, kind)]
    if len(plans) < len(workloads):
        raise UsageError("plans and workloads cannot be mixed in one list; plan all of them or none")
    if templates is not None:
        raise UsageError("plans have their templates; give `templates` to plan_tasks instead")
    return plans
