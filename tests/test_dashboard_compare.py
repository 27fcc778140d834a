"""Two sides compared: ratios, intervals, verdicts and counts agree; what cannot be trusted is marked."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dashboard_support import A100, H200, answers_of, raced_database, sample_database

from schedsearch.dashboard.ratios import mean_ratio, median_ratio, verdict_of

QUIET = tuple(100_000.0 + each for each in (0, 40, -30, 10, 60, -50, 20, 5, -10, 70, -60, 30, -20, 15, 25, 35))
TWO_GROUPS = (100_000.0, 101_000.0, 99_500.0, 100_400.0) * 2 + (400_000.0, 405_000.0, 398_000.0, 401_000.0) * 2
NOISY = tuple(100_000.0 * 1.1**each for each in range(16))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db")


def slower(times: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(each * factor for each in times)


def test_the_ratio_is_time_of_a_over_time_of_b(tmp_path: Path, sample: Path) -> None:
    other = sample_database(tmp_path / "b.db", seed=1)
    with answers_of(sample, other) as answers:
        view = answers.get("compare/0/1")
        back = answers.get("compare/1/0")
    assert {row["name"] for row in view["rows"]} == {"small", "large"}
    assert len(view["rows"]) == 3
    for row in view["rows"]:
        assert row["ratio"] == pytest.approx(row["a"]["time_ns"] / row["b"]["time_ns"])
        assert row["low"] <= row["ratio"] <= row["high"]
    assert view["geomean"] == pytest.approx(statistics.geometric_mean(row["ratio"] for row in view["rows"]))
    assert view["geomean"] == pytest.approx(1 / back["geomean"])


def test_cards_compare_across_devices(sample: Path) -> None:
    with answers_of(sample) as answers:
        sides = [side["key"] for side in answers.get("overview")["sides"] if side["kind"] == "target"]
        view = answers.get(f"compare/{sides[0]}/{sides[1]}")
    (row,) = view["rows"]
    assert (row["target_a"], row["target_b"], row["verdict"]) == (H200, A100, "slower")
    assert row["ratio"] == pytest.approx(1 / 1.9, rel=0.1)
    assert (view["only_a"], view["regressions"]) == (["large"], 1)


def test_verdict_interval_and_count_agree_whatever_was_measured(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def times(middle: float, spread: float, n: int) -> tuple[float, ...]:
        return tuple((middle * rng.lognormal(0, spread, n)).tolist())

    cases = [(factor, spread, n) for factor in (0.5, 0.97, 0.99, 1.0, 1.01, 1.05, 3.0) for spread in (0.001, 0.05, 1.0)
             for n in (2, 5, 16)]  # fmt: skip
    one = raced_database(tmp_path / "a.db", *((times(9e5, 0.001, 16), times(1e5, s, n)) for _, s, n in cases))
    other = raced_database(tmp_path / "b.db", *((times(9e5, 0.001, 16), times(1e5 * f, s, n)) for f, s, n in cases))
    with answers_of(one, other) as answers:
        view = answers.get("compare/0/1")
    assert len(view["rows"]) == len(cases)
    for row in view["rows"]:
        if row["low"] is None:
            wanted = "unknown"
        elif row["low"] <= 1 <= row["high"]:
            wanted = "same"
        else:
            wanted = "faster" if row["ratio"] > 1 else "slower"
        assert row["verdict"] == wanted
        assert row["low"] is None or row["low"] <= row["ratio"] <= row["high"]
    assert view["counts"] == dict.fromkeys(view["counts"], 0) | Counter(row["verdict"] for row in view["rows"])
    assert all(view["counts"].values()), "each verdict occurs"
    assert view["regressions"] == view["counts"]["slower"]
    assert view["verdict"] == verdict_of(view["low"], view["high"])


def test_a_difference_below_two_percent_is_not_shown_however_quiet_both_sides_are() -> None:
    for factor, wanted in ((1.01, "same"), (1.05, "slower"), (1 / 1.05, "faster")):
        _, low, high = median_ratio(QUIET, slower(QUIET, factor))
        assert verdict_of(low, high) == wanted


def test_one_task_in_common_gives_its_own_interval_and_verdict(tmp_path: Path) -> None:
    one = raced_database(tmp_path / "a.db", (slower(QUIET, 3), QUIET))
    other = raced_database(tmp_path / "b.db", (slower(QUIET, 3), slower(QUIET, 1.2)))
    with answers_of(one, other) as answers:
        view = answers.get("compare/0/1")
    (row,) = view["rows"]
    assert [view[name] for name in ("geomean", "low", "high")] == pytest.approx(
        [row[name] for name in ("ratio", "low", "high")]
    )
    assert (view["verdict"], row["verdict"]) == ("slower", "slower")


def test_the_interval_of_medians_is_that_of_all_resamples() -> None:
    a, b = (10.0, 11.0, 13.0, 17.0), (5.0, 5.5, 6.0, 6.1)
    medians = [sorted(statistics.median(drawn) for drawn in itertools.product(side, repeat=4)) for side in (a, b)]
    ratios = np.array([one / other for one in medians[0] for other in medians[1]])
    low, high = np.quantile(ratios, (0.025, 0.975))
    found = median_ratio(a, b)
    assert found.ratio == statistics.median(a) / statistics.median(b)
    assert found.low == pytest.approx(low / 1.02, rel=0.02)
    assert found.high == pytest.approx(high * 1.02, rel=0.02)


def test_there_is_no_interval_with_fewer_than_four_repetitions() -> None:
    assert median_ratio((100.0, 100.0, 100.0), (50.0,) * 9)[1:] == (None, None)
    assert median_ratio((), (50.0,) * 9) == (None, None, None)


def test_a_mean_of_tasks_that_differ_has_a_wide_interval_however_quiet_each_is() -> None:
    pairs = [(QUIET, slower(QUIET, factor)) for factor in (0.5, 0.9, 1.1, 2.0)]
    found = mean_ratio(pairs, [2.0, 1 / 0.9, 1 / 1.1, 0.5])
    assert found.ratio == pytest.approx(statistics.geometric_mean([2.0, 1 / 0.9, 1 / 1.1, 0.5]))
    assert found.low is not None and found.high is not None and found.low < 0.8 and found.high > 1.25
    alike = mean_ratio([(QUIET, slower(QUIET, 0.5))] * 4, [2.0] * 4)
    assert alike.low == pytest.approx(2 / 1.02, rel=0.01)


def test_a_mean_needs_three_tasks_if_one_of_them_has_no_interval() -> None:
    assert mean_ratio([((1.0,), (1.0,))], [1.0])[1:] == (None, None)
    assert mean_ratio([((1.0,), (1.0,))] * 3, [1.0, 2.0, 4.0]).low is not None
    assert mean_ratio([], []) == (None, None, None)


def test_times_that_cannot_be_trusted_are_marked_on_their_side(tmp_path: Path) -> None:
    one = raced_database(tmp_path / "a.db", (slower(QUIET, 9), QUIET), (slower(QUIET, 9), NOISY))
    other = raced_database(tmp_path / "b.db", (slower(QUIET, 9), TWO_GROUPS), (slower(QUIET, 9), QUIET))
    with answers_of(one, other) as answers:
        view = answers.get("compare/0/1")
    doubts = {(row["a"]["doubt"], row["b"]["doubt"]) for row in view["rows"]}
    assert doubts == {("", "bimodal"), ("noisy", "")}
    assert view["doubtful"] == 2
    (groups,) = (row for row in view["rows"] if row["b"]["doubt"] == "bimodal")
    assert (groups["low"], groups["high"], groups["verdict"]) == (None, None, "unknown")
    assert view["geomean"] == next(row["ratio"] for row in view["rows"] if row is not groups)
    assert view["trusted_tasks"] == 1
    words = next(row["b"]["words"] for row in view["rows"] if row["b"]["doubt"] == "bimodal")
    assert "50% near 100.2 us and 50% near 400.5 us" in words
