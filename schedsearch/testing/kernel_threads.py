"""The threads of an emulated kernel. They run one at a time, each until it waits, in an order that a seed decides.

So a test does the same on every machine, however busy that is, and a wait that nothing can end raises at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet


class KernelThread(greenlet):  # type: ignore[misc]  # greenlet has no types
    """One thread of a kernel. What it owns, other than its block, are attributes that emulated operations use."""

    def __init__(self, body: Callable[[], None], number: int, block: Any) -> None:
        super().__init__(body)
        self.number, self.block = number, block
        self.open_copies: list[Any] = []  # cp.async of no group yet
        self.copy_groups: list[list[Any]] = []
        self.stores: list[Any] = []  # bulk stores that were not waited for
        self.issued = 0  # groups of wgmma
        self.cluster_phase: int | None = None  # of the barrier at which it has arrived and not waited


class Threads:
    """Runs threads together with the asynchronous operations that they start."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: list[tuple[greenlet, Callable[[], bool], str]] = []
        self._idling: list[greenlet] = []
        self._asynchronous: list[Callable[[], None]] = []

    # --- for the threads

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Lets other threads run. Raises AssertionError when the condition can never come true."""
        if not condition():
            thread = getcurrent()
            self._waiting.append((thread, condition, what))
            thread.parent.switch()

    def idle(self) -> None:
        """Lets others run until nobody and nothing but idling threads can go on."""
        thread = getcurrent()
        self._idling.append(thread)
        thread.parent.switch()

    def start_late(self, operation: Callable[[], None]) -> None:
        """An asynchronous operation that takes place when no thread can go on without one, in random order."""
        self._asynchronous.append(operation)

    # --- for the emulator

    def run(self, threads: Sequence[KernelThread]) -> None:
        """Runs them to their end, and what they have started; raises what one of them raises."""
        ready: list[greenlet] = list(threads)
        try:
            while ready:
                self._random.shuffle(ready)
                for thread in ready:
                    thread.switch()
                ready = self._able_to_go_on()
        finally:
            for thread in threads:
                thread.throw()  # ends those that still wait, after a failure
            self._waiting, self._idling, self._asynchronous = [], [], []

    def _able_to_go_on(self) -> list[greenlet]:
        while True:
            waiting, self._waiting = self._waiting, []
            ready = []
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
            elif self._waiting:
                raise AssertionError(f"waits for ever: {self._waiting[0][2]}")
            else:
                return []
