"""Bad files, full disks, other processes and sudden death give a clear error, and no committed record is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from records_support import artifact, conv, forked, python, record

from schedsearch.errors import DatabaseError, DatabaseLockedError, SchemaVersionError
from schedsearch.records.dbfile import BUSY_TIMEOUT_S
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / "state"))
        with Store.open(folder / "records.db") as store:
            for number in range(60):
                store.append(record(number=number))
            store.promote(1, artifact())
    return folder / "records.db"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A closed database with 60 records and a best."""
    return Path(shutil.copy(original, tmp_path / "records.db"))


OPENERS: list[Callable[[Path], object]] = [Store.open, lambda path: Store.open(path, readonly=True), Lookup]
each_opener = pytest.mark.parametrize("opener", OPENERS, ids=["write", "readonly", "lookup"])


@each_opener
def test_a_path_that_is_a_folder(tmp_path: Path, opener) -> None:
    with pytest.raises(DatabaseError, match=rf"{tmp_path} is a folder; give a file in it, e.g. {tmp_path}/records.db"):
        opener(tmp_path)


@each_opener
def test_a_folder_that_is_missing(tmp_path: Path, opener) -> None:
    with pytest.raises(DatabaseError, match=r"the folder .*/nowhere does not exist; create it or give another path"):
        opener(tmp_path / "nowhere" / "records.db")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "missing.db"
    for opener in (Lookup, lambda path: Store.open(path, create=False), lambda path: Store.open(path, readonly=True)):
        with pytest.raises(
            DatabaseError, match=r"no database at .*missing.db; check the path, or create it: schedsearch tune"
        ):
            opener(missing)
    assert not missing.exists()


@each_opener
def test_a_file_of_another_format(tmp_path: Path, opener) -> None:
    file = tmp_path / "records.db"
    file.write_text("kind: workload\n" * 50)
    with pytest.raises(DatabaseError, match=r"records.db is not a database: it does not begin as an SQLite file does"):
        opener(file)
    assert file.read_text().startswith("kind"), "it is left as it was"


@each_opener
def test_a_database_of_another_program(tmp_path: Path, opener) -> None:
    file = tmp_path / "bookmarks.db"
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE bookmark (url TEXT)")
    with pytest.raises(DatabaseError, match=r"is an SQLite database, but not one of schedsearch"):
        opener(file)


def test_an_empty_file_is_a_new_database_but_holds_nothing_to_read(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    file.touch()
    for opener in OPENERS[1:]:
        with pytest.raises(DatabaseError, match=r"is empty, not a database of schedsearch"):
            opener(file)
    with Store.open(file) as store:
        assert store.append(record()) == 1


@each_opener
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_truncated_database(path: Path, opener, share: float) -> None:
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    with pytest.raises(DatabaseError, match=rf"is truncated: \d+ bytes, its header promises {size}; restore it from a copy"):
        opener(path)


@each_opener
def test_a_database_cut_inside_its_header(path: Path, opener) -> None:
    """What the header promises may be cut off, too."""
    os.truncate(path, 23)
    with pytest.raises(DatabaseError, match="is truncated: 23 bytes, a header alone has 100; restore it from a copy"):
        opener(path)


def test_a_damaged_page_is_reported_when_it_is_met(path: Path) -> None:
    with sqlite3.connect(path) as other:
        ((page,),) = other.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'record'")
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(256))
    with Store.open(path) as store, pytest.raises(DatabaseError, match=r"is damaged .*; restore it from a copy"):
        store.history()


@each_opener
def test_a_database_of_a_newer_schema(path: Path, opener) -> None:
    with sqlite3.connect(path) as other:
        other.execute("UPDATE meta SET value = '7' WHERE key = 'schema_version'")
    with pytest.raises(
        SchemaVersionError, match=r"has schema version 7, this schedsearch knows up to 6; upgrade schedsearch"
    ):
        opener(path)


HOLD_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
input()
"""


def test_a_database_that_another_process_locks(path: Path) -> None:
    holder = python(HOLD_LOCK, path, stdin=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        with Store.open(path, busy_timeout_s=0.2) as store:
            assert len(store.history()) == 60, "reading goes on"
            started = time.monotonic()
            with pytest.raises(DatabaseLockedError) as caught:
                store.append(record(number=99))
            assert 0.1 < time.monotonic() - started < BUSY_TIMEOUT_S, "it waited for the time-out"
            assert f"({holder.pid} " in str(caught.value) and "wait for it, stop it" in str(caught.value)
            holder.communicate("done\n")
            assert store.append(record(number=99)) == 61, "and goes on when the lock is gone"
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture
def open_folder():
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


Run = Callable[[Callable[[], str]], str]


@pytest.fixture
def as_another_user(open_folder: Path) -> Run:
    """Runs something as another user, with a state folder of that user; returns its text."""
    state = open_folder / "state"
    state.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(state, 65534, 65534)

    def run(action: Callable[[], str]) -> str:
        def with_own_state() -> str:
            os.environ["SCHEDSEARCH_STATE_DIR"] = str(state)
            return action()

        return forked(with_own_state, drop_root=True)

    return run


def test_a_file_or_folder_without_write_permission(path: Path, open_folder: Path, as_another_user: Run) -> None:
    file = open_folder / "records.db"
    shutil.copy(path, file)

    file.chmod(0o444)
    open_folder.chmod(0o777)
    assert "is read-only here; make it writable (chmod u+w" in as_another_user(lambda: str(Store.open(file)))

    file.chmod(0o666)
    open_folder.chmod(0o555)
    refused = as_another_user(lambda: str(Store.open(file)))
    assert "read-only here, and SQLite keeps its log beside records.db" in refused
    assert "make the folder writable or give a file in another one" in refused  # a database, or the output of a build

    file.chmod(0o000)
    assert "no permission to read" in as_another_user(lambda: str(Lookup(file)))


def test_an_older_database_that_cannot_be_written_can_be_read(open_folder: Path, as_another_user: Run) -> None:
    file = open_folder / "records.db"
    with sqlite3.connect(file) as old:
        old.executescript((Path(__file__).parent / "data" / "schema_v1.sql").read_text())
    file.chmod(0o444)

    def read() -> str:
        with Store.open(file, readonly=True) as store:
            return f"{len(store.history())} records"

    assert as_another_user(read) == "8 records"


def test_a_reader_leaves_nothing_behind_and_changes_nothing(path: Path) -> None:
    before = path.read_bytes(), path.stat().st_mtime_ns
    with Store.open(path, readonly=True) as store, Lookup(path) as lookup:
        assert len(store.history()) == 60 and lookup.exact(conv().id, record().target, "cold-graph-v1")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            lookup._connection.execute("DELETE FROM best")
        with pytest.raises(DatabaseError, match="was opened read-only; open it for writing"):
            store.append(record())
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert sorted(path.parent.glob(f"{path.name}*")) == [path]


def test_a_read_only_copy_can_be_read(path: Path, open_folder: Path, as_another_user: Run) -> None:
    file = open_folder / "records.db"
    shutil.copy(path, file)
    file.chmod(0o444)
    open_folder.chmod(0o555)

    def read() -> str:
        with Store.open(file, readonly=True) as store, Lookup(file) as lookup:
            row = lookup.exact(conv().id, record().target, "cold-graph-v1")
            return f"{len(store.history())} {row.record_id if row else None}"

    assert as_another_user(read) == "60 1"
    assert list(open_folder.glob("records.db-*")) == [], "no log is left on read-only media"


def test_a_read_only_copy_with_an_outstanding_log_names_the_remedy(
    path: Path, open_folder: Path, as_another_user: Run
) -> None:
    file = open_folder / "records.db"
    with Store.open(path) as store:
        store.append(record(number=100))
        shutil.copy(path, file)
        shutil.copy(path.with_name("records.db-wal"), open_folder / "records.db-wal")
    open_folder.chmod(0o555)
    text = as_another_user(lambda: str(Lookup(file)))
    assert "the folder of a live database must be writable, also for reading" in text
    assert "copy both files to a writable place, or read a copy made with: schedsearch records export --deploy" in text


def test_a_live_database_of_another_user_is_never_taken_for_immutable(
    path: Path, open_folder: Path, as_another_user: Run
) -> None:
    """It must not be opened as immutable, because its owner may write at any moment and immutable files have no locks."""
    file = open_folder / "records.db"
    shutil.copy(path, file)
    file.chmod(0o644)
    assert "the folder of a live database must be writable" in as_another_user(lambda: str(Lookup(file)))
    with Store.open(file) as store:  # while the owner has it open, its files may be shared

        def read() -> str:
            with Lookup(file) as lookup:
                return str(lookup.exact(conv().id, record().target, "cold-graph-v1") is not None)

        store.append(record(number=100))
        assert as_another_user(read) == "True"


def test_a_full_database_keeps_committed_records(path: Path) -> None:
    """SQLite's own page limit gives the error of a full disk (SQLITE_FULL)."""
    with Store.open(path) as store:
        with store.database.read() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(DatabaseError, match=r"the disk of .* is full; nothing of this write was kept.*free some space"):
            for number in range(1000, 2000):
                store.append(record(number=number))
        kept = store.history()
        assert len(kept) >= 60
    with Store.open(path) as store:
        assert store.history() == kept and store.health()["problems"] == []
        assert store.append(record(number=5000)) > 60


def test_a_disk_that_refuses_to_write_keeps_committed_records(path: Path) -> None:
    """A limit on file sizes makes the system refuse writes in the middle of a transaction."""

    def write() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Store.open(path) as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
            for number in range(1000, 9000):
                store.append(record(number=number))
        return "no error"

    text = forked(write)
    assert text.startswith("DatabaseError: ") and "earlier commits are kept" in text
    with Store.open(path) as store:
        assert len(store.history()) > 60 and store.health()["problems"] == []


APPEND_FOR_EVER = """
import sys
from records_support import record
from schedsearch.records.store import Store
with Store.open(sys.argv[1]) as store:
    number = int(sys.argv[2])
    while True:
        number += 1
        print(store.append(record(number=number)), flush=True)
"""


def test_kill_9_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    total = 0
    for attempt in range(3):
        writer = python(APPEND_FOR_EVER, path, str(attempt * 1_000_000))
        assert writer.stdout
        for _ in range(50):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        total += 50 + sum(1 for line in writer.stdout if line.endswith("\n"))
        writer.wait()
        with Store.open(path) as store:
            found = len(store.history())
            # The process may have committed one more record before it was killed and could not report it.
            assert total <= found <= total + 1
            assert store.health()["problems"] == []
            total = found


APPEND_MANY = """
import sys
from records_support import artifact, record
from schedsearch.records.store import Store
with Store.open(sys.argv[1]) as store:
    for number in range(60):
        record_id = store.append(record(1e6 - number, number=number, run=sys.argv[2]))
        store.promote(record_id, artifact(sys.argv[2].encode()), if_faster=True)
"""


def test_processes_write_at_once_to_a_database_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    writers = [python(APPEND_MANY, path, name) for name in ("one", "two", "three")]
    seen = 0
    while any(writer.poll() is None for writer in writers):  # a concurrent reader sees only growth
        time.sleep(0.02)
        if path.exists() and path.stat().st_size:
            try:
                with Store.open(path, readonly=True) as store:
                    count = store.stats()["records"]
            except DatabaseError:  # the tables are not there yet
                assert seen == 0
                continue
            assert count >= seen
            seen = count
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    with Store.open(path) as store:
        assert store.stats()["records"] == 180 and store.health()["problems"] == []
        (best,) = store.bests()
        assert best.record.measurement.time_ns == 1e6 - 59


def test_a_store_opened_read_only_refuses_to_write(path: Path) -> None:
    with Store.open(path, readonly=True) as store, pytest.raises(DatabaseError, match="was opened read-only"):
        store.append(record(number=99))
