"""Statements that both the store and an exchange run. The caller has begun the transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import sqlalchemy as sa

from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import Record
from schedsearch.profiling.profile import Profile
from schedsearch.records import claims, queries, schema, size_tables
from schedsearch.records.database import Database
from schedsearch.records.rows import is_own_record, sign_record, to_row
from schedsearch.records.size_tables import SizeTableRow
from schedsearch.size_table import SizeTable
from schedsearch.workload import WorkloadRange


class Over(Enum):
    """Which best of a task a record replaces."""

    ANY = "any"
    SLOWER = "slower"
    NONE = "none"


def set_best(
    database: Database,
    connection: sa.Connection,
    row: Any,
    artifact_sha256: str | None,
    *,
    verified: bool,
    promoted_at: float,
    over: Over,
    raced: Sequence[Record] = (),
) -> bool:
    """Makes a row of table record the best of its (workload, target, mode).

    Over slower ones, the present best stays unless the record is faster, or the present one's configuration is that of a
    record in `raced`, which tells the two apart better than times of two days do. Two records compare

    - by time over the anchor's time if both anchors are the same machine code, so that a cool card has no advantage;
    - by time otherwise.

    The same record with code also replaces a present best without code. All of it is one statement, so the faster of two
    writers stays whatever their order.

    The caller vouches for the row and its code: this machine signs them. A present best that does not count is replaced in
    any case (`_weightless`).

    Returns:
        Whether the record is the best now.
    """
    best, record = schema.best, schema.record
    claim = claim_of(row, verified=verified, artifact_sha256=artifact_sha256)
    values = {column.name: getattr(row, column.name) for column in best.c if column.name in row._fields}
    values |= {
        "signature": claims.sign(claims.Kind.BEST, claim.text),
        "record_id": row.id,
        "artifact_sha256": artifact_sha256,
        "verified": int(verified),
        "promoted_at": promoted_at,
    }
    statement = database.insert(best).values(values)
    new = statement.excluded
    # As a column of the table, SQLAlchemy would let it run over all rows of `best`: it correlates nothing in ON CONFLICT.
    present_id = sa.literal_column(f"{best.name}.{best.c.record_id.name}", sa.Integer)
    present_anchor_ns = (
        sa.select(record.c.anchor_ns)
        .where(record.c.id == present_id, record.c.anchor_code == row.anchor_code)
        .scalar_subquery()
    )
    handicap = sa.func.coalesce(row.anchor_ns / present_anchor_ns, 1.0) if row.anchor_code else 1.0
    gains_code = sa.and_(
        best.c.record_id == new.record_id, best.c.artifact_sha256.is_(None), new.artifact_sha256.is_not(None)
    )
    is_replaced: sa.ColumnElement[bool] = sa.true() if over is Over.ANY else sa.false()
    if over is Over.SLOWER:
        is_faster = new.time_ns < best.c.time_ns * handicap
        is_replaced = sa.or_(is_faster, gains_code, *map(names_candidate, raced), _weightless(connection, row))
    statement = statement.on_conflict_do_update(
        index_elements=[best.c.workload_id, best.c.target_key, best.c.mode],
        set_={column.name: new[column.name] for column in best.c if not column.primary_key},
        where=is_replaced,
    )
    is_best = connection.execute(statement.returning(best.c.record_id)).scalar() is not None
    if is_best and verified:
        claims.reinstate(claim)
    return is_best


def claim_of(row: Any, *, verified: bool | None = None, artifact_sha256: str | None = None) -> claims.Claim:
    """The claim of a row of table best, or of a row of table record with what is missing there."""
    if verified is None:
        verified, artifact_sha256 = bool(row.verified), row.artifact_sha256
    task, candidate = (row.workload_id, row.target_key, row.mode), (row.template, row.template_version, row.config)
    return claims.Claim(*task, *candidate, row.time_ns, verified, artifact_sha256)


def names_candidate(record: Record) -> sa.ColumnElement[bool]:
    """Whether a row of table best is of a record's task and names its configuration."""
    row, best = to_row(record), schema.best
    names = ("workload_id", "target_key", "mode", "template", "template_version", "config")
    return sa.and_(*(best.c[name] == row[name] for name in names))


def _weightless(connection: sa.Connection, new: Any) -> sa.ColumnElement[bool]:
    """Whether a row of table best need not be beaten by a row of table record: the present best of the task, or a later one.

    It counts if this machine vouches for it, or if it has no signature because this database of ours is older than
    signatures. What somebody else wrote into the row does not count, so that it cannot keep out what is measured here.
    """
    best = schema.best
    task = (best.c.workload_id == new.workload_id, best.c.target_key == new.target_key, best.c.mode == new.mode)
    row = connection.execute(sa.select(best).where(*task)).one_or_none()
    if row is None or claims.vouches(claim_of(row), row.signature):
        return sa.false()
    meta = connection.execute(sa.select(schema.meta)).all()
    if not row.signature and claims.created_here({each.key: each.value for each in meta}):
        return sa.false()
    return sa.and_(best.c.record_id == row.record_id, best.c.signature == row.signature)


def put_profile(database: Database, connection: sa.Connection, record_id: int, profile: Profile) -> bool:
    """Adds a profile to a record. Returns whether it is new."""
    row = {"record_id": record_id, "subject": profile.subject, "taken_at": profile.taken_at, "json": profile.to_json()}
    return bool(connection.execute(database.insert(schema.profile).on_conflict_do_nothing(), row).rowcount)


def put_artifact(database: Database, connection: sa.Connection, sha256: str, plan_json: str, code: bytes) -> None:
    """Stores code that this machine vouches for, and signs it. It replaces a row with this sha256, which may be damaged.

    Raises:
        PlanError: the text is not a sound launch plan.
    """
    plan = LaunchPlan.from_json(plan_json)
    row = {
        "sha256": sha256,
        "kind": plan.kind,
        "arch": plan.arch,
        "plan": plan_json,
        "created_at": time.time(),
        "code": code,
        "machine": claims.machine_id(),
        "signature": claims.sign(claims.Kind.ARTIFACT, sha256),
    }
    statement = database.insert(schema.artifact).values(row)
    changed = {name: statement.excluded[name] for name in row if name != "sha256"}
    connection.execute(statement.on_conflict_do_update(index_elements=[schema.artifact.c.sha256], set_=changed))


def put_artifact_of(database: Database, connection: sa.Connection, row: Any, artifact: Artifact | None) -> str | None:
    """The sha256 for the row in `best` of a promoted record, a row of `rows.stored`. Stores the artifact if one is given.

    Without one, the record says which code it is of. That counts only if this machine said so, of this very content.
    """
    if artifact is None:
        if not is_own_record(row._mapping):
            return None
        code = sa.select(schema.artifact.c.sha256).where(schema.artifact.c.sha256 == row.artifact_sha256)
        return connection.execute(code).scalar()
    put_artifact(database, connection, artifact.sha256, artifact.plan.to_json(), artifact.code)
    if row.artifact_sha256 is None:
        values = {"artifact_sha256": artifact.sha256}
        if row.signature:
            values["signature"] = sign_record(row.content_id, artifact.sha256)
        connection.execute(sa.update(schema.record).where(schema.record.c.id == row.id).values(values))
    return artifact.sha256


def drop_artifacts(connection: sa.Connection, keep: int) -> dict[str, int]:
    """Drops code except that of the best and of the `keep` fastest records of each task; see `Store.prune`."""
    artifact = schema.artifact
    unwanted = artifact.c.sha256.not_in(queries.artifacts_to_keep(keep))
    dropped, freed = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(sa.func.length(artifact.c.code)), 0)).where(unwanted)
    ).one()
    connection.execute(sa.delete(artifact).where(unwanted))
    left = connection.execute(sa.select(sa.func.count()).select_from(artifact)).scalar_one()
    return {"artifacts_kept": left, "artifacts_dropped": dropped, "bytes_freed": freed}


def put_size_table(database: Database, of_range: WorkloadRange, target_key: str, mode: str, table: SizeTable) -> None:
    """Stores the kernels of a range and signs them. They replace earlier ones of the same range, target and mode."""
    ends = of_range.low, of_range.high
    row = size_tables.made(of_range.family, target_key, mode, *ends, of_range.label, *table.to_bytes())

    def put() -> None:
        with database.write() as connection:
            set_size_table(connection, row)

    database.again(put)


def set_size_table(connection: sa.Connection, row: SizeTableRow, *, if_newer: bool = False) -> bool:
    """Stores a table in place of that of the same range, target and mode. Returns whether it did.

    Args:
        if_newer: keep the one that is there, if it was made at the same time or later and this machine vouches for it.
    """
    table = schema.size_table
    same = [column == getattr(row, column.name) for column in table.c if column.primary_key]
    there = connection.execute(sa.select(*(table.c[name] for name in size_tables.COLUMNS)).where(*same)).one_or_none()
    if if_newer and there is not None and there.made_at >= row.made_at and SizeTableRow._make(there).vouched:
        return False
    connection.execute(sa.delete(table).where(*same))
    connection.execute(sa.insert(table), row._asdict())
    return True
