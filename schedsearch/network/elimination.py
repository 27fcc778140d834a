"""Exact minimum of a sum of tables by eliminating variables: Dechter, "Bucket elimination: a unifying framework for
reasoning", Artificial Intelligence 113 (1999), in min-sum form, with min-marginals by messages back down the bucket tree.

See docs/decisions/130-layouts-by-exact-elimination.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Factor = tuple[tuple[int, ...], np.ndarray]
MOST_ENTRIES = 1 << 20
"""Of a table. More is seldom worth its time: DenseNet-121 needs more than 2^24, and has the same cost, to 15 digits, with
2^12, 2^20 or 2^24, for which it takes 0.1, 0.7 and 7 s."""


@dataclass(frozen=True)
class _Bucket:
    """What the elimination of one variable leaves.

    Attributes:
        scope: the variables of `table`; the eliminated one is the last.
        table: the sum of all tables that had the variable.
        message: its minimum over the variable, a table over the other variables.
    """

    scope: tuple[int, ...]
    table: np.ndarray
    message: np.ndarray


class Elimination:
    """The states of variables that minimise a sum of tables.

    Of several minima it takes the same one every time: each variable, last eliminated first, has the lowest state that
    reaches the minimum.

    Args:
        sizes: the number of states of each variable.
        factors: pairs of variables (distinct) and a float table with one dimension for each of them; inf forbids states.
        most_entries: of a table. Where the next table would be larger, one of its variables is given the state in which the
            tables that have it can be lowest, each by itself; the result is then no longer exact.

    Attributes:
        cost: the minimum; inf if everything is forbidden.
        states: a state for each variable that reaches it.
        largest: entries of the largest table.

    Examples:
        >>> found = Elimination([2, 2], [((0,), np.array([1.0, 0.0])), ((0, 1), np.array([[0.0, 5.0], [3.0, 2.5]]))])
        >>> found.cost, found.states, found.least(1).tolist()
        (1.0, (0, 0), [1.0, 2.5])
    """

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor], most_entries: int = MOST_ENTRIES) -> None:
        self._sizes = tuple(sizes)
        self._buckets: dict[int, _Bucket] = {}  # in the order of elimination
        self._given: dict[int, int] = {}  # states of variables that were fixed
        self.largest = 1
        tables = [(tuple(variables), np.asarray(table, dtype=float)) for variables, table in factors]
        for variables, table in tables:
            assert table.shape == tuple(self._sizes[each] for each in variables), (variables, table.shape)
        self._eliminate(tables, most_entries)
        self.cost = float(sum(bucket.message.item() for bucket in self._buckets.values() if len(bucket.scope) == 1))
        self._buckets = {variable: self._conditioned(bucket) for variable, bucket in self._buckets.items()}
        self.states = self._traced_back()

    @property
    def exact(self) -> bool:
        """False if a variable was fixed because tables became too large."""
        return not self._given

    def _eliminate(self, tables: list[Factor], most_entries: int) -> None:
        neighbours: dict[int, set[int]] = {variable: set() for variable in range(len(self._sizes))}
        for variables, _ in tables:
            for variable in variables:
                neighbours[variable].update(set(variables) - {variable})
        entries = {variable: self._entries(variable, neighbours) for variable in neighbours}
        while entries:
            variable = min(entries, key=lambda each: (entries[each], each))
            if entries[variable] > most_entries:
                variable = max(entries, key=lambda each: (len(neighbours[each]), self._sizes[each], -each))
                tables = self._fixed(variable, tables)
                neighbours = {each: others - {variable} for each, others in neighbours.items()}
                neighbours[variable] = set()
                entries = {each: self._entries(each, neighbours) for each in entries}
            around = neighbours.pop(variable)
            own = [(scope, table) for scope, table in tables if variable in scope]
            tables = [(scope, table) for scope, table in tables if variable not in scope]
            scope = (*sorted(around), variable)
            total = np.zeros([self._sizes[each] for each in scope])
            for factor in own:
                total += _spread(factor, scope)
            message = total.min(axis=-1)
            self.largest = max(self.largest, total.size)
            self._buckets[variable] = _Bucket(scope, total, message)
            if around:
                tables.append((scope[:-1], message))
            del entries[variable]
            for each in around:
                neighbours[each] |= around - {each}
                neighbours[each].discard(variable)
                entries[each] = self._entries(each, neighbours)

    def _conditioned(self, bucket: _Bucket) -> _Bucket:
        """A bucket in which variables that were fixed after its elimination have their states."""
        outer = bucket.scope[:-1]
        at = tuple(self._given.get(each, slice(None)) for each in outer)
        scope = (*(each for each in outer if each not in self._given), bucket.scope[-1])
        return _Bucket(scope, bucket.table[at], bucket.message[at])

    def _entries(self, variable: int, neighbours: dict[int, set[int]]) -> int:
        """Of the table that the variable's elimination makes."""
        found = self._sizes[variable]
        for each in neighbours[variable]:
            found *= self._sizes[each]
        return found

    def _fixed(self, variable: int, tables: list[Factor]) -> list[Factor]:
        """The tables with a variable in its most promising state; only a table of the variable alone still has it."""
        hope = np.zeros(self._sizes[variable])
        for scope, table in tables:
            if variable in scope:
                hope += table.min(axis=tuple(place for place, each in enumerate(scope) if each != variable))
        state = self._given[variable] = int(hope.argmin())
        only = np.full(self._sizes[variable], np.inf)
        only[state] = 0.0
        found: list[Factor] = [((variable,), only)]
        constant = 0.0
        for scope, table in tables:
            if variable in scope:
                table = table.take(state, axis=scope.index(variable))
                scope = tuple(each for each in scope if each != variable)
            if scope:
                found.append((scope, table))
            else:
                constant += float(table)
        only[state] = constant
        return found

    def _traced_back(self) -> tuple[int, ...]:
        states = [0] * len(self._sizes)
        for variable in reversed(self._buckets):
            bucket = self._buckets[variable]
            states[variable] = int(bucket.table[tuple(states[each] for each in bucket.scope[:-1])].argmin())
        return tuple(states)

    def least(self, *variables: int) -> np.ndarray:
        """The minimum for each joint state of some variables, which must all be in one of the factors (min-marginals).

        Returns:
            A table with one dimension for each variable.
        """
        free = [each for each in variables if each not in self._given]
        found = np.full([self._sizes[each] for each in variables], np.inf)
        found[tuple(self._given.get(each, slice(None)) for each in variables)] = self._least(free) if free else self.cost
        return found

    def _least(self, variables: list[int]) -> np.ndarray:
        first = min(variables, key=list(self._buckets).index)
        bucket, table = self._buckets[first], self._totals[first]
        places = [bucket.scope.index(each) for each in variables]
        kept = sorted(places)
        least: np.ndarray = table.min(axis=tuple(place for place in range(table.ndim) if place not in places))
        return least.transpose([kept.index(place) for place in places])

    @functools.cached_property
    def _totals(self) -> dict[int, np.ndarray]:
        """For each bucket the minimum of the whole sum for each entry of its table."""
        order = {variable: place for place, variable in enumerate(self._buckets)}
        totals: dict[int, np.ndarray] = {}
        for variable in reversed(self._buckets):
            bucket = self._buckets[variable]
            outer = bucket.scope[:-1]
            if not outer:
                others = self.cost - bucket.message.item() if math.isfinite(self.cost) else math.inf
                totals[variable] = bucket.table + others
                continue
            parent = self._buckets[min(outer, key=order.__getitem__)]
            gone = tuple(place for place, each in enumerate(parent.scope) if each not in outer)
            above = totals[parent.scope[-1]].min(axis=gone)  # over `outer`, in the order of parent.scope
            order_above = [each for each in parent.scope if each in outer]
            above = above.transpose([order_above.index(each) for each in outer])
            rest_above = np.full(above.shape, np.inf)
            np.subtract(above, bucket.message, out=rest_above, where=np.isfinite(bucket.message))
            totals[variable] = bucket.table + rest_above[..., None]
        return totals


def _spread(factor: Factor, scope: Sequence[int]) -> np.ndarray:
    """A table with its dimensions in the order of `scope`, and of extent 1 for variables that it does not have."""
    variables, table = factor
    places = sorted(range(len(variables)), key=lambda place: scope.index(variables[place]))
    return table.transpose(places)[tuple(slice(None) if each in variables else None for each in scope)]
