"""The devices of a run: each is a lane with a runner and a thread of its own, and candidates that are built wait for one.

Lanes of devices of one kind share the tasks for this kind. A task has a home: the lane that has its inputs and its
reference, because preparing them takes as long as several trials. A lane that would be idle takes a task of a busy one as
its own, too.

A lane is taken out of the run when its device cannot be opened any more, or when several measurements in a row failed there
and a kernel that had been right fails, too. What it had under way is measured elsewhere. Only the last lane is never
of a kind is suspected: its failures are those of candidates. When it is lost, the tasks for its kind are given up.

See docs/decisions/278-devices-share-tasks.md.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from schedsearch.errors import AwayError, DeviceError, LostError, OperatorError, PreparationError, first_line
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome
from schedsearch.session.collaborators import RunnerLike
from schedsearch.session.lane import OF_TASK, GivenUp, Lane, Measured, Notice, Work
from schedsearch.session.pace import DeviceThread
from schedsearch.session.summary import DeviceSummary, Shares, name_of
from schedsearch.session.task_state import Proposal, TaskState
from schedsearch.target import Target
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.launch import Artifact
    from schedsearch.processes.builder import Built

SUSPECT_AFTER = 3  # failures in a row on one device; candidates that fail are rarely so many at once
SLOW = 1.1  # times the time of the fastest of equal devices for the same kernel
_NEWLINE = "\n"
_LOST_BEFORE = 2  # workers that a candidate may lose
_BACKLOG = 3  # candidates that wait for other lanes, so that an idle lane takes over their task
_OF_DEVICE = (Outcome.WRONG_ANSWER, Outcome.LAUNCH_ERROR, Outcome.RUN_TIMEOUT, Outcome.WORKER_LOST)

T = TypeVar("T")


class Lanes:
    """All lanes of a run. Owned by the main thread.

    Args:
        devices: with their runners.
        alternate: whether builds would disturb a measurement.
        mode: how times are taken.
    """

    def __init__(self, devices: Sequence[tuple[Target, RunnerLike]], *, alternate: bool, mode: str = COLD_GRAPH) -> None:
        self._mode = mode
        self.all = [
            Lane(device, runner, DeviceThread(queue=1 if alternate else 2), runner.prepare_s) for device, runner in devices
        ]
        self.ready: deque[Work] = deque()
        self.notices: list[Notice] = []
        self._homes: dict[TaskState, list[Lane]] = {}
        self._witness: dict[str, Work] = {}  # of a kind: the last candidate that was right
        self._yardstick: dict[str, Work] = {}  # of a kind: the candidate that every lane measures
        self.lost_kinds: dict[str, DeviceError] = {}  # which have no lane any more

    def __enter__(self) -> Lanes:
        with contextlib.ExitStack() as opened:
            for lane in self.all:
                opened.enter_context(lane.thread)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    # ---- what is under way

    @property
    def working(self) -> list[Lane]:
        """The lanes that take work."""
        return [lane for lane in self.all if not lane.problem]

    @property
    def present(self) -> list[Lane]:
        """Those of them whose devices are there now."""
        return [lane for lane in self.all if lane.is_there]

    @property
    def futures(self) -> list[Future[Any]]:
        return [future for lane in self.all for future in lane.futures]

    @property
    def pending(self) -> int:
        """Candidates that are built and have no outcome yet."""
        return len(self.ready) + sum(lane.candidates + len(lane.suspects) for lane in self.all)

    @property
    def is_measuring(self) -> bool:
        return any(lane.measuring for lane in self.all)

    def under_way(self) -> Iterator[Proposal]:
        yield from (proposal for proposal, _ in self.ready)
        for lane in self.all:
            yield from (proposal for works in lane.measuring.values() for proposal, _ in works)

    # ---- homes

    def home_of(self, task: TaskState) -> list[Lane]:
        """The lanes that measure a task; a new one gets the lane that is home to the fewest."""
        present = self.present
        homes = [lane for lane in self._homes.get(task, ()) if lane in present]
        if not homes:
            able = self._of_kind(present, task.kind) or self._of_kind(self.working, task.kind)
            if not able:
                return []
            homes = [min(able, key=lambda lane: sum(lane in each for each in self._homes.values()))]
            self._homes[task] = homes
        return homes

    @staticmethod
    def _of_kind(lanes: Iterable[Lane], kind: str) -> list[Lane]:
        return [lane for lane in lanes if lane.kind == kind]

    def room(self, tasks: Iterable[TaskState], depth: int) -> dict[TaskState, int]:
        """How many more candidates of each task may be under way if `depth` of all may be. Every lane has its share of
        them. Tasks for which there is none are left out."""
        lanes = self.working
        if len(lanes) < 2:
            return dict.fromkeys(tasks, depth) if depth >= 1 else {}
        loads = dict.fromkeys(lanes, 0.0)
        for task, homes in self._homes.items():
            pending = sum(arm.pending for arm in task.arms)
            for lane in homes:
                if lane in loads:
                    loads[lane] += pending / len(homes)
        found = {}
        for task in tasks:
            mine = self.home_of(task) if task in self._homes else self._of_kind(lanes, task.kind)
            room = depth / len(lanes) - min((loads[lane] for lane in mine), default=math.inf)
            if room >= 1:
                found[task] = int(room)
        return found

    # ---- giving work to the devices

    def add(self, proposal: Proposal, built: Built) -> None:
        self.ready.append((proposal, built))

    def learn_reference(self, task: TaskState, artifact: Artifact) -> None:
        for lane in self._of_kind(self.all, task.kind):
            lane.runner.learn_reference(task.workload, artifact)

    def feed(
        self,
        blocked: Collection[TaskState],
        building: Iterable[Proposal],
        begins: Callable[[Lane, TaskState], None],
        *,
        hold: bool,
    ) -> None:
        """Gives every lane its next work.

        Args:
            blocked: tasks whose reference is not compiled yet.
            building: what is under way to be built; an idle lane prepares for it.
            begins: called before a lane begins a measurement.
            hold: begin no measurement.
        """
        under_way = list(building)
        for lane in self.present:
            while not hold and len(lane.measuring) < lane.thread.queue and lane.probe is None:
                works = self._take(lane, blocked)
                if not works:
                    break
                for begun in dict.fromkeys(proposal.task for proposal, _ in works):
                    begins(lane, begun)
                    lane.prepared.add(begun)
                lane.measuring[lane.thread.submit(lane.measure, works)] = works
            if not lane.futures:
                # The device would be idle until a build is done, so it prepares for one that is under way.
                tasks = (proposal.task for proposal in under_way)
                wanted = (task for task in tasks if task not in lane.prepared and task not in blocked)
                task = next((task for task in wanted if lane in self.home_of(task)), None)
                if task is not None:
                    lane.prepared.add(task)
                    lane.preparing = (lane.thread.submit(lane.runner.prepare, task.workload), task)

    def _take(self, lane: Lane, blocked: Collection[TaskState]) -> list[Work]:
        """The candidates that a lane measures next. One whose worker was lost before goes alone: it may be its fault."""
        most = min(lane.batch, max(1, len(self.ready) // max(1, len(self.present))))
        works: list[Work] = []
        while len(works) < most and (place := self._next(lane, blocked)) is not None:
            alone = self.ready[place][0].lost > 0
            if works and alone:
                break
            works.append(self.ready[place])
            del self.ready[place]
            if alone:
                break
        return works

    def _next(self, lane: Lane, blocked: Collection[TaskState]) -> int | None:
        """The place of the candidate that a lane measures next."""
        waiting: dict[TaskState, list[int]] = {}
        for place, (proposal, _) in enumerate(self.ready):
            if proposal.task in blocked:
                continue
            if lane in self.home_of(proposal.task):
                return place
            if proposal.task.kind == lane.kind:
                waiting.setdefault(proposal.task, []).append(place)
        if lane.measuring or not waiting:
            return None
        task, places = max(waiting.items(), key=lambda each: len(each[1]))
        if len(places) < _BACKLOG:
            return None
        self._homes[task].append(lane)
        return places[0]

    # ---- what the devices answer

    def collect(self) -> list[Measured | GivenUp]:
        """The outcomes since the last call. Calls that failed because of a device are repeated on another.

        Raises:
            DeviceError: no device is left.
        """
        found: list[Measured | GivenUp] = []
        for lane in self.all:
            if lane.preparing and lane.preparing[0].done():
                (preparing, task), lane.preparing = lane.preparing, None
                if isinstance(error := self._result(lane, preparing), OF_TASK):
                    found.append(GivenUp(task, error))
            for future in [future for future in lane.measuring if future.done()]:
                works = lane.measuring.pop(future)
                results = self._result(lane, future)
                if isinstance(results, AwayError):
                    found += self._lost(lane, works, results)
                elif isinstance(results, Exception):
                    self.ready.extendleft(reversed(works))
                else:
                    for work, result in zip(works, results):
                        found += self._outcome(lane, work, result)
            found += self._probed(lane)
            self._compare(lane)
        self.lose_those_gone()
        if self.lost_kinds:  # nobody measures what is for them
            self.ready = deque(work for work in self.ready if work[0].task.kind not in self.lost_kinds)
        return found

    def lose_those_gone(self) -> None:
        """Gives up devices that were away for too long. Raises DeviceError if no other is left."""
        for lane in self.working:
            if lane.far is not None and (gone := lane.far.gone_for_good):
                self.lose(lane, LostError(gone))

    def _outcome(self, lane: Lane, work: Work, result: Measurement | Exception) -> Sequence[Measured | GivenUp]:
        if isinstance(result, OF_TASK):
            return [GivenUp(work[0].task, result)]
        if isinstance(result, Exception):
            raise result
        return self._judged(lane, work, result)

    def _lost(self, lane: Lane, works: Sequence[Work], error: AwayError) -> list[Measured]:
        """The worker of a lane went away. What it had is measured once more, on any lane; a candidate that loses a second
        worker has failed."""
        lane.prepared.clear()
        found: list[Measured] = []
        for proposal, built in reversed(works):
            proposal.lost += error.begun
            if proposal.lost < _LOST_BEFORE:
                self.ready.appendleft((proposal, built))
                continue
            message = f"{error} while it measured this candidate, as another one was before"
            failed = Measurement(
                Outcome.WORKER_LOST, self._mode, message=message, build_s=built.build_s, host=lane.device.host,
                device_uuid=lane.device.uuid,
            )  # fmt: skip
            lane.trials += 1
            found.append(Measured(proposal, built, failed))
        return found

    def _result(self, lane: Lane, future: Future[T]) -> T | PreparationError | OperatorError | DeviceError:
        """What a call on a lane returned, or the error that is not a bug. A lane whose device is gone is taken out."""
        try:
            return future.result()
        except OF_TASK as error:
            return error
        except DeviceError as error:
            self.lose(lane, error)
            return error

    def lose(self, lane: Lane, error: DeviceError) -> None:
        """The device of a lane cannot be used any more, unless it is only away. Raises the error if it was the last one."""
        if not lane.problem and not isinstance(error, AwayError):
            if self.working == [lane]:
                raise error
            if self._of_kind(self.working, lane.kind) == [lane]:
                self.lost_kinds[lane.kind] = error
            self._quarantine(lane, first_line(error))

    def _judged(self, lane: Lane, work: Work, result: Measurement) -> list[Measured]:
        """The outcomes that count now: a failure counts when the device is known to be sound."""
        if result.outcome in _OF_DEVICE and lane.problem:
            self.ready.appendleft(work)
            return []
        witness = self._witness.get(lane.kind)
        if result.outcome in _OF_DEVICE and witness is not None and self._has_equals(lane):
            lane.suspects.append((work, result))
            if len(lane.suspects) >= SUSPECT_AFTER and lane.probe is None:
                proposal, built = witness
                lane.prepared.add(proposal.task)
                lane.probe = lane.thread.submit(lane.runner.measure, proposal.task.workload, built, None)
            return []
        lane.trials += 1
        if not result.ok:
            return [Measured(*work, result)]
        self._witness[lane.kind] = work
        self._measure_yardstick(lane, work, result)
        return [*self.acquit(lane), Measured(*work, result)]

    def _has_equals(self, lane: Lane) -> bool:
        return len(self._of_kind(self.working, lane.kind)) > 1

    def acquit(self, lane: Lane) -> list[Measured]:
        """The failures of a lane, which are those of the candidates."""
        found = [Measured(*work, result) for work, result in lane.suspects]
        lane.trials += len(found)
        lane.suspects.clear()
        return found

    def acquit_all(self) -> list[Measured]:
        """Counts all failures, when nothing comes that could tell more."""
        return [each for lane in self.all if lane.probe is None for each in self.acquit(lane)]

    def _probed(self, lane: Lane) -> list[Measured]:
        if lane.probe is None or not lane.probe.done():
            return []
        probe, lane.probe = lane.probe, None
        result = self._result(lane, probe)
        if isinstance(result, DeviceError):
            return []
        if isinstance(result, Exception) or result.ok or not self._has_equals(lane):
            return self.acquit(lane)
        text = f"{len(lane.suspects)} measurements in a row failed, and so did a kernel that had been right"
        self._quarantine(lane, f"{text} ({result.outcome}: {result.message.partition(_NEWLINE)[0]})")
        return []

    def _quarantine(self, lane: Lane, reason: str) -> None:
        """Takes a lane out of the run; what it had under way or failed at is measured elsewhere."""
        lane.problem = reason
        back = [work for work, _ in lane.suspects]
        for future, works in list(lane.measuring.items()):
            if future.cancel():
                del lane.measuring[future]
                back += works
        lane.suspects.clear()
        self.ready.extendleft(reversed(back))
        self.notices.append(Notice(lane.device, f"{name_of(lane.device)} takes no more work: {reason}"))

    def drop(self, chosen: Callable[[Proposal], bool]) -> None:
        """Takes back what no device has begun."""
        self.ready = deque(work for work in self.ready if not chosen(work[0]))
        for lane in self.all:
            for future, works in list(lane.measuring.items()):
                if any(chosen(proposal) for proposal, _ in works) and future.cancel():
                    del lane.measuring[future]
                    self.ready.extend(work for work in works if not chosen(work[0]))

    def finish(self) -> list[Measured | GivenUp]:
        """Waits for what the devices have begun, and drops the rest."""
        self.drop(lambda _: True)
        found: list[Measured | GivenUp] = []
        while self.is_measuring:
            wait([future for lane in self.all for future in lane.measuring])
            found += self.collect()
            self.drop(lambda _: True)  # of a lane that was lost meanwhile
        return found + [each for lane in self.all for each in self.acquit(lane)]

    def idle(self) -> Lane | None:
        """A lane that has nothing to do."""
        return next((lane for lane in self.present if not lane.futures), None)

    # ---- comparing equal devices

    def _measure_yardstick(self, lane: Lane, work: Work, result: Measurement) -> None:
        """Every lane of a kind measures the first kernel that was right."""
        if lane.kind not in self._yardstick:
            self._yardstick[lane.kind], lane.baseline_ns = work, result.time_ns
            for other in self._of_kind(self.present, lane.kind):
                if other is not lane:
                    self._begin_yardstick(other)

    def _begin_yardstick(self, lane: Lane) -> None:
        proposal, built = self._yardstick[lane.kind]
        lane.prepared.add(proposal.task)
        lane.baseline = lane.thread.submit(lane.runner.measure, proposal.task.workload, built, None)

    def compare_again(self) -> None:
        """Measures the same kernel on all lanes of a kind once more: a card may have become slower since."""
        again = [lane for lane in self.present if lane.kind in self._yardstick and self._has_equals(lane)]
        for lane in again:
            self._begin_yardstick(lane)
        wait([lane.baseline for lane in again if lane.baseline is not None])
        for lane in again:
            self._compare(lane)

    def _compare(self, lane: Lane) -> None:
        """Names a lane that is slower than its equals for the same kernel."""
        if lane.baseline is None or not lane.baseline.done() or lane.problem:
            return
        baseline, lane.baseline = lane.baseline, None
        result = self._result(lane, baseline)
        if isinstance(result, Exception) or result.time_ns is None:
            return
        lane.baseline_ns = result.time_ns
        equals = self._of_kind(self.working, lane.kind)
        times = [(other.baseline_ns, other) for other in equals if other.baseline_ns is not None]
        best_ns, fastest = min(times, key=lambda each: each[0])
        for time_ns, other in times:
            if time_ns > SLOW * best_ns and lane in (other, fastest):
                text = f"{name_of(other.device)} takes {time_ns / best_ns:.2f} times as long as {name_of(fastest.device)}"
                text += " for the same kernel; is it throttled, or in use by others?"
                self.notices.append(Notice(other.device, text))

    # ---- time

    @contextlib.contextmanager
    def idle_counts_as(self, reason: Literal["build", "tuner"]) -> Iterator[None]:
        """Counts, for each lane, the part of the enclosed time in which its device was idle as waiting for `reason`."""
        with contextlib.ExitStack() as stack:
            for lane in self.working:
                stack.enter_context(lane.thread.idle_counts_as(reason))
            yield

    @property
    def prepare_s(self) -> float:
        """Seconds of this run that making inputs and references took, as a mean of the lanes."""
        return math.fsum(lane.prepare_s for lane in self.all) / len(self.all)

    @property
    def reference_s(self) -> float:
        return max(lane.runner.reference_s for lane in self.all)

    def shares(self, wall_s: float) -> Shares:
        """The mean of all lanes."""
        each = [lane.thread.shares(wall_s, lane.prepare_s) for lane in self.all]
        names = ("device", "build", "tuner", "preparing")
        return Shares(*(math.fsum(getattr(one, name) for one in each) / len(each) for name in names))

    def states(self) -> list[JsonObject]:
        """What each device does at this moment."""
        return [
            {
                "name": name_of(lane.device), "uuid": lane.device.uuid, "state": lane.state, "problem": lane.problem,
                "trials": lane.trials,
            }
            for lane in self.all
        ]  # fmt: skip

    def summaries(self, wall_s: float) -> tuple[DeviceSummary, ...]:
        return tuple(
            DeviceSummary(
                name_of(lane.device), lane.device.uuid, lane.thread.shares(wall_s, lane.prepare_s), lane.trials,
                lane.baseline_ns, lane.problem,
            )
            for lane in self.all
        )  # fmt: skip
