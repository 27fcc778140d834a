"""Fourier transforms as products with constant tables of cosines and sines.

A DFT is a matrix product. An STFT is a convolution over time, whose filters are the window times a cosine or a sine: one
kernel reads overlapping frames in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, constant_of, dtype_of
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_MOST_BYTES = 1 << 26  # of a table; longer transforms are faster by other ways


def _table(length: int, bins: int, parts: int, *, inverse: bool = False) -> Array:
    """(number, part, bin, part): what a part of a number of the signal, real or imaginary, adds to a part of a bin."""
    turns = np.outer(np.arange(length), np.arange(bins)) % length / length
    cos, sin = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns) * (-1 if inverse else 1)
    found = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)[:, :parts]
    return found / length if inverse else found


def _table_of_half(length: int) -> Array:
    """(bin, part, number, 1): what a part of a bin of one half of a spectrum adds to a number of the real signal.

    Each bin stands for its conjugate in the other half, too, but for the first and, of an even length, the last one. The
    imaginary parts of these two count for nothing.
    """
    bins = length // 2 + 1
    counted = np.full(bins, 2.0)
    counted[0] = 1
    if length % 2 == 0:
        counted[-1] = 1
    turns = np.outer(np.arange(bins), np.arange(length)) % length / length
    parts = np.stack([np.cos(2 * np.pi * turns), np.where(counted[:, None] == 1, 0, -np.sin(2 * np.pi * turns))], 1)
    found: Array = (parts * counted[:, None, None] / length)[..., None]
    return found


def _problem(x: ir.Value, length: int, bins: int) -> str | None:
    shape = shape_of(x)
    if dtype_of(x) not in FLOATS:
        return f"reads {dtype_of(x)}; allowed: {', '.join(FLOATS)}"
    if length < 1 or shape[-1] not in (1, 2):
        return f"transforms {length} numbers of {shape}; allowed: at least one, and an array whose last extent is 1 or 2"
    if (nbytes := 8 * length * shape[-1] * bins) > _MOST_BYTES:
        return f"needs a table of {nbytes:,} bytes; allowed: up to {_MOST_BYTES:,}"
    return None


def _number(c: Composition, place: int, default: int | None) -> int | None:
    """An input that is one integer; None if it is computed, or missing without a default."""
    value = c.input(place)
    if value is None:
        return default
    array = constant_of(value)
    return None if array is None or array.size != 1 else int(array.reshape(()))


def _dft(c: Composition) -> str | None:
    x, read = c.needed(0), c.node.attributes
    shape = shape_of(x)
    rank = len(shape)
    by_input = c.model.opset_imports.get("", 17) >= 20
    axis = _number(c, 2, -2) if by_input else read.get_int("axis", 1)
    if axis is None or not -rank <= axis < rank or axis % rank == rank - 1:
        return "has an axis that is computed or is the last one; allowed: a constant, another axis"
    axis %= rank
    inverse, onesided = bool(read.get_int("inverse", 0)), bool(read.get_int("onesided", 0))
    of_half = inverse and onesided
    length = _number(c, 1, 2 * (shape[axis] - 1) if of_half else shape[axis])
    if length is None:
        return "has a length that is computed; allowed: a constant"
    if of_half and shape[-1] != 2:
        return f"is the inverse of one half of a spectrum of {shape}; allowed: an array whose last extent is 2"
    half = length // 2 + 1
    bins = half if onesided and not inverse else length
    if problem := _problem(x, length, bins):
        return problem
    used = min(half if of_half else length, shape[axis])  # others are zeros, or cut off
    x = c.slice(x, axis, 0, used)
    order = [*(each for each in range(rank - 1) if each != axis), axis, rank - 1]
    x = c.transpose(x, order)
    outer, parts = shape_of(x)[:-2], shape[-1]
    table = _table_of_half(length) if of_half else _table(length, bins, parts, inverse=inverse)
    made = table.shape[-1]
    table = table[:used].reshape(used * parts, bins * made)
    rows = c.reshape(x, [math.prod(outer), used * parts])
    y = c.reshape(c.matmul(rows, c.constant(table, x)), [*outer, bins, made])
    c.finish(c.transpose(y, [order.index(each) for each in range(rank)]))
    return None


def _stft(c: Composition) -> str | None:
    signal, step = c.needed(0), _number(c, 1, None)
    shape, window = shape_of(signal), c.input(2)
    weights = None if window is None else constant_of(window)
    length = _number(c, 3, None if weights is None else weights.size)
    if step is None or length is None or step < 1 or (window is not None and weights is None):
        return "has a step, a window or a length that is computed; allowed: constants"
    onesided = bool(c.node.attributes.get_int("onesided", 1))
    bins = length // 2 + 1 if onesided else length
    n, samples = shape[:2]
    signal = c.reshape(signal, [n, samples, shape[2] if len(shape) > 2 else 1])
    if problem := _problem(signal, length, bins):
        return problem
    parts = shape_of(signal)[2]
    if samples < length or (weights is not None and weights.size != length):
        return (
            f"has frames of {length} samples of {samples}; allowed: as many as the window has, and no more than the signal"
        )
    table = _table(length, bins, parts)
    if weights is not None:
        table = table * weights.reshape(-1, 1, 1, 1).astype(np.float64)
    filters = table.transpose(2, 3, 1, 0).reshape(2 * bins, parts, 1, length)
    image = c.reshape(c.transpose(signal, [0, 2, 1]), [n, parts, 1, samples])
    frames = (samples - length) // step + 1
    y = c.add("Conv", [image, c.constant(filters, signal)], [n, 2 * bins, 1, frames], strides=[1, step])
    c.finish(c.reshape(c.transpose(y, [0, 2, 3, 1]), [n, frames, bins, 2]))
    return None


REWRITTEN: Mapping[str, Rewrite] = {"DFT": rewrite(_dft), "STFT": rewrite(_stft)}
