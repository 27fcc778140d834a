"""PostgreSQL as a `records.database.Database`: connections, locks, transactions, error messages. Needs the extra `postgres`.

All tables are in a schema named `schedsearch`, so that a database may hold other things too. One writer at a time: a writing
transaction takes an advisory lock when it begins, and waits there up to the time-out. Records therefore appear in the order
of their ids, so that whoever follows a database by its last id misses none, and a comparison with the present best holds
until the transaction ends.

See docs/decisions/277-postgresql-has-one-writer-at-a-time.md.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.pool import QueuePool

from schedsearch.errors import DatabaseError, DatabaseLockedError, DatabaseLostError, UsageError
from schedsearch.records import dbfile, fields, schema
from schedsearch.records.dialects import POSTGRESQL
from schedsearch.records.migrating import migrate, migrating, parts_made, version_of
from schedsearch.typed import JsonObject

try:
    import psycopg
    from psycopg import errors as pg
except ImportError as missing:
    raise UsageError(f"a database of PostgreSQL needs psycopg ({missing}): pip install 'schedsearch[postgres]'") from missing

T = TypeVar("T")

DIALECT = POSTGRESQL.name
SCHEMA = POSTGRESQL.main
MIN_SERVER = 130000  # the oldest release that the PostgreSQL project still corrected in 2025
_WRITERS = 0x7363686564  # the advisory lock of those who write
_CONNECT_S = 10
_IDLE_TRANSACTION = "5min"  # a writer whose machine is gone holds the lock no longer than this
_PAUSE_S = 0.2  # between attempts to reach a server that was lost
_RESTORE = "restore it from a dump, or read its records into a new database: schedsearch records merge"
_SHOWN = 300


class PostgresDatabase:
    """A database of a PostgreSQL server. Its tables are created in a database that exists already.

    A commit has reached the server's disk when it returns (`synchronous_commit`), whatever the server's default is.

    Args:
        url: postgresql://USER@HOST:PORT/DATABASE, or any other connection URI of libpq, without a password: it would be
            seen in process lists, logs and records. libpq finds it in ~/.pgpass or PGPASSWORD.

    Raises (all methods):
        DatabaseLockedError: another process kept the lock for longer than the time-out.
        DatabaseLostError: the server cannot be reached, or has ended the connection.
        DatabaseError: no such database, no permission, disk full, damaged, or not a database of schedsearch.
    """

    def __init__(self, url: str, *, create: bool, readonly: bool, busy_timeout_s: float = dbfile.BUSY_TIMEOUT_S) -> None:
        self.path = self.name = url
        self.readonly = readonly
        self._create = create and not readonly
        self._busy_timeout_s = busy_timeout_s
        self._options = _options_of(url)
        self.identity = url  # until the first connection tells better
        # REPEATABLE READ gives every statement of a reader the same snapshot; nothing of it can fail.
        self._engine = sa.create_engine(
            "postgresql+psycopg://", creator=self._connect, poolclass=QueuePool, pool_pre_ping=True
        )
        self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writer = self._engine.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=False)
        sa.event.listen(self._engine, "handle_error", self._explain)

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(self.name, autocommit=True, prepare_threshold=None, **self._options)
        except psycopg.Error as error:
            raise DatabaseLostError(
                f"cannot connect to {self.name} ({_text(error)}); check that the server runs and that host, port, user and "
                "database are right (createdb makes a database); a password belongs in ~/.pgpass or PGPASSWORD"
            ) from error
        try:
            self._require_server(connection)
            for setting in (
                f"search_path = {SCHEMA}",  # nothing that others put into schema public is called
                "client_encoding = 'UTF8'",
                "synchronous_commit = on",
                f"lock_timeout = {max(1, round(self._busy_timeout_s * 1000))}",
                f"idle_in_transaction_session_timeout = '{_IDLE_TRANSACTION}'",
            ):
                connection.execute(f"SET {setting}")
            if self.readonly:
                _see_as_newest(connection)
            info = connection.info
            self.identity = f"postgresql://{info.host}:{info.port}/{info.dbname}"
            connection.autocommit = False
            return connection
        except BaseException as error:
            connection.close()
            raise self._explained(error) or error from error

    def _require_server(self, connection: psycopg.Connection[Any]) -> None:
        version = connection.info.server_version
        if version < MIN_SERVER:
            raise DatabaseError(
                f"{self.name}: its server is PostgreSQL {version // 10000}.{version % 10000}; allowed: "
                f"{MIN_SERVER // 10000} or later; upgrade the server, or give another --db"
            )
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise DatabaseError(
                f"{self.name} keeps its text as {encoding}; allowed: UTF8; make another database: "
                "createdb --encoding UTF8 --template template0 NAME"
            )

    # ---- errors

    def _explain(self, context: sa.engine.ExceptionContext) -> None:
        if context.is_pre_ping:  # the pool then connects anew
            return
        if context.is_disconnect:
            raise self._lost(context.original_exception) from context.original_exception
        explained = self._explained(context.original_exception)
        if explained is not None:
            raise explained from context.original_exception

    def _lost(self, error: BaseException) -> DatabaseLostError:
        return DatabaseLostError(
            f"the connection to {self.name} was lost ({_text(error)}) and did not come back in time; what was committed "
            "before is kept; run the same command again when the server runs"
        )

    def _explained(self, error: BaseException | None) -> DatabaseError | None:
        """Our message for an error of psycopg; None if the error is a bug and not the state of the database."""
        if isinstance(error, pg.LockNotAvailable):
            return DatabaseLockedError(
                f"{self.name} is locked by another process{self._holder()} and stayed so until the time-out; wait for it, "
                "stop it, or give another --db (and join them later: schedsearch records merge)"
            )
        if isinstance(error, pg.InsufficientPrivilege):
            return DatabaseError(
                f"no permission on {self.name} ({error.diag.message_primary or _text(error)}); to make the tables: "
                "GRANT CREATE ON DATABASE ... TO you; to use those of another user, that one runs: "
                f"GRANT USAGE ON SCHEMA {SCHEMA} TO you; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "
                f"{SCHEMA} TO you (SELECT alone to read)"
            )
        if isinstance(error, pg.DiskFull):
            return DatabaseError(
                f"the disk of {self.name} is full; nothing of this write was kept, but earlier commits are safe; free some "
                "space (schedsearch records prune drops stored code) and run the same command again"
            )
        if isinstance(error, pg.ReadOnlySqlTransaction):
            return DatabaseError(f"{self.name} cannot be written ({_text(error)}); give the primary server, or another --db")
        if isinstance(error, pg.OutOfMemory | pg.TooManyConnections | pg.ConfigurationLimitExceeded):
            return DatabaseError(
                f"the server of {self.name} has no room for this ({_text(error)}); stop other programs, or raise its limits"
            )
        if isinstance(error, pg.UndefinedTable | pg.UndefinedColumn | pg.DatatypeMismatch | pg.UndefinedFunction):
            return DatabaseError(f"{self.name} is damaged ({_text(error)}); {_RESTORE}")  # our statements fit a sound schema
        if isinstance(error, pg.DataCorrupted | pg.IndexCorrupted | pg.InternalError_):
            return DatabaseError(f"{self.name} is damaged ({_text(error)}); {_RESTORE}")
        if isinstance(error, pg.QueryCanceled | pg.SystemError | pg.IoError):
            return DatabaseError(
                f"the server of {self.name} gave up ({_text(error)}); earlier commits are kept; run the same command again"
            )
        if isinstance(error, psycopg.OperationalError):
            return self._lost(error)
        return None

    def _holder(self) -> str:
        """' (PID application)' of whoever holds the writers' lock, if we may see it; otherwise ''."""
        query = (
            "SELECT a.pid, a.application_name FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid) "
            f"WHERE l.locktype = 'advisory' AND l.granted AND l.objid = {_WRITERS & 0xFFFFFFFF}"
        )
        try:
            with psycopg.connect(self.name, **self._options) as connection:
                found = connection.execute(query).fetchone()
        except psycopg.Error:
            return ""
        return f" (process {found[0]} of the server, {ascii(found[1])[:80]})" if found else ""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise self._explained(error.orig) or error from error

    # ---- transactions

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one snapshot of the database."""
        with self._translated(), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A connection that holds the writers' lock. It commits at the end and rolls back on an exception."""
        if self.readonly:
            raise DatabaseError(f"{self.name} was opened read-only; open it for writing")
        with self._translated(), self._writer.begin() as connection:
            connection.exec_driver_sql(f"SELECT pg_catalog.pg_advisory_xact_lock({_WRITERS})")
            yield connection

    def again(self, call: Callable[[], T]) -> T:
        deadline_s = None
        while True:
            try:
                return call()
            except DatabaseLostError:
                deadline_s = deadline_s or time.monotonic() + self._busy_timeout_s
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_PAUSE_S)

    def insert(self, table: sa.Table) -> Insert:
        return insert(table)

    # ---- the schema

    def migrate(self) -> dict[str, str]:
        """Brings the tables to the newest version, creating them where there are none, and returns the table meta.

        A read-only database stays as it is. If it is older, views present it as the newest (`schema.SEEN_AS_NEWEST`).

        Raises:
            SchemaVersionError: the database is newer than this code.
            DatabaseError: the schema `schedsearch` is another program's.
        """
        with self.read() as connection:
            found = self._meta(connection)
        version = self._version(found)
        if version < fields.SCHEMA_VERSION and not self.readonly:
            with migrating(self.name, version), self.write() as connection:
                found = self._meta(connection)  # another process may have created them first
                if not found:
                    connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
                migrate(connection, DIALECT, self._version(found))
                found = self._meta(connection)
        with self.read() as connection:
            self._check_tables(connection, {table.name: table.names for table in fields.TABLES})
        return found

    def _version(self, found: dict[str, str]) -> int:
        return version_of(found, self.name, create=self._create)

    def _meta(self, connection: sa.Connection) -> dict[str, str]:
        """Table meta, checked; empty for a database without our tables."""
        names = {name for name, _, _ in _relations(connection)}
        if not names:
            return {}
        if "meta" not in names:
            raise DatabaseError(
                f"{self.name} has a schema {SCHEMA} of another program (it has no table meta); give another database"
            )
        self._check_tables(connection, {"meta": ("key", "value")})
        rows = connection.exec_driver_sql(f"SELECT key, value FROM {SCHEMA}.meta").all()
        return dbfile.read_meta(self.path, [tuple(row) for row in rows], ("uuid", "signature", "kind"), _RESTORE)

    def _check_tables(self, connection: sa.Connection, tables: Mapping[str, Iterable[str]]) -> None:
        """Checks that each table is a plain table with its columns, or has a stand-in of this connection."""
        plain = {name: (kind, generated) for name, kind, generated in _relations(connection)}
        stand_ins = connection.exec_driver_sql(
            "SELECT relname FROM pg_catalog.pg_class WHERE relnamespace = pg_catalog.pg_my_temp_schema()"
        )
        temporary = {name for (name,) in stand_ins}
        columns = connection.exec_driver_sql(
            "SELECT c.relname, a.attname FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            f"WHERE n.nspname = '{SCHEMA}' AND a.attnum > 0 AND NOT a.attisdropped"
        )
        present = {(table, column) for table, column in columns}
        for table, wanted in tables.items():
            if table in plain and plain[table] != ("rp", 0):
                raise DatabaseError(f"{self.name}: {table} is not a plain table; do not use it, somebody changed it")
            if table in temporary:
                continue
            if table not in plain:
                raise DatabaseError(f"{self.name} is damaged: it has no table {table}; {_RESTORE}")
            for column in wanted:
                if (table, column) not in present:
                    raise DatabaseError(f"{self.name} is damaged: table {table} has no column {column}; {_RESTORE}")

    def vacuum(self) -> None:
        """Nothing to do: the server's autovacuum frees the space of deleted rows."""

    @property
    def size_bytes(self) -> int:
        with self.read() as connection:
            return _size_bytes(connection)

    def health(self) -> JsonObject:
        """`problems` lists the indexes and triggers that are missing."""
        with self.read() as connection:
            version = connection.exec_driver_sql(f"SELECT value FROM {SCHEMA}.meta WHERE key = 'schema_version'")
            present = connection.exec_driver_sql(
                "SELECT t.tgname FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid "
                f"JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = '{SCHEMA}' "
                f"UNION ALL SELECT indexname FROM pg_catalog.pg_indexes WHERE schemaname = '{SCHEMA}'"
            )
            names = {name for (name,) in present}
            wanted = parts_made(DIALECT, int(version.scalar_one()))
            return {
                "postgresql": connection.exec_driver_sql("SHOW server_version").scalar_one(),
                "size_bytes": _size_bytes(connection),
                "problems": [f"the {kind} {name} is missing" for kind, name in wanted if name not in names],
            }

    def close(self) -> None:
        self._engine.dispose()


def _options_of(url: str) -> dict[str, Any]:
    """What every connection gets, unless the URL says something else. Raises UsageError for a URL that cannot be used."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise UsageError(
            f"{url} is not a URL of PostgreSQL ({_text(error)}); allowed: postgresql://USER@HOST:PORT/DATABASE"
        ) from error
    if "password" in given:
        raise UsageError(
            "the URL of the database has a password, which process lists and records would show; leave it out, and put it "
            "in ~/.pgpass (HOST:PORT:DATABASE:USER:PASSWORD) or PGPASSWORD"
        )
    name = f"schedsearch {platform.node()} {os.getpid()}"
    defaults = {"connect_timeout": _CONNECT_S, "application_name": name}
    return {key: value for key, value in defaults.items() if key not in given}


def _relations(connection: sa.Connection) -> list[tuple[str, str, int]]:
    """Tables and views of our schema: name, kind with persistence ("rp" for a plain table), number of computed columns."""
    rows = connection.exec_driver_sql(
        "SELECT c.relname, c.relkind::text || c.relpersistence::text, (SELECT count(*) FROM pg_catalog.pg_attribute a "
        "WHERE a.attrelid = c.oid AND a.attgenerated::text <> '') FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
        f"ON n.oid = c.relnamespace WHERE n.nspname = '{SCHEMA}' AND c.relkind IN ('r', 'v', 'm', 'f', 'p')"
    )
    return [(name, kind, computed) for name, kind, computed in rows]


def _size_bytes(connection: sa.Connection) -> int:
    found = connection.exec_driver_sql(
        "SELECT coalesce(sum(pg_catalog.pg_total_relation_size(c.oid)), 0)::bigint FROM pg_catalog.pg_class c "
        f"JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = '{SCHEMA}' AND c.relkind = 'r'"
    )
    return int(found.scalar_one())


def _see_as_newest(connection: psycopg.Connection[Any]) -> None:
    """Puts temporary views over the tables of an older schema, so that queries of the newest schema can read it."""
    exists = connection.execute("SELECT pg_catalog.to_regclass(%s)", (f"{SCHEMA}.meta",)).fetchone()
    if exists is None or exists[0] is None:
        return
    found = connection.execute(f"SELECT value FROM {SCHEMA}.meta WHERE key = 'schema_version'").fetchone()
    versions = {str(version): statements for version, statements in schema.SEEN_AS_NEWEST[DIALECT].items()}
    for statement in versions.get(found[0], ()) if found else ():  # `migrate` says what is wrong with any other
        connection.execute(statement)


def _text(error: BaseException) -> str:
    """What a server or libpq said, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
