"""The runner's child process. It owns the device, and any candidate may kill it.

Requests arrive over the pipe one at a time and get one reply each. A candidate's failure is a reply. An exception
of this process's own code is sent as `Failed` and raised in the parent.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedsearch.device import Device, LoadedKernel, open_device
from schedsearch.errors import ArgumentError, DeviceError, OperatorError
from schedsearch.launch import Artifact
from schedsearch.measure.canary import changes, process_state
from schedsearch.measure.channel import ChildEnd
from schedsearch.measure.compare import CodeCache, Comparer, open_comparer
from schedsearch.measure.prepared import PreparedPath
from schedsearch.measure.timing import PATIENCE, Arena, Timed, Timer, open_timer, repeat
from schedsearch.measure.verify import Verdict, Verification
from schedsearch.measurement import Outcome
from schedsearch.target import Target
from schedsearch.workload import Workload

_MEMORY_SHARE = 0.5  # of the device's memory, for the data of all workloads
_RACE_ROUNDS = 8
_RACE_SAMPLES = 2


@dataclass(frozen=True)
class Prepare:
    """Prepares inputs, reference and arena of a workload; `known` is helper code from an earlier process."""

    workload: Workload
    seed: int
    known: Mapping[str, Artifact]


@dataclass(frozen=True)
class Run:
    """Verifies, then times. With `launches` it only verifies, after this many launches back to back."""

    workload: Workload
    artifact: Artifact
    best_ns: float | None = None
    launches: int = 0


@dataclass(frozen=True)
class Race:
    """Times several verified artifacts in turns."""

    workload: Workload
    artifacts: Sequence[Artifact]


@dataclass(frozen=True)
class Ready:
    """The reply to opening the device and to `Prepare`: helper code compiled meanwhile."""

    code: Mapping[str, Artifact] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """The reply to `Run` and `Race`.

    Attributes:
        times_ns: one series per artifact.
        broken: this process must not run any more kernels.
        facts: of the rotation.
        worn: what the candidate changed in this process, which must then be replaced; "" for nothing.
    """

    outcome: Outcome
    times_ns: Sequence[tuple[float, ...]] = ()
    max_error: float | None = None
    message: str = ""
    broken: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    worn: str = ""


@dataclass(frozen=True)
class Failed:
    """This process's own failure. `error` is what the parent raises with the text; a RuntimeError is a bug."""

    text: str
    error: type[Exception]


def serve_runs(conn: ChildEnd, target: Target, cores: Sequence[int], mode: str) -> None:
    """Opens the device and answers requests. `cores` pins the process."""
    os.sched_setaffinity(0, cores)
    try:
        worker = _RunWorker(target, mode)
        conn.send(Ready())
        while True:
            request = conn.recv()
            before = process_state()
            reply = worker.answer(request)
            conn.send(replace(reply, worn=changes(before)) if isinstance(reply, Ran) else reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except (DeviceError, OperatorError) as error:
        conn.send(Failed(str(error), type(error)))
    except Exception:
        conn.send(Failed(f"the runner's process failed:\n{traceback.format_exc()}", RuntimeError))


class _WorkloadState:
    """Everything that one workload needs on the device."""

    def __init__(
        self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, seed: int, mode: str
    ) -> None:
        self._make_verification: Callable[[int], Verification] = lambda seed: Verification(
            device, comparer, code, workload, seed
        )
        self.verification = self._make_verification(seed)
        try:
            self.arena = Arena(device, workload, mode)
        except BaseException:
            self.verification.close()
            raise

    def reseed(self, seed: int) -> None:
        """Draws new inputs, unless the present ones have this seed."""
        if self.verification.seed != seed:
            self.verification.close()
            self.verification = self._make_verification(seed)

    @property
    def nbytes(self) -> int:
        return self.verification.nbytes + self.arena.nbytes

    def close(self) -> None:
        self.verification.close()
        self.arena.close()


class _RunWorker:
    def __init__(self, target: Target, mode: str) -> None:
        self._device = open_device(target)
        self._mode = mode
        self._code = CodeCache(self._device)
        self._comparer = open_comparer(self._device, self._code)
        self._timer: Timer = open_timer(self._device)
        self._states: OrderedDict[Workload, _WorkloadState] = OrderedDict()

    def answer(self, request: Prepare | Run | Race) -> Ready | Ran:
        if isinstance(request, Prepare):
            return self._prepare(request)
        state = self._states[request.workload]
        try:
            if isinstance(request, Race):
                return self._race(state, request)
            return self._run(state, request)
        except (DeviceError, ArgumentError, ValueError) as error:
            return Ran(Outcome.LAUNCH_ERROR, message=str(error), broken=not self._is_healthy())

    def _prepare(self, request: Prepare) -> Ready:
        self._code.learn(request.known)
        if request.workload in self._states:
            self._states.move_to_end(request.workload)
            self._states[request.workload].reseed(request.seed)
        else:
            self._states[request.workload] = self._new_state(request)
        budget = _MEMORY_SHARE * self._device.target.memory_bytes
        while len(self._states) > 1 and sum(state.nbytes for state in self._states.values()) > budget:
            self._states.popitem(last=False)[1].close()
        return Ready(self._code.take_fresh())

    def _new_state(self, request: Prepare) -> _WorkloadState:
        """Frees other workloads' data when memory is short."""
        while True:
            try:
                return _WorkloadState(self._device, self._comparer, self._code, request.workload, request.seed, self._mode)
            except DeviceError:
                if not self._states or not self._is_healthy():
                    raise
                self._states.popitem(last=False)[1].close()

    def _run(self, state: _WorkloadState, request: Run) -> Ran:
        request.artifact.plan.check(request.workload)
        with self._loaded(request.artifact) as kernel:
            if request.launches:
                return _as_reply(self._verify_under_load(state, kernel, request.launches))
            verdict = state.verification.check(kernel)
            if verdict.ok and state.arena.prepared and kernel.artifact.plan.constants:
                verdict = state.verification.check(PreparedPath(kernel))
            if not verdict.ok:
                return _as_reply(verdict)
            with contextlib.closing(self._timer.prepare(kernel, state.arena)) as timed:
                times = repeat(timed.sample, request.best_ns, PATIENCE[self._device.target.kind])
                facts = timed.rotation.facts()
        return Ran(Outcome.OK, [times], verdict.max_error, facts=facts)

    def _verify_under_load(self, state: _WorkloadState, kernel: LoadedKernel, launches: int) -> Verdict:
        with contextlib.closing(self._timer.prepare(kernel, state.arena)) as timed:
            checked = PreparedPath(kernel) if state.arena.prepared else kernel
            return state.verification.check(checked, lambda bound: timed.launch(launches, then=bound))

    def _race(self, state: _WorkloadState, request: Race) -> Ran:
        with contextlib.ExitStack() as stack:
            racers: list[Timed] = []
            for artifact in request.artifacts:
                kernel = stack.enter_context(self._loaded(artifact))
                racers.append(stack.enter_context(contextlib.closing(self._timer.prepare(kernel, state.arena))))
            times: list[tuple[float, ...]] = [()] * len(racers)
            for _ in range(_RACE_ROUNDS):
                for number, timed in enumerate(racers):
                    times[number] += tuple(timed.sample(_RACE_SAMPLES))
        return Ran(Outcome.OK, times, facts=state.arena.facts())

    @contextlib.contextmanager
    def _loaded(self, artifact: Artifact) -> Iterator[LoadedKernel]:
        kernel = self._device.load(artifact)
        try:
            yield kernel
        finally:
            with contextlib.suppress(DeviceError):  # nothing can be unloaded after a fault of the kernel
                kernel.close()

    def _is_healthy(self) -> bool:
        """Whether the device still answers. CUDA reports a fault again at every later call."""
        try:
            self._device.synchronize()
            probe = self._device.allocate(256)
            self._device.fill(probe, 0, 256)
            self._device.synchronize()
            self._device.free(probe)
        except DeviceError:
            return False
        return True


def _as_reply(verdict: Verdict) -> Ran:
    outcome = Outcome.OK if verdict.ok else Outcome.WRONG_ANSWER
    return Ran(outcome, (), verdict.max_error, verdict.message, broken=verdict.stray)
