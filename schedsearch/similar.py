"""Finds the workloads of one operator that are most similar to another one, among thousands, in well below a millisecond."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from schedsearch.workload import Workload

T = TypeVar("T")

_OTHER = 4.0  # distance of a parameter that is not a number, as in `workload.distance`


class Similar(Generic[T]):
    """Workloads of one operator, with something of each.

    Workloads whose parameters other than numbers are equal form a group. The distances to a group are one NumPy expression.

    Args:
        entries: (workload, what is kept of it); of equally similar ones the first comes first.
    """

    def __init__(self, entries: Iterable[tuple[Workload, T]]) -> None:
        self._groups: dict[tuple[Any, ...], list[T]] = {}
        numbers: dict[tuple[Any, ...], list[list[float]]] = {}
        for workload, kept in entries:
            kind = _kind(workload)
            self._groups.setdefault(kind, []).append(kept)
            numbers.setdefault(kind, []).append(_logarithms(workload))
        self._numbers = {kind: np.array(rows).reshape(len(rows), -1) for kind, rows in numbers.items()}

    def nearest(self, workload: Workload, count: int = 1) -> list[tuple[float, T]]:
        """The `count` most similar ones with their distance, the most similar first. The distance is that of
        `workload.distance`, but for what an operator calls unrelated, which it does not know."""
        kind, own = _kind(workload), _logarithms(workload)
        found: list[tuple[float, T]] = []
        for other, group in self._groups.items():
            far = _OTHER * sum(one != two for one, two in zip(kind, other))
            if len(found) == count and far > found[-1][0]:
                continue
            numbers = self._numbers[other]
            if numbers.shape[1] == len(own):
                steps = far + np.abs(numbers - own).sum(axis=1)
            else:
                steps = np.full(len(group), far + _OTHER * abs(numbers.shape[1] - len(own)))
            places = np.argsort(steps, kind="stable")[:count]
            found += [(float(steps[place]), group[place]) for place in places]
            found = sorted(found, key=lambda each: each[0])[:count]
        return found


def _kind(workload: Workload) -> tuple[Any, ...]:
    """Each parameter without its numbers."""
    return tuple(_without_numbers(workload.params[name]) for name in sorted(workload.params))


def _without_numbers(value: object) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_numbers(each) for each in value)
    return None if isinstance(value, int) else value


def _logarithms(workload: Workload) -> list[float]:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, tuple):
            return [number for each in value for number in numbers(each)]
        return [math.copysign(math.log2(abs(value) + 1), value)] if isinstance(value, int) else []

    return [number for name in sorted(workload.params) for number in numbers(workload.params[name])]
