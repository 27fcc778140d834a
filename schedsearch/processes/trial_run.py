"""Runs code of a user in a copy of this process first, because it may end the process, hang, or take all memory."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from schedsearch.processes.memory_limit import limited_memory
from schedsearch.processes.process import signal_name

RUN_LIMIT_S = 30.0

_DONE = b"1"  # it returned, or raised an exception
_INTERRUPTS = b"2"  # it raised KeyboardInterrupt


def trial_run(function: Callable[[], object], limit_s: float = RUN_LIMIT_S, imports: Sequence[str] = ()) -> str:
    """What is wrong with a function that ends its process or does not return, as the end of a sentence; "" if it returns or
    raises an exception, which this does not report. What it prints is dropped.

    Args:
        limit_s: wall seconds that it may take.
        imports: modules that it probably imports; they are imported before, and therefore once.
    """
    for name in imports:
        importlib.import_module(name)
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which NumPy's library may have
        pid = os.fork()
    if not pid:
        _in_child(function, writing)
    os.close(writing)
    try:
        deadline_s = time.monotonic() + limit_s
        while not select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            if time.monotonic() >= deadline_s:
                return f"was not done within {limit_s:g} s; killed"
        answer = os.read(reading, 1)
        if answer == _DONE:
            return ""
        if answer == _INTERRUPTS:
            return "raises KeyboardInterrupt"
        _, status = os.waitpid(pid, 0)
        pid = 0
        if os.WIFSIGNALED(status):
            return f"ended the process: killed by signal {os.WTERMSIG(status)}{signal_name(os.WTERMSIG(status))}"
        return f"ended the process with exit status {os.WEXITSTATUS(status)}"
    finally:
        os.close(reading)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _in_child(function: Callable[[], object], writing: int) -> None:
    """Never returns."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        sys.stdout = sys.stderr = os.fdopen(nothing, "w")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        try:
            with limited_memory():
                function()
        except KeyboardInterrupt:  # of the function itself: no signal comes from a terminal
            os.write(writing, _INTERRUPTS)
        except BaseException:  # this process's parent meets it again
            pass
        os.write(writing, _DONE)
    finally:
        os._exit(0)


def raised_text(error: BaseException) -> str:
    """An exception in words; a call of `sys.exit` by the name that users know."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    return f"{type(error).__name__}: {error}"
