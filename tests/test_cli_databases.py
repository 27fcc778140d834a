"""Every command refuses a database that it cannot use in the same way: one line, exit code 6, and nothing is changed."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from cli_support import TINY, isolate, schedsearch
from records_support import artifact, record

from schedsearch.records.store import Store

READERS = {
    "list": ["records", "list", "--db"],
    "show": ["records", "show", "1", "--db"],
    "best": ["records", "best", "--db"],
    "export": ["records", "export", "out.jsonl", "--db"],
    "export --format": ["records", "export", "out.json", "--format", "t4", "--db"],
    "export --deploy": ["records", "export", "out.db", "--deploy", "--db"],
    "prune": ["records", "prune", "--db"],
    "verify": ["records", "verify", "--target", "cpu", "--db"],
    "merge FILE": ["records", "merge", "--db", "new.db"],
    "trust": ["records", "trust"],
    "compile": ["compile", "tiny.yaml", "--output", "out.db", "--db"],
    "doctor": ["doctor", "--db"],
}
# These create a database, or fill an empty file.
WRITERS = {
    "import": ["records", "import", "in.jsonl", "--db"],
    "merge": ["records", "merge", "good.db", "--db"],
    "tune": ["tune", "tiny.yaml", "--db"],
}
TO_BE_FILLED = {"missing": "no database at", "empty": "is empty, not a database", "without tables": "without tables"}
UNUSABLE = {
    "folder": "is a folder; give a file in it",
    "nowhere/records.db": "the folder .*/nowhere does not exist",
    "pipe": "is a device or pipe",
    "text": "is not a database: it does not begin as an SQLite file does",
    "foreign": "is an SQLite database, but not one of schedsearch",
    "truncated": "is truncated",
    "newer": "has schema version 999",
}
DEPLOY = {"deploy": "is a deployment file: it holds best kernels and no measurements"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        isolate(folder, patch)
        Path("tiny.yaml").write_text(TINY)
        with Store.open("good.db") as store:
            store.promote(store.append(record(number=1)), artifact())
        assert schedsearch("records", "export", "deploy", "--deploy", "--db", "good.db").exit_code == 0
        assert schedsearch("records", "export", "in.jsonl", "--db", "good.db").exit_code == 0
        Path("folder").mkdir()
        Path("empty").touch()
        Path("text").write_text("no database, but long enough to look at\n" * 20)
        Path("truncated").write_bytes(Path("good.db").read_bytes()[:5000])
        for name, statements in (
            ("foreign", ["CREATE TABLE bookmark (url TEXT)"]),
            ("without tables", ["CREATE TABLE bookmark (url TEXT)", "DROP TABLE bookmark"]),
            ("newer", ["UPDATE meta SET value = '999' WHERE key = 'schema_version'"]),
        ):
            if name == "newer":
                shutil.copy("good.db", name)
            with sqlite3.connect(name) as connection:
                for statement in statements:
                    connection.execute(statement)
            connection.close()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    return {file.name: file.read_bytes() if file.is_file() else None for file in folder.iterdir()}


@pytest.mark.parametrize("command", [*READERS, *WRITERS])
def test_a_database_that_cannot_be_used_exits_with_6_and_nothing_is_changed(folder: Path, command: str) -> None:
    before = content(folder)
    wrong = UNUSABLE | DEPLOY | (TO_BE_FILLED if command in READERS else {})
    if command == "trust":  # a deployment file is what one trusts
        wrong = {name: text for name, text in wrong.items() if name != "deploy"} | {"without tables": "no table meta"}
    for name, text in wrong.items():
        result = schedsearch(*(READERS | WRITERS)[command], name)
        assert result.exit_code == 6, (name, result.output)
        line = result.stderr.splitlines()[-1]
        assert line.startswith("schedsearch: ") and Path(name).name in line, (name, line)
        assert re.search(text, line), (name, line)
        assert "Traceback" not in result.output
        assert content(folder) == before, name


@pytest.mark.parametrize("command", ["import", "merge"])
@pytest.mark.parametrize("name", TO_BE_FILLED)
def test_a_missing_or_empty_database_is_filled(folder: Path, command: str, name: str) -> None:
    result = schedsearch(*WRITERS[command], name)
    assert result.exit_code == 0 and "records added: 1" in result.stdout
    with Store.open(name, readonly=True) as store:
        assert len(store.history()) == 1
