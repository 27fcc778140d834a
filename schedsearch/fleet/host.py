"""What a worker of a fleet does: it builds candidates and measures them. It knows nothing of Dask.

Everything that a candidate could hang or crash runs in child processes, as on one machine, with the same time limits. So
the worker itself survives its candidates. It holds a device for one run at a time, and frees it when that run ends or has
said nothing for `LEASE_S`.

See docs/decisions/341-a-fleet-is-workers-with-runners.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import os
import platform
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from schedsearch.errors import DeviceBusyError, DeviceError, OperatorError, PreparationError, SchedsearchError
from schedsearch.launch import Artifact
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.runner import Runner
from schedsearch.measurement import Measurement
from schedsearch.processes.build_worker import Task
from schedsearch.processes.builder import Builder, Built
from schedsearch.target import Target
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload

LEASE_S = 60.0
CORES = "SCHEDSEARCH_WORKER_CORES"
"""The variable that is set for a worker which has a part of its host's cores."""
ONLY_BUILDS = "SCHEDSEARCH_WORKER_ONLY_BUILDS"
"""The variable that is set for a worker whose devices are not used."""
_OTHERS = "another run on this fleet"
_SWEEP_S = 2.0
_CALLS = 64  # of runs at the same time; most of them wait for a device, or are refused at once

Job = tuple[Workload, Built, "float | None"]
"""A candidate, and the workload's best time so far in ns."""

References = Sequence[tuple[Workload, Artifact]]


@dataclass(frozen=True)
class Setup:
    """A device, and how a run measures on it. `run` tells runs apart."""

    run: str
    device: Target
    mode: str
    timeout_s: float
    reference_timeout_s: float


@dataclass(frozen=True)
class Prepare:
    workload: Workload


@dataclass(frozen=True)
class Measure:
    jobs: Sequence[Job]


@dataclass(frozen=True)
class Race:
    workload: Workload
    finalists: Sequence[Built]


Request = Prepare | Measure | Race


@dataclass(frozen=True)
class Refused:
    """Nothing of a task can be measured; `error` is PreparationError or OperatorError."""

    error: type[PreparationError | OperatorError]
    text: str


@dataclass(frozen=True)
class Answer:
    """Results in the order of the request, and the seconds that the device was occupied and that preparing took of them."""

    results: Sequence[Measurement | Refused]
    took_s: float
    prepare_s: float


@dataclass
class _Held:
    """A device in use."""

    setup: Setup
    runner: Runner
    used_s: float = field(default_factory=time.monotonic)


class _Noise:
    """Builds disturb the times of a CPU. So they begin only while it measures nothing, and it waits for their end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._builds = self._measurements = 0

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._measurements)
            self._builds += 1
        try:
            yield
        finally:
            with self._changed:
                self._builds -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        with self._changed:
            self._measurements += 1
            self._changed.wait_for(lambda: not self._builds)
        try:
            yield
        finally:
            with self._changed:
                self._measurements -= 1
                self._changed.notify_all()


class Host:
    """The devices and compilers of this process. Any thread may call any method; one call at a time has a device."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the fields below, for moments only
        self._held: dict[str, _Held] = {}  # by UUID
        self._turns: dict[str, threading.Lock] = {}  # by UUID; whoever calls the device has its lock
        self._noise = _Noise()
        self._builders: list[
            tuple[tuple[Target, float, str], Builder, float]
        ] = []  # that have nothing to do, and since when
        self._sweeper: threading.Thread | None = None
        self._closed = threading.Event()

    def serve(self, setup: Setup, request: Request, references: References) -> Answer:
        """Answers a request on a device.

        Raises:
            DeviceBusyError: another run holds the device.
            DeviceError: it cannot be opened.
        """
        with self._runner(setup) as runner:
            for workload, artifact in references:
                runner.learn_reference(workload, artifact)
            before_s, began_s = runner.prepare_s, time.monotonic()
            if isinstance(request, Measure):
                results: Sequence[Measurement | Refused] = [_measured(runner, job) for job in request.jobs]
            else:
                results = _called(runner, request)
            return Answer(results, time.monotonic() - began_s, runner.prepare_s - before_s)

    @contextlib.contextmanager
    def _runner(self, setup: Setup) -> Iterator[Runner]:
        uuid = setup.device.uuid
        self._refuse_others(setup)
        quiet = self._noise.silent() if setup.device.kind == "cpu" else contextlib.nullcontext()
        with self._turn(uuid), quiet:
            self._refuse_others(setup)
            held = self._held.get(uuid) or _Held(setup, _opened(setup))
            with self._guard:
                self._held[uuid] = held
                held.used_s = time.monotonic()
                self._sweep_from_now_on()
            try:
                yield held.runner
            except DeviceError:
                self._close(uuid, held)
                raise
            finally:
                held.used_s = time.monotonic()

    def _turn(self, uuid: str) -> threading.Lock:
        with self._guard:
            return self._turns.setdefault(uuid, threading.Lock())

    def _refuse_others(self, setup: Setup) -> None:
        with self._guard:
            held = self._held.get(setup.device.uuid)
        if held is not None and held.setup.run != setup.run:
            raise DeviceBusyError(
                f"{setup.device.name} of {platform.node()} is in use by {_OTHERS}; wait for it or leave out --no-wait",
                holder=_OTHERS,
            )

    def build(self, target: Target, timeout_s: float, mode: str, tasks: Sequence[Task]) -> list[Built | Measurement]:
        """Builds in one child process, one after another; the results are in the order of the tasks."""
        kind = (replace(target, host="", uuid=""), timeout_s, mode)
        with self._noise.made():
            builder = self._idle_builder(kind)
            try:
                tokens = [builder.submit_task(task) for task in tasks]
                done = dict(builder.drain())
            except BaseException:
                builder.close()
                raise
        with self._guard:
            self._builders.append((kind, builder, time.monotonic()))
            self._sweep_from_now_on()
        return [done[token] for token in tokens]

    def _idle_builder(self, kind: tuple[Target, float, str]) -> Builder:
        with self._guard:
            for place, (each, builder, _) in enumerate(self._builders):
                if each == kind:
                    del self._builders[place]
                    return builder
        target, timeout_s, mode = kind
        return Builder(target, workers=1, timeout_s=timeout_s, mode=mode)

    def renew(self, run: str) -> None:
        """The run is alive: it keeps its devices."""
        with self._guard:
            for held in self._held.values():
                if held.setup.run == run:
                    held.used_s = time.monotonic()

    def release(self, run: str) -> None:
        """The run has ended: frees its devices, after the call under way."""
        with self._guard:
            mine = [(uuid, held) for uuid, held in self._held.items() if held.setup.run == run]
        for uuid, held in mine:
            with self._turn(uuid):
                self._close(uuid, held)

    def close(self) -> None:
        """Frees everything; calls under way fail."""
        self._closed.set()
        with self._guard:
            held, self._held = self._held, {}
            builders, self._builders = self._builders, []
        for each in held.values():
            each.runner.close()
        for _, builder, _ in builders:
            builder.close()

    def _close(self, uuid: str, held: _Held) -> None:
        with self._guard:
            if self._held.get(uuid) is held:
                del self._held[uuid]
        held.runner.close()

    def _sweep_from_now_on(self) -> None:
        if self._sweeper is None:
            self._sweeper = threading.Thread(target=self._sweep, name="schedsearch-leases", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_S):
            late_s = time.monotonic() - LEASE_S
            with self._guard:
                late = [(uuid, held) for uuid, held in self._held.items() if held.used_s < late_s]
                old = [builder for _, builder, since_s in self._builders if since_s < late_s]
                self._builders = [each for each in self._builders if each[2] >= late_s]
            for uuid, held in late:
                turn = self._turn(uuid)
                if turn.acquire(blocking=False):  # otherwise it is at work
                    try:
                        self._close(uuid, held)
                    finally:
                        turn.release()
            for builder in old:
                builder.close()


def _opened(setup: Setup) -> Runner:
    target = setup.device
    whole = target.kind == "cpu" and CORES not in os.environ
    lock = DeviceLock(replace(target, uuid="") if whole else target, wait=False)  # the lock of local runs
    return Runner(target, setup.mode, setup.timeout_s, setup.reference_timeout_s, lock=lock)


def _measured(runner: Runner, job: Job) -> Measurement | Refused:
    try:
        return runner.measure(*job)
    except (PreparationError, OperatorError) as error:
        return Refused(type(error), str(error))


def _called(runner: Runner, request: Prepare | Race) -> Sequence[Measurement | Refused]:
    try:
        if isinstance(request, Race):
            return runner.race(request.workload, request.finalists)
        runner.prepare(request.workload)
    except (PreparationError, OperatorError) as error:
        return [Refused(type(error), str(error))]
    return []


# ---- what a worker is


@functools.cache
def the_host() -> Host:
    """The one of this process."""
    return Host()


@functools.cache
def _callers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_CALLS, "schedsearch-call")


async def serve(setup: Setup, request: Request, references: References) -> Answer | Exception:
    """As `Host.serve`, in a thread. An exception is an answer, so that it differs from those of a connection that ends."""
    return await asyncio.get_running_loop().run_in_executor(_callers(), _served, setup, request, references)


def _served(setup: Setup, request: Request, references: References) -> Answer | Exception:
    try:
        return the_host().serve(setup, request, references)
    except SchedsearchError as error:
        return error
    except Exception:
        return RuntimeError(f"the worker on {platform.node()} failed:\n{traceback.format_exc()}")


def build(target: Target, timeout_s: float, mode: str, tasks: Sequence[Task]) -> list[Built | Measurement]:
    return the_host().build(target, timeout_s, mode, tasks)


async def renew(run: str) -> None:
    """A coroutine, so that Dask runs it without waiting for an answer."""
    the_host().renew(run)


def release(run: str) -> None:
    the_host().release(run)


def version() -> str:
    return importlib.metadata.version("schedsearch")


def describe() -> JsonObject:
    """What this process has: its devices, its compilers, its versions, and the time here."""
    from schedsearch.measure.clocks import read_clocks

    found = devices()
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "schedsearch": version(),
        "python": platform.python_version(),
        "toolchains": _toolchains(),
        "devices": [device.facts() for device in found],
        "clocks": [read_clocks(device) for device in found],
        "time": time.time(),
    }


@functools.cache
def devices() -> list[Target]:
    """The GPUs that this process sees, and its CPU: the cores that it may use."""
    from schedsearch.device.cuda_driver import iterate_devices
    from schedsearch.device.detect import detect

    if ONLY_BUILDS in os.environ:
        return []
    host = platform.node()
    cores = sorted(os.sched_getaffinity(0))
    found = [replace(detect("cpu"), host=host, uuid=f"cpu-{host}-{ranges(cores)}")]
    with contextlib.suppress(DeviceError):
        found += [
            Target(kind="cuda", ordinal=ordinal, host=host, **facts) for ordinal, facts in enumerate(iterate_devices())
        ]
    return found


def ranges(numbers: Sequence[int]) -> str:
    """E.g. "0-3_8" of 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return "_".join("-".join(map(str, part)) for part in parts)


@functools.cache
def _toolchains() -> dict[str, dict[str, str]]:
    """The compilers by the kind of device; a kind is missing if its compiler is not installed."""
    from schedsearch.backend import toolchain

    found = {"cpu": toolchain("cpu")}
    with contextlib.suppress(ImportError):
        if versions := toolchain("cuda"):
            found["cuda"] = versions
    return found
