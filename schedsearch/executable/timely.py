"""Building in a given time: the kernels that an executable has without tuning come first, and the rest is for tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import Deadline
from schedsearch.errors import DeviceBusyError, UnsupportedError, WrongResultError
from schedsearch.executable.kernels import Kernels
from schedsearch.progress import shown
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
"""In less time nothing is tuned: processes start, and the first kernel is compiled, verified and timed."""
TUNED = 0.9
"""Of the time that is left after what is known to follow was taken off: for tuning. The rest is for what nobody measured:
the end of the run, loading the new kernels, packing weights and writing."""
_FEW = 3  # names in a line

Say = Callable[[str], None]


def found_before(
    find: Callable[..., Kernels], workloads: Sequence[Workload], deadline: Deadline, needed_by: Deadline, say: Say
) -> Kernels | None:
    """The kernels that these workloads have without tuning; None, which is said, if tuning has to find one where no default
    runs.

    Args:
        find: `find_kernels` with what else it needs.
        deadline: its clock measures.
        needed_by: of the kernels.

    Raises:
        OutOfTimeError: that passed first.
    """
    began_s = deadline.clock()
    try:
        kernels = find(workloads, deadline=needed_by)
    except (UnsupportedError, WrongResultError) as error:
        say(f"without tuning: {error}")
        return None
    took_s = deadline.clock() - began_s
    say(f"{counted(len(kernels), 'kernel')} without tuning, compiled and verified in {took_s:.1f} s")
    return kernels


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
    from schedsearch.session.progress import RunProgress
    from schedsearch.session.tune import tune_until

    try:
        with shown(say=say) as display:
            summary = tune_until(
                until, tasks, db, target=target, mode=mode, on_wait=display.wait, observers=[RunProgress(display)]
            )
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
