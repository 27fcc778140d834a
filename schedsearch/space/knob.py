"""One choice of a configuration space, and its values as numbers for models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.errors import ConfigError
from schedsearch.text import is_storable, quoted
from schedsearch.typed import Array

Value = int | str | bool


@dataclass(frozen=True)
class Knob:
    """One choice with a finite set of values, all of them int, str or bool.

    Integers are kept in increasing order, so that neighbouring positions are neighbouring values.

    Raises:
        ConfigError: no values, a value of another type, a value given twice, or text that cannot be stored.
    """

    name: str
    values: tuple[Value, ...]
    doc: str = ""

    def __post_init__(self) -> None:
        values = tuple(self.values)
        if not values:
            raise ConfigError(f"knob {self.name!r} has no values; give at least one")
        for value in values:
            if type(value) not in (int, str, bool):
                raise ConfigError(f"knob {self.name!r}: value {quoted(value)} is not possible; allowed: int, str and bool")
        for text in (self.name, *values):
            if isinstance(text, str) and not is_storable(text):
                raise ConfigError(f"knob {self.name!r}: {text!r} cannot be stored; leave out NUL and unpaired surrogates")
        if len({value_key(value) for value in values}) != len(values):
            raise ConfigError(f"knob {self.name!r} has a value twice in {values}; give each once")
        object.__setattr__(self, "values", tuple(sorted(values)) if _all_ints(values) else values)

    @property
    def ordered(self) -> bool:
        """Whether the values are numbers, so that distances between them have a meaning."""
        return _all_ints(self.values)

    @property
    def is_scalar(self) -> bool:
        """Whether a single column can hold the values; true for numbers and bools."""
        return self.ordered or all(type(value) is bool for value in self.values)

    def features(self) -> NDArray[np.float32]:
        """The columns of `ConfigSpace.encode` for each value: (values, 1) or (values, values)."""
        if not self.is_scalar:
            return np.eye(len(self.values), dtype=np.float32)
        value = np.array(self.values, dtype=np.float64)
        low, high = value.min(), value.max()
        if low > 0 and high >= 4 * low:
            value = np.log2(value)
        elif low == 0 and high >= 4:
            value = np.log2(1 + value)
        return value[:, None].astype(np.float32)

    def coordinates(self) -> NDArray[np.float64]:
        """The columns of `ConfigSpace.coordinates` for each value: (values, 0 or more)."""
        columns = self.features().astype(np.float64)
        if len(self.values) == 1:
            return columns[:, :0]
        if len(self.values) == 2:
            return np.array([[0.0], [1.0]])
        if not self.is_scalar:
            return columns / math.sqrt(2)
        if self.ordered:
            integers = [int(value) for value in self.values]
            alignment = np.array([_alignment(value) for value in integers], dtype=np.float64)
            if any(value & (value - 1) for value in integers):
                columns = np.concatenate([columns, alignment[:, None]], axis=1)
            span = np.ptp(columns, axis=0)
            columns = ((columns - columns.min(axis=0)) / np.where(span, span, 1))[:, span > 0]
        return columns


def _all_ints(values: Iterable[Value]) -> bool:
    return all(type(value) is int for value in values)


def _alignment(value: int) -> int:
    """log2 of the largest power of two, at most 64, that divides an integer."""
    return min((value & -value).bit_length() - 1, 6) if value else 6


def value_key(value: object) -> tuple[bool, Any]:
    """A key that differs for True and 1, which are equal in Python."""
    return isinstance(value, bool | np.bool_), value


def value_array(values: tuple[Value, ...]) -> Array:
    if len({type(value) for value in values}) > 1:
        return np.array(values, dtype=object)
    return np.array(values, dtype=np.int64 if type(values[0]) is int else None)


def listing(values: Sequence[Value], limit: int = 16) -> str:
    shown = ", ".join(map(repr, values[:limit]))
    return f"{shown}, ... {values[-1]!r} ({len(values)} values)" if len(values) > limit else shown
