"""A dynamic batch, from the range to arrays of every size: tuned on a CPU, stored, compiled, called."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

import schedsearch
from schedsearch import Task, Workload, load_templates
from schedsearch.cli.run_report import ranges_text
from schedsearch.device.detect import detect
from schedsearch.errors import ArgumentError, NoRecordError, PlanError, UntrustedDatabaseError, UsageError, WorkloadError
from schedsearch.records import size_tables, trust
from schedsearch.records.damage import DamageLog
from schedsearch.session import plan_tasks, tune
from schedsearch.session.plan import ranges_of, search_time_s, trials_per_task, trials_to_choose
from schedsearch.session.summary import RunSummary
from schedsearch.size_table import SizeTable, served
from schedsearch.task import range_tasks
from schedsearch.workload import WorkloadRange, between
from schedsearch.workload_file import parse
from schedsearch.workload_file.yaml_source import WorkloadFileError

SMALL = Workload.conv2d(n=1, h=5, w=4, c=8, k=8, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "relu"))
LOW, HIGH = 1, 4
TRIALS = 4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSummary]:
    db = tmp_path_factory.mktemp("ranges") / "records.db"
    summary = tune([SMALL.with_dynamic("n", LOW, HIGH)], db, target="cpu", trials=TRIALS, tuner="random", workers=1)
    return db, summary


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """relu(conv2d(x, weight) + bias) in float64: NHWC, OHWI, 3x3, padding 1."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.maximum(np.einsum("nhwcrs,krsc->nhwk", windows, weight.astype(np.float64)) + bias, 0)


def inputs(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    shapes = [spec.shape for spec in SMALL.replace(n=n).signature]
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, weight, bias


@pytest.mark.long
def test_one_kernel_computes_every_size(tuned: tuple[Path, RunSummary]) -> None:
    db, _ = tuned
    with schedsearch.compile(SMALL.with_dynamic("n", LOW, HIGH), db, target="cpu") as kernel:
        for n in (*range(LOW, HIGH + 1), 3, 1):  # sizes that were called before, too
            arrays = inputs(n)
            np.testing.assert_allclose(kernel(*arrays), convolved(*arrays), rtol=1e-4, atol=1e-4)
            assert kernel(x=arrays[0], weight=arrays[1], bias=arrays[2]).shape[0] == n
        x, weight, bias = inputs(4)
        out = np.empty((4, 5, 4, 8), np.float32)
        kernel(x, weight, bias, out=out)
        np.testing.assert_allclose(out, convolved(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_the_table_says_what_was_measured_and_verified(tuned: tuple[Path, RunSummary]) -> None:
    db, summary = tuned
    (found,) = summary.ranges
    table = found.table
    assert table is not None and not found.problem
    assert (table.low, table.high) == (LOW, HIGH) and table.serves[0][0] == LOW
    for low, high, index in table.serves:
        assert {low, (low + high) // 2, max(low, high - 1), high} <= set(table.kernels[index].verified)
    assert set(table.specialised_ns) == set(SMALL.with_dynamic("n", LOW, HIGH).samples())
    assert all(gain > 0 for gain in table.gains.values())
    assert sum(task.new_trials for task in summary.tasks) + found.trials <= 3 * TRIALS
    (row,) = size_tables.all_rows(db, DamageLog())
    assert row.vouched and len(row.code) + len(row.size_table) < 10_000_000
    assert SizeTable.from_bytes(*table.to_bytes()).to_bytes() == table.to_bytes()


@pytest.mark.long
def test_a_narrower_range_is_served_too_and_a_wider_one_is_not(tuned: tuple[Path, RunSummary]) -> None:
    db, _ = tuned
    with schedsearch.compile(SMALL.with_dynamic("n", 2, 3), db, target="cpu") as kernel:
        arrays = inputs(3)
        np.testing.assert_allclose(kernel(*arrays), convolved(*arrays), rtol=1e-4, atol=1e-4)
        with pytest.raises(ArgumentError, match=r"x has shape \(4, 5, 4, 8\); this kernel takes n from 2 to 3"):
            kernel(*inputs(4))
        with pytest.raises(ArgumentError, match="n is 1; this kernel was compiled for 2 to 3"):
            kernel.at(1)
        with pytest.raises(ArgumentError, match="missing x"):
            kernel()
        with pytest.raises(ArgumentError, match=r"shape \(2, 5, 4, 9\)"):
            kernel(np.zeros((2, 5, 4, 9), np.float32), *inputs(2)[1:])
    with pytest.raises(NoRecordError, match=r"has no kernels for .* n = 1 to 5"):
        schedsearch.compile(SMALL.with_dynamic("n", 1, 5), db, target="cpu")
    with pytest.raises(NoRecordError, match="has no kernels"):
        schedsearch.compile(SMALL.replace(k=4).with_dynamic("n", LOW, HIGH), db, target="cpu")
    with pytest.raises(NoRecordError, match="there is no database"):
        schedsearch.compile(SMALL.with_dynamic("n", LOW, HIGH), db.with_name("none.db"), target="cpu")


@pytest.mark.long
def test_a_deployment_file_has_the_table(tuned: tuple[Path, RunSummary], tmp_path: Path) -> None:
    from schedsearch.records.deployment import export_deploy
    from schedsearch.records.store import Store

    with Store.open(tuned[0]) as store:
        export_deploy(store, tmp_path / "kernels.db")
    with schedsearch.compile(SMALL.with_dynamic("n", LOW, HIGH), tmp_path / "kernels.db", target="cpu") as kernel:
        arrays = inputs(3)
        np.testing.assert_allclose(kernel(*arrays), convolved(*arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_code_of_another_machine_needs_trust(
    tuned: tuple[Path, RunSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db, of_range = tuned[0], SMALL.with_dynamic("n", LOW, HIGH)
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "other"))
    with pytest.raises(UntrustedDatabaseError, match="did not sign the kernels"):
        schedsearch.compile(of_range, db, target="cpu")
    trust.trust(db)
    schedsearch.compile(of_range, db, target="cpu").close()
    trust.distrust(db)
    with pytest.raises(UntrustedDatabaseError):
        schedsearch.compile(of_range, db, target="cpu")


@pytest.mark.long
@pytest.mark.parametrize("column", ["size_table", "code"])
def test_changed_code_is_not_run(tuned: tuple[Path, RunSummary], tmp_path: Path, column: str) -> None:
    copy = tmp_path / "copy.db"
    with sqlite3.connect(tuned[0]) as one, sqlite3.connect(copy) as other:
        one.backup(other)
        other.execute(f"UPDATE size_table SET {column} = {'zeroblob(40)' if column == 'code' else repr('{}')}")
    with pytest.raises(UntrustedDatabaseError):
        schedsearch.compile(SMALL.with_dynamic("n", LOW, HIGH), copy, target="cpu")


@pytest.mark.parametrize(
    ("name", "low", "high", "message"),
    [
        ("n", 64, 1, "n from 64 to 1 is not a range; give the smaller bound first"),
        ("n", 5, 5, "n from 5 to 5 is not a range"),
        ("n", 0, 4, "the lowest n is 0; allowed: an integer, 1 or more"),
        ("n", None, 4, "the lowest n is None"),
        ("n", 1, "4", "the highest n is '4'"),
        ("n", 1, 5000, "has 5000 sizes; allowed: up to 1024"),
        ("m", 1, 4, "conv2d has no size 'm'"),
        ("padding", 1, 4, "conv2d has no size 'padding'.*allowed: n,"),
        ("c", 1, 4, "c cannot be dynamic: weight, which does not change between calls"),
        ("r", 1, 3, "r cannot be dynamic: weight"),
    ],
)
def test_impossible_ranges_are_refused(name: str, low: object, high: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SMALL.with_dynamic(name, low, high)  # type: ignore[arg-type]


def test_a_bound_without_a_workload_is_refused() -> None:
    with pytest.raises(WorkloadError):
        Workload.conv2d(n=1, h=9, w=9, c=8, k=8, r=7, s=7, dtype="float32").with_dynamic("h", 3, 9)


def test_a_range_has_an_identity_without_the_size_it_was_made_from() -> None:
    one, other = SMALL.with_dynamic("n", 1, 64), SMALL.replace(n=8).with_dynamic("n", 1, 64)
    assert one == other and hash(one) == hash(other) and one.json == other.json
    assert one.family == SMALL.with_dynamic("n", 3, 5).family != SMALL.replace(k=4).with_dynamic("n", 1, 64).family
    assert one.samples() == [1, 2, 4, 8, 16, 32, 64] and between(one.samples()) == [3, 6, 12, 24, 48]
    assert WorkloadRange(SMALL, "h", 480, 800).samples() == [480, 620, 800]


@pytest.mark.long
def test_damaged_tables_are_refused(tuned: tuple[Path, RunSummary]) -> None:
    table = tuned[1].ranges[0].table
    assert table is not None
    text, code = table.to_bytes()
    data = json.loads(text)
    for change in (
        {"version": 2}, {"serves": []}, {"serves": [[1, 3, 0]]}, {"serves": [[LOW, HIGH, 99]]}, {"kernels": []},
        {"high": HIGH + 1}, {"kernels": 3},
    ):  # fmt: skip
        with pytest.raises(PlanError):
            SizeTable.from_bytes(json.dumps(data | change), code)
    for damaged in (b"", code[:-30], b"PK" + code[2:40]):
        with pytest.raises(PlanError):
            SizeTable.from_bytes(text, damaged)


def test_stretches_of_sizes() -> None:
    assert served({1: 0, 2: 0, 3: 1, 4: 0}) == ((1, 2, 0), (3, 3, 1), (4, 4, 0))


FILE = "tasks:\n  - {{ op: conv2d, shape: {{ n: {n}, h: {h}, w: 4, c: {c}, k: 8, r: 3, s: 3 }}, padding: 1, name: first }}\n"


def test_a_workload_file_writes_a_range_as_two_numbers() -> None:
    file = parse(FILE.format(n="1..6", h=5, c=8)).resolve(detect("cpu"))
    of_range = Workload.conv2d(n=1, h=5, w=4, c=8, k=8, r=3, s=3, padding=1, dtype="float16").with_dynamic("n", 1, 6)
    assert {task.of_range for task in file.tasks} == {of_range}
    assert [task.workload for task in file.tasks] == [of_range.at(size) for size in of_range.samples()]
    assert file.tasks[0].name == "first, n = 1"
    assert all(file.where(index, "shape", "n").endswith(":2:28") for index in range(len(file.tasks)))


@pytest.mark.parametrize(
    ("n", "h", "c", "place", "message"),
    [
        ("6..1", 5, 8, "2:31", "n from 6 to 1 is not a range; give the smaller bound first"),
        ("0..4", 5, 8, "2:31", "the lowest n is 0"),
        ("1..", 5, 8, "2:31", "n must be an integer of at least 1, got '1..'"),
        ("1..5000", 5, 8, "2:31", "has 5000 sizes; allowed: up to 1024"),
        ("1", 5, "4..8", "2:49", "c cannot be dynamic: weight"),
        ("1..3", "5..9", 8, "2:40", "n and h are ranges; only one size of a task may be a range"),
    ],
)
def test_mistakes_in_ranges_name_their_place(n: str, h: object, c: object, place: str, message: str) -> None:
    with pytest.raises(WorkloadFileError) as error:
        parse(FILE.format(n=n, h=h, c=c))
    assert message in str(error.value)
    if place == "2:31":
        assert f":{place}: " in str(error.value)


@pytest.mark.long
def test_the_run_says_what_specialising_would_gain(tuned: tuple[Path, RunSummary]) -> None:
    text = ranges_text(tuned[1])
    assert "n = 1 to 4" in text and "verified for" in text and "over the best for this n alone" in text
    data = tuned[1].ranges[0].to_json()
    assert data["serves"][0][0] == LOW and set(data["over_specialised"]) <= {str(size) for size in range(LOW, HIGH + 1)}


def test_a_range_takes_at_most_three_budgets_of_one_size() -> None:
    plans = plan_tasks(
        [*range_tasks(SMALL.with_dynamic("n", 1, 64)), Task(SMALL.replace(k=4))], load_templates(), detect("cpu")
    )
    assert len(plans) == 8 and len(ranges_of(plans)) == 1
    assert trials_per_task(64, plans) * 8 <= (2 + 1) * 64
    for trials in range(4, 100):
        searched = trials_per_task(trials, plans[:7])
        assert searched >= 1 and searched * 7 + trials_to_choose(trials, searched, 7) == 3 * trials
        assert trials_to_choose(trials, searched, 7) >= 4  # both ends, before the end, the middle
    with pytest.raises(UsageError, match=r"3 trials do not suffice .* 7 sizes are searched.*give 4 or more"):
        trials_per_task(3, plans)
    assert search_time_s(30.0, plans[:7]) == 20.0 and search_time_s(30.0, plans[7:]) == 30.0


@pytest.mark.long
def test_records_of_the_choice_are_kept_apart(tuned: tuple[Path, RunSummary]) -> None:
    db, summary = tuned
    with sqlite3.connect(db) as connection:
        rows = connection.execute("SELECT outcome FROM record WHERE mode = 'cold-graph-v1/n=1..4'").fetchall()
    assert len(rows) == summary.ranges[0].trials > 0


def test_caches_and_explanations_say_what_to_do_with_a_range(tmp_path: Path) -> None:
    of_range = SMALL.with_dynamic("n", LOW, HIGH)
    with schedsearch.KernelCache(tmp_path / "none.db", "cpu") as cache:
        for call in (cache.kernel, cache.explain):
            with pytest.raises(UsageError, match=r"only schedsearch\.compile takes.* range\.at\(1\)"):
                call(of_range)  # type: ignore[arg-type]
