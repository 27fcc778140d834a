"""How tasks share a budget: the scheduler on searches with a known course, and the benchmark over recorded searches."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import replay_support as support

from schedsearch.replay import load, run
from schedsearch.session.arms import WARM_TRIALS
from schedsearch.session.task_state import choose_arm

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FLAT = np.full(400, 100.0)  # its default is its best


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("budget")


class TestScheduler:
    def test_every_task_has_its_default_and_is_warm_before_any_gets_more(self, budget: ModuleType) -> None:
        had = budget.share([FLAT] * 5, [1000.0, 1, 1, 1, 1], 100, choose_arm)
        assert had[4].tolist() == [1] * 5
        assert had[5 * WARM_TRIALS - 1].tolist() == [WARM_TRIALS] * 5
        assert had[-1].sum() == 100

    def test_tasks_that_look_alike_share_alike(self, budget: ModuleType) -> None:
        had = budget.share([FLAT] * 4, [1.0] * 4, 400, choose_arm)[-1]
        assert had.max() - had.min() <= budget.BATCH

    @pytest.mark.parametrize("weight", [4.0, 9.0])
    def test_they_share_by_the_roots_of_their_weights(self, budget: ModuleType, weight: float) -> None:
        had = budget.share([FLAT, FLAT], [weight, 1.0], 400, choose_arm)[-1]
        assert had[0] / had[1] == pytest.approx(weight**0.5, rel=0.15)

    def test_earlier_gains_of_a_task_change_nothing(self, budget: ModuleType) -> None:
        improving = 1e6 * 0.97 ** np.arange(400)
        improved, flat = budget.share([improving, FLAT], [1.0, 1.0], 200, choose_arm)[-1]
        assert abs(improved - flat) <= budget.BATCH

    def test_an_exhausted_task_leaves_its_part_to_the_others(self, budget: ModuleType) -> None:
        had = budget.share([FLAT[:20], FLAT], [1.0, 1.0], 200, choose_arm)[-1]
        assert had.tolist() == [20, 180]


class TestBenchmark:
    def test_the_excess_by_hand(self, budget: ModuleType) -> None:
        """Two tasks with 10 trials each: one then is at twice its optimum with weight 3, the other has no valid result."""
        one = budget.Run([np.full(30, 200.0), np.full(30, np.nan)], np.array([100.0, 50.0]), np.array([3.0, 1.0]))
        expected = (3 * 2.0 + 1 * budget.NOTHING) / 4 - 1
        assert one.excess([10], budget.equal_shares).tolist() == pytest.approx([expected])

    def test_equal_shares_are_the_searches_alone(self, budget: ModuleType, tmp_path: Path) -> None:
        """After n trials a task has the same best as its own replay after n evaluations."""
        spaces = load([support.write(tmp_path / "one.json", support.cache())]).spaces
        times = budget.search(spaces, "ga", 12, seeds=2, jobs=1)
        (first, second) = budget.make_runs(times, np.array([spaces[0].best_ns]), [1.0], 0, 0)
        for seed, one in enumerate((first, second)):
            fractions = run(spaces[0], "ga", seed, 12).fractions
            expected = [min(1 / fractions[n - 1], budget.NOTHING) - 1 for n in (4, 9, 12)]
            assert one.excess([4, 9, 12], budget.equal_shares).tolist() == pytest.approx(expected)

    def test_the_comparison_is_of_the_same_searches(self, budget: ModuleType) -> None:
        rng = np.random.default_rng(0)
        searches = [100.0 + 900.0 * rng.random(120) for _ in range(3)]
        runs = [budget.Run(searches, np.full(3, 100.0), np.ones(3))] * 4
        figures = budget.compare(runs, [10, 40])
        for each in figures.values():
            assert each["difference"] == pytest.approx(each["scheduler"] - each["equal"])
            assert each["low"] == pytest.approx(each["difference"]) == pytest.approx(each["high"]), "all runs are the same"
