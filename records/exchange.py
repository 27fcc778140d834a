"""Records in and out of a store: JSON lines, other databases, and files for deployment.

An exchange file has one JSON object per line, each with a `kind`:

    {"kind": "header", "format": 3, "uuid": ...}
    {"kind": "run", "id": ..., "machine": ..., "started_at": ..., "finished_at": ..., "info": {...}, "summary": {...}}
    {"kind": "artifact", "sha256": ..., "plan": {...}, "code": <base64>, "signature": ...}     only with artifacts=True
    {"kind": "record", ...}                                                                    see `rows.to_json`
    {"kind": "profile", "content_id": ..., "profile": {...}}                                   see `Profile.to_json`
    {"kind": "best", "content_id": ..., "verified": ..., "artifact": ..., "promoted_at": ...}

The file is complete: after an export and an import a store is the same, except for code that is not trusted. Code enters a
store only if this machine wrote it or its origin is trusted; other code is rebuilt from the configuration.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import sqlalchemy as sa

from schedsearch.errors import DatabaseError, NoRecordError, SchemaVersionError, UsageError
from schedsearch.identity import canonical_json
from schedsearch.measurement import Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import dbfile, rows, schema
from schedsearch.records import trust as trust_marks
from schedsearch.records.formats.recording import Place, parse_json, read_bytes
from schedsearch.records.lookup import Lookup
from schedsearch.records.output import new_file, temporary_beside
from schedsearch.records.sqlite import SqliteDatabase, new_meta
from schedsearch.records.store import Store
from schedsearch.records.trust import trust
from schedsearch.records.writes import put_artifact, put_profile, set_best
from schedsearch.workload import Workload

__all__ = ["Report", "add_records", "export_deploy", "export_jsonl", "import_jsonl", "merge", "trust"]

FORMAT = 3  # format 2 has no model, anchor, host and device_uuid
_MAX_PROBLEMS = 10
_CHUNK = 2000  # rows per statement
_RUN_FIELDS = ("id", "machine", "started_at", "finished_at")


@dataclass
class Report:
    """What an import or merge did. `known` counts records that were there already, `dropped` untrusted artifacts."""

    records_added: int = 0
    records_known: int = 0
    runs_added: int = 0
    profiles_added: int = 0
    bests_changed: int = 0
    artifacts_added: int = 0
    artifacts_dropped: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def export_jsonl(store: Store, destination: str | Path | IO[str], *, artifacts: bool = False) -> int:
    """Writes everything in a store as JSON lines. The file appears under its name only when it is complete. It is a gzip if
    the name ends with .gz.

    Args:
        store: what to export.
        destination: a path, or a text stream.
        artifacts: whether to include machine code.

    Returns:
        The number of records.

    Raises:
        UsageError: the path cannot be written.
    """
    if not isinstance(destination, str | Path):
        return _write_lines(store, destination, artifacts)
    packed = Path(destination).suffix == ".gz"
    with new_file(Path(destination)) as temporary, temporary.open("wb") as raw:
        stream = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if packed else raw
        with io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8") as file:
            return _write_lines(store, file, artifacts)


def _write_lines(store: Store, file: IO[str], artifacts: bool) -> int:
    records = 0

    def write(kind: str, values: Mapping[str, Any]) -> None:
        file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")

    write("header", {"format": FORMAT, "uuid": store.uuid, "exported_at": time.time()})
    with store.database.read() as connection:
        for row in connection.execute(sa.select(schema.run).order_by(schema.run.c.started_at)).mappings():
            summary = json.loads(row["summary"]) if row["summary"] else None
            write("run", {**row, "info": json.loads(row["info"]), "summary": summary})
        if artifacts:
            for row in connection.execute(sa.select(schema.artifact)).mappings():
                code = base64.b64encode(row["code"]).decode()
                write(
                    "artifact",
                    {"sha256": row["sha256"], "plan": row["plan"], "code": code, "signature": row["signature"]},
                )
        query = rows.stored().order_by(schema.record.c.id).execution_options(yield_per=_CHUNK)
        for row in connection.execute(query).mappings():
            write("record", rows.to_json(dict(row)))
            records += 1
        for row in connection.execute(_profiles()).mappings():
            write("profile", {"content_id": row["content_id"], "profile": json.loads(row["json"])})
        for row in connection.execute(_bests()).mappings():
            write(
                "best",
                {
                    "content_id": row["content_id"],
                    "verified": bool(row["verified"]),
                    "artifact": row["best_sha256"],
                    "promoted_at": row["promoted_at"],
                },
            )
    return records


def import_jsonl(store: Store, path: str | Path, *, trusted: bool = False) -> Report:
    """Adds the records of a JSON-lines file: all of them, or nothing if a line is wrong. A second import adds nothing.

    Args:
        store: receives the records.
        path: a file of `export_jsonl`, gzip or not.
        trusted: whether to accept machine code that another machine wrote.

    Raises:
        UsageError: the file cannot be read, or lines are wrong; it names each line as file:line with the mistake.
        SchemaVersionError: the file has a newer format.
    """
    return import_lines(store, read_bytes(path), source=str(path), trusted=trusted)


def import_lines(store: Store, data: bytes, *, source: str, trusted: bool = False) -> Report:
    """Like `import_jsonl`, for the content of the file `source`."""
    problems: list[str] = []
    with store.database.write() as connection:
        importer = _Importer(store, connection, source=source, trusted=trusted)
        for number, line in enumerate(io.BytesIO(data), 1):
            try:
                importer.line(number, line)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                at = f"{source}:{number}: "
                problems.append(at + reason(error).removeprefix(at))
                if len(problems) == _MAX_PROBLEMS:
                    problems.append("... (later lines were not looked at)")
                    break
        if not problems:
            importer.finish()
            if not importer.header:
                problems.append(f"{source}: empty; give a file of: schedsearch records export")
        if problems:
            raise UsageError("nothing was imported; correct or remove these lines: " + "; ".join(problems))
    return importer.report


def add_records(store: Store, records: Iterable[Record], *, source: str) -> Report:
    """Adds records from any other origin: all of them or none. Adding them twice adds nothing.

    Args:
        store: receives the records.
        records: none of them becomes a best.
        source: their origin, for those that do not name one.

    Raises:
        ValueError: a number in a record is not finite.
    """
    with store.database.write() as connection:
        importer = _Importer(store, connection, source=source, trusted=False)
        for record in records:
            importer.record(rows.to_row(record), record.workload.op)
        importer.finish()
    return importer.report


def reason(error: Exception) -> str:
    """Why a JSON object could not be turned into a record."""
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing"
    if isinstance(error, TypeError | AttributeError):
        return f"a field is of the wrong kind: {error}"
    return str(error)


def merge(store: Store, sources: Sequence[str | Path]) -> Report:
    """Adds the records of other databases. Each source is added as a whole or not at all. A second merge adds nothing.

    A best of a source replaces ours if it is faster (`writes.set_best`). Code comes along if this machine wrote it or the
    source is trusted.

    Raises:
        UsageError: a source is the store itself.
        DatabaseError: a source cannot be read; the sources before it stay merged.
    """
    report = Report()
    for source in sources:
        with Store.open(source, create=False, readonly=True) as other:
            if other.path.resolve() == store.path.resolve():
                raise UsageError(f"{source} cannot be merged into itself; give another database")
            report += _merge_one(store, other, str(source))
    return report


def _merge_one(store: Store, other: Store, source: str) -> Report:
    trusted = trust_marks.is_marked(other.path, other.uuid)
    with other.database.read() as reading, store.database.write() as writing:
        importer = _Importer(store, writing, source=source, trusted=trusted)
        for row in reading.execute(sa.select(schema.run)).mappings():
            importer.run(dict(row))
        for row in reading.execute(sa.select(schema.artifact).execution_options(yield_per=16)).mappings():
            importer.artifact(row["sha256"], row["plan"], row["code"], row["signature"])
        query = rows.stored().add_columns(schema.workload.c.op).order_by(schema.record.c.id)
        for row in reading.execute(query.execution_options(yield_per=_CHUNK)).mappings():
            values = dict(row)
            del values["id"]
            importer.record(values, values.pop("op"))
        for row in reading.execute(_profiles()).mappings():
            importer.profile(row["content_id"], row["json"])
        for row in reading.execute(_bests()).mappings():
            importer.best(row["content_id"], bool(row["verified"]), row["best_sha256"], row["promoted_at"])
        importer.finish()
    return importer.report


def _profiles() -> sa.Select[Any]:
    profile, record = schema.profile, schema.record
    query = sa.select(record.c.content_id, profile.c.json).join(record, record.c.id == profile.c.record_id)
    return query.order_by(profile.c.id)


def _bests() -> sa.Select[Any]:
    best, record = schema.best, schema.record
    return (
        sa.select(record.c.content_id, best.c.verified, best.c.artifact_sha256.label("best_sha256"), best.c.promoted_at)
        .join(record, record.c.id == best.c.record_id)
        .order_by(best.c.workload_id, best.c.target_key, best.c.mode)
    )


class _Importer:
    """Adds rows from elsewhere, inside one writing transaction."""

    def __init__(self, store: Store, connection: sa.Connection, *, source: str, trusted: bool) -> None:
        self.report = Report()
        self.header = False
        self._db = store.database
        self._connection = connection
        self._source = source
        self._trusted = trusted
        self._workloads: dict[str, dict[str, str]] = {}
        self._toolchains: dict[str, dict[str, str]] = {}
        self._records: list[dict[str, Any]] = []
        self._profiles: list[tuple[str, Profile]] = []
        self._bests: list[tuple[str, bool, str | None, float]] = []
        self._seen = 0
        self._records_before = self._count(schema.record)
        self._artifacts_before = self._count(schema.artifact)

    def line(self, number: int, text: bytes) -> None:
        """Adds one line of an exchange file. If it is wrong, any exception may come; `import_jsonl` then names the line."""
        place = Place(self._source).line(number)
        data = place.object(parse_json(text, place))
        kind = data.pop("kind")
        if number == 1:
            if kind != "header":
                raise ValueError(f"the header is missing, got kind {kind!r}; give a file of: schedsearch records export")
            if int(data["format"]) > FORMAT:
                raise SchemaVersionError(
                    f"{self._source} has format {data['format']}, this schedsearch knows up to {FORMAT}; upgrade schedsearch"
                )
            self.header = True
        elif kind == "run":
            summary = None if data["summary"] is None else canonical_json(data["summary"])
            self.run(
                {**{name: data[name] for name in _RUN_FIELDS}, "info": canonical_json(data["info"]), "summary": summary}
            )
        elif kind == "artifact":
            code = base64.b64decode(data["code"], validate=True)
            self.artifact(str(data["sha256"]), str(data["plan"]), code, str(data["signature"]))
        elif kind == "record":
            record = rows.from_json(data)
            self.record(rows.to_row(record), record.workload.op)
        elif kind == "profile":
            self.profile(str(data["content_id"]), json.dumps(data["profile"]))
        elif kind == "best":
            artifact = None if data["artifact"] is None else str(data["artifact"])
            self.best(str(data["content_id"]), bool(data["verified"]), artifact, float(data["promoted_at"]))
        else:
            raise ValueError(f"unknown kind {kind!r}; allowed: header (first line), run, artifact, record, profile, best")

    def run(self, row: dict[str, Any]) -> None:
        run = schema.run
        known = self._connection.execute(sa.select(run.c.finished_at).where(run.c.id == row["id"])).one_or_none()
        if known is None:
            self._connection.execute(sa.insert(run), row)
            self.report.runs_added += 1
        elif known.finished_at is None:
            self._connection.execute(sa.update(run).where(run.c.id == row["id"]).values(row))

    def artifact(self, sha256: str, plan_json: str, code: bytes, signature: str) -> None:
        if self._trusted or trust_marks.is_ours(sha256, signature):
            trust_marks.verify_digest(Path(self._source), sha256, plan_json, code)
            put_artifact(self._db, self._connection, sha256, plan_json, code)
        else:
            self.report.artifacts_dropped += 1

    def record(self, row: dict[str, Any], op: str) -> None:
        workload_json, toolchain_json = row.pop("workload_json"), row.pop("toolchain_json")
        self._workloads[row["workload_id"]] = {"id": row["workload_id"], "op": op, "json": workload_json}
        self._toolchains[row["toolchain_id"]] = {"id": row["toolchain_id"], "json": toolchain_json}
        self._records.append({**row, "source": row["source"] or self._source})
        self._seen += 1
        if len(self._records) >= _CHUNK:
            self._flush()

    def profile(self, content_id: str, text: str) -> None:
        self._profiles.append((content_id, Profile.from_json(text)))

    def best(self, content_id: str, verified: bool, artifact_sha256: str | None, promoted_at: float) -> None:
        self._bests.append((content_id, verified, artifact_sha256, promoted_at))

    def finish(self) -> None:
        """Writes the outstanding rows, then profiles and bests, which refer to records and artifacts."""
        self._flush()
        for content_id, profile in self._profiles:
            record_id = self._connection.execute(
                sa.select(schema.record.c.id).where(schema.record.c.content_id == content_id)
            ).scalar()
            if record_id is None:
                raise UsageError(f"{self._source} has a profile of a record {content_id[:12]} that it does not hold")
            self.report.profiles_added += put_profile(self._db, self._connection, record_id, profile)
        for best in self._bests:
            self._promote(*best)
        self.report.records_added = self._count(schema.record) - self._records_before
        self.report.records_known = self._seen - self.report.records_added
        self.report.artifacts_added = self._count(schema.artifact) - self._artifacts_before

    def _flush(self) -> None:
        for table, values in (
            (schema.workload, list(self._workloads.values())),
            (schema.toolchain, list(self._toolchains.values())),
            (schema.record, self._records),
        ):
            if values:
                self._connection.execute(self._db.insert(table).on_conflict_do_nothing(), values)
        self._workloads, self._toolchains, self._records = {}, {}, []

    def _promote(self, content_id: str, verified: bool, artifact_sha256: str | None, promoted_at: float) -> None:
        """Takes over a best if it is faster than ours (see `writes.set_best`), or if it has code and ours has none."""
        record = schema.record
        row = self._connection.execute(sa.select(record).where(record.c.content_id == content_id)).one_or_none()
        if row is None or row.time_ns is None:
            raise UsageError(f"{self._source} names a best record {content_id[:12]} that it does not hold, or that failed")
        stored = sa.select(schema.artifact.c.sha256).where(schema.artifact.c.sha256 == artifact_sha256)
        kept_sha256 = self._connection.execute(stored).scalar()
        self.report.bests_changed += set_best(
            self._db, self._connection, row, kept_sha256, verified=verified, promoted_at=promoted_at, if_faster=True
        )

    def _count(self, table: sa.Table) -> int:
        return self._connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def export_deploy(
    store: Store,
    destination: str | Path,
    *,
    target: str | None = None,
    mode: str | None = None,
    workloads: Collection[Workload] | None = None,
) -> dict[str, int]:
    """Writes a small read-only database with the best kernels and their code, for `compile` on other machines.

    The file appears under its name only when it is complete, so it may replace a file that is in use. It is a new database,
    so it must be marked as trusted on each machine that uses it (`schedsearch records trust FILE`).

    Args:
        store: the source.
        destination: the file; an older deployment file there is replaced.
        target, mode, workloads: export only these; None means all.

    Returns:
        {"bests", "artifacts", "size_bytes"}.

    Raises:
        UsageError: the destination exists and is not a deployment file.
        NoRecordError: there is no best record.
        DatabaseError: it cannot be written.
    """
    path = Path(destination)
    dbfile.check(path, create=True, readonly=False)
    if path.exists() and not _is_deploy(path):
        raise UsageError(f"{path} exists and is not a deployment file, so it is left alone; delete it or give another path")
    try:
        temporary = temporary_beside(path)
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another path") from error
    database = SqliteDatabase(temporary, create=True, readonly=False)
    try:
        counts = _copy_deployed(store, database, target, mode, workloads)
        if not counts["bests"]:
            raise NoRecordError(
                f"{store.name} has no best kernel to deploy{f' on {target}' if target else ''}; "
                f"nothing was written; look with: schedsearch records best --db {store.name}"
            )
        database.vacuum()
        database.close()
        counts["size_bytes"] = temporary.stat().st_size
        temporary.replace(path)
    finally:
        database.close()
        temporary.unlink(missing_ok=True)
    return counts


def _copy_deployed(
    store: Store, database: SqliteDatabase, target: str | None, mode: str | None, workloads: Collection[Workload] | None
) -> dict[str, int]:
    best, artifact = schema.best, schema.artifact
    wanted = [column == value for column, value in ((best.c.target_key, target), (best.c.mode, mode)) if value is not None]
    if workloads is not None:
        wanted.append(best.c.workload_id.in_([workload.id for workload in workloads]))
    marked = trust_marks.is_marked(store.path, store.uuid)
    counts = {"bests": 0, "artifacts": 0}
    database.create_deploy()
    with store.database.read() as reading, database.write() as writing:
        writing.execute(sa.insert(schema.meta), new_meta("deploy", signed=store.trusted))
        chosen = sa.select(best.c.workload_id).where(*wanted)
        for row in reading.execute(sa.select(schema.workload).where(schema.workload.c.id.in_(chosen))).mappings():
            writing.execute(sa.insert(schema.workload), dict(row))
        used = sa.select(best.c.artifact_sha256).where(best.c.artifact_sha256.is_not(None), *wanted)
        query = sa.select(artifact).where(artifact.c.sha256.in_(used)).execution_options(yield_per=16)
        for row in reading.execute(query).mappings():
            if marked or trust_marks.is_ours(row["sha256"], row["signature"]):
                put_artifact(database, writing, row["sha256"], row["plan"], row["code"])
            else:  # keeps the origin: another machine's code
                writing.execute(sa.insert(artifact), dict(row))
            counts["artifacts"] += 1
        for row in reading.execute(sa.select(best).where(*wanted)).mappings():
            writing.execute(sa.insert(best), dict(row))
            counts["bests"] += 1
    return counts


def _is_deploy(path: Path) -> bool:
    try:
        with Lookup(path) as lookup:
            return lookup.kind == "deploy"
    except DatabaseError:
        return False
