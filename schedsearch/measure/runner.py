"""Measures machine code on one device, in a process that a candidate may bring down."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from schedsearch.closing import Closing
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import DeviceError, OperatorError, PreparationError, SchedsearchError, UsageError, first_line
from schedsearch.launch import Artifact
from schedsearch.measure.clocks import read_clocks
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.run_worker import FINALIST, WINNER, Failed, Prepare, Race, Ran, Ready, ReferenceRuns, Run
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, check_mode
from schedsearch.processes.builder import Built
from schedsearch.processes.process import ChildDiedError, ChildProcess
from schedsearch.processes.restarts import Restarts
from schedsearch.target import Target
from schedsearch.typed import JsonObject
from schedsearch.verification.reference import failure_of, reference_name
from schedsearch.workload import Workload

_START_S = 120.0
_PREPARE_S = 600.0  # a naive float64 convolution on one core may take minutes
REFERENCE_S = 30.0  # for code of a reference that is not schedsearch's own
_CLOCKS_AGE_S = 2.0
_UNWITNESSED = 3  # of a template that is always wrong, further answers are believed


@dataclass(frozen=True)
class _Racer:
    """A finalist that was right so far. `max_error` is that of its verification."""

    built: Built
    max_error: float | None


class Runner(Closing):
    """Verifies and times candidates on one device. Not thread-safe: one call at a time, from any thread.

    It holds the device's lock. A child process does the work, pinned to the GPU by its UUID (on the CPU to this
    process's cores). The runner replaces it whenever a candidate crashes it, hangs, or makes the device or the memory
    unusable. That candidate's Measurement says so, and the run goes on.

    Args:
        mode: one of `schedsearch.measurement.MODES`.
        timeout_s: wall seconds for one candidate, verification and timing together.
        reference_timeout_s: wall seconds for the reference of a user or of another package to compute its answers.
        wait, on_wait, deadline: see `DeviceLock`.
        lock: the device's lock, if the caller has acquired it; the runner frees it.
        meanwhile: called once, while the child process opens the device; the lock is held then.

    Attributes:
        busy_s: wall seconds that candidates have used the device so far.
        prepare_s: wall seconds for inputs and references so far.
        waited_s: wall seconds until other runs had freed the device.
        verify_s: the part of `busy_s` that verification took.
        restarts: number of child processes lost so far.

    Raises:
        DeviceBusyError: another run holds the device and `wait` is false.
        DeviceError: the device cannot be opened; every method raises it, too, if the device cannot be opened again. A
            process that dies meanwhile is replaced several times.
        UsageError: the mode is unknown or not one of this kind of device, or a timeout is not positive.
    """

    def __init__(
        self,
        target: Target,
        mode: str = COLD_GRAPH,
        timeout_s: float = 10.0,
        reference_timeout_s: float = REFERENCE_S,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        deadline: Deadline = NEVER,
        lock: DeviceLock | None = None,
    ) -> None:
        check_mode(mode, target.kind)
        if timeout_s <= 0 or reference_timeout_s <= 0:
            raise UsageError(
                f"a runner needs timeout_s > 0 and reference_timeout_s > 0, got {timeout_s} and {reference_timeout_s}"
            )
        self._target, self._mode, self._timeout_s, self._reference_s = target, mode, timeout_s, reference_timeout_s
        self._refused: dict[Workload, str] = {}  # whose reference failed
        self._reference_since_s: float | None = None  # when the reference began that is being computed
        self._host = platform.node()
        self._cores = sorted(os.sched_getaffinity(0))
        self._code: dict[str, Artifact] = {}
        self._child: ChildProcess | None = None
        self._learned: deque[tuple[str, Artifact]] = deque()  # appended to by other threads
        self._child_knows: set[str] = set()
        self._runs_of_child = 0
        self._witness: Run | None = None  # the last candidate that was right
        self._unwitnessed = 0  # wrong answers in a row that a fresh process had to confirm
        self._seeds = itertools.count(1)
        self._clocks: JsonObject = {}
        self._clocks_s = -math.inf
        self.busy_s = self.prepare_s = self.verify_s = 0.0
        self.restarts = 0
        self._lock = lock or DeviceLock(target, wait=wait, on_wait=on_wait, deadline=deadline)
        self.waited_s = self._lock.waited_s
        try:
            self._open_child(meanwhile, first=True)
        except BaseException:
            self.close()
            raise

    def prepare(self, workload: Workload) -> None:
        """Prepares inputs, reference and arena of a workload ahead of `measure`. Raises the errors of `measure`."""
        self._prepare(workload, seed=0)

    def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
        """Takes a reference that a builder compiled, so that the device need not wait for this. Any thread may call it."""
        self._learned.append((reference_name(workload), artifact))

    def measure(self, workload: Workload, built: Built, best_ns: float | None = None) -> Measurement:
        """Verifies every element, times, and verifies again what timed launches computed.

        Args:
            best_ns: the workload's best time so far; a candidate that is far slower is timed only once.

        Returns:
            ok with times, or wrong_answer, launch_error, run_timeout, worker_lost with a message; or rejected, without a
            launch, if the launch plan needs something that this runner cannot provide.

        Raises:
            OperatorError: the reference of a user or of another package failed, ended its process or takes too long; the
                candidate did nothing wrong.
            PreparationError: no process survives making the inputs and the reference, or it takes too long.
            RuntimeError: schedsearch's own reference failed.
        """
        self._prepare(workload, seed=0)
        began = time.monotonic()
        ran = self._judged(Run(workload, built.artifact, best_ns), seed=0)
        return self._measurement(ran, built, time.monotonic() - began)

    def race(self, workload: Workload, finalists: Sequence[Built]) -> list[Measurement]:
        """Verifies finalists again, with fresh inputs and between some hundred launches, times them in turns, and verifies
        them once more, the winner between a thousand launches. If one fails then, the others race again without it. If it
        may be another one's fault, each races alone.

        Returns:
            One measurement each, in order. Times of one race are easier to compare than those of separate measurements,
            because clocks and temperature drift for all alike.

        Raises:
            OperatorError, PreparationError, RuntimeError: as `measure` does.
        """
        results: dict[int, Measurement] = {}
        racers: dict[int, _Racer] = {}
        seed = next(self._seeds)
        for number, built in enumerate(finalists):
            self._prepare(workload, seed)
            began = time.monotonic()
            ran = self._judged(Run(workload, built.artifact, stress=FINALIST), seed)
            if ran.outcome is Outcome.OK:
                racers[number] = _Racer(built, ran.max_error)
            else:
                results[number] = self._measurement(ran, built, time.monotonic() - began)
        results |= self._raced(workload, racers, seed)
        return [results[number] for number in range(len(finalists))]

    def clocks(self) -> JsonObject:
        """Clocks and throttling, at most two seconds old; values that the system does not report are left out."""
        if time.monotonic() - self._clocks_s > _CLOCKS_AGE_S:
            self._clocks, self._clocks_s = read_clocks(self._target), time.monotonic()
        return dict(self._clocks)

    @property
    def reference_s(self) -> float:
        """Seconds for which a reference of a user or of another package is being computed; 0 if none is. For any thread."""
        since_s = self._reference_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

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

    def _prepare(self, workload: Workload, seed: int) -> None:
        """Retries a failure in a fresh process: in one that ran candidates it may be their fault, in a fresh one it is
        ours. A process that only disappears is replaced several times.
        """
        if workload in self._refused:
            raise OperatorError(self._refused[workload])
        began = time.monotonic()
        restarts = Restarts(f"process that makes the inputs and the reference of {workload.label}")
        try:
            while not (ready := self._try_to_prepare(workload, seed, restarts)):
                restarts.wait()
        except OperatorError as error:
            self._refused[workload] = str(error)
            raise
        finally:
            self.prepare_s += time.monotonic() - began
        self._code.update(ready.code)
        self._child_knows = set(self._code)

    def _try_to_prepare(self, workload: Workload, seed: int, restarts: Restarts) -> Ready | None:
        """None if it makes sense to try again."""
        fresh = self._child is None
        child = self._child or self._open_child()
        innocent = not self._runs_of_child  # no candidate can be to blame
        while self._learned:
            name, artifact = self._learned.popleft()
            self._code.setdefault(name, artifact)
        child.send(Prepare(workload, seed, {name: self._code[name] for name in self._code.keys() - self._child_knows}))
        try:
            reply = self._prepared_reply(child, workload)
        except ChildDiedError as error:
            self._stop_child()
            of_reference, self._reference_since_s = self._reference_since_s is not None, None
            if innocent and of_reference:
                how = first_line(error).partition("; its last words")[0]
                memory = ", perhaps for lack of memory" if error.short_of_memory else ""
                raise failure_of(workload, f"it ended its process: {how}{memory}") from error
            if fresh:
                try:
                    restarts.failed(error)
                except DeviceError as last:
                    raise PreparationError(str(last)) from error
            return None
        except TimeoutError as error:
            self._stop_child()
            if fresh:
                text = f"the inputs and the reference of {workload.label} were not ready within {_PREPARE_S:g} s"
                raise PreparationError(text) from error
            return None
        if isinstance(reply, Ready):
            return reply
        self._stop_child()
        if fresh:
            raise _error_of(reply)
        return None

    def _prepared_reply(self, child: ChildProcess, workload: Workload) -> object:
        """The answer to `Prepare`.

        Raises:
            OperatorError: the reference takes too long.
            TimeoutError: something else does.
            ChildDiedError: `_reference_since_s` says whether it was the reference's doing.
        """
        self._reference_since_s = None
        deadline_s = time.monotonic() + _PREPARE_S
        while True:
            since_s: float | None = self._reference_since_s
            until_s = deadline_s if since_s is None else since_s + self._reference_s
            try:
                reply = child.receive(max(0.0, until_s - time.monotonic()))
            except TimeoutError as error:
                if since_s is None:
                    raise
                self._reference_since_s = None
                self._stop_child()
                raise failure_of(
                    workload,
                    f"it was not done within {self._reference_s:g} s; killed. Make it faster, or give it more time "
                    "(--reference-timeout of schedsearch tune, reference_timeout_s= of tune)",
                ) from error
            if not isinstance(reply, ReferenceRuns):
                self._reference_since_s = None
                return reply
            self._reference_since_s = time.monotonic() if reply.begins else None

    def _judged(self, request: Run, seed: int) -> Ran:
        """One candidate after `_prepare`. A wrong answer counts only if its process still judges rightly.

        An earlier candidate may have written to memory that no guard protects. So the process is asked to run the last
        candidate that was right, its witness. If that fails too, or there is none, the answer comes from a fresh process.
        """
        ran = self._run(request, self._timeout_s)
        if ran.outcome is Outcome.OK:
            self._witness = request
            self._unwitnessed = 0
            return ran
        if ran.outcome is not Outcome.WRONG_ANSWER or ran.broken or self._runs_of_child <= 1:
            return ran
        witness = self._witness
        if witness is not None and witness.workload == request.workload and self._child is not None:
            if self._confirmed_by(witness):
                return ran
        elif self._unwitnessed >= _UNWITNESSED:
            return ran
        self._unwitnessed += 1
        self._stop_child()
        self._prepare(request.workload, seed)
        return self._judged(request, seed)  # believed, as the first of its process

    def _raced(self, workload: Workload, racers: Mapping[int, _Racer], seed: int) -> dict[int, Measurement]:
        """Races until no racer fails; those that fail do not race again. By the numbers of the racers."""
        results: dict[int, Measurement] = {}
        while survivors := [number for number in racers if number not in results]:
            self._prepare(workload, seed)
            began = time.monotonic()
            request = Race(workload, [racers[number].built.artifact for number in survivors])
            ran = self._run(request, self._timeout_s * len(survivors))
            run_s = (time.monotonic() - began) / len(survivors)
            failures = self._failures(request, ran)
            if failures is None:
                for number in survivors:
                    self._stop_child()
                    results |= self._raced(workload, {number: racers[number]}, seed)
                break
            failed = {survivors[place]: failure for place, failure in failures.items()}
            if not failed:
                winner = min(survivors, key=lambda number: statistics.median(ran.times_ns[survivors.index(number)]))
                self._prepare(workload, seed)
                last = self._judged(Run(workload, racers[winner].built.artifact, stress=WINNER), seed)
                failed = {} if last.outcome is Outcome.OK else {winner: last}
            for place, number in enumerate(survivors):
                racer = racers[number]
                if number in failed:
                    results[number] = self._measurement(failed[number], racer.built, run_s)
                elif not failed:
                    sustained_ns = ran.sustained_ns[place : place + 1]
                    own = replace(ran, times_ns=[ran.times_ns[place]], max_error=racer.max_error, sustained_ns=sustained_ns)
                    results[number] = self._measurement(own, racer.built, run_s)
        return results

    def _failures(self, request: Race, ran: Ran) -> dict[int, Ran] | None:
        """The racers that failed, by their places; None if another racer may be to blame, so that each must race alone.

        Racers share a process. One of them may have ended it, changed it, or written to memory that no guard protects.
        """
        alone = len(request.artifacts) == 1
        if ran.outcome is not Outcome.OK:
            return {0: ran} if alone else None
        wrong = {place: Ran(Outcome.WRONG_ANSWER, message=text) for place, text in ran.wrong.items()}
        if ran.broken:  # by the last one; what the others computed wrongly may be its fault
            return {place: wrong[place] for place in wrong if place == max(wrong)}
        if not wrong or (alone and self._runs_of_child <= 1):
            return wrong
        right = [place for place in range(len(request.artifacts)) if place not in wrong]
        witness = Run(request.workload, request.artifacts[right[0]]) if right else self._witness
        return wrong if witness is not None and not ran.worn and self._confirmed_by(witness) else None

    def _confirmed_by(self, witness: Run) -> bool:
        """Whether the child still finds a candidate right that was right before."""
        # Against a best time of 1 ns it is timed only once.
        again = self._run(replace(witness, best_ns=1.0, stress=None), self._timeout_s)
        return again.outcome is Outcome.OK

    def _run(self, request: Run | Race, timeout_s: float) -> Ran:
        """One request after `_prepare`. Kills the child afterwards if it must not be used again."""
        assert self._child is not None
        began = time.monotonic()
        self._runs_of_child += 1
        try:
            self._child.send(request)
            ran = _checked(self._child.receive(timeout_s), request)
        except TimeoutError:
            ran = Ran(Outcome.RUN_TIMEOUT, message=f"not verified and timed within {timeout_s:g} s; killed", broken=True)
        except ChildDiedError as error:
            ran = Ran(Outcome.WORKER_LOST, message=f"the runner process was lost: {error}", broken=True)
        self.busy_s += time.monotonic() - began
        self.verify_s += ran.verify_s
        if ran.broken or ran.worn:
            self._stop_child()
            self.restarts += 1
        return ran

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
            sustained_ns=ran.sustained_ns[0] if ran.outcome is Outcome.OK and ran.sustained_ns else None,
        )

    def _open_child(self, meanwhile: Callable[[], None] = lambda: None, first: bool = False) -> ChildProcess:
        """Starts a child that has the device open, and tries again when it dies before.

        It also tries again when the device refuses, except for the `first` child: after a hang the driver may need a
        moment.
        """
        restarts = Restarts(f"process that opens {self._target.name}")
        while True:
            try:
                child, reply = self._start_child(meanwhile)
            except ChildDiedError as error:
                restarts.failed(error, hopeless=error.exited)
            else:
                if isinstance(reply, Ready):
                    return child
                self._stop_child()
                if first or not (isinstance(reply, Failed) and reply.error is DeviceError):
                    raise _error_of(reply)
                restarts.failed(_error_of(reply), hopeless=True)
            meanwhile = lambda: None  # noqa: E731
            restarts.wait()

    def _start_child(self, meanwhile: Callable[[], None]) -> tuple[ChildProcess, object]:
        target, env = self._target, {}
        if target.kind == "cuda" and target.uuid:
            target, env = replace(target, ordinal=0), {"CUDA_VISIBLE_DEVICES": target.uuid}
        args = (target, self._cores, self._mode)
        child = self._child = ChildProcess("schedsearch.measure.run_worker:serve_runs", args, env)
        self._child_knows = set()
        self._runs_of_child = 0
        meanwhile()
        try:
            return child, child.receive(_START_S)
        except TimeoutError:
            error = child.dismiss(f"it was not ready within {_START_S:g} s")
            self._stop_child()
            raise error from None
        except ChildDiedError:
            self._stop_child()
            raise

    def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            try:
                child.kill()
            except subprocess.TimeoutExpired as error:
                raise DeviceError(
                    f"process {child.pid} hangs on {self._target.name} and cannot be killed; reset the device"
                ) from error


def _error_of(reply: object) -> Exception:
    """The exception for a reply that should have been `Ready`."""
    if isinstance(reply, Failed) and issubclass(reply.error, SchedsearchError | RuntimeError):
        return reply.error(reply.text)
    return PreparationError(f"the runner's process sent {type(reply).__name__} instead of Ready")


def _checked(reply: object, request: Run | Race) -> Ran:
    """A reply that makes sense. Any other is the fault of the candidate's code, which ran in the process that sent it."""
    if isinstance(reply, Failed):
        return Ran(Outcome.LAUNCH_ERROR, message=reply.text, broken=True)
    try:
        return _plain(reply, request)
    except Exception:  # any part of the reply may have any type
        text = f"the runner's process sent an answer that makes no sense: {reply!r:.500}"
        return Ran(Outcome.WORKER_LOST, message=text, broken=True)


def _plain(reply: object, request: Run | Race) -> Ran:
    """The same reply with values of the types that it declares. Raises anything if it cannot be made so."""
    if not isinstance(reply, Ran):
        raise TypeError
    racers = len(request.artifacts) if isinstance(request, Race) else 0
    series = racers if isinstance(request, Race) else 0 if request.stress else 1
    times_ns = [tuple(float(time_ns) for time_ns in times) for times in reply.times_ns]
    sound = all(times and all(0 < time_ns < math.inf for time_ns in times) for times in times_ns)
    if not sound or len(times_ns) != (series if reply.outcome is Outcome.OK else 0):
        raise ValueError
    sustained_ns = [float(time_ns) for time_ns in reply.sustained_ns]
    if sustained_ns and (len(sustained_ns) != len(times_ns) or not all(0 < time_ns < math.inf for time_ns in sustained_ns)):
        raise ValueError
    wrong = {int(number): str(message) for number, message in dict(reply.wrong).items()}
    if not set(wrong) <= set(range(racers)):
        raise ValueError
    return replace(
        reply,
        outcome=Outcome(reply.outcome),
        times_ns=times_ns,
        max_error=None if reply.max_error is None else float(reply.max_error),
        message=str(reply.message),
        facts=json.loads(json.dumps(dict(reply.facts))),
        wrong=wrong,
        verify_s=float(reply.verify_s),
        sustained_ns=sustained_ns,
    )
