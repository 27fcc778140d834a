"""Tunes many tasks group by group: each group ends with its final races, so that whatever stops the run loses one group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedsearch.deadline import Deadline
from schedsearch.errors import NoValidConfigError, UnsupportedError
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.entries import chosen
from schedsearch.records.location import server_url
from schedsearch.records.store import Store
from schedsearch.session.tune import tune
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import load_templates
from schedsearch.text import counted

GROUP = 64  # tasks: starting a run's processes takes seconds
LEAST_S = 10.0  # in less time no group begins


@dataclass(frozen=True)
class Progress:
    """How far the tuning of many tasks is.

    Attributes:
        raced: tasks that have a final race in the database.
        left: tasks that have none yet, in order.
        unsupported: tasks that no template computes on the device.
        seconds: that this call took.
    """

    raced: int
    left: tuple[Task, ...]
    unsupported: tuple[Task, ...]
    seconds: float


def tune_gradually(
    tasks: Sequence[Task],
    db: str | Path,
    target: Target,
    *,
    trials: int,
    time_s: float | None = None,
    mode: str = COLD_GRAPH,
    group: int = GROUP,
    say: Callable[[str], None] = lambda text: None,
) -> Progress:
    """Tunes the tasks that have no final race in the database, the first ones first, until the time is over.

    Called again it goes on with what is left. A task whose configurations all fail is passed over, and said.

    Args:
        trials: of each task.
        time_s: wall seconds of the whole call; None: until all are done.
        group: tasks that are tuned together.
        say: gets a line about each group.

    Raises:
        UsageError, DeviceError, DatabaseError, Interrupted: as `tune`.
    """
    started, deadline = time.perf_counter(), Deadline.within(time_s)
    templates = load_templates()
    unsupported: list[Task] = []
    for task in tasks:
        try:
            templates.matching(task.workload, target)
        except UnsupportedError:
            unsupported.append(task)
    wanted = [task for task in tasks if task not in unsupported]
    done = _raced(db, target, mode)
    left = [task for task in wanted if task.workload.id not in done]
    failed: list[Task] = []
    while left and deadline.left_s > LEAST_S:
        now, left = left[:group], left[group:]
        limit = min(deadline.left_s, 1e9) if time_s is not None else None
        say(f"tuning {len(now)} of {counted(len(now) + len(left), 'task')}: {now[0].workload.label} and others")
        try:
            tune(now, db, target=target, trials=trials, time_s=limit, mode=mode, progress=False)
        except NoValidConfigError as error:
            say(f"none of {counted(len(now), 'task')} has a valid configuration: {error}")
        done = _raced(db, target, mode)
        failed += [task for task in now if task.workload.id not in done]
    return Progress(
        sum(task.workload.id in done for task in wanted), (*failed, *left), tuple(unsupported), time.perf_counter() - started
    )


def _raced(db: str | Path, target: Target, mode: str) -> set[str]:
    """The ids of the workloads with an entry (`records.entries.chosen`)."""
    if server_url(db) is None and not Path(db).exists():
        return set()
    with Store.open(db, create=False, readonly=True) as store:
        return {entry.task[0] for entry in chosen(store, target=target.key, mode=mode).entries}
