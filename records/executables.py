"""Files of executables (`model.ssx`): a program, its machine code and its weights in one SQLite database.

Like `lookup` this needs the standard library only. `schedsearch.executable` knows what the text of a program means. Here it
is a string that names code and weights by their sha256, so that one signature covers everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from schedsearch.closing import Closing
from schedsearch.errors import DatabaseError, SchemaVersionError, UntrustedDatabaseError, UsageError
from schedsearch.records import claims, dbfile, state
from schedsearch.records.output import replacement

T = TypeVar("T")

FORMAT_VERSION = 7
SEALED_VERSION = 5
"""2: weights may lie outside of the file; 3: calls of ONNX Runtime, whose models are kept as weights; 4: programs of dynamic
graphs; 5: programs have a checksum; 6: programs of dynamic graphs are data, in place of the calls that made the graph; 7:
calls with programs of their own."""
_PART_BYTES = 64 << 20  # a weight is cut into parts, because SQLite keeps a blob in memory
_BUSY_TIMEOUT_S = 5.0
_EXAMPLE = "model.ssx"

_TABLES = {
    "executable": ("version", "target", "program", "signature"),
    "code": ("sha256", "plan", "code"),
    "weight": ("sha256", "part", "data"),
}
_SCHEMA = (
    f"PRAGMA application_id = {dbfile.EXECUTABLE_ID}",
    "BEGIN IMMEDIATE",
    "CREATE TABLE executable (version INTEGER NOT NULL, target TEXT NOT NULL, program TEXT NOT NULL, "
    "signature TEXT NOT NULL) STRICT",
    "CREATE TABLE code (sha256 TEXT PRIMARY KEY, plan TEXT NOT NULL, code BLOB NOT NULL) STRICT",
    "CREATE TABLE weight (sha256 TEXT NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (sha256, part)) "
    "STRICT",
)


def write(
    path: Path,
    target: str,
    program: str,
    code: Iterable[tuple[str, str, bytes]],
    weights: Iterable[tuple[str, memoryview]],
) -> None:
    """Writes a file, signed by this machine. The same content gives the same bytes.

    Args:
        target: key of the device that the code is for.
        program: text that names every sha256 below.
        code: sha256, launch plan and machine code of each artifact.
        weights: sha256 and bytes of each weight, and of each ONNX model; equal ones may come repeatedly.

    Raises:
        UsageError: there is a file that is not an executable; it stays.
        DatabaseError: it cannot be written.
    """
    dbfile.check(path, create=True, readonly=False, example=_EXAMPLE)
    try:
        with (
            replacement(path, _keep_unless_executable) as temporary,
            contextlib.closing(dbfile.connect(temporary, create=True)) as connection,
        ):
            _fill(connection, target, program, code, weights)
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another path") from error
    except dbfile.ERRORS as error:
        raise dbfile.explain(error, path) or error from error


def _fill(
    connection: sqlite3.Connection,
    target: str,
    program: str,
    code: Iterable[tuple[str, str, bytes]],
    weights: Iterable[tuple[str, memoryview]],
) -> None:
    for statement in _SCHEMA:
        connection.execute(statement)
    signature = claims.sign(claims.Kind.EXECUTABLE, _digest(program))
    connection.execute("INSERT INTO executable VALUES (?, ?, ?, ?)", (FORMAT_VERSION, target, program, signature))
    connection.executemany("INSERT INTO code VALUES (?, ?, ?)", sorted(code))
    written = set()
    for sha256, data in weights:
        if sha256 not in written:
            written.add(sha256)
            for part, start in enumerate(range(0, max(data.nbytes, 1), _PART_BYTES)):
                connection.execute("INSERT INTO weight VALUES (?, ?, ?)", (sha256, part, data[start : start + _PART_BYTES]))
    connection.execute("COMMIT")


class ExecutableFile(Closing):
    """An open file. Any number of processes may read it at the same time.

    Attributes:
        target: key of the device that the code is for.
        version: of the format.

    Raises:
        DatabaseError: no such file, no permission, truncated, damaged, or not an executable.
        SchemaVersionError: a newer schedsearch wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if not self.path.exists():
            raise DatabaseError(
                f"no executable at {path}; check the path, or make it: schedsearch build MODEL.onnx -o {path}"
            )
        if self.path.suffix == ".onnx":
            raise DatabaseError(
                f"{path} is a model, not an executable; build it first: schedsearch build {path} -o {self.path.stem}.ssx"
            )
        dbfile.check(self.path, create=False, readonly=True, example=_EXAMPLE)
        self._connection = dbfile.connect(self.path, readonly=True, busy_timeout_s=_BUSY_TIMEOUT_S)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        if self._all("PRAGMA application_id") != [(dbfile.EXECUTABLE_ID,)]:
            raise DatabaseError(
                f"{self.path} is a database, but not an executable of schedsearch; make one: schedsearch build MODEL.onnx "
                "-o model.ssx"
            )
        self._run(lambda connection: dbfile.check_tables(connection, self.path, _TABLES))
        rows = self._all("SELECT version, target, program, signature FROM executable")
        if len(rows) != 1:
            raise self._damaged("executable", "", f"{len(rows)} rows; it must have one")
        version, self.target, program, self._signature = rows[0]
        self.version: int = version
        if not isinstance(version, int) or version < 1:
            raise self._damaged("executable", "version", f"{ascii(version)[:40]} is not a version")
        if version > FORMAT_VERSION:
            raise SchemaVersionError(
                f"{self.path} has format version {version}, this schedsearch knows up to {FORMAT_VERSION}; upgrade "
                "schedsearch (pip install -U schedsearch), or build the model again here"
            )
        for name, value in (("target", self.target), ("program", program), ("signature", self._signature)):
            if not isinstance(value, str):
                raise self._damaged("executable", name, "it is not text")
        self._program: str = program

    @property
    def claim(self) -> claims.ExecutableClaim:
        return claims.ExecutableClaim(_digest(self._program))

    @property
    def vouched(self) -> bool:
        """Whether this machine built the file, or its user marked it as trusted."""
        return claims.vouches(self.claim, self._signature)

    @property
    def program(self) -> str:
        """The text of the program.

        Raises:
            UntrustedDatabaseError: this machine does not vouch for the file, or others could use its state folder.
        """
        if not self.vouched:
            if (objection := state.objection()) is not None:
                raise UntrustedDatabaseError(f"nothing vouches for {self.path}: {objection}")
            raise UntrustedDatabaseError(
                f"this machine did not sign {self.path}: another machine wrote it, or it was changed. Its machine code "
                f"would run with all your rights; if you trust its origin: schedsearch records trust {self.path}; else "
                "build the model again here: schedsearch build MODEL.onnx"
            )
        return self._program

    def code(self, sha256: str) -> tuple[str, bytes]:
        """Launch plan and machine code of an artifact. Raises DatabaseError if they are missing or damaged."""
        found = self._all("SELECT plan, code FROM code WHERE sha256 = ?", (sha256,))
        if not found or not isinstance(found[0][0], str) or not isinstance(found[0][1], bytes):
            raise self._damaged("code", sha256[:12], "it is missing")
        plan, code = found[0]
        if not claims.matches_digest(sha256, plan, code):
            raise self._damaged("code", sha256[:12], "it does not match its checksum")
        return plan, code

    def weight(self, sha256: str, nbytes: int) -> bytes:
        """The bytes of a weight. Raises DatabaseError if they are missing or damaged."""
        data = b"".join(self._parts(sha256, nbytes))
        if len(data) != nbytes or hashlib.sha256(data).hexdigest() != sha256:
            raise self._damaged("weight", sha256[:12], f"it does not match its checksum ({len(data)} of {nbytes} bytes)")
        return data

    def _parts(self, sha256: str, nbytes: int) -> Iterator[bytes]:
        for part in range(-(-nbytes // _PART_BYTES) or 1):
            found = self._all("SELECT data FROM weight WHERE sha256 = ? AND part = ?", (sha256, part))
            if not found or not isinstance(found[0][0], bytes):
                raise self._damaged("weight", sha256[:12], f"part {part} is missing")
            yield found[0][0]

    def close(self) -> None:
        self._connection.close()

    def _damaged(self, table: str, row: str, what: str) -> DatabaseError:
        return DatabaseError(
            f"{self.path} is damaged: table {table}{f', {row}' if row else ''}: {what}; restore it from a copy, or build it "
            "again: schedsearch build MODEL.onnx"
        )

    def _all(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        return self._run(lambda connection: connection.execute(query, values).fetchall())

    def _run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return action(self._connection)
        except dbfile.ERRORS as error:
            raise dbfile.explain(error, self.path) or error from error


def is_executable(path: str | Path) -> bool:
    """Whether a file says in its header that it is an executable. The file may be damaged otherwise."""
    try:
        with contextlib.closing(dbfile.connect(Path(path), readonly=True, busy_timeout_s=_BUSY_TIMEOUT_S)) as connection:
            return bool(connection.execute("PRAGMA application_id").fetchone() == (dbfile.EXECUTABLE_ID,))
    except (DatabaseError, *dbfile.ERRORS):
        return False


def check_writable(path: Path) -> None:
    """Finds out before the work is done whether `write` could write a file.

    Raises:
        UsageError: there is a file that is not an executable.
        DatabaseError: the folder is missing, or the path cannot be opened.
    """
    dbfile.check(path, create=True, readonly=False, example=_EXAMPLE)
    if path.exists() and (objection := _keep_unless_executable(path)):
        raise UsageError(f"{path} {objection}")


def _keep_unless_executable(path: Path) -> str | None:
    """The objection (see `output.replacement`) to replacing anything but an executable."""
    return (
        None
        if is_executable(path)
        else "exists and is not an executable, so it is left alone; delete it or give another path"
    )


def _digest(program: str) -> str:
    return hashlib.sha256(program.encode(errors="surrogateescape")).hexdigest()
