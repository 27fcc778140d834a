"""Operators that choose elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from schedsearch.constructors import LookupOptions, made
from schedsearch.ops.gather import GATHER, GatherParams
from schedsearch.ops.nonzero import NONZERO, NonZeroParams
from schedsearch.ops.scatter import SCATTER, ScatterParams
from schedsearch.ops.topk import TOPK, TopKParams
from schedsearch.ops.unique import UNIQUE, UniqueParams
from schedsearch.workload import Workload


def gather(
    *, x: Sequence[int], indices: Sequence[int], batch_dims: int = 0, **options: Unpack[LookupOptions]
) -> Workload[GatherParams]:
    """Elements of x that indices choose.

    Args:
        x: extents of x.
        indices: extents of indices. Of tuples, the last one is the length of a tuple.
        axis: of slices and elements: what indices count along; default: 0.
        by: "slices", the default, "elements" or "tuples", as ONNX's Gather, GatherElements and GatherND.
        batch_dims: of tuples: leading axes that x and indices have in common.
        dtype: of x and y: any format; default: float16.
        index_dtype: int64, the default, or int32.
        dynamic: the extents of indices are read from a further argument, `indices_extents`, when the kernel runs, and
            `indices` are their upper bounds; default: false.
        dynamic_x: those of x are read from `x_extents`. With either of both, a second output `y_extents` says how much of y
            is in use. Extents are int64, one for each axis.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> gather(x=(1000, 256), indices=(8, 32)).output.shape
        (8, 32, 256)
    """
    return made(GATHER, locals())


def scatter(
    *, x: Sequence[int], indices: Sequence[int], reduction: str = "none", **options: Unpack[LookupOptions]
) -> Workload[ScatterParams]:
    """x with some elements replaced by updates, or combined with them.

    Args:
        x: extents of x and y.
        indices: extents of indices. Of tuples, the last one is the length of a tuple.
        by: "elements", the default, or "tuples", as ONNX's ScatterElements and ScatterND.
        reduction: "none", "add", "max" or "min".
        dtype: of x, updates and y: any format, float32 by default; with a reduction float32, float64, int32 or int64.
        axis, index_dtype, dynamic: as in `gather`. Extents of updates follow those of indices.
        dynamic_x: those of x are read from `x_extents`, and a second output `y_extents` says how much of y is in use: as
            much as of x. Extents are int64, one for each axis.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> scatter(x=(64, 80), indices=(10, 1), by="tuples").output.shape
        (64, 80)
    """
    return made(SCATTER, locals())


def topk(
    *,
    x: Sequence[int],
    k: int,
    axis: int = -1,
    largest: bool = True,
    dtype: str = "float32",
    dynamic: bool = False,
) -> Workload[TopKParams]:
    """The k largest or smallest numbers along an axis, the best first, and their places (int64).

    Args:
        x: extents of x.
        k: how many; at most the extent of the axis.
        axis: counted from 0, or from -1 for the last one backwards.
        largest: the largest numbers, not the smallest.
        dtype: of x and y: a float or integer of up to 32 bits.
        dynamic: a second argument, `x_extents`, says how much of the first axis of x is in use, and a third output,
            `y_extents`, how much of y and indices.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> [output.shape for output in topk(x=(8, 1000), k=5).outputs]
        [(8, 5), (8, 5)]
    """
    return made(TOPK, locals())


def unique(
    *, x: Sequence[int], flat: bool = True, axis: int = 0, order: str = "sorted", dtype: str = "float32"
) -> Workload[UniqueParams]:
    """The different elements or slices of x: y, indices, inverse, counts, and the extents in use of y, indices and counts.

    Args:
        x: extents of x, up to 2^31 - 1 elements in all.
        flat: elements, not slices along the axis.
        axis: counted from 0, or from -1 for the last one backwards.
        order: of y: "sorted", or "first": as they occur first.
        dtype: of x and y: a float of up to 32 bits, or an integer.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> [output.shape for output in unique(x=(4, 5)).outputs[:4]]
        [(20,), (20,), (20,), (20,)]
    """
    return made(UNIQUE, locals())


def nonzero(*, x: Sequence[int], dtype: str = "float32") -> Workload[NonZeroParams]:
    """The places of the elements that are not zero: y, int64 (axes of x, elements of x), and its extents in use.

    Args:
        x: extents of x, up to 2^31 - 1 elements in all.
        dtype: of x; uint8 stands for bool.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> [output.shape for output in nonzero(x=(4, 5)).outputs]
        [(2, 20), (2,)]
    """
    return made(NONZERO, locals())
