"""The record store: every measurement ever made, the best one per task, and its machine code.

    with Store.open("records.db") as store:
        run = store.start_run({"command": "..."})
        record_id = store.append(record)               # committed when it returns
        store.promote(record_id, artifact)             # deployment serves it from now on

Measurements are append-only. Several processes may write to one database at once. `claims` decides which code this machine
may load, `exchange` reads and writes files of records, and deployment reads through `lookup`.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from schedsearch.closing import Closing
from schedsearch.errors import UsageError
from schedsearch.identity import canonical_json
from schedsearch.launch import Artifact
from schedsearch.measurement import Outcome, Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import claims, dbfile, queries, schema
from schedsearch.records.database import Database
from schedsearch.records.location import server_url
from schedsearch.records.rows import sign_records, to_row
from schedsearch.records.sqlite import SqliteDatabase
from schedsearch.records.stored import Stored
from schedsearch.records.writes import (
    Over,
    claim_of,
    drop_artifacts,
    names_candidate,
    put_artifact_of,
    put_profile,
    set_best,
)
from schedsearch.typed import JsonMapping, JsonObject

P = ParamSpec("P")
T = TypeVar("T")


def _repeatable(method: Callable[Concatenate[Store, P], T]) -> Callable[Concatenate[Store, P], T]:
    """A method that the store calls again when the connection was lost before it knew whether the transaction was kept."""

    @functools.wraps(method)
    def repeated(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._db.again(lambda: method(self, *args, **kwargs))

    return repeated


class Store(Stored, Closing):
    """An open database, to read and to write. Any thread may call its methods; those that read are in `Stored`.

    `close` logs a warning about the damaged rows that were skipped.

    Raises (all methods):
        DatabaseLockedError: another process kept the write lock for longer than the busy time-out.
        DatabaseError: the disk is full or failed, or the file is damaged. Earlier commits are kept.
    """

    @classmethod
    def open(
        cls,
        path: str | Path,
        create: bool = True,
        readonly: bool = False,
        *,
        busy_timeout_s: float = dbfile.BUSY_TIMEOUT_S,
    ) -> Store:
        """Opens a database. Opening it for writing brings an older schema to the newest.

        Args:
            path: of the file; a string may also be a URL, sqlite:///PATH, or postgresql://HOST/DATABASE of a database on a
                server, which must exist.
            create: whether a missing file, or the tables in an empty database of a server, are created.
            readonly: write nothing. A database with an older schema is read as it is; fields that it lacks are None or "".
                `create` is ignored.
            busy_timeout_s: how long a write waits for another process.

        Raises:
            DatabaseError: the path cannot be opened (missing, a folder, no permission, truncated, another program's file),
                or the state folder (see `claims`) cannot be written.
            SchemaVersionError: a newer schedsearch wrote the database.
            UsageError: the URL is of another kind of database or has a password, or the package for its server is missing.
        """
        url = server_url(path)
        if not readonly:
            claims.machine_id()  # fails early rather than at the first artifact
        database: Database
        if url is not None:
            from schedsearch.records.postgresql import PostgresDatabase  # needs the extra `postgres`

            database = PostgresDatabase(url, create=create, readonly=readonly, busy_timeout_s=busy_timeout_s)
        else:
            file = path.removeprefix("sqlite:///") if isinstance(path, str) else path
            database = SqliteDatabase(file, create=create, readonly=readonly, busy_timeout_s=busy_timeout_s)
        try:
            return cls(database, database.migrate())
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        self._db.close()
        self.damage.close()

    def start_run(self, info: Mapping[str, object]) -> str:
        """Begins a tuning run and returns its id. `info` (JSON values) describes it: command, target, options."""
        now = time.time()
        run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"
        self._add_run({"id": run_id, "machine": claims.machine_id(), "started_at": now, "info": canonical_json(dict(info))})
        return run_id

    @_repeatable
    def _add_run(self, row: JsonObject) -> None:
        with self._db.write() as connection:
            connection.execute(self._db.insert(schema.run).on_conflict_do_nothing(), row)

    @_repeatable
    def finish_run(self, run_id: str, summary: Mapping[str, object]) -> None:
        """Ends a run. A run that was killed keeps `finished_at` None. Raises UsageError if there is no such run."""
        with self._db.write() as connection:
            done = connection.execute(
                sa.update(schema.run)
                .where(schema.run.c.id == run_id)
                .values(finished_at=time.time(), summary=canonical_json(dict(summary)))
            )
            if not done.rowcount:
                raise UsageError(f"{self.name} has no run {run_id!r}")

    def append(self, record: Record, run_so_far: JsonMapping | None = None) -> int:
        """Adds a record and commits it; see `append_all`. Returns the record's id."""
        return self.append_all([record], run_so_far)[0]

    @_repeatable
    def append_all(self, records: Sequence[Record], run_so_far: JsonMapping | None = None) -> list[int]:
        """Adds records in one transaction: all or, when it fails, none. A commit takes as long as the disk needs to have it,
        whatever the number of records. Appending the same record again (same content, stamps and run) adds nothing.

        Args:
            records: of any outcome. Their code is stored only when they are promoted. One with an empty `source` was
                measured here, and this machine signs it.
            run_so_far: what the run of the last record tells about itself while it goes on (JSON values). It becomes the
                summary of the run in the same transaction, unless the run has ended.

        Returns:
            The records' ids; ids grow in the order of appending.

        Raises:
            ValueError: a number in a record is not finite.
        """
        if not records:
            return []
        rows = [to_row(record) for record in records]
        own = [(record, row) for record, row in zip(records, rows) if not record.source]
        signatures = sign_records((row["content_id"], record.artifact) for record, row in own)
        for row in rows:
            row["signature"] = ""
        for (_, row), signature in zip(own, signatures):
            row["signature"] = signature
        workloads = {
            row["workload_id"]: {"id": row["workload_id"], "op": record.workload.op, "json": row.pop("workload_json")}
            for record, row in zip(records, rows)
        }
        toolchains = {row["toolchain_id"]: {"id": row["toolchain_id"], "json": row.pop("toolchain_json")} for row in rows}

        def add(table: sa.Table) -> Any:
            return self._db.insert(table).on_conflict_do_nothing()

        ids = []
        with self._db.write() as connection:
            connection.execute(add(schema.workload), list(workloads.values()))
            connection.execute(add(schema.toolchain), list(toolchains.values()))
            insert = add(schema.record).returning(schema.record.c.id)
            for row in rows:
                record_id = connection.execute(insert, row).scalar()
                if record_id is None:
                    known = sa.select(schema.record.c.id).where(schema.record.c.content_id == row["content_id"])
                    record_id = connection.execute(known).scalar_one()
                ids.append(int(record_id))
            if run_so_far is not None:
                open_run = (schema.run.c.id == records[-1].run, schema.run.c.finished_at.is_(None))
                summary = canonical_json(dict(run_so_far))
                connection.execute(sa.update(schema.run).where(*open_run).values(summary=summary))
        return ids

    @_repeatable
    def promote(
        self,
        record_id: int,
        artifact: Artifact | None = None,
        *,
        verified: bool = True,
        if_faster: bool = False,
        raced: Sequence[Record] = (),
    ) -> bool:
        """Makes a record the best of its (workload, target, mode). This machine signs the row and the code.

        Args:
            record_id: of a record that was measured here and is ok.
            artifact: its code. Without it, deployment serves the code stored with the record, if this machine stored it.
            verified: whether this code computed right results on the device when it was measured.
            if_faster: keep the present best unless this record is faster. Two records compare by the ratio to their anchor
                if both come from races with the same anchor, otherwise by time (see `docs/records.md`). The transaction
                includes the comparison: if several runs promote at once, the fastest record stays.
            raced: records of the same race. With `if_faster`, a best of one of their configurations is replaced even if its
                own time is less: the race was fairer than times of two days.

        Returns:
            Whether the record is the best now.

        Raises:
            UsageError: no such record, its outcome is not ok, or it was imported.
            DamageError: its row is damaged.
        """
        with self._db.write() as connection:
            row = connection.execute(queries.records().where(schema.record.c.id == record_id)).one_or_none()
            if row is None:
                raise UsageError(f"{self.name} has no record {record_id}")
            reader = self.reader()
            reader.one("record", record_id, lambda: reader.record(row))
            if row.outcome != Outcome.OK:
                raise UsageError(f"record {record_id} ended in {row.outcome}; only a record that is ok can be best")
            if row.source and not row.signature:
                raise UsageError(
                    f"record {record_id} came from {row.source}; only what was measured here can be best; measure its "
                    "configuration here: schedsearch tune"
                )
            over = Over.SLOWER if if_faster else Over.ANY
            return self._set_best(connection, row, artifact, verified=verified, over=over, raced=raced)

    def _set_best(
        self,
        connection: sa.Connection,
        row: Any,
        artifact: Artifact | None,
        *,
        verified: bool,
        over: Over,
        raced: Sequence[Record] = (),
    ) -> bool:
        with connection.begin_nested() as attempt:
            sha256 = put_artifact_of(self._db, connection, row, artifact)
            is_best = set_best(
                self._db, connection, row, sha256, verified=verified, promoted_at=time.time(), over=over, raced=raced
            )
            if not is_best:
                attempt.rollback()  # its code is not kept either
        return is_best

    @_repeatable
    def adopt(self, record: Record, artifact: Artifact) -> bool:
        """Adds the record of somebody else, with the code that this machine made of its configuration and verified. It
        becomes the best of its task, which this machine signs, unless the task has one.

        Returns:
            Whether it is the best now.

        Raises:
            ValueError: the record is not ok, or has no source.
        """
        if not record.source or not record.measurement.ok:
            raise ValueError("adopt takes a record that is ok and names its source")
        record_id = self.append(record)
        with self._db.write() as connection:
            row = connection.execute(queries.records().where(schema.record.c.id == record_id)).one()
            return self._set_best(connection, row, artifact, verified=True, over=Over.NONE)

    @_repeatable
    def demote(self, record: Record) -> bool:
        """Removes the best of a record's task if it has the record's configuration, whose code turned out to be wrong. The
        records stay, and so does another best, such as one that another run promoted meanwhile.

        This machine then serves that code for the workload from no file, until it is promoted again.

        Returns:
            Whether there was one.
        """
        with self._db.write() as connection:
            removed = sa.delete(schema.best).where(names_candidate(record)).returning(schema.best)
            row = connection.execute(removed).one_or_none()
            if row is not None and claims.vouches(claim_of(row), row.signature):  # anybody may have written another row
                claims.revoke(claim_of(row))
        return row is not None

    @_repeatable
    def add_profile(self, record_id: int, profile: Profile) -> None:
        """Keeps a profile of a record's kernel; twice adds nothing. Raises UsageError if there is no such record."""
        with self._db.write() as connection:
            if connection.execute(sa.select(schema.record.c.id).where(schema.record.c.id == record_id)).scalar() is None:
                raise UsageError(f"{self.name} has no record {record_id}")
            put_profile(self._db, connection, record_id, profile)

    @_repeatable
    def prune(self, keep: int) -> dict[str, int]:
        """Drops stored code except that of the best and of the `keep` fastest records per (workload, target, mode).

        Every measurement stays. The dropped code can be rebuilt from the configuration.

        Returns:
            {"artifacts_kept", "artifacts_dropped", "bytes_freed"}.

        Raises:
            UsageError: keep < 1.
        """
        if keep < 1:
            raise UsageError(f"prune must keep at least 1 record per workload, got {keep}")
        with self._db.write() as connection:
            counts = drop_artifacts(connection, keep)
        if counts["artifacts_dropped"]:
            self._db.vacuum()
        return counts
