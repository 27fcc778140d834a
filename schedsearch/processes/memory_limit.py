"""Keeps foreign code from taking all memory: an allocation fails with MemoryError before the system kills a process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.9  # of the memory that is available

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(share: float = SHARE) -> Iterator[None]:
    """Within it this process can get at most a share of the memory that the system has left.

    Where the system does not say how much that is, there is no limit.
    """
    taken, left = _data_bytes(), available_bytes()
    if taken is None or left is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [taken + int(share * left), *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes() -> int | None:
    """The memory that processes can still get: of the machine, and of the control group. None if the system does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        found.append(_kilobytes(_PROC / "meminfo", "MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
        folder = _CGROUPS / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")
        most = int((folder / "memory.max").read_text())  # "max": no limit, a ValueError
        files = next(line for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("inactive_file"))
        found.append(most - int((folder / "memory.current").read_text()) + int(files.split()[1]))
    return max(0, min(found)) if found else None


def _data_bytes() -> int | None:
    """What counts for the limit: this process's private memory that can be written."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        return _kilobytes(_PROC / "self" / "status", "VmData:")
    return None


def _kilobytes(path: Path, name: str) -> int:
    return 1024 * next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))
