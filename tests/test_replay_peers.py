"""The comparison with Kernel Tuner's strategies counts both sides alike. Skipped if kernel_tuner is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import replay_support as support

from schedsearch.integrations.kernel_tuner import Strategy
from schedsearch.replay import RecordedSpace, Run, differences, load, run

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("replay_peers")


@pytest.fixture
def kernel_tuner(peers: ModuleType, kernel_tuner_package: ModuleType) -> ModuleType:
    return peers


@pytest.fixture
def space(tmp_path: Path) -> RecordedSpace:
    return load([support.write(tmp_path / "some.json.gz", support.cache())]).spaces[0]


class TestDifferences:
    def test_by_hand(self, space: RecordedSpace) -> None:
        """Two seeds, budgets 1 and 2. Ours is better by .2 with one seed and by .4 with the other."""
        ours = [[Run(np.array([0.5, 0.8]), 8, 0.0), Run(np.array([0.9, 1.0]), 8, 0.0)]]
        theirs = [[Run(np.array([0.3, 0.8]), 8, 0.0), Run(np.array([0.5, 1.0]), 8, 0.0)]]
        one, geomean = differences([space], ours, theirs, [1, 2])
        assert one.of == f"{space.file}: {space.name}" and geomean.of == "geometric mean"
        assert one.mean == {1: pytest.approx(0.3), 2: 0.0}
        # The bootstrap draws a pair of the two seeds. If it did not keep seeds together, the interval would be 0.0 to 0.6.
        assert (one.low[1], one.high[1]) == pytest.approx((0.2, 0.4))
        assert (geomean.mean, geomean.low) == (pytest.approx(one.mean), pytest.approx(one.low)), "of one space"


class TestCounting:
    def test_a_cache_has_the_data_of_the_recording(self, peers: ModuleType, space: RecordedSpace, tmp_path: Path) -> None:
        again = load([peers.write_cache(space, tmp_path / "cache.json")]).spaces[0]
        assert again.fingerprint() == space.fingerprint()

    def test_our_own_tuner_in_their_harness_makes_the_run_of_replay(
        self, kernel_tuner: ModuleType, space: RecordedSpace, tmp_path: Path
    ) -> None:
        cache = kernel_tuner.write_cache(space, tmp_path / "cache.json")
        theirs = kernel_tuner.run_strategy(cache, Strategy("xgb", seed=3), 3, 12)
        assert theirs.fractions == pytest.approx(run(space, "xgb", 3, 12).fractions)

    @pytest.mark.parametrize("strategy", ["genetic_algorithm", "adaptive_tabu_greywolf", "random_sample"])
    def test_a_run_depends_on_its_seed_alone(
        self, kernel_tuner: ModuleType, space: RecordedSpace, tmp_path: Path, strategy: str
    ) -> None:
        cache = kernel_tuner.write_cache(space, tmp_path / "cache.json")
        runs = [kernel_tuner.run_strategy(cache, strategy, seed, 10) for seed in (0, 1, 2, 0)]
        assert runs[0].fractions.tolist() == runs[3].fractions.tolist()
        assert len({tuple(each.fractions) for each in runs}) > 1
        for each in runs:
            assert each.proposals <= 10 and len(each.fractions) == 10
            assert (np.diff(each.fractions) >= 0).all() and each.fractions[-1] <= 1.0

    def test_failures_cost_an_evaluation_and_find_nothing(self, kernel_tuner: ModuleType, tmp_path: Path) -> None:
        """All configurations except one fail. A random search finds it with the i-th evaluation, and nothing before."""
        data = support.cache()
        for fields in list(data["cache"].values())[1:]:
            fields |= {"time": "RuntimeFailedConfig"}
            fields.pop("times", None)
        cache = support.write(tmp_path / "one.json", data)
        path = kernel_tuner.write_cache(load([cache]).spaces[0], tmp_path / "cache.json")
        found = [kernel_tuner.run_strategy(path, "random_sample", seed, 18) for seed in range(12)]
        assert all(set(each.fractions) <= {0.0, 1.0} and each.fractions[-1] == 1.0 for each in found)
        assert {each.proposals for each in found} == {18}
        assert len({int((each.fractions == 0).sum()) for each in found}) > 3, "the one is met sooner or later"


def test_the_data_have_one_report_a_tuner_in_the_form_of_replay(kernel_tuner: ModuleType, space: RecordedSpace) -> None:
    data = json.loads(json.dumps(kernel_tuner.compare([space], "ga", ["random_sample"], [5, 10], seeds=2, jobs=2)))
    assert [each["tuner"] for each in data["reports"]] == ["ga", "Kernel Tuner random_sample"]
    for each in data["reports"]:
        assert set(each["geomean"]) == {"5", "10"} and each["spaces"][0]["fractions"] == each["geomean"]
    ours, theirs = (each["geomean"]["10"] for each in data["reports"])
    assert data["differences"]["random_sample"][-1]["mean"]["10"] == pytest.approx(ours - theirs)
