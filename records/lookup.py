"""How deployment reads the best kernels. Standard library only: no SQLAlchemy, no NumPy.

It reads a live database (also while a tuning run writes to it) or a deployment file. It finds a row by its primary key and
remembers it. It does not remember a miss, so it finds a later best.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from schedsearch.closing import Closing
from schedsearch.errors import DatabaseError
from schedsearch.records import claims, damage, dbfile
from schedsearch.records.fields import ARTIFACT, BEST, RECORD, SCHEMA_VERSION, WORKLOAD, Field
from schedsearch.records.location import require_file

T = TypeVar("T")

_BUSY_TIMEOUT_S = 5.0  # readers wait only while a file is created, recovered or rebuilt


class LookupRow(NamedTuple):
    """The best record of one (workload, target, mode). Artifact, plan and arch are None if no code is kept."""

    workload_id: str
    target_key: str
    mode: str
    record_id: int
    template: str
    template_version: int
    config_json: str
    time_ns: float
    verified: bool
    artifact_sha256: str | None
    plan_json: str | None
    arch: str | None
    signature: str

    @property
    def claim(self) -> claims.Claim:
        """What the row says, as its signature covers it."""
        task = self.workload_id, self.target_key, self.mode
        candidate = self.template, self.template_version, self.config_json
        return claims.Claim(*task, *candidate, self.time_ns, self.verified, self.artifact_sha256)

    @property
    def vouched(self) -> bool:
        """Whether this machine measured and verified exactly this, or its user marked it as trusted."""
        return claims.vouches(self.claim, self.signature)


class NeighbourRow(NamedTuple):
    """The best record of some workload, to choose a configuration from."""

    workload_json: str
    target_key: str
    template: str
    template_version: int
    config_json: str
    time_ns: float


class ImportedRow(NamedTuple):
    """The fastest imported record of one configuration of a task: somebody else's measurement."""

    record_id: int
    template: str
    template_version: int
    config_json: str
    source: str
    time_ns: float


# {signature} is the column, or '' for a file that is older than it.
_ROW = """SELECT b.workload_id, b.target_key, b.mode, b.record_id, b.template, b.template_version, b.config, b.time_ns,
    b.verified, a.sha256, a.plan, a.arch, {signature} FROM best b LEFT JOIN artifact a ON a.sha256 = b.artifact_sha256 """
_EXACT = _ROW + "WHERE b.workload_id = ? AND b.target_key = ? AND b.mode = ?"
_SAME_WORKLOAD = _ROW + "WHERE b.workload_id = ? AND b.mode = ? AND a.sha256 IS NOT NULL ORDER BY b.time_ns, b.target_key"
_WITH_CODE = _ROW + "WHERE a.sha256 IS NOT NULL"
_NEAREST = """SELECT w.json, b.target_key, b.template, b.template_version, b.config, b.time_ns, w.id
    FROM workload w JOIN best b ON b.workload_id = w.id
    WHERE w.op = ? AND b.mode = ? AND substr(b.target_key, 1, ?) = ? ORDER BY b.workload_id, b.time_ns"""
# SQLite takes the bare columns from the row that has the minimum.
_IMPORTED = """SELECT r.id, r.template, r.template_version, r.config, r.source, min(r.time_ns) FROM record r
    WHERE r.workload_id = ?1 AND r.target_key = ?2 AND r.mode = ?3 AND r.outcome = 'ok'
    AND r.source <> '' AND {signature} = '' AND NOT EXISTS (
        SELECT 1 FROM record f WHERE f.workload_id = ?1 AND f.target_key = ?2 AND f.mode = ?3 AND f.template = r.template
        AND f.template_version = r.template_version AND f.config = r.config AND f.outcome <> 'ok' AND f.source = '')
    GROUP BY r.template, r.template_version, r.config ORDER BY min(r.time_ns), r.id LIMIT ?4"""


# What a file of any version has.
_TABLES = {
    each.name: [field.name for field in each.fields if field.since == 1] for each in (WORKLOAD, ARTIFACT, BEST, RECORD)
}


class Lookup(Closing):
    """An open database file. Any thread may call its methods. Do not share it across a fork: each process opens its own.

    Args:
        path: a database of schedsearch, or a file of `records export --deploy`.

    Attributes:
        damage: the damaged rows that methods left out.

    Raises:
        DatabaseError: no such file, no permission, truncated, damaged, or not a database of schedsearch.
        SchemaVersionError: a newer schedsearch wrote it.
        UsageError: it is a database of a server.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = require_file(path).absolute()
        self._lock = threading.Lock()
        self._closed = False
        self._found: dict[tuple[str, str, str], LookupRow] = {}
        self.damage = damage.DamageLog()
        self._connection = dbfile.connect(self.path, readonly=True, busy_timeout_s=_BUSY_TIMEOUT_S)
        try:
            self._meta = self._read_meta()
            self._signed = int(self._meta["schema_version"]) >= BEST["signature"].since
        except BaseException:
            self.close()
            raise

    def _read_meta(self) -> dict[str, str]:
        if not self._all("SELECT 1 FROM main.sqlite_schema WHERE name = 'meta'"):
            raise dbfile.foreign(self.path)
        self._run(lambda connection: dbfile.check_tables(connection, self.path, {"meta": ("key", "value")}))
        meta = dbfile.read_meta(self.path, self._all("SELECT key, value FROM meta"), ("uuid", "kind", "signature"))
        tables = {name: columns for name, columns in _TABLES.items() if name != "record" or meta["kind"] == "store"}
        self._run(lambda connection: dbfile.check_tables(connection, self.path, tables))
        return meta

    @property
    def meta(self) -> Mapping[str, str]:
        """Table meta."""
        return self._meta

    @property
    def uuid(self) -> str:
        return self._meta["uuid"]

    @property
    def kind(self) -> str:
        """ "store", or "deploy" for a file of `records export --deploy`."""
        return self._meta["kind"]

    @property
    def takes_records(self) -> bool:
        """Whether it is a store that can take records without becoming one of a newer schema."""
        return self.kind == "store" and int(self._meta["schema_version"]) == SCHEMA_VERSION

    @property
    def created_here(self) -> bool:
        """Whether this machine created the file. What it holds is judged row by row."""
        return claims.created_here(self._meta)

    def exact(self, workload_id: str, target_key: str, mode: str) -> LookupRow | None:
        """The best record of exactly this task, or None. Raises DamageError if its row is damaged."""
        key = (workload_id, target_key, mode)
        found = self._found.get(key)
        if found is None:
            rows = self._all(self._best(_EXACT), key)
            if not rows:
                return None
            found = self._found[key] = self._one("best", _task(rows[0]), lambda: _row(rows[0]))
        return found

    def same_architecture(self, workload_id: str, mode: str) -> list[LookupRow]:
        """The workload's best records with code on any target, fastest first. The caller checks `arch`."""
        return list(self._sound("best", self._all(self._best(_SAME_WORKLOAD), (workload_id, mode)), _row, _task))

    def with_code(self) -> list[LookupRow]:
        """All best records that have code."""
        return list(self._sound("best", self._all(self._best(_WITH_CODE)), _row, _task))

    def bests(self) -> list[tuple[LookupRow, str, str]]:
        """All best records, with the operator and the JSON of their workloads."""
        workloads = {each: (op, text) for each, op, text in self._all("SELECT id, op, json FROM workload")}
        rows = self._sound("best", self._all(self._best(_ROW)), _row, _task)
        return [(row, *workloads[row.workload_id]) for row in rows if row.workload_id in workloads]

    def nearest(self, op: str, mode: str, target_prefix: str = "") -> list[NeighbourRow]:
        """The best records of all workloads of an operator, on targets whose key begins with `target_prefix` ('cuda:')."""
        rows = self._all(_NEAREST, (op, mode, len(target_prefix), target_prefix))
        return list(self._sound("best", rows, _neighbour, lambda row: f"{row[-1]}, {row[1]}, {mode}"))

    def imported(self, workload_id: str, target_key: str, mode: str, limit: int) -> list[ImportedRow]:
        """The fastest imported records of exactly this task, one per configuration: nothing was verified here.

        Configurations that failed here are left out. A deployment file has none.
        """
        if self.kind != "store":
            return []
        query = _IMPORTED.format(signature="r.signature" if self._signed else "''")
        rows = self._all(query, (workload_id, target_key, mode, limit))
        return list(self._sound("record", rows, _imported, lambda row: row[0]))

    def code(self, row: LookupRow) -> bytes:
        """The machine code of a best record.

        Raises:
            UntrustedDatabaseError: this machine does not vouch for the row (`LookupRow.vouched`).
            DatabaseError: the code is not in the file, or does not match its checksum.
        """
        claims.require(row.claim, row.signature, self.path, kind=self.kind)
        found = self._all("SELECT code FROM artifact WHERE sha256 = ?", (row.artifact_sha256,))
        if not found or row.artifact_sha256 is None or row.plan_json is None:
            raise DatabaseError(
                f"{self.path} has no artifact {row.artifact_sha256}; it was pruned: look up the workload again"
            )
        code = self._one("artifact", row.artifact_sha256, lambda: damage.blob("code", found[0][0]))
        claims.verify_digest(self.path, row.artifact_sha256, row.plan_json, code)
        return code

    def _best(self, query: str) -> str:
        return query.format(signature="b.signature" if self._signed else "''")

    def version(self) -> int:
        """A number that changes when another connection, in any process, has committed to the database."""
        return int(self._all("PRAGMA data_version")[0][0])

    def refresh(self) -> None:
        """Forgets the remembered rows, so that `Lookup` sees later bests of a live database."""
        self._found.clear()

    def close(self) -> None:
        """Closes the file, after what other threads are asking. Every later question raises DatabaseError."""
        with self._lock:
            self._closed = True
            self._connection.close()

    def _all(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        return self._run(lambda connection: connection.execute(query, values).fetchall())

    def _run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._lock:
                if self._closed:
                    raise DatabaseError(f"{self.path} was closed; open it again")
                return action(self._connection)
        except dbfile.ERRORS as error:
            raise dbfile.explain(error, self.path) or error from error

    def _sound(self, table: str, rows: list[Any], read: Callable[[Any], T], name: Callable[[Any], object]) -> Iterator[T]:
        return damage.sound(self.damage, self.path, table, rows, read, name)

    def _one(self, table: str, name: object, read: Callable[[], T]) -> T:
        """What `read` returns. Raises DamageError if the row is damaged."""
        try:
            return read()
        except damage.UNREADABLE as error:
            raise damage.DamageError(damage.damage(self.path, table, name, error)) from error


_KERNEL = BEST.select(("template", "template_version", "config"))
_OF_ROW = [
    *BEST.select(("workload_id", "target_key", "mode", "record_id")), *_KERNEL, *BEST.select(("time_ns", "verified")),
    *(field.optional() for field in ARTIFACT.select(("sha256", "plan", "arch"))), BEST["signature"],
]  # fmt: skip
_OF_NEIGHBOUR = [WORKLOAD["json"], BEST["target_key"], *_KERNEL, BEST["time_ns"]]
_OF_IMPORTED = [BEST["record_id"], *_KERNEL, RECORD["source"], BEST["time_ns"]]


def _check(fields: Iterable[Field], row: Iterable[object]) -> None:
    """Raises DamagedRow if a column is damaged."""
    for field, value in zip(fields, row):
        field.read(field.name, value)


def _row(row: tuple[object, ...]) -> LookupRow:
    _check(_OF_ROW, row)
    found = LookupRow._make(row)
    return found._replace(verified=bool(found.verified))


def _neighbour(row: tuple[object, ...]) -> NeighbourRow:
    *values, workload_id = row
    _check(_OF_NEIGHBOUR, values)
    found = NeighbourRow._make(values)
    if hashlib.sha256(found.workload_json.encode()).hexdigest() != workload_id:
        raise damage.DamagedRow("json does not match its id, which is its sha256", "workload", str(workload_id))
    return found


def _imported(row: tuple[object, ...]) -> ImportedRow:
    _check(_OF_IMPORTED, row)
    return ImportedRow._make(row)


def _task(row: tuple[object, ...]) -> str:
    """The primary key of a row of table best, for messages."""
    return ", ".join(ascii(value)[:40].strip("'") for value in row[:3])
