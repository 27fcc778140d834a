"""Stores into slices: where an element of a dense y lies if y is a slice of a larger array (`ArgSpec.slice_of`).

A kernel that counts the elements of y as if y were an array of its own asks `place_of` for the place of an element, once
for each vector that it stores. A vector must not cross a run: its length divides `vector_limits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from schedsearch.ops import ArgSpec


def vector_limits(y: ArgSpec) -> tuple[int, int]:
    """What the length of a vector of neighbours must divide: a run of y, and the step to the next one."""
    return y.runs


def place_of(y: ArgSpec) -> Callable[[Any], Any]:
    """`place(flat)` for kernels: elements from the slice's first one to the one with the flat index in a dense y."""
    run, step = y.runs
    gap = step - run
    position = types.uint32 if y.size < 2**32 else types.uint64

    def own(flat: Any) -> Any:
        return flat

    def in_slice(flat: Any) -> Any:
        return types.int64(flat) + types.int64(position(flat) // position(run)) * gap

    return own if run == y.size else in_slice
