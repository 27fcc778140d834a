"""What a warm search tries first: the few configurations that together lose least over the recorded tasks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.tuner import make_tuner
from schedsearch.tuner.portfolio import portfolio

SPACE = ConfigSpace([Knob("x", tuple(range(16))), Knob("y", tuple(range(16)))])
Results = list[tuple[Config, float | None]]


def least_mean(regrets: np.ndarray, size: int) -> float:
    """The best possible choice, by trying all."""
    columns = range(regrets.shape[1])
    return min(regrets[:, list(some)].min(axis=1).mean() for some in itertools.combinations(columns, size))


class TestTheChoice:
    def test_begins_with_the_one_that_loses_least_on_the_mean(self) -> None:
        regrets = np.array([[0.0, 0.9, 0.3], [0.9, 0.0, 0.2]])
        assert portfolio(regrets, 1) == [2]

    def test_then_covers_what_the_chosen_ones_lose(self) -> None:
        """Two tasks of one kind and one of another: the second choice is for the other kind."""
        regrets = np.array([[0.0, 0.05, 0.9], [0.0, 0.01, 0.9], [0.9, 0.8, 0.0]])
        assert portfolio(regrets, 2) == [1, 2]

    def test_goes_on_with_the_least_mean_when_every_task_has_its_best(self) -> None:
        assert portfolio(np.array([[0.0, 0.3, 0.1, 0.2]]), 3) == [0, 2, 3]

    @pytest.mark.parametrize("seed", range(5))
    def test_is_nearly_as_good_as_the_best_of_all(self, seed: int) -> None:
        regrets = np.random.default_rng(seed).exponential(size=(6, 12))
        chosen = regrets[:, portfolio(regrets, 3)].min(axis=1).mean()
        worst = regrets[:, portfolio(regrets, 1)].min(axis=1).mean()
        assert worst - chosen >= (1 - 1 / np.e) * (worst - least_mean(regrets, 3)), "the greedy bound"

    def test_is_never_larger_than_what_there_is(self) -> None:
        assert sorted(portfolio(np.zeros((2, 3)), 9)) == [0, 1, 2]
        assert portfolio(np.zeros((0, 3)), 2) == portfolio(np.zeros((2, 0)), 2) == []


def bowl(x: int, y: int) -> Results:
    """A task whose best is at (x, y), of which every third configuration was measured, and failed at the border."""
    configs = [Config(x=i, y=j) for i in range(16) for j in range(16) if (i + j) % 3 == (x + y) % 3]
    return [(c, None if c["x"] == 15 else 100.0 + (c["x"] - x) ** 2 + (c["y"] - y) ** 2) for c in configs]


class TestXgb:
    def test_tries_the_best_of_every_task_among_the_first(self) -> None:
        tuner = make_tuner("xgb", SPACE, seed=0, default=Config(x=0, y=0))
        tuner.transfer([bowl(3, 3), bowl(12, 4)])
        first = tuner.ask(7)
        assert first[0] == Config(x=0, y=0), "the default comes first"
        for wanted in ((3, 3), (12, 4)):
            assert any(abs(c["x"] - wanted[0]) + abs(c["y"] - wanted[1]) <= 1 for c in first[1:4])

    def test_then_leaves_room_for_what_no_task_knows(self) -> None:
        tuner = make_tuner("xgb", SPACE, seed=0)
        tuner.transfer([bowl(3, 3)])
        first = tuner.ask(8)
        assert [c for c in first if abs(c["x"] - 3) + abs(c["y"] - 3) > 6], "the space-filling proposals"

    def test_takes_only_what_is_legal_here(self) -> None:
        narrow = ConfigSpace(SPACE.knobs, [Constraint("x > 8", lambda k: k["x"] > 8)])
        tuner = make_tuner("xgb", narrow, seed=0)
        tuner.transfer([bowl(3, 3), bowl(12, 4)])
        assert all(c["x"] > 8 for c in tuner.ask(8))

    def test_is_cold_if_no_task_has_enough_results(self) -> None:
        cold, warm = (make_tuner("xgb", SPACE, seed=3) for _ in range(2))
        warm.transfer([[(Config(x=9, y=9), 5.0), (Config(x=8, y=9), None)]])
        assert warm.ask(4) == cold.ask(4)

    def test_is_found_sooner_on_a_task_like_the_others(self) -> None:
        def best_after(count: int, warm: bool) -> float:
            found = []
            for seed in range(5):
                tuner = make_tuner("xgb", SPACE, seed=seed)
                if warm:
                    tuner.transfer([bowl(3, 3), bowl(12, 4)])
                configs = tuner.ask(count)
                found.append(min((c["x"] - 11) ** 2 + (c["y"] - 5) ** 2 for c in configs))
            return float(np.mean(found))

        assert best_after(4, warm=True) <= 2.0 < best_after(4, warm=False)
