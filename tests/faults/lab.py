"""Runs functions in processes of their own, and watches everything that they start.

A lab process is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever its descendants leave behind becomes its
child, so that nothing escapes, not even after `kill -9` of a parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
PEAK_LIMIT_BYTES = 1 << 30
_WATCH_S = 0.1


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its descendants leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Child processes of all threads of a process; without those that ended."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return [child for child in found if state(child) not in ("Z", "")]


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def state(pid: int) -> str:
    """The letter of a process's state; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def peak_bytes(pid: int) -> int:
    """The largest resident size that a process has had."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def patience() -> float:
    """By how much limits of wall time are longer than on an idle machine: the processes that share a core, one at least."""
    return max(1.0, max(os.getloadavg()[:2]) / len(os.sched_getaffinity(0)))


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        status: its exit status, or minus the signal that ended it; None if it was killed because it took too long.
        out, err: what it wrote.
        seconds: wall seconds.
        cpu_s: CPU seconds of the process and of its descendants that were waited for.
        peak_bytes: the largest resident size of any of its processes.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    cpu_s: float
    peak_bytes: int


@dataclass
class Process:
    """A forked child that runs a function, with its output in files of `folder`."""

    pid: int
    folder: Path
    name: str
    began: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0
    ended: Ended | None = None

    def poll(self) -> Ended | None:
        """Looks at the process and its descendants; returns how it ended once it has."""
        if self.ended is None:
            for pid in descendants(self.pid):
                self.peak_bytes = max(self.peak_bytes, peak_bytes(pid))
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._end(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)
        return self.ended

    def wait(self, limit_s: float) -> Ended:
        """Waits for the end, and kills it with its descendants after `limit_s`, or later on a busy machine."""
        while self.poll() is None:
            if time.monotonic() - self.began > limit_s * patience():
                return self.kill()
            time.sleep(0.02)
        assert self.ended is not None
        return self.ended

    def kill(self) -> Ended:
        """Ends it and its descendants, because it hangs."""
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, _, usage = os.wait4(self.pid, 0)
        self._end(None, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)
        assert self.ended is not None
        return self.ended

    def _end(self, status: int | None, peak: int, cpu_s: float) -> None:
        out, err = ((self.folder / f"{self.name}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        seconds = time.monotonic() - self.began
        self.ended = Ended(status, out, err, seconds, cpu_s, max(peak, self.peak_bytes))


def start(function: Callable[[], object], folder: Path, name: str = "run") -> Process:
    """Forks a process that runs the function, with standard output and error in `folder/name.out` and `.err`.

    The process must have one thread only. Its exit status is 0, that of SystemExit, or 99 after another exception, whose
    traceback is in its standard error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(pid, folder, name)
    status = 99
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, path in ((0, os.devnull), (1, folder / f"{name}.out"), (2, folder / f"{name}.err")):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if fd else 0), 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        function()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def reap(within_s: float = 5.0) -> list[str]:
    """Waits for the orphans that this process adopted; kills those that stay longer and returns their commands."""
    deadline = time.monotonic() + within_s * patience()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children(os.getpid())
        if not left:
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    names = [f"{pid} {state(pid)} {command(pid)}" for pid in left]
    for pid in [each for one in left for each in (one, *descendants(one))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while children(os.getpid()):
            os.waitpid(-1, 0)
    return names
