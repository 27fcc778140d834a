"""Sizes that the kernels of conv2d can count."""

from __future__ import annotations

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.workload import Workload

LARGEST_SIZE = 2**30  # of one axis: coordinates, and sums of two of them, stay within int32


def size_problem(workload: Workload[Conv2dParams], **further: int) -> str | None:
    """The first size that is too large for 32-bit coordinates (one sentence: what, got, allowed), or None.

    Args:
        further: more sizes than those of the axes and of the reduction, by name; spaces for underscores.
    """
    w = workload.params
    top, left, bottom, right = w.padding
    sizes = {
        "n": w.n,
        "padded h": w.h + top + bottom,
        "padded w": w.w + left + right,
        "k": w.k,
        "c": w.c,
        "r*s*c": w.r * w.s * w.c // w.groups,
        **{name.replace("_", " "): size for name, size in further.items()},
    }
    for name, size in sizes.items():
        if size >= LARGEST_SIZE:
            return f"{name} is {size}; allowed: less than 2**30, coordinates have 32 bits"
    return None
