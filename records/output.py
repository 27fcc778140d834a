"""Files that appear under their name only when they are complete, and never in place of what must be kept."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from schedsearch.errors import UsageError
from schedsearch.leftovers import OwnedFolder
from schedsearch.records import dbfile

_PREFIX = ".schedsearch-unfinished-"  # of folders for unfinished files
_DESCRIPTOR = re.compile(r"/dev/(?:fd/(\d+)|(stdin|stdout|stderr))|/proc/(?:self|thread-self)/fd/(\d+)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
# renameat2(2); glibc has no names for these in ctypes
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Objection = Callable[[Path], str | None]
"""Says why a file may not be replaced, as the end of the sentence "<path> ..."; None if it may."""


def keep_databases(path: Path) -> str | None:
    """The usual objection: measurements cannot be repeated."""
    return "is a database, so it is left alone; delete it or give another path" if is_database(path) else None


def is_database(path: str | Path) -> bool:
    """Whether it is an SQLite database, even if it is damaged or locked by another process."""
    path = Path(path)
    return path.is_file() and dbfile.is_sqlite(path)


@contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """A stream to an empty file that replaces `path` when the block ends without an error. A database is not replaced.

    A device or pipe is written to directly. So is a descriptor of this process, e.g. /dev/stdout, even if it is a file: the
    shell may have opened it to append.

    Raises:
        UsageError: `path` cannot be written, or is a database.
        BrokenPipeError: nobody reads the pipe any more.
        OSError: the disk is full, or a quota or limit of sizes is reached. An older file at `path` stays.
    """
    path = Path(path)
    try:
        with _direct(path) as stream:
            if stream is not None:
                yield stream
                return
        with replacement(path, keep_databases) as temporary:
            with temporary.open("xb") as file:
                yield file
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from error


@contextmanager
def _direct(path: Path) -> Iterator[BinaryIO | None]:
    """A stream to a descriptor, device or pipe; None if `path` is, or can become, a file."""
    found = _DESCRIPTOR.fullmatch(str(path.absolute()))
    if found is not None:
        number = _STANDARD[found[2]] if found[2] else int(found[1] or found[3])
        sys.stdout.flush()
        with io.FileIO(os.dup(number), "w") as raw, io.BufferedWriter(raw) as stream:
            yield stream
    elif path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
    else:
        yield None


@contextmanager
def replacement(path: Path, objection: Objection) -> Iterator[Path]:
    """The path of a file that the block creates; it replaces `path` when the block ends without an error.

    A link stays, and its target is replaced. `objection` is asked before the block. It is asked again about the file that
    is replaced in the end, which another process may have put there in the meantime; that file is then put back.

    Raises:
        UsageError: the objection to replacing what is there.
        OSError: the folder cannot be written.
    """
    target = path.resolve()

    def require_none(at: Path) -> None:
        if (reason := objection(at)) is not None:
            raise UsageError(f"{path} {reason}")

    if target.exists():
        require_none(target)
    with temporary_beside(target) as temporary:
        yield temporary
        while not _placed(temporary, target):
            require_none(target)
            if _swapped(temporary, target, require_none):
                return


def _placed(temporary: Path, path: Path) -> bool:
    """Whether the name was free, so that `temporary` has it now."""
    try:
        place(temporary, path)
    except FileExistsError:
        return False
    return True


def _swapped(new: Path, path: Path, require_none: Callable[[Path], None]) -> bool:
    """Exchanges two files in one step, and back if there is an objection to replacing the one that was found.

    Returns:
        Whether they were exchanged; false if nothing has this name any more.
    """
    ours = new.stat().st_ino
    try:
        _rename(new, path, _RENAME_EXCHANGE)
        if new.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        require_none(new)
    except FileNotFoundError:
        return False
    except BaseException as error:
        if new.lstat().st_ino != ours:  # it is the file that was found
            _put_back(new, path)
        elif isinstance(error, OSError) and error.errno in _UNSUPPORTED:
            new.replace(path)  # it was looked at a moment ago
            return True
        raise
    return True


def _put_back(found: Path, path: Path) -> None:
    while not _placed(found, path):
        with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
            _rename(found, path, _RENAME_EXCHANGE)
            return


def place(temporary: Path, path: Path) -> None:
    """Gives a finished file its name.

    Raises:
        FileExistsError: the name is taken, perhaps since a moment ago.
        OSError: the folder cannot be written.
    """
    try:
        _rename(temporary, path, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.link(temporary, path)  # e.g. on NFS
        temporary.unlink()


def _rename(old: Path, new: Path, flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old), None, str(new))  # Python picks the subclass


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A path with the same name in a new folder beside it, which disappears with everything in it when the block ends. The
    next call removes the folders of processes that were killed.

    Raises:
        OSError: the folder cannot be created.
    """
    with contextlib.closing(OwnedFolder(path.absolute().parent, _PREFIX)) as folder:
        inside = folder.path / "new"
        inside.mkdir()
        yield inside / path.name
