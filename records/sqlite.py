"""SQLite as a `records.database.Database`: connections, locks, transactions, migrations, error strings."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.pool import QueuePool

from schedsearch.errors import DatabaseError
from schedsearch.records import dbfile, fields, schema
from schedsearch.records.dialects import SQLITE
from schedsearch.records.migrating import migrate, migrating, parts_made, version_of
from schedsearch.typed import JsonObject

T = TypeVar("T")

DIALECT = SQLITE.name


class SqliteDatabase:
    """One database file.

    In WAL mode readers never wait for the writer. A writing transaction takes the write lock when it begins (BEGIN
    IMMEDIATE). It waits there, up to the time-out, and cannot fail half-way because another process wrote. With
    `synchronous=FULL` a commit survives a power cut, at the cost of about one fsync.

    Raises (all methods):
        DatabaseLockedError: another process kept the lock for longer than the time-out.
        DatabaseError: no such file, no permission, disk full, damaged, or not a database of schedsearch.
    """

    def __init__(
        self, path: str | Path, *, create: bool, readonly: bool, busy_timeout_s: float = dbfile.BUSY_TIMEOUT_S
    ) -> None:
        self.path = Path(path).absolute()
        self.readonly = readonly
        self._create = create and not readonly
        self._busy_timeout_s = busy_timeout_s
        self._engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=QueuePool)
        self._writer = self._engine.execution_options(schedsearch_write=True)
        sa.event.listen(self._engine, "begin", _begin)
        sa.event.listen(self._engine, "handle_error", self._explain)

    def _connect(self) -> sqlite3.Connection:
        connection = dbfile.connect(
            self.path, create=self._create, readonly=self.readonly, busy_timeout_s=self._busy_timeout_s
        )
        try:
            if self.readonly:
                _see_as_newest(connection)
            else:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
            return connection
        except dbfile.ERRORS as error:
            connection.close()
            raise dbfile.explain(error, self.path) or error from error

    def _explain(self, context: sa.engine.ExceptionContext) -> None:
        """Names this file, and not another database whose connection is open around this one."""
        explained = dbfile.explain(context.original_exception, self.path)
        if explained is not None:
            raise explained from context.original_exception

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise dbfile.explain(error.orig, self.path) or error from error
        except UnicodeDecodeError as error:
            raise dbfile.explain(error, self.path) or error from error

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one snapshot of the database."""
        with self._translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A connection that holds the write lock. It commits at the end and rolls back on an exception."""
        if self.readonly:
            raise DatabaseError(f"{self.path} was opened read-only; open it for writing")
        with self._translated(), self._writer.begin() as connection:
            yield connection

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        return str(self.path.resolve())

    @property
    def size_bytes(self) -> int:
        files = (self.path, dbfile.beside(self.path, "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def again(self, call: Callable[[], T]) -> T:
        return call()  # there is no connection to lose

    def insert(self, table: sa.Table) -> Insert:
        return insert(table)

    def migrate(self) -> dict[str, str]:
        """Brings the schema to the newest version, creating it in an empty file, and returns the table meta.

        A read-only database stays as it is. If it is older, views present it as the newest (`schema.SEEN_AS_NEWEST`).

        Raises:
            SchemaVersionError: the database is newer than this code.
            DatabaseError: it is an SQLite database of another program, or a deployment file.
        """
        with self.read() as connection:
            found = self._meta(connection)
            if not self.readonly:
                _refuse_strange_triggers(connection, self.path)
        version = self._version(found)
        if version < fields.SCHEMA_VERSION and not self.readonly:
            self._use_wal()
            with migrating(self.name, version), self.write() as connection:
                found = self._meta(connection)  # another process may have created it first
                migrate(connection, DIALECT, self._version(found))
                found = self._meta(connection)
        with self.read() as connection:
            self._check_tables(connection, _TABLES)
        return found

    def create_deploy(self) -> None:
        """Creates the tables of a deployment file in an empty file (journal mode DELETE)."""
        with self.write() as connection:
            for statement in schema.DEPLOY_SCHEMA:
                connection.exec_driver_sql(statement)

    def _meta(self, connection: sa.Connection) -> dict[str, str]:
        """Table meta, checked; empty for a file without tables."""
        tables = connection.exec_driver_sql("SELECT name FROM main.sqlite_schema WHERE type IN ('table', 'view')")
        names = {row[0] for row in tables}
        if not names:
            return {}
        if "meta" not in names:
            raise dbfile.foreign(self.path)
        self._check_tables(connection, {"meta": ("key", "value")})
        rows = connection.exec_driver_sql("SELECT key, value FROM meta").all()
        return dbfile.read_meta(self.path, [tuple(row) for row in rows], ("uuid", "signature", "kind"))

    def _check_tables(self, connection: sa.Connection, tables: Mapping[str, Iterable[str]]) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        dbfile.check_tables(driver, self.path, tables)

    def _version(self, found: dict[str, str]) -> int:
        return version_of(found, self.name, create=self._create)

    def _use_wal(self) -> None:
        """Waits for locks and sets WAL mode, because SQLite itself does not wait when it changes the journal mode."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            connection = self._connect()
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise dbfile.explain(error, self.path) or error from error
            finally:
                connection.close()
            time.sleep(0.02)

    def vacuum(self) -> None:
        """Returns the space of deleted rows to the file system."""
        with self._translated(), self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            try:
                driver.execute("VACUUM")
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise dbfile.explain(error, self.path) or error from error

    def health(self) -> JsonObject:
        """`problems` lists what SQLite's quick_check finds: [] if the file is sound."""
        with self.read() as connection:

            def pragma(name: str) -> list[Any]:
                return [row[0] for row in connection.exec_driver_sql(f"PRAGMA {name}")]

            problems = [str(line) for line in pragma("quick_check(20)") if line != "ok"]
            problems += [f"broken reference from table {table}" for table in pragma("foreign_key_check")]
            problems += _missing_parts(connection)
            return {
                "sqlite": sqlite3.sqlite_version,
                "journal_mode": pragma("journal_mode")[0],
                "size_bytes": self.size_bytes,
                "free_bytes": pragma("freelist_count")[0] * pragma("page_size")[0],
                "problems": problems,
            }

    def close(self) -> None:
        self._engine.dispose()


_TABLES = {table.name: table.names for table in fields.TABLES}
_TRIGGERS = {text for step in schema.MIGRATIONS[DIALECT] for text in step if text.startswith("CREATE TRIGGER ")}


def _refuse_strange_triggers(connection: sa.Connection, path: Path) -> None:
    """Raises DatabaseError if the file has a trigger that schedsearch did not put there: it would run when we write."""
    for name, text in connection.exec_driver_sql("SELECT name, sql FROM main.sqlite_schema WHERE type = 'trigger'"):
        if " ".join(text.split()) not in _TRIGGERS:
            raise DatabaseError(
                f"{path} has a trigger {ascii(name)[:60]} that schedsearch did not make, so nothing is written to it; "
                "read its records into a new database: schedsearch records merge"
            )


def _missing_parts(connection: sa.Connection) -> list[str]:
    """The indexes and triggers that the file lacks. It can be used without them, slower and with less protection."""
    version = connection.exec_driver_sql("SELECT value FROM main.meta WHERE key = 'schema_version'").scalar_one()
    present = {row[0] for row in connection.exec_driver_sql("SELECT name FROM main.sqlite_schema")}
    wanted = parts_made(DIALECT, int(version))
    return [f"the {kind} {name} is missing" for kind, name in wanted if name not in present]


def _see_as_newest(connection: sqlite3.Connection) -> None:
    """Puts temporary views over the tables of an older schema, so that queries of the newest schema can read it."""
    if not connection.execute(
        "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'meta' AND rootpage > 0"
    ).fetchone():
        return
    found = connection.execute("SELECT value FROM main.meta WHERE key = 'schema_version'").fetchone()
    connection.execute("PRAGMA query_only = OFF")  # the pragma also forbids temporary views
    versions = {str(version): statements for version, statements in schema.SEEN_AS_NEWEST[DIALECT].items()}
    for statement in versions.get(found[0], ()) if found else ():  # `migrate` says what is wrong with any other
        connection.execute(statement)
    connection.execute("PRAGMA query_only = ON")


def _begin(connection: sa.Connection) -> None:
    writing = connection.get_execution_options().get("schedsearch_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
