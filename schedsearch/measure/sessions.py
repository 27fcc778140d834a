"""Ends the processes that a candidate left behind, and tells whether the system ran out of memory. Reads Linux's /proc.

A child of a run leads a session of its own. Whatever it starts belongs to this session, unless that process starts another
one (setsid). Such a process is found by the environment that it inherited, in which each child has its own `MARK`. A process
that starts a session and also clears its environment escapes; only a control group could hold it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "SCHEDSEARCH_CHILD"
"""An environment variable: the parent's process id and a number of the child."""

_PROC = Path("/proc")
_ROUNDS = 5  # a process may fork between being listed and being killed


def end_session(leader: int, mark: str = "") -> None:
    """Kills a session's leader, its process group, and every process that came from it.

    The leader must not have been reaped: as long as it is a zombie, its number belongs to no other process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)
    for _ in range(_ROUNDS):
        left = [pid for pid in _members(leader, mark) if pid != leader]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _members(leader: int, mark: str) -> list[int]:
    """The living processes of a session, and those outside with its mark in the environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    try:
        numbers = [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]
    except OSError:
        return []
    for pid in numbers:
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, session = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) == leader or (mark and wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")):
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
