"""Builds candidates into machine code, in long-lived processes that compile ahead while the device measures."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from schedsearch.backend.build_cache import BuildCache
from schedsearch.backend.cuda import require_compiler
from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact
from schedsearch.measure.build_worker import BuilderReady, BuildFinished, BuildStarted, BuildTask
from schedsearch.measure.process import ChildDiedError, ChildProcess
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Resources
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.workload import Workload

# One candidate in work and one waiting, so that a worker stays busy while the parent measures.
_TASKS_PER_WORKER = 2
# Numba keeps some memory for everything that it compiled; a worker is replaced before this adds up.
_BUILDS_PER_WORKER = 500
# A fresh worker imports the compiler before its first candidate.
_START_S = 120.0


@dataclass(frozen=True)
class Candidate:
    """One way to run one workload. Each candidate gets an outcome."""

    workload: Workload
    template: Template
    config: Config


@dataclass(frozen=True)
class Built:
    """A candidate that compiled.

    Attributes:
        canonical_hash: equal for candidates that compiled to the same code and launch; measure only one of these.
        build_s: wall seconds from configuration to artifact, in the worker.
        shared: as in `BuildResult`.
    """

    artifact: Artifact
    resources: Resources
    canonical_hash: str
    build_s: float
    shared: bool = True


@dataclass
class _Worker:
    process: ChildProcess
    tasks: deque[BuildTask] = field(default_factory=deque)  # the first is in work
    born_s: float = field(default_factory=time.monotonic)
    ready: bool = False
    started_s: float | None = None  # when the first task began; None until the worker reports it
    builds: int = 0


class Builder:
    """A pool of compiler processes. Not thread-safe: call all methods in the thread that made it.

    `poll` returns a candidate's failure as a Measurement: compile_error with the compiler's text or the
    template's traceback, rejected, compile_timeout, or worker_lost when the compiler's process died. The process is then
    replaced, and the candidates that waited behind this one are built by others.

    On the CPU building disturbs timing: submit a batch, `drain()` it, and measure while the builder is `idle`.

    Args:
        target: what to compile for. A GPU need not be present, and is never touched.
        workers: number of processes; by default one for each core that this process may use, for a GPU one fewer.
        timeout_s: wall seconds for one candidate.
        mode: the timing mode under which failures are recorded.

    Raises:
        UsageError: `workers` or `timeout_s` is not positive; or the target is a GPU and numba-cuda is not installed.
        RuntimeError: from `poll`, when a worker cannot start at all, which is no candidate's fault.
    """

    def __init__(self, target: Target, workers: int | None = None, timeout_s: float = 60.0, mode: str = COLD_GRAPH) -> None:
        cores = len(os.sched_getaffinity(0))
        self.workers = (max(1, cores - 1) if target.kind == "cuda" else cores) if workers is None else workers
        if self.workers < 1 or timeout_s <= 0:
            raise UsageError(f"a builder needs workers >= 1 and timeout_s > 0, got {self.workers} and {timeout_s}")
        if target.kind == "cuda":
            require_compiler()
        self._target, self._timeout_s, self._mode = target, timeout_s, mode
        # Without a visible GPU no worker can create a context there by accident.
        self._env = {"CUDA_VISIBLE_DEVICES": ""} if target.kind == "cuda" else {}
        self._shared = tempfile.TemporaryDirectory(prefix="schedsearch-builds-", ignore_cleanup_errors=True)
        if cache := BuildCache.open():
            cache.trim()
        self._tokens = itertools.count()
        self._queue: deque[BuildTask] = deque()
        self._done: list[tuple[int, Built | Measurement]] = []
        self._pool: list[_Worker] = []

    def warm_up(self, candidates: int) -> None:
        """Starts the workers that this number of candidates will need, because importing the compiler takes seconds."""
        while len(self._pool) < min(self.workers, candidates):
            self._add_worker()

    def submit(self, candidate: Candidate) -> int:
        """Queues a candidate; returns the token under which `poll` reports it.

        Raises:
            UsageError: the workers cannot import the template's class by name.
        """
        task = BuildTask(next(self._tokens), _location(candidate.template), candidate.workload, candidate.config)
        self._queue.append(task)
        self._dispatch()
        return task.token

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Built | Measurement]]:
        """The finished candidates. Waits up to `timeout_s` for the first, but not at all when nothing is pending."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._collect(0.0)
            self._expire()
            self._dispatch()
            now = time.monotonic()
            if self._done or now >= deadline or not self.pending:
                break
            self._collect(min(deadline, self._next_expiry()) - now)
        done, self._done = self._done, []
        return done

    def drain(self) -> list[tuple[int, Built | Measurement]]:
        """Waits until the builder is idle; returns all finished candidates."""
        done = []
        while self.pending:
            done += self.poll(1.0)
        return done

    @property
    def pending(self) -> int:
        """The number of candidates that were submitted and not yet returned by `poll`."""
        return len(self._queue) + sum(len(worker.tasks) for worker in self._pool) + len(self._done)

    def close(self) -> None:
        """Kills the workers and forgets pending candidates."""
        for worker in self._pool:
            worker.process.kill()
        self._pool.clear()
        self._queue.clear()
        self._done.clear()
        self._shared.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _dispatch(self) -> None:
        """Gives the oldest candidates to the least busy workers; starts workers only when there is work for them."""
        while self._queue:
            free = [worker for worker in self._pool if len(worker.tasks) < _TASKS_PER_WORKER]
            worker = min(free, key=lambda worker: len(worker.tasks), default=None)
            if (worker is None or worker.tasks) and len(self._pool) < self.workers:
                worker = self._add_worker()
            if worker is None:
                return
            task = self._queue.popleft()
            worker.tasks.append(task)
            worker.process.send(task)

    def _add_worker(self) -> _Worker:
        args = (self._target, Path(self._shared.name))
        worker = _Worker(ChildProcess("schedsearch.measure.build_worker:serve_builds", args, self._env))
        self._pool.append(worker)
        return worker

    def _collect(self, timeout_s: float) -> None:
        """Receives all messages that are there, or waits up to `timeout_s` for the first."""
        by_conn: dict[Any, _Worker] = {worker.process.conn: worker for worker in self._pool}
        while ready := wait(list(by_conn), max(0.0, timeout_s)):
            timeout_s = 0.0
            for conn in ready:
                worker = by_conn[conn]
                try:
                    message = worker.process.receive(0.0)
                except ChildDiedError as error:
                    if not worker.ready:
                        raise RuntimeError(f"a compiler process cannot start: {error}") from error
                    del by_conn[conn]
                    self._lose(worker, Outcome.WORKER_LOST, f"the builder process was lost: {error}")
                else:
                    self._take(worker, message)
                    if worker not in self._pool:
                        del by_conn[conn]

    def _take(self, worker: _Worker, message: BuilderReady | BuildStarted | BuildFinished) -> None:
        if isinstance(message, BuilderReady):
            worker.ready = True
            return
        if isinstance(message, BuildStarted):
            worker.started_s = message.at_s
            return
        worker.tasks.popleft()
        worker.started_s = None
        worker.builds += 1
        if message.result is None:
            self._fail(message.token, message.outcome, message.message, message.build_s)
        else:
            result = message.result
            built = Built(result.artifact, result.resources, result.canonical_hash, message.build_s, result.shared)
            self._done.append((message.token, built))
        if worker.builds >= _BUILDS_PER_WORKER and not worker.tasks:
            self._remove(worker)

    def _expire(self) -> None:
        for worker in list(self._pool):
            if time.monotonic() < self._expiry(worker):
                continue
            if not worker.ready:
                raise RuntimeError(f"a compiler process did not start within {_START_S:g} s; is the machine overloaded?")
            self._lose(worker, Outcome.COMPILE_TIMEOUT, f"not compiled within {self._timeout_s:g} s; killed")

    def _expiry(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.born_s + _START_S
        return float("inf") if worker.started_s is None else worker.started_s + self._timeout_s

    def _next_expiry(self) -> float:
        return min(map(self._expiry, self._pool), default=float("inf"))

    def _lose(self, worker: _Worker, outcome: Outcome, message: str) -> None:
        """Blames the candidate in work, and puts those that waited behind it back at the front of the queue."""
        self._remove(worker)
        if worker.tasks:
            task = worker.tasks.popleft()
            build_s = time.monotonic() - (worker.started_s or time.monotonic())
            self._fail(task.token, outcome, message, build_s)
            self._queue.extendleft(reversed(worker.tasks))

    def _remove(self, worker: _Worker) -> None:
        self._pool.remove(worker)
        worker.process.kill()

    def _fail(self, token: int, outcome: Outcome, message: str, build_s: float) -> None:
        self._done.append((token, Measurement(outcome, self._mode, message=message, build_s=build_s)))


def _location(template: Template) -> str:
    cls = type(template)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UsageError(
            f"template {cls.name!r} is defined in {cls.__module__}.{cls.__qualname__}, which the compiler processes cannot "
            "import; move the class to the top level of a module of its own"
        )
    return f"{cls.__module__}:{cls.__qualname__}"
