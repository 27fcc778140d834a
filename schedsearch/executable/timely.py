"""Building in a given time: the kernels that an executable has without tuning are compiled first, the rest is for tuning.

So there is an answer early, and what is compiled here is in the build cache when it is loaded, and when it is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import Deadline
from schedsearch.errors import DeviceBusyError
from schedsearch.runtime.cache import KernelCache
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.text import counted
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.session.summary import RunSummary

TASKS_A_SECOND = 1.0
"""Workloads that `tune_s` allows for each second, the most telling first. A default takes about a second of a core to
compile; with more of them the time is over before most are measured once."""
LEAST_S = 1.0
"""In less time nothing is tuned."""
TUNED = 0.8
"""Of the time that is left after the defaults are compiled: for tuning. The rest is for loading, verifying and writing."""
_FEW = 3  # names in a line

Say = Callable[[str], None]


def compile_defaults(
    workloads: Iterable[Workload], db: Path, target: Target, mode: str, deadline: Deadline, say: Say
) -> None:
    """Compiles what these workloads run in without tuning, as far as there is time. The build cache has it then."""
    distinct = list(dict.fromkeys(workloads))
    if not distinct:
        return
    began_s = deadline.clock()
    with KernelCache(db, target, mode=mode) as cache:
        done = cache.build_ahead(distinct, deadline=deadline)
    if deadline.passed:
        took_s = deadline.clock() - began_s
        more = f"; it took {took_s:.0f} s to compile {done} of {counted(len(distinct), 'kernel')}" if done else ""
        say(f"the time is too short to compile a default for every kernel{more}. Nothing is tuned")


def time_to_tune(deadline: Deadline, count: int, say: Say) -> Deadline | None:
    """Until when kernels are tuned; None, which is said, if there is no time left for any of so many."""
    until = deadline.share(TUNED)
    if until.left_s >= LEAST_S:
        return until
    say(f"not tuned, for want of time: {counted(count, 'kernel')} without a record, which run in default configurations")
    return None


def tuned(tasks: Sequence[Task], db: Path, target: Target, mode: str, until: Deadline, say: Say) -> RunSummary | None:
    """Tunes until then, and says what had no time. None if another run holds the device for all of it.

    Raises: as `schedsearch.tune`.
    """
    from schedsearch.session.told import Told
    from schedsearch.session.tune import tune_until

    try:
        summary = tune_until(until, tasks, db, target=target, mode=mode, observers=[Told(say, len(tasks))])
    except DeviceBusyError as error:
        say(f"not tuned: {error}")
        return None
    say_late([each.workload.label for each in summary.tasks if each.best_ns is None and each.problem], say)
    return summary


def say_late(labels: Sequence[str], say: Say) -> None:
    """Says which kernels run in default configurations because nothing of them was measured in time."""
    if labels:
        more = f" and {len(labels) - _FEW} more" if len(labels) > _FEW else ""
        say(f"not tuned, for want of time: {'; '.join(labels[:_FEW])}{more}; build again to go on")
