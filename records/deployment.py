"""Files for deployment: the best kernels of a store with their code, in one small database (`records export --deploy`)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import sqlalchemy as sa

from schedsearch.errors import DatabaseError, NoRecordError
from schedsearch.records import claims, dbfile, queries, schema, size_tables
from schedsearch.records.lookup import Lookup
from schedsearch.records.migrating import new_meta
from schedsearch.records.output import replacement
from schedsearch.records.sqlite import SqliteDatabase
from schedsearch.records.store import Store
from schedsearch.records.writes import claim_of, set_size_table
from schedsearch.workload import Workload, WorkloadRange


def export_deploy(
    store: Store,
    destination: str | Path,
    *,
    target: str | None = None,
    mode: str | None = None,
    workloads: Collection[Workload] | None = None,
    ranges: Collection[WorkloadRange] | None = None,
) -> dict[str, int]:
    """Writes a small read-only database with the best kernels and their code, for `compile` on other machines.

    Damaged bests, and bests whose code is damaged, are left out; `Store.damage` lists them.

    The file appears under its name only when it is complete, so it may replace a file that is in use. Another machine has to
    trust its kernels (`schedsearch records trust FILE`).

    Args:
        store: the source.
        destination: the file; an older deployment file there is replaced.
        target, mode, workloads: export only these; None means all.
        ranges: of the kernels of ranges of sizes only those that `compile` uses for these; None means all, or none if
            `workloads` are given.

    Returns:
        {"bests", "ranges", "artifacts", "unsigned", "size_bytes"}. Unsigned kernels are bests with code that this machine
        does not vouch for; it will not be loaded here.

    Raises:
        UsageError: the destination exists and is not a deployment file.
        NoRecordError: there is nothing to export.
        DatabaseError: it cannot be written.
    """
    path = Path(destination)
    dbfile.check(path, create=True, readonly=False)
    try:
        with replacement(path, keep_unless_deploy) as temporary:
            with contextlib.closing(SqliteDatabase(temporary, create=True, readonly=False)) as database:
                counts = _copy_deployed(store, database, target, mode, workloads)
                counts["ranges"] = _copy_ranges(
                    store, database, target, mode, () if workloads and ranges is None else ranges
                )
                if not counts["bests"] and not counts["ranges"]:
                    raise NoRecordError(
                        f"{store.name} has no best kernel to deploy{f' on {target}' if target else ''}; "
                        f"nothing was written; look with: schedsearch records best --db {store.name}"
                    )
                database.vacuum()
            counts["size_bytes"] = temporary.stat().st_size
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another path") from error
    return counts


def _copy_deployed(
    store: Store, database: SqliteDatabase, target: str | None, mode: str | None, workloads: Collection[Workload] | None
) -> dict[str, int]:
    best, artifact = schema.best, schema.artifact
    wanted = [column == value for column, value in ((best.c.target_key, target), (best.c.mode, mode)) if value is not None]
    if workloads is not None:
        wanted.append(best.c.workload_id.in_([workload.id for workload in workloads]))
    counts = {"bests": 0, "artifacts": 0, "unsigned": 0}
    database.create_deploy()
    with store.database.read() as reading, database.write() as writing:
        writing.execute(sa.insert(schema.meta), new_meta("deploy"))
        reader = store.reader(thorough=True)
        sound = {each.task for each in reader.bests(reading.execute(queries.bests().where(*wanted)))}
        workload_ids = {workload_id for workload_id, _, _ in sound}
        chosen = sa.select(best.c.workload_id).where(*wanted)
        for row in reading.execute(sa.select(schema.workload).where(schema.workload.c.id.in_(chosen))).mappings():
            if row["id"] in workload_ids:
                writing.execute(sa.insert(schema.workload), dict(row))
        used = sa.select(best.c.artifact_sha256).where(best.c.artifact_sha256.is_not(None), *wanted)
        query = queries.artifacts().where(artifact.c.sha256.in_(used)).execution_options(yield_per=16)
        copied: set[str | None] = {None}
        for stored in reader.artifacts(reading.execute(query)):
            writing.execute(sa.insert(artifact), dict(stored._mapping))
            copied.add(stored.sha256)
            counts["artifacts"] += 1
        for served in reading.execute(sa.select(best).where(*wanted)):
            if (served.workload_id, served.target_key, served.mode) not in sound or served.artifact_sha256 not in copied:
                continue
            values, claim = dict(served._mapping), claim_of(served)
            if claims.vouches(claim, served.signature):
                values["signature"] = claims.sign(claims.Kind.BEST, claim.text)  # it may have been marked only
            else:
                counts["unsigned"] += served.artifact_sha256 is not None
            writing.execute(sa.insert(best), values)
            counts["bests"] += 1
    return counts


def _copy_ranges(
    store: Store, database: SqliteDatabase, target: str | None, mode: str | None, ranges: Collection[WorkloadRange] | None
) -> int:
    """Copies the kernels of ranges of sizes. Returns how many ranges."""
    rows = [row for row in store.ranges(target=target) if mode in (None, row.mode)]
    if ranges is not None:
        rows = [row for row in rows if any(row == store.range_of(each, row.target_key, row.mode) for each in ranges)]
    with database.write() as writing:
        for row in rows:
            set_size_table(writing, size_tables.signed(row) if row.vouched else row)
    return len(rows)


def keep_unless_deploy(path: Path) -> str | None:
    """The objection (see `output.replacement`) to replacing anything but a deployment file."""
    try:
        with Lookup(path) as lookup:
            is_deploy = lookup.kind == "deploy"
    except DatabaseError:
        is_deploy = False
    return None if is_deploy else "exists and is not a deployment file, so it is left alone; delete it or give another path"
