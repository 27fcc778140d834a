"""A configuration space that lists its legal configurations, for recorded searches and those of other tuners."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from schedsearch.errors import ConfigError
from schedsearch.space.knob import Knob, Value
from schedsearch.space.sampling import contains, pick
from schedsearch.space.space import ConfigSpace, Rows, SpaceSize
from schedsearch.typed import Array

_CHUNK_ROWS = 1 << 15


class ListedSpace(ConfigSpace):
    """Knobs and the set of their legal combinations, found by look-up instead of rules.

    Behaves like a `ConfigSpace` with exact size and uniform sampling, whatever share of the product is legal. It takes one
    integer of memory per legal configuration.

    Args:
        knobs: as for `ConfigSpace`.
        rows: (n, knobs) index rows of all legal configurations, n >= 1, in any order.

    Raises:
        ConfigError: there are no rows, a row occurs twice, or an index is out of range.
    """

    def __init__(self, knobs: Iterable[Knob], rows: Array) -> None:
        super().__init__(knobs)
        rows = np.asarray(rows)
        if not len(rows):
            raise ConfigError("a listed space needs at least one legal configuration, got none")
        if rows.shape[1] != len(self.knobs) or rows.min() < 0 or (rows >= self._cards).any():
            raise ConfigError(f"rows of shape {rows.shape} do not index the {len(self.knobs)} knobs {', '.join(self.names)}")
        keys = np.sort(self.keys(rows))
        if (keys[1:] == keys[:-1]).any():
            raise ConfigError("a legal configuration is listed twice; list each once")
        self._listed = keys  # ascending, which is the lexicographic order of the rows

    def __repr__(self) -> str:
        return super().__repr__().replace("0 constraints", f"{len(self._listed)} configurations are legal")

    def check(self, config: Mapping[str, Value]) -> list[str]:
        if problems := self._value_problems(config):
            return problems
        if self.legal(self.indices([config]))[0]:
            return []
        return [f"is not one of the {len(self._listed)} listed configurations"]

    def legal(self, rows: Array) -> NDArray[np.bool_]:
        return contains(self._listed, self.keys(rows))

    @functools.cached_property
    def size(self) -> SpaceSize:
        return SpaceSize(len(self._listed), exact=True)

    def sample_indices(self, n: int, rng: np.random.Generator, exclude: Collection[object] = frozenset()) -> Rows:
        if n <= 0:
            return self._no_rows()
        return self.rows(pick(n, self._listed, rng, exclude))

    def walk(self, chunk_rows: int = _CHUNK_ROWS) -> Iterator[Rows]:
        for start in range(0, len(self._listed), chunk_rows):
            yield self.rows(self._listed[start : start + chunk_rows])

    def restrict(self, values: Mapping[str, Sequence[Value]]) -> ListedSpace:
        allowed = ConfigSpace(self.knobs).restrict(values)  # finds every possible mistake in `values`
        rows = self.rows(self._listed)
        kept = np.ones(len(rows), dtype=np.bool_)
        for column, (knob, fewer) in enumerate(zip(self.knobs, allowed.knobs)):
            positions = [i for i, value in enumerate(knob.values) if _among(value, fewer.values)]
            kept &= np.isin(rows[:, column], positions)
        if not kept.any():
            limits = ", ".join(f"{name} in {tuple(wanted)}" for name, wanted in values.items())
            raise ConfigError(f"no legal configuration is left with {limits}; allow more values")
        return ListedSpace(allowed.knobs, allowed.indices(self.configs(rows[kept])))


def _among(value: Value, values: tuple[Value, ...]) -> bool:
    """Like `in`, but True differs from 1."""
    return any(type(value) is type(other) and value == other for other in values)
