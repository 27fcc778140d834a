"""Arrays whose extents only the device knows: a buffer of the largest possible extents, and how much of it counts.

An output that is bounded so has its largest extents, and a second output, int64 with a number for each axis, holds the
extents in use. What lies beyond them is not specified. An argument that is bounded has such an array beside it, named
`NAME_extents`, which kernels read from the device's memory. Extents beyond the buffer's say that the bound was too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from schedsearch.ops.params import Parameter
from schedsearch.ops.specs import ArgSpec

DYNAMIC = Parameter(
    "how much of the first axis is in use is read from memory at run time; default false",
    {"type": "boolean", "default": False},
)


def extents_of(argument: str) -> str:
    """The name of the array with the extents of an argument or output."""
    return f"{argument}_extents"


def count_argument(argument: ArgSpec) -> ArgSpec:
    """The extents of an argument of which the first axis is bounded; kernels read the first of them only."""
    return ArgSpec(
        extents_of(argument.name), "A", (len(argument.shape),), "int64", role="index", below=argument.shape[0] + 1
    )


def extents_argument(argument: ArgSpec) -> ArgSpec:
    """The extents of an argument of which every axis is bounded."""
    rank = len(argument.shape)
    return ArgSpec(extents_of(argument.name), "A", (rank,), "int64", role="index", below=min(argument.shape) + 1)


def bounded(output: ArgSpec) -> tuple[ArgSpec, ArgSpec]:
    """An output of its largest extents, and the extents in use."""
    name = extents_of(output.name)
    return replace(output, extents=name), ArgSpec(name, "A", (len(output.shape),), "int64")


def in_use(shape: Sequence[int], extents: Iterable[int]) -> tuple[slice, ...]:
    """The part of a bounded array that counts."""
    return tuple(slice(0, max(0, min(int(used), most))) for used, most in zip(extents, shape, strict=True))
