"""Ends the processes that a candidate left behind, and tells whether the system ran out of memory. Reads Linux's /proc.

A child of a run leads a session of its own. Whatever it starts belongs to this session, unless that process starts another
one (setsid). Such a process is found by the environment that it inherited, in which each child has its own `MARK`. A process
that starts a session and also clears its environment escapes; only a control group could hold it.

If the run is killed, its children end with it (PR_SET_PDEATHSIG), but what they started does not. A `Keeper` ends that. It
runs this file as a program that imports the standard library alone.

See docs/decisions/013-sessions-and-marks.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MARK = "SCHEDSEARCH_CHILD"
"""An environment variable of each child; what it starts inherits it."""

_PROC = Path("/proc")
_ROUNDS = 5  # a process may fork between being listed and being killed
_KEEPER_END_S = 10.0


class Keeper:
    """Marks the children of this process, and ends their offspring if this process is killed.

    While there are children, a small process waits for the end of this one. It sees that end because its standard input
    closes. It then kills every process with the mark. Without it (it cannot be started, or was killed) only the offspring of
    a killed run is not ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked copy of this process: the children are the original's."""
        self._lock = threading.Lock()
        self._token = secrets.token_hex(8)
        self._children = self._total = 0
        self._process: subprocess.Popen[bytes] | None = None

    def mark(self) -> str:
        """The mark of a new child; `release` must be called when it has ended."""
        with self._lock:
            self._children += 1
            self._total += 1
            if self._process is None or self._process.poll() is not None:
                with contextlib.suppress(OSError):
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-S", __file__, f"{self._token}."],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
            return f"{self._token}.{self._total}."

    def release(self) -> None:
        """A child has ended. After the last one the process that waits ends, too."""
        with self._lock:
            self._children -= 1
            if self._children or self._process is None:
                return
            process, self._process = self._process, None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=_KEEPER_END_S)


def end_session(leader: int, mark: str) -> None:
    """Kills a session's leader, its process group, and every process that came from it.

    The leader must not have been reaped: as long as it is a zombie, its number belongs to no other process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)
    _end_members(mark, leader)


def _end_members(mark: str, session: int | None = None) -> None:
    """Kills the processes with a mark and those of a session, except its leader."""
    for _ in range(_ROUNDS):
        left = [pid for pid in _members(mark, session) if pid != session]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _members(mark: str, session: int | None) -> list[int]:
    """The living processes of a session, and those whose mark begins with `mark`."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    try:
        numbers = [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]
    except OSError:
        return []
    for pid in numbers:
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, its_session = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            environment = (_PROC / str(pid) / "environ").read_bytes()
            if int(its_session) == session or environment.startswith(wanted) or b"\0" + wanted in environment:
                found.append(pid)
    return found


def oom_kills() -> int | None:
    """How many processes the kernel killed for lack of memory so far: in this control group, else on this machine.

    None where the system does not tell.
    """
    counts = []
    for path in (*_cgroup_files(), _PROC / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    counts.append(int(value))
    return sum(counts) if counts else None


def _cgroup_files() -> list[Path]:
    """memory.events of this process's control group (version 2)."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return [Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"]
    return []


def _keep() -> None:
    """The program: waits until standard input closes, then kills the processes with the mark that the argument gives."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    deadline = time.monotonic() + 1.0
    _end_members(sys.argv[1])
    while time.monotonic() < deadline and _members(sys.argv[1], None):  # one may just be starting
        time.sleep(0.05)
        _end_members(sys.argv[1])


if __name__ == "__main__":
    _keep()
