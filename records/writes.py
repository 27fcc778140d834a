"""Statements that both the store and an exchange run. The caller has begun the transaction."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from schedsearch.launch import LaunchPlan
from schedsearch.profiling.profile import Profile
from schedsearch.records import schema, trust
from schedsearch.records.database import Database


def set_best(
    database: Database,
    connection: sa.Connection,
    row: Any,
    artifact_sha256: str | None,
    *,
    verified: bool,
    promoted_at: float,
    if_faster: bool,
) -> bool:
    """Makes a row of table record the best of its (workload, target, mode).

    With `if_faster` the present best stays unless the record is faster. Two records compare

    - by time over the anchor's time if both anchors are the same machine code, so that a cool card has no advantage;
    - by time otherwise.

    The same record with code also replaces a present best without code. All of it is one statement, so the faster of two
    writers stays whatever their order.

    Returns:
        Whether the record is the best now.
    """
    best, record = schema.best, schema.record
    values = {column.name: getattr(row, column.name) for column in best.c if column.name in row._fields}
    values |= {
        "record_id": row.id,
        "artifact_sha256": artifact_sha256,
        "verified": int(verified),
        "promoted_at": promoted_at,
    }
    statement = database.insert(best).values(values)
    new = statement.excluded
    present_anchor_ns = (
        sa.select(record.c.anchor_ns)
        .where(record.c.id == best.c.record_id, record.c.anchor_code == row.anchor_code)
        .scalar_subquery()
    )
    handicap = sa.func.coalesce(row.anchor_ns / present_anchor_ns, 1.0) if row.anchor_code else 1.0
    gains_code = sa.and_(
        best.c.record_id == new.record_id, best.c.artifact_sha256.is_(None), new.artifact_sha256.is_not(None)
    )
    statement = statement.on_conflict_do_update(
        index_elements=[best.c.workload_id, best.c.target_key, best.c.mode],
        set_={column.name: new[column.name] for column in best.c if not column.primary_key},
        where=sa.or_(new.time_ns < best.c.time_ns * handicap, gains_code) if if_faster else None,
    )
    return connection.execute(statement.returning(best.c.record_id)).scalar() is not None


def put_profile(database: Database, connection: sa.Connection, record_id: int, profile: Profile) -> bool:
    """Adds a profile to a record. Returns whether it is new."""
    row = {"record_id": record_id, "subject": profile.subject, "taken_at": profile.taken_at, "json": profile.to_json()}
    return bool(connection.execute(database.insert(schema.profile).on_conflict_do_nothing(), row).rowcount)


def put_artifact(database: Database, connection: sa.Connection, sha256: str, plan_json: str, code: bytes) -> None:
    """Stores code that this machine vouches for. A row that exists already gets this machine's signature.

    Raises:
        PlanError: the text is not a sound launch plan.
    """
    plan = LaunchPlan.from_json(plan_json)
    vouched = {"machine": trust.machine_id(), "signature": trust.sign(sha256)}
    row = {"sha256": sha256, "kind": plan.kind, "arch": plan.arch, "plan": plan_json, "created_at": time.time()}
    connection.execute(database.insert(schema.artifact).on_conflict_do_nothing(), {**row, "code": code, **vouched})
    connection.execute(sa.update(schema.artifact).where(schema.artifact.c.sha256 == sha256).values(vouched))
