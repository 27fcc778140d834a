"""The store's longer questions to the database, as statements of SQLAlchemy; `store` runs them and reads what comes back."""

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
) -> list[sa.ColumnElement[bool]]:
    """Conditions on record (and workload, for `op`); None matches all."""
    record = schema.record.c
    wanted = (
        (record.workload_id, workload.id if workload else None),
        (record.target_key, target),
        (record.template, template),
        (schema.workload.c.op, op),
        (record.mode, mode),
    )
    return [column == value for column, value in wanted if value is not None]


def tuned(op: str, template: str, version: int, mode: str) -> sa.Select[Any]:
    """Rows (workload's json, target_key), each once, in that order, of which there is a valid record."""
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


def evidence(workload: Workload, target: str, template: str, version: int, mode: str, limit: int) -> sa.Select[Any]:
    """Rows (config, its least time_ns or NULL), the fastest first; of more than `limit` a choice, see `Store.evidence`."""
    columns = schema.record.c
    own = (
        sa.select(columns.config, sa.func.min(columns.time_ns).label("time_ns"))
        .where(
            *matching(workload=workload, target=target, template=template, mode=mode), columns.template_version == version
        )
        .group_by(columns.config)
        .subquery()
    )
    order = (own.c.time_ns.is_(None), own.c.time_ns, own.c.config)
    ranked = sa.select(
        own, sa.func.row_number().over(order_by=order).label("rank"), sa.func.count().over().label("total")
    ).subquery()
    fastest = limit // 4
    step = sa.case((ranked.c.total > limit, (ranked.c.total + limit - 2 * fastest - 1) // (limit - fastest)), else_=1)
    taken = sa.or_(ranked.c.rank <= fastest, (ranked.c.rank - fastest - 1) % step == 0)
    return sa.select(ranked.c.config, ranked.c.time_ns).where(taken).order_by(ranked.c.rank)


def listing() -> sa.Select[Any]:
    """One row a record, the newest first, with op and json of its workload, and whether it is the best of its task."""
    record, best, columns = schema.record, schema.best, schema.record.c
    return (
        sa.select(
            columns.id, columns.workload_id, schema.workload.c.op, schema.workload.c.json.label("workload"),
            columns.target_key.label("target"), columns.template, columns.template_version, columns.config, columns.mode,
            columns.outcome, columns.time_ns, columns.message, columns.run, columns.batch, columns.prediction,
            columns.build_s, columns.run_s, columns.started_at, columns.finished_at, columns.final_race,
            columns.artifact_sha256.label("artifact"), columns.source,
            best.c.record_id.is_not(None).label("best"),
        )
        .select_from(
            record.join(schema.workload, columns.workload_id == schema.workload.c.id).outerjoin(
                best,
                sa.and_(
                    best.c.workload_id == columns.workload_id,
                    best.c.target_key == columns.target_key,
                    best.c.mode == columns.mode,
                    best.c.record_id == columns.id,
                ),
            )
        )
        .order_by(columns.id.desc())
    )  # fmt: skip


def artifacts_to_keep(fastest: int) -> sa.CompoundSelect[Any]:
    """Digests of the best of every (workload, target, mode) and of its `fastest` fastest records."""
    record, best = schema.record.c, schema.best.c
    rank = sa.func.row_number().over(
        partition_by=(record.workload_id, record.target_key, record.mode), order_by=(record.time_ns, record.id)
    )
    ranked = sa.select(record.artifact_sha256, rank.label("rank")).where(record.outcome == str(Outcome.OK)).subquery().c
    return sa.union(
        sa.select(ranked.artifact_sha256).where(ranked.rank <= fastest, ranked.artifact_sha256.is_not(None)),
        sa.select(best.artifact_sha256).where(best.artifact_sha256.is_not(None)),
    )
