"""Files and databases that appear under their name only when they are complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.errors import DatabaseError, UsageError
from schedsearch.records import dbfile

if TYPE_CHECKING:
    from schedsearch.records.store import Store


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """An empty file to write to. It replaces `path` when the block ends without an error.

    A device or pipe, such as /dev/stdout, is written to directly.

    Raises:
        UsageError: `path` cannot be written, or is a database, whose measurements cannot be repeated.
    """
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target = path.resolve()  # keeps a link and replaces its target
        if is_database(target):
            raise UsageError(f"{path} is a database, so it is left alone; delete it or give another path")
        temporary = temporary_beside(target)
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from error


def is_database(path: str | Path) -> bool:
    """Whether it is an SQLite database, even if it is damaged or locked by another process."""
    path = Path(path)
    return path.is_file() and dbfile.is_sqlite(path)


@contextmanager
def store_to_fill(path: str | Path) -> Iterator[Store]:
    """Opens the record store at `path` for writing. A new store appears only when the block ends without an error.

    Raises:
        DatabaseError: it cannot be opened or created, or another process created it in the meantime.
    """
    from schedsearch.records.store import Store

    path = Path(path).absolute()
    dbfile.check(path, create=True, readonly=False)
    if path.exists():
        with Store.open(path) as store:
            yield store
        return
    try:
        temporary = temporary_beside(path)
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another path") from error
    log = dbfile.beside(temporary, "-wal")
    try:
        with Store.open(temporary) as store:
            yield store
        if dbfile.has_content(log):  # SQLite keeps the log if it could not copy it into the database
            raise DatabaseError(
                f"the disk of {path} is full; nothing was kept; free some space and run the same command again"
            )
        if path.exists():
            raise DatabaseError(f"another process made {path} in the meantime; run the same command again to add to it")
        temporary.replace(path)
    finally:
        for file in (temporary, log, dbfile.beside(temporary, "-shm")):
            file.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A new empty file in the same folder, with the user's usual permissions."""
    descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    umask = os.umask(0)
    os.umask(umask)
    os.fchmod(descriptor, 0o666 & ~umask)
    os.close(descriptor)
    return Path(name)
