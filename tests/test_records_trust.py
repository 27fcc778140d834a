"""Machine code is loaded only if this machine vouches for what a file says about it, or its user trusts exactly that."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from records_support import H200, artifact, conv, forked, python, record

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import claims, trust
from schedsearch.records.deployment import export_deploy
from schedsearch.records.exchange import merge
from schedsearch.records.lookup import Lookup, LookupRow
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


def row_of(file: Path) -> LookupRow:
    with Lookup(file) as lookup:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
    assert row is not None
    return row


def load(file: Path) -> bytes:
    """The code of the best, through both readers."""
    with Lookup(file) as lookup, Store.open(file, readonly=True) as store:
        best = next(store.bests(workload=conv(), target=H200))
        stored = store.code(best)
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and row.vouched == best.vouched
        try:
            code = lookup.code(row)
        except DatabaseError:
            assert stored is None
            raise
        assert stored is not None and stored.code == code
        return code


def test_code_of_this_machine_is_loaded(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.db"
    shutil.copy(path, moved)
    for file in (path, moved):
        assert load(file) == artifact().code
        with Store.open(file, readonly=True) as store:
            assert store.created_here and store.artifact(SHA256) == artifact()


def test_code_of_another_machine_is_refused_only_when_it_is_asked_for(foreign: Path) -> None:
    assert row_of(foreign).artifact_sha256 == SHA256, "facts may be read"
    with pytest.raises(
        UntrustedDatabaseError,
        match=rf"another machine or an earlier .* wrote it.*schedsearch records trust {foreign}; else it is built again",
    ):
        load(foreign)
    with Store.open(foreign, readonly=True) as store:
        assert not store.created_here
        with pytest.raises(UntrustedDatabaseError, match="another machine stored"):
            store.artifact(SHA256)


def test_a_mark_is_of_the_kernels_wherever_they_go(foreign: Path, tmp_path: Path) -> None:
    before = foreign.read_bytes()
    assert trust.trust(foreign) == trust.Trusted(kernels=1, marked=1)
    assert foreign.read_bytes() == before, "nothing is written to the database itself"
    assert trust.trust(foreign) == trust.Trusted(kernels=1, marked=0)
    moved = tmp_path / "moved.db"
    shutil.copy(foreign, moved)
    with Store.open(foreign, readonly=True) as store:
        export_deploy(store, tmp_path / "deploy.db")
    for file in (foreign, moved):
        assert load(file) == artifact().code
    with Lookup(tmp_path / "deploy.db") as lookup:
        assert lookup.code(row_of(tmp_path / "deploy.db")) == artifact().code


def test_a_mark_does_not_cover_what_comes_into_the_file_later(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.trust(foreign)
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "a third machine"))
    with Store.open(foreign) as store:
        store.promote(store.append(record(900.0, number=7)), artifact(b"new"))
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    with pytest.raises(UntrustedDatabaseError):
        load(foreign)


def test_a_merge_takes_over_the_kernels_of_a_marked_file(foreign: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "mine.db") as mine:
        assert merge(mine, [foreign]).bests_dropped == 1
        trust.trust(foreign)
        report = merge(mine, [foreign])
        assert (report.bests_changed, report.bests_dropped, report.artifacts_added) == (1, 0, 1)
    shutil.rmtree(tmp_path / "another machine" / "trusted")
    assert load(tmp_path / "mine.db") == artifact().code, "this machine signed it"


def test_a_database_cannot_claim_trust_for_itself(foreign: Path) -> None:
    """An attacker controls the whole file. Even this machine's public id does not help without its key."""
    with sqlite3.connect(foreign) as other:
        other.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (claims.machine_id(),))
        other.execute("UPDATE artifact SET machine = ?", (claims.machine_id(),))
    with pytest.raises(UntrustedDatabaseError):
        load(foreign)


@pytest.mark.parametrize("column", ["code = CAST('evil' AS BLOB)", "plan = replace(plan, 'conv', 'evil')"])
def test_code_or_plan_that_was_exchanged_under_a_good_signature_is_refused(path: Path, column: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute(f"UPDATE artifact SET {column}")
    with Lookup(path) as lookup, Store.open(path) as store:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None
        for read in (lambda: lookup.code(row), lambda: store.code(next(store.bests())), lambda: store.artifact(SHA256)):
            with pytest.raises(DatabaseError, match="does not match its checksum"):
                read()
        store.promote(store.append(record(number=5)), artifact())
        assert store.code(next(store.bests())) == artifact(), "what is measured again is stored again"


def test_code_that_is_measured_here_too_becomes_ours(foreign: Path) -> None:
    with Store.open(foreign) as store:
        store.promote(store.append(record(number=5)), artifact())
        assert store.artifact(SHA256) == artifact()
        assert not store.created_here, "the rest of the database does not"
    assert load(foreign) == artifact().code


def test_a_deployment_file_is_trusted_here_and_elsewhere_only_when_marked(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deploy.db"
    with Store.open(path) as store:
        export_deploy(store, file)
    row = row_of(file)
    with Lookup(file) as lookup:
        assert lookup.code(row) == artifact().code
        monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "production"))
        with pytest.raises(UntrustedDatabaseError) as caught:
            lookup.code(row)
        assert "records verify" not in str(caught.value), "a deployment file cannot be verified"
        trust.trust(file)
        assert lookup.code(row) == artifact().code


def test_exporting_does_not_launder_code(foreign: Path, tmp_path: Path) -> None:
    with Store.open(foreign) as store:
        assert export_deploy(store, tmp_path / "deploy.db")["unsigned"] == 1
    with Lookup(tmp_path / "deploy.db") as lookup, pytest.raises(UntrustedDatabaseError):
        lookup.code(row_of(tmp_path / "deploy.db"))


def test_what_another_machine_wrote_does_not_keep_out_what_is_measured_here(foreign: Path) -> None:
    """The foreign best claims 1000 ns. Nobody here measured that."""
    with Store.open(foreign) as store:
        slower = store.append(record(5000.0, number=5))
        assert store.promote(slower, artifact(b"slower"), if_faster=True)
        assert [best.record_id for best in store.bests()] == [slower]
        assert not store.promote(store.append(record(6000.0, number=6)), if_faster=True), "but what was measured here does"


def test_a_signature_of_one_kind_is_none_of_another(path: Path) -> None:
    text = row_of(path).claim.text
    signatures = {kind: claims.sign(kind, text) for kind in claims.Kind}
    assert len(set(signatures.values())) == len(signatures)
    for kind, signature in signatures.items():
        assert [other for other in claims.Kind if claims.is_ours(other, text, signature)] == [kind]


def test_signatures_of_artifacts_and_databases_of_earlier_versions_are_known_for_their_own_kind(path: Path) -> None:
    key = (trust.state_dir() / "machine-key").read_bytes()
    uuid = "123e4567-e89b-12d3-a456-426614174000"
    for kind, text in ((claims.Kind.ARTIFACT, SHA256), (claims.Kind.DATABASE, uuid)):
        bare = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        assert [other for other in claims.Kind if claims.is_ours(other, text, bare)] == [kind]


@pytest.mark.parametrize("signature", ["", "x", "\u00e9\udc80", "0" * 64])
def test_a_text_that_is_no_signature_is_refused(path: Path, signature: str) -> None:
    assert not claims.is_ours(claims.Kind.BEST, "text", signature)


def test_the_key_is_private_and_made_once(path: Path, tmp_path: Path) -> None:
    (key,) = (tmp_path / "this machine").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    code = "from schedsearch.records.claims import machine_id; print(machine_id())"
    shutil.rmtree(tmp_path / "this machine")
    names = {process.communicate()[0] for process in [python(code) for _ in range(4)]}
    assert len(names) == 1, "processes that start at once agree"


def test_reading_makes_no_key(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedDatabaseError):
        load(foreign)
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
    with Lookup(path) as lookup:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None
        with pytest.raises(DatabaseError, match="is damaged: 5 bytes, 32 wanted; delete it"):
            lookup.code(row)


def test_marks_are_listed_by_the_file_they_came_from_and_can_be_taken_back(foreign: Path, tmp_path: Path) -> None:
    assert trust.sources() == []
    before = time.time()
    trust.trust(foreign)
    (source,) = trust.sources()
    assert (source.path, source.marks) == (str(foreign), 1) and before <= source.last_s <= time.time()
    copy = Path(shutil.copy(foreign, tmp_path / "copy.db"))
    assert trust.distrust(copy) == 1, "a copy holds the same kernels"
    assert trust.sources() == [] and trust.distrust(copy) == 0
    with pytest.raises(UntrustedDatabaseError):
        load(foreign)


def test_marks_of_a_file_that_is_gone_can_be_taken_back(foreign: Path) -> None:
    trust.trust(foreign)
    foreign.rename(foreign.with_name("moved.db"))
    assert trust.distrust(foreign) == 1
    assert not row_of(foreign.with_name("moved.db")).vouched


def test_a_damaged_mark_is_listed_without_a_source(foreign: Path, tmp_path: Path) -> None:
    trust.trust(foreign)
    (mark,) = (trust.state_dir() / "trusted").iterdir()
    mark.write_text("{")
    assert trust.sources() == [trust.Source("", 1, 0.0)]
    assert trust.distrust(foreign) == 1, "the file still says which kernel it is of"


def test_taking_back_marks_leaves_what_this_machine_signed(path: Path) -> None:
    assert trust.distrust(path) == 0
    assert load(path)


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
