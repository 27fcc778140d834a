"""Builds candidates into machine code, in long-lived processes that compile ahead while the device measures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Collection
from dataclasses import astuple, dataclass, field

from schedsearch.backend import BuildResult
from schedsearch.backend.build_cache import BuildCache, warn_if_unfit
from schedsearch.backend.cuda import require_compiler
from schedsearch.closing import Closing
from schedsearch.config import Config
from schedsearch.errors import DeviceError, UsageError
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.launch_sizes import SizedPlan
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome
from schedsearch.processes.build_worker import (
    BuilderReady,
    BuildFinished,
    BuildPostponed,
    BuildStarted,
    CallTask,
    Order,
    Task,
)
from schedsearch.processes.process import ChildDiedError, ChildProcess, wait_for
from schedsearch.processes.range_build import RangeResult, RangeTask
from schedsearch.processes.requests import Built, BuiltRange, Candidate, RangeCandidate, Submitting
from schedsearch.processes.restarts import Restarts
from schedsearch.processes.scratch import ScratchFolder
from schedsearch.target import Target

__all__ = ["Builder", "Built", "BuiltRange", "Candidate", "RangeCandidate", "available_cores", "built_by"]

# One candidate in work and one waiting, so that a worker stays busy while the parent measures.
TASKS_PER_WORKER = 2
# Numba keeps some memory for everything that it compiled; a worker is replaced before this adds up.
_BUILDS_PER_WORKER = 500
# A fresh worker imports the compiler before its first candidate.
_START_S = 120.0
# A worker that is ready begins its next candidate at once, unless it is stopped.
_BEGIN_S = 60.0
# A candidate whose process was lost this often before it began has failed: perhaps it cannot even be received.
_LOST_BEFORE = 3
# After so many candidates without a loss, one more worker may run again.
_BUILDS_TO_RECOVER = 50


@dataclass
class _Queued:
    """A candidate or a reference on its way: `number` is that of the request, `lost` counts workers that were lost before
    they began it, and `waits` says that a worker has postponed it and the next one shall not."""

    task: Task
    number: int = 0
    lost: int = 0
    waits: bool = False


@dataclass
class _Worker:
    process: ChildProcess
    tasks: deque[_Queued] = field(default_factory=deque)  # the first is in work
    ready: bool = False
    building: bool = False  # whether the first task has begun
    since_s: float = field(default_factory=time.monotonic)  # when the worker started, or its last message or first task came
    builds: int = 0


class Builder(Submitting, Closing):
    """A pool of compiler processes. Not thread-safe: call all methods in the thread that made it.

    `poll` returns a candidate's failure as a Measurement: compile_error with the compiler's text or the
    template's traceback, rejected, compile_timeout, or worker_lost when the compiler's process died. The process is then
    replaced, and the candidates that waited behind this one are built by others. A process that cannot start is tried again,
    later and with fewer others if memory is short (`schedsearch.processes.restarts`).

    On the CPU building disturbs timing: submit a batch, `drain()` it, and measure while the builder is `idle`.

    Args:
        target: what to compile for. A GPU need not be present, and is never touched.
        workers: number of processes; by default one for each core that this process may use, for a GPU one fewer.
        timeout_s: wall seconds for one candidate.
        mode: the timing mode under which failures are recorded.
        tasks_per_worker: candidates that a worker gets before it has finished the first.

    Raises:
        UsageError: `workers` or `timeout_s` is not positive; or the target is a GPU and numba-cuda is not installed.
        DeviceError: no temporary folder can be made. Also raised by `warm_up`, `submit` and `poll` when no worker can start
            and none is left; the text says how the last one ended.
    """

    def __init__(
        self,
        target: Target,
        workers: int | None = None,
        timeout_s: float = 60.0,
        mode: str = COLD_GRAPH,
        tasks_per_worker: int = TASKS_PER_WORKER,
    ) -> None:
        cores = available_cores()
        self.workers = (max(1, cores - 1) if target.kind == "cuda" else cores) if workers is None else workers
        if self.workers < 1 or timeout_s <= 0:
            raise UsageError(f"a builder needs workers >= 1 and timeout_s > 0, got {self.workers} and {timeout_s}")
        if target.kind == "cuda":
            require_compiler()
        self._target, self._timeout_s, self._mode = target, timeout_s, mode
        self._tasks_per_worker = tasks_per_worker
        # Without a visible GPU no worker can create a context there by accident.
        self._env = {"CUDA_VISIBLE_DEVICES": ""} if target.kind == "cuda" else {}
        try:
            self._shared = ScratchFolder("builds")
        except OSError as error:
            raise DeviceError(f"no temporary folder can be made for the builders: {error}; set TMPDIR") from error
        warn_if_unfit()
        if cache := BuildCache.open():
            cache.trim()
        self._tokens = itertools.count()
        self._queue: deque[_Queued] = deque()
        self._done: list[tuple[int, Built | Measurement]] = []
        self._pool: list[_Worker] = []
        self._restarts = Restarts("compiler process")
        self._most_workers = self.workers  # fewer while memory is short
        self._builds_since_loss = 0

    def warm_up(self, candidates: int) -> None:
        """Starts the workers that this number of candidates will need, because importing the compiler takes seconds."""
        while len(self._pool) < min(self._most_workers, candidates):
            if self._add_worker() is None:
                return

    def submit_task(self, task: Task) -> int:
        """Queues what `poll` reports under the token that this returns; the task's own token does not count."""
        task = dataclasses.replace(task, token=next(self._tokens))
        self._queue.append(_Queued(task))
        self._dispatch()
        return task.token

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Built | Measurement]]:
        """The finished candidates. Waits up to `timeout_s` for the first, but not at all when nothing is pending."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._collect()
            self._expire()
            self._dispatch()
            now = time.monotonic()
            if self._done or now >= deadline or not self.pending:
                break
            wait_for([worker.process for worker in self._pool], min(deadline, self._next_event_s()) - now)
        done, self._done = self._done, []
        return done

    def withdraw(self, tokens: Collection[int]) -> set[int]:
        """Takes candidates back that no worker has been given. Returns their tokens, which `poll` will not report."""
        taken = {queued.task.token for queued in self._queue} & set(tokens)
        self._queue = deque(queued for queued in self._queue if queued.task.token not in taken)
        return taken

    @property
    def pending(self) -> int:
        """The number of candidates that were submitted and not yet returned by `poll`."""
        return len(self._queue) + sum(len(worker.tasks) for worker in self._pool) + len(self._done)

    def close(self) -> None:
        """Kills the workers and forgets pending candidates."""
        try:
            while self._pool:
                self._remove(self._pool[-1])
        finally:
            self._queue.clear()
            self._done.clear()
            self._shared.close()

    # Workers

    def _dispatch(self) -> None:
        """Gives the oldest candidates to the least busy workers; starts workers only when there is work for them."""
        while self._queue:
            free = [worker for worker in self._pool if len(worker.tasks) < self._tasks_per_worker]
            worker = min(free, key=lambda worker: len(worker.tasks), default=None)
            if (worker is None or worker.tasks) and len(self._pool) < self._most_workers:
                worker = self._add_worker() or worker
            if worker is None:
                return
            queued = self._queue.popleft()
            if not worker.tasks and worker.ready:
                worker.since_s = time.monotonic()
            queued.number = worker.process.send(Order(queued.task, queued.waits))
            worker.tasks.append(queued)

    def _add_worker(self) -> _Worker | None:
        """None if a worker cannot be started now."""
        if not self._restarts.due:
            return None
        args = (self._target, self._shared.path)
        try:
            worker = _Worker(ChildProcess("schedsearch.processes.build_worker:serve_builds", args, self._env))
        except ChildDiedError as error:
            self._start_failed(error)
            return None
        self._pool.append(worker)
        return worker

    def _start_failed(self, error: ChildDiedError) -> None:
        """Waits longer before the next start. Raises if none can be started and no other worker goes on."""
        if error.short_of_memory:
            self._use_fewer_workers()
        self._restarts.failed(error, hopeless=error.exited, others=any(worker.ready for worker in self._pool))

    def _use_fewer_workers(self) -> None:
        self._most_workers = max(1, min(self._most_workers - 1, len(self._pool)))
        self._builds_since_loss = 0

    def _remove(self, worker: _Worker) -> None:
        self._pool.remove(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; the run does not need it
            worker.process.kill()

    def _lose(self, worker: _Worker, error: ChildDiedError) -> None:
        """Blames the candidate that had begun, if there is one."""
        if not worker.ready:
            self._give_back(worker)
            self._start_failed(error)
            return
        if error.short_of_memory:
            self._use_fewer_workers()
        self._blame(worker, Outcome.WORKER_LOST, f"the builder process was lost: {error}")

    def _blame(self, worker: _Worker, outcome: Outcome, message: str) -> None:
        """Removes a worker. The candidate in work fails, unless it had not begun and may be tried again."""
        if worker.tasks:
            first = worker.tasks[0]
            first.lost += 1
            if worker.building or first.lost >= _LOST_BEFORE:
                worker.tasks.popleft()
                self._fail(first.task.token, outcome, message, time.monotonic() - worker.since_s)
        self._give_back(worker)

    def _give_back(self, worker: _Worker) -> None:
        """Removes a worker, and puts its candidates back at the front of the queue."""
        self._remove(worker)
        self._queue.extendleft(reversed(worker.tasks))

    # Messages

    def _collect(self) -> None:
        """Takes all messages that are there."""
        worker_of = {worker.process: worker for worker in self._pool}
        for process in wait_for(list(worker_of), 0.0):
            worker = worker_of[process]
            try:
                while worker in self._pool and (taken := process.take()) is not None:
                    self._take(worker, *taken)
            except ChildDiedError as error:
                self._lose(worker, error)

    def _take(self, worker: _Worker, number: int, message: object) -> None:
        """Raises ChildDiedError if the message does not belong to what this worker has to do."""
        worker.since_s = time.monotonic()
        expected = worker.tasks[0].number if worker.tasks else 0
        if isinstance(message, BuilderReady) and not worker.ready:
            worker.ready = True
            self._restarts.succeeded()
        elif isinstance(message, BuildStarted) and number == expected and not worker.building:
            worker.building = True
        elif isinstance(message, BuildFinished) and number == expected and worker.building:
            self._finish(worker, message)
        elif isinstance(message, BuildPostponed) and number == expected and worker.building and not worker.tasks[0].waits:
            self._postpone(worker, message)
        else:
            raise worker.process.dismiss(f"it sent {type(message).__name__} for request {number} out of turn")

    def _postpone(self, worker: _Worker, message: BuildPostponed) -> None:
        """Another worker makes what this candidate needs, so the next ones are built first."""
        queued = worker.tasks.popleft()
        queued.waits, worker.building = True, False
        self._queue.append(queued)
        if message.worn:
            self._give_back(worker)

    def _finish(self, worker: _Worker, message: BuildFinished) -> None:
        task = worker.tasks.popleft().task
        worker.building = False
        worker.builds += 1
        self._done.append((task.token, _checked(message, self._mode, task)))
        self._builds_since_loss += 1
        if self._builds_since_loss >= _BUILDS_TO_RECOVER and self._most_workers < self.workers:
            self._most_workers += 1
            self._builds_since_loss = 0
        if message.worn or (worker.builds >= _BUILDS_PER_WORKER and not worker.tasks):
            self._give_back(worker)

    # Time limits

    def _expire(self) -> None:
        for worker in list(self._pool):
            if time.monotonic() < self._expiry_s(worker):
                continue
            if not worker.ready:
                text = f"a compiler process did not start within {_START_S:g} s; is the machine overloaded?"
                self._lose(worker, ChildDiedError(text))
            elif worker.building:
                self._blame(worker, Outcome.COMPILE_TIMEOUT, f"not compiled within {self._timeout_s:g} s; killed")
            else:
                text = f"the builder process did not begin to build within {_BEGIN_S:g} s; killed"
                self._blame(worker, Outcome.WORKER_LOST, text)

    def _expiry_s(self, worker: _Worker) -> float:
        """When the worker has kept the builder waiting for too long."""
        if not worker.ready:
            return worker.since_s + _START_S
        if not worker.tasks:
            return math.inf
        return worker.since_s + (self._timeout_s if worker.building else _BEGIN_S)

    def _next_event_s(self) -> float:
        start_s = self._restarts.next_s if self._queue and not self._restarts.due else math.inf
        return min([start_s, *map(self._expiry_s, self._pool)])

    def _fail(self, token: int, outcome: Outcome, message: str, build_s: float) -> None:
        self._done.append((token, Measurement(outcome, self._mode, message=message, build_s=build_s)))


def _checked(message: BuildFinished, mode: str, task: Task) -> Built | Measurement:
    """What a message says, if it makes sense: the template's code ran in the process that sent it."""
    try:
        build_s = float(message.build_s)
        if not 0 <= build_s < math.inf:
            raise ValueError(f"it took {build_s} s")
        if message.result is None:
            return Measurement(Outcome(message.outcome), mode, message=message.message, build_s=build_s)
        if isinstance(task, RangeTask):
            if not isinstance(message.result, RangeResult):
                raise ValueError(f"a range was asked for, got {type(message.result).__name__}")
            return _checked_range(message.result, task, build_s)
        if isinstance(task, CallTask) and isinstance(message.result, RangeResult):
            return built_by(message.result, build_s)
        if not isinstance(message.result, BuildResult):
            raise ValueError(f"machine code was asked for, got {type(message.result).__name__}")
        return built_by(message.result, build_s)
    except Exception as error:  # any part of the message may have any type
        text = f"the result of the build is not usable: {type(error).__name__}: {error}"
        return Measurement(Outcome.COMPILE_ERROR, mode, message=text)


def _checked_result(result: BuildResult, build_s: float) -> Built:
    plan = LaunchPlan.from_json(result.artifact.plan.to_json())
    if plan != result.artifact.plan or not isinstance(result.artifact.code, bytes):
        raise ValueError("the launch plan or the code has a value of a wrong type")
    if not all(isinstance(number, int) for number in astuple(result.resources)):
        raise ValueError(f"{result.resources} has a value that is not an integer")
    return Built(result.artifact, result.resources, str(result.canonical_hash), build_s, bool(result.shared))


def _checked_range(found: RangeResult, task: RangeTask, build_s: float) -> BuiltRange:
    built = built_by(found, build_s)
    assert isinstance(built, BuiltRange)
    plan = built.plan
    if task.config not in (None, built.config):
        raise ValueError("it is of another configuration")
    if task.origin not in plan.sizes or not set(plan.sizes) <= set(task.of_range.sizes):
        raise ValueError(f"it serves other sizes than asked for: {plan.sizes[0]} to {plan.sizes[-1]}")
    for size in plan.sizes:
        plan.at(size).check(task.of_range.at(size))
    return dataclasses.replace(built, artifact=Artifact(built.artifact.code, plan.at(task.origin)))


def built_by(found: BuildResult | RangeResult, build_s: float) -> Built:
    """What a build gave, after checks of its types; a `BuiltRange` for a range. Raises ValueError."""
    if isinstance(found, BuildResult):
        return _checked_result(found, build_s)
    built = _checked_result(found.result, build_s)
    config, plan = Config(found.config), SizedPlan.from_json(found.plan)
    return BuiltRange(built.artifact, built.resources, built.canonical_hash, build_s, built.shared, config=config, plan=plan)


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
