"""Integers that callers give, of any library: strides, paddings, factors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from schedsearch.errors import ArgumentError, did_you_mean

Pair = int | Sequence[int]
_LISTS = list, tuple
_LARGEST_FACTOR = 1 << 15  # of a pixel shuffle


def whole_window(
    weight: torch.Tensor, stride: Pair, padding: Pair | str, dilation: Pair
) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation in full."""
    strides, dilations = _pair("stride", stride), _pair("dilation", dilation)
    if isinstance(padding, str):
        if padding not in ("valid", "same"):
            hint = did_you_mean(padding, ("valid", "same"))
            raise ArgumentError(f"padding is {padding!r}{hint}; allowed: numbers, 'valid' or 'same'")
        if padding == "same" and strides != [1, 1]:
            raise ArgumentError(f"padding 'same' needs stride 1, got {strides}")
        if weight.dim() != 4:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}; allowed: four axes (k, c / groups, r, s)")
        whole = [0, 0] if padding == "valid" else [dilations[i] * (weight.shape[2 + i] - 1) for i in (0, 1)]
        pads = [whole[0] // 2, whole[1] // 2, whole[0] - whole[0] // 2, whole[1] - whole[1] // 2]
    else:
        numbers = _numbers_of("padding", padding)
        pads = numbers * 2 if len(numbers) == 2 else numbers
        if len(pads) != 4:
            raise ArgumentError(
                f"padding is {padding!r}; allowed: one integer, (vertical, horizontal) or (top, left, bottom, right)"
            )
    return strides, pads, dilations


def _pair(name: str, value: Pair) -> list[int]:
    found = _numbers_of(name, value)
    if len(found) != 2:
        raise ArgumentError(f"{name} is {value!r}; allowed: one integer or two, (vertical, horizontal)")
    return found


def _numbers_of(name: str, value: object) -> list[int]:
    """One number twice, or a sequence of numbers as a list."""
    found = list(value) if isinstance(value, _LISTS) else [value, value]
    try:
        return [_index(each) for each in found]
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; allowed: integers, e.g. {name}=1 or {name}=(1, 1)") from None


def _index(value: Any) -> Any:
    """An integer of any library as Python's, or a symbolic one. Raises TypeError for other values."""
    if isinstance(value, torch.SymInt) or type(value) is int:
        return value
    return operator.index(value)


def whole(name: str, value: Any) -> int:
    try:
        found: int = _index(value)
        return found
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; allowed: an integer") from None


def shuffle_factor(name: str, value: object) -> int:
    """The factor of a pixel shuffle."""
    factor = whole(name, value)
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise ArgumentError(f"{name} is {value!r}; allowed: an integer from 1 to {_LARGEST_FACTOR}")
    return factor
