"""Stores into slices: where an element of a dense y lies if y is a slice of a larger array (`ArgSpec.slice_of`).

A kernel that counts the elements of y as if y were an array of its own asks `place_of` for the place of an element, once
for each vector that it stores. A vector must not cross a run: its length divides `vector_limits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops import ArgSpec
from schedsearch.templates.parts.casts import i64, u32, u64


def vector_limits(y: ArgSpec) -> tuple[int, int]:
    """What the length of a vector of neighbours must divide: a run of y, and the step to the next one."""
    return y.runs


def place_of(y: ArgSpec) -> Callable[[Any], Any]:
    """`place(flat)` for kernels: elements from the slice's first one to the one with the flat index in a dense y."""
    run, step = y.runs
    gap = step - run
    position = u32 if y.size < 2**32 else u64

    def own(flat: Any) -> Any:
        return flat

    def in_slice(flat: Any) -> Any:
        return i64(flat) + i64(position(flat) // position(run)) * gap

    return own if run == y.size else in_slice
