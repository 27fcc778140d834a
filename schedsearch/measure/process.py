"""Child processes that a run can afford to lose. They start clean, communicate over a pipe, and end with their parent.

`multiprocessing` does not start them: its spawn imports the caller's main module again (a script that
calls `tune()` without the `__main__` guard would start itself), and its pools share one queue, whose lock a killed
worker may still hold. Here each child has a pipe of its own; messages are pickled Python objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_STDERR_TAIL_BYTES = 2000
_REAP_S = 30.0

# The child first copies the parent's sys.path, so that both import the same modules.
_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from schedsearch.measure.process import run_child; run_child({fd}, {parent})"
)


class ChildDiedError(Exception):
    """The child ended without an answer; the text says how, with the last lines of its standard error."""


class ChildProcess:
    """A fresh Python process that runs `entry`, a 'module:function' called with (connection, *args).

    It is killed when this process ends (PR_SET_PDEATHSIG), even while it hangs. Its standard output is discarded; its
    standard error is kept for the message when it dies.

    Attributes:
        conn: the parent's end of the pipe, for `multiprocessing.connection.wait`.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, entry: str, args: tuple[Any, ...] = (), env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `kill`
        with theirs:
            bootstrap = _BOOTSTRAP.format(
                path=[entry or str(Path.cwd()) for entry in sys.path], fd=theirs.fileno(), parent=os.getpid()
            )
            self._process = (
                _spawner()
                .submit(
                    subprocess.Popen,
                    [sys.executable, "-P", "-c", bootstrap],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **(env or {})},
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
                )
                .result()
            )
        self.conn: Connection = Connection(ours.detach())
        self.pid = self._process.pid
        self.send((entry, args))

    def send(self, message: Any) -> None:
        """Pickles and sends. If the child has already ended, the next `receive` reports it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.conn.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The child's next message.

        Raises:
            TimeoutError: no message came in time; the child is still running.
            ChildDiedError: it ended.
        """
        try:
            if not self.conn.poll(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            return self.conn.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ChildDiedError(self.obituary()) from None

    def obituary(self) -> str:
        """How the child ended. Waits for its end, and kills it if it only closed its pipe."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait(_REAP_S)
        if status < 0:
            with contextlib.suppress(ValueError):
                return self._with_stderr(f"killed by signal {-status} ({signal.Signals(-status).name})")
        return self._with_stderr(f"exited with status {status}")

    def _with_stderr(self, text: str) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"{text}; its last words:\n{tail}" if tail else text

    def kill(self) -> None:
        """Ends the child and frees its resources; does nothing the second time.

        Raises:
            subprocess.TimeoutExpired: the kernel cannot end it (hung in a driver).
        """
        if self._stderr.closed:
            return
        self._process.kill()
        self._process.wait(_REAP_S)
        self.conn.close()
        self._stderr.close()


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """The thread that starts all children. The kernel takes the end of the starting *thread* for the parent's death
    (prctl(2), PR_SET_PDEATHSIG), and this one ends with the process only."""
    return ThreadPoolExecutor(1, thread_name_prefix="schedsearch-spawner")


os.register_at_fork(after_in_child=_spawner.cache_clear)


def call_in_children(function: str, calls: Iterable[tuple[Any, ...]], jobs: int) -> Iterator[tuple[int, Any]]:
    """Calls a function in `jobs` child processes, or in this one if `jobs` is 1. Closing the iterator kills busy children.

    Args:
        function: 'module:function', which the children import.
        calls: the arguments of each call; taken when a child is free.

    Yields:
        The number of a call, from 0, and its result, in the order in which calls finish.

    Raises:
        ChildDiedError: a call raised an exception or ended its process; the text has the end of the traceback. With one job
            the exception itself is raised.
    """
    waiting = iter(enumerate(calls))
    if jobs == 1:
        yield from ((number, _named(function)(*arguments)) for number, arguments in waiting)
        return
    children: list[ChildProcess] = []
    busy: dict[ChildProcess, int] = {}
    try:
        for _, (number, arguments) in zip(range(jobs), waiting):
            child = ChildProcess(f"{__name__}:_serve_calls", (function,))
            children.append(child)
            child.send(arguments)
            busy[child] = number
        while busy:
            ready = wait([child.conn for child in busy])
            for child in [child for child in busy if child.conn in ready]:
                result, number = child.receive(), busy.pop(child)
                if following := next(waiting, None):
                    busy[child], arguments = following
                    child.send(arguments)
                yield number, result
    finally:
        for child in children:
            child.kill()


def _serve_calls(conn: Connection, function: str) -> None:
    """Entry of a child: receives arguments and sends the function's result, until the parent closes the pipe."""
    while True:
        conn.send(_named(function)(*conn.recv()))


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def run_child(fd: int, parent: int) -> None:
    """Entry of the child: the first message names what to run; returns when the parent closes the pipe."""
    _die_with(parent)
    faulthandler.enable()
    with Connection(fd) as conn, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        entry, args = conn.recv()
        _named(entry)(conn, *args)
    sys.stderr.flush()
    os._exit(0)  # interpreter shutdown may hang in a driver that a candidate broke


def _die_with(parent: int) -> None:
    """Asks the system for SIGKILL when the parent ends, however it ends and even if this process hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)
