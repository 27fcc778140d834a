"""How a database comes to the newest schema version, whatever its dialect."""

from __future__ import annotations

import time
import uuid as uuids
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import sqlalchemy as sa

from schedsearch.errors import DatabaseError
from schedsearch.records import claims, fields, schema


def version_of(found: Mapping[str, str], name: str, *, create: bool) -> int:
    """The schema version of the database `name` by its table meta; 0 for a database without tables, if `create`.

    Raises:
        DatabaseError: it has no tables, or is a deployment file.
    """
    if not found and not create:
        raise DatabaseError(
            f"{name} is a database without tables: nothing was recorded in it yet, or the disk was full when it was made; "
            "let schedsearch tune or records import fill it, or delete it"
        )
    if found.get("kind", "store") != "store":
        raise DatabaseError(
            f"{name} is a deployment file: it holds best kernels and no measurements; give the database it was exported from"
        )
    return int(found.get("schema_version", 0))


def migrate(connection: sa.Connection, dialect: str, version: int) -> None:
    """Brings the tables of a version to the newest; creates them for version 0. The caller has begun the transaction."""
    for statement in (text for step in schema.MIGRATIONS[dialect][version:] for text in step):
        connection.exec_driver_sql(statement)
    if not version:
        connection.execute(sa.insert(schema.meta), new_meta("store"))
    newest = sa.update(schema.meta).where(schema.meta.c.key == "schema_version")
    connection.execute(newest.values(value=str(fields.SCHEMA_VERSION)))


@contextmanager
def migrating(name: str, version: int) -> Iterator[None]:
    """Statements of a migration fail only if the tables are not those of their version."""
    try:
        yield
    except sa.exc.IntegrityError as error:
        raise DatabaseError(
            f"{name} is damaged: it does not fit schema version {version}, so that it cannot be brought to version "
            f"{fields.SCHEMA_VERSION} ({error.orig}); restore a copy, or read its records into a new database: "
            "schedsearch records merge"
        ) from error


def new_meta(kind: str) -> list[dict[str, str]]:
    """The rows of table meta for a new database of this machine."""
    uuid = str(uuids.uuid4())
    values = {
        "schema_version": str(fields.SCHEMA_VERSION),
        "uuid": uuid,
        "kind": kind,
        "machine": claims.machine_id(),
        "signature": claims.sign(claims.Kind.DATABASE, uuid),
        "created_at": repr(time.time()),
    }
    return [{"key": key, "value": value} for key, value in values.items()]


def parts_made(dialect: str, version: int) -> list[tuple[str, str]]:
    """The kind ("index", "trigger") and name of everything beside the tables that a database of this version has."""
    made = (text.split() for step in schema.MIGRATIONS[dialect][:version] for text in step)
    found = [(words[1].lower(), words[2]) for words in made if words[:2] in (["CREATE", "INDEX"], ["CREATE", "TRIGGER"])]
    return list(dict.fromkeys(found))
