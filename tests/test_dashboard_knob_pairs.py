"""Pairs of knobs and the window of progress, against a count of the records."""

from __future__ import annotations

import math
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_support import DEFAULT, H200, SMALL, TEMPLATES, answers_of, sample_database

from schedsearch.dashboard.effects import Searched, epsilon_squared, knob_effects
from schedsearch.dashboard.knob_pairs import MOST_KNOBS, knob_pairs
from schedsearch.dashboard.views.task import Knobs
from schedsearch.measurement import Outcome
from schedsearch.records.store import Store


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db", trials=200)


@pytest.fixture(scope="module")
def view(sample: Path) -> dict[str, Any]:
    with answers_of(sample) as answers:
        key = next(row["key"] for row in answers.get("overview")["tasks"] if (row["name"], row["target"]) == ("small", H200))
        found: dict[str, Any] = answers.get(f"task/{key}")
    return found


def test_every_cell_is_a_count_of_the_records(sample: Path, view: dict[str, Any]) -> None:
    with Store.open(sample, readonly=True) as store:
        rows = [
            row for row in store.rows(workload=SMALL, target=H200) if not row.final_race and row.template == TEMPLATES[0]
        ]
    rows = [row for row in rows if row.measurement.outcome is not Outcome.REJECTED]
    values = {name: of for knobs in view["knobs"] if knobs["template"] == TEMPLATES[0]
              for name, of in zip(knobs["names"], knobs["values"], strict=True)}  # fmt: skip
    pairs = [pair for pair in view["knob_pairs"] if pair["template"] == TEMPLATES[0]]
    assert len(pairs) == math.comb(MOST_KNOBS, 2)
    for pair in pairs:
        cells = pair["cells"]
        assert sum(cells["trials"]) == len(rows)
        for i in range(len(cells["trials"])):
            wanted = {pair["first"]: values[pair["first"]][cells["first"][i]],
                      pair["second"]: values[pair["second"]][cells["second"][i]]}  # fmt: skip
            mine = [row for row in rows if wanted.items() <= dict(row.config).items()]
            times = {row.id: row.measurement.time_ns for row in mine if row.measurement.time_ns is not None}
            assert (cells["trials"][i], cells["failures"][i]) == (len(mine), len(mine) - len(times))
            if times:
                assert cells["median_ns"][i] == pytest.approx(statistics.median(times.values()))
                assert (cells["best_ns"][i], times[cells["best_id"][i]]) == (min(times.values()),) * 2
            else:
                assert (cells["best_ns"][i], cells["median_ns"][i], cells["best_id"][i]) == (None, None, None)


def searched(times: dict[tuple[int, ...], float], names: tuple[str, ...]) -> Searched:
    codes = np.array(list(times), dtype=np.int32)
    values = tuple(tuple(sorted(set(codes[:, column].tolist()))) for column in range(len(names)))
    count = len(times)
    return Searched(
        Knobs("t", names, values), codes, np.array(list(times.values())), np.array(["ok"] * count), np.arange(count),
        [""] * count,
    )  # fmt: skip


def test_two_knobs_that_matter_only_together_are_the_first_pair() -> None:
    rng = np.random.default_rng(0)
    times = {
        (a, b, c, n): float((1000.0 if (a + b) % 2 else 2000.0) * (1 + 0.02 * c) * rng.lognormal(0, 0.001))
        for a in range(2) for b in range(2) for c in range(3) for n in range(4)
    }  # fmt: skip
    found = searched(times, ("a", "b", "c", "n"))
    first, *others = knob_pairs(found, knob_effects(found))
    assert (first.first, first.second) == ("a", "b")
    assert first.importance == pytest.approx(1.0, abs=0.02) == first.gain
    assert all((pair.gain or 0.0) < 0.1 for pair in others)
    joint = found.codes[:, 0] * 2 + found.codes[:, 1]
    assert first.importance == epsilon_squared(joint, np.log(found.times_ns))


def test_without_two_trials_for_each_pair_of_values_nobody_knows_what_both_explain() -> None:
    rng = np.random.default_rng(0)
    times = {(a, b): float(1000.0 * (1 + a) * rng.lognormal(0, 0.1)) for a in range(4) for b in range(5)}
    found = searched(times, ("a", "b"))
    (pair,) = knob_pairs(found, knob_effects(found))
    assert (pair.importance, pair.gain, len(pair.cells.trials)) == (None, None, 20)


def test_knobs_of_one_value_or_of_many_have_no_map() -> None:
    found = searched({(0, n, n % 2, n % 3): 1000.0 + n for n in range(40)}, ("one", "many", "two", "three"))
    pairs = [{pair.first, pair.second} for pair in knob_pairs(found, knob_effects(found))]
    assert pairs == [{"two", "three"}]


def test_pairs_are_of_different_knobs_each_once(view: dict[str, Any]) -> None:
    for template in TEMPLATES:
        pairs = {frozenset((each["first"], each["second"])) for each in view["knob_pairs"] if each["template"] == template}
        knobs = set().union(*pairs)
        assert pairs == {frozenset(pair) for pair in combinations(knobs, 2)}


def test_the_window_reaches_from_the_best_to_what_was_best_early_and_holds_a_quarter(
    sample: Path, view: dict[str, Any]
) -> None:
    with Store.open(sample, readonly=True) as store:
        records = store.history(workload=SMALL, target=H200)
    times = [each.measurement.time_ns for each in records if not each.final_race and each.measurement.outcome.is_trial]
    valid = [time_ns for time_ns in times if time_ns is not None]
    (default,) = [each.measurement.time_ns for each in records if each.final_race and each.config == DEFAULT]
    early = min(time_ns for time_ns in times[: len(times) // 8] if time_ns is not None)
    window = view["window"]
    quartile = statistics.quantiles(valid, n=4, method="inclusive")[0]
    assert window["low_ns"] == min(valid)
    assert window["high_ns"] == pytest.approx(max(early, default or 0.0, quartile))
    assert window["above"] == sum(time_ns > window["high_ns"] for time_ns in valid)
