"""The one place that reads rows of a store: each is checked column by column, and damaged ones are skipped.

`damage` has the rules and says what becomes of a damaged row.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from schedsearch.config import Config
from schedsearch.errors import PlanError, WorkloadError
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import Anchor, Measurement, Outcome, Resources
from schedsearch.profiling.profile import Profile
from schedsearch.records import damage, rows, size_tables, trust
from schedsearch.records.damage import DamagedRow, DamageError, DamageLog
from schedsearch.records.rows import Best, RecordRow
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.size_table import SizeTable
from schedsearch.text import type_text
from schedsearch.workload import Workload

T = TypeVar("T")

_OUTCOMES = {str(outcome): outcome for outcome in Outcome}


class Reader:
    """Reads the rows of one file. It parses recurring configs, workloads and toolchains once; use one reader per listing.

    Args:
        path: of the file, for messages.
        log: remembers the damaged rows that were skipped.
        thorough: also compare each record with its content id. A listing leaves this out, because it takes longer.
    """

    def __init__(self, path: Path, log: DamageLog, *, thorough: bool = False) -> None:
        self.path, self.log, self._thorough = path, log, thorough
        self._configs: dict[str, Config] = {}
        self._toolchains: dict[str, tuple[str, dict[str, str]]] = {}
        self._workloads: dict[str, tuple[str, str]] = {}
        self._copied: set[int] = set()

    # ---- many rows: damaged ones are skipped

    def records(self, fetched: Iterable[Any]) -> Iterator[RecordRow]:
        """Rows of `queries.records`."""
        return self._sound("record", fetched, self.record, lambda row: row.id)

    def record_values(self, fetched: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The values of rows of `queries.records` that can be read, as they are in the table."""

        def values(row: Any) -> dict[str, Any]:
            self.record(row)
            found = dict(row._mapping)
            del found["best"]
            self._copied.add(row.id)
            return found

        return self._sound("record", fetched, values, lambda row: row.id)

    def bests(self, fetched: Iterable[Any]) -> Iterator[Best]:
        """Rows of `queries.bests`."""
        return self._sound("best", fetched, self._best, _task)

    def runs(self, fetched: Iterable[Any]) -> Iterator[dict[str, Any]]:
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
        return self._sound("record", fetched, self._evidence, lambda row: row.id)

    def artifacts(self, fetched: Iterable[Any]) -> Iterator[Any]:
        """The rows of `queries.artifacts` that are sound, and whose code and plan match their digest, as they are."""

        def checked(row: Any) -> Any:
            self.stored_artifact(row)
            for column in ("kind", "arch", "machine", "signature"):
                damage.text(column, getattr(row, column))
            damage.stamp("created_at", row.created_at)
            return row

        return self._sound("artifact", fetched, checked, lambda row: row.sha256)

    def size_tables(self, fetched: Iterable[Any]) -> Iterator[SizeTableRow]:
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
        measurement = _measurement(row)
        code, anchor_ns = damage.optional_text("anchor_code", row.anchor_code), row.anchor_ns
        if (code is None) != (anchor_ns is None):
            raise DamagedRow("anchor_code and anchor_ns must both have a value or both be NULL")
        prediction, model = row.prediction, row.model
        found = RecordRow(
            id=damage.whole("id", row.id, -(2**63)),
            op=op,
            workload_id=row.workload_id,
            workload_json=workload_json,
            best=bool(row.best),
            target=damage.text("target_key", row.target_key),
            template=damage.text("template", row.template),
            template_version=damage.whole("template_version", row.template_version),
            config=self._config(row.config),
            measurement=measurement,
            toolchain=self._toolchain(row),
            run=damage.text("run", row.run),
            batch=damage.whole("batch", row.batch),
            prediction=None if prediction is None else damage.number("prediction", prediction),
            started_at=damage.stamp("started_at", row.started_at),
            finished_at=damage.stamp("finished_at", row.finished_at),
            artifact=damage.optional_text("artifact_sha256", row.artifact_sha256),
            source=damage.text("source", row.source),
            final_race=damage.flag("final_race", row.final_race),
            model=None if model is None else damage.whole("model", model),
            anchor=None if code is None else Anchor(code, damage.number("anchor_ns", anchor_ns, above=0.0)),
        )
        damage.text("content_id", row.content_id)
        damage.text("signature", row.signature)
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
        return Best(
            found,
            damage.flag("verified", row.verified),
            damage.optional_text("artifact_sha256", row.best_sha256),
            damage.stamp("promoted_at", row.promoted_at),
            damage.text("signature", row.best_signature),
            row.content_id,
        )

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

    def _config(self, value: Any) -> Config:
        found = self._configs.get(value) if isinstance(value, str) else None
        if found is None:
            found = self._configs[value] = Config(damage.config_values("config", value))
        return found

    def _evidence(self, row: Any) -> tuple[Config, float | None]:
        time_ns = row.time_ns
        return self._config(row.config), None if time_ns is None else damage.number("time_ns", time_ns, above=0.0)

    def stored_artifact(self, row: Any) -> Artifact:
        """A row of `queries.artifacts`; the digest is compared before the plan is parsed. Raises `DamagedRow`, PlanError."""
        sha256, plan = damage.text("sha256", row.sha256), damage.text("plan", row.plan)
        damage.text("signature", row.signature)
        if not isinstance(row.code, bytes):
            raise DamagedRow(f"code is {type_text(row.code)}; it must be a blob")
        if not trust.matches_digest(sha256, plan, row.code):
            raise DamagedRow("code or plan does not match its checksum")
        found = Artifact(row.code, LaunchPlan.from_json(plan))
        if (found.plan.kind, found.plan.arch) != (row.kind, row.arch):
            raise DamagedRow("kind and arch are not those of the plan")
        return found

    def _sound(
        self, table: str, fetched: Iterable[Any], read: Callable[[Any], T], name: Callable[[Any], object]
    ) -> Iterator[T]:
        return damage.sound(self.log, self.path, table, fetched, read, name)


def _measurement(row: Any) -> Measurement:
    outcome = _OUTCOMES.get(row.outcome) if isinstance(row.outcome, str) else None
    if outcome is None:
        raise DamagedRow(f"outcome is {ascii(row.outcome)[:60]}; it must be one of {', '.join(_OUTCOMES)}")
    times_ns: tuple[float, ...] = ()
    if row.times_ns is not None:
        times = damage.parsed("times_ns", row.times_ns)
        if not isinstance(times, list) or not times:
            raise DamagedRow("times_ns is not a list of times")
        times_ns = tuple([damage.number("a time of times_ns", time_ns, above=0.0) for time_ns in times])
    if (outcome is Outcome.OK) != bool(times_ns):
        raise DamagedRow(f"outcome is {outcome} with {len(times_ns)} times; only ok has times, and at least one")
    if row.time_ns != (statistics.median(times_ns) if times_ns else None):
        raise DamagedRow("time_ns is not the median of times_ns")
    error = row.max_error
    if error is not None and error != math.inf:
        damage.number("max_error", error)
    return Measurement(
        outcome=outcome,
        mode=damage.text("mode", row.mode),
        times_ns=times_ns,
        resources=Resources(
            damage.whole("registers", row.registers),
            damage.whole("shared_bytes", row.shared_bytes),
            damage.whole("local_bytes", row.local_bytes),
            damage.whole("spill_bytes", row.spill_bytes),
            damage.whole("code_bytes", row.code_bytes),
        ),
        max_error=error,
        message=damage.text("message", row.message),
        build_s=damage.number("build_s", row.build_s, 0.0),
        run_s=damage.number("run_s", row.run_s, 0.0),
        clocks=damage.mapping("clocks", row.clocks),
        host=damage.text("host", row.host),
        device_uuid=damage.text("device_uuid", row.device_uuid),
    )


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


def _run(row: Any) -> dict[str, Any]:
    summary, finished_at = row.summary, row.finished_at
    return {
        "id": damage.text("id", row.id),
        "machine": damage.text("machine", row.machine),
        "started_at": damage.stamp("started_at", row.started_at),
        "finished_at": None if finished_at is None else damage.stamp("finished_at", finished_at),
        "info": damage.mapping("info", row.info),
        "summary": None if summary is None else damage.mapping("summary", summary),
    } | ({"records": row.records} if "records" in row._fields else {})


def _profile(row: Any) -> tuple[str, Profile]:
    found = Profile.from_json(json.dumps(damage.mapping("json", row.json)))
    if row.content_id is None:
        raise DamagedRow(f"belongs to record {row.record_id!r}, which does not exist")
    if (found.subject, found.taken_at) != (row.subject, row.taken_at):
        raise DamagedRow("subject and taken_at are not those of the json")
    damage.stamp("taken_at", found.taken_at)
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
