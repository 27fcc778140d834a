"""A damaged database: every bad value in every column is named, and all that is sound stays in use.

STRICT tables keep wrong types out, but a file may have been written by anything. The tests therefore take types and
triggers out of a small valid database, and then put one bad value into one column of one row.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_support import schedsearch
from records_support import A100, H200, artifact, conv, profile, record, size_table

from schedsearch.errors import DatabaseError, SchedsearchError
from schedsearch.measurement import Outcome, Record
from schedsearch.records import exchange, schema
from schedsearch.records.damage import DamageError
from schedsearch.records.deployment import export_deploy
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table
from schedsearch.runtime.explanation import explain_fallback
from schedsearch.runtime.fallback import Fallback
from schedsearch.target import PRESETS

MODE = "cold-graph-v1"
OTHER = conv(k=128)
BAD: tuple[Any, ...] = (-1, b"\xff\x00")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture(scope="module")
def relaxed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a database whose tables accept anything; it has two bests with code, and a failure."""
    path = tmp_path_factory.mktemp("damage") / "records.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state"))
        with Store.open(path) as store:
            run = store.start_run({"command": "tune"})
            store.promote(store.append(record(1000.0, number=1, run=run)), artifact(b"one"))
            store.promote(store.append(record(900.0, number=2, workload=OTHER, target=A100)), artifact(b"two", "sm_80"))
            store.append(record(number=3, outcome=Outcome.REJECTED, run=run, toolchain={"driver": "1"}))
            for record_id in (1, 2):
                store.add_profile(record_id, profile())
            put_size_table(store.database, conv().with_dynamic("n", 1, 4), H200, MODE, size_table())
            store.finish_run(run, {"trials": 2})
            store.start_run({"command": "tune again"})
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute("PRAGMA writable_schema = ON")
        for name, text in connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall():
            text = (text or "").replace("IS NOT NULL", "NOTNULL").replace(" NOT NULL", "")
            text = text.replace(") STRICT, WITHOUT", ") WITHOUT").removesuffix(" STRICT")
            connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (text, name))
        connection.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


def damaged(folder: Path, content: bytes, *statements: str) -> Path:
    path = folder / "records.db"
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(content)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)
    return path


def literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, str):
        return value if value.startswith("CAST(") else "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else {math.inf: "9e999", -math.inf: "-9e999"}.get(value, repr(value))


def every_reader(path: Path, folder: Path, *, copies: bool = True) -> tuple[list[str], set[int]]:
    """Uses every way to read a database, with `copies` also those that make another file. Only SchedsearchErrors may come.

    Returns:
        What was said about damage, and the ids of the records that `rows` gave.
    """
    said: list[str] = []
    seen: set[int] = set()

    def attempt(action: Any) -> Any:
        try:
            return action()
        except SchedsearchError as error:
            said.append(str(error))

    def with_store() -> None:
        with Store.open(path, readonly=True) as store:
            store.damage.warns = False
            seen.update(row.id for row in attempt(store.rows) or ())
            for record_id in (1, 2, 3):
                attempt(lambda number=record_id: (store.row(number).to_json(), store.profiles(number)))
            list(store.bests())
            store.runs()
            store.stats()
            attempt(store.history)
            attempt(lambda: store.best(conv(), H200))
            store.measured(conv(), H200, "conv2d_wgmma", 1)
            store.last_race(conv(), H200)
            store.tuned("conv2d", "conv2d_wgmma", 1)
            store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=8)
            for best in store.bests():
                attempt(lambda best=best: store.code(best))
            store.ranges()
            said.extend(map(str, store.find_damage()))
            if copies:
                said.extend(store.health()["problems"])
                attempt(lambda: exchange.export_jsonl(store, folder / "out.jsonl"))
                attempt(lambda: export_deploy(store, folder / "deploy.db"))
            said.extend(map(str, store.damage))

    def merged() -> None:
        (folder / "merged.db").unlink(missing_ok=True)
        with Store.open(folder / "merged.db") as store:
            store.damage.warns = False
            exchange.merge(store, [path])
            said.extend(map(str, store.damage))
            assert not store.find_damage(), "nothing damaged was taken over"

    def deployed() -> None:
        with Lookup(path) as lookup:
            for target in ("h200", "a100"):
                for workload in (conv(), OTHER, conv(k=32)):
                    levels = ("exact", "same_architecture", "nearest")
                    fallback = Fallback(workload, PRESETS[target], lookup, path, MODE, levels)
                    said.append(str(explain_fallback(workload, PRESETS[target], fallback)))
            attempt(lookup.with_code)
            said.extend(map(str, lookup.damage))

    for action in (with_store, merged, deployed) if copies else (with_store, deployed):
        attempt(action)
    return said, seen


COLUMNS = [(table.name, column.name) for table in schema.metadata.sorted_tables for column in table.columns]
# A change of these is a change of what somebody says, not damage that can be seen, as long as it is text.
FREE_TEXT = {("artifact", "machine"), ("artifact", "created_at"), ("run", "id"), ("run", "machine"), ("meta", "key")}


@pytest.mark.parametrize(("table", "column"), COLUMNS)
@pytest.mark.mostly_long(12)
def test_no_value_in_any_column_ends_a_reader(table: str, column: str, relaxed: bytes, tmp_path: Path) -> None:
    """Neither a traceback nor a lost neighbour: the records that do not depend on the damaged row are all there."""
    depends = {"record": {1}, "workload": {1, 2, 3}, "toolchain": {1, 2, 3}}.get(table, set())
    where = {"record": "id = 1", "run": "rowid = 1", "profile": "id = 1", "artifact": "rowid = 1",
             "size_table": "rowid = 1"}.get(table, "")  # fmt: skip
    key = {"workload": "id", "toolchain": "id", "best": "workload_id", "meta": "key"}.get(table)
    where = where or f"{key} = (SELECT min({key}) FROM {table})"
    for value in BAD:
        try:
            path = damaged(tmp_path, relaxed, f"UPDATE {table} SET {column} = {literal(value)} WHERE {where}")
        except sqlite3.IntegrityError:  # a second row with the same key
            continue
        said, seen = every_reader(path, tmp_path, copies=isinstance(value, bytes) and table in ("best", "workload", "meta"))
        if table != "meta":
            assert seen >= {1, 2, 3} - depends, (value, said)
        if isinstance(value, bytes) and (table, column) not in FREE_TEXT:
            assert any(str(path) in text and table in text for text in said), (value, said)
        assert all(len(text) < 4000 for text in said)


@pytest.mark.parametrize(
    ("change", "table", "row", "what"),
    [
        ("UPDATE record SET config = '[]' WHERE id = 1", "record", "1", "config is '[]'; it must be a JSON object"),
        ("UPDATE record SET config = '{\"bm\": 1.5}' WHERE id = 1", "record", "1", "config has 1.5 for 'bm'"),
        ("UPDATE record SET registers = -5 WHERE id = 1", "record", "1", "registers is -5; it must be an integer"),
        ("UPDATE record SET registers = 'many' WHERE id = 1", "record", "1", "registers is 'many'"),
        ("UPDATE record SET finished_at = 1e300 WHERE id = 1", "record", "1", "finished_at is 1e+300"),
        ("UPDATE record SET outcome = 'fine' WHERE id = 1", "record", "1", "outcome is 'fine'; it must be one of ok"),
        ("UPDATE record SET time_ns = 1.0 WHERE id = 1", "record", "1", "time_ns is not the median of times_ns"),
        ("UPDATE record SET message = CAST(x'ff' AS TEXT) WHERE id = 1", "record", "1", "message is not valid UTF-8"),
        ("DELETE FROM toolchain WHERE id = (SELECT toolchain_id FROM record WHERE id = 3)", "toolchain", "", "json is NULL"),
        ("UPDATE workload SET json = replace(json, '64', '65')", "workload", "", "json does not match its id"),
        ("UPDATE best SET record_id = 77 WHERE record_id = 1", "best", "", "names record 77, which is not a record"),
        ("UPDATE best SET record_id = 2 WHERE record_id = 1", "best", "", "names record 2, which is not a record"),
        ("UPDATE best SET config = '{}' WHERE record_id = 1", "best", "", "config is not that of record 1, which it names"),
        ("UPDATE best SET promoted_at = 'now' WHERE record_id = 1", "best", "", "promoted_at is 'now'"),
        ("UPDATE run SET info = 'x'", "run", "", "info is not JSON"),
        ("UPDATE profile SET json = '{}' WHERE id = 1", "profile", "1", "the field 'launches' is missing"),
        ("UPDATE artifact SET code = x'00' WHERE rowid = 1", "artifact", "", "code or plan does not match its checksum"),
        ("UPDATE size_table SET code = x'00'", "size_table", "", "the table of a range is damaged"),
        ("UPDATE size_table SET code = 'text'", "size_table", "", "code is 'text'; it must be a blob"),
        ("UPDATE size_table SET size_table = '{}'", "size_table", "", "the table of a range is damaged"),
        ("UPDATE size_table SET high = 5", "size_table", "", "low and high are 1 and 5; the table is of 1 to 4"),
        ("UPDATE size_table SET high = 1", "size_table", "", "high is 1; it must be an integer from 2"),
    ],
)  # fmt: skip
def test_damage_is_named_by_file_table_row_and_column(
    change: str, table: str, row: str, what: str, relaxed: bytes, tmp_path: Path
) -> None:
    path = damaged(tmp_path, relaxed, change)
    with Store.open(path, readonly=True) as store:
        store.damage.warns = False
        found = [each for each in store.find_damage() if what in each.what]
    assert found, [str(each) for each in store.find_damage()]
    assert (found[0].path, found[0].table) == (path, table) and found[0].row.startswith(row)
    assert str(found[0]).startswith(f"{path}: table {table}, row ")


@pytest.mark.parametrize(
    ("version", "message"),
    [("'x'", "table meta, row schema_version: 'x' is not a version number"), ("'-1'", "not a version"), ("'0'", "not a "),
     ("'1" + "0" * 30 + "'", "not a version number"), ("'99'", "this schedsearch knows up to"),
     ("NULL", "value is NULL"), ("x'34'", "value is a blob")],
)  # fmt: skip
def test_a_schema_version_that_is_none_is_said(version: str, message: str, relaxed: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, relaxed, f"UPDATE meta SET value = {version} WHERE key = 'schema_version'")
    for opened in (Lookup, lambda path: Store.open(path, readonly=True), Store.open):
        with pytest.raises(DatabaseError, match=message):
            opened(path)


@pytest.mark.parametrize(
    "statements",
    [
        *([f"DROP TABLE {table}"] for table in ("workload", "toolchain", "record", "best", "artifact", "profile", "run")),
        *([f"ALTER TABLE {table} RENAME COLUMN {column} TO other"] for table, column in COLUMNS[:40:3]),
        ["DROP TABLE best", "CREATE VIEW best AS SELECT 1 AS workload_id"],
        ["ALTER TABLE record RENAME TO r2", "CREATE VIEW record AS SELECT * FROM r2"],
        ["DELETE FROM meta WHERE key = 'uuid'"],
        ["DELETE FROM meta"],
    ],
)  # fmt: skip
@pytest.mark.mostly_long(3)
def test_a_missing_part_is_a_database_error_for_reading_and_writing(
    statements: list[str], relaxed: bytes, tmp_path: Path
) -> None:
    path = damaged(tmp_path, relaxed, *statements)
    for readonly in (True, False):
        with pytest.raises(DatabaseError, match=r"records\.db"):
            Store.open(path, readonly=readonly)
    every_reader(path, tmp_path)


def test_a_view_in_place_of_a_table_is_not_read_since_it_might_never_end(relaxed: bytes, tmp_path: Path) -> None:
    view = "SELECT 'uuid' AS key, 'x' AS value"
    for table in ("meta", "record"):
        path = damaged(tmp_path, relaxed, f"DROP TABLE {table}", f"CREATE VIEW {table} AS {view}")
        for opened in (Lookup, lambda path: Store.open(path, readonly=True), Store.open):
            with pytest.raises(DatabaseError, match="not a plain table"):
                opened(path)


def test_a_computed_column_is_not_read(relaxed: bytes, tmp_path: Path) -> None:
    path = damaged(
        tmp_path, relaxed, "ALTER TABLE best DROP COLUMN promoted_at",
        "ALTER TABLE best ADD COLUMN promoted_at REAL AS (length(zeroblob(100)))",
    )  # fmt: skip
    with pytest.raises(DatabaseError, match="column promoted_at of table best is computed"):
        Store.open(path, readonly=True)


def test_a_planted_trigger_keeps_a_file_from_being_written(relaxed: bytes, tmp_path: Path) -> None:
    plant = "CREATE TRIGGER greedy AFTER INSERT ON record BEGIN UPDATE best SET config = '{}'; END"
    path = damaged(tmp_path, relaxed, plant)
    with pytest.raises(DatabaseError, match=r"trigger 'greedy' that schedsearch did not make.*records merge"):
        Store.open(path)
    with Store.open(path, readonly=True) as store, Store.open(tmp_path / "new.db") as rescued:
        assert len(store.rows()) == 3
        assert exchange.merge(rescued, [path]).records_added == 3


def test_a_missing_index_or_trigger_is_a_problem_for_doctor_only(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with Store.open(path) as store:
        store.append(record())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP INDEX record_by_run")
        connection.execute("DROP TRIGGER record_is_never_deleted")
    with Store.open(path) as store:
        assert len(store.rows()) == 1
        missing = [problem for problem in store.health()["problems"] if "missing" in problem]
    assert missing == ["the index record_by_run is missing", "the trigger record_is_never_deleted is missing"]


def test_a_value_that_is_too_long_is_refused(relaxed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.records.dbfile.MAX_VALUE_BYTES", 1 << 20)
    path = damaged(tmp_path, relaxed, "UPDATE record SET message = hex(zeroblob(1000000)) WHERE id = 1")
    with Store.open(path, readonly=True) as store, pytest.raises(DatabaseError, match="more than 1048576 bytes"):
        store.rows()


class TestPolicy:
    """What callers do about damage."""

    @pytest.fixture
    def path(self, relaxed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.chdir(tmp_path)
        return damaged(tmp_path, relaxed, "UPDATE record SET config = 'x' WHERE id = 1", "UPDATE run SET info = 'x'")

    @pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["best"], ["export", "out.jsonl"]])
    def test_a_command_shows_the_rest_and_then_exits_with_6(self, path: Path, command: list[str]) -> None:
        result = schedsearch("records", *command, "--db", path)
        assert result.exit_code == 6, result.output
        assert f"{path}: table " in result.stderr and "see all: schedsearch doctor" in result.stderr
        if command[0] == "export":
            lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
            assert [line["kind"] for line in lines].count("record") == 2
        else:
            assert "k128" in result.stdout

    def test_show_names_the_damage_of_its_record_and_shows_others(self, path: Path) -> None:
        result = schedsearch("records", "show", 1, "--db", path)
        assert result.exit_code == 6 and "table record, row 1: config is not JSON" in result.stderr
        assert schedsearch("records", "show", 2, "--db", path).exit_code == 0

    def test_a_merge_takes_what_is_sound(self, path: Path) -> None:
        result = schedsearch("records", "merge", path, "--db", "rescued.db")
        assert result.exit_code == 6 and "damaged rows were skipped" in result.stderr
        with Store.open("rescued.db", readonly=True) as store:
            assert len(store.rows()) == 2 and store.find_damage() == []

    def test_doctor_lists_all_damage(self, path: Path) -> None:
        result = schedsearch("doctor", "--db", path)
        assert result.exit_code == 6 and "table record, row 1" in result.output and "table run, row" in result.output

    def test_closing_a_store_warns_once(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Store.open(path) as store:
            assert [row.id for row in store.rows()] == [row.id for row in store.rows()] == [3, 2]
            assert store.best(OTHER, A100) is not None
            with pytest.raises(DamageError, match="table record, row 1: config is not JSON"):
                store.row(1)
        assert [entry.getMessage() for entry in caplog.records] == [
            f"schedsearch: warning: 1 damaged row was skipped, the first: {path}: table record, row 1: config is not JSON "
            f"(Expecting value: line 1 column 1 (char 0)): 'x'; see all: schedsearch doctor --db {path}"
        ]

    def test_deployment_goes_on_below_a_damaged_best(self, relaxed: bytes, tmp_path: Path) -> None:
        path = damaged(tmp_path, relaxed, "UPDATE best SET config = 'x' WHERE record_id = 1")
        with Lookup(path) as lookup:
            fallback = Fallback(conv(), PRESETS["h200"], lookup, path, MODE, ("exact", "nearest"))
            exact, nearest = explain_fallback(conv(), PRESETS["h200"], fallback).levels[:2]
        assert exact.verdict == "no" and "table best, row" in exact.reason and "config is not JSON" in exact.reason
        assert nearest.level == "nearest" and "conv2d_wgmma" in nearest.reason


def test_what_a_store_accepts_it_reads(tmp_path: Path) -> None:
    """The checks of writing and of reading agree: a record that cannot be read back is refused when it is made."""
    wrong: list[dict[str, Any]] = [
        {"started_at": -1.0}, {"finished_at": 1e300}, {"batch": -1}, {"template_version": -1}, {"prediction": math.nan},
    ]  # fmt: skip
    with Store.open(tmp_path / "records.db") as store:
        for changes in wrong:
            with pytest.raises(ValueError, match=f"{next(iter(changes))} of a record"):
                store.append(record(**changes))
        zero: Record = record(prediction=-0.0)
        assert store.row(store.append(zero)).prediction == 0.0
