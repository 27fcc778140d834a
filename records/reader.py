"""The one place that reads rows of a store: each is checked column by column, and damaged ones are skipped.

`damage` has the rules and says what becomes of a damaged row.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from schedsearch.config import Config
from schedsearch.errors import PlanError, WorkloadError
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.profiling.profile import Profile
from schedsearch.records import claims, damage, rows, size_tables
from schedsearch.records.damage import DamagedRow, DamageError, DamageLog
from schedsearch.records.fields import ARTIFACT, BEST, PROFILE, RECORD, RUN
from schedsearch.records.location import Place
from schedsearch.records.rows import Best, RecordRow
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.size_table import SizeTable
from schedsearch.text import type_text
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload

T = TypeVar("T")

_READ = [
    (field.name, field.read) for field in RECORD.fields if field.name not in ("workload_id", "toolchain_id")
]  # `Reader` reads these two with the tables that they name
_OF_BEST = (
    ("verified", "verified"), ("artifact_sha256", "best_sha256"), ("promoted_at", "promoted_at"),
    ("signature", "best_signature"),
)  # fmt: skip


class Reader:
    """Reads the rows of one file. It parses recurring configs, workloads and toolchains once; use one reader per listing.

    Args:
        path: of the database, for messages.
        log: remembers the damaged rows that were skipped.
        thorough: also compare each record with its content id. A listing leaves this out, because it takes longer.
    """

    def __init__(self, path: Place, log: DamageLog, *, thorough: bool = False) -> None:
        self.path, self.log, self._thorough = path, log, thorough
        self._toolchains: dict[str, tuple[str, dict[str, str]]] = {}
        self._workloads: dict[str, tuple[str, str]] = {}
        self._copied: set[int] = set()

    # ---- many rows: damaged ones are skipped

    def records(self, fetched: Iterable[Any]) -> Iterator[RecordRow]:
        """Rows of `queries.records`."""
        return self._sound("record", fetched, self.record, lambda row: row.id)

    def record_values(self, fetched: Iterable[Any]) -> Iterator[JsonObject]:
        """The values of rows of `queries.records` that can be read, as they are in the table."""

        def values(row: Any) -> JsonObject:
            self.record(row)
            found = dict(row._mapping)
            del found["best"]
            self._copied.add(row.id)
            return found

        return self._sound("record", fetched, values, lambda row: row.id)

    def bests(self, fetched: Iterable[object]) -> Iterator[Best]:
        """Rows of `queries.bests`."""
        return self._sound("best", fetched, self._best, _task)

    def runs(self, fetched: Iterable[Any]) -> Iterator[JsonObject]:
        """Rows of table run, with `info` and `summary` parsed."""
        return self._sound("run", fetched, _run, lambda row: row.id)

    def profiles(self, fetched: Iterable[Any], *, copied: bool = False) -> Iterator[tuple[str, Profile]]:
        """Rows of `queries.profiles` as (content id of the record, profile).

        With `copied` only those of records that `record_values` gave: a copy has no profile without its record.
        """
        wanted = (row for row in fetched if row.record_id in self._copied) if copied else fetched
        return self._sound("profile", wanted, _profile, lambda row: row.id)

    def workloads(self, fetched: Iterable[Any]) -> Iterator[tuple[Workload, str]]:
        """Rows of `queries.tuned` as (workload, target_key). Those of unknown operators are left out."""
        found = self._sound("workload", fetched, self._workload_and_target, lambda row: row.id)
        return ((workload, target) for workload, target in found if workload is not None)

    def stored_workloads(self, fetched: Iterable[Any]) -> Iterator[tuple[str, tuple[str, str]]]:
        """Rows (id, op, workload_json) of table workload as (id, (op, json))."""

        def read(row: Any) -> tuple[str, tuple[str, str]]:
            workload_id = damage.text("id", row.id)
            return workload_id, _checked_workload(workload_id, row.op, row.workload_json)

        return self._sound("workload", fetched, read, lambda row: row.id)

    def evidence(self, fetched: Iterable[Any]) -> Iterator[tuple[Config, float | None]]:
        """Rows of `queries.evidence`."""
        config, time_ns = RECORD["config"].read, RECORD["time_ns"].read

        def read(row: Any) -> tuple[Config, float | None]:
            return config("config", row.config), time_ns("time_ns", row.time_ns)

        return self._sound("record", fetched, read, lambda row: row.id)

    def artifacts(self, fetched: Iterable[object]) -> Iterator[Any]:
        """The rows of `queries.artifacts` that are sound, and whose code and plan match their digest, as they are."""

        def checked(row: Any) -> Any:
            self.stored_artifact(row)
            for field in ARTIFACT.fields:
                field.read(field.name, getattr(row, field.name))
            return row

        return self._sound("artifact", fetched, checked, lambda row: row.sha256)

    def size_tables(self, fetched: Iterable[object]) -> Iterator[SizeTableRow]:
        """Rows of `queries.size_tables` whose tables can be used."""
        return self._sound("size_table", fetched, _size_table, size_tables.name_of)

    # ---- one row

    def one(self, table: str, name: object, read: Callable[[], T]) -> T:
        """What `read` returns. Raises DamageError if the row is damaged."""
        try:
            return read()
        except damage.UNREADABLE as error:
            raise DamageError(damage.damage(self.path, table, name, error)) from error

    def record(self, row: Any) -> RecordRow:
        """A row of `queries.records`. Raises `DamagedRow` or another of `damage.UNREADABLE`."""
        op, workload_json = self._workload(row)
        values = {name: read(name, getattr(row, name)) for name, read in _READ}
        if values["time_ns"] != (statistics.median(values["times_ns"]) if values["times_ns"] else None):
            raise DamagedRow("time_ns is not the median of times_ns")
        found = RecordRow(
            id=values["id"],
            op=op,
            workload_id=row.workload_id,
            workload_json=workload_json,
            best=bool(row.best),
            toolchain=self._toolchain(row),
            **rows.attempt(values),
        )
        if self._thorough and (problem := rows.problem_of_ids(row._mapping)):
            raise DamagedRow(f"it is not the record that was stored: {problem}")
        return found

    def _best(self, row: Any) -> Best:
        if row.id is None:
            raise DamagedRow(f"names record {row.record_id!r}, which is not a record of this task")
        found = self.record(row)
        copies = {
            "template": (row.best_template, found.template),
            "template_version": (row.best_template_version, found.template_version),
            "config": (row.best_config, row.config),
            "time_ns": (row.best_time_ns, found.measurement.time_ns),
        }
        if differing := [name for name, (copy, own) in copies.items() if copy != own]:
            raise DamagedRow(f"{differing[0]} is not that of record {found.id}, which it names")
        own = {name: BEST[name].read(name, getattr(row, column)) for name, column in _OF_BEST}
        return Best(row=found, content_id=row.content_id, **own)

    def _workload(self, row: Any) -> tuple[str, str]:
        """Operator and JSON of a row's workload; damage of it is that of table workload."""
        workload_id = damage.text("workload_id", row.workload_id)
        found = self._workloads.get(workload_id)
        if found is None:
            try:
                found = self._workloads[workload_id] = _checked_workload(workload_id, row.op, row.workload_json)
            except damage.UNREADABLE as error:
                raise DamagedRow(str(error), "workload", workload_id) from error
        return found

    def _workload_and_target(self, row: Any) -> tuple[Workload | None, str]:
        _, workload_json = self._workload(row)
        target = damage.text("target_key", row.target_key)
        try:
            return Workload.from_json(workload_json), target
        except WorkloadError:
            return None, target

    def _toolchain(self, row: Any) -> dict[str, str]:
        toolchain_id = damage.text("toolchain_id", row.toolchain_id)
        found = self._toolchains.get(toolchain_id)
        if found is None:
            try:
                versions = damage.mapping("json", row.toolchain_json)
                for name, version in versions.items():
                    damage.text(f"json[{name!r}]", version)
                _check_id(toolchain_id, row.toolchain_json)
            except damage.UNREADABLE as error:
                raise DamagedRow(str(error), "toolchain", toolchain_id) from error
            found = self._toolchains[toolchain_id] = row.toolchain_json, versions
        return found[1]

    def stored_artifact(self, row: Any) -> Artifact:
        """A row of `queries.artifacts`; the digest is compared before the plan is parsed. Raises `DamagedRow`, PlanError."""
        sha256, plan = damage.text("sha256", row.sha256), damage.text("plan", row.plan)
        damage.text("signature", row.signature)
        if not isinstance(row.code, bytes):
            raise DamagedRow(f"code is {type_text(row.code)}; it must be a blob")
        if not claims.matches_digest(sha256, plan, row.code):
            raise DamagedRow("code or plan does not match its checksum")
        found = Artifact(row.code, LaunchPlan.from_json(plan))
        if (found.plan.kind, found.plan.arch) != (row.kind, row.arch):
            raise DamagedRow("kind and arch are not those of the plan")
        return found

    def _sound(
        self, table: str, fetched: Iterable[object], read: Callable[[Any], T], name: Callable[[Any], object]
    ) -> Iterator[T]:
        return damage.sound(self.log, self.path, table, fetched, read, name)


def _checked_workload(workload_id: str, op: Any, workload_json: Any) -> tuple[str, str]:
    if workload_json is None:
        raise DamagedRow("the workload is missing")
    content = damage.mapping("json", workload_json)
    if not isinstance(content.get("op"), str) or not isinstance(content.get("params"), dict):
        raise DamagedRow("json is not a workload: it needs op and params")
    if content["op"] != op:
        raise DamagedRow(f"op is {ascii(op)[:60]}, and the json's is {content['op']!r}")
    _check_id(workload_id, workload_json)
    return content["op"], workload_json


def _check_id(named: str, content: str) -> None:
    if sha256_hex(content) != named:
        raise DamagedRow("json does not match its id, which is its sha256")


def _run(row: Any) -> JsonObject:
    values = {field.name: field.read(field.name, getattr(row, field.name)) for field in RUN.fields}
    return values | ({"records": row.records} if "records" in row._fields else {})


def _profile(row: Any) -> tuple[str, Profile]:
    found = Profile.from_json(json.dumps(damage.mapping("json", row.json)))
    if row.content_id is None:
        raise DamagedRow(f"belongs to record {row.record_id!r}, which does not exist")
    if (found.subject, found.taken_at) != (row.subject, row.taken_at):
        raise DamagedRow("subject and taken_at are not those of the json")
    PROFILE["taken_at"].read("taken_at", found.taken_at)
    return damage.text("content_id", row.content_id), found


def _size_table(row: Any) -> SizeTableRow:
    found = size_tables.read(row)
    try:
        table = SizeTable.from_bytes(found.size_table, found.code)
    except PlanError as error:
        raise DamagedRow(str(error)) from error
    if (table.low, table.high) != (found.low, found.high):
        raise DamagedRow(f"low and high are {found.low} and {found.high}; the table is of {table.low} to {table.high}")
    return found


def _task(row: Any) -> str:
    return ", ".join(ascii(value)[:40].strip("'") for value in (row.best_workload_id, row.best_target_key, row.best_mode))
