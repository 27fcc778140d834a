"""The schema: migrations create the tables of the queries, and every released version still opens.

data/schema_vN.sql is a dump of a database of version N, written once. When the schema changes, append a migration, dump a
database of the new version to schema_vN.sql (sqlite3 FILE .dump) and leave the old ones as they are.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from records_support import H200, artifact, before_version_3, before_version_6, conv, profile, record

from schedsearch.errors import UntrustedDatabaseError
from schedsearch.measurement import Outcome, Record
from schedsearch.records import fields, schema, trust
from schedsearch.records.exchange import export_jsonl, import_jsonl, merge
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

UNSIGNED = ("schema_v1", "schema_v2", "schema_v3")  # best rows got signatures with version 4
RELEASED = sorted((Path(__file__).parent / "data").glob("schema_v*.sql"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose key is the one that wrote the dumps."""
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "machine-key").write_bytes(bytes(range(32)))
    (tmp_path / "state" / "machine-key").chmod(0o600)


def test_every_version_has_a_migration_and_a_dump() -> None:
    assert all(len(migrations) == fields.SCHEMA_VERSION for migrations in schema.MIGRATIONS.values())
    versions = [int(re.findall(r"\d+", path.name)[0]) for path in RELEASED]
    assert versions == list(range(1, fields.SCHEMA_VERSION + 1))


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


def test_migrations_make_exactly_what_the_newest_version_was_released_with(tmp_path: Path) -> None:
    """The statements derive from the table of fields: whoever changes a released field or trigger sees it here."""

    def statements(path: Path) -> dict[str, str]:
        with sqlite3.connect(path) as database:
            found = database.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        return {name: re.sub(r"\s+", " ", text).replace("( ", "(").replace(" )", ")") for name, text in found}

    Store.open(tmp_path / "records.db").close()
    assert statements(tmp_path / "records.db") == statements(restored(RELEASED[-1], tmp_path / "released.db"))


def test_every_table_is_strict(tmp_path: Path) -> None:
    with Store.open(tmp_path / "records.db") as store, sqlite3.connect(store.path) as other:
        tables = [
            (name, bool(strict), bool(without_rowid))
            for _, name, kind, _, without_rowid, strict in other.execute("PRAGMA table_list")
            if kind == "table" and not name.startswith("sqlite_")
        ]
        assert tables and all(strict for _, strict, _ in tables)
        assert ("best", True, True) in tables


def restored(dump: Path, path: Path) -> Path:
    """A database file made of a dump."""
    with sqlite3.connect(path) as old:
        old.executescript(dump.read_text())
    return path


def written(dump: Path) -> Callable[[Record], Record]:
    """The part of a record that a database of that version keeps."""
    if dump.stem in ("schema_v1", "schema_v2"):
        return before_version_3
    return before_version_6 if dump.stem in ("schema_v3", "schema_v4", "schema_v5") else lambda record: record


@pytest.mark.parametrize("dump", RELEASED, ids=lambda path: path.stem)
def test_a_database_of_every_released_version_opens(dump: Path, tmp_path: Path) -> None:
    path = restored(dump, tmp_path / "records.db")
    with Store.open(path) as store:
        assert store.health()["schema_version"] == fields.SCHEMA_VERSION and store.health()["problems"] == []
        wanted = [written(dump)(record(outcome=outcome, number=number)) for number, outcome in enumerate(Outcome)]
        found = store.history()
        assert [type(item)(**{**vars(item), "artifact": None}) for item in found] == wanted
        best = store.best(conv(), H200)
        assert best == found[0] and store.artifact(best.artifact or "") == artifact()
        (run,) = store.runs()
        assert run["summary"] == {"trials": 7} and run["info"] == {"command": "tune"}
        assert store.append(record(number=77)) == len(wanted) + 1
        assert store.append(written(dump)(record(number=0))) == 1, "the identity of a record's content has not changed"
        assert store.profiles(1) == ([] if dump.stem == "schema_v1" else [profile()])
    with Lookup(path) as lookup:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and row.artifact_sha256
        if dump.stem in UNSIGNED:  # nothing says that this code belongs to this workload
            with pytest.raises(UntrustedDatabaseError, match=r"an earlier version .* wrote it.*records verify --db"):
                lookup.code(row)
            trust.trust(path)
        assert lookup.code(row) == artifact().code


@pytest.mark.parametrize("dump", RELEASED, ids=lambda path: path.stem)
def test_a_database_of_every_released_version_is_read_as_it_is(dump: Path, tmp_path: Path) -> None:
    path = restored(dump, tmp_path / "records.db")
    before = path.read_bytes()
    with Store.open(path, readonly=True) as store:
        assert f"schema_v{store.health()['schema_version']}" == dump.stem and store.health()["problems"] == []
        found = store.history()
        wanted = [written(dump)(record(outcome=outcome, number=number)) for number, outcome in enumerate(Outcome)]
        assert [replace(item, artifact=None) for item in found] == wanted
        assert store.best(conv(), H200) == found[0]
        assert store.artifact(found[0].artifact or "") == artifact()
        assert store.profiles(1) == ([] if dump.stem == "schema_v1" else [profile()])
        assert [row.id for row in store.rows(limit=2)] == [8, 7] and len(store.runs()) == 1
        with Store.open(tmp_path / "new.db") as new:
            assert merge(new, [path]).records_added == len(Outcome)
            assert [replace(item, artifact=None, source="") for item in new.history()] == wanted
        export_jsonl(store, tmp_path / "lines.jsonl")
    with Store.open(tmp_path / "newer.db") as newer:
        report = import_jsonl(newer, tmp_path / "lines.jsonl")
        assert (report.bests_changed, report.bests_dropped) == ((0, 1) if dump.stem in UNSIGNED else (1, 0))
    assert path.read_bytes() == before


def test_every_older_version_can_be_seen_as_the_newest() -> None:
    for dialect, migrations in schema.MIGRATIONS.items():
        assert sorted(schema.SEEN_AS_NEWEST[dialect]) == list(range(1, len(migrations)))
