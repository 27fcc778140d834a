"""The threads of an emulated kernel. They run one at a time, each until it waits, in an order that a seed decides.

A test therefore does the same on every machine, however busy, and a wait that nothing can end raises at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet


class KernelThread(greenlet):  # type: ignore[misc]  # greenlet has no types
    """One thread of a kernel. Besides its block, its attributes serve the emulated operations."""

    def __init__(self, body: Callable[[], None], number: int, block: object) -> None:
        super().__init__(body)
        self.number, self.block = number, block
        self.open_copies: list[Any] = []  # cp.async of no group yet
        self.copy_groups: list[list[Any]] = []
        self.stores: list[Any] = []  # bulk stores that were not waited for
        self.issued = 0  # groups of wgmma
        self.has_waited = False  # for the kernel's predecessor
        self.cluster_phase: int | None = None  # of the barrier at which it has arrived and not waited


class Threads:
    """Runs threads together with the asynchronous operations that they start."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: list[tuple[greenlet, Callable[[], bool], str]] = []
        self._parked: dict[greenlet, object] = {}
        self._released: list[greenlet] = []
        self._idling: list[greenlet] = []
        self._asynchronous: list[Callable[[], None]] = []

    # --- for the threads

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Lets other threads run. Raises AssertionError if the condition can never become true."""
        if not condition():
            thread = getcurrent()
            self._waiting.append((thread, condition, what))
            thread.parent.switch()

    def park(self, what: object) -> None:
        """Lets other threads run until one of them releases this thread. Nobody asks in between whether it can go on, which
        hundreds of threads at a barrier would take most of the time with."""
        thread = getcurrent()
        self._parked[thread] = what
        thread.parent.switch()

    def release(self, threads: Sequence[greenlet]) -> None:
        """Lets threads that are parked go on after the running one."""
        for thread in threads:
            del self._parked[thread]
        self._released += threads

    def idle(self) -> None:
        """Lets others run until only idle threads could go on, and no operation is left."""
        thread = getcurrent()
        self._idling.append(thread)
        thread.parent.switch()

    def start_late(self, operation: Callable[[], None]) -> None:
        """An asynchronous operation that takes place when no thread can go on without one, in random order."""
        self._asynchronous.append(operation)

    # --- for the emulator

    def run(self, threads: Sequence[KernelThread]) -> None:
        """Runs all threads, and the operations that they started, to their end. Raises the exception of any of them."""
        ready: list[greenlet] = list(threads)
        try:
            while ready:
                self._random.shuffle(ready)
                for thread in ready:
                    thread.switch()
                ready = self._able_to_go_on()
        finally:
            for thread in threads:
                thread.throw()  # after a failure, ends threads that still wait
            self._waiting, self._idling, self._asynchronous = [], [], []
            self._parked, self._released = {}, []

    def _able_to_go_on(self) -> list[greenlet]:
        while True:
            waiting, self._waiting = self._waiting, []
            ready, self._released = self._released, []
            for entry in waiting:
                if entry[1]():
                    ready.append(entry[0])
                else:
                    self._waiting.append(entry)
            if ready:
                return ready
            if self._asynchronous:
                self._asynchronous.pop(self._random.randrange(len(self._asynchronous)))()
            elif self._idling:
                ready, self._idling = self._idling, []
                return ready
            elif self._waiting or self._parked:
                what = self._waiting[0][2] if self._waiting else next(iter(self._parked.values()))
                raise AssertionError(f"waits for ever: {what}")
            else:
                return []
