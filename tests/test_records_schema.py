"""The schema: migrations lead to the tables of the queries, and every released version still opens.

data/schema_vN.sql is a dump of a database of version N, written once. When the schema changes, append a migration, dump a
database of the new version to schema_vN.sql (sqlite3 FILE .dump) and leave the old ones as they are.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from records_support import H200, artifact, conv, profile, record

from schedsearch.measurement import Outcome
from schedsearch.records import dbfile, schema
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

RELEASED = sorted((Path(__file__).parent / "data").glob("schema_v*.sql"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose key is the one that wrote the dumps."""
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "machine-key").write_bytes(bytes(range(32)))


def test_every_version_has_a_migration_and_a_dump() -> None:
    assert all(len(migrations) == dbfile.SCHEMA_VERSION for migrations in schema.MIGRATIONS.values())
    versions = [int(re.findall(r"\d+", path.name)[0]) for path in RELEASED]
    assert versions == list(range(1, dbfile.SCHEMA_VERSION + 1))


def described(table: sa.Table) -> list[tuple]:
    types = {"INTEGER": sa.Integer, "REAL": sa.Float, "FLOAT": sa.Float, "TEXT": sa.Text, "BLOB": sa.LargeBinary}
    found = []
    for column in table.columns:
        kind = next(name for name, type_ in types.items() if isinstance(column.type, type_))
        found.append((column.name, "REAL" if kind == "FLOAT" else kind, bool(column.nullable), bool(column.primary_key)))
    return found


def test_migrations_build_the_tables_that_queries_are_written_against(tmp_path: Path) -> None:
    with Store.open(tmp_path / "records.db") as store, store.database.read() as connection:
        built = sa.MetaData()
        built.reflect(connection)
        tables = {name: table for name, table in built.tables.items() if not name.startswith("sqlite_")}
        assert set(tables) == set(schema.metadata.tables)
        for name, table in schema.metadata.tables.items():
            assert described(tables[name]) == described(table), name


def test_every_table_is_strict(tmp_path: Path) -> None:
    with Store.open(tmp_path / "records.db") as store, sqlite3.connect(store.path) as other:
        tables = [
            (name, bool(strict), bool(without_rowid))
            for _, name, kind, _, without_rowid, strict in other.execute("PRAGMA table_list")
            if kind == "table" and not name.startswith("sqlite_")
        ]
        assert tables and all(strict for _, strict, _ in tables)
        assert ("best", True, True) in tables


@pytest.mark.parametrize("dump", RELEASED, ids=lambda path: path.stem)
def test_a_database_of_every_released_version_opens(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with sqlite3.connect(path) as old:
        old.executescript(dump.read_text())
    with Store.open(path) as store:
        assert store.health()["schema_version"] == dbfile.SCHEMA_VERSION and store.health()["problems"] == []
        wanted = [record(outcome=outcome, number=number) for number, outcome in enumerate(Outcome)]
        found = store.history()
        assert [type(item)(**{**vars(item), "artifact": None}) for item in found] == wanted
        best = store.best(conv(), H200)
        assert best == found[0] and store.artifact(best.artifact or "") == artifact()
        (run,) = store.runs()
        assert run["summary"] == {"trials": 7} and run["info"] == {"command": "tune"}
        assert store.append(record(number=77)) == len(wanted) + 1
        assert store.append(record(number=0)) == 1, "the identity of a record's content has not changed"
        assert store.profiles(1) == ([] if dump.stem == "schema_v1" else [profile()])
    with Lookup(path) as lookup:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and lookup.code(row.artifact_sha256 or "") == artifact().code


def test_an_older_database_that_is_opened_to_read_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with sqlite3.connect(path) as old:
        old.executescript(RELEASED[0].read_text())
    with Store.open(path, readonly=True) as store:
        assert store.health()["schema_version"] == dbfile.SCHEMA_VERSION and len(store.history()) == len(Outcome)
