"""The tuning loop: keeps builders, device and tuners busy, and decides what to try next.

It owns the budget. Tuner, builder and runner do not know each other, and every outcome goes into the
journal (`schedsearch.session.journal`). While the device measures, builders compile ahead and the tuner thinks. On a CPU
target the three alternate, because a build would disturb the timing.

The main thread runs the loop and owns tasks, arms, journal and store. The tuners' thread owns the `ArmTuner`s: it gets
arguments and returns values. Each device has a thread that runs one call of its runner after another (`session.lanes`).

::

    Tuner.ask (own thread) ──► Builder.submit ──► (pool) ──► Runner.measure (own thread) ──► Journal.keep ──► Tuner.tell
       ▲                                                                                                         │
       └─────────────────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from schedsearch.config import Config
from schedsearch.errors import DeviceError, Interrupted
from schedsearch.measurement import Measurement, Record
from schedsearch.processes.requests import Candidate
from schedsearch.session.arms import WARM_TRIALS, Answer, Arm, Lesson
from schedsearch.session.builders import Builders, Token
from schedsearch.session.collaborators import BuilderLike, RunnerLike, StoreLike, TunerFactory
from schedsearch.session.finals import FinalRaces
from schedsearch.session.hints import SOURCE_RESULTS, Known, Results, WarmStart, combined, shipped_results, warm_start
from schedsearch.session.journal import Ended, Entry, Journal
from schedsearch.session.lane import GivenUp, Lane, Measured
from schedsearch.session.lanes import Lanes
from schedsearch.session.observer import Observer
from schedsearch.session.options import OVERTIME, RACE_SHARE, Options
from schedsearch.session.pace import StopSignal, TunerThread
from schedsearch.session.plan import TaskPlan
from schedsearch.session.summary import RunSummary
from schedsearch.session.task_state import Proposal, TaskState, choose_arm
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.tuner import make_tuner
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

T = TypeVar("T")

FIRST_BATCH = 2  # on a CPU: candidates to build before the first is measured, so that a result comes soon
_AWAY_POLL_S = 0.05  # between looks whether a device has come back
FEWEST_AT_ONCE = 8  # a tuner is asked when this part of the queue is free, not for single proposals


class Session:
    """One run of the loop. `tune` makes one; tests make sessions with other collaborators.

    Args:
        builder: for the target; of several kinds of devices one for each key.
        runners: of the target, or of several devices.
        target: one of the devices.
    """

    def __init__(
        self,
        plans: Sequence[TaskPlan],
        store: StoreLike,
        builder: BuilderLike | Mapping[str, BuilderLike],
        runners: RunnerLike | Sequence[tuple[Target, RunnerLike]],
        target: Target,
        options: Options,
        toolchain: Mapping[str, str] | None = None,
        observers: Sequence[Observer] = (),
        *,
        db: str = "",
        tuner_factory: TunerFactory = make_tuner,
    ) -> None:
        self._store, self._options, self._db = store, options, db
        self._builder = Builders(builder if isinstance(builder, Mapping) else {target.key: builder})
        self._toolchain = dict(toolchain or {})
        self._tuner_factory = tuner_factory
        self._tasks = [TaskState(index, plan) for index, plan in enumerate(plans)]
        self._alternate = target.kind == "cpu"
        devices = runners if isinstance(runners, Sequence) else [(target, runners)]
        self._lanes = Lanes(devices, alternate=self._alternate, mode=options.mode)
        self._journal = Journal(
            self._tasks, store, options, self._toolchain, observers, db, self._lanes.shares,
            devices=[device for device, _ in devices], states=self._lanes.states,
        )  # fmt: skip
        self._tuners = TunerThread(apart=options.tuner_thread and not self._alternate)
        # Requests (Answer) and results (bool) sent to the tuners, in order: an answer is valid until the next result.
        self._thinking: deque[tuple[Future[Answer] | Future[bool], TaskState, Arm]] = deque()
        self._building: dict[Token, Proposal] = {}
        self._references: dict[Token, TaskState] = {}  # that builders compile; their tasks wait for them
        self._elsewhere: dict[tuple[str, str, int], list[Known]] = {}  # op, template, version -> tasks in the store
        self._trials_budget: int | None = None

    # The run

    def run(self) -> RunSummary:
        """Searches, races, returns the summary.

        A task whose inputs and reference cannot be made is given up, and the others go on. Raises the error of the first if
        none could go on, DeviceError if no device is left, and Interrupted (see `tune`): the store then has everything that
        was measured. All other errors of collaborators propagate.
        """
        lost: DeviceError | None = None
        with StopSignal() as stop:
            with self._lanes, self._tuners:
                self._resume()
                self._journal.open(self._trials_budget)
                try:
                    stopped = self._search(stop)
                    if not (stop.requested or self._over):
                        self._lanes.compare_again()
                    self._final_races().run(stop)
                except DeviceError as error:
                    lost, stopped = error, "lost"
                self._tell_notices()
            interrupted = stop.requested  # a signal that comes later finds everything done
            summary = self._journal.close(self._lanes.summaries, "interrupted" if interrupted else stopped)
        if lost is not None:
            raise lost
        if interrupted:
            raise Interrupted(
                f"interrupted after {self._spent} trials, all saved in {self._db}; tune again to go on from there", summary
            )
        errors = [task.error for task in self._tasks if task.error is not None]
        if errors and len(errors) == len(self._tasks):
            raise errors[0]
        return summary

    def _final_races(self) -> FinalRaces:
        return FinalRaces(
            self._tasks, self._builder, self._poll_builder, self._lanes, self._journal, self._options, self._give_up,
            ahead=not self._alternate,
        )  # fmt: skip

    def _resume(self) -> None:
        """Starts every arm's tuner, taught by earlier records of the same kind, and sets how many trials may be spent."""
        for task in self._tasks:
            task.stored_best = self._store.best(task.workload, task.kind, self._options.mode)
            for arm in task.arms:
                records = self._earlier(task, arm) if self._options.resume else {}
                arm.start(self._tuner_factory, self._options.tuner, self._options.seed, task.workload)
                for record in records.values():
                    task.remember(arm, record)
            if self._options.resume:
                task.remember_race(self._store.last_race(task.workload, task.kind, self._options.mode, self._toolchain))
        if self._options.trials is not None:
            # Tasks that were never tried add their own share, so that many trials of others do not starve them.
            new = sum(task.trials == 0 for task in self._tasks)
            old = self._options.trials * (len(self._tasks) - new) - sum(task.trials for task in self._tasks)
            self._trials_budget = self._options.trials * new + max(old, 0)

    def _earlier(self, task: TaskState, arm: Arm) -> dict[Config, Record]:
        template = arm.template
        records = self._store.measured(
            task.workload, task.kind, template.name, template.version, self._options.mode, self._toolchain
        )
        return arm.plan.known(records)

    # The search

    def _search(self, stop: StopSignal) -> str:
        """Runs the pipeline until the budget, the spaces or the user end it; returns which of these did."""
        while not stop.requested:
            self._take_proposals()
            if self._over:
                self._leave()
                return "time"
            if self._out_of_time():
                self._drop_the_late()
            else:
                self._propose()
            self._feed_devices()
            if not (self._building or self._lanes.ready or self._lanes.is_measuring):
                if self._thinking:  # of a proposal, or of what it is told, which may lead to one
                    with self._lanes.idle_counts_as("tuner"):
                        thought: Future[Any] = self._thinking[0][0]
                        wait([thought])
                    continue
                if self._lanes.pending:  # failures that may be a device's fault
                    self._wait_for_devices()
                    continue
                if self._out_of_time():
                    return "time"
                return "trials" if self._trials_left == 0 else "exhausted"
            ended = self._wait()
            if ended and self._spent and not (self._alternate or stop.requested or self._out_of_time()):
                self._feed_devices()  # before the outcomes are on the disk, which may take as long as a trial
            self._keep(ended)
        self._keep(self._ended(self._lanes.finish()))
        return "interrupted"

    def _drop_the_late(self) -> None:
        """Time is over: a task that has a result waits for nothing that has not begun, but for the kernel that it would have
        without tuning."""

        def is_late(proposal: Proposal) -> bool:
            return proposal.task.best_ns is not None and not proposal.is_untuned

        self._lanes.drop(is_late)
        late = {token for token, proposal in self._building.items() if is_late(proposal)}
        for token in self._builder.withdraw(late):
            del self._building[token]

    def _leave(self) -> None:
        """The time is over for good: what has no result by now gets none."""
        self._keep(self._ended(self._lanes.finish()))
        self._builder.withdraw(set(self._building))
        self._building.clear()
        self._references.clear()
        for task in self._tasks:
            task.late = task.best_ns is None

    def _give_up(self, task: TaskState, error: Exception) -> None:
        """Nothing of this task can be measured: it gets no more trials, and what it has under way is dropped."""
        task.error = task.error or error
        self._lanes.drop(lambda proposal: proposal.task is task)

    def _propose(self) -> None:
        """Keeps the builders fed: asks the arms that deserve it most, up to the queue's depth."""
        if self._alternate and (self._building or self._lanes.pending):
            return
        depth = self._options.queue_depth
        while not self._out_of_time():  # it may end while a tuner thinks
            open_ = self._lanes.room(self._tasks, depth)
            chosen = choose_arm(list(open_), self._warm_trials) if self._room() > 0 else None
            if chosen is None:
                return
            task, arm = chosen
            room = min(self._room(), open_[task])
            wanted = room if self._trials_left is None else min(room, self._trials_left)
            if wanted < 1:
                return
            if self._pending and room < min(arm.batch, self._options.queue_depth // FEWEST_AT_ONCE):
                return
            if not arm.begun:
                self._submit_all(task, arm, arm.begin())
                continue
            n = arm.portion(wanted, self._warm_trials)
            assert arm.tuner is not None
            with self._lanes.idle_counts_as("tuner"):
                lesson = Lesson() if arm.taught else arm.lesson(self._warm_start(task, arm))
                arm.asking(n)
                self._thinking.append((self._tuners.submit(arm.tuner.ask, n, lesson), task, arm))
            self._take_proposals()

    def _take_proposals(self) -> None:
        """Passes the tuners' proposals to the builders, unless time has run out."""
        while self._thinking and self._thinking[0][0].done():
            thought, task, arm = self._thinking.popleft()
            result = thought.result()
            if not isinstance(result, Answer):
                arm.told(finished=result)
                continue
            arm.answered(result)
            if not self._out_of_time() and task.error is None:
                self._submit_all(task, arm, result)

    def _warm_start(self, task: TaskState, arm: Arm) -> WarmStart:
        """The results of this template on similar workloads, from this run or from the store."""
        op, template = task.workload.op, arm.template
        key = (op, template.name, template.version)
        twins = [
            (other, twin)
            for other in self._tasks
            for twin in other.arms
            if (other.workload.op, twin.template.name, twin.template.version) == key
        ]
        known = [
            Known(other.workload, other.kind, twin.evidence) for other, twin in twins if twin.trials >= self._warm_trials
        ]
        if self._options.resume:
            if key not in self._elsewhere:
                here = {(other.workload, other.kind) for other, _ in twins}  # what they know is in memory
                self._elsewhere[key] = [
                    Known(workload, target, functools.cache(functools.partial(self._evidence, workload, target, template)))
                    for workload, target in self._store.tuned(*key, self._options.mode)
                    if (workload, target) not in here
                ]
            known += self._elsewhere[key]
            imported = functools.partial(self._evidence, task.workload, task.kind, template, imported=True)
            shipped = shipped_results(task.workload, task.kind, template, self._options.mode)
            read = functools.partial(combined, imported, shipped)
            known.append(Known(task.workload, task.kind, read, imported=True))
        return warm_start(task.workload, task.kind, arm.plan.space, known)

    def _evidence(self, workload: Workload, target: str, template: Template, *, imported: bool = False) -> Results:
        arm, mode = (template.name, template.version), self._options.mode
        found = self._store.evidence(workload, target, *arm, mode, limit=SOURCE_RESULTS, imported=imported)
        fastest: dict[Config, float | None] = {}  # of configurations recorded under earlier names of knobs, too
        for config, time_ns in found:
            fastest.setdefault(template.current(config), time_ns)
        return list(fastest.items())

    def _room(self) -> int:
        """How many more candidates may be under way. If a batch is built before it is measured and time runs out, this is
        only as many as can still be measured at the rate so far."""
        room = self._options.queue_depth - self._pending
        if self._alternate and not self._spent:
            room = min(room, FIRST_BATCH - self._pending)
        if self._alternate and self._options.time_s is not None and self._spent:
            affordable = self._left_s() * self._spent / self._journal.elapsed_s
            room = min(room, max(1 - self._pending, int(affordable) - self._pending))
        return room

    def _submit_all(self, task: TaskState, arm: Arm, answer: Answer) -> None:
        if not task.reference_asked:
            task.reference_asked = True
            self._references[self._builder.submit_reference(task.kind, task.workload)] = task
        for config, prediction in zip(answer.configs, answer.predictions):
            arm.proposed()
            if not self._spent:
                self._journal.enter("building")
            candidate = Candidate(task.workload, arm.template, config)
            proposal = Proposal(task, arm, config, arm.batches, prediction, answer.model, time.time())
            self._building[self._builder.submit(task.kind, candidate)] = proposal

    def _feed_devices(self) -> None:
        waiting = set(self._references.values())

        def begins(lane: Lane, task: TaskState) -> None:
            ready = self._spent or (task in lane.prepared and not (lane.preparing or lane.measuring))
            self._journal.enter("measuring" if ready else "preparing")

        for task in self._tasks:
            if task.error is None and task.kind in self._lanes.lost_kinds:
                self._give_up(task, self._lanes.lost_kinds[task.kind])
        hold = self._alternate and bool(self._building or waiting)
        self._lanes.feed(waiting, self._building.values(), begins, hold=hold)
        self._tell_notices()

    def _wait(self) -> list[Ended]:
        """Sleeps until a proposal, a build or a measurement is done, and collects finished builds and measurements."""
        starving = self._asked and len(self._building) < self._options.queue_depth // 2
        others: list[Future[Any]] = [*self._lanes.futures, *(each for each, _, _ in self._thinking)]
        with self._lanes.idle_counts_as("tuner" if starving else "build"):
            if self._building or self._references:
                done = self._poll_builder(0.01 if others else 0.2)
            else:
                done = []
                wait(others, timeout=0.5, return_when=FIRST_COMPLETED) if others else time.sleep(_AWAY_POLL_S)
        self._journal.tell_reference(self._lanes.reference_s)
        unbuilt = [failed for token, result in done if (failed := self._on_build(self._building.pop(token), result))]
        return unbuilt + self._ended(self._lanes.collect())

    def _wait_for_devices(self) -> None:
        """Nothing is left but failures of which nobody knows yet whether a device is to blame."""
        if futures := self._lanes.futures:
            wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
            self._keep(self._ended(self._lanes.collect()))
        else:
            self._keep(self._ended(self._lanes.acquit_all()))

    def _poll_builder(self, timeout_s: float) -> list[tuple[Token, Built | Measurement]]:
        """The candidates that builders have finished. References go to the runner, which compiles those that failed again
        and reports why they do."""
        done = []
        for token, result in self._builder.poll(timeout_s):
            if task := self._references.pop(token, None):
                if not isinstance(result, Measurement):
                    self._lanes.learn_reference(task, result.artifact)
            else:
                done.append((token, result))
        return done

    def _on_build(self, proposal: Proposal, result: Built | Measurement) -> Ended | None:
        """Passes a candidate on to the devices, unless that was its end."""
        if proposal.task.error is not None:
            return None
        if isinstance(result, Measurement):
            return Ended.of(proposal, result)
        proposal.task.built(result)
        known = proposal.task.by_code
        if result.canonical_hash not in known:
            known[result.canonical_hash] = proposal
            self._lanes.add(proposal, result)
            return None
        twin = known[result.canonical_hash]
        if isinstance(twin, Proposal):
            twin.twins.append(proposal)
        else:
            self._on_duplicate(proposal, twin)
        return None

    def _ended(self, found: Sequence[Measured | GivenUp]) -> list[Ended]:
        """The outcomes among what the devices answered. Gives up the tasks of which nothing can be measured."""
        ended: list[Ended] = []
        for each in found:
            if isinstance(each, GivenUp):
                self._give_up(each.task, each.error)
            else:
                each.proposal.task.by_code[each.built.canonical_hash] = each.measurement.time_ns
                ended.append(Ended.of(each.proposal, each.measurement, each.built))
        return ended

    def _tell_notices(self) -> None:
        while self._lanes.notices:
            notice = self._lanes.notices.pop(0)
            self._journal.tell_device(notice.device, notice.text)

    # Outcomes

    def _keep(self, ended: Sequence[Ended]) -> None:
        """Stores outcomes, all at once, and then draws the consequences of each."""
        for each, entry in zip(ended, self._journal.keep(ended)):
            proposal = each.proposal
            assert proposal is not None
            self._on_outcome(proposal, each.measurement, each.built, entry)
            for twin in proposal.twins:
                self._on_duplicate(twin, each.measurement.time_ns)

    def _on_outcome(self, proposal: Proposal, measurement: Measurement, built: Built | None, entry: Entry) -> None:
        task, arm, time_ns = proposal.task, proposal.arm, measurement.time_ns
        task.done(proposal, measurement, built, self._options.race_size)
        self._journal.tell_trial(task, arm, proposal.config, measurement)
        if time_ns is not None and built is not None and task.beats_stored_best(time_ns):
            self._journal.promote(task, entry, built)
        self._tell(task, arm, proposal.config, time_ns)

    def _on_duplicate(self, proposal: Proposal, time_ns: float | None) -> None:
        task, arm = proposal.task, proposal.arm
        task.duplicate(proposal, time_ns, self._options.race_size)
        self._journal.tell_trial(task, arm, proposal.config, None, twin_ns=time_ns)
        self._tell(task, arm, proposal.config, time_ns)

    def _tell(self, task: TaskState, arm: Arm, config: Config, time_ns: float | None) -> None:
        assert arm.tuner is not None
        with self._lanes.idle_counts_as("tuner"):
            self._thinking.append((self._tuners.submit(arm.tuner.tell, [(config, time_ns)]), task, arm))

    # Clock and budget

    def _left_s(self) -> float:
        """What is left of the time for the search: the final races are expected to need the rest."""
        time_s = self._options.time_s
        if time_s is None:
            return math.inf
        races_s = sum(task.expected_race_s(self._options.race_size) for task in self._tasks) / len(self._lanes.working)
        races_s += self._lanes.prepare_s  # every task gets new inputs for its race
        return time_s - min(races_s, RACE_SHARE * time_s) - self._journal.elapsed_s

    @property
    def _over(self) -> bool:
        """Whether the run must end now; see `Options`."""
        time_s = self._options.time_s
        if time_s is None or self._journal.elapsed_s < OVERTIME * time_s:
            return False
        if not self._options.patient:
            return True
        under_way = [*self._building.values(), *self._lanes.under_way()]
        waiting = {each.task for each in under_way if each.is_untuned}  # what they have without tuning may be the best
        return any(task.error or (task.best_ns is not None and task not in waiting) for task in self._tasks)

    def _out_of_time(self) -> bool:
        return self._left_s() <= 0

    @property
    def _spent(self) -> int:
        """Trials of this run that have an outcome."""
        return sum(task.new_trials for task in self._tasks)

    @property
    def _asked(self) -> int:
        """Proposals that tuners were asked for and have not made yet."""
        return sum(arm.asked for task in self._tasks for arm in task.arms)

    @property
    def _pending(self) -> int:
        return self._asked + len(self._building) + self._lanes.pending

    @property
    def _trials_left(self) -> int | None:
        """Trials that may still be proposed: neither done nor under way. None: no limit."""
        return None if self._trials_budget is None else self._trials_budget - self._spent - self._pending

    @property
    def _warm_trials(self) -> int:
        """Trials of every arm before gains are compared: fewer when the budget is small."""
        if self._options.trials is None:
            return WARM_TRIALS
        arms = max(len(task.arms) for task in self._tasks)
        return max(1, min(WARM_TRIALS, self._options.trials // arms))
