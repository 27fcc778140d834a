"""SQLite database files: opens them, and says what is wrong with a bad one. Standard library only.

Writing (`store`) and deployment (`lookup`) share this module and therefore give the same errors.
"""

from __future__ import annotations

import functools
import os
import re
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schedsearch.errors import DatabaseError, DatabaseLockedError, SchemaVersionError
from schedsearch.records import damage
from schedsearch.records.location import Place

BUSY_TIMEOUT_S = 30.0
MAX_VALUE_BYTES = 256 << 20  # of one text or blob; SQLite refuses to read a longer one
MIN_SQLITE = (3, 37, 0)  # STRICT tables

EXECUTABLE_ID = 0x53535831  # "SSX1": the application id in the header of executables (`model.ssx`)
_REBUILD = "restore it from a copy, or build it again: schedsearch build MODEL.onnx"
_REMEDY = "restore it from a copy, or save what can be read with: sqlite3 {path} .recover"
ERRORS = (sqlite3.Error, UnicodeDecodeError)  # what a call of sqlite3 raises for a file that cannot be used
_SYNTAX_ERROR = 'near "'
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
# A reader that may not write the log's index; https://www.sqlite.org/rescode.html
_READONLY_LOG = (
    sqlite3.SQLITE_READONLY_CANTINIT,
    sqlite3.SQLITE_READONLY_CANTLOCK,
    sqlite3.SQLITE_READONLY_DIRECTORY,
    sqlite3.SQLITE_READONLY_RECOVERY,
)


def connect(
    path: Path, *, create: bool = False, readonly: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> sqlite3.Connection:
    """Opens a database file in autocommit mode; the caller begins its own transactions.

    A connection that reads a WAL database needs the files -wal and -shm beside it and creates them if they are missing.
    SQLite removes them when the last connection that may write closes. A reader with write permission therefore opens the
    file for writing and then refuses all changes (PRAGMA query_only). On read-only media, or if nobody may write to the
    file, neither file is needed as long as no log is left: the database is then opened as immutable.

    Args:
        path: the file; made absolute here.
        create: whether a missing file is created.
        readonly: refuse all changes; excludes `create`.
        busy_timeout_s: how long a statement waits for another process's lock.

    Raises:
        DatabaseError: the path cannot be a database (missing, a folder, no permission, another format, truncated).
    """
    path = path.absolute()
    check(path, create=create, readonly=readonly)
    may_write = not readonly or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
    options = "mode=ro" if not may_write else "mode=rwc" if create else "mode=rw"
    if readonly and _is_at_rest(path):
        options = "mode=ro&immutable=1"
    connection = None
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?{options}",
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        _harden(connection)
        if readonly:
            connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version").fetchone()  # reads the header, so that a wrong file is found here
        return connection
    except ERRORS as error:
        if connection is not None:
            connection.close()
        raise explain(error, path) or error from error


def _harden(connection: sqlite3.Connection) -> None:
    """For files from anywhere, as https://www.sqlite.org/security.html advises."""
    connection.execute("PRAGMA trusted_schema = OFF")  # functions with side effects do not run from views and triggers
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA mmap_size = 0")  # a page that cannot be read is an error, not a signal
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    # A string that is not UTF-8 is damage of one row: its reader finds the surrogates. By default it fails the whole query.
    connection.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")


def check(path: Path, *, create: bool, readonly: bool, example: str = "records.db") -> None:
    """Raises DatabaseError if name or permissions already show that `path` cannot be opened as a database.

    `example` is the name of a file that the message suggests if `path` is a folder.

    It never opens the file: closing it would drop the locks of every other connection of this process
    (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise DatabaseError(
            f"SQLite {sqlite3.sqlite_version} is too old; allowed: {'.'.join(map(str, MIN_SQLITE))} or later; "
            "use a Python built with a newer SQLite"
        )
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder; give a file in it, e.g. {path / example}")
    if path.exists() and not path.is_file():
        raise DatabaseError(f"{path} is a device or pipe, and a database needs a file; give another path")
    if not path.parent.is_dir():
        raise DatabaseError(f"cannot open {path}: the folder {path.parent} does not exist; create it or give another path")
    if not path.exists():
        if not create:
            raise DatabaseError(f"no database at {path}; check the path, or create it: schedsearch tune ... --db {path}")
    elif not os.access(path, os.R_OK):
        raise DatabaseError(f"no permission to read {path}; ask its owner, or: chmod u+r {path}")
    if not readonly:
        if path.exists() and not os.access(path, os.W_OK):
            raise DatabaseError(
                f"{path} is read-only here; make it writable (chmod u+w {path}), copy it elsewhere, or give another --db"
            )
        if not os.access(path.parent, os.W_OK):
            raise DatabaseError(
                f"the folder {path.parent} is read-only here, and SQLite keeps its log beside {path.name}; make the folder "
                "writable or give a file in another one"
            )
    if not create and not has_content(path) and not has_content(beside(path, "-wal")):
        raise DatabaseError(f"{path} is empty, not a database of schedsearch; check the path")


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database, even a damaged one. SQLite looks first; `check` says why."""
    if path.stat().st_size < len(_MAGIC):
        return False  # SQLite takes a file of one byte for an empty database
    try:
        connect(path, readonly=True, busy_timeout_s=0).close()
    except DatabaseError as error:
        refusal = error.__cause__
        if not isinstance(refusal, sqlite3.Error):
            return False  # ruled out by name or permissions
        if refusal.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
            return True
        with path.open("rb") as file:  # safe now: nobody can be using it
            return file.read(len(_MAGIC)) == _MAGIC
    return True


def _damage(error: Exception, path: Path) -> DatabaseError:
    """What is wrong with a file that SQLite refused. Opening it here is safe, because nobody can be using it.

    File format: https://www.sqlite.org/fileformat.html, section 1.3.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as unreadable:
        return DatabaseError(f"{path} cannot be read ({unreadable.strerror}); restore it from a copy")
    if header[:16] != _MAGIC[: len(header)]:
        return DatabaseError(f"{path} is not a database: it does not begin as an SQLite file does; check the path")
    page_bytes = int.from_bytes(header[16:18], "big")
    promised = int.from_bytes(header[28:32], "big") * (65536 if page_bytes == 1 else page_bytes)
    is_executable = header[68:72] == EXECUTABLE_ID.to_bytes(4, "big")
    remedy = _REBUILD if is_executable else _REMEDY.format(path=path)
    if size < _HEADER_BYTES:
        return DatabaseError(
            f"{path} is truncated: {size} bytes, a header alone has {_HEADER_BYTES}; {_REMEDY.format(path=path)}"
        )
    if size < promised:
        return DatabaseError(f"{path} is truncated: {size} bytes, its header promises {promised}; {remedy}")
    return DatabaseError(f"{path} is damaged ({ascii(str(error))[1:-1]:.300}); {remedy}")


def _is_at_rest(path: Path) -> bool:
    """Whether this is a WAL database that nobody can be writing to: media or permissions are read-only, and no writer has
    left a log or its index."""
    if os.access(path.parent, os.W_OK) or has_content(beside(path, "-wal")) or beside(path, "-shm").exists():
        return False
    if path.stat().st_mode & 0o222 and not os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\2\2"


def beside(path: Path, suffix: str) -> Path:
    """The path of a database's log (suffix "-wal") or of the log's index ("-shm")."""
    return path.with_name(path.name + suffix)


def has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def explain(error: BaseException | None, path: Path) -> DatabaseError | None:
    """Our message for an SQLite error; None if the error is a bug and not the state of the file."""
    if isinstance(error, UnicodeDecodeError):  # Python cannot read SQLite's message, which quotes the damaged place
        return _damage(error, path)
    if not isinstance(error, sqlite3.Error):
        return None
    extended = getattr(error, "sqlite_errorcode", 0)
    code = extended & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DatabaseLockedError(
            f"{path} is locked by another process{_holders(path)} and stayed so until the time-out; wait for it, stop it, "
            "or give another --db (and join them later: schedsearch records merge)"
        )
    if code == sqlite3.SQLITE_FULL:
        return DatabaseError(
            f"the disk of {path} is full; nothing of this write was kept, but earlier commits are safe; free some "
            "space (schedsearch records prune drops stored code) and run the same command again"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damage(error, path)
    if code == sqlite3.SQLITE_TOOBIG:
        return DatabaseError(
            f"{path} has a text or blob of more than {MAX_VALUE_BYTES} bytes, which schedsearch never writes; restore it "
            f"from a copy, or drop that row with: sqlite3 {path}"
        )
    if code == sqlite3.SQLITE_ERROR and not str(error).startswith(_SYNTAX_ERROR):  # our statements fit a sound schema
        return DatabaseError(f"{path} is damaged ({error}); {_REMEDY.format(path=path)}")
    if code == sqlite3.SQLITE_CANTOPEN or extended in _READONLY_LOG:
        return DatabaseError(
            f"cannot open {path} ({error}); the folder of a live database must be writable, also for reading, as its log "
            f"({path.name}-wal) is there: copy both files to a writable place, or read a copy made with: "
            "schedsearch records export --deploy FILE.db"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return DatabaseError(f"{path} cannot be written ({error}); make file and folder writable or give another --db")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_PROTOCOL):
        return DatabaseError(
            f"the disk or file system failed under {path} ({error}); earlier commits are kept; check free space, "
            "quotas and the mount, then run the same command again"
        )
    return None


def check_version(path: Place, found: int) -> None:
    """Raises SchemaVersionError if a database has a newer schema than this code knows."""
    from schedsearch.records.fields import SCHEMA_VERSION  # executables have files of their own, without these tables

    if found > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has schema version {found}, this schedsearch knows up to {SCHEMA_VERSION}; "
            "upgrade schedsearch (pip install -U schedsearch) or give another --db"
        )


def read_meta(path: Place, found: Iterable[tuple[Any, Any]], required: Iterable[str], remedy: str = "") -> dict[str, str]:
    """Table meta, checked, from its rows (key, value).

    Args:
        required: keys that must be there, besides `schema_version`.
        remedy: what to do about a missing one; default: what helps for a file.

    Raises:
        DatabaseError: a key is missing, a value is not text, or the schema version is not a number.
        SchemaVersionError: a newer schedsearch wrote the file.
    """
    meta: dict[str, str] = {}
    for key, value in found:
        try:
            meta[damage.text("key", key)] = damage.text("value", value)
        except damage.DamagedRow as error:
            raise damage.DamageError(damage.damage(path, "meta", key, error)) from error
    if "schema_version" not in meta:
        raise foreign(path)
    for key in required:
        if key not in meta:
            raise DatabaseError(f"{path}: table meta, row {key}: it is missing; {remedy or _REMEDY.format(path=path)}")
    if not re.fullmatch("[0-9]{1,6}", meta["schema_version"], re.ASCII) or meta["schema_version"] == "0":
        wrong = damage.DamagedRow(f"{ascii(meta['schema_version'])[:40]} is not a version number")
        raise damage.DamageError(damage.damage(path, "meta", "schema_version", wrong))
    check_version(path, int(meta["schema_version"]))
    return meta


def check_tables(connection: sqlite3.Connection, path: Path, tables: Mapping[str, Iterable[str]]) -> None:
    """Checks that each table is a plain table of the file and has its columns.

    A view, a virtual table or a generated column in its place would run what the author of the file wrote there. Temporary
    tables and views of this connection may stand in for a table of an older schema.

    Raises:
        DatabaseError: it is not so; the text names the table and the column.
    """
    try:
        _check_tables(connection, path, tables)
    except ERRORS as error:
        raise explain(error, path) or error from error


def _check_tables(connection: sqlite3.Connection, path: Path, tables: Mapping[str, Iterable[str]]) -> None:
    own = {
        name: (kind, page) for name, kind, page in connection.execute("SELECT name, type, rootpage FROM main.sqlite_schema")
    }
    stand_ins = {name for (name,) in connection.execute("SELECT name FROM temp.sqlite_schema")}
    for table, columns in tables.items():
        kind, page = own.get(table, ("", 0))
        if kind and (kind != "table" or not page):
            raise DatabaseError(f"{path}: {table} is not a plain table; do not use this file, somebody changed it")
        if not kind and table not in stand_ins:
            raise DatabaseError(f"{path} is damaged: it has no table {table}; {_REMEDY.format(path=path)}")
        found = dict(connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall())
        for column in columns:
            if column not in found:
                raise DatabaseError(f"{path} is damaged: table {table} has no column {column}; {_REMEDY.format(path=path)}")
            if found[column]:
                raise DatabaseError(
                    f"{path}: column {column} of table {table} is computed; do not use this file, somebody changed it"
                )


def foreign(path: Place) -> DatabaseError:
    return DatabaseError(f"{path} is an SQLite database, but not one of schedsearch (it has no table meta); check the path")


def _holders(path: Path) -> str:
    """' (PID command, ...)' for the other processes that have the file open, if we may look at them; otherwise ''."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            if any(fd.readlink() == path for fd in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"{folder.name} {command[:80]}")
        except OSError:  # another user's process, or one that has ended
            continue
    return f" ({', '.join(found)})" if found else ""
