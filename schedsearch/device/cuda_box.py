"""Boxes as three-dimensional copies of CUDA: a contiguous array to the first places of a larger one.

`cuMemcpy3DAsync` copies planes of rows. Most boxes are one such copy: an axis whose extent is that of the larger array
merges with the axis before it.

Source: CUDA Driver API, "Memory Management", CUDA_MEMCPY3D.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

MOST_PITCH = 2**31 - 1  # bytes from row to row; CU_DEVICE_ATTRIBUTE_MAX_PITCH of all devices
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_SIDE = (
    ("x_bytes", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("z", ctypes.c_size_t),
    ("lod", ctypes.c_size_t),
    ("memory_type", ctypes.c_uint),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("reserved", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
    ("height", ctypes.c_size_t),
)


class Memcpy3d(ctypes.Structure):
    """CUDA_MEMCPY3D_v2 of the driver API."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"to_{name}", kind) for name, kind in _SIDE),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class Part:
    """One copy of `depth` planes of `height` rows of `width` bytes, which follow one another in the source.

    Attributes:
        to: byte of the larger array where the first row begins.
        source: byte of the contiguous array where it begins.
        pitch: bytes from row to row of the larger array.
        rows: pitches from plane to plane.
    """

    to: int
    source: int
    width: int
    height: int = 1
    depth: int = 1
    pitch: int = 0
    rows: int = 1


def parts(extents: tuple[int, ...], bound: tuple[int, ...], element_bytes: int) -> list[Part]:
    """The copies of a contiguous array of shape `extents` to the places [0:e0, 0:e1, ...] of one of shape `bound`."""
    if 0 in extents:
        return []
    axes = [(element_bytes, 1)]  # from the last one: how many, and bytes from one to the next in the larger array
    step = element_bytes
    for count, most in zip(reversed(extents), reversed(bound)):
        inner, inner_step = axes[-1]
        if count > 1 and step == inner * inner_step:
            axes[-1] = (count * inner, inner_step)
        elif count > 1:
            axes.append((count, step))
        step *= most
    width, rows = axes[0][0], axes[1:]
    if not rows:
        return [Part(0, 0, width)]
    planes = min(len(rows), 2) if rows[0][1] <= MOST_PITCH else 0
    height, pitch = rows[0] if planes else (1, width)
    depth, plane = rows[1] if planes == 2 else (1, pitch * height)
    places = itertools.product(*(range(0, count * step, step) for count, step in reversed(rows[planes:])))
    nbytes = width * height * depth
    return [
        Part(sum(place), number * nbytes, width, height, depth, pitch, plane // pitch) for number, place in enumerate(places)
    ]


@functools.lru_cache(maxsize=1024)
def copies(
    extents: tuple[int, ...], bound: tuple[int, ...], element_bytes: int
) -> tuple[tuple[int, int, int, bytes | None], ...]:
    """What `cuMemcpy3DAsync_v2` gets: bytes to add to both addresses, bytes to copy, and a Memcpy3d without addresses.

    The last is None if the bytes follow one another in both arrays.
    """
    found = []
    for part in parts(extents, bound, element_bytes):
        nbytes = part.width * part.height * part.depth
        packed = None
        if part.height > 1:
            packed = bytes(
                Memcpy3d(
                    source_memory_type=_DEVICE, source_pitch=part.width, source_height=part.height,
                    to_memory_type=_DEVICE, to_pitch=part.pitch, to_height=part.rows,
                    width_bytes=part.width, height=part.height, depth=part.depth,
                )
            )  # fmt: skip
        found.append((part.to, part.source, nbytes, packed))
    return tuple(found)
