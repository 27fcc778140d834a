"""The store's longer queries. `store` runs the statements and reads the rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from schedsearch.measurement import Outcome
from schedsearch.records import schema
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


def tuned(op: str, template: str, version: int, mode: str) -> sa.Select[Any]:
    """Distinct rows (workload's json, target_key) that have a valid record, in this order."""
    record = schema.record
    pairs = (
        sa.select(record.c.workload_id, record.c.target_key, schema.workload.c.json)
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
    return sa.select(pairs.c.json, pairs.c.target_key).where(valid).order_by(pairs.c.json, pairs.c.target_key)


def evidence(workload: Workload, target: str, template: str, version: int, mode: str, *, imported: bool) -> sa.Select[Any]:
    """Rows (config, its smallest time_ns or NULL), the fastest first, failures last; see `Store.evidence`."""
    columns = schema.record.c
    time_ns = sa.func.min(columns.time_ns)
    conditions = matching(workload=workload, target=target, template=template, mode=mode)
    if imported:
        conditions.append(sa.not_(measured_here()))
    return (
        sa.select(columns.config, time_ns.label("time_ns"))
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


def counts(connection: sa.Connection) -> dict[str, Any]:
    """Numbers of rows, and of records by outcome, target and template: see `Store.stats`."""
    record, artifact = schema.record.c, schema.artifact

    def count(table: sa.Table) -> int:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

    def by(column: sa.ColumnElement[str]) -> dict[str, int]:
        query = sa.select(column, sa.func.count()).group_by(column).order_by(column)
        return {row[0]: row[1] for row in connection.execute(query)}

    return {
        "records": count(schema.record),
        "outcomes": by(record.outcome),
        "targets": by(record.target_key),
        "templates": by(record.template),
        "workloads": count(schema.workload),
        "runs": count(schema.run),
        "bests": count(schema.best),
        "artifacts": count(artifact),
        "artifact_bytes": connection.execute(
            sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(artifact.c.code)), 0))
        ).scalar_one(),
    }
