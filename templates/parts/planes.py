"""Planes of an image in NCHW as a block stages them: contiguous, one after the other, copied as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import types

from schedsearch.templates.parts import ptx

VECTOR_BYTES = 16  # of a copy


def least_planes(plane_elements: int, nbytes: int) -> int:
    """The least number of planes, of elements of `nbytes`, that fill whole vectors of 16 bytes."""
    return VECTOR_BYTES // math.gcd(VECTOR_BYTES, plane_elements * nbytes)


def copy_in_of(threads: int) -> Callable[..., None]:
    """`copy_in(shared, address, planes, thread, plane_bytes)`: asynchronous copies of the block's first `planes` planes."""
    copy = ptx.cp_async(VECTOR_BYTES)

    def copy_in(shared: Any, address: Any, planes: Any, thread: Any, plane_bytes: Any) -> None:
        total = types.int32(planes * plane_bytes)
        for chunk in range(types.int32(thread * VECTOR_BYTES), total, types.int32(threads * VECTOR_BYTES)):
            nbytes = types.int32(min(types.int32(VECTOR_BYTES), types.int32(total - chunk)))
            copy(types.uint32(shared + chunk), types.uint64(address + types.uint64(chunk)), nbytes)

    return copy_in
