"""The runner's child process. It owns the device, and any candidate may kill it.

Requests arrive over the pipe one at a time and get one reply each. A candidate's failure is a reply. An exception
of this process's own code is sent as `Failed` and raised in the parent.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import statistics
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import Device, LoadedKernel, open_device
from schedsearch.errors import ArgumentError, DeviceError, DeviceMemoryError, OperatorError, PreparationError
from schedsearch.launch import Artifact
from schedsearch.measure.timed_set import TimedSet
from schedsearch.measure.timing import PATIENCE, Arena, Timed, Timer, open_timer, repeat
from schedsearch.measurement import Outcome
from schedsearch.processes.canary import changes, process_state
from schedsearch.processes.channel import ChildEnd
from schedsearch.processes.memory_limit import limited_memory
from schedsearch.roofline import least_time_ns, suspect_time_ns
from schedsearch.target import Target
from schedsearch.typed import JsonMapping
from schedsearch.verification.compare import Comparer, open_comparer
from schedsearch.verification.prepared import PreparedPath
from schedsearch.verification.reference import watch
from schedsearch.verification.verify import Verdict, Verification
from schedsearch.workload import Workload

_MEMORY_SHARE = 0.5  # of the device's memory, for the data of all workloads
_RACE_ROUNDS = 8
_RACE_SAMPLES = 2
_BURST_S = 0.02  # of launches between two looks at the clock

# Under load a GPU lowers its clocks within a tenth of a second, for some kernels more than for others. A program that runs
# short kernels is not held up by them, so only long ones are timed under load.
_SUSTAINED_FROM_NS = 100e3  # the fastest entrant of a race
_SUSTAINED_ROUNDS = 5
_SUSTAINED_TURN_S = 0.02  # of an entrant in a round
_HEATING_S = 0.2


@dataclass(frozen=True)
class Prepare:
    """Prepares inputs, reference and arena of a workload; `known` is helper code from an earlier process."""

    workload: Workload
    seed: int
    known: Mapping[str, Artifact]


@dataclass(frozen=True)
class Stress:
    """Many launches, with checks at points that a kernel cannot know.

    Attributes:
        checks: how often to check, the one at the end included.
        most_s: wall seconds of launches; a slow kernel is launched less often.
    """

    launches: int
    checks: int
    most_s: float


FINALIST = Stress(launches=300, checks=2, most_s=0.25)
WINNER = Stress(launches=1000, checks=4, most_s=1.0)


@dataclass(frozen=True)
class Run:
    """Verifies, times, and verifies again. With `stress` it only verifies, between that many launches."""

    workload: Workload
    artifact: Artifact
    best_ns: float | None = None
    stress: Stress | None = None


@dataclass(frozen=True)
class Race:
    """Times several verified artifacts in turns, and verifies each once more."""

    workload: Workload
    artifacts: Sequence[Artifact]


@dataclass(frozen=True)
class Ready:
    """The reply to opening the device and to `Prepare`: helper code compiled meanwhile."""

    code: Mapping[str, Artifact] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceRuns:
    """Sent while a `Prepare` is answered, when foreign code of the reference begins, and when it is done.

    What happens to the process in between is the reference's doing.
    """

    begins: bool


@dataclass(frozen=True)
class Ran:
    """The reply to `Run` and `Race`.

    Attributes:
        times_ns: one series per artifact.
        broken: this process must not run any more kernels.
        facts: of the rotation.
        worn: what the candidate changed in this process, which must then be replaced; "" for nothing.
        wrong: of a race that is ok: number of an artifact -> what is wrong with it. It ends at the first that wrote where it
            must not (`broken`), and then says nothing about later ones.
        verify_s: wall seconds of verification.
        sustained_ns: of a race of long kernels on a GPU: the median of each artifact while the device got no rest.
    """

    outcome: Outcome
    times_ns: Sequence[tuple[float, ...]] = ()
    max_error: float | None = None
    message: str = ""
    broken: bool = False
    facts: JsonMapping = field(default_factory=dict)
    worn: str = ""
    wrong: Mapping[int, str] = field(default_factory=dict)
    verify_s: float = 0.0
    sustained_ns: Sequence[float] = ()


@dataclass(frozen=True)
class Failed:
    """This process's own failure. `error` is what the parent raises with the text; a RuntimeError is a bug."""

    text: str
    error: type[Exception]


def serve_runs(conn: ChildEnd, target: Target, cores: Sequence[int], mode: str) -> None:
    """Opens the device and answers requests. `cores` pins the process."""
    os.sched_setaffinity(0, cores)
    preparing = False

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        """Runs foreign code of a reference."""
        if preparing:
            conn.send(ReferenceRuns(True))
        with limited_memory():
            yield
        if preparing:
            conn.send(ReferenceRuns(False))

    watch(around)
    try:
        worker = _RunWorker(target, mode)
        conn.send(Ready())
        while True:
            request = conn.recv()
            preparing = isinstance(request, Prepare)
            before = process_state()
            reply = worker.answer(request)
            conn.send(replace(reply, worn=changes(before)) if isinstance(reply, Ran) else reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except (DeviceError, OperatorError, PreparationError) as error:
        conn.send(Failed(str(error), type(error)))
    except Exception:
        conn.send(Failed(f"the runner's process failed:\n{traceback.format_exc()}", RuntimeError))


class _WorkloadState:
    """Everything that one workload needs on the device.

    Attributes:
        timed_set: None if the timing's numbers cannot judge a kernel.
    """

    def __init__(
        self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, seed: int, mode: str
    ) -> None:
        self._make_verification: Callable[[int], Verification] = lambda seed: Verification(
            device, comparer, code, workload, seed
        )
        with contextlib.ExitStack() as stack:
            self.verification = self._make_verification(seed)
            stack.callback(lambda: self.verification.close())
            self.arena = stack.enter_context(contextlib.closing(Arena(device, workload, mode)))
            self.timed_set = TimedSet.make(device, comparer, code, workload, self.arena)
            if self.timed_set is not None:
                stack.enter_context(contextlib.closing(self.timed_set))
            self._stack = stack.pop_all()

    def reseed(self, seed: int) -> None:
        """Draws new inputs, unless the present ones have this seed."""
        if self.verification.seed != seed:
            fresh = self._make_verification(seed)
            self.verification.close()
            self.verification = fresh

    @property
    def nbytes(self) -> int:
        return self.verification.nbytes + self.arena.nbytes + (self.timed_set.nbytes if self.timed_set else 0)

    def close(self) -> None:
        self._stack.close()


class _Stopwatch:
    """Wall seconds spent inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began


class _RunWorker:
    def __init__(self, target: Target, mode: str) -> None:
        self._device = open_device(target)
        if target.kind == "cpu":
            from schedsearch.device.cpu import CpuDevice

            # The first candidate would start them otherwise, and seem to change the process.
            assert isinstance(self._device, CpuDevice)
            self._device.start_threads(target.sms)
        self._mode = mode
        self._code = CodeCache()
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
        """Frees other workloads' data when memory is short.

        Raises:
            PreparationError: the workload alone needs more memory than there is.
        """
        while True:
            try:
                return _WorkloadState(self._device, self._comparer, self._code, request.workload, request.seed, self._mode)
            except (DeviceError, MemoryError) as error:
                if not self._is_healthy():
                    raise
                if self._states:
                    self._states.popitem(last=False)[1].close()
                elif isinstance(error, DeviceMemoryError | MemoryError):
                    raise PreparationError(
                        f"the arrays of {request.workload.label} do not fit into the free memory of "
                        f"{self._device.target.name}: {error}; tune a smaller shape, or free memory"
                    ) from error
                else:
                    raise

    def _run(self, state: _WorkloadState, request: Run) -> Ran:
        request.artifact.plan.check(request.workload)
        watch = _Stopwatch()
        with self._loaded(request.artifact) as kernel:
            with watch:
                verdict = state.verification.check(kernel)
                if verdict.ok and state.arena.prepared and kernel.artifact.plan.constants:
                    verdict = state.verification.check(PreparedPath(kernel))
                if verdict.ok and state.timed_set:
                    state.timed_set.soil()
            if not verdict.ok:
                return _as_reply(verdict, watch)
            with contextlib.closing(self._timer.prepare(kernel, state.arena)) as timed:
                if request.stress:
                    with watch:
                        verdict = self._stress(state, kernel, timed, request.stress)
                    return _as_reply(verdict, watch)
                times = repeat(timed.sample, request.best_ns, PATIENCE[self._device.target.kind])
                with watch:
                    again = self._check_again(state, kernel, timed)
                    if again.ok:
                        again = self._doubt(state, request, kernel, timed, times)
                if not again.ok:
                    return _as_reply(again, watch)
                facts = timed.rotation.facts()
        return Ran(Outcome.OK, [times], verdict.max_error, facts=facts, verify_s=watch.seconds)

    def _check_again(self, state: _WorkloadState, kernel: LoadedKernel, timed: Timed) -> Verdict:
        """Judges what timed launches computed, and whether the kernel still computes the truth after them."""
        wrong = state.timed_set.judge(timed) if state.timed_set else ""
        if wrong:
            return Verdict(False, 0.0, False, wrong)
        checked = PreparedPath(kernel) if state.arena.prepared else kernel
        verdict = state.verification.check_again(checked, state.verification.bind(checked))
        message = verdict.message and f"after it was timed: {verdict.message}"
        return Verdict(verdict.ok, verdict.max_error, verdict.stray, message)

    def _stress(self, state: _WorkloadState, kernel: LoadedKernel, timed: Timed, stress: Stress) -> Verdict:
        """Launches a kernel many times and checks it in between, and at the end."""
        points = random.SystemRandom().sample(range(1, stress.launches), stress.checks - 1)
        launched, burst, spent_s = 0, 1, 0.0
        for point in [*sorted(points), stress.launches]:
            while launched < point and spent_s <= stress.most_s:
                began = time.monotonic()
                count = min(point - launched, burst)
                timed.launch(count)
                self._device.synchronize()
                burst_s = time.monotonic() - began
                launched, spent_s = launched + count, spent_s + burst_s
                burst = 2 * burst if burst_s < _BURST_S / 2 else burst
            verdict = self._check_again(state, kernel, timed)
            if not verdict.ok:
                message = f"after {launched} launches: {verdict.message}"
                return Verdict(False, verdict.max_error, verdict.stray, message)
            if spent_s > stress.most_s:
                break
        return verdict

    def _doubt(
        self, state: _WorkloadState, request: Run, kernel: LoadedKernel, timed: Timed, times: Sequence[float]
    ) -> Verdict:
        """Looks at a time that is too good: refuses one that physics forbids, and verifies harder what is close to it."""
        if message := self._impossible(request.workload, times):
            return Verdict(False, 0.0, False, message)
        time_ns = statistics.median(times)
        suspect_ns = suspect_time_ns(request.workload, self._device.target.key, self._mode)
        if time_ns < suspect_ns and time_ns < (request.best_ns or math.inf):
            state.reseed(secrets.randbits(31))
            verdict = state.verification.check(kernel)
            return self._stress(state, kernel, timed, WINNER) if verdict.ok else verdict
        return Verdict(True, 0.0)

    def _impossible(self, workload: Workload, times: Sequence[float]) -> str:
        """Why no kernel can have taken these times; empty if one can."""
        key, time_ns = self._device.target.key, statistics.median(times)
        least_ns = least_time_ns(workload, key, self._mode)
        if time_ns >= least_ns:
            return ""
        return (
            f"measured {time_ns / 1e3:.3f} us, but no kernel for this workload takes less than {least_ns / 1e3:.3f} us on "
            f"{key} (schedsearch.roofline). It skips work, or the clock is wrong: read the kernel, then profile it"
        )

    def _race(self, state: _WorkloadState, request: Race) -> Ran:
        watch, wrong, broken = _Stopwatch(), {}, False
        with contextlib.ExitStack() as stack:
            racers: list[tuple[LoadedKernel, Timed]] = []
            for artifact in request.artifacts:
                kernel = stack.enter_context(self._loaded(artifact))
                racers.append((kernel, stack.enter_context(contextlib.closing(self._timer.prepare(kernel, state.arena)))))
            times: list[tuple[float, ...]] = [()] * len(racers)
            began = time.monotonic()
            for _ in range(_RACE_ROUNDS):
                for number, (_, timed) in enumerate(racers):
                    times[number] += tuple(timed.sample(_RACE_SAMPLES))
            turn_s = (time.monotonic() - began) / (_RACE_ROUNDS * len(racers))
            sustained_ns = self._sustained([timed for _, timed in racers], times, turn_s)
            with watch:
                for number, (kernel, timed) in enumerate(racers):
                    verdict = self._check_again(state, kernel, timed)
                    if message := verdict.message or self._impossible(request.workload, times[number]):
                        wrong[number] = message
                    if verdict.stray:
                        broken = True
                        break
        return Ran(
            Outcome.OK, times, broken=broken, facts=state.arena.facts(), wrong=wrong, verify_s=watch.seconds,
            sustained_ns=sustained_ns,
        )  # fmt: skip

    def _sustained(self, racers: Sequence[Timed], times: Sequence[Sequence[float]], turn_s: float) -> list[float]:
        """The racers' median times while the device gets no rest, in turns; [] where that makes no difference.

        Args:
            times: of the race.
            turn_s: what a turn took there. Where it is long, the race itself has given the device no rest.
        """
        is_short = min(map(statistics.median, times)) < _SUSTAINED_FROM_NS
        if self._device.target.kind != "cuda" or is_short or turn_s >= _SUSTAINED_TURN_S:
            return []
        hot_s = time.monotonic() + _HEATING_S
        while time.monotonic() < hot_s:
            for timed in racers:
                timed.sample(_RACE_SAMPLES)
        found: list[list[float]] = [[] for _ in racers]
        for _ in range(_SUSTAINED_ROUNDS):
            for timed, samples in zip(racers, found):
                over_s = time.monotonic() + _SUSTAINED_TURN_S
                samples += timed.sample(_RACE_SAMPLES)
                while time.monotonic() < over_s:
                    samples += timed.sample(_RACE_SAMPLES)
        return [statistics.median(samples) for samples in found]

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


def _as_reply(verdict: Verdict, watch: _Stopwatch) -> Ran:
    outcome = Outcome.OK if verdict.ok else Outcome.WRONG_ANSWER
    return Ran(outcome, (), verdict.max_error, verdict.message, broken=verdict.stray, verify_s=watch.seconds)
