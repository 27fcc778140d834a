"""Builds candidates on the workers of a fleet."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from schedsearch.closing import Closing
from schedsearch.errors import AwayError, LostError, SchedsearchError
from schedsearch.fleet import host
from schedsearch.fleet.client import Fleet
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.build_worker import Task
from schedsearch.processes.requests import Built, Submitting
from schedsearch.target import Target

_TRIES = 2
_AHEAD = 2  # batches for each compiler of a worker: one in work and one waiting
_BATCH = 4
_SLICE_S = 0.2
_START_S = 120.0  # a compiler process is imported
_WAITS_BEHIND_S = 600.0  # for other runs on the same worker


@dataclass
class _Queued:
    task: Task
    tries: int = 0


@dataclass(eq=False)
class _Batch:
    address: str
    queued: list[_Queued]
    future: Any
    ends_s: float


class FleetBuilder(Submitting, Closing):
    """A `Builder` whose processes are on the workers of a fleet. Call its methods in one thread.

    A candidate whose worker is lost is built once more, alone and on another one; then it is `worker_lost`.

    Args:
        target: what to compile for.
        toolchain: the compilers that build; workers with others are left out.

    Attributes:
        workers: candidates that are built at the same time when all present workers do.

    `poll` raises LostError when there has been no worker that builds for as long as the connection says.
    """

    def __init__(self, fleet: Fleet, target: Target, toolchain: dict[str, str], timeout_s: float, mode: str) -> None:
        self._fleet, self._target, self._toolchain = fleet, target, toolchain
        self._timeout_s, self._mode = timeout_s, mode
        self._tokens = itertools.count()
        self._queue: deque[_Queued] = deque()
        self._batches: set[_Batch] = set()
        self._finished: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        # Dask sends one message in 10 ms. That a result is not needed any more must not hold up the next task.
        self._kept: list[Any] = []
        self._done: list[tuple[int, Built | Measurement]] = []
        self._alone_since_s: float | None = None

    @property
    def workers(self) -> int:
        return sum(self._places().values())

    def _places(self) -> dict[str, int]:
        """The workers that build, and how many candidates each builds at the same time."""
        kind = self._target.kind
        return {
            address: member.builds
            for address, member in self._fleet.roster.members.items()
            if member.builds and member.toolchains.get(kind) == self._toolchain
        }

    def warm_up(self, candidates: int) -> None:
        """Does nothing: the processes of a worker start with their first candidate."""

    def submit_task(self, task: Task) -> int:
        task = dataclasses.replace(task, token=next(self._tokens))
        self._queue.append(_Queued(task))
        return task.token

    @property
    def pending(self) -> int:
        return len(self._queue) + sum(len(batch.queued) for batch in self._batches) + len(self._done)

    def withdraw(self, tokens: Collection[int]) -> set[int]:
        """Takes candidates back that no worker has been given. Returns their tokens, which `poll` will not report."""
        taken = {queued.task.token for queued in self._queue} & set(tokens)
        self._queue = deque(queued for queued in self._queue if queued.task.token not in taken)
        return taken

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Built | Measurement]]:
        """The finished candidates. Waits up to `timeout_s` for the first, but not at all when nothing is pending."""
        ends_s = time.monotonic() + timeout_s
        while True:
            self._collect(0.0)
            self._expire()
            self._dispatch()
            left_s = ends_s - time.monotonic()
            if self._done or left_s <= 0 or not self.pending:
                break
            self._collect(min(left_s, _SLICE_S))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Forgets pending candidates; what workers have begun ends there by itself."""
        for batch in self._batches:
            batch.future.cancel()
        self._batches.clear()
        self._kept.clear()
        self._queue.clear()
        self._done.clear()

    def _dispatch(self) -> None:
        """Gives the oldest candidates to the least busy workers."""
        places = self._places()
        if not self._queue:
            return
        if not places:
            self._wait_for_workers()
            return
        self._alone_since_s = None
        busy = dict.fromkeys(places, 0)
        for batch in self._batches:
            if batch.address in busy:
                busy[batch.address] += 1
        while self._queue:
            address = min(places, key=lambda address: busy[address] / places[address])
            if busy[address] >= _AHEAD * places[address]:
                return
            size = 1 if self._queue[0].tries else min(_BATCH, max(1, len(self._queue) // (_AHEAD * sum(places.values()))))
            queued = [self._queue.popleft() for _ in range(size)]
            try:
                self._send(address, queued, waiting=busy[address] // places[address])
            except AwayError:
                self._queue.extendleft(reversed(queued))
                return
            busy[address] += 1

    def _send(self, address: str, queued: list[_Queued], waiting: int) -> None:
        tasks = [each.task for each in queued]
        future = self._fleet.submit(address, {"CPU": 1}, host.build, self._target, self._timeout_s, self._mode, tasks)
        limit_s = _START_S + self._timeout_s * len(tasks) * (1 + waiting) + _WAITS_BEHIND_S
        batch = _Batch(address, queued, future, time.monotonic() + limit_s)
        self._batches.add(batch)
        self._kept.clear()
        future.add_done_callback(lambda _: self._finished.put(batch))

    def _wait_for_workers(self) -> None:
        if self._batches:
            return
        now_s = time.monotonic()
        self._alone_since_s = self._alone_since_s or now_s
        if now_s - self._alone_since_s > self._fleet.connection.patience_s:
            raise LostError(
                f"{self._fleet.connection.address} has had no worker that builds for {now_s - self._alone_since_s:.0f} s"
            )
        time.sleep(0.01)

    def _collect(self, timeout_s: float) -> None:
        """Takes the batches that are done; waits so long for the first."""
        while True:
            try:
                batch = self._finished.get(timeout=timeout_s) if timeout_s else self._finished.get_nowait()
            except queue.Empty:
                return
            timeout_s = 0.0
            if batch not in self._batches:
                continue
            try:
                results = self._fleet.result(batch.future, batch.address, limit_s=_START_S)
            except AwayError as error:
                self._lose(batch, str(error), begun=error.begun)
            except SchedsearchError as error:  # the worker cannot build: no memory, no folder, no compiler
                self._lose(batch, f"{self._fleet_name(batch.address)} cannot build: {error}")
            else:
                self._batches.discard(batch)
                self._kept.append(batch.future)
                self._done += [(each.task.token, result) for each, result in zip(batch.queued, results)]

    def _fleet_name(self, address: str) -> str:
        member = self._fleet.roster.members.get(address)
        return address if member is None else member.name

    def _expire(self) -> None:
        now_s = time.monotonic()
        for batch in list(self._batches):
            if batch.future.done():
                continue
            if not self._fleet.has(batch.address):
                error = self._fleet.lost(batch.address)
                self._lose(batch, str(error), begun=error.begun)
            elif now_s > batch.ends_s:
                batch.future.cancel()
                self._lose(batch, f"the worker {batch.address} did not answer")

    def _lose(self, batch: _Batch, why: str, begun: bool = True) -> None:
        """What a lost worker had is built again, each candidate alone, and once only. What had not `begun` loses nothing."""
        self._batches.discard(batch)
        again: list[_Queued] = []
        for queued in batch.queued:
            queued.tries += begun
            if queued.tries < _TRIES:
                again.append(queued)
                continue
            message = f"{why} while it had this candidate to build, for the second time"
            self._done.append((queued.task.token, Measurement(Outcome.WORKER_LOST, self._mode, message=message)))
        self._queue.extendleft(reversed(again))
