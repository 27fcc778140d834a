"""Notices that foreign code changed the process it ran in, so that the next candidate gets a fresh process.

A template or a kernel may change the working folder, lower a resource limit, set an alarm, switch the rounding mode or leave
a process behind. The next candidate would then fail, or be timed wrongly, through no fault of its own. `changes` compares
the process before and after a candidate; it takes about 0.3 ms. Of Python's modules only those of `_MODULES`, which
every worker needs, are watched: changes inside others are not noticed.

See docs/decisions/014-worn-processes.md.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from schedsearch.typed import JsonMapping

_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
_SIGNALS = tuple(signal.Signals)
_MODULES = (builtins, math, os, pickle, signal, socket, struct, threading, time)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

State = JsonMapping


def process_state() -> State:
    """What a candidate must leave as it was, by the name of each thing."""
    return {
        "the working folder": _working_folder(),
        "environment variables": dict(os.environ),
        "the umask": _umask(),
        "the cores it may use": os.sched_getaffinity(0),
        "its priority": os.nice(0),
        "its resource limits": [resource.getrlimit(limit) for limit in _LIMITS],
        "signal handlers": [signal.getsignal(number) for number in _SIGNALS],
        "the mask of signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timers": [signal.getitimer(timer) != (0.0, 0.0) for timer in _TIMERS],
        "how floats are rounded": _rounding(),
        "the recursion limit": sys.getrecursionlimit(),
        "garbage collection": gc.isenabled(),
        "functions of Python's modules": [list(vars(module).values()) for module in _MODULES],
        "trace functions": (sys.gettrace(), sys.getprofile()),
        "its threads": {thread.ident for thread in threading.enumerate()},
        "its child processes": _children(),
        "the standard files": [_file(fd) for fd in range(3)],
    }


def changes(before: State) -> str:
    """The names of the things that differ from an earlier `process_state`, separated by commas; "" when none does."""
    after = process_state()
    return ", ".join(name for name, value in before.items() if value != after[name])


def _working_folder() -> str | None:
    with contextlib.suppress(OSError):
        return str(Path.cwd())
    return None


def _umask() -> int:
    present = os.umask(0o077)
    os.umask(present)
    return present


def _rounding() -> tuple[float, ...]:
    """Results that depend on the rounding mode and on the treatment of subnormal numbers (x86: the MXCSR register)."""
    one, half_ulp, smallest_normal, subnormal = 1.0, 2.0**-53, 2.0**-1022, 5e-324
    return (one + half_ulp, one + 1.5 * half_ulp, -one - 1.5 * half_ulp, smallest_normal * 0.5, subnormal * one)


def _children() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += (task / "children").read_text().split()
    return found


def _file(fd: int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    return None
