"""Times of launches and runs that follow one another, in nanoseconds: by events on a GPU, by the host's clock elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedsearch.device.cuda import Event


def launches_ns(events: Sequence[Event], stream: int, launch: Callable[[int], None]) -> list[float]:
    """The time of each of several launches on the device, one fewer than there are events.

    A launch before the first keeps the device busy while the host enqueues, so that no time contains a gap. The device's
    context must be current.
    """
    launch(stream)
    events[0].record(stream)
    for event in events[1:]:
        launch(stream)
        event.record(stream)
    events[-1].synchronize()
    return [before.elapsed_ms(after) * 1e6 for before, after in itertools.pairwise(events)]


def lone_launches_ns(
    pairs: Sequence[tuple[Event, Event]], stream: int, before: Callable[[int], None], launch: Callable[[int], None]
) -> list[float]:
    """The time of each of several launches on the device, with something in front of each that does not count.

    What `before` enqueues keeps the device busy while the host enqueues the launch. The device's context must be current.
    """
    for begin, end in pairs:
        before(stream)
        begin.record(stream)
        launch(stream)
        end.record(stream)
    pairs[-1][1].synchronize()
    return [begin.elapsed_ms(end) * 1e6 for begin, end in pairs]


def runs_ns(runs: Sequence[Callable[[], object]]) -> list[float]:
    """The time of each run. A run returns when its results are there."""
    times = []
    for run in runs:
        began = time.perf_counter_ns()
        run()
        times.append(float(time.perf_counter_ns() - began))
    return times
