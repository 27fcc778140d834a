"""Allows one tuning run per device: an advisory lock on a file, which the system frees however its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from schedsearch.errors import DeviceBusyError, DeviceError
from schedsearch.target import Target

_POLL_S = 0.2


class DeviceLock:
    """Holds the lock from construction to `close`. The file says who holds it: process id and command line.

    The file lies in the system's temporary folder, because the lock must hold between users too.

    Args:
        target: the device; a GPU is identified by its UUID, and all CPU runs of a machine share one lock.
        wait: whether to wait for the holder.
        on_wait: called once for each holder that it waits for, with a sentence that names the holder.

    Raises:
        DeviceBusyError: another process holds the lock and `wait` is false; or this process itself holds it.
        DeviceError: the file cannot be opened.
    """

    def __init__(
        self,
        target: Target,
        *,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"schedsearch-{_device_name(target)}.lock"
        self._fd = _open(self.path)
        self._held = False
        try:
            self._acquire(target, wait, on_wait)
        except BaseException:
            self.close()
            raise

    def _acquire(self, target: Target, wait: bool, on_wait: Callable[[str], None] | None) -> None:
        told = ""
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pid, command = _holder(self._fd)
            who = f"process {pid} ({command})" if pid else "another process"
            if pid == os.getpid():
                raise DeviceBusyError(f"{target.name} is already in use by a run of this process; close that run first")
            if not wait:
                raise DeviceBusyError(f"{target.name} is in use by {who}; wait for it or leave out --no-wait")
            if who != told and on_wait is not None:
                on_wait(f"waiting for {target.name}: in use by {who}")
            told = who
            time.sleep(_POLL_S)
        self._held = True
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        with contextlib.suppress(OSError):  # another user's file is locked read-only
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n{command}\n".encode(), 0)

    def close(self) -> None:
        """Frees the device; does nothing the second time. The file stays, so that descriptors of waiters remain valid."""
        if self._fd >= 0:
            if self._held:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _device_name(target: Target) -> str:
    return re.sub(r"[^\w.-]", "_", target.uuid or f"cuda-{target.ordinal}") if target.kind == "cuda" else "cpu"


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    # In a sticky folder Linux refuses to open another user's file with O_CREAT (fs.protected_regular).
    for attempt in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            fd = os.open(path, flags | attempt, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o666)
            return fd
    raise DeviceError(f"the lock file {path} cannot be opened; check its permissions or set TMPDIR")


def _holder(fd: int) -> tuple[int, str]:
    """Process id and command of the holder; (0, "") until it has written them."""
    pid, _, command = os.pread(fd, 4096, 0).decode(errors="replace").partition("\n")
    return (int(pid), command.strip()) if pid.isdigit() else (0, "")
