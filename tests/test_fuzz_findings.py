"""What the fuzzers found, as small cases of their own."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from schedsearch.errors import DatabaseError, NoRecordError
from schedsearch.records.deployment import export_deploy
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

DUMPS = sorted((Path(__file__).parent / "data").glob("schema_v*.sql"))


@pytest.fixture(params=DUMPS, ids=lambda path: path.stem)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A database of a released schema version."""
    path = tmp_path / "some.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(request.param.read_text())
    return path


def changed(path: Path, *statements: str) -> Path:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)
    return path


def test_sqlite_quotes_a_damaged_schema_whose_bytes_are_no_text(database: Path) -> None:
    """Python then raises UnicodeDecodeError instead of an error of SQLite."""
    data = database.read_bytes()
    assert b"TABLE best (" in data
    database.write_bytes(data.replace(b"TABLE best (", b"TABL\xeb best ("))
    for reader in (lambda: Store.open(database, readonly=True), lambda: Store.open(database), lambda: Lookup(database)):
        with pytest.raises(DatabaseError, match=r"some\.db is damaged"), reader() as opened:
            opened.refresh() if isinstance(opened, Lookup) else opened.history()


@pytest.mark.parametrize("table", ["record", "best", "workload", "meta"])
def test_a_table_is_missing(database: Path, table: str) -> None:
    """The views that stand for an older table name it, and SQLite finds out when it looks at any of them."""
    changed(database, "PRAGMA foreign_keys = OFF", f"DROP TABLE {table}")
    for readonly in (True, False):
        with pytest.raises(DatabaseError, match=r"some\.db"):
            Store.open(database, readonly=readonly)


def test_a_trigger_is_missing_that_a_migration_replaces(database: Path) -> None:
    changed(database, "DROP TRIGGER record_is_never_changed")
    try:
        Store.open(database).close()
    except DatabaseError as error:
        assert "some.db is damaged (no such trigger" in str(error)


def test_messages_escape_what_a_terminal_obeys_and_what_cannot_be_encoded() -> None:
    error = DatabaseError("a target \x00 \x1b[31m \ud800 \u202e, an é\nand a line")
    assert str(error) == "a target \\x00 \\x1b[31m \\ud800 \\u202e, an é\nand a line"


def test_a_damaged_database_is_named_and_not_the_one_that_is_written_from_it(tmp_path: Path) -> None:
    """An export reads one database while it writes another."""
    from records_support import artifact, record

    source, big = tmp_path / "some.db", b"\x7fELF" + bytes(100_000)
    with Store.open(source) as store:
        store.promote(store.append(record(1e6)), artifact(big))
    with contextlib.closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT max(pageno) FROM dbstat WHERE name = 'artifact'").fetchone() or (None,)
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray(source.read_bytes())
    data[(page - 20) * size : (page - 20) * size + 4] = b"\xff\xff\xff\xff"  # the chain of the code's pages
    source.write_bytes(data)
    with Store.open(source, readonly=True) as store, pytest.raises(DatabaseError, match=r"some\.db is damaged"):
        export_deploy(store, tmp_path / "new.db")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_database_whose_tables_are_not_those_of_its_version_is_damaged(tmp_path: Path, version: int) -> None:
    """A file says that it is older than it is: tables and columns that the migration makes are there already."""
    path = tmp_path / "some.db"
    with Store.open(path):
        pass
    changed(path, f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"some\.db is damaged \((table profile already exists|duplicate column name: )"):
        Store.open(path)
    assert path.read_bytes() == before


def damaged_stamp(path: Path) -> None:
    """The time at which code was stored is a string, which only a table without types can hold."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_schema SET sql = replace(replace(sql, 'REAL', 'ANY'), ' STRICT', '') WHERE name = 'artifact'"
        )
    changed(path, "UPDATE artifact SET created_at = 'yesterday'")


def test_code_with_a_damaged_stamp_is_left_out_of_a_deployment_and_replaced_by_a_merge(tmp_path: Path) -> None:
    from records_support import artifact, record

    from schedsearch.records.exchange import merge

    sound, some = tmp_path / "sound.db", tmp_path / "some.db"
    for path in (sound, some):
        with Store.open(path) as store:
            store.promote(store.append(record(1e6)), artifact(b"\x7fELF code"))
    damaged_stamp(some)
    with Store.open(some) as store:
        with pytest.raises(NoRecordError, match="no best kernel to deploy"):
            export_deploy(store, tmp_path / "deploy.db")
        assert "created_at" in str(store.find_damage())
        merge(store, [sound])
        assert store.find_damage() == []
