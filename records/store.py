"""The record store: every measurement ever made, the best one per task, and its machine code.

    with Store.open("records.db") as store:
        run = store.start_run({"command": "..."})
        record_id = store.append(record)               # committed when it returns
        store.promote(record_id, artifact)             # deployment serves it from now on

Measurements are append-only. Several processes may write to one file at once. `trust` decides which code this machine may
load, `exchange` reads and writes files of records, and deployment reads through `lookup`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from schedsearch.config import Config
from schedsearch.errors import UntrustedDatabaseError, UsageError
from schedsearch.identity import canonical_json
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import COLD_GRAPH, Outcome, Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import dbfile, queries, schema, trust
from schedsearch.records.columns import Wanted, list_records, read_columns, read_stamp
from schedsearch.records.damage import Damage, DamageLog
from schedsearch.records.database import Database
from schedsearch.records.evidence import thinned
from schedsearch.records.reader import Reader
from schedsearch.records.rows import Best, RecordRow, sign_record, to_row
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.records.sqlite import SqliteDatabase
from schedsearch.records.writes import claim_of, drop_artifacts, put_artifact_of, put_profile, set_best
from schedsearch.workload import Workload
from schedsearch.workload_range import WorkloadRange

_CHUNK = 500  # rows read at a time from a whole table
_DAMAGE_SHOWN = 20


class Store:
    """An open database. Any thread may call its methods.

    Methods that return many rows leave out damaged ones and add them to `damage`.

    Attributes:
        damage: the damaged rows that were skipped so far. `close` logs a warning about them.

    Raises (all methods):
        DatabaseLockedError: another process kept the write lock for longer than the busy time-out.
        DatabaseError: the disk is full or failed, or the file is damaged. Earlier commits are kept.
    """

    def __init__(self, database: Database, meta: Mapping[str, str]) -> None:
        self._db = database
        self._meta = meta
        self.damage = DamageLog()

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
            path: of the file; a text may also be a URL, sqlite:///PATH.
            create: whether a missing file is created.
            readonly: write nothing. A database with an older schema is read as it is; fields that it lacks are None or "".
                `create` is ignored.
            busy_timeout_s: how long a write waits for another process.

        Raises:
            DatabaseError: the path cannot be opened (missing, a folder, no permission, truncated, another program's file),
                or the state folder (see `trust`) cannot be written.
            SchemaVersionError: a newer schedsearch wrote the database.
            UsageError: the URL is not an SQLite URL.
        """
        if isinstance(path, str) and (url := re.match(r"(\w+)://", path)):
            if url[1] != "sqlite":
                raise UsageError(f"databases of {url[1]} are not supported, got {path}; give a path or sqlite:///PATH")
            path = path.removeprefix("sqlite:///")
        if not readonly:
            trust.machine_id()  # fails early rather than at the first artifact
        database: Database = SqliteDatabase(path, create=create, readonly=readonly, busy_timeout_s=busy_timeout_s)
        try:
            return cls(database, database.migrate())
        except BaseException:
            database.close()
            raise

    @property
    def name(self) -> str:
        """The database's name for messages."""
        return self._db.name

    @property
    def path(self) -> Path:
        return self._db.path

    @property
    def uuid(self) -> str:
        """The unique id of the database, chosen at its creation."""
        return self._meta["uuid"]

    @property
    def database(self) -> Database:
        """For `exchange`, which reads and writes whole tables."""
        return self._db

    @property
    def created_here(self) -> bool:
        """Whether this machine created the database. What it holds is judged row by row."""
        return trust.created_here(self._meta)

    def close(self) -> None:
        self._db.close()
        self.damage.close()

    def reader(self, *, thorough: bool = False) -> Reader:
        """Reads rows of this store, and adds the damaged ones to `damage`; for `exchange`."""
        return Reader(self.path, self.damage, thorough=thorough)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- writing

    def start_run(self, info: Mapping[str, Any]) -> str:
        """Begins a tuning run and returns its id. `info` (JSON values) describes it: command, target, options."""
        now = time.time()
        run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"
        row = {"id": run_id, "machine": trust.machine_id(), "started_at": now, "info": canonical_json(dict(info))}
        with self._db.write() as connection:
            connection.execute(sa.insert(schema.run), row)
        return run_id

    def finish_run(self, run_id: str, summary: Mapping[str, Any]) -> None:
        """Ends a run. A run that was killed keeps `finished_at` None. Raises UsageError if there is no such run."""
        with self._db.write() as connection:
            done = connection.execute(
                sa.update(schema.run)
                .where(schema.run.c.id == run_id)
                .values(finished_at=time.time(), summary=canonical_json(dict(summary)))
            )
            if not done.rowcount:
                raise UsageError(f"{self.name} has no run {run_id!r}")

    def append(self, record: Record, run_so_far: Mapping[str, Any] | None = None) -> int:
        """Adds a record and commits it. Appending the same record again (same content, stamps and run) adds nothing.

        Args:
            record: of any outcome. Its code is stored only when it is promoted. With an empty `source` it was measured here,
                and this machine signs it.
            run_so_far: what the record's run tells about itself while it goes on (JSON values). It becomes the summary of
                the run in the same transaction, unless the run has ended.

        Returns:
            The record's id; ids grow in the order of appending.

        Raises:
            ValueError: a number in the record is not finite.
        """
        row = to_row(record)
        row["signature"] = "" if record.source else sign_record(row["content_id"], record.artifact)

        def add(table: sa.Table) -> Any:
            return self._db.insert(table).on_conflict_do_nothing()

        with self._db.write() as connection:
            connection.execute(
                add(schema.workload), {"id": row["workload_id"], "op": record.workload.op, "json": row.pop("workload_json")}
            )
            connection.execute(add(schema.toolchain), {"id": row["toolchain_id"], "json": row.pop("toolchain_json")})
            record_id = connection.execute(add(schema.record).returning(schema.record.c.id), row).scalar()
            if record_id is None:
                known = sa.select(schema.record.c.id).where(schema.record.c.content_id == row["content_id"])
                record_id = connection.execute(known).scalar_one()
            if run_so_far is not None:
                open_run = (schema.run.c.id == record.run, schema.run.c.finished_at.is_(None))
                summary = canonical_json(dict(run_so_far))
                connection.execute(sa.update(schema.run).where(*open_run).values(summary=summary))
        return int(record_id)

    def promote(
        self, record_id: int, artifact: Artifact | None = None, *, verified: bool = True, if_faster: bool = False
    ) -> bool:
        """Makes a record the best of its (workload, target, mode). This machine signs the row and the code.

        Args:
            record_id: of a record that was measured here and is ok.
            artifact: its code. Without it, deployment serves the code stored with the record, if this machine stored it.
            verified: whether this code computed right results on the device when it was measured.
            if_faster: keep the present best unless this record is faster. Two records compare by the ratio to their anchor
                if both come from races with the same anchor, otherwise by time (see `docs/records.md`). The transaction
                includes the comparison: if several runs promote at once, the fastest record stays.

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
            with connection.begin_nested() as attempt:
                sha256 = put_artifact_of(self._db, connection, row, artifact)
                promoted = set_best(
                    self._db, connection, row, sha256, verified=verified, promoted_at=time.time(), if_faster=if_faster
                )
                if not promoted:
                    attempt.rollback()  # its code is not kept either
        return promoted

    def demote(self, workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> bool:
        """Removes the best of a task, because its code turned out to be wrong. Its records stay.

        This machine then serves that code for the workload from no file, until it is promoted again.

        Returns:
            Whether there was one.
        """
        best = schema.best
        task = sa.and_(best.c.workload_id == workload.id, best.c.target_key == target_key, best.c.mode == mode)
        with self._db.write() as connection:
            row = connection.execute(sa.select(best).where(task)).one_or_none()
            if row is not None:
                if trust.vouches(claim_of(row), row.signature):  # anybody may have written another row
                    trust.revoke(claim_of(row))
                connection.execute(sa.delete(best).where(task))
        return row is not None

    def add_profile(self, record_id: int, profile: Profile) -> None:
        """Keeps a profile of a record's kernel; twice adds nothing. Raises UsageError if there is no such record."""
        with self._db.write() as connection:
            if connection.execute(sa.select(schema.record.c.id).where(schema.record.c.id == record_id)).scalar() is None:
                raise UsageError(f"{self.name} has no record {record_id}")
            put_profile(self._db, connection, record_id, profile)

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

    # ---- reading

    def row(self, record_id: int) -> RecordRow:
        """One record.

        Raises:
            UsageError: there is no record with this id.
            DamageError: it is damaged; the text names the column.
        """
        with self._db.read() as connection:
            row = connection.execute(queries.records().where(schema.record.c.id == record_id)).one_or_none()
        if row is None:
            raise UsageError(f"{self.name} has no record {record_id}; list them: schedsearch records list --db {self.name}")
        reader = self.reader(thorough=True)
        return reader.one("record", record_id, lambda: reader.record(row))

    def rows(
        self,
        workload: Workload | None = None,
        target: str | None = None,
        template: str | None = None,
        op: str | None = None,
        mode: str | None = None,
        run: str | None = None,
        outcomes: Collection[Outcome] | None = None,
        *,
        limit: int | None = None,
    ) -> list[RecordRow]:
        """The matching records, the newest first. None matches everything. Operators need not be installed.

        Args:
            limit: return at most this many, the newest.
        """
        query = queries.records().where(
            *queries.matching(workload=workload, target=target, template=template, op=op, mode=mode, run=run)
        )
        if outcomes is not None:
            query = query.where(schema.record.c.outcome.in_([str(outcome) for outcome in outcomes]))
        return self._read(query.order_by(schema.record.c.id.desc()).limit(limit))

    def records_after(self, record_id: int, *, run: str | None = None, limit: int | None = None) -> list[RecordRow]:
        """The records appended after a given one, the oldest first. Ask again with the last id to follow a live run.

            last = 0
            while rows := store.records_after(last, limit=1000):
                last = rows[-1].id

        Args:
            record_id: 0 for all.
            run: return only records of this run.
            limit: return at most this many, the oldest.
        """
        query = queries.records().where(*queries.matching(run=run), schema.record.c.id > record_id)
        return self._read(query.order_by(schema.record.c.id).limit(limit))

    def _read(self, query: sa.Select[Any]) -> list[RecordRow]:
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return list(self.reader().records(rows))

    def profiles(self, record_id: int) -> list[Profile]:
        """The profiles of a record's kernel, the oldest first."""
        query = queries.profiles().where(schema.profile.c.record_id == record_id)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return [profile for _, profile in self.reader().profiles(rows)]

    def best(self, workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> Record | None:
        """The promoted record of a task, or None."""
        found = next(self.bests(workload=workload, target=target_key, mode=mode), None)
        return found.record if found else None

    def bests(
        self, workload: Workload | None = None, target: str | None = None, op: str | None = None, mode: str | None = None
    ) -> Iterator[Best]:
        """Every matching promoted record, ordered by operator, workload and target."""
        best = schema.best.c
        wanted = (
            (best.workload_id, workload.id if workload else None),
            (best.target_key, target),
            (schema.workload.c.op, op),
            (best.mode, mode),
        )
        query = queries.bests().where(*[column == value for column, value in wanted if value is not None])
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        yield from self.reader().bests(rows)

    def code(self, best: Best) -> Artifact | None:
        """The stored code of a best; None if none is kept, or this machine does not vouch for it: then build it again.

        Raises:
            DatabaseError: it does not match its checksum, or its launch plan is not sound.
        """
        if best.artifact_sha256 is None or not best.vouched:
            return None
        return self._stored_code(best.artifact_sha256, require_signature=False)

    def artifact(self, sha256: str) -> Artifact | None:
        """Code that this machine compiled, by its digest. None if it was never stored or was pruned.

        Only `code` says that it is the right code for a task.

        Raises:
            UntrustedDatabaseError: another machine stored it.
            DatabaseError: it does not match its checksum.
        """
        return self._stored_code(sha256, require_signature=True)

    def _stored_code(self, sha256: str, *, require_signature: bool) -> Artifact | None:
        with self._db.read() as connection:
            row = connection.execute(queries.artifacts().where(schema.artifact.c.sha256 == sha256)).one_or_none()
        if row is None:
            return None
        if require_signature and not trust.is_ours(trust.Kind.ARTIFACT, sha256, row.signature):
            raise UntrustedDatabaseError(
                f"{self.path} holds machine code ({sha256[:12]}) that another machine stored; build its configuration here"
            )
        reader = self.reader()
        return reader.one("artifact", sha256, lambda: reader.stored_artifact(row))

    def history(
        self,
        workload: Workload | None = None,
        target: str | None = None,
        template: str | None = None,
        op: str | None = None,
        mode: str | None = None,
    ) -> list[Record]:
        """All matching records, including failures, in the order of their measurement.

        Raises:
            WorkloadError: a record has an operator that is not installed.
        """
        query = queries.records().where(
            *queries.matching(workload=workload, target=target, template=template, op=op, mode=mode)
        )
        return [row.record() for row in self._read(query.order_by(schema.record.c.started_at, schema.record.c.id))]

    def measured(
        self,
        workload: Workload,
        target_key: str,
        template: str,
        version: int,
        mode: str = COLD_GRAPH,
        toolchain: Mapping[str, str] | None = None,
    ) -> dict[Config, Record]:
        """The measurements that need not be repeated: config -> its latest record. Imported records are none of them.

        If a configuration has a time from outside of a final race, it is used, so that the times of a search compare with
        each other. A configuration that failed in its latest final race counts as failed.

        Args:
            workload, target_key, template, version, mode: the task and the template with its version.
            toolchain: use only records made with exactly these versions; None accepts any.
        """
        query = queries.records().where(
            *queries.matching(workload=workload, target=target_key, template=template, mode=mode),
            schema.record.c.template_version == version,
            queries.measured_here(),
        )
        if toolchain is not None:
            query = query.where(schema.toolchain.c.json == canonical_json(dict(toolchain)))
        found: dict[Config, Record] = {}
        for row in self._read(query.order_by(schema.record.c.started_at, schema.record.c.id)):
            earlier = found.get(row.config)
            if not (row.final_race and row.measurement.ok and earlier is not None and earlier.measurement.ok):
                found[row.config] = row.record()
        return found

    def last_race(
        self, workload: Workload, target_key: str, mode: str = COLD_GRAPH, toolchain: Mapping[str, str] | None = None
    ) -> list[Record]:
        """The records of the last final race of a task here, including failures, in the order of their measurement.

        Args:
            workload, target_key, mode: the task.
            toolchain: use only races held with exactly these versions; None accepts any.
        """
        record = schema.record.c
        conditions = [*queries.matching(workload=workload, target=target_key, mode=mode), record.final_race == 1]
        conditions.append(queries.measured_here())
        if toolchain is not None:
            conditions.append(schema.toolchain.c.json == canonical_json(dict(toolchain)))
        query = queries.records().where(*conditions)
        last = query.with_only_columns(record.run).order_by(record.id.desc()).limit(1).scalar_subquery()
        return [row.record() for row in self._read(query.where(record.run == last).order_by(record.id))]

    def tuned(self, op: str, template: str, version: int, mode: str = COLD_GRAPH) -> list[tuple[Workload, str]]:
        """The workloads of an operator, with targets, for which one version of a template has a valid record.

        It reads at most one such record each. It leaves out a workload if its schema is unknown to this schedsearch.
        """
        with self._db.read() as connection:
            rows = connection.execute(queries.tuned(op, template, version, mode)).all()
        return list(self.reader().workloads(rows))

    def evidence(
        self,
        workload: Workload,
        target_key: str,
        template: str,
        version: int,
        mode: str = COLD_GRAPH,
        *,
        limit: int,
        imported: bool = False,
    ) -> list[tuple[Config, float | None]]:
        """The results of one version of a template on a workload: (config, its fastest time or None).

        It reads only the records of this task, by index.

        Args:
            limit: a longer list is thinned, see `schedsearch.records.evidence.thinned`.
            imported: use only records that were not measured here; otherwise all.

        Returns:
            The fastest first, failures last.
        """
        query = queries.evidence(workload, target_key, template, version, mode, imported=imported)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return list(self.reader().evidence(thinned(rows, limit)))

    def columns(
        self, names: Sequence[str], *, after: int = 0, task: tuple[str, str, str] | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Some columns of many records, quickly: see `schedsearch.records.columns.read_columns`."""
        return read_columns(self._db, self.damage, names, after=after, task=task)

    def listing(
        self, wanted: Wanted, *, sort: str = "id", descending: bool = True, limit: int = 1000
    ) -> tuple[int, list[tuple[Any, ...]]]:
        """A page of a long list of records: see `schedsearch.records.columns.list_records`."""
        return list_records(self._db, self.damage, wanted, sort=sort, descending=descending, limit=limit)

    def plan(self, sha256: str) -> LaunchPlan | None:
        """The launch plan stored with some machine code, to look at; None if it is not stored.

        This needs no trust, because nothing runs; only `code` says what may run.

        Raises:
            DatabaseError: code or plan does not match its checksum.
        """
        found = self._stored_code(sha256, require_signature=False)
        return found.plan if found else None

    def stamp(self) -> tuple[Any, ...]:
        """A value that changes whenever records, runs or bests do. Asking for it is cheap: poll it to follow a database."""
        return read_stamp(self._db)

    def workloads(self) -> dict[str, tuple[str, str]]:
        """Every workload of the file that is sound: id -> (operator, JSON). Operators need not be installed."""
        query = sa.select(schema.workload.c.id, schema.workload.c.op, schema.workload.c.json.label("workload_json"))
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return dict(self.reader().stored_workloads(rows))

    def ranges(self, *, target: str | None = None) -> list[SizeTableRow]:
        """The kernels of ranges of sizes, of all targets or of one; `SizeTable.from_bytes` reads them."""
        with self._db.read() as connection:
            rows = connection.execute(queries.size_tables()).all()
        return [row for row in self.reader().size_tables(rows) if target in (None, row.target_key)]

    def range_of(self, of_range: WorkloadRange, target: str, mode: str = COLD_GRAPH) -> SizeTableRow | None:
        """The kernels that `compile` uses for a range: the narrowest table that covers it, if possible one that this
        machine vouches for; None without one.
        """
        able = [
            row
            for row in self.ranges(target=target)
            if (row.family, row.mode) == (of_range.family, mode) and row.low <= of_range.low and row.high >= of_range.high
        ]
        return min(able, key=lambda row: (not row.vouched, row.high - row.low, row.low), default=None)

    def runs(self) -> list[dict[str, Any]]:
        """Tuning runs in the order of their start: id, machine, started_at, finished_at, info, summary, records."""
        with self._db.read() as connection:
            rows = connection.execute(queries.runs()).all()
        return list(self.reader().runs(rows))

    def stats(self) -> dict[str, Any]:
        """Counts: records, outcomes (by name), workloads, targets, templates, runs, bests, ranges (of sizes that have
        kernels), artifacts, artifact_bytes."""
        with self._db.read() as connection:
            return queries.counts(connection)

    def health(self) -> dict[str, Any]:
        """The state of the file for `doctor`, and `problems` ([] if it is sound). It reads the whole file."""
        facts = self._db.health()
        found = list(map(str, self.find_damage()))
        if len(found) > _DAMAGE_SHOWN:
            found[_DAMAGE_SHOWN:] = [f"and {len(found) - _DAMAGE_SHOWN} more damaged rows"]
        facts["problems"] += found
        return {
            "path": str(self.path),
            "schema_version": int(self._meta["schema_version"]),
            "uuid": self.uuid,
            "created_here": self.created_here,
            **facts,
            **self.stats(),
        }

    def find_damage(self) -> list[Damage]:
        """All damaged rows of the file. It reads every row and compares records and code with their digests."""
        log = DamageLog()
        reader = Reader(self.path, log, thorough=True)
        with self._db.read() as connection:
            for read, query in (
                (reader.records, queries.records().order_by(schema.record.c.id)),
                (reader.bests, queries.bests()),
                (reader.runs, queries.runs()),
                (reader.profiles, queries.profiles()),
                (reader.artifacts, queries.artifacts()),
                (reader.size_tables, queries.size_tables()),
            ):
                for _ in read(connection.execute(query.execution_options(yield_per=_CHUNK))):
                    pass
        return list(log)
