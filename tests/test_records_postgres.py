"""The record store on PostgreSQL: its contract, several writers, a server that restarts, and what is wrong with databases.

`postgres_support` starts a server for these tests. They are skipped, with a reason, where that is not possible.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from postgres_support import Server, Unavailable, running_server
from records_support import H200, artifact, conv, profile, python, record, size_table
from store_contract import StoreContract

import schedsearch
from schedsearch.cli.main import main
from schedsearch.dashboard.source import Source
from schedsearch.errors import DatabaseError, DatabaseLockedError, DatabaseLostError, SchemaVersionError, UsageError
from schedsearch.measurement import Anchor, Outcome
from schedsearch.records import fields, schema
from schedsearch.records.columns import Wanted
from schedsearch.records.deployment import export_deploy
from schedsearch.records.exchange import export_jsonl, import_jsonl, merge
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table

pytest.importorskip("psycopg", reason="needs psycopg, which `make test-postgres` installs")

import psycopg

from schedsearch.records import postgresql

pytestmark = pytest.mark.postgres

WRITERS, RECORDS = 8, 2500  # simulated tuners, and the records of each


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    try:
        with running_server() as found:
            yield found
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def url(server: Server) -> str:
    return server.url(server.new_database())


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


class TestPostgresql(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def open(self, folder: Path) -> Store:
        return Store.open(self.server.url(self.server.new_database()))


def name_of(url: str) -> str:
    return url.rpartition("@/")[2].partition("?")[0]


# ---- the database itself


def test_measurements_cannot_be_changed_or_deleted_in_the_database_itself(server: Server, store: Store) -> None:
    record_id = store.append(record())
    store.add_profile(record_id, profile())
    for statement in (
        "DELETE FROM schedsearch.record",
        "UPDATE schedsearch.record SET time_ns = 1",
        "DELETE FROM schedsearch.profile",
    ):
        with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
            server.execute(statement, database=name_of(store.name))
    assert store.row(record_id).record() == record()


def test_tables_are_those_that_queries_are_written_against(store: Store) -> None:
    with store.database.read() as connection:
        built = sa.MetaData(schema="schedsearch")
        built.reflect(connection)
    tables = {table.name: table for table in built.tables.values()}
    assert set(tables) == set(schema.metadata.tables)
    for name, table in schema.metadata.tables.items():
        described = [(column.name, column.nullable, column.primary_key) for column in tables[name].columns]
        assert described == [(column.name, column.nullable, column.primary_key) for column in table.columns], name
    assert store.health()["problems"] == []


def test_text_is_ordered_and_searched_as_in_a_file(tmp_path: Path, store: Store) -> None:
    names = ["b_template", "B_template", "a-template", "á_template", "_template", "Z"]
    with Store.open(tmp_path / "records.db") as file:
        for number, name in enumerate(names):
            for each in (file, store):
                each.append(record(number=number, template=name, measurement=None))
        found = [
            (list(each.stats()["templates"]), each.listing(Wanted(words=("ROW",)), sort="id")[0]) for each in (file, store)
        ]
    assert found[0] == found[1] and found[0][1] == len(names)


def test_an_older_version_is_brought_to_the_newest_or_read_as_it_is(server: Server, url: str) -> None:
    old = fields.SCHEMA_VERSION - 3  # without anchors, signatures and ranges of sizes
    with Store.open(url) as store:
        meta = store.database.migrate()
    server.execute("DROP SCHEMA schedsearch CASCADE", database=name_of(url))
    steps = [text for step in schema.MIGRATIONS["postgresql"][:old] for text in step]
    rows = [f"INSERT INTO meta VALUES ('{key}', '{value}')" for key, value in {**meta, "schema_version": str(old)}.items()]
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA schedsearch")
        connection.execute("SET search_path = schedsearch")
        for statement in (*steps, *rows):
            connection.execute(statement)
    with Store.open(url, readonly=True) as store:
        assert store.rows() == [] and store.ranges() == [] and store.find_damage() == []
        assert store.health()["schema_version"] == old
    with Store.open(url) as store:
        store.append(record())
        assert store.rows()[0].anchor == Anchor("c0ffee", 4000.0)
        assert store.health()["schema_version"] == fields.SCHEMA_VERSION
    server.execute("UPDATE schedsearch.meta SET value = '99' WHERE key = 'schema_version'", database=name_of(url))
    with pytest.raises(SchemaVersionError, match=r"has schema version 99, this schedsearch knows up to"):
        Store.open(url)


# ---- files and databases


def filled(store: Store) -> None:
    run = store.start_run({"command": "tune a.yaml"})
    first = store.append(record(900.0, number=1, run=run))
    store.append(record(number=2, run=run, outcome=Outcome.COMPILE_ERROR))
    store.promote(first, artifact())
    store.add_profile(first, profile())
    put_size_table(store.database, conv().with_dynamic("n", 1, 4), H200, "cold-graph-v1", size_table())
    store.finish_run(run, {"trials": 2})


def content(store: Store) -> dict[str, Any]:
    return {
        "records": [replace(each, source="") for each in store.history()],  # a copy names its origin
        "bests": [(best.content_id, best.artifact_sha256, best.vouched) for best in store.bests()],
        "runs": [(run["id"], run["info"], run["summary"]) for run in store.runs()],
        "profiles": store.profiles(store.records_after(0)[0].id),
        "ranges": [(row.key, row.vouched) for row in store.ranges()],
    }


def test_everything_goes_from_a_file_to_a_server_and_back(tmp_path: Path, store: Store) -> None:
    with Store.open(tmp_path / "mine.db") as mine:
        filled(mine)
        assert merge(store, [mine.path]).records_added == 2
        assert content(store) == content(mine)
        assert merge(store, [mine.path]).records_added == 0
        export_jsonl(store, tmp_path / "all.jsonl.gz", artifacts=True)
        with Store.open(tmp_path / "back.db") as back, Store.open(tmp_path / "merged.db") as merged:
            import_jsonl(back, tmp_path / "all.jsonl.gz")
            merge(merged, [store.name])
            assert content(back) == content(merged) == content(mine)
    with pytest.raises(UsageError, match="cannot be merged into itself"):
        merge(store, [store.name])


def test_a_deployment_file_of_a_server_is_read_by_deployment(tmp_path: Path, store: Store) -> None:
    filled(store)
    export_deploy(store, tmp_path / "kernels.db")
    with Lookup(tmp_path / "kernels.db") as lookup:
        found = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert found is not None and found.vouched and lookup.code(found) == artifact().code


def test_deployment_from_a_server_says_how_to_make_a_file(url: str) -> None:
    with pytest.raises(UsageError, match=r"kernels are loaded from files; write one: schedsearch records export --deploy"):
        schedsearch.compile(conv(), db=url)


def test_the_commands_of_records_take_a_url_for_a_file(tmp_path: Path, url: str) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    with Store.open(tmp_path / "mine.db") as mine:
        filled(mine)
    run("records", "merge", tmp_path / "mine.db", "--db", url)
    listed = json.loads(run("records", "list", "--db", url, "--json"))
    assert [row["outcome"] for row in listed] == ["compile_error", "ok"]
    assert "conv2d_wgmma" in run("records", "show", listed[1]["id"], "--db", url)
    assert len(json.loads(run("records", "best", "--db", url, "--json"))) == 1
    run("records", "export", tmp_path / "all.jsonl", "--db", url)
    run("records", "import", tmp_path / "all.jsonl", "--db", url)
    run("records", "export", "--deploy", tmp_path / "kernels.db", "--db", url)
    run("records", "prune", "--keep", 1, "--db", url)
    assert "tune a.yaml" not in run("runs", "--db", url)  # it lists runs, and their tasks
    assert json.loads(run("doctor", "--db", url, "--json"))["database"]["records"] == 2
    assert "conv2d" in run("report", "--db", url, "--format", "markdown")


def test_the_dashboard_follows_a_server_through_its_absence(server: Server, url: str) -> None:
    source = Source("0", url)
    source.refresh()
    assert "is a database without tables" in source.problem
    with Store.open(url) as store:
        filled(store)
        assert source.refresh() and source.problem == "" and source.records == 2 and source.size_bytes > 0
        assert source.name == name_of(url)
        server.stop()
        assert (source.refresh() and "was lost" in source.problem) or "cannot connect" in source.problem
        assert source.records == 2, "what was read before stays"
        server.start()
        store.append(record(number=7))
        assert source.refresh() and source.problem == "" and source.records == 3
    source.close()


# ---- several writers

WRITER = """
import sys
from records_support import artifact, record
from schedsearch.records.store import Store

url, writer, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Store.open(url) as store:
    run = store.start_run({"writer": writer})
    fastest = 1e9
    for number in range(count):
        time_ns = 1000.0 + (number * 7919 + writer * 104729) % 1_000_003
        record_id = store.append(record(time_ns, number=writer * count + number, run=run), {"so far": number})
        if time_ns < fastest:
            fastest = time_ns
            store.promote(record_id, artifact(f"{writer} {number}".encode()), if_faster=True)
    store.finish_run(run, {"trials": count})
    print(run)
"""


def fastest_of_all() -> float:
    return min(
        1000.0 + (number * 7919 + writer * 104729) % 1_000_003 for writer in range(WRITERS) for number in range(RECORDS)
    )


@pytest.mark.timeout(1500)
def test_eight_tuners_share_a_store_that_restarts_and_nothing_is_lost_or_doubled(server: Server, url: str) -> None:
    """The server is restarted in the order, and once as if the power had failed. A reader follows the records all along."""
    Store.open(url).close()
    writers = [python(WRITER, url, str(number), str(RECORDS)) for number in range(WRITERS)]
    seen: list[int] = []
    done = threading.Event()

    def follow() -> None:
        with Store.open(url, readonly=True) as reader:
            while True:
                last = done.is_set()
                while rows := reader.records_after(seen[-1] if seen else 0, limit=1000):
                    seen.extend(row.id for row in rows)
                if last:
                    return
                time.sleep(0.05)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        for share, mode in ((0.3, "fast"), (0.6, "immediate")):
            while len(seen) < share * WRITERS * RECORDS:
                assert all(writer.poll() in (None, 0) for writer in writers), "a writer ended with an error"
                time.sleep(0.05)
            server.stop(mode)
            server.start()
        runs = [writer.communicate()[0].strip() for writer in writers]
        assert [writer.returncode for writer in writers] == [0] * WRITERS
    finally:
        done.set()
        follower.join()
        for writer in writers:
            writer.kill()
    with Store.open(url, readonly=True) as store:
        counts = Counter(run for _, run in store.columns(("id", "run")))
        configs = {config for _, config in store.columns(("id", "config"))}
        (best,) = store.bests()
        assert counts == dict.fromkeys(runs, RECORDS), "nothing is lost or doubled"
        assert len(configs) == WRITERS * RECORDS
        assert best.row.measurement.time_ns == fastest_of_all(), "the fastest of all stays, whoever was last"
        assert {run["id"]: run["summary"] for run in store.runs()} == {run: {"trials": RECORDS} for run in runs}
        assert store.find_damage() == []
    assert len(seen) == len(set(seen)) == WRITERS * RECORDS and seen == sorted(seen), "a follower misses none"


def test_a_killed_writer_frees_the_lock_and_leaves_nothing_half_done(url: str) -> None:
    code = """
import sys, time
from records_support import record
from schedsearch.records.store import Store
import sqlalchemy as sa
from schedsearch.records import schema
with Store.open(sys.argv[1]) as store, store.database.write() as connection:
    connection.execute(sa.insert(schema.run), {"id": "half", "machine": "", "started_at": 1.0, "info": "{}"})
    print("holds", flush=True)
    time.sleep(600)
"""
    with Store.open(url) as store:
        process = python(code, url)
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        named = rf"is locked by another process \(process .* {process.pid}'\)"
        with Store.open(url, busy_timeout_s=0.3) as hasty, pytest.raises(DatabaseLockedError, match=named):
            hasty.append(record())
        assert store.runs() == [], "a reader neither waits nor sees it"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store.append(record())
        assert store.runs() == []


def test_a_commit_that_nobody_heard_of_is_not_repeated(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends after the server has committed and before the client knows."""
    write = store.database.write
    lost: list[str] = []

    @contextlib.contextmanager
    def unlucky() -> Iterator[sa.Connection]:
        with write() as connection:
            yield connection
        if not lost:
            lost.append("once")
            raise DatabaseLostError("the connection was lost")

    monkeypatch.setattr(store.database, "write", unlucky)
    run = store.start_run({})
    assert lost.pop() and [each["id"] for each in store.runs()] == [run]
    first = store.append(record(number=1, run=run))
    assert lost.pop() and [row.id for row in store.rows()] == [first]
    store.promote(first, artifact())
    assert lost.pop() and len(list(store.bests())) == 1


# ---- what is wrong with a database: one line with a remedy


def refusal(url: str, **options: Any) -> str:
    with pytest.raises((DatabaseError, UsageError)) as caught:
        Store.open(url, **options).append(record())
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_server_or_database_that_is_not_there(server: Server, tmp_path: Path) -> None:
    assert "createdb makes a database" in refusal(server.url("nowhere")) and "nowhere" in refusal(server.url("nowhere"))
    away = refusal(f"postgresql:///db?host={tmp_path}")
    assert "cannot connect" in away and "check that the server runs" in away


def test_a_server_that_goes_away_for_good(url: str, server: Server) -> None:
    with Store.open(url, busy_timeout_s=0.5) as store:
        store.append(record(number=1))
        server.stop()
        try:
            with pytest.raises(DatabaseLostError, match=r"check that the server runs|was lost"):
                store.append(record(number=2))
        finally:
            server.start()
        store.append(record(number=2))
        assert len(store.history()) == 2


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql://me:secret@host/db", "the URL of the database has a password"),
        ("postgresql://me@host/db?password=secret", "the URL of the database has a password"),
        ("postgresql://host/db?nonsense=1", "is not a URL of PostgreSQL"),
        ("oracle://host/db", "databases of oracle are not supported"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, text: str) -> None:
    found = refusal(url)
    assert text in found and "secret" not in found


def test_no_permission(server: Server, url: str) -> None:
    server.execute("CREATE ROLE stranger LOGIN", f"REVOKE ALL ON DATABASE {name_of(url)} FROM PUBLIC")
    try:
        server.execute(f"GRANT CONNECT ON DATABASE {name_of(url)} TO stranger")
        theirs = server.url(name_of(url), "stranger")
        assert "GRANT CREATE ON DATABASE" in refusal(theirs)
        with Store.open(url) as store:
            store.append(record())
        assert "GRANT USAGE ON SCHEMA schedsearch" in refusal(theirs)
        assert "(SELECT alone to read)" in refusal(theirs) and "LINE 1" not in refusal(theirs)
        grants = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA schedsearch"
        server.execute("GRANT USAGE ON SCHEMA schedsearch TO stranger", f"GRANT {grants} TO stranger", database=name_of(url))
        with Store.open(theirs) as store:
            assert store.promote(store.append(record(number=2)), artifact()), "what the message names is enough"
    finally:
        server.execute("DROP OWNED BY stranger", database=name_of(url))
        server.execute("DROP OWNED BY stranger", "DROP ROLE stranger")


def test_a_full_disk_keeps_what_was_committed(server: Server, url: str, store: Store) -> None:
    store.append(record(number=1))
    server.execute(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RAISE disk_full USING MESSAGE = ''could not extend file: No space left on device''; END'",
        "CREATE TRIGGER full_disk BEFORE INSERT ON schedsearch.record FOR EACH ROW EXECUTE FUNCTION full_disk()",
        database=name_of(url),
    )
    with pytest.raises(DatabaseError, match=r"the disk of postgresql://.* is full; .*records prune"):
        store.append(record(number=2))
    assert len(store.history()) == 1
    server.execute("DROP TRIGGER full_disk ON schedsearch.record", database=name_of(url))
    store.append(record(number=2))


def test_an_old_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "MIN_SERVER", 990000)
    assert "allowed: 99 or later; upgrade the server" in refusal(url)


def test_another_encoding_and_another_program(server: Server, url: str) -> None:
    other = server.url(server.new_database("ENCODING 'SQL_ASCII' TEMPLATE template0"))
    assert "keeps its text as SQL_ASCII; allowed: UTF8" in refusal(other)
    server.execute("CREATE SCHEMA schedsearch", "CREATE TABLE schedsearch.x (a int)", database=name_of(url))
    assert "has a schema schedsearch of another program" in refusal(url)


def test_a_database_without_tables_is_not_filled_by_those_who_only_look(url: str) -> None:
    assert "is a database without tables" in refusal(url, readonly=True)
    assert "is a database without tables" in refusal(url, create=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("DROP TABLE schedsearch.profile", "it has no table profile"),
        ("ALTER TABLE schedsearch.best DROP COLUMN verified", "table best has no column verified"),
        (
            "ALTER TABLE schedsearch.run RENAME TO old; CREATE VIEW schedsearch.run AS SELECT * FROM schedsearch.old",
            "run is not a plain table",
        ),
        ("DELETE FROM schedsearch.meta WHERE key = 'uuid'", "table meta, row uuid: it is missing"),
    ],
)
def test_changed_tables_are_refused(server: Server, url: str, change: str, text: str) -> None:
    Store.open(url).close()
    server.execute(*change.split("; "), database=name_of(url))
    assert text in refusal(url)


def test_a_row_that_somebody_changed_is_left_out(server: Server, url: str, store: Store) -> None:
    first = store.append(record(number=1))
    store.append(record(number=2))
    server.execute(
        "ALTER TABLE schedsearch.record DISABLE TRIGGER USER",
        f"UPDATE schedsearch.record SET config = 'nonsense' WHERE id = {first}",
        database=name_of(url),
    )
    assert [row.record() for row in store.rows()] == [record(number=2)]
    (damage,) = store.damage
    assert damage.row == str(first) and str(damage).startswith(f"{url}: table record")
