"""When a value of a network is that of its model, as far as dtypes and the order of sums allow.

The model is computed as it is, and several times with errors as large as dtypes and sums may make (`source`). How far these
noisy values are from the model's says how far the network may be:

- An element may differ by `FACTOR` times its own largest noise, or the noise of its channel in the root mean square: the
  chance that all noisy runs are near the model's number at one element does not count then.
- A step at a rounding, a comparison or a choice makes few elements differ by much. As many elements as in a noisy run, times
  `FACTOR`, may differ by more, up to twice the largest noise of any element; integers up to the largest, or one step.
- Where noise turns a number into an infinity or NaN, or the other way round, or changes the shape, the model does not say
  what is right. Nor does it where ONNX leaves the result open (`unspecified`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.network.formats import narrow
from schedsearch.typed import Array

FACTOR = 8.0
_LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}  # numbers below may become 0
_CHANNEL_ELEMENTS = 64  # of a channel at least, for noise of its own
_LARGEST = 2.0  # times the largest noise of any element: a difference at a step
_STRAY = 1e-5  # of the elements may be at a step that no noisy run took
_GROSS = 8.0  # times what a difference may be
_GROSS_SHARE = 2.0**-10  # of the largest magnitude
_PIECE = 1 << 21  # elements that are compared at a time


@dataclass(frozen=True)
class Difference:
    """The element that differs most, against what it may.

    Attributes:
        found, right: numbers of the network and of the model; shapes, if these differ.
        bound: that their difference may have.
        count, of: elements that differ by more, and all.
        largest: finite magnitude in the model's value.
    """

    index: tuple[int, ...]
    found: Any
    right: Any
    bound: float
    count: int
    of: int
    largest: float = 0.0

    @property
    def is_gross(self) -> bool:
        """Whether neither a few times the model's noise explains it, nor a few steps of integers."""
        if isinstance(self.found, tuple):
            return True
        error = float(distance(np.asarray(self.found), np.asarray(self.right)))
        step = 1.0 if isinstance(self.right, int) else 0.0
        return error > max(_GROSS * max(self.bound, step), _GROSS_SHARE * self.largest)

    def text(self, ours: str, theirs: str) -> str:
        """In words.

        Args:
            ours, theirs: who has `found` and who has `right`.
        """
        if isinstance(self.found, tuple):
            return f"shape {list(self.found)} in {ours}, {list(self.right)} in {theirs}"
        others = f"; {self.count} of {self.of} elements differ" if self.of > 1 else ""
        return (
            f"element {list(self.index)} is {self.found:.9g} in {ours} and {self.right:.9g} in {theirs}, and may differ by "
            f"{self.bound:.2g}{others}"
        )


def difference(
    found: Array,
    right: Array,
    noisy: Sequence[Array],
    *,
    dtype: str = "float32",
    without_nan: bool = False,
    unspecified: Array | None = None,
) -> Difference | None:
    """Where a value of the network is not the model's.

    Args:
        right, noisy: the model's value, and with noise.
        dtype: the dtype of `found`.
        without_nan: elements that are NaN on either side are not compared.
        unspecified: which elements of `right` are not compared, as ONNX does not say what they are; bool.
    """
    if found.dtype == np.float64 and right.dtype == np.float32:  # a constant of a model that is evaluated in float32
        found = narrow(found)
    if right.ndim == 0 and found.size == 1:
        found = found.reshape(())
    if any(each.shape != right.shape for each in noisy):
        return None
    if found.shape != right.shape:
        return Difference((), found.shape, right.shape, 0.0, 0, right.size)
    if right.size == 0 or right.dtype.kind not in "fiub":
        return None
    exact = right.dtype.kind in "iub" and found.dtype.kind in "iub"
    shape = right.shape
    flat_found, flat_right = found.reshape(-1), right.reshape(-1)
    flat_noisy = [each.reshape(-1) for each in noisy]
    specified = np.ones(right.size, bool) if unspecified is None else ~unspecified.reshape(-1)
    noise, decided, channels = _noise(flat_right, flat_noisy, shape, specified)
    least = FACTOR * _LEAST.get(dtype, 0.0)
    most = float(noise.max(initial=0.0))
    counts_beyond = [0] * len(noisy)
    soft_count, worst, worst_at, worst_bound, hard = 0, -1.0, 0, 0.0, 0
    for start in range(0, right.size, _PIECE):
        cut = slice(start, start + _PIECE)
        a, b = flat_found[cut], flat_right[cut]
        error = distance(a, b)
        pooled = channels[_channels(shape, start, len(b))]
        bound = FACTOR * np.maximum(noise[cut], pooled) + least
        skip = ~decided[cut]
        if without_nan:
            skip |= np.isnan(a.astype(np.float64)) | np.isnan(b.astype(np.float64))
        error[skip] = 0.0
        beyond = error > bound
        soft_count += int(beyond.sum())
        limit = max(most, 1.0) if exact else _LARGEST * most + least
        hard += int((error > np.maximum(bound, limit)).sum())
        for number, each in enumerate(flat_noisy):
            counts_beyond[number] += int(((distance(each[cut], b) > FACTOR * pooled + least) & specified[cut]).sum())
        if beyond.any():
            with np.errstate(over="ignore"):  # an integer that may not differ at all
                excess = np.where(beyond, error / np.maximum(bound, 1e-300), 0.0)
            place = int(np.argmax(excess))
            if excess[place] > worst:
                worst, worst_at, worst_bound = float(excess[place]), start + place, float(bound[place])
    allowed = FACTOR * max(counts_beyond, default=0) + _STRAY * right.size
    if not hard and soft_count <= allowed:
        return None
    index = tuple(int(each) for each in np.unravel_index(worst_at, shape)) if shape else ()
    largest = max((_largest(flat_right[start : start + _PIECE]) for start in range(0, right.size, _PIECE)), default=0.0)
    numbers = flat_found[worst_at].item(), flat_right[worst_at].item()
    return Difference(index, *numbers, worst_bound, soft_count, right.size, largest)


def _largest(numbers: Array) -> float:
    """The largest finite magnitude."""
    wide = np.abs(numbers.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def surely_equal(found: Array, right: Array, roundoff: float = 0.0, noisy: Array | None = None) -> bool:
    """Whether `difference` finds none, whatever larger errors the noisy runs have. That follows from one of them, or without
    any: each is wrong by a unit roundoff of the dtype at least, in every element, so that no channel has less noise than
    that of its root mean square.

    Args:
        roundoff: of the value's dtype, as the noisy runs have it.
        noisy: the value in one noisy run; `roundoff` is not used then.
    """
    if found.shape != right.shape:
        return False
    if right.dtype.kind in "iub" and found.dtype.kind in "iub":
        return bool(np.array_equal(found, right))
    if right.dtype.kind != "f" or found.dtype.kind != "f" or (noisy is not None and noisy.shape != right.shape):
        return False
    channels = _channels_of(right.shape)
    shape = (right.shape[0] if channels > 1 else 1), channels, -1
    a, b = found.reshape(shape), right.reshape(shape)
    if not b.size:
        return True
    with np.errstate(invalid="ignore", over="ignore"):
        noise = b if noisy is None else np.abs(noisy.reshape(shape) - b)
        pooled = np.sqrt(np.mean(np.square(noise), axis=(0, 2), keepdims=True, dtype=np.float64))
        bound = FACTOR * (roundoff * pooled if noisy is None else np.maximum(pooled, noise))
        return bool(np.isfinite(bound).all() and (np.abs(a - b) <= bound).all())


def _noise(right: Array, noisy: Sequence[Array], shape: tuple[int, ...], specified: Array) -> tuple[Array, Array, Array]:
    """The largest noise of each element, which of those that are specified are decided, and the noise of each channel."""
    noise, decided = np.zeros(right.size, np.float64 if right.size < _PIECE else np.float32), specified.copy()
    channels = _channels_of(shape)
    sums, sizes = np.zeros(channels), np.zeros(channels)
    for start in range(0, right.size, _PIECE):
        cut = slice(start, start + _PIECE)
        place = _channels(shape, start, len(right[cut]))
        for each in noisy:
            apart = distance(each[cut], right[cut])
            undecided = np.isinf(apart) | ~specified[cut]
            decided[cut] &= ~undecided
            apart[undecided] = 0.0
            np.maximum(noise[cut], apart, out=noise[cut], casting="same_kind")
        near = noise[cut].astype(np.float64)
        finite = decided[cut]
        sums += np.bincount(place[finite], near[finite] ** 2, channels)
        sizes += np.bincount(place[finite], minlength=channels)
    return noise, decided, np.sqrt(sums / np.maximum(sizes, 1))


def distance(a: Array, b: Array) -> Array:
    """How far numbers are apart: 0 where both are the same infinity or NaN, infinity where only one is."""
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        x, y = a.astype(np.float64), b.astype(np.float64)
        return np.where(a == b, 0.0, np.abs(x - y))
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.abs(x - y)
    found = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, found)
    return np.where(np.isnan(found), np.inf, found)


def _channels_of(shape: tuple[int, ...]) -> int:
    """Along axis 1, if channels are large."""
    if len(shape) < 3 or int(np.prod(shape)) // max(shape[1], 1) < _CHANNEL_ELEMENTS:
        return 1
    return shape[1]


def _channels(shape: tuple[int, ...], start: int, count: int) -> Array:
    """The channel of each of these elements."""
    channels = _channels_of(shape)
    if channels == 1:
        return np.zeros(count, np.intp)
    inner = int(np.prod(shape[2:]))
    return (np.arange(start, start + count) // inner) % channels
