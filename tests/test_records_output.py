"""Output files and new databases appear under their name when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from records_support import record

from schedsearch.errors import DatabaseError, UsageError
from schedsearch.records.output import is_database, new_file, store_to_fill
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
        file.write_text("half")
        raise Stop
    assert path.read_text() == "old"
    with new_file(path) as file:
        file.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(folder.iterdir()) == [path]


def test_a_link_stays_a_link(folder: Path) -> None:
    (folder / "link").symlink_to("file")
    with new_file(folder / "link") as file:
        file.write_text("new")
    assert (folder / "link").is_symlink() and (folder / "file").read_text() == "new"


def test_a_pipe_is_written_to(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_text()))
    reader.start()
    with new_file(folder / "pipe") as file:
        file.write_text("new")
    reader.join(10)
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
        file.write_text("new")


def test_a_new_store_appears_when_it_is_filled(folder: Path) -> None:
    path = folder / "records.db"
    with pytest.raises(Stop), store_to_fill(path) as store:
        store.append(record())
        raise Stop
    assert list(folder.iterdir()) == []
    with store_to_fill(path) as store:
        store.append(record())
        assert not path.exists()
    assert list(folder.iterdir()) == [path]
    with store_to_fill(path) as store:
        assert len(store.history()) == 1


def test_a_store_that_another_process_made_meanwhile_is_kept(folder: Path) -> None:
    path = folder / "records.db"
    with pytest.raises(DatabaseError, match="another process made"), store_to_fill(path) as store:
        store.append(record(number=1))
        with Store.open(path) as other:
            other.append(record(number=2))
            other.append(record(number=3))
    with Store.open(path) as kept:
        assert len(kept.history()) == 2
