"""What the dashboard says about knobs, failures and models, against brute force, SciPy and known answers."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from schedsearch.dashboard import effects
from schedsearch.dashboard.effects import Searched
from schedsearch.dashboard.noise import spread_of
from schedsearch.dashboard.views.task import Knobs, PairEffect
from schedsearch.measurement import Measurement, Outcome


def searched(rows: list[tuple[tuple[int, ...], float | Outcome]], messages: list[str] | None = None) -> Searched:
    """Trials of two knobs, a with values 0, 1, 2 and b with x, y; a number is a time in ns."""
    return Searched(
        Knobs("t", ("a", "b"), ((0, 1, 2), ("x", "y"))),
        np.array([codes for codes, _ in rows], dtype=np.int32),
        np.array([np.nan if isinstance(result, Outcome) else result for _, result in rows]),
        np.array([str(result if isinstance(result, Outcome) else Outcome.OK) for _, result in rows]),
        np.arange(1, len(rows) + 1, dtype=np.int64),
        messages or [""] * len(rows),
    )


class TestImportance:
    def test_a_knob_that_decides_everything_has_one_and_another_nothing(self) -> None:
        rows = [((a, b), 100.0 * 2**a) for a, b in itertools.product(range(3), range(2)) for _ in range(10)]
        found = {effect.knob: effect for effect in effects.knob_effects(searched(rows))}
        assert found["a"].importance == pytest.approx(1.0)
        assert found["b"].importance == 0.0
        assert [effect.knob for effect in effects.knob_effects(searched(rows))] == ["a", "b"]

    def test_a_knob_that_does_nothing_is_near_zero_on_average(self) -> None:
        """The plain correlation ratio would be about 0.19 here: 4 of 21 degrees of freedom."""
        rng = np.random.default_rng(0)
        groups = np.repeat(np.arange(5, dtype=np.int32), 4)
        found = [effects.epsilon_squared(groups, rng.normal(size=20)) for _ in range(300)]
        assert statistics.mean(value for value in found if value is not None) < 0.08

    def test_it_is_the_adjusted_share_of_variance_of_a_regression_on_groups(self) -> None:
        rng = np.random.default_rng(1)
        groups = rng.integers(0, 3, 30).astype(np.int32)
        values = groups + rng.normal(size=30)
        dummies = (groups[:, None] == np.arange(3)).astype(float)
        residual = values - dummies @ np.linalg.lstsq(dummies, values, rcond=None)[0]
        adjusted = 1 - (residual @ residual / 27) / values.var(ddof=1)
        assert effects.epsilon_squared(groups, values) == pytest.approx(adjusted)

    @pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0, 2.0]])
    def test_it_is_unknown_where_nothing_varies(self, values: list[float]) -> None:
        assert effects.epsilon_squared(np.zeros(len(values), dtype=np.int32), np.array(values)) is None

    def test_values_count_trials_failures_and_rejects_apart(self) -> None:
        rows: list[tuple[tuple[int, ...], float | Outcome]] = [
            ((0, 0), 10.0), ((0, 0), 30.0), ((0, 1), Outcome.LAUNCH_ERROR), ((0, 1), Outcome.REJECTED), ((2, 1), 7.0),
        ]  # fmt: skip
        value = next(each for each in effects.knob_effects(searched(rows)) if each.knob == "a").values[0]
        assert (value.value, value.trials, value.failures, value.rejected) == (0, 3, 1, 1)
        assert value.quantiles_ns == (10.0, 15.0, 20.0, 25.0, 30.0)


class TestPairs:
    def test_they_are_all_pairs_that_differ_in_one_knob(self) -> None:
        rng = np.random.default_rng(2)
        rows = [((int(a), int(b)), float(rng.uniform(50, 150))) for a, b in rng.integers(0, (3, 2), (40, 2))]
        fastest: dict[tuple[int, ...], float] = {}
        for codes, time_ns in rows:
            fastest[codes] = min(time_ns, fastest.get(codes, np.inf))
        wanted: dict[tuple[str, object, object], list[float]] = {}
        names = (("a", (0, 1, 2)), ("b", ("x", "y")))
        for (one, one_ns), (other, other_ns) in itertools.permutations(fastest.items(), 2):
            differing = [i for i in range(2) if one[i] != other[i]]
            if len(differing) == 1 and one < other:
                name, values = names[differing[0]]
                key = name, values[one[differing[0]]], values[other[differing[0]]]
                wanted.setdefault(key, []).append(other_ns / one_ns)
        found = effects.pair_effects(searched(list(rows)))
        assert {(pair.knob, pair.of, pair.to): pair.pairs for pair in found} == {key: len(v) for key, v in wanted.items()}
        for pair in found:
            logs = np.log(wanted[pair.knob, pair.of, pair.to])
            assert (pair.low, pair.ratio, pair.high) == pytest.approx(tuple(np.exp(np.quantile(logs, (0.25, 0.5, 0.75)))))

    def test_failures_make_no_pairs(self) -> None:
        assert effects.pair_effects(searched([((0, 0), 5.0), ((1, 0), Outcome.WRONG_ANSWER)])) == []
        assert effects.pair_effects(searched([((0, 0), Outcome.WRONG_ANSWER)])) == []

    def test_a_pair_is_worth_the_inverse_in_the_other_direction(self) -> None:
        pairs = [PairEffect("t", "a", 0, 1, 4, 2.0, 1.6, 2.5)]
        assert effects.worth(pairs, "t", "a", 0, 1) == pairs[0]
        assert effects.worth(pairs, "t", "a", 1, 0) == PairEffect("t", "a", 1, 0, 4, 0.5, 0.4, 0.625)
        assert effects.worth(pairs, "t", "a", False, True) is None  # 0 and False are different values
        assert effects.worth(pairs, "other", "a", 0, 1) is None


class TestFailures:
    def test_messages_that_differ_in_numbers_are_one_group_with_what_it_shares(self) -> None:
        rows: list[tuple[tuple[int, ...], float | Outcome]] = [((2, i % 2), Outcome.COMPILE_ERROR) for i in range(5)]
        rows += [((i % 2, i % 2), 10.0) for i in range(20)]
        messages = [f"line {i}: too many registers at 0x{i:04x}f" for i in range(5)] + [""] * 20
        (group,) = effects.failure_groups(searched(rows, messages))
        assert (group.outcome, group.stage, group.count) == ("compile_error", "build", 5)
        assert group.reason == "line #: too many registers at #"
        assert group.message == messages[0]
        assert group.ids == (1, 2, 3, 4, 5)
        assert [(each.knob, each.value, each.share_in_group, each.share_elsewhere) for each in group.shared] == [
            ("a", 2, 1.0, 0.0)
        ]

    def test_where_everything_failed_nothing_is_said_about_what_failures_share(self) -> None:
        (group,) = effects.failure_groups(searched([((0, 0), Outcome.RUN_TIMEOUT)] * 4))
        assert (group.reason, group.stage, group.shared) == ("no message", "run", ())

    def test_every_failure_has_a_stage(self) -> None:
        assert set(effects.STAGES) == set(Outcome) - {Outcome.OK}


class TestModels:
    def test_rank_correlations_are_those_of_scipy_with_ties(self) -> None:
        from scipy import stats

        rng = np.random.default_rng(3)
        groups = rng.integers(0, 6, 200)
        first, second = rng.integers(0, 8, 200).astype(float), rng.integers(0, 8, 200).astype(float)
        found = effects.rank_correlations(groups, first, second)
        for group, (count, correlation) in enumerate(found):
            mine = groups == group
            assert count == mine.sum()
            assert correlation == pytest.approx(stats.spearmanr(first[mine], second[mine]).statistic)

    def test_a_single_trial_or_equal_predictions_have_none(self) -> None:
        found = effects.rank_correlations(np.array([0, 1, 1]), np.array([1.0, 5.0, 5.0]), np.array([1.0, 2.0, 3.0]))
        assert found == [(1, None), (2, None)]


@pytest.mark.parametrize("count", [4, 5, 7, 16])
def test_spread_is_that_of_a_measurement(count: int) -> None:
    times = tuple(np.random.default_rng(count).uniform(90, 110, count).tolist())
    assert spread_of(times) == pytest.approx(Measurement(Outcome.OK, times_ns=times).spread, abs=1e-5)
    assert spread_of(times[:3]) is None
