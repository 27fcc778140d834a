"""Time and interruption of a run: the threads of the device and of the tuners, their waiting times, and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, Literal, ParamSpec, TypeVar

from schedsearch.session.summary import Shares

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs the calls that occupy the device one after another, and adds up the time in between.

    Args:
        queue: calls that may be here, including the running one; 2 keeps the device busy while the loop does other things.
    """

    def __init__(self, queue: int) -> None:
        self.queue = queue
        self._executor = ThreadPoolExecutor(1, "device")
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._idle_s = {"build": 0.0, "tuner": 0.0}

    def __enter__(self) -> DeviceThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(self._timed, functools.partial(call, *args, **kwargs))

    def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.submit(call, *args, **kwargs).result()

    def _timed(self, call: Callable[[], T]) -> T:
        start = time.monotonic()
        with self._lock:
            self._busy_since = start
        try:
            return call()
        finally:
            with self._lock:
                self._busy_s += time.monotonic() - start
                self._busy_since = None

    @property
    def busy_s(self) -> float:
        """Seconds that the device was occupied so far, including the running call."""
        with self._lock:
            running = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            return self._busy_s + running

    @contextlib.contextmanager
    def idle_counts_as(self, reason: Literal["build", "tuner"]) -> Iterator[None]:
        """Counts the part of the enclosed time in which the device was idle as waiting for `reason`."""
        start, busy = time.monotonic(), self.busy_s
        try:
            yield
        finally:
            self._idle_s[reason] += max(0.0, time.monotonic() - start - (self.busy_s - busy))

    def shares(self, wall_s: float, prepare_s: float) -> Shares:
        """`prepare_s`: seconds in which the device was occupied without serving a candidate."""
        device_s = max(0.0, self.busy_s - prepare_s)
        return Shares(device_s / wall_s, self._idle_s["build"] / wall_s, self._idle_s["tuner"] / wall_s, prepare_s / wall_s)


class TunerThread:
    """The thread in which the tuners think, one call after another, so that builders and device go on meanwhile.

    Args:
        apart: whether there is a separate thread. If not, every call runs at once in the caller's thread, so that a run
            whose other parts are deterministic is deterministic itself.
    """

    def __init__(self, apart: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "tuner") if apart else None

    def __enter__(self) -> TunerThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(call, *args, **kwargs)
        future: Future[T] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class StopSignal:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `requested`; a second SIGINT or SIGTERM ends the process.

    A second SIGHUP does not, because a terminal that closes sends it twice: the system and the shell each send one. A signal
    that is ignored, e.g. because of nohup, stays ignored. Signals can be handled in the main thread only; elsewhere this
    does nothing and `requested` stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in self._previous:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
