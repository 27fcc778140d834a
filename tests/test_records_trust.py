"""Machine code is loaded only if this machine wrote it or its user trusts the origin."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from records_support import H200, artifact, conv, forked, python, record

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import trust
from schedsearch.records.exchange import export_deploy
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

SHA256 = artifact().sha256


@pytest.fixture(autouse=True)
def this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "this machine"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records.db"
    with Store.open(path) as store:
        store.promote(store.append(record()), artifact())
    return path


@pytest.fixture
def foreign(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that came from another machine."""
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    return path


def test_code_of_this_machine_is_loaded(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.db"
    shutil.copy(path, moved)
    for file in (path, moved):
        with Lookup(file) as lookup, Store.open(file, readonly=True) as store:
            assert lookup.trusted and store.trusted
            assert lookup.code(SHA256) == artifact().code
            assert store.artifact(SHA256) == artifact()


def test_code_of_another_machine_is_refused_only_when_it_is_asked_for(foreign: Path) -> None:
    with Lookup(foreign) as lookup, Store.open(foreign) as store:
        assert not lookup.trusted and not store.trusted
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and row.artifact_sha256 == SHA256, "facts may be read"
        for load in (lookup.code, store.artifact):
            with pytest.raises(
                UntrustedDatabaseError, match=rf"another machine wrote; .*schedsearch records trust {foreign}"
            ):
                load(SHA256)


def test_a_mark_makes_a_database_trusted_where_it_lies(foreign: Path, tmp_path: Path) -> None:
    before = foreign.read_bytes()
    trust.trust(foreign)
    assert foreign.read_bytes() == before, "nothing is written to the database itself"
    trust.trust(foreign)  # twice is fine
    with Lookup(foreign) as lookup:
        assert lookup.trusted and lookup.code(SHA256) == artifact().code
    moved = tmp_path / "moved.db"
    shutil.copy(foreign, moved)
    with Lookup(moved) as lookup, pytest.raises(UntrustedDatabaseError):
        lookup.code(SHA256)


def test_a_mark_does_not_pass_to_another_database_at_the_same_place(foreign: Path) -> None:
    trust.trust(foreign)
    with sqlite3.connect(foreign) as other:
        other.execute("UPDATE meta SET value = 'another id' WHERE key = 'uuid'")
    with Lookup(foreign) as lookup, pytest.raises(UntrustedDatabaseError):
        lookup.code(SHA256)


def test_a_database_cannot_claim_trust_for_itself(foreign: Path) -> None:
    """An attacker controls the whole file. Even this machine's public id does not help without its key."""
    with sqlite3.connect(foreign) as other:
        other.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (trust.machine_id(),))
        other.execute("UPDATE artifact SET machine = ?", (trust.machine_id(),))
    with Lookup(foreign) as lookup:
        assert not lookup.trusted
        with pytest.raises(UntrustedDatabaseError):
            lookup.code(SHA256)


@pytest.mark.parametrize("column", ["code = CAST('evil' AS BLOB)", "plan = replace(plan, 'conv', 'evil')"])
def test_code_or_plan_that_was_exchanged_under_a_good_signature_is_refused(path: Path, column: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute(f"UPDATE artifact SET {column}")
    with Lookup(path) as lookup, Store.open(path) as store:
        for load in (lookup.code, store.artifact):
            with pytest.raises(DatabaseError, match="does not match its checksum"):
                load(SHA256)


def test_code_that_is_measured_here_too_becomes_ours(foreign: Path) -> None:
    with Store.open(foreign) as store:
        store.promote(store.append(record(number=5)), artifact())
        assert store.artifact(SHA256) == artifact()
        assert not store.trusted, "the rest of the database does not"


def test_a_deployment_file_is_trusted_here_and_elsewhere_only_when_marked(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deploy.db"
    with Store.open(path) as store:
        export_deploy(store, file)
    with Lookup(file) as lookup:
        assert lookup.trusted and lookup.code(SHA256)
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "production"))
    with Lookup(file) as lookup:
        with pytest.raises(UntrustedDatabaseError):
            lookup.code(SHA256)
        trust.trust(file)
        assert lookup.code(SHA256)


def test_exporting_does_not_launder_code(foreign: Path, tmp_path: Path) -> None:
    with Store.open(foreign) as store:
        export_deploy(store, tmp_path / "deploy.db")
    with Lookup(tmp_path / "deploy.db") as lookup:
        assert not lookup.trusted
        with pytest.raises(UntrustedDatabaseError):
            lookup.code(SHA256)


def test_the_key_is_private_and_made_once(path: Path, tmp_path: Path) -> None:
    (key,) = (tmp_path / "this machine").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    code = "from schedsearch.records.trust import machine_id; print(machine_id())"
    shutil.rmtree(tmp_path / "this machine")
    names = {process.communicate()[0] for process in [python(code) for _ in range(4)]}
    assert len(names) == 1, "processes that start at once agree"


def test_reading_makes_no_key(foreign: Path, tmp_path: Path) -> None:
    with Lookup(foreign) as lookup, pytest.raises(UntrustedDatabaseError):
        lookup.code(SHA256)
    assert not (tmp_path / "another machine").exists()


def test_a_state_folder_that_cannot_be_used_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(file / "state"))
    with pytest.raises(DatabaseError, match=r"machine's key.*set SCHEDSEARCH_STATE_DIR to a folder that can be written"):
        Store.open(tmp_path / "records.db")


def test_a_damaged_key_is_reported(path: Path, tmp_path: Path) -> None:
    (tmp_path / "this machine" / "machine-key").write_bytes(b"short")
    with Lookup(path) as lookup, pytest.raises(DatabaseError, match="is damaged: 5 bytes, 32 wanted; delete it"):
        lookup.code(SHA256)


def test_trust_of_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no database at"):
        trust.trust(tmp_path / "missing.db")


def test_the_state_folder_is_the_platforms_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SCHEDSEARCH_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert trust.state_dir() == tmp_path / "schedsearch"
    assert os.environ.get("SCHEDSEARCH_STATE_DIR") is None and forked(lambda: str(trust.state_dir())) == str(
        trust.state_dir()
    )
