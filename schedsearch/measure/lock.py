"""Allows one tuning run per device: an advisory lock on a file, which the system frees however its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import DeviceBusyError, DeviceError
from schedsearch.target import Target

_POLL_S = 0.2
_NOTE_BYTES = 4096
_COMMAND_CHARACTERS = 200
_NOTE = re.compile(rb"(?:(\d{1,10})\n(.*\n?)?)?", re.DOTALL)  # the holder's process id and command, or nothing

_held: set[tuple[int, int]] = set()  # device and inode numbers of the lock files that this process holds
os.register_at_fork(after_in_child=_held.clear)


class DeviceLock:
    """Holds the lock from construction to `close`. The file says who holds it: process id and command line.

    The file lies in the system's temporary folder, because the lock must hold between users too. Anyone may therefore put
    something else at its place. schedsearch neither follows a link nor writes to a file that is not a lock file.

    Args:
        target: the device; a GPU is identified by its UUID, and all runs on a whole CPU share one lock.
        wait: whether to wait for the holder.
        on_wait: called once for each holder that it waits for, with a sentence that names the holder.
        deadline: of waiting.

    Attributes:
        waited_s: how long it had to wait.

    Raises:
        DeviceBusyError: another process holds the lock and `wait` is false, or the deadline has passed; or this process
            itself holds it.
        DeviceError: the file cannot be opened or locked, or is not a lock file.
    """

    def __init__(
        self,
        target: Target,
        *,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
        folder: Path | None = None,
        deadline: Deadline = NEVER,
    ) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"schedsearch-{_device_name(target)}.lock"
        self._fd, self._identity = -1, (0, 0)
        try:
            began_s = deadline.clock()
            self._acquire(target, wait, on_wait, deadline)
            self.waited_s = deadline.clock() - began_s
        except BaseException:
            self.close()
            raise

    def _acquire(self, target: Target, wait: bool, on_wait: Callable[[str], None] | None, deadline: Deadline) -> None:
        told = ""
        while not self._try():
            if self._fd < 0:  # the file was removed meanwhile; the next one is open to all
                continue
            if _identity(self._fd) in _held:
                raise DeviceBusyError(f"{target.name} is already in use by a run of this process; close that run first")
            who = _holder(self._fd)
            if not wait:
                raise DeviceBusyError(f"{target.name} is in use by {who}; wait for it or leave out --no-wait", holder=who)
            if deadline.passed:
                raise DeviceBusyError(f"{target.name} is in use by {who}, and there is no time left to wait", holder=who)
            if who != told and on_wait is not None:
                on_wait(f"waiting for {target.name}: in use by {who}")
            told = who
            time.sleep(_POLL_S)
        self._identity = _identity(self._fd)
        _held.add(self._identity)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        note = f"{os.getpid()}\n{_printable(command)}\n"
        with contextlib.suppress(OSError):  # another user's file is locked read-only
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, note.encode(errors="backslashreplace"), 0)

    def _try(self) -> bool:
        """Locks the file, unless another process holds it. Forgets a file that no longer is at its path."""
        if self._fd < 0:
            self._fd = _open(self.path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DeviceError(
                f"the lock file {self.path} cannot be locked: {error}; set TMPDIR to a local folder"
            ) from error
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == _identity(self._fd):
                return True
        except OSError:
            pass
        os.close(self._fd)
        self._fd = -1
        return False

    def close(self) -> None:
        """Frees the device; does nothing the second time. The file stays, so that descriptors of waiters remain valid."""
        if self._fd >= 0:
            if self._identity in _held:
                _held.discard(self._identity)
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _device_name(target: Target) -> str:
    name = target.uuid or (f"cuda-{target.ordinal}" if target.kind == "cuda" else "cpu")
    return re.sub(r"[^\w.-]", "_", name)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _open(path: Path) -> int:
    """Opens a lock file, and makes it when it is missing: with access for everybody, because the lock is everybody's."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last for a FIFO, whose opening waits for a writer
    reason = ""
    # In a sticky folder Linux refuses to open another user's file with O_CREAT (fs.protected_regular).
    for attempt in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            fd = os.open(path, flags | attempt, 0o666)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        try:
            if attempt & os.O_EXCL:
                os.fchmod(fd, 0o666)  # whatever the umask is
            elif problem := _objection(fd):
                raise DeviceError(
                    f"{path} is not a lock file of schedsearch: {problem}. Perhaps somebody else put it there; "
                    "remove it, or set TMPDIR to a folder of your own"
                )
            return fd
        except BaseException:
            os.close(fd)
            raise
    raise DeviceError(f"the lock file {path} cannot be opened ({reason}); check its permissions, or set TMPDIR")


def _objection(fd: int) -> str:
    """Why a file that was found at the place of the lock must not be written to; "" if it may."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return f"it is not a regular file (its mode is {stat.filemode(found.st_mode)})"
    if found.st_nlink > 1:
        return "it has another name, too (a hard link)"
    if found.st_size > _NOTE_BYTES or not _NOTE.fullmatch(os.pread(fd, _NOTE_BYTES, 0)):
        return "it contains something else than a process id and a command"
    return ""


def _holder(fd: int) -> str:
    """Names the holder; "another process" until it has written who it is."""
    note = _NOTE.fullmatch(os.pread(fd, _NOTE_BYTES, 0))
    if note is None or not note[1]:
        return "another process"
    return f"process {int(note[1])} ({_printable((note[2] or b'').decode(errors='replace').strip())})"


def _printable(text: str) -> str:
    """Text of another user as a terminal may show it: without control characters, and not too long."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text[:_NOTE_BYTES])
    return shown if len(shown) <= _COMMAND_CHARACTERS else f"{shown[:_COMMAND_CHARACTERS]}..."
