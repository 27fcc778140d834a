"""A function for each built-in operator that makes a workload: parameters as keywords, their defaults, what they mean.

They are above `Workload`, and operators are below it. `schedsearch` offers them by name. Nothing that decides what a
parameter means or which values are possible belongs here: that is the operator's. Keywords that several operators share
are typed once, in the classes here; a function takes them as `**options`. None stands for the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar

from schedsearch.ops.base import Op
from schedsearch.ops.epilogues import Epilogue
from schedsearch.ops.stages import Stage
from schedsearch.workload import Workload

P = TypeVar("P", bound=Mapping[str, object])
Stages = Epilogue[bool] | Sequence[str | Stage | Mapping[str, Mapping[str, object]]]


class WindowOptions(TypedDict, total=False):
    """Of a window that slides over an image; see `conv2d`."""

    stride: int | Sequence[int]
    padding: int | Sequence[int]
    dilation: int | Sequence[int]


class FactorOptions(TypedDict, total=False):
    """Of two factors and what becomes of their sums; see `conv2d`."""

    dtype: str
    weight_dtype: str | None
    zero_points: Sequence[str]
    epilogue: Stages


class ProductOptions(FactorOptions, total=False):
    """Of sums of any format; see `conv2d`."""

    out_dtype: str | None
    precision: str


class SliceOptions(TypedDict, total=False):
    """Of arrays that are copied; see `transpose`."""

    dtype: str
    slice_of: Sequence[int]


class ImageOptions(SliceOptions, total=False):
    """Of images; see `pool2d`."""

    layout: str


class BlockOptions(ImageOptions, total=False):
    """Of blocks of pixels; see `depth_to_space`."""

    mode: str


class ResizeOptions(TypedDict, total=False):
    """Of images that change their size; see `resize`."""

    mode: str
    coordinates: str
    rounding: str
    scale: Sequence[float]
    dtype: str
    layout: str


class LookupOptions(TypedDict, total=False):
    """Of arrays that indices choose from; see `gather` and `scatter`."""

    axis: int
    by: str
    dtype: str
    index_dtype: str
    dynamic: bool
    dynamic_x: bool


def made(op: Op[P], given: Mapping[str, object]) -> Workload[P]:
    """The workload with these parameters. None stands for a default that depends on others.

    Args:
        given: the local variables of a constructor; those in `options` count as its own.
    """
    options = given.get("options", {})
    assert isinstance(options, Mapping)
    flat = {**{name: value for name, value in given.items() if name != "options"}, **options}
    return Workload(op.name, {name: _plain(value) for name, value in flat.items() if value is not None})


def _plain(value: object) -> object:
    """Sequences of other libraries, such as arrays, as tuples."""
    if isinstance(value, Iterable) and not isinstance(value, str | list | tuple | Mapping):
        return tuple(value)
    return value
