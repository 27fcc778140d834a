"""What an earlier version left behind still opens: a database with a user's kernel, an exchange file, a report.

tests/data/before has them; `make.py` there wrote them. Databases of every schema version are in `test_records_schema`,
executables in `test_net`.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import isolate
from cli_support import schedsearch as command

import schedsearch
from schedsearch.errors import UnusableRecordError
from schedsearch.records import trust
from schedsearch.records.store import Store
from schedsearch.target import Target

FOLDER = Path(__file__).parent / "data" / "before"

of_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the record has code for x86-64")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(tmp_path, monkeypatch)
    path = tmp_path / "own_kernel.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((FOLDER / "own_kernel.sql").read_text())
    connection.close()
    return path


@pytest.fixture
def made_for(monkeypatch: pytest.MonkeyPatch) -> Target:
    """The CPU that the record is of, in place of this one."""
    target = replace(schedsearch.detect("cpu"), name="any", sms=1, simd_bits=128)
    monkeypatch.setattr("schedsearch.runtime.cache.detect", lambda _: target)
    return target


def source() -> Any:
    """The module of the kernel."""
    spec = importlib.util.spec_from_file_location("kernels_before", FOLDER / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smoothed(x: np.ndarray[Any, Any], weight: float) -> np.ndarray[Any, Any]:
    y = x.astype(np.float64)
    y[1:-1] = weight * y[1:-1] + (1 - weight) * (np.array(x[:-2], np.float64) + x[2:]) / 2
    return y


@of_x86
def test_a_record_of_a_users_kernel_runs_without_its_source(database: Path, made_for: Target) -> None:
    trust.trust(database)
    kernel = schedsearch.own_kernel("smooth", database)
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    y = np.zeros_like(x)
    for weight in (0.5, -0.25):
        kernel(x, weight, y)
        np.testing.assert_allclose(y, smoothed(x, weight), rtol=1e-5, atol=1e-6)
    kernel.close()


@of_x86
def test_code_of_another_machine_names_the_command_that_lets_it_run(database: Path, made_for: Target) -> None:
    kernel = schedsearch.own_kernel("smooth", database)
    x = np.zeros(1000, np.float32)
    with pytest.raises(UnusableRecordError, match=r"records trust \S+own_kernel\.db") as caught:
        kernel(x, 0.5, x.copy())
    assert "\n" not in str(caught.value)
    kernel.close()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecode, and so the digest, is of a minor version of Python")
def test_the_source_of_a_users_kernel_finds_its_record(database: Path) -> None:
    x = np.zeros(1000, np.float32)
    workload = source().smooth.workload(x, 0.5, x.copy())
    with Store.open(database) as store:
        (record,) = store.history()
        assert record.workload.id == workload.id


def test_an_exchange_file_gives_the_same_record_as_its_database(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    result = command("records", "import", "--db", copy, FOLDER / "records.jsonl")
    assert result.exit_code == 0, result.output
    with Store.open(database) as one, Store.open(copy) as other:
        (mine,), (theirs,) = one.history(), other.history()
    assert theirs.source and mine.measurement == theirs.measurement and mine.config == theirs.config
    assert (mine.workload, mine.started_at, mine.run) == (theirs.workload, theirs.started_at, theirs.run)


def test_a_report_of_today_says_what_the_report_of_its_database_said(database: Path) -> None:
    result = command("report", "--format", "json", "-o", "-", database)
    assert result.exit_code == 0, result.output
    before, today = json.loads((FOLDER / "report.json").read_text()), json.loads(result.stdout)
    (said,), (says,) = before["overview"]["tasks"], today["overview"]["tasks"]
    for name in ("key", "label", "op", "target", "mode", "workload", "template", "best_ns", "best_id", "rate", "trials"):
        assert says[name] == said[name], name
    columns = today["records"]["records"]
    assert {name: columns[name] for name in before["records"]["records"]} == before["records"]["records"]


def test_a_report_given_as_a_database_is_refused_in_one_line(database: Path) -> None:
    result = command("records", "list", "--db", FOLDER / "report.json")
    assert result.exit_code != 0 and result.stderr.count("\n") == 1 and "is not a database" in result.stderr
