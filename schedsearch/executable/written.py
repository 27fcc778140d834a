"""Which bytes of a network's memory hold what, call by call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable


class Written:
    """What the bytes of one memory hold: disjoint stretches with a tag each."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stretches: list[tuple[int, Hashable]] = []  # end and tag of each

    def write(self, start: int, end: int, tag: Hashable) -> None:
        """From now on the bytes hold what the tag says; what was there is gone."""
        if start >= end:
            return
        first = bisect_left(self._starts, start)
        if first and self._stretches[first - 1][0] > start:
            first -= 1
        last = bisect_left(self._starts, end)
        starts, stretches = [start], [(end, tag)]
        if first < last and self._starts[first] < start:
            starts.insert(0, self._starts[first])
            stretches.insert(0, (start, self._stretches[first][1]))
        if first < last and self._stretches[last - 1][0] > end:
            starts.append(end)
            stretches.append(self._stretches[last - 1])
        self._starts[first:last] = starts
        self._stretches[first:last] = stretches

    def holds(self, start: int, end: int, tag: Hashable) -> bool:
        """Whether all the bytes hold what the tag says."""
        number = bisect_left(self._starts, start + 1) - 1
        while start < end:
            if not 0 <= number < len(self._starts) or self._starts[number] > start or self._stretches[number][0] <= start:
                return False
            if self._stretches[number][1] != tag:
                return False
            start = self._stretches[number][0]
            number += 1
        return True

    def meets(self, start: int, end: int) -> bool:
        """Whether anything was written to some of the bytes."""
        number = bisect_left(self._starts, end)
        return start < end and number > 0 and self._stretches[number - 1][0] > start
