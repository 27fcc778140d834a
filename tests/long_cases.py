"""Parameters of which `make test` runs some, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def except_long(values: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """The values of one parameter; those in `long` run with the long tests."""
    return [pytest.param(value, marks=pytest.mark.long if value in long else ()) for value in values]


def each_one_way(cases: Mapping[str, Sequence[Any]], ways: Mapping[str, Any]) -> list[Any]:
    """Parameters of each case and a way to run it. A case runs in one way, the next in the next way; the others are long.

    Args:
        cases: name -> its parameters.
        ways: name -> the last parameter.
    """
    return [
        pytest.param(*case, value, id=f"{name}-{way}", marks=() if number % len(ways) == place else pytest.mark.long)
        for number, (name, case) in enumerate(cases.items())
        for place, (way, value) in enumerate(ways.items())
    ]
