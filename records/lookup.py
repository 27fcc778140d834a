"""How deployment reads the best kernels. Standard library only: no SQLAlchemy, no NumPy.

It reads a live database (also while a tuning run writes to it) or a deployment file. It finds a row by its primary key and
remembers it. It does not remember a miss, so it finds a later best.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from schedsearch.errors import DatabaseError
from schedsearch.records import dbfile, trust

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


class NeighbourRow(NamedTuple):
    """The best record of some workload, to choose a configuration from."""

    workload_json: str
    target_key: str
    template: str
    template_version: int
    config_json: str
    time_ns: float


_ROW = """SELECT b.workload_id, b.target_key, b.mode, b.record_id, b.template, b.template_version, b.config, b.time_ns,
    b.verified, a.sha256, a.plan, a.arch FROM best b LEFT JOIN artifact a ON a.sha256 = b.artifact_sha256 """
_EXACT = _ROW + "WHERE b.workload_id = ? AND b.target_key = ? AND b.mode = ?"
_SAME_WORKLOAD = _ROW + "WHERE b.workload_id = ? AND b.mode = ? AND a.sha256 IS NOT NULL ORDER BY b.time_ns, b.target_key"
_NEAREST = """SELECT w.json, b.target_key, b.template, b.template_version, b.config, b.time_ns
    FROM workload w JOIN best b ON b.workload_id = w.id
    WHERE w.op = ? AND b.mode = ? AND substr(b.target_key, 1, ?) = ? ORDER BY b.workload_id, b.time_ns"""


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
    def trusted(self) -> bool:
        """Whether this machine created the file or its user marked it as trusted. Code is judged piece by piece."""
        return trust.is_ours(self.uuid, self._meta["signature"]) or trust.is_marked(self.path, self.uuid)

    def exact(self, workload_id: str, target_key: str, mode: str) -> LookupRow | None:
        """The best record of exactly this task, or None."""
        key = (workload_id, target_key, mode)
        found = self._found.get(key)
        if found is None:
            rows = self._all(_EXACT, key)
            if not rows:
                return None
            found = self._found[key] = _row(rows[0])
        return found

    def same_architecture(self, workload_id: str, mode: str) -> list[LookupRow]:
        """The workload's best records with code on any target, fastest first. The caller checks `arch`."""
        return [_row(row) for row in self._all(_SAME_WORKLOAD, (workload_id, mode))]

    def nearest(self, op: str, mode: str, target_prefix: str = "") -> list[NeighbourRow]:
        """The best records of all workloads of an operator, on targets whose key begins with `target_prefix` ('cuda:')."""
        return [NeighbourRow._make(row) for row in self._all(_NEAREST, (op, mode, len(target_prefix), target_prefix))]

    def code(self, sha256: str) -> bytes:
        """The machine code of an artifact.

        Raises:
            UntrustedDatabaseError: another machine wrote it and the file is not marked as trusted here.
            DatabaseError: it is not in the file, or does not match its checksum.
        """
        rows = self._all("SELECT plan, signature, code FROM artifact WHERE sha256 = ?", (sha256,))
        if not rows:
            raise DatabaseError(f"{self.path} has no artifact {sha256}; it was pruned: look up the workload again")
        plan_json, signature, code = rows[0]
        trust.require(self.path, self.uuid, sha256, signature)
        trust.verify_digest(self.path, sha256, plan_json, code)
        return bytes(code)

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


def _row(row: tuple[Any, ...]) -> LookupRow:
    return LookupRow._make(row)._replace(verified=bool(row[8]))
