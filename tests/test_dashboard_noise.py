"""Which times are not to be trusted: the dip against its definition, two groups, spread."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from schedsearch.dashboard.noise import dip, doubt_of, modes_of, spread_of

# Repetitions of final races on a CPU that other programs used too. The scheduler took the core away for about 4 ms.
TWO_GROUPS = (
    1164625.0, 5192552.0, 1177134.0, 5189401.5, 5227909.5, 5238485.0, 1190644.0, 7218550.5, 1199972.5, 5227028.0, 2896761.0,
    5199226.5, 1192517.0, 5246687.5, 3172962.5, 5254358.5,
)  # fmt: skip
ONE_GROUP = (
    1135502.0, 1159392.5, 1159147.0, 1140604.0, 1151721.0, 1138471.0, 1150839.5, 1158326.0, 1128962.0, 1147064.5, 1136423.5,
    1150925.0, 1157174.0, 1146478.0, 1144725.5, 1140950.0,
)  # fmt: skip
OUTLIERS = (*ONE_GROUP[:15], 9_000_000.0)


def dip_by_excess_mass(ranked: list[float]) -> float:
    """Half the largest gain of a second interval: for some density, how much more mass than this density two disjoint
    intervals hold than one.

    D. W. Müller and G. Sawitzki, "Excess mass estimates and tests for multimodality", J. of the American Statistical
    Association 86 (1991) 738: it is twice the dip. The gain is convex in the density between the densities at which the
    best single interval changes, so its maximum is at one of these.
    """
    n = len(ranked)
    spans = [(i, j) for i in range(n) for j in range(i, n)]
    masses = np.array([(j - i + 1) / n for i, j in spans])
    lengths = np.array([ranked[j] - ranked[i] for i, j in spans])
    disjoint = [(a, b) for (a, (_, j)), (b, (k, _)) in itertools.product(enumerate(spans), repeat=2) if j < k]
    first, second = np.array(disjoint).T
    gain = 0.0
    for a, b in itertools.combinations(range(len(spans)), 2):
        if lengths[a] != lengths[b] and (density := (masses[a] - masses[b]) / (lengths[a] - lengths[b])) > 0:
            excess = masses - density * lengths
            gain = max(gain, float((excess[first] + excess[second]).max() - excess.max()))
    return gain / 2


@pytest.mark.parametrize("seed", range(6))
def test_the_dip_is_half_the_excess_mass_of_a_second_interval(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 5 + seed % 4
    values = rng.random(n) if seed % 2 else np.concatenate([rng.normal(0, 1, n // 2), rng.normal(8, 1, n - n // 2)])
    ranked = sorted(values.tolist())
    assert dip(np.array(ranked)) == pytest.approx(dip_by_excess_mass(ranked))


def test_the_dip_of_equal_values_is_the_least() -> None:
    assert dip(np.full(8, 3.0)) == 1 / 16


def test_two_groups_are_found_with_their_medians_and_shares() -> None:
    low, high = modes_of(TWO_GROUPS) or pytest.fail("two groups")
    fast = [time_ns for time_ns in TWO_GROUPS if time_ns < 4e6]
    slow = [time_ns for time_ns in TWO_GROUPS if time_ns > 4e6]
    assert (low.time_ns, high.time_ns) == (statistics.median(fast), statistics.median(slow))
    assert (low.share, high.share) == (len(fast) / 16, len(slow) / 16)
    assert doubt_of(TWO_GROUPS) == "bimodal"


def test_groups_do_not_depend_on_the_order_or_the_unit() -> None:
    assert modes_of(sorted(TWO_GROUPS)) == modes_of(TWO_GROUPS)
    shares = [[mode.share for mode in modes_of(times) or ()] for times in (TWO_GROUPS, [1e-6 * each for each in TWO_GROUPS])]
    assert shares[0] == shares[1]


@pytest.mark.parametrize("times", [ONE_GROUP, OUTLIERS, (5.0,) * 16, (), (1.0,), TWO_GROUPS[:7]])
def test_one_group_outliers_equal_times_and_few_repetitions_are_not_two_groups(times: tuple[float, ...]) -> None:
    assert modes_of(times) is None


def test_two_ticks_of_a_clock_are_one_time() -> None:
    assert modes_of([1000.0, 1032.0] * 8) is None
    assert doubt_of((1000.0, 1032.0) * 8) == ""


def test_of_samples_with_one_mode_at_most_two_in_a_hundred_are_called_two_groups() -> None:
    rng = np.random.default_rng(0)
    for draw in (rng.random, rng.standard_exponential):  # the uniform distribution is the hardest one to tell
        called = sum(modes_of((1 + draw(16)).tolist()) is not None for _ in range(500))
        assert called <= 10


def test_two_groups_far_apart_are_nearly_always_found() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        slow = rng.permutation([False] * 8 + [True] * 8)
        found += modes_of((rng.lognormal(0, 0.03, 16) * np.where(slow, 4.0, 1.0)).tolist()) is not None
    assert found > 190


def test_the_spread_is_that_of_a_measurement() -> None:
    low, middle, high = statistics.quantiles(TWO_GROUPS, n=4)
    assert spread_of(TWO_GROUPS) == pytest.approx((high - low) / middle, abs=1e-5)
    assert spread_of(TWO_GROUPS[:3]) is None


def test_a_wide_spread_without_groups_is_noise() -> None:
    times = (100.0, 104, 109, 115, 121, 128, 135, 143, 151, 160, 170, 180)
    assert modes_of(times) is None
    assert doubt_of(times) == "noisy"
    assert doubt_of(tuple(100 + each / 20 for each in times)) == ""
