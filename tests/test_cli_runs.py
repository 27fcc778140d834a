"""`schedsearch runs` and `runs diff` on databases whose runs and times are known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import isolate, schedsearch
from store_contract import conv, record

from schedsearch.measurement import Measurement, Outcome
from schedsearch.records.store import Store

SLOW = (2000.0, 2010.0, 1990.0, 2005.0, 1995.0)  # ns
FAST = (1000.0, 1010.0, 990.0, 1005.0, 995.0)
NOISY = (900.0, 2000.0, 950.0, 2100.0, 1000.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    return tmp_path


def add_run(db: str, *tasks: tuple[int, Sequence[float]], tuner: str = "xgb") -> str:
    """A finished run that measured one configuration of the convolution with each batch size, and a failure."""
    with Store.open(db) as store:
        run = store.start_run({"options": {"tuner": tuner, "seed": 3}, "target": "cuda:sm_90"})
        for n, times_ns in tasks:
            measurement = Measurement(Outcome.OK, times_ns=tuple(times_ns), max_error=0.0)
            store.append(replace(record(number=len(run) + n, run=run, measurement=measurement), workload=conv(n=n)))
        store.append(record(number=99, run=run, outcome=Outcome.LAUNCH_ERROR))
        store.finish_run(run, {"stopped": "trials", "wall_s": 12.0})
    return run


def test_runs_are_listed_the_newest_first() -> None:
    first, second = add_run("records.db", (1, SLOW)), add_run("records.db", (1, FAST), (2, FAST), tuner="ga")
    listed = json.loads(schedsearch("runs", "--json").stdout)
    assert {run["id"] for run in listed} == {first, second}
    assert listed[0]["started_at_s"] >= listed[1]["started_at_s"]
    of_second = next(run for run in listed if run["id"] == second)
    assert (of_second["trials"], of_second["failures"], of_second["tuner"], of_second["state"]) == (3, 1, "ga", "finished")
    table = schedsearch("runs").stdout
    assert first in table and second in table and "ga" in table


@pytest.mark.parametrize(
    ("stopped", "state"), [("trials", "finished"), ("interrupted", "interrupted"), ("lost", "interrupted")]
)
def test_a_run_that_lost_its_devices_is_not_finished(stopped: str, state: str) -> None:
    with Store.open("records.db") as store:
        store.finish_run(store.start_run({"target": "cuda:sm_90"}), {"stopped": stopped})
    (run,) = json.loads(schedsearch("runs", "--json").stdout)
    assert run["state"] == state


def test_the_comparison_says_which_run_is_faster_and_by_how_much() -> None:
    a, b = add_run("records.db", (1, SLOW), (2, FAST)), add_run("records.db", (1, FAST), (2, NOISY))
    view = json.loads(schedsearch("runs", "diff", a, b, "--json").stdout)
    rows = {row["label"]: row for row in view["rows"]}
    faster, noisy = rows[conv(n=1).label], rows[conv(n=2).label]
    assert (
        faster["ratio"] == pytest.approx(statistics.median(SLOW) / statistics.median(FAST)) and faster["verdict"] == "faster"
    )
    assert faster["low"] > 1 and noisy["low"] < 1 < noisy["high"] and noisy["verdict"] == "same"
    table = schedsearch("runs", "diff", a, b).stdout
    assert "2.000" in table and "faster" in table and "not shown to differ" in table
    reverse = json.loads(schedsearch("runs", "diff", b, a, "--json").stdout)
    assert {row["label"]: row["verdict"] for row in reverse["rows"]}[conv(n=1).label] == "slower"


def test_runs_of_two_databases_are_compared() -> None:
    a, b = add_run("one.db", (1, SLOW)), add_run("two.db", (1, FAST))
    result = schedsearch("runs", "diff", a, b, "--db", "one.db", "--db", "two.db")
    assert result.exit_code == 0 and "faster" in result.stdout
    assert "one.db" in result.stdout and "two.db" in result.stdout
    assert {"one.db", "two.db"} <= set(schedsearch("runs", "--db", "one.db", "--db", "two.db").stdout.split())


def test_without_names_the_last_two_are_compared() -> None:
    add_run("records.db", (1, SLOW))
    alone = schedsearch("runs", "diff")
    assert alone.exit_code == 4 and "1 run; a comparison needs two" in alone.stderr
    add_run("records.db", (1, FAST))
    assert schedsearch("runs", "diff").exit_code == 0


def test_a_task_of_one_run_only_is_named() -> None:
    a, b = add_run("records.db", (1, SLOW)), add_run("records.db", (1, FAST), (4, FAST))
    assert f"only in B: {conv(n=4).label}" in schedsearch("runs", "diff", a, b).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["diff", "nobody", "nothing"], 2, "is not the id of a run; list them: schedsearch runs"),
        (["diff", "2", "2"], 2, "fits 2 runs"),
        (["diff", "2"], 2, "two runs, or none"),
        (["--db", "missing.db"], 6, "missing.db"),
        (["dif"], 2, "id you mean 'diff'?"),
    ],
)
def test_mistakes_are_told_with_what_to_do(arguments: list[str], code: int, message: str) -> None:
    add_run("records.db", (1, SLOW))
    add_run("records.db", (1, FAST))
    result = schedsearch("runs", *arguments)
    assert result.exit_code == code and message in result.stderr


def test_where_to_list_runs_names_the_database_that_was_given() -> None:
    add_run("other.db", (1, SLOW))
    assert "list them: schedsearch runs --db other.db" in schedsearch("runs", "diff", "1", "2", "--db", "other.db").stderr
