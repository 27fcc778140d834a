"""Finds, counts and draws the legal index rows of a configuration space, without ever listing the space.

An index row has one position per knob. There are three ways to find legal rows:

1. enumeration, knob by knob: every rule prunes as soon as the last knob that it reads is assigned (exact). If it finishes
   soon, the legal rows are kept as one integer each, because a look-up is cheaper than checking the rules;
2. rejection: draw from the cartesian product and keep the legal rows (exactly uniform);
3. a beam: an enumeration that keeps a random subset of the partial rows when there are too many (diverse, and the inverse
   of the kept share estimates the number of legal rows; Rubinstein's stochastic enumeration).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.typed import Array

Rows = NDArray[np.int32]

CHUNK_ROWS = 1 << 15  # rows evaluated at once: a few hundred KB per column
_LISTING_BUDGET = 1 << 21  # rows that an enumeration whose result is kept may look at; takes a tenth of a second
_ENUMERATION_BUDGET = 5_000_000  # rows that an enumeration may look at before it gives up
_REJECTION_BUDGET = 1 << 17  # draws of one `sample_indices` before it turns to enumeration
_FIRST_LOOK = 1 << 12  # draws that show whether an enumeration is hopeless
_BEAMS = 2  # that estimate how many rows are legal where draws hit too few
_FEW_HITS = 50  # with fewer legal rows among the draws, the legal share is too uncertain


class Sampler:
    """Finds legal rows. It knows cardinalities and rules, but no names and values.

    Args:
        cards: (knobs,), how many values each knob has.
        holds: (rule, rows, order) -> bool (n,): whether a rule holds for partial rows, int32 (n, m), whose columns are the
            knobs order[0..m-1]; these include all knobs that the rule reads.
        knobs_read: returns for each rule the positions of the knobs that it reads; called when first needed.
        legal: rows (n, knobs) -> bool (n,): whether every rule holds.
    """

    def __init__(
        self,
        cards: NDArray[np.int64],
        holds: Callable[[int, Rows, Sequence[int]], NDArray[np.bool_]],
        knobs_read: Callable[[], list[frozenset[int]]],
        legal: Callable[[Array], NDArray[np.bool_]],
    ) -> None:
        self._cards, self._holds, self._knobs_read, self._legal = cards, holds, knobs_read, legal

    @functools.cached_property
    def cardinality(self) -> int:
        """Size of the cartesian product."""
        return math.prod(int(card) for card in self._cards)

    def keys(self, rows: Array) -> Array:
        """See `schedsearch.space.ConfigSpace.keys`."""
        total = np.zeros(len(rows), dtype=self._key_dtype)
        for column, card in enumerate(self._cards.tolist()):
            total = total * card + rows[:, column].astype(self._key_dtype)
        return total

    def rows(self, keys: Array) -> Rows:
        """Inverse of `keys`."""
        out = np.empty((len(keys), len(self._cards)), dtype=np.int32)
        rest = np.asarray(keys)
        for column in range(len(self._cards) - 1, -1, -1):
            card = int(self._cards[column])
            out[:, column] = rest % card
            rest = rest // card
        return out

    @functools.cached_property
    def size(self) -> tuple[int, bool]:
        """The number of legal rows, and whether it was counted (else estimated)."""
        if self.listed is not None:
            return len(self.listed), True
        if self.cardinality <= _ENUMERATION_BUDGET:
            return sum(map(len, self.walk())), True
        estimate, drawn = self._estimate
        if estimate <= _LISTING_BUDGET:  # otherwise counting takes seconds, in which a run of many tasks makes no trial
            try:
                return sum(map(len, self.walk(CHUNK_ROWS, _ENUMERATION_BUDGET))), True
            except _BudgetSpent:
                pass
        if drawn:
            hits = int(self._legal(self._draw(2 * CHUNK_ROWS, np.random.default_rng(0))).sum())
            estimate = self.cardinality * hits // (2 * CHUNK_ROWS)
        return estimate, False

    @functools.cached_property
    def _estimate(self) -> tuple[int, bool]:
        """About how many rows are legal by a few draws, or by beams if these hit too few; and whether it is by draws."""
        rng = np.random.default_rng(0)
        hits = int(self._legal(self._draw(_FIRST_LOOK, rng)).sum())
        if hits >= _FEW_HITS:
            return self.cardinality * hits // _FIRST_LOOK, True
        beams = [self._beam(rng) for _ in range(_BEAMS)]
        return round(sum(len(rows) * factor for rows, factor in beams) / _BEAMS), False

    def sample(self, n: int, rng: np.random.Generator, exclude: Collection[object]) -> Rows:
        """See `schedsearch.space.ConfigSpace.sample_indices`."""
        if n <= 0:
            return np.empty((0, len(self._cards)), dtype=np.int32)
        if self.listed is not None:
            return self.rows(pick(n, self.listed, rng, exclude))
        found: dict[Any, None] = {}  # keys in the order in which they were found

        def add(rows: Rows) -> None:
            for key in self.keys(rows).tolist():
                if len(found) < n and key not in exclude:
                    found[key] = None

        drawn = 0
        while len(found) < n and drawn < _REJECTION_BUDGET:
            rate = max(len(found) / drawn, 1e-3) if drawn else 0.25
            draws = min(CHUNK_ROWS, max(256, int(1.2 * (n - len(found)) / rate)))
            rows = self._draw(draws, rng)
            add(rows[self._legal(rows)])
            drawn += draws
        if len(found) < n:
            if self.size[1]:
                return self.rows(pick(n, self._all_keys, rng, exclude))
            fruitless = 0
            while len(found) < n and fruitless < 8:
                before = len(found)
                rows, _ = self._beam(rng)
                add(rng.permutation(rows))
                fruitless = fruitless + 1 if len(found) == before else 0
        return self.rows(np.array(list(found), dtype=self._key_dtype))

    def _draw(self, n: int, rng: np.random.Generator) -> Rows:
        return rng.integers(0, self._cards, size=(n, len(self._cards)), dtype=np.int32)

    @functools.cached_property
    def listed(self) -> Array | None:
        """Keys of all legal rows in ascending order if an enumeration finishes soon; else None."""
        if self.cardinality > _LISTING_BUDGET and self._estimate[0] > 2 * _LISTING_BUDGET:
            return None
        try:
            return self._collect(_LISTING_BUDGET)
        except _BudgetSpent:
            return None

    @property
    def listed_already(self) -> Array | None:
        """`listed`, if it is already known."""
        keys: Array | None = self.__dict__.get("listed")  # where cached_property keeps it
        return keys

    @functools.cached_property
    def _all_keys(self) -> Array:
        """Keys of all legal rows in ascending order; only for spaces whose exact size is known to be small."""
        return self._collect(math.inf)

    def _collect(self, budget: float) -> Array:
        keys = np.concatenate([np.empty(0, self._key_dtype), *map(self.keys, self.walk(CHUNK_ROWS, budget))])
        return keys.astype(np.int32) if self.cardinality < 2**31 else keys  # a run of many tasks keeps as many lists

    @functools.cached_property
    def _key_dtype(self) -> Any:
        return np.int64 if self.cardinality < 2**63 else object

    def walk(self, chunk_rows: int = CHUNK_ROWS, budget: float = math.inf) -> Iterator[Rows]:
        """All legal rows in lexicographic order, in chunks of at most about `chunk_rows` (never empty).

        Depth-first over the knobs in their order, a chunk of partial rows at a time.

        Raises:
            _BudgetSpent: more than `budget` partial and full rows were looked at.
        """
        order = tuple(range(len(self._cards)))
        ready = self._ready_after(order)
        looked_at = 0
        stack = [np.empty((1, 0), dtype=np.int32)]
        while stack:
            partial = stack.pop()
            depth = partial.shape[1]
            if depth == len(self._cards):
                yield partial
                continue
            head = max(1, chunk_rows // int(self._cards[depth]))
            if len(partial) > head:
                stack.append(partial[head:])
            extended = self._extend(partial[:head], depth, order, ready[depth])
            looked_at += min(len(partial), head) * int(self._cards[depth])
            if looked_at > budget:
                raise _BudgetSpent
            if len(extended):
                stack.append(extended)

    def _beam(self, rng: np.random.Generator) -> tuple[Rows, float]:
        """Some legal rows, and the factor between their number and the estimated number of all (1.0: these are all).

        Knobs are assigned in an order that completes constraints early. Keeping a uniform subset of the partial rows at
        each step makes rows x factor an unbiased estimate of the number of legal rows.
        """
        order = self._beam_order
        ready = self._ready_after(order)
        partial, factor = np.empty((1, 0), dtype=np.int32), 1.0
        for depth, column in enumerate(order):
            keep = max(1, CHUNK_ROWS // int(self._cards[column]))
            if len(partial) > keep:
                factor *= len(partial) / keep
                partial = partial[rng.choice(len(partial), size=keep, replace=False)]
            partial = self._extend(partial, depth, order, ready[depth])
        return partial[:, np.argsort(order)], factor

    def _extend(self, partial: Rows, depth: int, order: Sequence[int], rules: Sequence[int]) -> Rows:
        """Every partial row with every value of the next knob, without those that break a rule."""
        card = int(self._cards[order[depth]])
        out = np.empty((len(partial) * card, depth + 1), dtype=np.int32)
        out[:, :depth] = np.repeat(partial, card, axis=0)
        out[:, depth] = np.tile(np.arange(card, dtype=np.int32), len(partial))
        for rule in rules:
            out = out[self._holds(rule, out, order)]
        return out

    def _ready_after(self, order: Sequence[int]) -> list[list[int]]:
        """For each depth the rules that can be checked once the knobs order[0..depth] are assigned."""
        depth_of = {column: depth for depth, column in enumerate(order)}
        ready: list[list[int]] = [[] for _ in order]
        for rule, columns in enumerate(self._reads):
            ready[max((depth_of[column] for column in columns), default=0)].append(rule)
        return ready

    @functools.cached_property
    def _beam_order(self) -> list[int]:
        """An order of knobs: first those of the rule with the fewest unassigned knobs, last those that no rule reads."""
        order: list[int] = []
        waiting = list(self._reads)
        while waiting := [columns.difference(order) for columns in waiting if columns.difference(order)]:
            narrowest = min(waiting, key=lambda columns: (len(columns), sorted(columns)))
            order += sorted(narrowest)
        return order + [column for column in range(len(self._cards)) if column not in order]

    @functools.cached_property
    def _reads(self) -> list[frozenset[int]]:
        return self._knobs_read()


def contains(keys: Array, wanted: Array) -> NDArray[np.bool_]:
    """Which of the wanted keys are among `keys`, which are ascending and at least one: bool (n,)."""
    wanted = wanted.astype(keys.dtype, copy=False)  # else all keys would be converted
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.asarray(keys[at] == wanted, dtype=np.bool_)


def pick(n: int, keys: Array, rng: np.random.Generator, exclude: Collection[object]) -> Array:
    """n of the keys at random, none of them in `exclude`; fewer only if there are no more."""
    # At most len(exclude) of these distinct draws are dropped, so that n are left if there are n.
    drawn = rng.choice(keys, size=min(len(keys), n + len(exclude)), replace=False)
    if exclude:
        drawn = drawn[[key not in exclude for key in drawn.tolist()]]
    return drawn[:n]


class _BudgetSpent(Exception):
    """An enumeration looked at more rows than it was allowed."""
