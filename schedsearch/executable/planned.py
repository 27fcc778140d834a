"""The plan of a network and its kernels: by the records that there are, or after tuning in a given time.

A build that has a deadline finds its kernels before it tunes: records, and defaults for what has none, compiled on all cores
and verified. From then on there is an answer. Tuning gets the time that is left, less what must follow. Afterwards only
kernels that were tuned are loaded, and only what a better plan needs besides is compiled, if there is time for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import NoValidConfigError, OutOfTimeError, PreparationError, UsageError, WrongResultError
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.explain import BODY_TITLES
from schedsearch.executable.kernels import Kernels, find_kernels
from schedsearch.executable.timely import TASKS_A_SECOND, found_before, time_to_tune, tuned
from schedsearch.network.choices import Choices
from schedsearch.network.costs import costs_of
from schedsearch.network.explain import explain
from schedsearch.network.graph import Control, Network, Plan
from schedsearch.network.plan import AUTO, best_plan, missing
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.text import counted
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.runtime.ahead import Compilers


@dataclass(frozen=True)
class Planned:
    """The best plan by the records that there are.

    Attributes:
        reasons: lines that explain it.
        missing: what is worth tuning, the most telling first.
    """

    plan: Plan
    reasons: Sequence[str]
    missing: Sequence[Task]

    @classmethod
    def of(cls, network: Network, db: Path, target: Target, mode: str, layout: str) -> Planned:
        """Raises UnsupportedError and UsageError as `best_plan`, and DatabaseError."""
        with costs_of(network, db, target, mode) as costs:
            choices = Choices(network, costs)
            plan = best_plan(network, costs, layout, choices)
            reasons = explain(network, plan, costs, choices).text().splitlines()
            tasks = missing(network, costs, choices)
        bodies: dict[str, list[Planned]] = {}
        for node in network.nodes:
            if isinstance(node, Control):
                bodies[node.name] = [cls._of_body(body, db, target, mode, layout) for body in node.networks]
                titles = [title for title, body in zip(BODY_TITLES[node.kind], node.bodies) if isinstance(body, Network)]
                for title, body in zip(titles, bodies[node.name]):
                    reasons += ["", f"{node.name}, {title}:", *body.reasons]
                    tasks += body.missing
        longest_ns = sum(max(each.plan.predicted_ns for each in several) for several in bodies.values())
        plans = {name: tuple(each.plan for each in several) for name, several in bodies.items()}
        plan = replace(plan, bodies=plans, predicted_ns=plan.predicted_ns + longest_ns)
        return cls(plan, reasons, merged(tasks) if bodies else tasks)

    @classmethod
    def _of_body(cls, network: Network, db: Path, target: Target, mode: str, layout: str) -> Planned:
        """In any layout, where no node of the body can have the one that is wanted."""
        try:
            return cls.of(network, db, target, mode, layout)
        except UsageError:
            if layout == AUTO:
                raise
            return cls.of(network, db, target, mode, AUTO)

    @property
    def workloads(self) -> list[Workload]:
        """Of its kernels, those of bodies included, each once."""
        return list(dict.fromkeys(self.plan.workloads))


def merged(tasks: Sequence[Task]) -> list[Task]:
    """Tasks of several networks, each workload once."""
    weights: dict[Workload, float] = {}
    for task in tasks:
        weights[task.workload] = weights.get(task.workload, 0) + task.weight
    return [Task(workload, weight=weight) for workload, weight in weights.items()]


def with_kernels(
    network: Network, options: BuildOptions, deadline: Deadline, compilers: Compilers | None = None
) -> tuple[Planned, Kernels]:
    """The plan of a network with its kernels. With `options.strict` only records serve, and nothing is compiled before
    tuning.

    Args:
        deadline: of the kernels; what follows them was taken off.
        compilers: processes that may have been started already.

    Raises:
        OutOfTimeError: not `options.patient`, and the deadline passed before all kernels were found.
        NoRecordError, UnsupportedError, DatabaseError, DeviceError: as `find_kernels`.
        Interrupted, and, if patient, what else `schedsearch.tune` raises.
    """
    db, target, mode, say = options.db, options.target, options.mode, options.say
    find = functools.partial(find_kernels, db=db, target=target, mode=mode, strict=options.strict, compilers=compilers)
    needed_by = NEVER if options.patient else deadline
    planned = Planned.of(network, db, target, mode, options.layout)
    if not options.tunes or not planned.missing:
        if options.tunes:
            say("every kernel of the plan has a record; nothing to tune")
        return planned, find(planned.workloads, deadline=needed_by)
    kernels = None if options.strict else found_before(find, planned.workloads, deadline, needed_by, say)
    if not _tuned(planned.missing, options, deadline):
        return planned, kernels or find(planned.workloads, deadline=needed_by)
    again = Planned.of(network, db, target, mode, options.layout)
    if kernels is None:
        return again, find(again.workloads, deadline=needed_by)
    try:
        return again, find(again.workloads, known=kernels, deadline=deadline)
    except OutOfTimeError:
        say("the best plan by the new records needs kernels that there was no time to compile; the one of before is taken")
        return planned, find(planned.workloads, known=kernels, deadline=deadline)


def _tuned(tasks: Sequence[Task], options: BuildOptions, deadline: Deadline) -> bool:
    """Whether there was time to tune some of these."""
    say, until = options.say, time_to_tune(deadline, len(tasks), options.say)
    if until is None:
        return False
    chosen = tasks[: max(1, int(until.left_s * TASKS_A_SECOND))]
    say(f"tuning {len(chosen)} of {counted(len(tasks), 'kernel')} without a record for {until.left_s:.0f} s")
    try:
        return tuned(chosen, options.db, options.target, options.mode, until, say) is not None
    except (NoValidConfigError, PreparationError, WrongResultError) as error:  # of one kernel; others may have records now
        if options.patient:
            raise
        say(f"tuning ended early: {error}")
        return True
