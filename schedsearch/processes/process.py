"""Child processes that a run can afford to lose. They start clean, answer requests, and end with their parent.

`multiprocessing` does not start them: its spawn imports the caller's main module again (a script that
calls `tune()` without the `__main__` guard would start itself), and its pools share one queue, whose lock a killed
worker may still hold. Here each child has a socket of its own (`schedsearch.processes.channel`). Each is the leader of a
session, so that the processes which a candidate started end with it (`schedsearch.processes.sessions`).

See docs/decisions/010-measuring-processes.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import functools
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from schedsearch.processes.channel import ChildEnd, ForeignBytesError, ParentEnd
from schedsearch.processes.sessions import MARK, Keeper, end_session, oom_kills

_PR_SET_PDEATHSIG = 1
_STDERR_TAIL_BYTES = 2000
_STDERR_LIMIT_BYTES = 8 << 20
_REAP_S = 30.0
_SLICE_S = 0.5  # between looks at the things that no descriptor reports

# The child first copies the parent's sys.path, so that both import the same modules.
_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from schedsearch.processes.process import run_child; run_child({fd}, {parent})"
)


_KEEPER = Keeper()


class ChildDiedError(Exception):
    """A child ended without an answer, or sent nonsense and was killed, or could not be started.

    The text says how, with the last lines of the child's standard error.

    Attributes:
        short_of_memory: whether the system seems to have too little memory for another child.
        exited: whether it ended by itself, with an exit status.
    """

    def __init__(self, text: str, *, short_of_memory: bool = False, exited: bool = False) -> None:
        super().__init__(text)
        self.short_of_memory, self.exited = short_of_memory, exited


class ChildProcess:
    """A fresh Python process that runs `entry`, a 'module:function' called with (connection, *args).

    The connection is a `ChildEnd`: `recv` returns the next request, `send` answers it. The child is killed when this process
    ends (PR_SET_PDEATHSIG), even while it hangs. Its standard output is discarded; the end of its standard error is kept
    for the message when it dies.

    Args:
        any_reply: accept objects of every class as answers. Only for children that run no foreign code.

    Raises:
        ChildDiedError: the process cannot be started.
    """

    def __init__(
        self, entry: str, args: tuple[Any, ...] = (), env: Mapping[str, str] | None = None, *, any_reply: bool = False
    ) -> None:
        with contextlib.ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                self._stderr: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
                # The child and this process share the file's position. Appending does not depend on it.
                fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
                self._oom_kills = oom_kills()
                self._mark = _KEEPER.mark()
                opened.callback(_KEEPER.release)
                env = {**(env or {}), MARK: self._mark}
                self._process = _spawner().submit(_start, theirs.fileno(), self._stderr, env).result()
            except (OSError, subprocess.SubprocessError) as error:
                short = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
                raise ChildDiedError(f"it cannot be started: {error}", short_of_memory=short) from error
            theirs.close()
            opened.pop_all()
        self.pid = self._process.pid
        self._end = ParentEnd(ours, self.pid, any_class=any_reply)
        self._pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or not Linux
            self._pidfd = os.pidfd_open(self.pid)
        self._closed = False
        self.send((entry, args))

    def send(self, message: object) -> int:
        """Sends a request; never waits. Returns its number, which the answer has, too.

        If the child has already ended, the next `take` or `receive` reports it.
        """
        return self._end.send(message)

    def take(self) -> tuple[int, Any] | None:
        """The next message and the number of the request that it answers; None if there is none yet. Never waits.

        Raises:
            ChildDiedError: the child ended, or what it sent is not a message; it is killed then.
        """
        self._trim_stderr()
        self._end.flush()
        ended = self._has_ended()
        try:
            message = self._end.receive()
        except ForeignBytesError as error:
            raise self.dismiss(str(error)) from None
        except EOFError:
            raise self._end_of_life() from None
        if message is None and ended:  # a forked copy may still hold the other end of the socket
            raise self._end_of_life()
        return message

    def receive(self, timeout_s: float | None = None) -> Any:
        """The answer to the last request; the first answer is to the arguments of the entry.

        Raises:
            TimeoutError: no answer came in time; the child is still running.
            ChildDiedError: as `take`; also when the answer is to another request.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (taken := self.take()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            wait_for([self], left)
        number, message = taken
        if number != self._end.requests:
            raise self.dismiss(f"it answered request {number} instead of request {self._end.requests}")
        return message

    def dismiss(self, reason: str) -> ChildDiedError:
        """Kills a child that answers nonsense; returns the error that says so."""
        end_session(self.pid, self._mark)
        return ChildDiedError(self._with_stderr(f"{reason}; killed"))

    def _end_of_life(self) -> ChildDiedError:
        """How the child ended. Waits for its end, and kills it if it only closed its socket."""
        deadline = time.monotonic() + 1.0
        while not self._has_ended():
            if time.monotonic() > deadline:
                return self.dismiss("it closed its connection without an answer")
            wait_for([], 0.01)
        end_session(self.pid, self._mark)
        status = self._process.wait(_REAP_S)
        text = f"exited with status {status}" if status >= 0 else f"killed by signal {-status}{signal_name(-status)}"
        short = self._short_of_memory(status)
        return ChildDiedError(self._with_stderr(text), short_of_memory=short, exited=status >= 0 and not short)

    def _short_of_memory(self, status: int) -> bool:
        """Whether the system's or Python's lack of memory ended the child. SIGKILL is taken for it if nobody can tell."""
        if status == -signal.SIGKILL:
            before, now = self._oom_kills, oom_kills()
            return before is None or now is None or now > before
        last_words = self._with_stderr("")
        return "MemoryError" in last_words or "Cannot allocate memory" in last_words

    def _has_ended(self) -> bool:
        """Leaves the process a zombie, so that its number, which is its session's, is not used again."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _trim_stderr(self) -> None:
        if os.fstat(self._stderr.fileno()).st_size > _STDERR_LIMIT_BYTES:
            self._stderr.truncate(0)

    def _with_stderr(self, text: str) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"{text}; its last words:\n{tail}" if tail else text

    def kill(self) -> None:
        """Ends the child and all processes of its session, and frees its resources; does nothing the second time.

        Raises:
            subprocess.TimeoutExpired: the kernel cannot end it (hung in a driver).
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._process.returncode is None:  # else its number may belong to another process by now
                end_session(self.pid, self._mark)
            self._process.wait(_REAP_S)
        finally:
            self._end.close()
            self._stderr.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            _KEEPER.release()


def wait_for(children: Sequence[ChildProcess], timeout_s: float | None) -> list[ChildProcess]:
    """Waits until one of the children may have something to `take` or has ended, but at most `timeout_s`. Returns those: one
    question to the system about all of them, where `take` asks several about each.

    It waits no longer than half a second, because the system may have no descriptor to wait for a child's end.
    """
    poll = select.poll()
    child_of: dict[int, ChildProcess] = {}
    for child in children:
        poll.register(child._end, select.POLLIN | (select.POLLOUT if child._end.unsent else 0))
        child_of[child._end.fileno()] = child
        if child._pidfd >= 0:
            poll.register(child._pidfd, select.POLLIN)
            child_of[child._pidfd] = child
    events = poll.poll(1000 * max(0.0, _SLICE_S if timeout_s is None else min(timeout_s, _SLICE_S)))
    unknown = [child for child in children if child._pidfd < 0]  # they may have ended
    return list(dict.fromkeys([*(child_of[number] for number, _ in events), *unknown]))


def signal_name(number: int) -> str:
    """The name of a signal in brackets, after a space; "" if it has none."""
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """The thread that starts all children. The kernel takes the end of the starting *thread* for the parent's death
    (prctl(2), PR_SET_PDEATHSIG), and this one ends with the process only."""
    return ThreadPoolExecutor(1, thread_name_prefix="schedsearch-spawner")


os.register_at_fork(after_in_child=_spawner.cache_clear)


def _start(fd: int, stderr: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    bootstrap = _BOOTSTRAP.format(path=[entry or str(Path.cwd()) for entry in sys.path], fd=fd, parent=os.getpid())
    return subprocess.Popen(
        [sys.executable, "-P", "-c", bootstrap],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(fd,),
        env={**os.environ, **env},
        start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
    )


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
            child = ChildProcess(f"{__name__}:_serve_calls", (function,), any_reply=True)
            children.append(child)
            child.send(arguments)
            busy[child] = number
        while busy:
            for child in list(busy):
                if (taken := child.take()) is None:
                    continue
                number = busy.pop(child)
                if following := next(waiting, None):
                    busy[child], arguments = following
                    child.send(arguments)
                yield number, taken[1]
            wait_for(list(busy), None)
    finally:
        for child in children:
            child.kill()


def _serve_calls(conn: ChildEnd, function: str) -> None:
    """Entry of a child: receives arguments and sends the function's result, until the parent closes the socket."""
    while True:
        conn.send(_named(function)(*conn.recv()))


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def run_child(fd: int, parent: int) -> None:
    """Entry of the child: the first message names what to run; returns when the parent closes the socket."""
    _die_with(parent)
    faulthandler.enable()
    conn = ChildEnd(socket.socket(fileno=fd))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
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
