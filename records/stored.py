"""What a record store holds, to read: records, bests and their code, runs, ranges of sizes, and the state of the file.

`store` opens a database and writes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from schedsearch.config import Config
from schedsearch.errors import UntrustedDatabaseError, UsageError
from schedsearch.identity import canonical_json
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import COLD_GRAPH, Outcome, Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import claims, queries, schema
from schedsearch.records.columns import Wanted, list_records, read_columns, read_stamp
from schedsearch.records.damage import Damage, DamageLog
from schedsearch.records.database import Database
from schedsearch.records.evidence import thinned
from schedsearch.records.location import Place
from schedsearch.records.reader import Reader
from schedsearch.records.rows import Best, RecordRow, label_of
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload, WorkloadRange

_CHUNK = 500  # rows read at a time from a whole table
_DAMAGE_SHOWN = 20


class Stored:
    """The content of an open database. Any thread may call the methods.

    Methods that return many rows leave out damaged ones and add them to `damage`.

    Attributes:
        damage: the damaged rows that were skipped so far.

    Raises (all methods):
        DatabaseError: the disk failed, or the file is damaged.
    """

    def __init__(self, database: Database, meta: Mapping[str, str]) -> None:
        self._db = database
        self._meta = meta
        self.damage = DamageLog()

    @property
    def name(self) -> str:
        """The database's name for messages."""
        return self._db.name

    @property
    def path(self) -> Place:
        """The file, or the URL of a database on a server."""
        return self._db.path

    @property
    def size_bytes(self) -> int:
        """What the database takes on the disk."""
        return self._db.size_bytes

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
        return claims.created_here(self._meta)

    def reader(self, *, thorough: bool = False) -> Reader:
        """Reads rows of this store, and adds the damaged ones to `damage`; for `exchange`."""
        return Reader(self.path, self.damage, thorough=thorough)

    def row(self, record_id: int) -> RecordRow:
        """One record.

        Raises:
            UsageError: there is no record with this id.
            DamageError: it is damaged; the text names the column.
        """
        row = next(iter(self._fetched(queries.records().where(schema.record.c.id == record_id))), None)
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
        named: str | None = None,
        order: Literal["newest", "fastest"] = "newest",
        limit: int | None = None,
    ) -> list[RecordRow]:
        """The matching records, the newest first. None matches everything. Operators need not be installed.

        Args:
            named: only workloads whose label contains this text, in any case of letters, or whose id begins with it.
            order: "fastest" puts those with the shortest time first, and those without one last.
            limit: return at most this many, the first in this order.
        """
        query = queries.records().where(
            *queries.matching(workload=workload, target=target, template=template, op=op, mode=mode, run=run)
        )
        if outcomes is not None:
            query = query.where(schema.record.c.outcome.in_([str(outcome) for outcome in outcomes]))
        if named is not None:
            query = query.where(schema.record.c.workload_id.in_(self._named(named)))
        if order == "fastest":
            query = query.order_by(schema.record.c.time_ns.is_(None), schema.record.c.time_ns)
        return self._read(query.order_by(schema.record.c.id.desc()).limit(limit))

    def _named(self, text: str) -> list[str]:
        """The ids of the workloads whose label contains a text, or that begin with it."""
        stored = self.workloads().items()
        return [
            each
            for each, (op, json) in stored
            if each.startswith(text) or text.casefold() in label_of(each, op, json).casefold()
        ]

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

    def records_of(self, record_ids: Collection[int]) -> list[RecordRow]:
        """Some records by their ids, in the order of appending. Ids without a record are left out.

        Args:
            record_ids: at most a few thousand; a database takes so many values in one statement.
        """
        return self._read(queries.records().where(schema.record.c.id.in_(record_ids)).order_by(schema.record.c.id))

    def _read(self, query: sa.Select[Any]) -> list[RecordRow]:
        return list(self.reader().records(self._fetched(query)))

    def _fetched(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """All rows of a query."""

        def fetch() -> Sequence[sa.Row[Any]]:
            with self._db.read() as connection:
                return connection.execute(query).all()

        return self._db.again(fetch)

    def profiles(self, record_id: int) -> list[Profile]:
        """The profiles of a record's kernel, the oldest first."""
        query = queries.profiles().where(schema.profile.c.record_id == record_id)
        rows = self._fetched(query)
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
        rows = self._fetched(query)
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
        row = next(iter(self._fetched(queries.artifacts().where(schema.artifact.c.sha256 == sha256))), None)
        if row is None:
            return None
        if require_signature and not claims.is_ours(claims.Kind.ARTIFACT, sha256, row.signature):
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
        rows = self._fetched(queries.tuned(op, template, version, mode))
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
        rows = self._fetched(query)
        return list(self.reader().evidence(thinned(rows, limit)))

    def columns(
        self, names: Sequence[str], *, after: int = 0, task: tuple[str, str, str] | None = None, run: str | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Some columns of many records, quickly: see `schedsearch.records.columns.read_columns`."""
        return read_columns(self._db, self.damage, names, after=after, task=task, run=run)

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
        rows = self._fetched(query)
        return dict(self.reader().stored_workloads(rows))

    def ranges(self, *, target: str | None = None) -> list[SizeTableRow]:
        """The kernels of ranges of sizes, of all targets or of one; `SizeTable.from_bytes` reads them."""
        rows = self._fetched(queries.size_tables())
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

    def runs(self) -> list[JsonObject]:
        """Tuning runs in the order of their start: id, machine, started_at, finished_at, info, summary, records."""
        rows = self._fetched(queries.runs())
        return list(self.reader().runs(rows))

    def stats(self) -> JsonObject:
        """Counts: records, outcomes (by name), workloads, targets, templates, runs, bests, ranges (of sizes that have
        kernels), artifacts, artifact_bytes."""
        with self._db.read() as connection:
            return queries.counts(connection)

    def health(self) -> JsonObject:
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
