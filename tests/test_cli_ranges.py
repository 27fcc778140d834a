"""The commands about records and kernels, with a range of sizes in the workload file and in the database."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import isolate, schedsearch
from records_support import H200, artifact, conv, record, size_table

from schedsearch.cli.ranges import table_text
from schedsearch.cli.run_report import ranges_text
from schedsearch.cli.tune import _print_next
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table
from schedsearch.session.ranges import range_mode
from schedsearch.session.summary import RangeSummary, RunSummary, Shares

RANGE = conv().with_dynamic("n", 1, 4)
MODE = "cold-graph-v1"
FILE = """\
target: auto
tasks:
  - {name: first, op: conv2d, shape: {n: 1..4, h: 14, w: 14, c: 64, k: 64, r: 3, s: 3}, padding: 1}
  - {name: other, op: conv2d, shape: {n: 1, h: 14, w: 14, c: 64, k: 128, r: 3, s: 3}, padding: 1}
"""
LABEL = "conv2d 4x14x14x64 k64 3x3 p1 f16 NHWC, n = 1 to 4"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.yaml").write_text(FILE)
    with Store.open("records.db") as store:
        store.promote(store.append(record(1000.0, workload=conv(k=128))), artifact())
        store.append(record(1100.0, number=1, mode=range_mode(MODE, RANGE)))
        put_size_table(store.database, RANGE, H200, MODE, size_table())
    return tmp_path


def test_ranges_are_listed_with_what_specialising_would_gain(folder: Path) -> None:
    shown = schedsearch("records", "ranges")
    assert shown.exit_code == 0, shown.output
    assert f"{LABEL} on {H200} in mode {MODE}" in shown.stdout
    assert "1 to 4  conv2d_wgmma  1 us to 1 us  1, 2, 3, 4" in shown.stdout
    assert "gain up to 2.00x (size = 4), 1.41x in geometric mean over 2 searched sizes" in shown.stdout
    (found,) = json.loads(schedsearch("records", "ranges", "--json", "--target", "h200").stdout)
    assert (found["label"], found["serves"], found["vouched"]) == (LABEL, [[1, 4, 0]], True)
    assert found["over_specialised"] == {"1": 1.0, "4": 2.0} and found["kernels"][0]["verified"] == [1, 2, 3, 4]
    none = schedsearch("records", "ranges", "--target", "a100")
    assert "no kernels of ranges of sizes in records.db; a task with a range" in none.stdout


def test_another_machine_is_told_that_the_kernels_are_not_signed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / "another machine"))
    assert "not signed here: schedsearch records trust records.db" in schedsearch("records", "ranges").stdout
    assert "2 kernels in records.db, 2 newly trusted" in schedsearch("records", "trust", "records.db").stdout
    assert "not signed" not in schedsearch("records", "ranges").stdout


def test_listings_tell_records_of_ranges_from_others(folder: Path) -> None:
    lines = schedsearch("records", "list").stdout.splitlines()
    assert ["n=1..4" in line for line in lines[2:]] == [True, False]
    best = schedsearch("records", "best")
    assert "kernels of 1 range of sizes: schedsearch records ranges --db records.db" in best.stderr
    assert "1 range of sizes" in schedsearch("doctor", "--db", "records.db").output
    report = schedsearch("report", "records.db", "--format", "markdown").stdout
    assert "code for n=1..4" in report.replace("\\", "")


def test_compile_writes_the_kernels_of_the_range(folder: Path) -> None:
    made = schedsearch("compile", "w.yaml", "--target", "h200")
    assert made.exit_code == 0, made.output
    assert "1 kernel, those of 1 range of sizes" in made.stdout and f"{LABEL}, served by" in made.stdout
    with Lookup("kernels.db") as lookup:
        assert [row.workload_id for row in lookup.with_code()] == [conv(k=128).id]
    explained = schedsearch("explain", "w.yaml", "--target", "h200", "--db", "kernels.db")
    serves = "-> exact: conv2d_wgmma, stored machine code that was tuned for n = 1 to 4"
    assert explained.stdout.startswith(f"{LABEL}\n  {serves}\n") and "-> exact: record 1" in explained.stdout
    first = json.loads(schedsearch("explain", "w.yaml", "--target", "h200", "--json").stdout)[0]
    assert first["levels"][0]["serves"] and first["workload"]["parameter"] == "n"


def test_a_range_without_kernels_exits_with_4(folder: Path) -> None:
    (folder / "w.yaml").write_text(FILE.replace("1..4", "1..5"))
    refused = schedsearch("compile", "w.yaml", "--target", "h200")
    assert refused.exit_code == 4 and "no record on NVIDIA H200 in mode cold-graph-v1 for conv2d 5x14" in refused.stderr
    assert not (folder / "kernels.db").exists()
    assert "   exact: records.db has no kernels for" in schedsearch("explain", "w.yaml", "--target", "h200").stdout


def test_a_c_export_names_the_range_that_it_leaves_out(folder: Path) -> None:
    refused = schedsearch("records", "export", "--c", "out")
    assert f"{LABEL} on {H200}: it is for a range of sizes, and a C export holds kernels of single sizes" in refused.output


def test_a_dry_run_counts_the_trials_of_the_choice(folder: Path) -> None:
    said = schedsearch("tune", "w.yaml", "--dry-run", "--target", "h200", "--trials", 12).stdout
    # 24 of the range and 12 of the other task for 4 sizes in all; 3 * 12 - 3 * 9 are left to choose
    assert "9 trials a task, 36 in all, and up to 9 more to choose and verify the kernels of 1 range of sizes" in said
    plan = json.loads(schedsearch("tune", "w.yaml", "--dry-run", "--target", "h200", "--trials", 12, "--json").stdout)
    assert (plan["trials"], plan["trials_to_choose"]) == (9, 9)


def test_the_suggested_call_takes_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    task: Any = SimpleNamespace(best_ns=1.0, workload=RANGE.at(2))
    summary = RunSummary("r", "db", H200, (task,), 1.0, Shares(0, 0, 0), "trials", (RangeSummary(RANGE, size_table(), 3),))
    file: Any = SimpleNamespace(path="w.yaml", target="auto", measure=SimpleNamespace(mode=MODE))
    _print_next(summary, file, "r.db", "auto", MODE)
    text = capsys.readouterr().out
    assert "k=64, r=3, s=3, padding=(1, 1, 1, 1)).with_dynamic('n', 1, 4)" in text and "y = kernel(x, weight)" in text


def test_nothing_to_gain_is_said_in_words() -> None:
    table = size_table()
    same = type(table)(1, 4, table.kernels, table.serves, {1: 1000.0, 4: 1500.0}, 4)
    assert same.mean_gain == 1 and "gain nothing at the searched sizes (1, 4)" in table_text(same)
    unknown = type(table)(1, 4, table.kernels, table.serves, {}, 4)
    assert "would still gain is not known" in table_text(unknown)
    summary = RunSummary("r", "db", H200, (), 1.0, Shares(0, 0, 0), "trials", (RangeSummary(RANGE, table, 3),))
    assert "over the best for this n alone" in ranges_text(summary) and "(n = 4)" in ranges_text(summary)
