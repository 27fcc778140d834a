"""Writes shipped records (`shipped`): the entries of a store as a deployment file without machine code."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from schedsearch.errors import DatabaseError, NoRecordError, UsageError
from schedsearch.identity import canonical_json
from schedsearch.records import schema
from schedsearch.records.deployment import keep_unless_deploy
from schedsearch.records.entries import Entry, Task, chosen
from schedsearch.records.lookup import Lookup, LookupRow
from schedsearch.records.migrating import new_meta
from schedsearch.records.output import replacement
from schedsearch.records.sharing import checked_who, manifest_of
from schedsearch.records.shipped import GAINS, MANIFEST, Shipped, file_name, gain_key
from schedsearch.records.sqlite import SqliteDatabase
from schedsearch.records.store import Store

MAX_BYTES = 5 << 20
"""Of a file: it is in every wheel."""

_UNSIGNED = {"artifact_sha256": None, "signature": "", "verified": 0}


def ship(store: Store, folder: str | Path, target: str, who: str) -> dict[str, Any]:
    """Writes the file of shipped records for a kind of device. What a file there has for other tasks stays in it.

    The file has no machine code and no signature: whoever uses a row builds and verifies its kernel.

    Args:
        store: what was measured; its entries (`entries.chosen`) are shipped.
        folder: where the file is written, under `shipped.file_name(target)`.
        target: key of the kind of device.
        who: measured it; for the manifest.

    Returns:
        {"file", "records", "defaults", "kept", "left_out", "size_bytes"}: records that the store gave, how many of them are
        their default, how many of the file before stay, how many bests had no final race, and the size.

    Raises:
        NoRecordError: the store has none for the target.
        UsageError: `who` is impossible, the file would be larger than `MAX_BYTES`, or there is another file.
        DatabaseError: it cannot be written.
    """
    who = checked_who(who)
    found = chosen(store, target=target)
    if not found.entries:
        raise NoRecordError(f"{store.name} has no record of a final race with its default on {target}; tune first")
    path = Path(folder) / file_name(target)
    entries = {each.task: each for each in found.entries}
    try:
        with _alone_in(path.parent), replacement(path, keep_unless_deploy) as temporary:
            before = _before(path, set(entries))
            with contextlib.closing(SqliteDatabase(temporary, create=True, readonly=False)) as database:
                _write(database, entries, before, who)
                database.vacuum()
            size = temporary.stat().st_size
            if size > MAX_BYTES:
                raise UsageError(
                    f"{path} would have {size / 2**20:.1f} MiB; allowed: {MAX_BYTES >> 20}; ship the records of fewer layers"
                )
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another folder") from error
    return {
        "file": str(path),
        "records": len(entries),
        "defaults": sum(each.is_default for each in entries.values()),
        "kept": len(before.rows),
        "left_out": found.left_out,
        "size_bytes": size,
    }


def shipped_ids(folder: str | Path, target: str, mode: str, versions: Mapping[str, int]) -> set[str]:
    """The ids of the workloads that the file of a kind of device in a folder has records of.

    Args:
        mode: how they were timed.
        versions: template -> its version; a record of another version of its template does not count.

    Raises:
        UsageError: the file there is another one, which `ship` would not replace.
        DatabaseError: there is a file that cannot be used.
    """
    path = Path(folder) / file_name(target)
    if not path.exists():
        return set()
    if objection := keep_unless_deploy(path):
        raise UsageError(f"{path} {objection}")
    with Lookup(path) as lookup:
        rows = [row for row, _, _ in lookup.bests()]
    return {
        row.workload_id
        for row in rows
        if (row.target_key, row.mode) == (target, mode) and versions.get(row.template) == row.template_version
    }


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process writes shipped records there: two cards of one kind may be tuned at once, and each run
    keeps what the file has."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)  # frees the lock


class _Before:
    """The rows of the file that is replaced, without those of the tasks that are written anew."""

    def __init__(self) -> None:
        self.rows: list[tuple[LookupRow, str, str]] = []
        self.gains: dict[str, float] = {}
        self.toolchains: list[Any] = []


def _before(path: Path, new: set[Task]) -> _Before:
    before = _Before()
    if not path.exists():
        return before
    with Lookup(path) as lookup:
        shipped = Shipped(lookup)
        before.toolchains = list(shipped.manifest.get("toolchains", []))
        for row, op, text in lookup.bests():
            if (row.workload_id, row.target_key, row.mode) not in new:
                before.rows.append((row, op, text))
                if (gain := shipped.gain(row.workload_id, row.mode)) is not None:
                    before.gains[gain_key(row.workload_id, row.mode)] = gain
    return before


def _write(database: SqliteDatabase, entries: dict[Task, Entry], before: _Before, who: str) -> None:
    records = [each.record for each in entries.values() if each.record is not None]
    manifest = manifest_of(records, who)
    manifest["records"] += len(before.rows)
    manifest["toolchains"] += [each for each in before.toolchains if each not in manifest["toolchains"]]
    manifest["toolchain"] = records[-1].toolchain
    gains = {gain_key(each.task[0], each.task[2]): round(each.gain, 4) for each in entries.values() if each.gain}
    database.create_deploy()
    with database.write() as writing:
        extra = {MANIFEST: canonical_json(manifest), GAINS: canonical_json(before.gains | gains)}
        writing.execute(
            sa.insert(schema.meta), new_meta("deploy") + [{"key": key, "value": text} for key, text in extra.items()]
        )
        workloads = {row.workload_id: {"id": row.workload_id, "op": op, "json": text} for row, op, text in before.rows}
        workloads |= {
            each.id: {"id": each.id, "op": each.op, "json": each.json} for each in (record.workload for record in records)
        }
        writing.execute(sa.insert(schema.workload), list(workloads.values()))
        bests = [_row(row) for row, _, _ in before.rows]
        bests += [
            {
                "workload_id": each.task[0], "target_key": each.task[1], "mode": each.task[2],
                "template": each.template, "template_version": each.template_version, "config": each.config.json,
                "time_ns": each.time_ns, "promoted_at": manifest["made_at"], **_UNSIGNED,
            }
            for each in entries.values()
        ]  # fmt: skip
        numbered = [{**each, "record_id": number} for number, each in enumerate(bests, 1)]
        writing.execute(sa.insert(schema.best), numbered)


def _row(row: LookupRow) -> dict[str, Any]:
    return {
        "workload_id": row.workload_id, "target_key": row.target_key, "mode": row.mode, "template": row.template,
        "template_version": row.template_version, "config": row.config_json, "time_ns": row.time_ns, "promoted_at": 0.0,
        **_UNSIGNED,
    }  # fmt: skip
