"""The overview: what it calls a speed-up, what it marks, groups and leaves out, and where there is something to see."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from dashboard_support import A100, H200, answers_of, raced_database, sample_database

from schedsearch.dashboard.noise import doubt_of, spread_of
from schedsearch.dashboard.ratios import median_ratio
from schedsearch.dashboard.report import report_markdown
from schedsearch.records.store import Store
from schedsearch.roofline import has_peaks, suspect_time_ns

CPU = "cpu:512:2:AMD EPYC"
QUIET = tuple(100_000.0 + each for each in (0, 40, -30, 10, 60, -50, 20, 5, -10, 70, -60, 30, -20, 15, 25, 35))
DEFAULT = tuple(2.0 * each for each in QUIET)
TWO_GROUPS = (10_000.0, 10_100.0, 9_950.0, 10_040.0) * 2 + (40_000.0, 40_500.0, 39_800.0, 40_100.0) * 2
NOISY = (12_000.0, 15_000.0, 19_000.0, 30_000.0, 45_000.0, 60_000.0, 80_000.0, 110_000.0, 180_000.0, 250_000.0) * 2


def test_a_speed_up_of_noisy_times_is_marked_and_not_in_the_headline(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, QUIET), (DEFAULT, TWO_GROUPS), (DEFAULT, NOISY))) as answers:
        view = answers.get("overview")
    quiet, groups, noisy = view["tasks"]
    assert [task["doubt"] for task in view["tasks"]] == ["", "bimodal", "noisy"]
    assert groups["speedup"] > 5, "the number itself is still there"
    assert view["geomean_speedup"] == pytest.approx(quiet["speedup"]) == pytest.approx(2.0)
    assert (view["raced_tasks"], view["trusted_tasks"]) == (3, 1)
    assert groups["doubts"] == [
        "best: its repetitions fall into two groups: 50% near 10.02 us and 50% near 40.05 us, so their median is not to be "
        "trusted"
    ]
    assert noisy["doubts"][0].startswith("best: its repetitions spread by ")
    assert noisy["best_spread"] == pytest.approx(spread_of(NOISY))


def test_without_a_time_to_trust_there_is_no_headline(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, NOISY), (NOISY[:8], QUIET))) as answers:
        view = answers.get("overview")
    assert (view["geomean_speedup"], view["raced_tasks"], view["trusted_tasks"]) == (None, 2, 0)


def test_a_speed_up_has_the_interval_of_the_ratio_of_both_times(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, QUIET))) as answers:
        (task,) = answers.get("overview")["tasks"]
    found = task["speedup"], task["speedup_low"], task["speedup_high"]
    assert found == pytest.approx(median_ratio(DEFAULT, QUIET))
    assert found[1] < found[0] < found[2]


def test_a_default_that_is_the_best_is_said_to_be_doubtful_once(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (NOISY, tuple(2 * each for each in NOISY)))) as answers:
        (task,) = answers.get("overview")["tasks"]
    assert len(task["doubts"]) == 1 and task["best_id"] == task["default_id"]


def test_each_database_has_the_totals_of_its_own_tasks(tmp_path: Path) -> None:
    files = (
        raced_database(tmp_path / "a.db", (DEFAULT, QUIET), (DEFAULT, tuple(0.5 * each for each in QUIET))),
        sample_database(tmp_path / "b.db", trials=30),
    )
    with answers_of(*files) as answers:
        view = answers.get("overview")
    for row in view["databases"]:
        tasks = [task for task in view["tasks"] if task["database"] == row["key"]]
        assert row["trials"] == sum(task["trials"] for task in tasks)
        assert row["failures"] == sum(task["trials"] - task["valid"] for task in tasks)
        speedups = [task["speedup"] for task in tasks if not task["doubt"]]
        assert row["geomean_speedup"] == pytest.approx(statistics.geometric_mean(speedups))
    assert view["databases"][0]["geomean_speedup"] == pytest.approx(8**0.5)


@pytest.mark.parametrize(
    ("target", "known"), [(H200, True), (A100, True), (CPU, False), ("cuda:sm_90:132:Some Card", False), ("x", False)]
)
def test_the_share_of_the_limit_is_shown_where_the_peaks_of_the_device_are_known(
    tmp_path: Path, target: str, known: bool
) -> None:
    assert has_peaks(target) is known
    with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, QUIET), target=target)) as answers:
        (task,) = answers.get("overview")["tasks"]
    assert task["rate"], "the rate needs no knowledge of the device"
    if known:
        with Store.open(tmp_path / "a.db", readonly=True) as store:
            workload = store.history()[0].workload
        assert task["limit_share"] == pytest.approx(suspect_time_ns(workload, target) / statistics.median(QUIET))
    else:
        assert (task["limit_ns"], task["limit_share"]) == (None, None)


class TestPages:
    def test_nothing_yet(self, tmp_path: Path) -> None:
        with answers_of(tmp_path / "missing.db") as answers:
            assert answers.get("overview")["pages"] == ["overview"]

    def test_one_run_on_one_device_has_nothing_to_compare(self, tmp_path: Path) -> None:
        with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, QUIET))) as answers:
            view = answers.get("overview")
        assert view["pages"] == ["overview", "runs", "records"]
        assert view["compared"] == []

    def test_two_databases_without_a_common_task_have_nothing_to_compare_either(self, tmp_path: Path) -> None:
        one = raced_database(tmp_path / "a.db", (DEFAULT, QUIET))
        other = sample_database(tmp_path / "b.db", trials=10)
        with answers_of(one, other) as answers:
            pairs = [set(pair) for pair in answers.get("overview")["compared"]]
        assert {"0", "1"} not in pairs

    def test_a_task_in_two_databases_or_on_two_devices_can_be_compared(self, tmp_path: Path) -> None:
        one = raced_database(tmp_path / "a.db", (DEFAULT, QUIET))
        other = raced_database(tmp_path / "b.db", (DEFAULT, QUIET), target=A100)
        for files in ((one, other), (sample_database(tmp_path / "c.db", trials=10),)):
            with answers_of(*files) as answers:
                view = answers.get("overview")
                assert "compare" in view["pages"]
                for a, b in view["compared"]:
                    assert answers.get(f"compare/{a}/{b}")["rows"], "each pair has something to compare"

    def test_replays_are_there_when_a_file_was_named(self, tmp_path: Path) -> None:
        from schedsearch.dashboard.answers import Answers

        answers = Answers([], [str(tmp_path / "replay.json")])
        assert answers.get("overview")["pages"] == ["overview", "replay"]
        answers.close()


def test_a_table_to_paste_marks_doubtful_times_too(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (DEFAULT, QUIET), (DEFAULT, TWO_GROUPS))) as answers:
        text = report_markdown(answers)
    rows = [line for line in text.splitlines() if line.startswith("| conv2d")]
    assert ["2.00x |" in rows[0], "(bimodal)" in rows[0], "(bimodal)" in rows[1]] == [True, False, True]
    assert "over 1 raced task: 2.00x; 1 more task is left out" in text
    assert "fall into two groups" in text


def test_the_sample_of_times_is_what_it_is_said_to_be() -> None:
    assert [doubt_of(times) for times in (QUIET, TWO_GROUPS, NOISY)] == ["", "bimodal", "noisy"]
