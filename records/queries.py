"""The store's longer queries. `store` runs the statements and reads the rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from schedsearch.measurement import Outcome
from schedsearch.records import schema
from schedsearch.records.size_tables import COLUMNS
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload


def matching(
    *,
    workload: Workload | None = None,
    target: str | None = None,
    template: str | None = None,
    op: str | None = None,
    mode: str | None = None,
    run: str | None = None,
) -> list[sa.ColumnElement[bool]]:
    """Conditions on record (and workload, for `op`); None matches all."""
    record = schema.record.c
    wanted = (
        (record.workload_id, workload.id if workload else None),
        (record.target_key, target),
        (record.template, template),
        (schema.workload.c.op, op),
        (record.mode, mode),
        (record.run, run),
    )
    return [column == value for column, value in wanted if value is not None]


def measured_here() -> sa.ColumnElement[bool]:
    """Condition on record: it was measured into this database, or came in with a signature of this machine.

    Of another record an import or merge keeps no signature, and always a source.
    """
    record = schema.record.c
    return sa.or_(record.source == "", record.signature != "")


def records() -> sa.Select[Any]:
    """Every column of table record, the JSON of workload and toolchain, op, and whether the record is the best of its task.

    A row whose workload or toolchain is missing is there, too, with NULLs.
    """
    record, best = schema.record.c, schema.best.c
    of_task = sa.and_(
        best.workload_id == record.workload_id,
        best.target_key == record.target_key,
        best.mode == record.mode,
        best.record_id == record.id,
    )
    return sa.select(
        schema.record,
        schema.workload.c.json.label("workload_json"),
        schema.workload.c.op,
        schema.toolchain.c.json.label("toolchain_json"),
        best.record_id.is_not(None).label("best"),
    ).select_from(_with_context(schema.record).outerjoin(schema.best, of_task))


def _with_context(table: sa.FromClause) -> sa.Join:
    record = schema.record.c
    return table.outerjoin(schema.workload, record.workload_id == schema.workload.c.id).outerjoin(
        schema.toolchain, record.toolchain_id == schema.toolchain.c.id
    )


def bests() -> sa.Select[Any]:
    """Every row of table best, ordered by operator, workload and target, with the columns of `records` of its record.

    These are NULL if it names no record of its own task.
    """
    record, best = schema.record.c, schema.best.c
    own = sa.and_(
        record.id == best.record_id,
        record.workload_id == best.workload_id,
        record.target_key == best.target_key,
        record.mode == best.mode,
    )
    return (
        sa.select(
            schema.record,
            schema.workload.c.json.label("workload_json"),
            schema.workload.c.op,
            schema.toolchain.c.json.label("toolchain_json"),
            sa.literal(True).label("best"),
            best.record_id,
            best.verified,
            best.promoted_at,
            best.artifact_sha256.label("best_sha256"),
            best.signature.label("best_signature"),
            *(best[name].label(f"best_{name}") for name in _TASK_AND_COPIES),
        )
        .select_from(_with_context(schema.best.outerjoin(schema.record, own)))
        .order_by(schema.workload.c.op, best.workload_id, best.target_key, best.mode)
    )


_TASK_AND_COPIES = ("workload_id", "target_key", "mode", "template", "template_version", "config", "time_ns")


def profiles() -> sa.Select[Any]:
    """Every row of table profile, the oldest first, with the content id of its record, or NULL if there is none."""
    profile, record = schema.profile, schema.record.c
    return (
        sa.select(profile, record.content_id)
        .select_from(profile.outerjoin(schema.record, record.id == profile.c.record_id))
        .order_by(profile.c.taken_at, profile.c.id)
    )


def runs() -> sa.Select[Any]:
    """Every row of table run in the order of their start, with the number of its records."""
    run, record = schema.run.c, schema.record.c
    count = sa.select(sa.func.count()).where(record.run == run.id).scalar_subquery().label("records")
    return sa.select(schema.run, count).order_by(run.started_at, run.id)


def artifacts() -> sa.Select[Any]:
    """Every row of table artifact. The code is what the database holds, even if it is not a blob."""
    columns = [column for column in schema.artifact.c if column.name != "code"]
    code = sa.type_coerce(schema.artifact.c.code, sa.types.NULLTYPE)
    return sa.select(*columns, code.label("code"))


def size_tables() -> sa.Select[Any]:
    """Kernels of ranges of sizes, in a fixed order."""
    columns = schema.size_table.c
    return sa.select(*(columns[name] for name in COLUMNS)).order_by(*(columns[name] for name in COLUMNS[:5]))


def tuned(op: str, template: str, version: int, mode: str) -> sa.Select[Any]:
    """Distinct rows (id, workload's id, op and json, target_key) that have a valid record, ordered by json and target."""
    record = schema.record
    pairs = (
        sa.select(record.c.workload_id, record.c.target_key, schema.workload.c.op, schema.workload.c.json)
        .select_from(schema.workload.join(record, record.c.workload_id == schema.workload.c.id))
        .where(*matching(template=template, op=op, mode=mode))
        .distinct()
        .subquery()
    )
    valid = sa.exists().where(
        record.c.workload_id == pairs.c.workload_id,
        record.c.target_key == pairs.c.target_key,
        record.c.mode == mode,
        record.c.template == template,
        record.c.template_version == version,
        record.c.time_ns.is_not(None),
    )
    columns = pairs.c.workload_id.label("id"), pairs.c.workload_id, pairs.c.op, pairs.c.json.label("workload_json")
    return sa.select(*columns, pairs.c.target_key).where(valid).order_by(pairs.c.json, pairs.c.target_key)


def evidence(workload: Workload, target: str, template: str, version: int, mode: str, *, imported: bool) -> sa.Select[Any]:
    """Rows (config, its smallest time_ns or NULL, the id of one of its records), the fastest first, failures last.

    See `Store.evidence`.
    """
    columns = schema.record.c
    time_ns = sa.func.min(columns.time_ns)
    conditions = matching(workload=workload, target=target, template=template, mode=mode)
    if imported:
        conditions.append(sa.not_(measured_here()))
    return (
        sa.select(columns.config, time_ns.label("time_ns"), sa.func.min(columns.id).label("id"))
        .where(*conditions, columns.template_version == version)
        .group_by(columns.config)
        .order_by(time_ns.is_(None), time_ns, columns.config)
    )


def artifacts_to_keep(fastest: int) -> sa.CompoundSelect[Any]:
    """For every (workload, target, mode): digests of the best and of the `fastest` fastest records."""
    record, best = schema.record.c, schema.best.c
    rank = sa.func.row_number().over(
        partition_by=(record.workload_id, record.target_key, record.mode), order_by=(record.time_ns, record.id)
    )
    ranked = sa.select(record.artifact_sha256, rank.label("rank")).where(record.outcome == str(Outcome.OK)).subquery().c
    return sa.union(
        sa.select(ranked.artifact_sha256).where(ranked.rank <= fastest, ranked.artifact_sha256.is_not(None)),
        sa.select(best.artifact_sha256).where(best.artifact_sha256.is_not(None)),
    )


def counts(connection: sa.Connection) -> JsonObject:
    """Numbers of rows, and of records by outcome, target and template: see `Store.stats`."""
    record, artifact = schema.record.c, schema.artifact

    def count(table: sa.Table) -> int:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

    def by(column: sa.ColumnElement[str]) -> dict[str, int]:
        query = sa.select(column, sa.func.count()).group_by(column).order_by(column)
        counted = [(name if isinstance(name, str) else repr(name), number) for name, number in connection.execute(query)]
        return {name.encode(errors="replace").decode(): number for name, number in counted}

    return {
        "records": count(schema.record),
        "outcomes": by(record.outcome),
        "targets": by(record.target_key),
        "templates": by(record.template),
        "workloads": count(schema.workload),
        "runs": count(schema.run),
        "bests": count(schema.best),
        "ranges": count(schema.size_table),
        "artifacts": count(artifact),
        "artifact_bytes": connection.execute(
            sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(artifact.c.code)), 0))
        ).scalar_one(),
    }
