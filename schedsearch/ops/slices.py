"""Outputs that are slices of larger arrays: the parameter `slice_of` of operators with one output y, whatever they compute.

An operator adds `SLICE_OF` to its parameters, asks `slice_problems`, and passes its output through `sliced`. Its kernels
take the strides of y from its specification, or move places in a dense y with `schedsearch.templates.parts.slices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedsearch.errors import Problem
from schedsearch.ops.params import MAX_INT, Parameter
from schedsearch.ops.specs import ArgSpec
from schedsearch.typed import GivenParams

SLICE_OF = Parameter(
    "extents in memory of a larger array of which y is a slice along one axis; default: y is an array of its own",
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INT}, "default": []},
)


def sliced(y: ArgSpec, params: GivenParams) -> ArgSpec:
    """The output as a slice of the array that `params` name, if they name one."""
    return replace(y, slice_of=tuple(params["slice_of"])) if params.get("slice_of") else y


def slice_problems(y: ArgSpec, slice_of: Sequence[int]) -> list[Problem]:
    """An array that y, an array of its own, cannot be a slice of."""
    got = "x".join(map(str, slice_of))
    own = "x".join(map(str, y.shape))
    if not slice_of:
        return []
    if len(slice_of) != len(y.shape) or any(whole < n for n, whole in zip(y.shape, slice_of)):
        return [Problem("slice_of", f"slice_of is {got}, but y is {own}; allowed: as many extents, none of them smaller")]
    if sum(whole != n for n, whole in zip(y.shape, slice_of)) > 1:
        return [Problem("slice_of", f"slice_of is {got}, but y is {own}; they may differ along one axis only")]
    return []


def slice_words(params: GivenParams) -> list[str]:
    """For labels."""
    return [f"into {'x'.join(map(str, params['slice_of']))}"] if params.get("slice_of") else []


def without_own_shape(y: ArgSpec, slice_of: Sequence[int]) -> tuple[int, ...]:
    """`slice_of`, or () if it is y's own shape, so that equal workloads have equal ids."""
    return () if tuple(slice_of) == y.shape else tuple(slice_of)
