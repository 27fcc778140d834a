"""Records in and out of a store: JSON lines and other databases.

An exchange file has one JSON object per line, each with a `kind`:

    {"kind": "header", "format": 6, "uuid": ...}
    {"kind": "run", "id": ..., "machine": ..., "started_at": ..., "finished_at": ..., "info": {...}, "summary": {...}}
    {"kind": "artifact", "sha256": ..., "plan": {...}, "code": <base64>, "signature": ...}     only with artifacts=True
    {"kind": "record", ..., "signature": ...}                                                  see `rows.to_json`
    {"kind": "profile", "content_id": ..., "profile": {...}}                                   see `Profile.to_json`
    {"kind": "range", "family": ..., ..., "size_table": {...}, "code": <base64>, "signature": ...}   only with artifacts=True
    {"kind": "best", "content_id": ..., "verified": ..., "artifact": ..., "promoted_at": ..., "signature": ...}

With machine code the file is complete: after an export and an import on the same machine a store is the same. What another
machine wrote is a claim. Its records come in, as somebody else's measurements. Its code, bests and kernels of ranges come in
only if their origin is trusted.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import sqlalchemy as sa

from schedsearch.errors import SchemaVersionError, UsageError, WorkloadError
from schedsearch.identity import canonical_json
from schedsearch.measurement import Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import claims, queries, rows, schema, size_tables
from schedsearch.records.damage import Damage
from schedsearch.records.formats.content import Content
from schedsearch.records.formats.recording import Place, parse_json
from schedsearch.records.output import new_file
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.records.store import Store
from schedsearch.records.writes import Over, claim_of, put_artifact, put_profile, set_best, set_size_table
from schedsearch.roofline import least_time_ns
from schedsearch.size_table import SizeTable
from schedsearch.text import counted
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import Workload

__all__ = ["Report", "add_records", "export_jsonl", "import_jsonl", "merge"]

FORMAT = 6
"""Format 2 has no model, anchor, host and device_uuid; formats 2 and 3 have no signatures of records and bests; format 4 has
no kernels of ranges of sizes; format 5 has no verdicts of races and times under load."""
_MAX_PROBLEMS = 10
_MAX_REASON = 500  # characters of one of them; a line may quote megabytes
_CHUNK = 2000  # rows per statement
_RUN_FIELDS = ("id", "machine", "started_at", "finished_at")


@dataclass
class Report:
    """What an import or merge did. `known` counts records that were there already, `dropped` what is not trusted; `warnings`
    say what is strange about the data.
    """

    records_added: int = 0
    records_known: int = 0
    runs_added: int = 0
    profiles_added: int = 0
    bests_changed: int = 0
    bests_dropped: int = 0
    artifacts_added: int = 0
    artifacts_dropped: int = 0
    ranges_added: int = 0
    ranges_dropped: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What was left out and how to get it; "" if nothing was."""
        if not self.bests_dropped and not self.artifacts_dropped and not self.ranges_dropped:
            return ""
        ranges = f", and the kernels of {counted(self.ranges_dropped, 'range')} of sizes" if self.ranges_dropped else ""
        return (
            f"left out, because this machine did not make them: {self.bests_dropped} best records and "
            f"{self.artifacts_dropped} kernels' machine code{ranges}. Their configurations were imported; deployment builds "
            "and verifies them here. Tune here, or if you trust the origin: schedsearch records import --trusted, or "
            "schedsearch records trust FILE and then merge"
        )

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
    with new_file(destination) as raw:
        stream = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if packed else raw
        with io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8") as file:
            return _write_lines(store, file, artifacts)


def _write_lines(store: Store, file: IO[str], artifacts: bool) -> int:
    records = 0

    def write(kind: str, values: JsonMapping) -> None:
        file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")

    write("header", {"format": FORMAT, "uuid": store.uuid, "exported_at": time.time()})
    reader = store.reader(thorough=True)
    with store.database.read() as connection:

        def rows_of(query: sa.Select[Any]) -> Any:
            return connection.execute(query.execution_options(yield_per=_CHUNK))

        for run in reader.runs(rows_of(sa.select(schema.run).order_by(schema.run.c.started_at))):
            write("run", run)
        if artifacts:
            for row in reader.artifacts(rows_of(queries.artifacts())):
                code = base64.b64encode(row.code).decode()
                write("artifact", {"sha256": row.sha256, "plan": row.plan, "code": code, "signature": row.signature})
            for table in reader.size_tables(rows_of(queries.size_tables())):
                code = base64.b64encode(table.code).decode()
                write("range", {**table._asdict(), "size_table": json.loads(table.size_table), "code": code})
        for values in reader.record_values(rows_of(queries.records().order_by(schema.record.c.id))):
            write("record", {**rows.to_json(values), "signature": values["signature"]})
            records += 1
        by_id = queries.profiles().order_by(None).order_by(schema.profile.c.id)
        for content_id, profile in reader.profiles(rows_of(by_id), copied=True):
            write("profile", {"content_id": content_id, "profile": json.loads(profile.to_json())})
        for best in reader.bests(rows_of(queries.bests())):
            write(
                "best",
                {
                    "content_id": best.content_id,
                    "verified": best.verified,
                    "artifact": best.artifact_sha256,
                    "promoted_at": best.promoted_at,
                    "signature": best.signature,
                },
            )
    return records


def import_jsonl(store: Store, path: str | Path, *, trusted: bool = False) -> Report:
    """Adds the records of a JSON-lines file: all of them, or nothing if a line is wrong. A second import adds nothing.

    Args:
        store: receives the records.
        path: a file of `export_jsonl`, gzip or not.
        trusted: whether to accept machine code and bests of another machine; this machine then signs them.

    Raises:
        UsageError: the file cannot be read, or lines are wrong; it names each line as file:line with the mistake.
        SchemaVersionError: the file has a newer format.
    """
    with Content(path) as content:
        return import_lines(store, content.lines(), source=str(path), trusted=trusted)


def import_lines(store: Store, lines: Iterable[bytes], *, source: str, trusted: bool = False) -> Report:
    """Like `import_jsonl`, for the lines of the file `source`. They are read one by one, so a file may have any size."""
    problems: list[str] = []
    with store.database.write() as connection:
        importer = _Importer(store, connection, source=source, trusted=trusted)
        for number, line in enumerate(lines, 1):
            try:
                importer.line(number, line)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                at = f"{source}:{number}: "
                why = reason(error).removeprefix(at)
                problems.append(at + (why if len(why) <= _MAX_REASON else f"{why[:_MAX_REASON]} ..."))
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
        UsageError: a record has a time that physics forbids.
    """
    with store.database.write() as connection:
        importer = _Importer(store, connection, source=source, trusted=False)
        for record in records:
            row = rows.to_row(record)
            try:
                importer.record(row, record.workload.op)
            except ValueError as error:
                raise UsageError(f"{source}: configuration {row['config']}: {error}; nothing was imported") from error
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

    Damaged rows, rows that are not what their identity says, and times of others that physics forbids are left out;
    `Store.damage` lists them.

    A best of a source comes along, with its code, if this machine signed it or it is marked as trusted
    (`claims.vouches`). It replaces ours if it is faster (`writes.set_best`).

    Raises:
        UsageError: a source is the store itself.
        DatabaseError: a source cannot be read; the sources before it stay merged.
    """
    report = Report()
    for source in sources:
        with Store.open(source, create=False, readonly=True) as other:
            if other.database.identity == store.database.identity:
                raise UsageError(f"{source} cannot be merged into itself; give another database")
            report += _merge_one(store, other, str(source))
    return report


def _merge_one(store: Store, other: Store, source: str) -> Report:
    reader = other.reader(thorough=True)
    with other.database.read() as reading, store.database.write() as writing:

        def rows_of(query: sa.Select[Any]) -> Any:
            return reading.execute(query.execution_options(yield_per=_CHUNK))

        importer = _Importer(store, writing, source=source, trusted=False)
        for run in reader.runs(rows_of(sa.select(schema.run))):
            texts = {name: None if run[name] is None else canonical_json(run[name]) for name in ("info", "summary")}
            importer.run({**run, **texts})
        bests = list(reader.bests(rows_of(queries.bests())))
        importer.accept(best.artifact_sha256 for best in bests if best.vouched)
        for row in reader.artifacts(rows_of(queries.artifacts())):
            importer.artifact(row.sha256, row.plan, row.code, row.signature)
        skipped: set[str] = set()
        for values in reader.record_values(rows_of(queries.records().order_by(schema.record.c.id))):
            record_id = values.pop("id")
            try:
                importer.record(values, values.pop("op"), values.pop("signature"))
            except ValueError as error:
                other.damage.add(Damage(other.path, "record", str(record_id), str(error)))
                skipped.add(values["content_id"])
        for content_id, profile in reader.profiles(rows_of(queries.profiles()), copied=True):
            if content_id not in skipped:
                importer.profile(content_id, profile.to_json())
        for table in reader.size_tables(rows_of(queries.size_tables())):
            importer.size_table(table)
        for best in (best for best in bests if best.content_id not in skipped):
            importer.best(best.content_id, best.verified, best.artifact_sha256, best.promoted_at, best.signature)
        importer.finish()
    store.damage.extend(other.damage)
    return importer.report


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
        self._records: list[JsonObject] = []
        self._profiles: list[tuple[str, Profile]] = []
        self._bests: list[tuple[str, bool, str | None, float, str]] = []
        self._accepted: set[str | None] = set()
        self._least_ns: dict[tuple[str, str, str], float] = {}  # by workload, target and mode
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
            summary = None if data["summary"] is None else canonical_json(data["summary"], finite=True)
            self.run(
                {
                    **{name: data[name] for name in _RUN_FIELDS},
                    "info": canonical_json(data["info"], finite=True),
                    "summary": summary,
                }
            )
        elif kind == "artifact":
            code = base64.b64decode(data["code"], validate=True)
            self.artifact(str(data["sha256"]), str(data["plan"]), code, str(data["signature"]))
        elif kind == "record":
            record = rows.from_json(data)
            self.record(rows.to_row(record), record.workload.op, str(data.get("signature", "")))
        elif kind == "profile":
            self.profile(str(data["content_id"]), canonical_json(data["profile"], finite=True))
        elif kind == "range":
            code, table = base64.b64decode(data["code"], validate=True), canonical_json(data["size_table"], finite=True)
            row = size_tables.read([{**data, "size_table": table, "code": code}[name] for name in size_tables.COLUMNS])
            SizeTable.from_bytes(row.size_table, row.code)
            self.size_table(row)
        elif kind == "best":
            artifact = None if data["artifact"] is None else str(data["artifact"])
            promoted_at, signature = float(data["promoted_at"]), str(data.get("signature", ""))
            self.best(str(data["content_id"]), bool(data["verified"]), artifact, promoted_at, signature)
        else:
            allowed = "header (first line), run, artifact, record, profile, range, best"
            raise ValueError(f"unknown kind {kind!r}; allowed: {allowed}")

    def run(self, row: JsonObject) -> None:
        """Adds a run, or the end of a run that is known without one."""
        run = schema.run
        known = self._connection.execute(sa.select(run).where(run.c.id == row["id"])).one_or_none()
        if known is None:
            self._connection.execute(sa.insert(run), row)
            self.report.runs_added += 1
        elif known.finished_at is None and (known.machine, known.started_at) == (row["machine"], row["started_at"]):
            end = {name: row[name] for name in ("finished_at", "summary")}
            self._connection.execute(sa.update(run).where(run.c.id == row["id"]).values(end))

    def accept(self, artifacts: Iterable[str | None]) -> None:
        """The machine code with these digests is trusted."""
        self._accepted.update(artifacts)

    def artifact(self, sha256: str, plan_json: str, code: bytes, signature: str) -> None:
        if self._trusted or sha256 in self._accepted or claims.is_ours(claims.Kind.ARTIFACT, sha256, signature):
            claims.verify_digest(Path(self._source), sha256, plan_json, code)
            put_artifact(self._db, self._connection, sha256, plan_json, code)
        else:
            self.report.artifacts_dropped += 1

    def size_table(self, row: SizeTableRow) -> None:
        """Adds the kernels of a range, unless they are of somebody who is not trusted, or ours are as new."""
        if self._trusted or row.vouched:
            self.report.ranges_added += set_size_table(self._connection, size_tables.signed(row), if_newer=True)
        else:
            self.report.ranges_dropped += 1

    def record(self, row: JsonObject, op: str, signature: str = "") -> None:
        """Adds a record. One that this machine did not measure loses its artifact, which would name code of ours.

        Raises:
            ValueError: somebody else's record has a time that no correct kernel can reach.
        """
        own = rows.is_own_record({**row, "signature": signature})
        if not own and row["time_ns"] is not None:
            self._check_time(row)
        row = {
            **row,
            "signature": signature if own else "",
            "artifact_sha256": row["artifact_sha256"] if own or self._trusted else None,
        }
        workload_json, toolchain_json = row.pop("workload_json"), row.pop("toolchain_json")
        self._workloads[row["workload_id"]] = {"id": row["workload_id"], "op": op, "json": workload_json}
        self._toolchains[row["toolchain_id"]] = {"id": row["toolchain_id"], "json": toolchain_json}
        self._records.append({**row, "source": row["source"] or self._source})
        self._seen += 1
        if len(self._records) >= _CHUNK:
            self._flush()

    def _check_time(self, row: JsonMapping) -> None:
        task = row["workload_id"], row["target_key"], row["mode"]
        least_ns = self._least_ns.get(task)
        if least_ns is None:
            least_ns = self._least_ns[task] = _least_time_ns(row["workload_json"], row["target_key"], row["mode"])
        if row["time_ns"] < least_ns:
            raise ValueError(
                f"a time of {row['time_ns']:g} ns is not possible: no kernel of this workload takes less than "
                f"{least_ns:.4g} ns on {row['target_key']} in mode {row['mode']}"
            )

    def profile(self, content_id: str, text: str) -> None:
        self._profiles.append((content_id, Profile.from_json(text)))

    def best(self, content_id: str, verified: bool, artifact_sha256: str | None, promoted_at: float, signature: str) -> None:
        self._bests.append((content_id, verified, artifact_sha256, promoted_at, signature))

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

    def _promote(
        self, content_id: str, verified: bool, artifact_sha256: str | None, promoted_at: float, signature: str
    ) -> None:
        """Takes over a best that is trusted, if it is faster than ours (see `writes.set_best`), or if it has code and ours
        has none. This machine signs it."""
        record = schema.record
        row = self._connection.execute(sa.select(record).where(record.c.content_id == content_id)).one_or_none()
        if row is None or row.time_ns is None:
            raise UsageError(f"{self._source} names a best record {content_id[:12]} that it does not hold, or that failed")
        claim = claim_of(row, verified=verified, artifact_sha256=artifact_sha256)
        if claims.is_revoked(claim) or not (self._trusted or claims.vouches(claim, signature)):
            self.report.bests_dropped += 1
            return
        stored = sa.select(schema.artifact.c.sha256).where(schema.artifact.c.sha256 == artifact_sha256)
        kept_sha256 = self._connection.execute(stored).scalar()
        self.report.bests_changed += set_best(
            self._db, self._connection, row, kept_sha256, verified=verified, promoted_at=promoted_at, over=Over.SLOWER
        )

    def _count(self, table: sa.Table) -> int:
        return self._connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def _least_time_ns(workload_json: str, target_key: str, mode: str) -> float:
    """See `schedsearch.roofline.least_time_ns`; 0 for an operator that is not installed."""
    try:
        return least_time_ns(Workload.from_json(workload_json), target_key, mode)
    except WorkloadError:
        return 0.0
