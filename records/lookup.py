"""How deployment reads the best kernels. Standard library only: no SQLAlchemy, no NumPy.

It reads a live database (also while a tuning run writes to it) or a deployment file. It finds a row by its primary key and
remembers it. It does not remember a miss, so it finds a later best.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from schedsearch.errors import DatabaseError
from schedsearch.records import dbfile, trust

_SIGNED_SINCE = 4  # the schema version that added signatures of bests and records
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
    def claim(self) -> trust.Claim:
        """What the row says, as its signature covers it."""
        task = self.workload_id, self.target_key, self.mode
        candidate = self.template, self.template_version, self.config_json
        return trust.Claim(*task, *candidate, self.time_ns, self.verified, self.artifact_sha256)

    @property
    def vouched(self) -> bool:
        """Whether this machine measured and verified exactly this, or its user marked it as trusted."""
        return trust.vouches(self.claim, self.signature)


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


class Lookup:
    """An open database file. Any thread may call its methods. Do not share it across a fork: each process opens its own.

    Args:
        path: a database of schedsearch, or a file of `records export --deploy`.

    Raises:
        DatabaseError: no such file, no permission, truncated, damaged, or not a database of schedsearch.
        SchemaVersionError: a newer schedsearch wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str, str], LookupRow] = {}
        self._connection = dbfile.connect(self.path, readonly=True, busy_timeout_s=_BUSY_TIMEOUT_S)
        try:
            self._meta = self._read_meta()
            self._signed = int(self._meta["schema_version"]) >= _SIGNED_SINCE
        except BaseException:
            self.close()
            raise

    def _read_meta(self) -> dict[str, str]:
        if not self._all("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'meta'"):
            raise dbfile.foreign(self.path)
        meta = dict(self._all("SELECT key, value FROM meta"))
        if "schema_version" not in meta:
            raise dbfile.foreign(self.path)
        dbfile.check_version(self.path, int(meta["schema_version"]))
        return meta

    @property
    def uuid(self) -> str:
        return self._meta["uuid"]

    @property
    def kind(self) -> str:
        """ "store", or "deploy" for a file of `records export --deploy`."""
        return self._meta["kind"]

    @property
    def created_here(self) -> bool:
        """Whether this machine created the file. What it holds is judged row by row."""
        return trust.created_here(self._meta)

    def exact(self, workload_id: str, target_key: str, mode: str) -> LookupRow | None:
        """The best record of exactly this task, or None."""
        key = (workload_id, target_key, mode)
        found = self._found.get(key)
        if found is None:
            rows = self._all(self._best(_EXACT), key)
            if not rows:
                return None
            found = self._found[key] = _row(rows[0])
        return found

    def same_architecture(self, workload_id: str, mode: str) -> list[LookupRow]:
        """The workload's best records with code on any target, fastest first. The caller checks `arch`."""
        return [_row(row) for row in self._all(self._best(_SAME_WORKLOAD), (workload_id, mode))]

    def with_code(self) -> list[LookupRow]:
        """All best records that have code."""
        return [_row(row) for row in self._all(self._best(_WITH_CODE))]

    def nearest(self, op: str, mode: str, target_prefix: str = "") -> list[NeighbourRow]:
        """The best records of all workloads of an operator, on targets whose key begins with `target_prefix` ('cuda:')."""
        rows = self._all(_NEAREST, (op, mode, len(target_prefix), target_prefix))
        return [NeighbourRow._make(row[:-1]) for row in rows if _is_digest(row[-1], row[0])]

    def imported(self, workload_id: str, target_key: str, mode: str, limit: int) -> list[ImportedRow]:
        """The fastest imported records of exactly this task, one per configuration: nothing was verified here.

        Configurations that failed here are left out. A deployment file has none.
        """
        if self.kind != "store":
            return []
        query = _IMPORTED.format(signature="r.signature" if self._signed else "''")
        return [ImportedRow._make(row) for row in self._all(query, (workload_id, target_key, mode, limit))]

    def code(self, row: LookupRow) -> bytes:
        """The machine code of a best record.

        Raises:
            UntrustedDatabaseError: this machine does not vouch for the row (`LookupRow.vouched`).
            DatabaseError: the code is not in the file, or does not match its checksum.
        """
        trust.require(row.claim, row.signature, self.path, kind=self.kind)
        found = self._all("SELECT code FROM artifact WHERE sha256 = ?", (row.artifact_sha256,))
        if not found or row.artifact_sha256 is None or row.plan_json is None:
            raise DatabaseError(
                f"{self.path} has no artifact {row.artifact_sha256}; it was pruned: look up the workload again"
            )
        code = bytes(found[0][0])
        trust.verify_digest(self.path, row.artifact_sha256, row.plan_json, code)
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
        self._connection.close()

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _all(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise dbfile.explain(error, self.path) or error from error


def _is_digest(identity: str, text: str) -> bool:
    return hashlib.sha256(str(text).encode(errors="replace")).hexdigest() == identity


def _row(row: tuple[Any, ...]) -> LookupRow:
    return LookupRow._make(row)._replace(verified=bool(row[8]))
