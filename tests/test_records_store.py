"""The record store on SQLite: its contract, and the guarantees of SQLite itself."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records_support import H200, artifact, as_of_an_operator_that_is_not_installed, conv, profile, record
from store_contract import StoreContract

from schedsearch.config import Config
from schedsearch.errors import UsageError, WorkloadError
from schedsearch.measurement import Measurement, Outcome, Resources
from schedsearch.records import fields
from schedsearch.records.store import Store


class TestSqlite(StoreContract):
    def open(self, folder: Path) -> Store:
        return Store.open(folder / "records.db")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(tmp_path / "records.db") as store:
        yield store


finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e300)
stamps = st.floats(0, 253_402_300_799)  # to the end of the year 9999
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
measurements = st.builds(
    Measurement,
    outcome=st.just(Outcome.OK),
    times_ns=st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=9).map(tuple),
    resources=st.builds(Resources, *[st.integers(0, 2**40)] * 5),
    max_error=st.none() | finite | st.just(math.inf),
    message=text,
    build_s=seconds,
    run_s=seconds,
    clocks=st.dictionaries(text, text | st.integers(0, 2**40) | finite),
)


@given(measurement=measurements, prediction=st.none() | finite, stamp=stamps, note=text, race=st.booleans())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_nothing_is_rounded_or_lost(store: Store, measurement, prediction, stamp, note, race) -> None:
    wanted = record(
        measurement=measurement, prediction=prediction, started_at=stamp, finished_at=stamp, template=note, final_race=race,
        toolchain={"note": note}, config=Config(note=note), source=note, run=note,
    )  # fmt: skip
    assert store.row(store.append(wanted)).record() == wanted


def test_measurements_cannot_be_changed_or_deleted_in_the_database_itself(store: Store) -> None:
    record_id = store.append(record())
    with sqlite3.connect(store.path) as other:
        for statement in ("DELETE FROM record", "UPDATE record SET time_ns = 1", "UPDATE record SET id = 7"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                other.execute(statement)
    assert store.row(record_id).record() == record()


def test_times_are_null_unless_ok(store: Store) -> None:
    store.append(record(outcome=Outcome.RUN_TIMEOUT))
    with sqlite3.connect(store.path) as other:
        assert other.execute("SELECT time_ns, times_ns FROM record").fetchall() == [(None, None)]


def test_another_connection_sees_an_appended_record_at_once(store: Store) -> None:
    store.append(record())
    with Store.open(store.path, readonly=True) as other:
        assert other.history() == [record()]


def test_records_are_appended_in_one_commit_and_again_they_add_nothing(store: Store) -> None:
    known = store.append(record(number=1))
    commits: list[object] = []
    sa.event.listen(store.database._engine, "commit", commits.append)
    several = [
        record(number=0),
        record(number=1),
        record(number=2, outcome=Outcome.REJECTED),
        record(number=3, workload=conv(k=128)),
    ]
    ids = store.append_all(several)
    assert len(commits) == 1
    assert [store.row(number).record() for number in ids] == several
    assert ids[1] == known and sorted({*ids} - {known}) == [ids[0], *ids[2:]], "ids grow in the order of appending"
    assert store.append_all(several) == ids and len(store.history()) == 4
    assert store.append_all([]) == []


def test_of_records_that_cannot_all_be_appended_none_is(store: Store) -> None:
    with pytest.raises(ValueError, match="finite"):
        store.append_all([record(number=1), record(number=2, prediction=math.inf)])
    with contextlib.closing(sqlite3.connect(store.path)) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON record WHEN new.batch = 77 BEGIN SELECT RAISE(FAIL, 'full'); END"
        )
        other.commit()
    with pytest.raises(sa.exc.IntegrityError, match="full"):
        store.append_all([record(number=1), record(number=2, batch=77)])
    assert store.history() == []


def planned(store: Store, read: Callable[[], object]) -> list[str]:
    """The steps of SQLite's plan for a query that concern table record."""
    statements: list[str] = []

    def listen(connection: object, cursor: object, statement: str, *more: object) -> None:
        statements.append(statement)

    store.append(record())
    sa.event.listen(store.database._engine, "before_cursor_execute", listen)
    read()
    (query,) = [statement for statement in statements if "SELECT" in statement]
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {query}", [1] * query.count("?")).fetchall()
    return [step[-1] for step in plan if " record" in step[-1]]


def test_reading_evidence_uses_the_index_of_tasks(store: Store) -> None:
    steps = planned(store, lambda: store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=400))
    assert steps and all("USING INDEX record_by_task (workload_id=?" in step for step in steps), steps


def test_newer_records_are_found_by_index(store: Store) -> None:
    assert planned(store, lambda: store.records_after(1, run="a", limit=5)) == [
        "SEARCH record USING INDEX record_by_run (run=? AND rowid>?)"
    ]


def test_a_record_of_an_operator_that_is_not_installed_can_be_read(store: Store) -> None:
    record_id = store.append(record(number=1))
    store.promote(record_id)
    as_of_an_operator_that_is_not_installed(store.path)
    (row,), (best,) = store.rows(), store.bests()
    assert row == best.row == store.row(record_id) and row.op == "attention"
    assert row.label == f"attention {row.workload_id[:12]}" and "attention" in row.problem
    assert row.measurement == record().measurement and row.config == record(number=1).config
    assert row.to_json()["workload"]["op"] == "attention"
    with pytest.raises(WorkloadError, match="attention"):
        row.record()
    assert store.stats()["records"] == 1


def test_a_store_may_be_named_by_a_url(store: Store) -> None:
    store.append(record())
    with Store.open(f"sqlite:///{store.path}", readonly=True) as other:
        assert other.path == store.path and other.name == str(store.path) and len(other.history()) == 1
    with pytest.raises(UsageError, match=r"databases of mysql are not supported, got mysql://host/db; give a path"):
        Store.open("mysql://host/db")


def test_stats_and_health_count(store: Store) -> None:
    store.promote(store.append(record(number=1)), artifact())
    store.append(record(number=2, outcome=Outcome.REJECTED))
    stats = store.stats()
    assert stats["outcomes"] == {"ok": 1, "rejected": 1} and stats["records"] == 2
    assert stats["targets"] == {H200: 2} and stats["artifact_bytes"] == len(artifact().code)
    health = store.health()
    assert health["problems"] == [] and health["journal_mode"] == "wal" and health["schema_version"] == fields.SCHEMA_VERSION
    assert health["created_here"] is True


def test_the_toolchain_is_stored_once(store: Store) -> None:
    for number in range(20):
        store.append(record(number=number))
    with sqlite3.connect(store.path) as other:
        assert other.execute("SELECT count(*) FROM toolchain").fetchone() == (1,)


@pytest.mark.parametrize("statement", ["DELETE FROM profile", "UPDATE profile SET json = '{}'"])
def test_profiles_are_append_only(store: Store, statement: str) -> None:
    store.add_profile(store.append(record()), profile())
    with sqlite3.connect(store.path) as other, pytest.raises(sqlite3.IntegrityError, match="profiles are append-only"):
        other.execute(statement)
