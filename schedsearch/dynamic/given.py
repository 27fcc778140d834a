"""Arrays of a caller, looked at quickly: one like an array that passed all checks only gives its address.

NumPy's arrays and PyTorch's tensors take less than a microsecond, others what `schedsearch.runtime.arrays` takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from schedsearch.ops import ArgSpec
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.runtime import arrays
from schedsearch.runtime.repeated import address_of, facts_of

Make = Callable[[Sequence[int]], tuple[Any, int]]


def look(array: object, name: str) -> tuple[Hashable, int]:
    """What two arrays have in common if the same checks hold for both, and the address.

    Args:
        name: of the argument, for messages.

    Raises:
        ArgumentError: it is not an array, or it is on a device that no kernel runs on.
    """
    facts = facts_of(array)
    if facts is not None:
        address = address_of(array)
        return (facts, address != 0), address
    seen = arrays.view(array, name)
    return (type(array), seen.shape, seen.strides, seen.dtype, seen.device, seen.library, seen.address != 0), seen.address


def maker(array: Any, seen: arrays.ArrayView, name: str, dtype: str) -> Make:
    """A function from a shape to a new contiguous array like `array`, and its address.

    Args:
        name: of the output, for messages.
    """
    stored = dtype_of(dtype).library
    if seen.library == "torch":
        torch = sys.modules["torch"]
        empty, form, device = torch.empty, getattr(torch, stored), array.device

        def of_torch(shape: Sequence[int]) -> tuple[Any, int]:
            made = empty(shape, dtype=form, device=device)
            return made, made.data_ptr()

        return of_torch

    def of_library(shape: Sequence[int]) -> tuple[Any, int]:
        spec = ArgSpec(name, AXES[: len(shape)], tuple(shape), dtype)
        made = arrays.empty_like(array, seen, spec, arrays.forms(spec)[0])
        return made, arrays.view(made, name).address

    if seen.library != "numpy" or not hasattr(np, stored):  # other dtypes are not NumPy's own
        return of_library
    own = np.dtype(stored)

    def of_numpy(shape: Sequence[int]) -> tuple[Any, int]:
        made = np.empty(shape, own)
        return made, made.__array_interface__["data"][0]

    return of_numpy
