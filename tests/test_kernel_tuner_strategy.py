"""Our tuners inside Kernel Tuner, in its simulation mode. `make test-integrations` installs it."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_support as support
from records_support import record

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.integrations.kernel_tuner import Strategy
from schedsearch.measurement import Outcome
from schedsearch.records.formats.exchange import export_file
from schedsearch.records.store import Store
from schedsearch.replay import load, run

Simulate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def simulate(kernel_tuner_package: Any) -> Simulate:
    """Runs Kernel Tuner over a recorded cache, with the restrictions of its recording."""

    def simulate(
        cache: Path, strategy: Strategy, evaluations: int, *restrictions: str, **options: Any
    ) -> list[dict[str, Any]]:
        data = json.loads(cache.read_text())
        results, _ = kernel_tuner_package.tune_kernel(
            data["kernel_name"],
            f"void {data['kernel_name']}() {{}}",
            data["problem_size"],
            [],
            data["tune_params"],
            restrictions=list(restrictions),
            cache=str(cache),
            simulation_mode=True,
            strategy=strategy,
            lang="C",
            quiet=True,
            block_size_names=list(data["tune_params"])[:1],
            **{"strategy_options": {"max_fevals": evaluations}, **options},
        )
        return list(results)

    return simulate


def best_so_far(results: list[dict[str, Any]], optimum: float) -> list[float]:
    best, out = float("inf"), []
    for result in results:
        if "__error__" not in result and not isinstance(result["time"], str):
            best = min(best, result["time"])
        out.append(optimum / best)
    return out


@pytest.mark.parametrize("tuner", ["xgb", "ga", "random"])
def test_a_search_in_kernel_tuner_is_the_search_of_our_replay(simulate: Simulate, tmp_path: Path, tuner: str) -> None:
    path = support.write(tmp_path / "some.json", support.cache())
    results = simulate(path, Strategy(tuner, seed=3), 12, "bx * unroll != 64")
    assert len(results) == 12
    keys = {(result["bx"], result["unroll"], result["order"]) for result in results}
    assert len(keys) == 12 and all(support.allowed(bx, unroll) for bx, unroll, _ in keys)
    assert best_so_far(results, 1.0) == pytest.approx(run(load([path]).spaces[0], tuner, 3, 12).fractions.tolist())


def test_the_whole_space_ends_the_search(simulate: Simulate, tmp_path: Path) -> None:
    path = support.write(tmp_path / "some.json", support.cache())
    assert len(simulate(path, Strategy("ga"), 99, "bx * unroll != 64")) == 18


def test_a_mistyped_budget_is_refused_rather_than_the_whole_space_searched(simulate: Simulate, tmp_path: Path) -> None:
    path = support.write(tmp_path / "some.json", support.cache())
    with pytest.raises(UsageError, match=r"unknown option 'max_feval' in strategy_options .did you mean 'max_fevals'"):
        simulate(path, Strategy("ga"), 9, "bx * unroll != 64", strategy_options={"max_feval": 9})


@pytest.mark.parametrize("seed", [-1, "0", 0.5])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(UsageError, match="seed must be an integer of at least 0, got"):
        Strategy("ga", seed)


def with_rates(folder: Path) -> Path:
    data = support.cache()
    for fields in data["cache"].values():
        if not isinstance(fields["time"], str):
            fields["GFLOP/s"] = 100 / fields["time"]
    return support.write(folder / "rates.json", data)


@pytest.mark.parametrize("tuner", ["xgb", "ga"])
def test_maximising_a_rate_is_minimising_its_time(simulate: Simulate, tmp_path: Path, tuner: str) -> None:
    path, rate = with_rates(tmp_path), {"objective": "GFLOP/s", "objective_higher_is_better": True}
    by_rate = simulate(path, Strategy(tuner), 15, "bx * unroll != 64", **rate)
    by_time = simulate(path, Strategy(tuner), 15, "bx * unroll != 64")
    assert [[result[name] for name in support.PARAMS] for result in by_rate] == [
        [result[name] for name in support.PARAMS] for result in by_time
    ]


def test_several_objectives_at_once_are_a_mistake(simulate: Simulate, tmp_path: Path) -> None:
    both = {"objective": ["time", "GFLOP/s"], "objective_higher_is_better": [False, True]}
    with pytest.raises(UsageError, match=r"objective is \['time', 'GFLOP/s'\]; our tuners search for one"):
        simulate(with_rates(tmp_path), Strategy("ga"), 5, "bx * unroll != 64", **both)


def test_a_recorded_space(simulate: Simulate, tmp_path: Path, shared: Path) -> None:
    path = tmp_path / "pnpoly.json"
    path.write_bytes(gzip.decompress((shared / "replay" / "pnpoly_RTX_3090.json.gz").read_bytes()))
    space = load([path]).spaces[0]
    results = simulate(path, Strategy("xgb", seed=0), 60)
    assert best_so_far(results, space.best_ns / 1e6) == pytest.approx(run(space, "xgb", 0, 60).fractions.tolist())


def test_an_unknown_tuner_is_a_mistake_at_once() -> None:
    with pytest.raises(UsageError, match="did you mean 'xgb'"):
        Strategy("xbg")


def test_kernel_tuner_searches_a_cache_that_we_exported(simulate: Simulate, tmp_path: Path) -> None:
    with Store.open(tmp_path / "records.db") as store:
        for i, (bx, unroll) in enumerate(itertools.product((16, 32, 64), (1, 2, 4))):
            outcome = Outcome.WRONG_ANSWER if bx == 64 else Outcome.OK
            store.append(record(1000.0 + i, outcome, number=i, config=Config(bx=bx, unroll=unroll)))
        export_file(store, tmp_path / "some.json", "kernel-tuner")
    results = simulate(tmp_path / "some.json", Strategy("random"), 9)
    assert sorted(r["time"] for r in results if "__error__" not in r) == pytest.approx([1e-3 + i * 1e-6 for i in range(6)])
    assert sum(str(r.get("__error__")) == "RuntimeFailedConfig" for r in results) == 3
