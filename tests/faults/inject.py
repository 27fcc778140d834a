"""Injects faults into a run from inside its own process, at the moments between which its stages lie.

A moment is what the run does next: it starts a child (`start builder`, `start runner`), gives work to one (`BuildTask`,
`Prepare`, `Run`; `Race` stands for all work of the final race), stores a record (`append`) or ends (`finish`). A fault
happens some milliseconds after a moment, so that random delays reach every place of the stage that follows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Moment = Literal["start builder", "start runner", "BuildTask", "Prepare", "Run", "Race", "append", "finish"]

# How long the stage after each moment takes about, on a machine that is not busy.
STAGE_S: dict[Moment, float] = {
    "start builder": 0.9,
    "start runner": 0.5,
    "BuildTask": 0.25,
    "Prepare": 0.15,
    "Run": 0.4,
    "Race": 0.3,
    "append": 0.005,
    "finish": 0.005,
}


@dataclass(frozen=True)
class Strike:
    """One fault: what happens `delay_s` after the moment has come for the `occurrence`-th time (from 0).

    Attributes:
        victim: who is hit: the child that the moment is about, or this process.
    """

    moment: Moment
    occurrence: int
    delay_s: float
    act: Callable[[int], None]
    victim: Literal["child", "self"] = "child"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def install(strikes: Sequence[Strike]) -> None:
    """Prepares this process, which is about to run `schedsearch tune`, so that the strikes will happen."""
    from schedsearch.processes.process import ChildProcess
    from schedsearch.records.store import Store
    from schedsearch.session.journal import Journal

    seen: Counter[str] = Counter()
    racing = threading.Event()

    def come(moment: str, child: int) -> None:
        occurrence, seen[moment] = seen[moment], seen[moment] + 1
        for strike in strikes:
            if (strike.moment, strike.occurrence) == (moment, occurrence):
                pid = os.getpid() if strike.victim == "self" else child
                threading.Thread(target=_later, args=(strike, pid), daemon=True).start()

    def on_start(self: Any, entry: str, *args: Any, **named: Any) -> None:
        start(self, entry, *args, **named)
        come("start builder" if "build_worker" in entry else "start runner", self.pid)

    def on_send(self: Any, message: Any, *args: Any, **named: Any) -> Any:
        sent = send(self, message, *args, **named)
        kind = type(message).__name__
        if kind in ("Run", "Race") and racing.is_set():
            come("Race", self.pid)
        elif kind in ("BuildTask", "Prepare", "Run"):
            come(kind, self.pid)
        return sent

    def on_append(self: Any, *args: Any, **named: Any) -> Any:
        come("append", 0)
        return append(self, *args, **named)

    def on_finish(self: Any, *args: Any, **named: Any) -> Any:
        come("finish", 0)
        return finish(self, *args, **named)

    def on_enter(self: Any, phase: Any) -> None:
        if phase == "racing":
            racing.set()
        enter(self, phase)

    start, send, append, finish, enter = (
        ChildProcess.__init__, ChildProcess.send, Store.append, Store.finish_run, Journal.enter
    )  # fmt: skip
    for owner, name, replacement in (
        (ChildProcess, "__init__", on_start),
        (ChildProcess, "send", on_send),
        (Store, "append", on_append),
        (Store, "finish_run", on_finish),
        (Journal, "enter", on_enter),
    ):
        setattr(owner, name, replacement)


def _later(strike: Strike, pid: int) -> None:
    time.sleep(strike.delay_s)
    with contextlib.suppress(ProcessLookupError):  # it has ended: the fault came too late
        strike.act(pid)
