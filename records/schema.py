"""The tables, and the ordered migrations that create them: both derive from `fields`.

Queries use the `Table` objects, which describe the newest schema. What a released version looks like is never changed: a
change adds a field or a table with the next version. Tests compare what the migrations
make with a dump of a database of every released version, and open each of them.

`record` is append-only: triggers refuse every change except the later addition of an artifact's sha256. `best` has a small
row per (workload, target, mode) that names a record and the artifact to run; its signature covers what it says
(`claims.Claim`). `artifact` has the machine code. `profile` has the metrics of a hardware profiler and is also append-only.
`size_table` has the kernels of ranges of sizes. The text columns config, times_ns, clocks, info, summary, json and plan hold
JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, Float, Integer, LargeBinary, MetaData, Table, Text

from schedsearch.records import fields
from schedsearch.records.fields import RECORD, SCHEMA_VERSION, Field, TableFields

metadata = MetaData()
_TYPES = {"INTEGER": Integer, "REAL": Float, "TEXT": Text, "BLOB": LargeBinary}


def _table(of: TableFields) -> Table:
    columns: list[Column[Any]] = [
        Column(each.name, _TYPES[each.sql], primary_key=each.key, nullable=each.null, default=each.default)
        for each in of.fields
    ]
    return Table(of.name, metadata, *columns)


meta = _table(fields.META)
workload = _table(fields.WORKLOAD)
toolchain = _table(fields.TOOLCHAIN)
run = _table(fields.RUN)
record = _table(RECORD)
artifact = _table(fields.ARTIFACT)
best = _table(fields.BEST)
profile = _table(fields.PROFILE)
size_table = _table(fields.SIZE_TABLE)


# ---- migrations of SQLite


def _definition(field: Field, key: str = "") -> str:
    default = f"DEFAULT '{field.default}'" if field.default is not None else ""
    return " ".join(filter(None, (field.name, field.sql, "" if field.null else "NOT NULL", key, default, field.constraint)))


def _create(table: TableFields) -> str:
    """CREATE TABLE, as the version that added the table had it."""
    columns = [each for each in table.fields if each.since <= table.since]
    keys = [each.name for each in columns if each.key]
    lines = [_definition(each, "PRIMARY KEY" if keys == [each.name] else "") for each in columns]
    lines += [f"PRIMARY KEY ({', '.join(keys)})"] if len(keys) > 1 else []
    lines += [table.constraints] if table.constraints else []
    return f"CREATE TABLE {table.name} ({', '.join(lines)}) {table.options}"


def _record_is_never_changed(version: int) -> str:
    columns = [each.name for each in RECORD.fields if each.since <= version and each.name not in _ADDED_LATER]
    return _refusing("record_is_never_changed", f"UPDATE OF {', '.join(columns)} ON record", "records")


def _refusing(name: str, action: str, what: str) -> str:
    return f"CREATE TRIGGER {name} BEFORE {action} BEGIN SELECT RAISE(ABORT, '{what} are append-only'); END"


_ADDED_LATER = ("artifact_sha256", "signature")  # to a record whose code is kept later

# Indexes and triggers, by table. The trigger that protects the columns of `record` follows them from version to version.
_BESIDE = {
    "workload": ("CREATE INDEX workload_by_op ON workload (op)",),
    "record": (
        "CREATE INDEX record_by_task ON record (workload_id, target_key, mode, template)",
        "CREATE INDEX record_by_run ON record (run)",
        _refusing("record_is_never_deleted", "DELETE ON record", "records"),
        _record_is_never_changed(1),
        _refusing(
            "record_artifact_is_added_once",
            "UPDATE OF artifact_sha256 ON record WHEN OLD.artifact_sha256 IS NOT NULL",
            "records",
        ),
    ),
    "profile": (
        _refusing("profile_is_never_deleted", "DELETE ON profile", "profiles"),
        _refusing("profile_is_never_changed", "UPDATE ON profile", "profiles"),
    ),
}


def _migration(version: int, tables: Iterable[TableFields]) -> tuple[str, ...]:
    """The statements that lead to a version from the one before."""
    found: list[str] = []
    for table in tables:
        added = [each for each in table.fields if each.since == version > table.since]
        found += [f"ALTER TABLE {table.name} ADD COLUMN {_definition(each)}" for each in added]
        if table.since == version:
            found += [_create(table), *_BESIDE.get(table.name, ())]
        elif table is RECORD and any(each.name not in _ADDED_LATER for each in added):
            found += ["DROP TRIGGER record_is_never_changed", _record_is_never_changed(version)]
    return tuple(found)


def _seen_as_newest(version: int) -> tuple[str, ...]:
    """Temporary tables and views for what a version lacks."""
    found = []
    for table in fields.TABLES:
        added = [each for each in table.fields if each.since > version]
        if table.since > version:
            columns = ", ".join(f"{each.name} {each.sql}" for each in table.fields)
            found.append(f"CREATE TEMP TABLE {table.name} ({columns}) STRICT")
        elif added:
            values = (f"{'NULL' if each.default is None else repr(each.default)} AS {each.name}" for each in added)
            found.append(f"CREATE TEMP VIEW {table.name} AS SELECT *, {', '.join(values)} FROM main.{table.name}")
    return tuple(found)


_VERSIONS = range(1, SCHEMA_VERSION + 1)
_DEPLOYED = [table for table in fields.TABLES if table.deployed]

# dialect -> the statements that migrate from version i to version i + 1
MIGRATIONS = {"sqlite": tuple(_migration(version, fields.TABLES) for version in _VERSIONS)}
# dialect -> version -> the statements that make a database of this older version look like the newest to one connection.
# Read-only connections use them; they write nothing to the file.
SEEN_AS_NEWEST = {"sqlite": {version: _seen_as_newest(version) for version in _VERSIONS[:-1]}}
# dialect -> the statements that create a deployment file of the newest version
DEPLOY_SCHEMA = {"sqlite": tuple(text for version in _VERSIONS for text in _migration(version, _DEPLOYED))}
