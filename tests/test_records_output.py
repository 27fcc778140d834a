"""Output files and new databases appear under their name when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from records_support import record

from schedsearch.errors import DatabaseError, UsageError
from schedsearch.records import output
from schedsearch.records.exchange import Report, add_records
from schedsearch.records.filling import fill_store
from schedsearch.records.output import is_database, new_file, temporary_beside
from schedsearch.records.store import Store


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


class Stop(Exception):
    pass


def test_a_file_is_replaced_only_by_a_complete_one(folder: Path) -> None:
    path = folder / "file"
    path.write_text("old")
    with pytest.raises(Stop), new_file(path) as file:
        file.write(b"half")
        raise Stop
    assert path.read_text() == "old"
    with new_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(folder.iterdir()) == [path]


def test_a_link_stays_a_link(folder: Path) -> None:
    (folder / "link").symlink_to("file")
    with new_file(folder / "link") as file:
        file.write(b"new")
    assert (folder / "link").is_symlink() and (folder / "file").read_text() == "new"


def test_a_pipe_is_written_to(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_text()))
    reader.start()
    with new_file(folder / "pipe") as file:
        file.write(b"new")
    reader.join(120)
    assert read == ["new"] and (folder / "pipe").is_fifo()


def test_a_database_is_left_alone_whoever_made_it(folder: Path) -> None:
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    before = (folder / "other.db").read_bytes()
    with pytest.raises(UsageError, match=r"other\.db is a database, so it is left alone"), new_file(folder / "other.db"):
        pass
    assert (folder / "other.db").read_bytes() == before


@pytest.mark.parametrize("state", ["held by another", "truncated", "damaged"])
def test_a_database_is_left_alone_in_whatever_state(folder: Path, state: str) -> None:
    path = folder / "other.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x)")
        if state == "held by another":
            connection.execute("BEGIN EXCLUSIVE")
        else:
            data = path.read_bytes()
            path.write_bytes(data[:1000] if state == "truncated" else data[:16] + bytes(len(data) - 16))
        with pytest.raises(UsageError, match="is a database, so it is left alone"), new_file(path):
            pass


def test_a_file_with_another_beginning_is_not_a_database(folder: Path) -> None:
    for text in ("SQLite", "SQLite format 2\0", '{"rows": []}' * 100):
        (folder / "file").write_text(text)
        assert not is_database(folder / "file")
    assert not is_database(folder) and not is_database(folder / "nowhere")


@pytest.mark.parametrize("path", [".", "nowhere/file"])
def test_where_no_file_can_be(folder: Path, path: str) -> None:
    with pytest.raises(UsageError, match="cannot write"), new_file(folder / path) as file:
        file.write(b"new")


def put_meanwhile(monkeypatch: pytest.MonkeyPatch, put: Callable[[], object]) -> None:
    """Another process calls `put` in the last moment: between the last look at a file and the change of names."""
    rename = output._rename
    calls: list[int] = []

    def renamed(old: Path, new: Path, flag: int) -> None:
        calls.append(flag)
        if len(calls) == 2:  # the first finds that the name is taken
            put()
        rename(old, new, flag)

    monkeypatch.setattr(output, "_rename", renamed)


def test_a_database_that_appears_in_the_last_moment_is_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "file"
    path.write_text("old")

    def make_database() -> None:
        path.unlink()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE precious (x)")
        connection.close()

    put_meanwhile(monkeypatch, make_database)
    with pytest.raises(UsageError, match="file is a database, so it is left alone"), new_file(path) as file:
        file.write(b"new")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("precious",)]
    assert list(folder.iterdir()) == [path]


def test_a_file_that_is_deleted_or_becomes_a_folder_in_the_last_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        put_meanwhile(patch, path.unlink)
        with new_file(path) as file:
            file.write(b"new")
    assert path.read_text() == "new"

    def make_folder() -> None:
        path.unlink()
        path.mkdir()
        (path / "precious").touch()

    put_meanwhile(monkeypatch, make_folder)
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"), new_file(path) as file:
        file.write(b"new")
    assert [each.name for each in path.iterdir()] == ["precious"] and list(folder.iterdir()) == [path]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_exchange_names(folder: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(output, "_rename", refuse)
    for text in ("first", "second"):
        with new_file(folder / "file") as file:
            file.write(text.encode())
        assert (folder / "file").read_text() == text
    assert [each.name for each in folder.iterdir()] == ["file"]


def test_a_descriptor_is_written_where_the_shell_opened_it(folder: Path) -> None:
    """`>> log` appends, and other commands of the shell write to the same open file."""
    (folder / "log").write_text("first\n")
    with (folder / "log").open("a") as log:
        for name in (f"/dev/fd/{log.fileno()}", f"/proc/self/fd/{log.fileno()}"):
            with new_file(name) as file:
                file.write(b"next\n")
        log.write("last\n")
    assert (folder / "log").read_text() == "first\nnext\nnext\nlast\n"


def test_what_a_killed_process_left_is_removed_by_the_next(folder: Path) -> None:
    child = os.fork()
    if child == 0:
        with temporary_beside(folder / "records.db") as temporary:
            Store.open(temporary)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = folder.iterdir()
    assert "records.db" in {file.name for file in left.glob("*/*")}
    with temporary_beside(folder / "other") as mine:
        mine.touch()
        assert list(folder.iterdir()) == [mine.parent.parent]
        with temporary_beside(folder / "third"):
            assert mine.exists(), "one in use stays"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name", [".schedsearch-settings", ".schedsearch-unfinished-work_of_me", ".schedsearch-unfinished-settings"]
)
def test_folders_of_the_user_beside_an_output_stay(folder: Path, name: str) -> None:
    """An earlier version removed every folder whose name began with .schedsearch-, such as a state folder."""
    (folder / name).mkdir()
    (folder / name / "machine-key").write_text("precious")
    with new_file(folder / "out") as file:
        file.write(b"x")
    assert (folder / name / "machine-key").read_text() == "precious"


def append(store: Store, number: int = 0) -> Report:
    return add_records(store, [record(number=number)], source="test")


def test_a_new_store_appears_when_it_is_filled(folder: Path) -> None:
    path = folder / "records.db"

    def stop(store: Store) -> Report:
        append(store)
        raise Stop

    with pytest.raises(Stop):
        fill_store(path, stop)
    assert list(folder.iterdir()) == []

    def unseen(store: Store) -> Report:
        assert not path.exists()
        return append(store)

    assert fill_store(path, unseen).records_added == 1
    assert list(folder.iterdir()) == [path]
    assert fill_store(path, lambda store: append(store, 1)) == Report(records_added=1)
    with Store.open(path) as store:
        assert len(store.history()) == 2


def test_records_are_added_to_a_store_that_another_process_made_meanwhile(folder: Path) -> None:
    path = folder / "records.db"
    calls = []

    def fill(store: Store) -> Report:
        calls.append(store.path)
        with Store.open(path) as other:
            append(other, 1)
            append(other, 2)
        append(store, 2)
        report = append(store, 3)
        report.artifacts_dropped = 7
        return report

    report = fill_store(path, fill)
    assert (report.records_added, report.records_known, report.artifacts_dropped) == (1, 1, 7)
    assert len(calls) == 1 and list(folder.iterdir()) == [path]
    with Store.open(path) as kept:
        assert len(kept.history()) == 3


@pytest.mark.parametrize("path", ["nowhere/records.db", "."])
def test_where_no_store_can_be(folder: Path, path: str) -> None:
    with pytest.raises(DatabaseError):
        fill_store(folder / path, append)
