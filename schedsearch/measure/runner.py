"""Measures machine code on one device, in a process that a candidate may bring down."""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from schedsearch.errors import DeviceError, OperatorError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measure.builder import Built
from schedsearch.measure.clocks import read_clocks
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.process import ChildDiedError, ChildProcess
from schedsearch.measure.run_worker import Failed, Prepare, Race, Ran, Ready, Run
from schedsearch.measurement import COLD_GRAPH, MODES, Measurement, Outcome
from schedsearch.target import Target
from schedsearch.workload import Workload

_START_S = 120.0
_PREPARE_S = 600.0  # a naive float64 convolution on one core may take minutes
_RESTARTS = 3  # after a hang the driver may need a moment before it accepts the next process
_CLOCKS_AGE_S = 2.0
_STRESS_LAUNCHES = 50


class Runner:
    """Verifies and times candidates on one device. Not thread-safe: one call at a time, from any thread.

    It holds the device's lock. A child process does the work, pinned to the GPU by its UUID (on the CPU to this
    process's cores). The runner replaces it whenever a candidate crashes it, hangs, or makes the device or the memory
    unusable. That candidate's Measurement says so, and the run goes on.

    Args:
        mode: one of `schedsearch.measurement.MODES`.
        timeout_s: wall seconds for one candidate, verification and timing together.
        wait, on_wait: see `DeviceLock`.
        meanwhile: called once, while the child process opens the device; the lock is held then.

    Attributes:
        busy_s: wall seconds that candidates have used the device so far.
        prepare_s: wall seconds for inputs and references so far.
        restarts: number of child processes lost so far.

    Raises:
        DeviceBusyError: another run holds the device and `wait` is false.
        DeviceError: the device cannot be opened; every method raises it, too, if the device cannot be opened again.
        UsageError: the mode is unknown, or `timeout_s` is not positive.
    """

    def __init__(
        self,
        target: Target,
        mode: str = COLD_GRAPH,
        timeout_s: float = 10.0,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        if mode not in MODES or timeout_s <= 0:
            raise UsageError(f"a runner needs a mode of {', '.join(MODES)} and timeout_s > 0, got {mode!r} and {timeout_s}")
        self._target, self._mode, self._timeout_s = target, mode, timeout_s
        self._host = platform.node()
        self._cores = sorted(os.sched_getaffinity(0))
        self._code: dict[str, Artifact] = {}
        self._child: ChildProcess | None = None
        self._child_knows: set[str] = set()
        self._seeds = itertools.count(1)
        self._clocks: dict[str, Any] = {}
        self._clocks_s = -math.inf
        self.busy_s = self.prepare_s = 0.0
        self.restarts = 0
        self._lock = DeviceLock(target, wait=wait, on_wait=on_wait)
        try:
            self._start_child(meanwhile)
        except BaseException:
            self.close()
            raise

    def prepare(self, workload: Workload) -> None:
        """Prepares inputs, reference and arena of a workload ahead of `measure`. Raises the errors of `measure`."""
        self._prepare(workload, seed=0)

    def measure(self, workload: Workload, built: Built, best_ns: float | None = None) -> Measurement:
        """Verifies every element, then times.

        Args:
            best_ns: the workload's best time so far; a candidate that is far slower is timed only once.

        Returns:
            ok with times, or wrong_answer, launch_error, run_timeout, worker_lost with a message; or rejected, without a
            launch, if the launch plan needs something that this runner cannot provide.

        Raises:
            OperatorError: the reference of another package's operator failed, not the candidate.
            RuntimeError: schedsearch's own reference or this code failed.
        """
        self._prepare(workload, seed=0)
        began = time.monotonic()
        ran = self._run(Run(workload, built.artifact, best_ns), self._timeout_s)
        return self._measurement(ran, built, time.monotonic() - began)

    def race(self, workload: Workload, finalists: Sequence[Built]) -> list[Measurement]:
        """Verifies finalists again, with fresh inputs after many launches in a row, and times them in turns.

        Returns:
            One measurement each, in order. Times of one race are easier to compare than those of separate measurements,
            because clocks and temperature drift for all alike.

        Raises:
            OperatorError, RuntimeError: as `measure` does.
        """
        results: dict[int, Measurement] = {}
        errors: dict[int, float | None] = {}
        seed = next(self._seeds)
        for number, built in enumerate(finalists):
            self._prepare(workload, seed)
            began = time.monotonic()
            ran = self._run(Run(workload, built.artifact, launches=_STRESS_LAUNCHES), self._timeout_s)
            errors[number] = ran.max_error
            if ran.outcome is not Outcome.OK:
                results[number] = self._measurement(ran, built, time.monotonic() - began)
        survivors = [number for number in range(len(finalists)) if number not in results]
        if survivors:
            self._prepare(workload, seed)
            began = time.monotonic()
            artifacts = [finalists[number].artifact for number in survivors]
            ran = self._run(Race(workload, artifacts), self._timeout_s * len(survivors))
            run_s = (time.monotonic() - began) / len(survivors)
            for place, number in enumerate(survivors):
                if ran.outcome is Outcome.OK:
                    own = replace(ran, times_ns=[ran.times_ns[place]], max_error=errors[number])
                    results[number] = self._measurement(own, finalists[number], run_s)
                else:  # the race failed as a whole: rerun each finalist alone to find the culprit
                    results[number] = self.measure(workload, finalists[number])
        return [results[number] for number in range(len(finalists))]

    def clocks(self) -> dict[str, Any]:
        """Clocks and throttling, at most two seconds old; values that the system does not report are left out."""
        if time.monotonic() - self._clocks_s > _CLOCKS_AGE_S:
            self._clocks, self._clocks_s = read_clocks(self._target), time.monotonic()
        return dict(self._clocks)

    @property
    def pid(self) -> int | None:
        """Process id of the child that holds the device now."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """Ends the child process and frees the device; does nothing the second time."""
        try:
            self._stop_child()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _prepare(self, workload: Workload, seed: int) -> None:
        """Retries a failure in a fresh process: in one that ran candidates it may be their fault, in a fresh one it is
        ours.
        """
        began = time.monotonic()
        fresh = self._child is None
        try:
            child = self._child or self._restart_child()
            known = {name: code for name, code in self._code.items() if name not in self._child_knows}
            child.send(Prepare(workload, seed, known))
            reply = child.receive(_PREPARE_S)
            if isinstance(reply, Failed):
                raise reply.error(reply.text)
        except (ChildDiedError, TimeoutError, DeviceError, OperatorError, RuntimeError) as error:
            self._stop_child()
            if not fresh:
                return self._prepare(workload, seed)
            if not isinstance(error, (ChildDiedError, TimeoutError)):
                raise
            raise RuntimeError(f"the runner's process failed to prepare {workload.label}: {error}") from error
        finally:
            self.prepare_s += time.monotonic() - began
        self._code.update(reply.code)
        self._child_knows = set(self._code)
        return None

    def _run(self, request: Run | Race, timeout_s: float) -> Ran:
        """One request after `_prepare`. Kills the child afterwards if it must not be used again."""
        assert self._child is not None
        began = time.monotonic()
        try:
            self._child.send(request)
            reply: Ran | Failed = self._child.receive(timeout_s)
        except TimeoutError:
            reply = Ran(Outcome.RUN_TIMEOUT, message=f"not verified and timed within {timeout_s:g} s; killed", broken=True)
        except ChildDiedError as error:
            reply = Ran(Outcome.WORKER_LOST, message=f"the runner process was lost: {error}", broken=True)
        self.busy_s += time.monotonic() - began
        if isinstance(reply, Failed):
            self._stop_child()
            raise RuntimeError(reply.text)
        if reply.broken:
            self._stop_child()
            self.restarts += 1
        return reply

    def _measurement(self, ran: Ran, built: Built, run_s: float) -> Measurement:
        finite = ran.max_error is not None and math.isfinite(ran.max_error)
        return Measurement(
            ran.outcome,
            self._mode,
            times_ns=ran.times_ns[0] if ran.outcome is Outcome.OK else (),
            resources=built.resources,
            max_error=ran.max_error if finite else None,
            message=ran.message,
            build_s=built.build_s,
            run_s=run_s,
            clocks={**self.clocks(), **ran.facts},
            host=self._host,
            device_uuid=self._target.uuid,
        )

    def _restart_child(self) -> ChildProcess:
        for attempt in range(_RESTARTS - 1):
            try:
                return self._start_child()
            except DeviceError:
                time.sleep(1.0 + attempt)
        return self._start_child()

    def _start_child(self, meanwhile: Callable[[], None] = lambda: None) -> ChildProcess:
        target, env = self._target, {}
        if target.kind == "cuda" and target.uuid:
            target, env = replace(target, ordinal=0), {"CUDA_VISIBLE_DEVICES": target.uuid}
        args = (target, self._cores, self._mode)
        self._child = ChildProcess("schedsearch.measure.run_worker:serve_runs", args, env)
        self._child_knows = set()
        meanwhile()
        try:
            reply = self._child.receive(_START_S)
        except (ChildDiedError, TimeoutError) as error:
            self._stop_child()
            raise DeviceError(f"the process that opens {target.name} failed: {error}") from error
        if isinstance(reply, Failed):
            self._stop_child()
            raise reply.error(reply.text)
        assert isinstance(reply, Ready)
        return self._child

    def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            try:
                child.kill()
            except subprocess.TimeoutExpired as error:
                raise DeviceError(
                    f"process {child.pid} hangs on {self._target.name} and cannot be killed; reset the device"
                ) from error
