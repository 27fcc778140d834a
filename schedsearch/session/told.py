"""Lines about how far a run of tuning is, for callers that show nothing else."""

from __future__ import annotations

from collections.abc import Callable

from schedsearch.session.observer import Observer, Phase, Trial

_EVERY_S = 5.0


class Told(Observer):
    """Says the phases of a run, and every few seconds how many tasks were measured.

    Args:
        say: takes a line.
        tasks: how many the run has.
    """

    def __init__(self, say: Callable[[str], None], tasks: int) -> None:
        self._say, self._tasks = say, tasks
        self._next_s, self._seen = _EVERY_S, set[int]()

    @property
    def count(self) -> int:
        """Tasks of which something was measured."""
        return len(self._seen)

    def on_phase(self, event: Phase) -> None:
        self._say(f"tuning: {event.name}")

    def on_trial(self, event: Trial) -> None:
        self._seen.add(event.task)
        if event.elapsed_s >= self._next_s:
            self._next_s = event.elapsed_s + _EVERY_S
            what = "in the final race" if event.final_race else f"{event.done} trials"
            self._say(f"tuned {self.count} of {self._tasks} after {event.elapsed_s:.0f} s, {what}")
