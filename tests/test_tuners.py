"""Every tuner keeps the contract; further tests check the particular behaviour of each."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.space import ConfigSpace, Constraint, Knob, Rows
from schedsearch.testing.tuner_contract import TunerContract, billion_space, drive, outcome, small_space
from schedsearch.tuner import TUNERS, make_tuner
from schedsearch.tuner.annealing import HOT, AnnealingTuner, Walker
from schedsearch.tuner.base import Tuner
from schedsearch.tuner.model import XgbCostModel, relevance
from schedsearch.tuner.moves import crossover, mutate


class TestRandom(TunerContract):
    name = "random"


class TestGrid(TunerContract):
    name = "grid"

    def test_goes_in_lexicographic_order(self) -> None:
        asked = self.make(small_space()).ask(6)
        assert [(c["a"], c["b"], c["c"], c["d"]) for c in asked[:3]] == [
            (0, 0, "p", True),
            (0, 0, "p", False),
            (0, 0, "q", True),
        ]


def best_ns(name: str, seed: int, trials: int) -> float:
    return min(outcome(config) or float("inf") for config in drive(make_tuner(name, billion_space(), seed=seed), trials))


class SearchContract(TunerContract):
    """The expectations of a tuner that learns."""

    trials = 150

    def test_beats_random_search_given_the_same_trials(self) -> None:
        learnt = statistics.median(best_ns(self.name, seed, self.trials) for seed in range(3))
        random = statistics.median(best_ns("random", seed, self.trials) for seed in range(3))
        assert learnt - 1000 < 0.6 * (random - 1000), "1000 is the optimum"

    def test_makes_use_of_results_it_never_asked_for(self) -> None:
        space = billion_space()
        known = [(config, outcome(config)) for config in space.sample(200, np.random.default_rng(0))]
        warm = make_tuner(self.name, space, seed=0)
        warm.tell(known)
        proposals = [outcome(config) for config in warm.ask(32)]
        median = statistics.median(time for _, time in known if time)
        assert statistics.median(time for time in proposals if time) < median


class TestGa(SearchContract):
    name = "ga"


class TestAnnealing(SearchContract):
    name = "annealing"

    def test_it_cools_down(self) -> None:
        tuner = AnnealingTuner(billion_space(), seed=0)
        hot = tuner.temperature
        drive(tuner, 40)
        assert 0 < tuner.temperature < 0.5 * hot

    def test_a_slower_step_is_accepted_by_the_chance_of_metropolis(self) -> None:
        """exp(-slower / temperature), counted over many walkers."""
        tuner = AnnealingTuner(billion_space(), seed=0)
        row = tuner.space.sample_indices(1, np.random.default_rng(0))[0]
        accepted = 0
        for _ in range(4000):
            walker = Walker(row, log_time=1.0, best=1.0)
            tuner._move(walker, row, 1.3)
            accepted += walker.log_time == 1.3
        assert accepted / 4000 == pytest.approx(math.exp(-0.3 / HOT), abs=0.03)
        failed = Walker(row, log_time=1.0, best=1.0)
        tuner._move(failed, row, math.inf)
        assert failed.log_time == 1.0


class TestXgb(SearchContract):
    name = "xgb"
    trials = 100

    def test_scores_order_configurations_by_speed(self) -> None:
        space = billion_space()
        tuner = self.make(space)
        assert tuner.predict(space.sample(3, np.random.default_rng(0))) is None, "nothing is learnt yet"
        tuner.tell([(config, outcome(config)) for config in space.sample(200, np.random.default_rng(2))])
        tuner.ask(8)
        fresh = [config for config in space.sample(300, np.random.default_rng(1)) if outcome(config)]
        scores = tuner.predict(fresh)
        assert scores is not None
        speed = np.array([-(outcome(config) or 0) for config in fresh])
        better = speed[:, None] > speed[None, :]
        assert (scores[:, None] > scores[None, :])[better].mean() > 0.7

    def test_results_that_a_task_led_to_are_ignored_once_the_task_is_not_believed(self) -> None:
        """From then on it proposes the same as without that task, except for configurations that are already measured."""
        space = ConfigSpace([Knob("a", tuple(range(1, 33))), Knob("b", tuple(range(1, 33)))])
        liar = [(config, 1e6 / (config["a"] + 3 * config["b"])) for config in space.sample(200, np.random.default_rng(0))]
        hint = min(liar, key=lambda result: result[1])[0]
        measured = [(config, float(config["a"] + 3 * config["b"])) for config in space.sample(12, np.random.default_rng(1))]

        def proposals(told: Sequence[tuple[Config, float]], tasks: Sequence[Any]) -> list[Config]:
            tuner = make_tuner("xgb", space, seed=0, hints=[hint])
            tuner.transfer(tasks)
            assert tuner.ask(1) == [hint]
            tuner.ask(4)  # the space-filling design
            tuner.tell(told)
            return tuner.ask(2)

        slow = float(hint["a"] + 3 * hint["b"])
        led = [*measured, (hint, slow)]
        assert proposals(led, [liar]) == proposals([*measured, (hint, slow / 1000)], [liar]), "the hint's time is ignored"
        assert proposals(led, []) != proposals([*measured, (hint, slow / 1000)], []), "where nobody is doubted it counts"

    def test_batches_grow_slowly(self) -> None:
        space = billion_space()
        tuner = self.make(space)
        assert tuner.batch == 2
        tuner.tell([(config, outcome(config)) for config in space.sample(1000, np.random.default_rng(0))])
        assert tuner.batch == 8


class TestCostModel:
    def data(self, n: int = 200) -> tuple[Any, Any]:
        X = np.random.default_rng(0).random((n, 6)).astype(np.float32)
        return X, (3 * X[:, 0] - 2 * X[:, 1] * X[:, 2]).astype(np.float64)

    def test_ranks_unseen_configurations(self) -> None:
        X, y = self.data()
        model = XgbCostModel(seed=0)
        assert model.fit(X, y)
        fresh = np.random.default_rng(1).random((200, 6)).astype(np.float32)
        truth = 3 * fresh[:, 0] - 2 * fresh[:, 1] * fresh[:, 2]
        assert np.corrcoef(model.predict(fresh), truth)[0, 1] > 0.85

    def test_learns_that_failures_are_worst(self) -> None:
        X, y = self.data()
        y[X[:, 3] > 0.5] = np.nan
        model = XgbCostModel(seed=0)
        assert model.fit(X, y)
        scores = model.predict(X)
        assert scores[X[:, 3] > 0.6].mean() < scores[X[:, 3] < 0.4].min()

    @pytest.mark.parametrize("y", [np.full(50, np.nan), np.r_[np.arange(3.0), np.full(47, np.nan)]])
    def test_says_when_there_is_too_little_to_learn_from(self, y: Any) -> None:
        assert not XgbCostModel(seed=0).fit(self.data(50)[0], y)

    def test_labels_are_ranks_and_zero_for_failures(self) -> None:
        assert relevance(np.array([5.0, 1.0, np.nan, 3.0])).tolist() == [31, 1, 0, 16]
        assert relevance(np.array([7.0, 7.0, np.nan])).tolist() == [1, 1, 0]


class TestMoves:
    def test_mutation_changes_at_least_one_knob_to_another_value(self) -> None:
        space = billion_space()
        rows = space.sample_indices(500, np.random.default_rng(0))
        moved = mutate(rows, space, np.random.default_rng(1))
        changes = (moved != rows).sum(axis=1)
        assert changes.min() == 1
        assert 1.2 < changes.mean() < 1.8
        assert (moved >= 0).all()
        assert (moved < [len(knob.values) for knob in space.knobs]).all()

    def test_knobs_of_one_value_stay(self) -> None:
        space = ConfigSpace([Knob("a", (7,)), Knob("b", (True, False))])
        moved = mutate(np.zeros((20, 2), dtype=np.int32), space, np.random.default_rng(0))
        assert moved.tolist() == [[0, 1]] * 20
        fixed = ConfigSpace([Knob("a", (7,))])
        assert mutate(np.zeros((3, 1), dtype=np.int32), fixed, np.random.default_rng(0)).tolist() == [[0]] * 3

    def test_crossover_takes_every_knob_from_a_parent(self) -> None:
        one, other = np.zeros((50, 8), dtype=np.int32), np.ones((50, 8), dtype=np.int32)
        children = crossover(one, other, np.random.default_rng(0))
        assert 0.3 < children.mean() < 0.7


class TestBookkeeping:
    def test_a_tuner_that_breaks_the_contract_is_caught(self) -> None:
        class Stubborn(Tuner):
            def _propose(self, n: int) -> Rows:
                return np.zeros((1, 4), dtype=np.int32)

        class Careless(Tuner):
            def _propose(self, n: int) -> Rows:
                return np.array([[0, 1, 0, 0]], dtype=np.int32)

        tuner = Stubborn(small_space(), seed=0)
        assert len(tuner.ask(1)) == 1
        with pytest.raises(AssertionError, match="second time"):
            tuner.ask(1)
        with pytest.raises(AssertionError, match=r"illegal.*a \+ b is even"):
            Careless(small_space(), seed=0).ask(1)

    def test_unknown_names_are_answered_with_the_known_ones(self) -> None:
        with pytest.raises(
            UsageError, match=r"unknown tuner 'gaa' \(did you mean 'ga'\?\); allowed: xgb, ga, annealing, random, grid"
        ):
            make_tuner("gaa", small_space(), seed=0)

    def test_every_tuner_of_the_table_is_tested_here(self) -> None:
        assert set(TUNERS) == {cls.name for cls in (TestRandom, TestGrid, TestGa, TestAnnealing, TestXgb)}


def recorded(path: Path) -> tuple[ConfigSpace, dict[Config, float | None]]:
    """A space that others measured completely (Kernel Tuner's cache format). Unrecorded configurations are illegal."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    names = [name for name in data["tune_params_keys"] if len(data["tune_params"][name]) > 1]
    times = {
        Config({name: entry[name] for name in names}): None if isinstance(entry["time"], str) else entry["time"] * 1e6
        for entry in data["cache"].values()
    }
    knobs = [Knob(name, tuple(data["tune_params"][name])) for name in names]
    plain = ConfigSpace(knobs)
    keys = np.sort(plain.keys(plain.indices(times)))

    def is_recorded(k: Any) -> Any:
        rows = np.stack([np.searchsorted(np.array(knob.values), k[knob.name]) for knob in knobs], axis=1)
        found = np.searchsorted(keys, plain.keys(rows))
        return keys[np.minimum(found, len(keys) - 1)] == plain.keys(rows)

    return ConfigSpace(knobs, [Constraint("the configuration was recorded", is_recorded)]), times


def test_a_loaded_tuner_imports_nothing_between_trials() -> None:
    code = """
import sys
from schedsearch.space import ConfigSpace, Knob
from schedsearch.tuner import load_tuner, make_tuner
assert "xgboost" not in sys.modules
load_tuner("xgb")
known = set(sys.modules)
tuner = make_tuner("xgb", ConfigSpace([Knob("a", tuple(range(40))), Knob("b", tuple(range(40)))]), seed=0)
for _ in range(30):
    tuner.tell([(config, 1.0 + config["a"] * config["b"]) for config in tuner.ask(tuner.batch)])
print(sorted(name for name in set(sys.modules) - known if name.startswith(("xgboost", "scipy", "schedsearch"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["gemm_RTX_3090", "convolution_MI250X"])
def test_model_guided_search_on_a_measured_space(shared: Path, name: str) -> None:
    """Fraction of the optimum after 100 trials, geometric mean of 4 seeds: above random search."""
    space, times = recorded(shared / "replay" / f"{name}.json.gz")
    optimum = min(time for time in times.values() if time is not None)

    def fraction(tuner_name: str, seed: int) -> float:
        tuner = make_tuner(tuner_name, space, seed=seed)
        best = float("inf")
        for _ in range(100 // 8 + 1):
            results = [(config, times[config]) for config in tuner.ask(8)]
            best = min([best, *(time for _, time in results if time is not None)])
            tuner.tell(results)
        return optimum / best

    learnt = statistics.geometric_mean(fraction("xgb", seed) for seed in range(4))
    random = statistics.geometric_mean(fraction("random", seed) for seed in range(4))
    assert learnt > random + 0.05
