"""The promises of a ConfigSpace, checked against brute force over itertools.product in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.config import Config
from schedsearch.errors import ConfigError
from schedsearch.space import ConfigSpace, Constraint, Knob, SpaceSize, sampling

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def small_space() -> ConfigSpace:
    return ConfigSpace(
        [
            Knob("bm", (16, 32, 64)),
            Knob("warps", (1, 2, 4, 8)),
            Knob("vector", (True, False)),
            Knob("order", ("row", "column")),
        ],
        [
            Constraint("threads per block <= 128", lambda k: k["threads"] <= 128),
            Constraint("bm is at least 8 per warp", lambda k: k["bm"] >= 8 * k["warps"]),
            Constraint("column order is not vectorised", lambda k: (k["order"] == "row") | ~k["vector"]),
        ],
        derived={"threads": lambda k: 32 * k["warps"], "elements": lambda k: k["bm"] * 64 // k["threads"]},
    )


def small_legal(bm: int, warps: int, vector: bool, order: str) -> bool:
    return 32 * warps <= 128 and bm >= 8 * warps and (order == "row" or not vector)


def brute_force() -> list[Config]:
    product = itertools.product((16, 32, 64), (1, 2, 4, 8), (True, False), ("row", "column"))
    return [Config(bm=a, warps=b, vector=c, order=d) for a, b, c, d in product if small_legal(a, b, c, d)]


def billion_space() -> ConfigSpace:
    """1.29e9 points, of which about 4 in 10 are legal."""
    return ConfigSpace(
        [
            *(Knob(f"t{i}", POWERS) for i in range(8)),
            Knob("flag", (True, False)),
            Knob("order", ("x", "y", "z")),
            Knob("s", (1, 2, 3, 4, 5)),
        ],
        [
            Constraint("threads <= 1024", lambda k: k["threads"] <= 1024),
            Constraint("t3 divides t2", lambda k: k["t2"] % k["t3"] == 0),
            Constraint("shared memory <= 232448 bytes", lambda k: k["shared_bytes"] <= 232448),
        ],
        derived={
            "threads": lambda k: k["t0"] * k["t1"],
            "shared_bytes": lambda k: 2 * k["s"] * (k["t2"] * k["t3"] + k["t4"] * k["t5"]),
        },
    )


def chain(knobs: int, values: int = 10) -> ConfigSpace:
    """Only configurations with equal values are legal: hopeless for rejection, easy if constraints prune early."""

    def equal(i: int) -> Constraint:
        return Constraint(f"k{i} = k{i + 1}", lambda k: k[f"k{i}"] == k[f"k{i + 1}"])

    rules = [equal(i) for i in range(knobs - 1)]
    return ConfigSpace([Knob(f"k{i}", tuple(range(values))) for i in range(knobs)], rules)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestKnob:
    def test_integers_are_ordered_and_bools_and_strings_are_not(self) -> None:
        assert Knob("a", (4, 1, 2)).values == (1, 2, 4)
        assert Knob("a", (1, 2)).ordered
        assert not Knob("a", (False, True)).ordered
        assert not Knob("a", ("x", "y")).ordered

    @pytest.mark.parametrize("values", [(), (1, 1), (1.5,), (None,)])
    def test_rejects_values_that_mean_nothing(self, values: tuple[object, ...]) -> None:
        with pytest.raises(ConfigError, match="'a'"):
            Knob("a", values)  # type: ignore[arg-type]

    def test_true_is_not_one(self) -> None:
        space = ConfigSpace([Knob("a", (0, 1))])
        assert space.check(Config(a=1)) == []
        assert "True" in space.check(Config(a=True))[0]


class TestCheck:
    def test_agrees_with_brute_force(self) -> None:
        space, legal = small_space(), set(brute_force())
        for values in itertools.product((16, 32, 64), (1, 2, 4, 8), (True, False), ("row", "column")):
            config = Config(dict(zip(("bm", "warps", "vector", "order"), values)))
            assert (space.check(config) == []) == (config in legal)

    def test_gives_every_broken_rule_with_what_it_read(self) -> None:
        problems = small_space().check(Config(bm=16, warps=8, vector=True, order="column"))
        assert len(problems) == 3
        assert "threads per block <= 128" in problems[0] and "threads=256" in problems[0]
        assert "bm=16" in problems[1] and "warps=8" in problems[1]

    def test_names_that_a_rule_asks_for_and_the_space_lacks_are_left_out_of_what_it_read(self) -> None:
        rule = Constraint("a times b is at most 2", lambda k: k["a"] * k.get("b", 1) <= 2)
        assert ConfigSpace([Knob("a", (1, 3), "")], [rule]).check({"a": 3}) == [
            "breaks the rule: a times b is at most 2 (got a=3)"
        ]

    def test_a_rule_may_ask_whether_the_space_has_a_name(self) -> None:
        asked: dict[str, bool] = {}

        def rule(k: Mapping[str, object]) -> bool:
            asked.update({name: name in k for name in ("a", "area", "aa")})
            return True

        space = ConfigSpace([Knob("a", (1, 3), "")], [Constraint("any", rule)], derived={"area": lambda k: k["a"] ** 2})
        assert space.check({"a": 3}) == []
        assert asked == {"a": True, "area": True, "aa": False}

    def test_names_what_is_missing_unknown_and_not_allowed(self) -> None:
        problems = " | ".join(small_space().check(Config(bmm=16, warps=3, vector=True, order="row")))
        assert "unknown knob 'bmm'" in problems and "did you mean 'bm'" in problems
        assert "'bm' is missing" in problems
        assert "'warps' is 3" in problems and "1, 2, 4, 8" in problems

    def test_the_legal_ones_among_configurations_are_those_of_brute_force_in_their_order(self) -> None:
        space, legal = small_space(), brute_force()
        foreign = [
            Config(bm=16, warps=3, vector=True, order="row"),
            Config(bm=16, warps=1, vector=1, order="row"),
            Config(bm=16, warps=1, order="row"),
            Config(bm=16, warps=1, vector=True, order="row", bn=8),
            Config(),
        ]
        broken = [Config(bm=64, warps=8, vector=True, order="row")]
        mixed = [*foreign, *legal[:5], *broken, *legal[5:], *foreign]
        rows, at = space.legal_among(mixed)
        assert [mixed[i] for i in at] == legal
        assert space.configs(rows) == legal
        assert [len(found) for found in space.legal_among([])] == [0, 0]

    def test_require_raises_with_the_reasons(self) -> None:
        small_space().require(brute_force()[0])
        with pytest.raises(ConfigError, match="threads per block <= 128"):
            small_space().require(Config(bm=64, warps=8, vector=True, order="row"))


class TestConstruction:
    def test_needs_a_knob_and_unique_names(self) -> None:
        with pytest.raises(ConfigError, match="at least one knob"):
            ConfigSpace([])
        with pytest.raises(ConfigError, match="a"):
            ConfigSpace([Knob("a", (1,)), Knob("a", (2,))])
        with pytest.raises(ConfigError, match="a"):
            ConfigSpace([Knob("a", (1,))], derived={"a": lambda k: 1})

    def test_a_predicate_may_return_one_bool_for_all(self) -> None:
        assert ConfigSpace([Knob("a", (1, 2))], [Constraint("always", lambda k: True)]).size.count == 2
        assert ConfigSpace([Knob("a", (1, 2))], [Constraint("never", lambda k: False)]).size.count == 0

    def test_products_of_knobs_do_not_overflow_32_bits(self) -> None:
        space = ConfigSpace(
            [Knob("a", (1, 2**20)), Knob("b", (1, 2**20))], [Constraint("a*b > 2^33", lambda k: k["a"] * k["b"] > 2**33)]
        )
        assert space.sample(10, rng()) == [Config(a=2**20, b=2**20)]

    def test_an_unknown_name_in_a_predicate_is_an_error_that_names_the_constraint(self) -> None:
        space = ConfigSpace([Knob("warps", (1, 2))], [Constraint("few warps", lambda k: k["wraps"] < 2)])
        with pytest.raises(KeyError, match="did you mean 'warps'") as caught:
            space.legal(np.zeros((1, 1), dtype=np.int32))
        assert "few warps" in caught.value.__notes__[0]

    def test_derived_quantities_read_earlier_ones_only(self) -> None:
        space = ConfigSpace([Knob("a", (1,))], derived={"b": lambda k: k["c"], "c": lambda k: k["a"]})
        with pytest.raises(KeyError, match="earlier"):
            space.encode(np.zeros((1, 1), dtype=np.int32))


class TestRows:
    def test_configs_and_rows_and_keys_are_inverses(self) -> None:
        space = billion_space()
        rows = space.sample_indices(500, rng())
        assert np.array_equal(space.indices(space.configs(rows)), rows)
        assert np.array_equal(space.rows(space.keys(rows)), rows)
        assert space.config(rows[7]) == space.configs(rows)[7]

    def test_keys_are_distinct_where_the_product_exceeds_64_bits(self) -> None:
        space = ConfigSpace([Knob(f"k{i}", tuple(range(10))) for i in range(25)])
        rows = space.sample_indices(300, rng())
        assert len(set(space.keys(rows).tolist())) == 300
        assert np.array_equal(space.rows(space.keys(rows)), rows)

    def test_indices_of_a_foreign_value_raise(self) -> None:
        with pytest.raises(ConfigError, match="'bm' is 17"):
            small_space().indices([Config(bm=17, warps=1, vector=True, order="row")])


class TestSampling:
    def test_exhausting_a_small_space_gives_each_legal_configuration_once(self) -> None:
        sample = small_space().sample(10_000, rng())
        assert len(sample) == len(set(sample))
        assert set(sample) == set(brute_force())

    def test_is_uniform(self) -> None:
        space, legal = small_space(), brute_force()
        generator, counts = rng(), dict.fromkeys(legal, 0)
        for _ in range(2000):
            counts[space.sample(1, generator)[0]] += 1
        expected = 2000 / len(legal)
        chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
        assert chi2 < len(legal) + 5 * math.sqrt(2 * len(legal))

    def test_the_seed_decides(self) -> None:
        assert billion_space().sample(20, rng(1)) == billion_space().sample(20, rng(1))
        assert billion_space().sample(20, rng(1)) != billion_space().sample(20, rng(2))

    def test_leaves_out_excluded_configurations(self) -> None:
        for space in (small_space(), chain(7)):
            every = space.sample_indices(10_000, rng())
            excluded = set(space.keys(every[:5]).tolist())
            rest = space.sample_indices(10_000, rng(), exclude=excluded)
            assert set(space.keys(rest).tolist()) == set(space.keys(every).tolist()) - excluded

    def test_finds_needles_that_rejection_cannot(self) -> None:
        assert set(chain(12).sample(50, rng())) == {Config({f"k{i}": v for i in range(12)}) for v in range(10)}

    def test_samples_by_beam_where_neither_rejection_nor_enumeration_works(self) -> None:
        tail = [Knob(f"free{i}", tuple(range(10))) for i in range(12)]
        head = chain(12)
        space = ConfigSpace([*tail, *head.knobs], head.constraints)
        rows = space.sample_indices(100, rng())
        assert len(np.unique(rows, axis=0)) == 100
        assert all(len({config[f"k{i}"] for i in range(12)}) == 1 for config in space.configs(rows))

    def test_an_empty_space_gives_nothing(self) -> None:
        space = ConfigSpace([Knob("a", (1, 2))], [Constraint("never", lambda k: k["a"] > 2)])
        assert space.sample(3, rng()) == []
        assert space.size == SpaceSize(0, exact=True)
        assert list(space.walk()) == []


class TestSize:
    def test_is_exact_where_it_can_be_counted(self) -> None:
        assert small_space().size == SpaceSize(len(brute_force()), exact=True)
        assert chain(12).size == SpaceSize(10, exact=True)  # 1e12 points, ten of them legal
        assert str(SpaceSize(1234, exact=True)) == "1,234"

    def test_is_estimated_and_says_so_where_it_cannot(self) -> None:
        size = billion_space().size
        # by hand: only the threads bound t0 and t1, the shared memory bounds t2 to t5 and s, and the other knobs are free
        products = [(a * b, a % b == 0) for a in POWERS for b in POWERS]
        threads = sum(product <= 1024 for product, _ in products)
        shared = sum(
            2 * s * (p + q) <= 232448 for p, divides in products if divides for q, _ in products for s in (1, 2, 3, 4, 5)
        )
        expected = threads * shared * 81 * 2 * 3
        assert not size.exact
        assert size.count == pytest.approx(expected, rel=0.03)
        assert str(SpaceSize(1_234_567_890, exact=False)) == "about 1.2e9 (estimated)"

    def test_a_tiny_legal_share_of_a_huge_space_is_estimated_too(self) -> None:
        head = chain(9)
        space = ConfigSpace([*head.knobs, *(Knob(f"free{i}", tuple(range(10))) for i in range(16))], head.constraints)
        assert space.size.count == pytest.approx(1e17, rel=0.3)


class TestWalk:
    def test_visits_every_legal_row_once_in_lexicographic_order(self) -> None:
        space = small_space()
        for chunk in (1, 5, 1000):
            walked = [config for rows in space.walk(chunk) for config in space.configs(rows)]
            assert walked == brute_force()

    def test_is_lazy(self) -> None:
        first = next(billion_space().walk(64))
        assert 0 < len(first) <= 64


class TestNeighbours:
    def test_are_the_legal_single_knob_changes(self) -> None:
        space, legal = small_space(), brute_force()
        for config in legal:
            near = set(space.configs(space.neighbours(space.indices([config])[0])))
            assert near == {other for other in legal if sum(other[name] != config[name] for name in config) == 1}

    def test_of_several_rows_come_one_after_the_other(self) -> None:
        space = small_space()
        rows = space.sample_indices(3, rng())
        assert np.array_equal(space.neighbours(rows), np.concatenate([space.neighbours(row) for row in rows]))
        assert space.neighbours(rows[:0]).shape == (0, len(space.knobs))


class TestRestrict:
    def test_keeps_the_constraints_and_all_knobs(self) -> None:
        space = small_space().restrict({"warps": [4, 2], "order": ["row"]})
        expected = {config for config in brute_force() if config["warps"] in (2, 4) and config["order"] == "row"}
        assert set(space.sample(1000, rng())) == expected

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"warp": [1]}, "unknown knob 'warp'.*did you mean 'warps'"),
            ({"warps": [3]}, "'warps' cannot be 3; allowed are 1, 2, 4, 8"),
            ({"warps": []}, "no value"),
            ({"warps": 8}, r"'warps' must be restricted to a list of values, got 8; give \[8\]"),
            ({"order": "row"}, r"'order' must be restricted to a list of values, got 'row'; give \['row'\]"),
            ({"warps": [8]}, "no legal configuration is left with warps in 8.* break: threads per block <= 128$"),
            (
                {"vector": [True], "order": ["column"]},
                "left with vector in True, order in 'column'; allow more values.* break: column order is not vectorised$",
            ),
            (
                {"warps": [8], "vector": [True], "order": ["column"]},
                "break: threads per block <= 128; column order is not vectorised$",
            ),
        ],
    )
    def test_says_what_is_wrong(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            small_space().restrict(values)


class TestEncode:
    def test_columns_are_as_documented(self) -> None:
        space = small_space()
        assert space.feature_names == ("bm", "warps", "vector", "order=row", "order=column", "threads", "elements")
        features = space.encode(space.indices([Config(bm=64, warps=2, vector=True, order="column")]))
        assert features.dtype == np.float32
        # log2 64, log2 2, 1, one-hot, log2(1 + 64), log2(1 + 64*64/64)
        np.testing.assert_allclose(features[0], [6, 1, 1, 0, 1, math.log2(65), math.log2(65)], rtol=1e-6)

    def test_a_narrow_range_stays_linear_and_a_zero_is_allowed(self) -> None:
        space = ConfigSpace([Knob("stages", (2, 3, 4)), Knob("pad", (0, 1, 8))])
        np.testing.assert_allclose(space.encode(np.array([[1, 0], [2, 2]])), [[3.0, 0.0], [4.0, math.log2(9)]], rtol=1e-6)

    def test_a_value_that_is_not_finite_becomes_nan(self) -> None:
        with np.errstate(divide="ignore"):
            space = ConfigSpace([Knob("a", (0, 1))], derived={"inverse": lambda k: 1 / k["a"]})
            assert np.isnan(space.encode(np.array([[0]]))[0, 1])

    def test_coordinates_are_distances_between_values(self) -> None:
        knobs = [
            Knob("tile", (32, 48, 64, 128)),
            Knob("power", (1, 2, 4, 8)),
            Knob("order", ("x", "y", "z")),
            Knob("flag", (False, True)),
            Knob("fixed", (7,)),
        ]
        space = ConfigSpace(knobs, derived={"area": lambda k: k["tile"] * k["power"]})
        one, other = space.coordinates(np.array([[0, 1, 0, 1, 0], [1, 3, 2, 0, 0]]))
        # log2(tile) from 5 to 7; its alignment from 4 (48) to 6; log2(power) from 0 to 3; three corners; the flag
        np.testing.assert_allclose(one, [0, 0.5, 1 / 3, math.sqrt(0.5), 0, 0, 1], atol=1e-6)
        np.testing.assert_allclose(other, [math.log2(1.5) / 2, 0, 1, 0, 0, math.sqrt(0.5), 0], atol=1e-6)
        assert math.dist(one[3:6], other[3:6]) == pytest.approx(1)
        assert ConfigSpace([Knob("a", (7,))]).coordinates(np.zeros((2, 1), dtype=np.int32)).shape == (2, 0)

    def test_the_width_does_not_depend_on_the_rows(self) -> None:
        space = billion_space()
        assert space.encode(space.sample_indices(0, rng())).shape == (0, len(space.feature_names))
        assert space.encode(space.sample_indices(9, rng())).shape == (9, len(space.feature_names))


RULES: list[Callable[..., object]] = [
    lambda k: k["a"] + k["b"] <= 5,
    lambda k: k["c"] % (1 + k["a"]) == 0,
    lambda k: k["area"] >= 4,
    lambda k: k["b"] != k["c"],
    lambda k: (k["a"] > 1) | (k["d"] > 2),
]


@settings(max_examples=60, deadline=None)
@given(
    cards=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    chosen=st.sets(st.integers(0, len(RULES) - 1)),
    limits=st.sampled_from([(1 << 16, 5_000_000), (1, 5_000_000), (1, 1)]),
)
def test_every_way_of_finding_legal_rows_agrees_with_brute_force(
    cards: list[int], chosen: set[int], limits: tuple[int, int]
) -> None:
    """Listing, rejection that falls back to enumeration, and rejection that falls back to a beam."""
    rules = [RULES[i] for i in sorted(chosen)]
    space = ConfigSpace(
        [Knob(name, tuple(range(card))) for name, card in zip("abcd", cards)],
        [Constraint(f"rule {i}", rule) for i, rule in enumerate(rules)],
        derived={"area": lambda k: k["c"] * k["d"]},
    )
    expected = set()
    for a, b, c, d in itertools.product(*map(range, cards)):
        k = {"a": a, "b": b, "c": c, "d": d, "area": c * d}
        if all(rule(k) for rule in rules):
            expected.add(Config(a=a, b=b, c=c, d=d))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_LISTING_BUDGET", limits[0])
        patch.setattr(sampling, "_ENUMERATION_BUDGET", limits[1])
        patch.setattr(sampling, "_REJECTION_BUDGET", 512)
        sample = space.sample(5000, rng())
        assert len(sample) == len(set(sample))
        assert set(sample) == expected
    product = np.array(list(itertools.product(*map(range, cards))))
    legal = [config in expected for config in space.configs(product)]
    assert space.legal(product).tolist() == legal  # by a look-up, if sampling has listed the legal rows
    judged = ConfigSpace(space.knobs, space.constraints, space.derived)
    assert judged.legal(product).tolist() == legal
    assert ConfigSpace(space.knobs, space.constraints, space.derived).size == SpaceSize(len(expected), exact=True)
