"""The configurations that a template offers: knobs, joint constraints with their reasons, derived quantities.

A `ConfigSpace` is sampled, walked, counted and encoded in vectorised chunks over *index rows*: an int32 matrix of shape
(n, knobs) whose entry [i, j] is a position in `knobs[j].values`. Index rows have a meaning only together with their space.
Databases and other processes therefore get a `Config` instead. `schedsearch.space.sampling` finds the legal rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.config import Config
from schedsearch.errors import ConfigError, did_you_mean
from schedsearch.space.knob import Knob, Value, listing, value_array, value_key
from schedsearch.space.sampling import CHUNK_ROWS, Sampler, contains
from schedsearch.typed import Array

Rows = NDArray[np.int32]
Columns = Mapping[str, Array]


@dataclass(frozen=True)
class Constraint:
    """A joint rule over knobs and derived quantities.

    Attributes:
        reason: the rule in words with its limit, e.g. "threads per block <= 1024".
        predicate: takes a mapping from names to arrays of values (int64, bool or str, all of one length) and returns a
            boolean array of that length, or one bool for all. It must read the same names whatever their values are.
    """

    reason: str
    predicate: Callable[[Columns], Any]


@dataclass(frozen=True)
class SpaceSize:
    """The number of legal configurations; `exact` is False if it was estimated by sampling."""

    count: int
    exact: bool

    def __str__(self) -> str:
        if self.exact:
            return f"{self.count:,}"
        digits, _, exponent = f"{self.count:.1e}".partition("e")
        return f"about {digits}e{int(exponent)} (estimated)" if self.count else "about 0 (estimated)"


class ConfigSpace:
    """Knobs, the constraints among them, and quantities derived from them. Immutable.

    Args:
        knobs: in the order in which the space is walked; the last one varies fastest.
        constraints: a configuration is legal when all of them hold.
        derived: quantities computed from knobs and from earlier derived quantities, e.g. threads or shared bytes.
            Each function takes the same mapping as a predicate and returns an array of numbers, or one number for all.
            Constraints may read them; all of them are features for a cost model.

    Raises:
        ConfigError: two knobs or derived quantities share a name, or there are no knobs.
    """

    def __init__(
        self,
        knobs: Iterable[Knob],
        constraints: Iterable[Constraint] = (),
        derived: Mapping[str, Callable[[Columns], Any]] = MappingProxyType({}),
    ) -> None:
        self.knobs = tuple(knobs)
        self.constraints = tuple(constraints)
        self.derived = MappingProxyType(dict(derived))
        self.names = tuple(knob.name for knob in self.knobs)
        if not self.knobs:
            raise ConfigError("a configuration space needs at least one knob, got none")
        every = [*self.names, *self.derived]
        if twice := sorted({name for name in every if every.count(name) > 1}):
            raise ConfigError(f"names used twice in one space: {', '.join(twice)}; knobs and derived quantities share names")
        self._cards = np.array([len(knob.values) for knob in self.knobs], dtype=np.int64)
        self._values = {knob.name: value_array(knob.values) for knob in self.knobs}
        self._position = {knob.name: {value_key(v): i for i, v in enumerate(knob.values)} for knob in self.knobs}

    def __repr__(self) -> str:
        knobs = ", ".join(f"{knob.name}[{len(knob.values)}]" for knob in self.knobs)
        return f"ConfigSpace({knobs}; {len(self.constraints)} constraints)"

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """The values of each knob by its name; integers in increasing order."""
        return {knob.name: knob.values for knob in self.knobs}

    @functools.cached_property
    def cardinality(self) -> int:
        """Size of the cartesian product, including illegal configurations."""
        return self._sampler.cardinality

    # ---- configurations and index rows

    def config(self, row: Sequence[int] | Array) -> Config:
        """The configuration of one index row."""
        return Config({knob.name: knob.values[int(i)] for knob, i in zip(self.knobs, row)})

    def configs(self, rows: Array) -> list[Config]:
        return [self.config(row) for row in np.asarray(rows).tolist()]

    def indices(self, configs: Iterable[Mapping[str, Value]]) -> Rows:
        """Index rows, int32 (n, knobs), of configurations whose values exist. Constraints are not checked.

        Raises:
            ConfigError: a knob is missing or unknown, or a value is not one of the knob's.
        """
        rows = []
        for config in configs:
            row = self._row(config)
            if row is None:
                raise ConfigError("; ".join(self._value_problems(config)))
            rows.append(row)
        return self._as_rows(rows)

    def legal_among(self, configs: Iterable[Mapping[str, Value]]) -> tuple[Rows, NDArray[np.int64]]:
        """The index rows of the legal ones of some configurations, int32 (m, knobs), and their positions among all, (m,).

        What other spaces have, with other knobs or values, is left out. `check` tells why.
        """
        found = {at: row for at, config in enumerate(configs) if (row := self._row(config)) is not None}
        rows, at = self._as_rows(list(found.values())), np.array(list(found), dtype=np.int64)
        legal = self.legal(rows)
        return rows[legal], at[legal]

    def keys(self, rows: Array) -> Array:
        """A unique integer for each row of this space: its position in the cartesian product.

        int64, or Python integers in an object array when the product does not fit.
        """
        return self._sampler.keys(rows)

    def rows(self, keys: Array) -> Rows:
        """Inverse of `keys`."""
        return self._sampler.rows(keys)

    # ---- legality

    def check(self, config: Mapping[str, Value]) -> list[str]:
        """Why a configuration is illegal: one text per mistake; empty if it is legal.

        Constraints are checked only if every knob has one of its values.
        """
        if problems := self._value_problems(config):
            return problems
        columns = _Columns(self, self.indices([config]), range(len(self.knobs)))
        broken = []
        for constraint in self.constraints:
            columns.read.clear()
            if not bool(np.all(columns.holds(constraint))):
                got = ", ".join(f"{name}={columns[name][0]}" for name in dict.fromkeys(columns.read))
                broken.append(f"breaks the rule: {constraint.reason}" + (f" (got {got})" if got else ""))
        return broken

    def require(self, config: Mapping[str, Value]) -> None:
        """Raises ConfigError with every reason when the configuration is illegal."""
        if problems := self.check(config):
            raise ConfigError("illegal configuration: " + "; ".join(problems))

    def legal(self, rows: Array) -> NDArray[np.bool_]:
        """Which index rows satisfy every constraint: bool (n,)."""
        listed = self._sampler.listed_already
        if listed is not None and len(listed):
            return contains(listed, self.keys(rows))
        out = np.empty(len(rows), dtype=np.bool_)
        for start in range(0, len(rows), CHUNK_ROWS):
            chunk = rows[start : start + CHUNK_ROWS]
            columns = _Columns(self, chunk, range(len(self.knobs)))
            good = np.ones(len(chunk), dtype=np.bool_)
            for constraint in self.constraints:
                good &= columns.holds(constraint)
            out[start : start + CHUNK_ROWS] = good
        return out

    def _row(self, config: Mapping[str, Value]) -> list[int] | None:
        """The index row of a configuration; None if it has other knobs or another value."""
        if len(config) != len(self.knobs):
            return None
        try:
            return [position[value_key(config[name])] for name, position in self._position.items()]
        except KeyError:
            return None

    def _as_rows(self, rows: Sequence[Sequence[int]]) -> Rows:
        return np.array(rows, dtype=np.int32).reshape(len(rows), len(self.knobs))

    def _value_problems(self, config: Mapping[str, Value]) -> list[str]:
        problems = [
            f"unknown knob {name!r}{did_you_mean(name, self.names)}; the knobs are {', '.join(self.names)}"
            for name in config
            if name not in self._values
        ]
        for knob in self.knobs:
            if knob.name not in config:
                problems.append(f"knob {knob.name!r} is missing; give one of {listing(knob.values)}")
            elif value_key(config[knob.name]) not in self._position[knob.name]:
                problems.append(f"knob {knob.name!r} is {config[knob.name]!r}; allowed are {listing(knob.values)}")
        return problems

    # ---- size, sampling, walking

    @functools.cached_property
    def size(self) -> SpaceSize:
        """The number of legal configurations: counted if a bounded enumeration finishes, else estimated."""
        return SpaceSize(*self._sampler.size)

    def sample(self, n: int, rng: np.random.Generator) -> list[Config]:
        """n distinct legal configurations at random; fewer only if the space has no more."""
        return self.configs(self.sample_indices(n, rng))

    def sample_indices(self, n: int, rng: np.random.Generator, exclude: Collection[object] = frozenset()) -> Rows:
        """Distinct legal index rows at random, int32 (m, knobs).

        Uniform whenever rejection or enumeration finds them. When the legal share is too small for rejection and the space
        too large to enumerate, they come from a beam: legal and varied, but not exactly uniform.

        Args:
            n: how many at most.
            exclude: `keys` of rows to leave out; a set for speed.

        Returns:
            m = n rows, or fewer if no more are left (or, where enumeration is impossible, if a long search found no more).
        """
        return self._sampler.sample(n, rng, exclude)

    def walk(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[Rows]:
        """All legal index rows in lexicographic order, lazily, in chunks of at most about `chunk_rows` (never empty)."""
        return self._sampler.walk(chunk_rows)

    def neighbours(self, rows: Sequence[int] | Array) -> Rows:
        """The legal rows that differ from `rows`, one or several, in exactly one knob: int32 (m, knobs).

        Neighbours of one row follow those of the row before. A row that is a neighbour of several rows occurs several times.
        """
        base = np.atleast_2d(np.asarray(rows, dtype=np.int32))
        column = np.repeat(np.arange(len(self.knobs)), self._cards)  # every value of every knob
        value = np.concatenate([np.arange(card) for card in self._cards])
        changed = np.repeat(base, len(value), axis=0)
        at = np.tile(column, len(base)), np.tile(value, len(base))
        differs = changed[np.arange(len(changed)), at[0]] != at[1]
        changed[np.arange(len(changed)), at[0]] = at[1]
        changed = changed[differs]
        legal: Rows = changed[self.legal(changed)]
        return legal

    def restrict(self, values: Mapping[str, Sequence[Value]]) -> ConfigSpace:
        """The same space with fewer values for some knobs.

        Raises:
            ConfigError: the knob is unknown, its values are not a list, it lacks one of them, or nothing legal is left.
        """
        problems = []
        kept = {}
        for name, wanted in values.items():
            if name not in self._values:
                problems.append(
                    f"unknown knob {name!r}{did_you_mean(name, self.names)}; the knobs are {', '.join(self.names)}"
                )
                continue
            knob = self.knobs[self.names.index(name)]
            if isinstance(wanted, str) or not isinstance(wanted, Iterable):
                problems.append(f"knob {name!r} must be restricted to a list of values, got {wanted!r}; give [{wanted!r}]")
                continue
            if not wanted:
                problems.append(f"knob {name!r} is restricted to no value; give some of {listing(knob.values)}")
            for value in wanted:
                if value_key(value) not in self._position[name]:
                    problems.append(f"knob {name!r} cannot be {value!r}; allowed are {listing(knob.values)}")
            keys = {value_key(value) for value in wanted}
            kept[name] = tuple(value for value in knob.values if value_key(value) in keys)
        if problems:
            raise ConfigError("; ".join(problems))
        knobs = [Knob(knob.name, kept.get(knob.name, knob.values), knob.doc) for knob in self.knobs]
        space = ConfigSpace(knobs, self.constraints, self.derived)
        if not len(space.sample_indices(1, np.random.default_rng(0))):
            limits = ", ".join(f"{name} in {listing(kept[name])}" for name in kept)
            raise ConfigError(
                f"no legal configuration is left with {limits}; allow more values. The closest configurations break: "
                + "; ".join(space._rules_nearest_to_hold())
            )
        return space

    def _rules_nearest_to_hold(self) -> list[str]:
        """For a space without legal configurations: the fewest rules that any of many random configurations breaks."""
        rows = np.random.default_rng(0).integers(0, self._cards, (CHUNK_ROWS, len(self.knobs)), dtype=np.int32)
        columns = _Columns(self, rows, range(len(self.knobs)))
        broken = np.array([~columns.holds(constraint) for constraint in self.constraints])
        counts = broken.sum(axis=0)
        by_nearest: NDArray[np.bool_] = np.any(broken[:, counts == counts.min()], axis=1)
        return [constraint.reason for constraint, one in zip(self.constraints, by_nearest) if one]

    # ---- features

    @functools.cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of `encode`."""
        names: list[str] = []
        for knob in self.knobs:
            names += [knob.name] if knob.is_scalar else [f"{knob.name}={value}" for value in knob.values]
        return (*names, *self.derived)

    def encode(self, rows: Array) -> NDArray[np.float32]:
        """Features for a cost model: float32 (n, len(feature_names)). The width depends on the space alone.

        A number is its own feature. If the knob's values span a factor of 4 or more (tile sizes, stages), the feature is the
        log2 instead, so that doublings are equally far apart, or log2(1 + value) if one of the values is zero. A bool is 0
        or 1; any other knob is one-hot. A derived quantity d becomes sign(d) log2(1 + |d|), which needs no statistics, or
        NaN if d is not finite.
        """
        columns = _Columns(self, rows, range(len(self.knobs)))
        out = np.empty((len(rows), len(self.feature_names)), dtype=np.float32)
        at = 0
        for column, table in enumerate(self._feature_tables):
            out[:, at : at + table.shape[1]] = table[rows[:, column]]
            at += table.shape[1]
        for name in self.derived:
            value = np.asarray(columns[name], dtype=np.float64)
            with np.errstate(invalid="ignore"):
                feature = np.sign(value) * np.log2(1 + np.abs(value))
            out[:, at] = np.where(np.isfinite(feature), feature, np.nan)
            at += 1
        return out

    @functools.cached_property
    def _feature_tables(self) -> list[NDArray[np.float32]]:
        return [knob.features() for knob in self.knobs]

    def coordinates(self, rows: Array) -> NDArray[np.float64]:
        """Positions for a model that measures distances: float64 (n, d) within [0, 1]. d >= 0 depends on the space alone.

        The coordinate of a number is its feature of `encode`, scaled. If an integer knob has three or more values that are
        not all powers of two, it has a second coordinate, the alignment: log2 of the largest power of two that divides the
        value, up to 64. (The least aligned size limits the hardware's speed, and in this respect 96 is closer to 64 than to
        97.) The values of any other knob with more than two are corners at distance 1 from each other. Knobs with one value
        and derived quantities have no coordinate.
        """
        tables = self._coordinate_tables
        parts = [table[rows[:, column]] for column, table in enumerate(tables)]
        return np.concatenate(parts, axis=1)

    @functools.cached_property
    def _coordinate_tables(self) -> list[NDArray[np.float64]]:
        return [knob.coordinates() for knob in self.knobs]

    # ---- private

    def _no_rows(self) -> Rows:
        return np.empty((0, len(self.knobs)), dtype=np.int32)

    @functools.cached_property
    def _sampler(self) -> Sampler:
        def holds(rule: int, rows: Rows, order: Sequence[int]) -> NDArray[np.bool_]:
            return _Columns(self, rows, order).holds(self.constraints[rule])

        return Sampler(self._cards, holds, self._knobs_read, self.legal)

    def _knobs_read(self) -> list[frozenset[int]]:
        """For each constraint the positions of the knobs that it reads, also through derived quantities; calls find them."""
        first = np.zeros((1, len(self.knobs)), dtype=np.int32)
        found = []
        for constraint in self.constraints:
            columns = _Columns(self, first, range(len(self.knobs)))
            columns.holds(constraint)
            found.append(frozenset(columns.knobs_read))
        return found


class _Columns(Mapping[str, Array]):
    """The values of index rows by name, gathered or derived when they are first read.

    Args:
        rows: (n, m) index rows; they may cover only the first m knobs of `order`.
        order: positions in `space.knobs` of the columns of `rows`.
    """

    def __init__(self, space: ConfigSpace, rows: Array, order: Sequence[int]) -> None:
        self._space = space
        self._rows = rows
        self._column = {space.names[column]: i for i, column in enumerate(order[: rows.shape[1]])}
        self._cache: dict[str, Array] = {}
        self._deriving: list[str] = []
        self.read: list[str] = []  # names that a predicate asked for, in that order
        self.knobs_read: set[int] = set()

    def holds(self, constraint: Constraint) -> NDArray[np.bool_]:
        try:
            result = np.asarray(constraint.predicate(self))
            return np.broadcast_to(result.astype(np.bool_, copy=False), (len(self._rows),))
        except Exception as error:
            error.add_note(f"while evaluating the constraint {constraint.reason!r} over {len(self._rows)} rows at once")
            raise

    def __getitem__(self, name: str) -> Array:
        if self._deriving and name in self._space.derived and not self._is_earlier(name, self._deriving[-1]):
            raise KeyError(f"derived quantity {self._deriving[-1]!r} may only read earlier ones, and {name!r} is not")
        if name not in self._cache:
            self._cache[name] = self._values_of(name)
        if not self._deriving:
            self.read.append(name)
        return self._cache[name]

    def __contains__(self, name: object) -> bool:
        # For a name that the space lacks, the inherited test would first look for similar ones, to give up with a KeyError.
        return (name in self._column or name in self._space.derived) and super().__contains__(name)

    def _values_of(self, name: str) -> Array:
        space = self._space
        if name in self._column:
            self.knobs_read.add(space.names.index(name))
            value: Array = space._values[name][self._rows[:, self._column[name]]]
        elif name in space.derived:
            self._deriving.append(name)
            value = np.broadcast_to(np.asarray(space.derived[name](self)), (len(self._rows),))
            self._deriving.pop()
        elif name in space.names:
            raise KeyError(f"knob {name!r} is not assigned yet: a predicate must read the same names whatever the values")
        else:
            raise KeyError(f"no knob or derived quantity {name!r}{did_you_mean(name, [*space.names, *space.derived])}")
        return value

    def _is_earlier(self, name: str, than: str) -> bool:
        order = list(self._space.derived)
        return order.index(name) < order.index(than)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._space.names, *self._space.derived))

    def __len__(self) -> int:
        return len(self._space.names) + len(self._space.derived)
