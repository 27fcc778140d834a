"""The final races of a run: every task's fastest configurations meet again, and the winner becomes the store's best.

A device holds one race after another. On a GPU the machine code that their entrants lack is built for all tasks at once, so
that the device does not wait for a compiler before each race. On a CPU a build would disturb the race before it.

See docs/decisions/060-numbers-of-a-run.md.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from schedsearch.errors import AwayError, DeviceError, OperatorError, PreparationError
from schedsearch.measurement import Anchor, Measurement, Outcome, Record, Verdict
from schedsearch.processes.requests import Candidate
from schedsearch.session.builders import Builders, Token
from schedsearch.session.journal import Ended, Entry, Journal
from schedsearch.session.lane import Lane
from schedsearch.session.lanes import Lanes
from schedsearch.session.options import OVERTIME, Options
from schedsearch.session.pace import StopSignal
from schedsearch.session.task_state import Finalist, TaskState

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

_TOLERANCE = 1.25  # expected times are rough, and the last trials end a little late

_RACES_LOST = 3  # of one task; then it keeps what the search found
_LOOK_S = 0.1

Poll = Callable[[float], "list[tuple[Token, Built | Measurement]]"]


Heat = Generator[list["Built"], list[Measurement], None]
"""A task's races: gives the machine code of each race, takes its measurements."""


class FinalRaces:
    """The races of these tasks. Each is held on one device; several devices hold those of several tasks at once.

    Args:
        poll: the candidates that the builder has finished, waiting up to so many seconds for the first.
        give_up: called with a task of which nothing can be measured any more, and why.
        ahead: whether to build for all tasks at once.
    """

    def __init__(
        self,
        tasks: Sequence[TaskState],
        builder: Builders,
        poll: Poll,
        lanes: Lanes,
        journal: Journal,
        options: Options,
        give_up: Callable[[TaskState, Exception], None],
        *,
        ahead: bool,
    ) -> None:
        self._tasks, self._builder, self._poll = tasks, builder, poll
        self._lanes, self._journal, self._options = lanes, journal, options
        self._give_up, self._ahead = give_up, ahead
        self._building: dict[Token, tuple[TaskState, Finalist]] = {}
        self._lost: Counter[TaskState] = Counter()  # races whose worker went away
        self._running: dict[Future[list[Measurement]], tuple[Lane, TaskState, Heat]] = {}

    def run(self, stop: StopSignal) -> None:
        """Holds the races, until the user stops the run. A task whose last race is newer than all its outcomes keeps the
        result of that race.
        """
        racing = [task for task in self._tasks if task.error is None and task.race is None]
        if racing and not stop.requested:
            self._journal.enter("racing")
        for task in racing:
            task.enter_plain()
        for task in racing if self._ahead and not self._over else ():
            self._submit(task, task.contenders(self._options.race_size))
        waiting = deque(self._tasks)
        while waiting or self._running:
            while waiting and (found := self._next(waiting)) is not None:
                if stop.requested:
                    waiting.clear()
                    break
                lane, task = found
                waiting.remove(task)
                if task in racing and not self._over:
                    size = self._affordable_size([task, *(each for each in waiting if each in racing)])
                    self._advance(lane, task, self._race(task, size, stop), None)
                else:
                    self._journal.end_task(task)
            self._take_results(waiting)

    def _next(self, waiting: Iterable[TaskState]) -> tuple[Lane, TaskState] | None:
        """The first task of which a lane that holds no race can hold one. A task that was given up needs none."""
        racing = [lane for lane, _, _ in self._running.values()]
        idle = [lane for lane in self._lanes.present if lane not in racing]
        pairs = ((lane, task) for task in waiting for lane in idle if task.kind == lane.kind or task.error is not None)
        return next(pairs, None)

    def _take_results(self, waiting: deque[TaskState]) -> None:
        """Waits for a race to end. A race whose device was lost is held again on another."""
        done = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done if self._running else ()
        if waiting and not self._running:
            time.sleep(_LOOK_S)  # no device is there now
        self._lanes.lose_those_gone()
        for task in [*waiting]:
            if task.error is None and task.kind in self._lanes.lost_kinds:
                self._give_up(task, self._lanes.lost_kinds[task.kind])
        for future in done:
            lane, task, heat = self._running.pop(future)
            try:
                measurements = future.result()
            except (PreparationError, OperatorError) as error:
                self._give_up(task, error)
                self._journal.end_task(task)
            except DeviceError as error:
                self._lanes.lose(lane, error)
                self._lost[task] += isinstance(error, AwayError) and error.begun
                if self._lost[task] < _RACES_LOST:
                    waiting.appendleft(task)
                else:
                    self._journal.end_task(task)
            else:
                self._advance(lane, task, heat, measurements)

    def _advance(self, lane: Lane, task: TaskState, heat: Heat, measurements: list[Measurement] | None) -> None:
        """Begins the next race of a task on a lane, or ends the task."""
        try:
            built = next(heat) if measurements is None else heat.send(measurements)
        except StopIteration:
            self._journal.end_task(task)
            return
        self._running[lane.thread.submit(lane.runner.race, task.workload, built)] = (lane, task, heat)

    @property
    def _over(self) -> bool:
        """Whether no race may begin any more. A run that is patient holds one in any case."""
        time_s = self._options.time_s
        if time_s is None or self._journal.elapsed_s < OVERTIME * time_s:
            return False
        return not self._options.patient or any(task.race is not None for task in self._tasks)

    def _affordable_size(self, left: Sequence[TaskState]) -> int:
        """How many of the fastest configurations of the next task may race, so that the tasks that are left find time."""
        size, time_s = self._options.race_size, self._options.time_s
        if time_s is None:
            return size
        needed_s = sum(task.expected_race_s(size) for task in left) / len(self._lanes.working)
        left_s = max(0.0, _TOLERANCE * (time_s - self._journal.elapsed_s))
        return size if needed_s <= left_s else max(1, math.floor(size * left_s / needed_s))

    def _race(self, task: TaskState, size: int, stop: StopSignal) -> Heat:
        """Measures a task's fastest configurations and defaults again, interleaved, and promotes the winner.

        The winner is found by `race.judged`. Verification uses fresh inputs after many back-to-back launches. If every
        finalist fails it, the next fastest race instead.
        """
        standing, raced = task.stored_best, list[Record]()
        while not stop.requested and (contenders := task.contenders(size)):
            if standing is not None and any(finalist.is_of(standing) for finalist in contenders):
                raced.append(standing)
            passed: list[tuple[Finalist, Entry, Built]] = []
            if entrants := self._built(task, contenders):
                passed = self._judged(task, entrants, (yield [built for _, built in entrants]))
            if passed:
                task.settle([(each, entry.record.measurement, entry.record.verdict) for each, entry, _ in passed])
                _, entry, built = next(each for each in passed if each[1].record.verdict is Verdict.WON)
                raced += [each.record for _, each, _ in passed]  # another run may have promoted any of them meanwhile
                self._journal.promote(task, entry, built, raced)
                return
        if not stop.requested:
            for record in raced:  # the standing best failed, as all the others did
                self._journal.demote(record)

    def _judged(
        self, task: TaskState, entrants: Sequence[tuple[Finalist, Built]], measurements: Sequence[Measurement]
    ) -> list[tuple[Finalist, Entry, Built]]:
        """Returns the finalists that passed, with their records; the others are disqualified."""
        passed: list[tuple[Finalist, Entry, Built]] = []
        anchor = _anchor(task, entrants, measurements)
        verdicts = task.judged([(finalist, measurement) for (finalist, _), measurement in zip(entrants, measurements)])
        ended = [
            Ended(task, finalist.arm, finalist.config, measurement, anchor=anchor, verdict=verdict)
            for (finalist, _), measurement, verdict in zip(entrants, measurements, verdicts)
        ]
        for (finalist, built), measurement, entry in zip(entrants, measurements, self._journal.keep(ended)):
            task.seconds += measurement.run_s
            if measurement.time_ns is None:
                if measurement.outcome is Outcome.WRONG_ANSWER:
                    standing = task.stored_best
                    self._journal.demote(standing if standing is not None and finalist.is_of(standing) else entry.record)
                task.disqualify(finalist)
            else:
                passed.append((finalist, entry, built))
            self._journal.tell_trial(task, finalist.arm, finalist.config, measurement, final_race=True)
        return passed

    # Machine code that an entrant lacks, because an earlier run measured it, or none did

    def _submit(self, task: TaskState, finalists: Sequence[Finalist]) -> None:
        under_way = [finalist for _, finalist in self._building.values()]
        for finalist in finalists:
            if finalist.built is None and not any(finalist is each for each in under_way):
                token = self._builder.submit(task.kind, Candidate(task.workload, finalist.arm.template, finalist.config))
                self._building[token] = (task, finalist)

    def _built(self, task: TaskState, finalists: Sequence[Finalist]) -> list[tuple[Finalist, Built]]:
        """The finalists with their machine code. Those that fail to build are disqualified."""
        self._submit(task, finalists)
        while any(owner is task for owner, _ in self._building.values()) and not self._over:
            for token, result in self._poll(0.5):
                if token not in self._building:  # of the search, which ended before it was built
                    continue
                owner, finalist = self._building.pop(token)
                if isinstance(result, Measurement):
                    self._journal.keep([Ended(owner, finalist.arm, finalist.config, result)])
                    if owner.race is None:  # otherwise it was built, and then there was no time for it to race
                        owner.disqualify(finalist)
                else:
                    finalist.built = result
        return [(finalist, finalist.built) for finalist in finalists if finalist.built is not None]


def _anchor(
    task: TaskState, entrants: Sequence[tuple[Finalist, Built]], measurements: Sequence[Measurement]
) -> Anchor | None:
    """What the task's anchor took in a race; None when it failed there."""
    for (finalist, built), measurement in zip(entrants, measurements):
        if finalist is task.anchor and measurement.time_ns is not None:
            return Anchor(built.canonical_hash, measurement.time_ns)
    return None
