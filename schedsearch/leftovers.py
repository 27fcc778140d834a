"""Folders that a process makes for itself, and that a later process removes if this one was killed.

A file in such a folder says whose it is, and is locked as long as its process lives. Only folders with such a file are
removed with what is in them: a folder of the user may have any name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

_OWNER = "owner.lock"
_TEXT = b"A process of schedsearch locks this file as long as it uses the folder, which is then removed.\n"
_RANDOM = re.compile(r"[a-z0-9_]{8}")  # how `tempfile` ends a name
_UNOWNED_S = 3600.0  # a folder of this age without an owner's file was left behind by a process that died while making it


class OwnedFolder:
    """A new folder in `parent`, until `close`.

    Making a folder also removes those with the same `prefix` of the same user whose lock is free: their processes were
    killed.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        remove_abandoned(parent, prefix)
        self.path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        self._fd = -1
        try:
            self._own()
        except BaseException:
            with contextlib.suppress(OSError):  # it is empty if no more files may be opened
                self.path.rmdir()
            self._disown()
            raise

    def _own(self) -> None:
        """Puts the locked file into the folder."""
        unlocked = self.path / f"{_OWNER}.new"
        self._fd = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks; nobody else can lock it then
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, _TEXT)
        unlocked.rename(self.path / _OWNER)  # under its name the file has been locked from the beginning

    def _disown(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Removes the folder; does nothing the second time."""
        if self._fd >= 0:
            self._disown()


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes this user's folders that `OwnedFolder` made with `prefix` and whose owner has ended. Leaves what it cannot
    remove."""
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            if path.name.startswith(prefix) and _RANDOM.fullmatch(path.name.removeprefix(prefix)):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - found.st_mtime > _UNOWNED_S:
            _remove_unowned(path)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the owner lives
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(_TEXT) + 1) == _TEXT:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _remove_unowned(path: Path) -> None:
    """Removes a folder in which there is at most the file that was about to become the owner's."""
    started = path / f"{_OWNER}.new"
    ours = list(path.iterdir()) == [started] and stat.S_ISREG(started.lstat().st_mode)
    if ours and started.read_bytes() in (b"", _TEXT):
        started.unlink()
    path.rmdir()  # OSError if it holds anything
