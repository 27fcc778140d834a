"""What both the store and an exchange write, each inside a transaction of its own."""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa

from schedsearch.profiling.profile import Profile
from schedsearch.records import schema, trust
from schedsearch.records.sqlite import Database


def set_best(
    connection: sa.Connection, row: Any, artifact_sha256: str | None, *, verified: bool, promoted_at: float
) -> None:
    """Points (workload, target, mode) to a row of table record, whatever stood there."""
    best = schema.best
    connection.execute(
        sa.delete(best).where(
            best.c.workload_id == row.workload_id, best.c.target_key == row.target_key, best.c.mode == row.mode
        )
    )
    values = {column.name: getattr(row, column.name) for column in best.c if column.name in row._fields}
    values |= {
        "record_id": row.id,
        "artifact_sha256": artifact_sha256,
        "verified": int(verified),
        "promoted_at": promoted_at,
    }
    connection.execute(sa.insert(best), values)


def put_profile(database: Database, connection: sa.Connection, record_id: int, profile: Profile) -> bool:
    """Adds a profile to a record; returns whether it is new."""
    row = {"record_id": record_id, "subject": profile.subject, "taken_at": profile.taken_at, "json": profile.to_json()}
    return bool(connection.execute(database.insert_new(schema.profile), row).rowcount)


def put_artifact(database: Database, connection: sa.Connection, sha256: str, plan_json: str, code: bytes) -> None:
    """Stores code that this machine vouches for; a row that is there already gets this machine's signature."""
    plan = json.loads(plan_json)
    vouched = {"machine": trust.machine_id(), "signature": trust.sign(sha256)}
    row = {"sha256": sha256, "kind": plan["kind"], "arch": plan["arch"], "plan": plan_json, "created_at": time.time()}
    connection.execute(database.insert_new(schema.artifact), {**row, "code": code, **vouched})
    connection.execute(sa.update(schema.artifact).where(schema.artifact.c.sha256 == sha256).values(vouched))
