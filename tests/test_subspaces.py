"""Several configuration spaces as one: which values are legal, and what is derived, follows from the choice."""

from __future__ import annotations

import doctest

import numpy as np

from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.templates.parts import subspaces
from schedsearch.templates.parts.subspaces import one_of

LIMIT = "size is at most 40"


def small() -> ConfigSpace:
    return ConfigSpace(
        (Knob("tile", (1, 2, 4), "a"), Knob("unroll", (1, 3), "b")),
        (Constraint(LIMIT, lambda q: q["size"] <= 4),),
        {"size": lambda q: q["tile"] * q["unroll"]},
    )


def large() -> ConfigSpace:
    return ConfigSpace(
        (Knob("tile", (4, 8), "a"), Knob("lanes", (8, 16), "c")),
        (Constraint(LIMIT, lambda q: q["size"] <= 100), Constraint("tile < lanes", lambda q: q["tile"] < q["lanes"])),
        {"size": lambda q: q["tile"] * 10, "rows": lambda q: 7},
    )


FORM = Knob("form", ("small", "large"), "which")
SPACE = one_of([FORM], {("small",): small(), ("large",): large()})


def legal() -> set[tuple[object, ...]]:
    configs = SPACE.configs(np.concatenate(list(SPACE.walk())))
    return {tuple(config[name] for name in ("form", "tile", "unroll", "lanes")) for config in configs}


def test_the_configurations_are_those_of_each_space_and_knobs_without_a_use_have_one_value() -> None:
    assert legal() == {
        ("small", 1, 1, 8), ("small", 2, 1, 8), ("small", 4, 1, 8), ("small", 1, 3, 8),
        ("large", 4, 1, 8), ("large", 4, 1, 16), ("large", 8, 1, 16),
    }  # fmt: skip


def test_derived_quantities_are_those_of_the_chosen_space() -> None:
    rows = SPACE.indices(
        [
            {"form": "small", "tile": 4, "unroll": 3, "lanes": 8},
            {"form": "large", "tile": 4, "unroll": 1, "lanes": 8},
            {"form": "small", "tile": 1, "unroll": 1, "lanes": 8},
        ]
    )
    features = SPACE.encode(rows)[:, [SPACE.feature_names.index(name) for name in ("size", "rows")]]
    assert np.rint(2.0**features - 1).tolist() == [[12, 0], [40, 7], [1, 0]]


def test_a_broken_rule_is_named() -> None:
    assert "tile < lanes" in SPACE.check({"form": "large", "tile": 8, "unroll": 1, "lanes": 8})[0]
    assert SPACE.check({"form": "small", "tile": 2, "unroll": 1, "lanes": 16}) != []


def test_combinations_without_a_space_are_illegal() -> None:
    space = one_of([FORM, Knob("turn", (0, 1), "t")], {("small", 0): small(), ("large", 1): large()})
    config = {"form": "small", "turn": 1, "tile": 1, "unroll": 1, "lanes": 8}
    assert space.check(config) == ["breaks the rule: form turn is one of small 0, large 1 (got form=small, turn=1)"]
    assert space.size.count == 7


def test_its_example() -> None:
    assert doctest.testmod(subspaces).failed == 0
