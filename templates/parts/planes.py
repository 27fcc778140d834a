"""Planes of an image in NCHW as a block stages them: contiguous, one after the other, copied as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, u32, u64

VECTOR_BYTES = 16  # of a copy


def least_planes(plane_elements: int, nbytes: int) -> int:
    """The least number of planes, of elements of `nbytes`, that fill whole vectors of 16 bytes."""
    return VECTOR_BYTES // math.gcd(VECTOR_BYTES, plane_elements * nbytes)


def copy_in_of(threads: int) -> Callable[..., None]:
    """`copy_in(shared, address, planes, thread, plane_bytes)`: asynchronous copies of the block's first `planes` planes."""
    copy = ptx.cp_async(VECTOR_BYTES)

    def copy_in(shared: Any, address: Any, planes: Any, thread: Any, plane_bytes: Any) -> None:
        total = i32(planes * plane_bytes)
        for chunk in range(i32(thread * VECTOR_BYTES), total, i32(threads * VECTOR_BYTES)):
            nbytes = i32(min(i32(VECTOR_BYTES), i32(total - chunk)))
            copy(u32(shared + chunk), u64(address + u64(chunk)), nbytes)

    return copy_in
