"""Extents that are known at run time only: what is the same one, and what may be an extent at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.dynamic.dims import Unknown

steps = st.lists(
    st.one_of(
        st.tuples(st.just("+"), st.integers(-9, 9)), st.tuples(st.just("*"), st.integers(1, 4)),
        st.tuples(st.just("//"), st.integers(1, 4)),
    ),
    max_size=5,
)  # fmt: skip
APPLY: dict[str, Callable[..., object]] = {"+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b}


@pytest.mark.parametrize(
    ("make", "always_an_extent"),
    [
        (lambda h: h, True),
        (lambda h: h + 3, True),
        (lambda h: 2 * h, True),
        (lambda h: h // 2, True),
        (lambda h: h - 3, False),  # of an image of two rows, there is no such extent
        (lambda h: (h - 1) // 2 + 1, True),
        (lambda h: (h - 3) // 2, False),
        (lambda h: h - 3 + 3, True),
    ],
)
def test_what_may_be_negative_is_not_an_extent(make: Callable[[Unknown], Unknown], always_an_extent: bool) -> None:
    assert make(Unknown("h")).is_extent is always_an_extent


@given(steps)
def test_whatever_counts_as_an_extent_is_never_negative(taken: list[tuple[str, int]]) -> None:
    found: object = Unknown("h")
    for operator, number in taken:
        found = APPLY[operator](found, number)
    assert isinstance(found, Unknown)
    times, plus, over = found.line
    if found.is_extent:
        assert all((times * h + plus) // over >= 0 for h in range(20))
