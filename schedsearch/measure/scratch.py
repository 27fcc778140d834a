"""Temporary folders of a run, which the next run removes if this one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_OWNER = "owner.lock"
_PREFIX = "schedsearch-"
_UNOWNED_S = 3600.0  # a folder of this age without an owner's file was left behind by a process that died while making it


class ScratchFolder:
    """A folder in the system's temporary folder, until `close`.

    A file in it is locked as long as this process lives. Making a folder also removes those of the same `kind` and user
    whose lock is free: their processes were killed.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"{_PREFIX}{kind}-"
        remove_abandoned(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._fd = -1
        try:
            self._own()
        except BaseException:
            with contextlib.suppress(OSError):  # it is empty if no more files may be opened
                self.path.rmdir()
            raise

    def _own(self) -> None:
        """Puts the locked file into the folder."""
        unlocked = self.path / f"{_OWNER}.new"
        self._fd = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks; nobody else can lock it then
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path / _OWNER)  # under its name the file has been locked from the beginning

    def close(self) -> None:
        """Removes the folder; does nothing the second time."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes this user's folders that begin with `prefix` and whose owner has ended. Leaves what it cannot remove."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(prefix):
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
            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the owner lives
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
