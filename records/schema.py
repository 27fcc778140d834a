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

from sqlalchemy import BigInteger, Column, Float, LargeBinary, MetaData, Table, Text

from schedsearch.records import fields
from schedsearch.records.dialects import POSTGRESQL, SQLITE, Dialect
from schedsearch.records.fields import RECORD, SCHEMA_VERSION, Field, TableFields

metadata = MetaData()
_TYPES = {"INTEGER": BigInteger, "REAL": Float, "TEXT": Text, "BLOB": LargeBinary}


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


# ---- migrations, in the words of each dialect


def _definition(field: Field, dialect: Dialect, key: str = "") -> str:
    default = f"DEFAULT '{field.default}'" if field.default is not None else ""
    null, constraint = "" if field.null else "NOT NULL", dialect.constraint(field.constraint)
    return " ".join(filter(None, (field.name, dialect.type(field.sql), null, key, default, constraint)))


def _create(table: TableFields, dialect: Dialect) -> str:
    """CREATE TABLE, as the version that added the table had it."""
    columns = [each for each in table.fields if each.since <= table.since]
    keys = [each.name for each in columns if each.key]
    lines = [_definition(each, dialect, "PRIMARY KEY" if keys == [each.name] else "") for each in columns]
    lines += [f"PRIMARY KEY ({', '.join(keys)})"] if len(keys) > 1 else []
    lines += [table.constraints] if table.constraints else []
    return f"CREATE TABLE {table.name} ({', '.join(lines)}){dialect.options(table.options)}"


_ADDED_LATER = ("artifact_sha256", "signature")  # to a record whose code is kept later
_NEVER_CHANGED = "record_is_never_changed"  # the trigger that protects a record's columns; it follows them


def _record_is_never_changed(version: int, dialect: Dialect) -> str:
    columns = [each.name for each in RECORD.fields if each.since <= version and each.name not in _ADDED_LATER]
    return dialect.refusing(_NEVER_CHANGED, f"UPDATE OF {', '.join(columns)}", "record", "records are append-only")


def _beside(table: str, dialect: Dialect) -> tuple[str, ...]:
    """The indexes and triggers of a table."""

    def refusing(name: str, action: str, when: str = "") -> str:
        return dialect.refusing(name, action, table, f"{table}s are append-only", when)

    if table == "workload":
        return ("CREATE INDEX workload_by_op ON workload (op)",)
    if table == "record":
        return (
            "CREATE INDEX record_by_task ON record (workload_id, target_key, mode, template)",
            "CREATE INDEX record_by_run ON record (run)",
            refusing("record_is_never_deleted", "DELETE"),
            _record_is_never_changed(1, dialect),
            refusing("record_artifact_is_added_once", "UPDATE OF artifact_sha256", "OLD.artifact_sha256 IS NOT NULL"),
        )
    if table == "profile":
        return refusing("profile_is_never_deleted", "DELETE"), refusing("profile_is_never_changed", "UPDATE")
    return ()


def _migration(version: int, tables: Iterable[TableFields], dialect: Dialect) -> tuple[str, ...]:
    """The statements that lead to a version from the one before."""
    found = list(dialect.before) if version == 1 else []
    for table in tables:
        added = [each for each in table.fields if each.since == version > table.since]
        found += [f"ALTER TABLE {table.name} ADD COLUMN {_definition(each, dialect)}" for each in added]
        if table.since == version:
            found += [_create(table, dialect), *_beside(table.name, dialect)]
        elif table is RECORD and any(each.name not in _ADDED_LATER for each in added):
            found += [dialect.without(_NEVER_CHANGED, "record"), _record_is_never_changed(version, dialect)]
    return tuple(found)


def _seen_as_newest(version: int, dialect: Dialect) -> tuple[str, ...]:
    """Temporary tables and views for what a version lacks."""
    found = []
    for table in fields.TABLES:
        added = [each for each in table.fields if each.since > version]
        if table.since > version:
            columns = ", ".join(f"{each.name} {dialect.type(each.sql)}" for each in table.fields)
            found.append(f"CREATE TEMP TABLE {table.name} ({columns}){dialect.options('STRICT')}")
        elif added:
            values = (f"{dialect.default(each.sql, each.default)} AS {each.name}" for each in added)
            of = f"{dialect.main}.{table.name}"
            found.append(f"CREATE TEMP VIEW {table.name} AS SELECT *, {', '.join(values)} FROM {of}")
    return tuple(found)


_VERSIONS = range(1, SCHEMA_VERSION + 1)
_DEPLOYED = [table for table in fields.TABLES if table.deployed]
_DIALECTS = (SQLITE, POSTGRESQL)

# dialect -> the statements that migrate from version i to version i + 1
MIGRATIONS = {each.name: tuple(_migration(version, fields.TABLES, each) for version in _VERSIONS) for each in _DIALECTS}
# dialect -> version -> the statements that make a database of this older version look like the newest to one connection.
# Read-only connections use them; they write nothing to the database.
SEEN_AS_NEWEST = {each.name: {version: _seen_as_newest(version, each) for version in _VERSIONS[:-1]} for each in _DIALECTS}
# the statements that create a deployment file, which is one of SQLite, of the newest version
DEPLOY_SCHEMA = tuple(text for version in _VERSIONS for text in _migration(version, _DEPLOYED, SQLITE))
