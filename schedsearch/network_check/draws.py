"""Inputs to compare a network with its model on, from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import decode, dtype, encode
from schedsearch.typed import Array

KINDS = ("usual", "wide")
_INTEGERS = 100  # of an input that is not an index: from its negative to less than this
_BINADES = (-6.0, 5.0)  # of wide numbers


@dataclass(frozen=True)
class Wanted:
    """An input.

    Attributes:
        shape: in the model's order of axes.
        dtype: by our names.
        below: what integers must be less than; None: they may be negative, too.
        like: a real input, whose least and largest number bound integers.
        value: what it is, if it decides a shape: see `settings`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None
    like: Array | None = None
    value: Array | None = None


def drawn(inputs: Sequence[Wanted], kind: str, seed: int, *, small: bool = False) -> dict[str, Array]:
    """Numbers that the dtypes of the inputs hold exactly; float64 stands for dtypes that NumPy lacks.

    Args:
        kind: usual: normal numbers; wide: of many magnitudes, so that bounds and saturations are reached.
        small: integers are 0 or 1.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    return {each.name: _one(each, kind, rng, small) for each in inputs}


def _one(each: Wanted, kind: str, rng: np.random.Generator, small: bool) -> Array:
    row = dtype(each.dtype)
    if each.value is not None:
        return each.value
    if row.is_float:
        numbers = rng.standard_normal(each.shape)
        if kind == "wide":
            numbers = numbers * 2.0 ** rng.uniform(*_BINADES, each.shape)
        return decode(encode(np.asarray(numbers, np.float32), each.dtype), each.dtype)
    storage = np.dtype(row.storage)
    if row.name == "bool" or storage.kind == "b":
        return rng.integers(0, 2, each.shape).astype(storage)
    limits = np.iinfo(storage)
    low, high = max(limits.min, -_INTEGERS), min(limits.max, _INTEGERS - 1)
    if storage.itemsize == 1:
        low, high = limits.min, limits.max
    if each.like is not None and each.like.size:
        low, high = int(each.like.min()), int(each.like.max())
    if each.below is not None:
        low, high = 0, max(0, min(each.below - 1, limits.max))
    if small:
        low, high = 0, min(1, high)
    return rng.integers(low, high, each.shape, endpoint=True).astype(storage)


def stored(array: Array, name: str) -> Array:
    """An array in a dtype, as callers of a network give it.

    Args:
        name: of the dtype, by our names.
    """
    row = dtype(name)
    held = np.ascontiguousarray(encode(array, name)).reshape(np.shape(array))
    if row.storage == row.library:
        return held
    import ml_dtypes

    return held.view(getattr(ml_dtypes, row.library))


def plain(array: Any) -> Array:
    """An array that a network returned, as numbers that NumPy can reckon with."""
    found = np.asarray(array)
    return found.astype(np.float32) if found.dtype.name in ("float16", "bfloat16") else found


def shaped(values: Mapping[str, Array]) -> str:
    """Names and shapes, for messages."""
    return ", ".join(f"{name} {list(each.shape)}" for name, each in values.items())
