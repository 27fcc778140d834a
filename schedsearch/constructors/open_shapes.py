"""Operators that fill arrays whose extents are known at run time."""

from __future__ import annotations

from collections.abc import Sequence

from schedsearch.constructors import made
from schedsearch.ops.arange import ARANGE, ArangeParams
from schedsearch.ops.dyn_concat import DYN_CONCAT, DynConcatParams
from schedsearch.ops.expand import EXPAND, ExpandParams
from schedsearch.ops.reshape import RESHAPE, ReshapeParams
from schedsearch.ops.where import WHERE, WhereParams
from schedsearch.workload import Workload


def arange(*, bound: int, dtype: str = "int64") -> Workload[ArangeParams]:
    """start, start + delta ... up to before limit, numbers that are on the device: y, and how many there are.

    Args:
        bound: how many there are at most.
        dtype: of the arguments start, limit and delta, one number each, and of y: int64, int32 or float32.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> [argument.name for argument in arange(bound=100).signature]
        ['start', 'limit', 'delta']
    """
    return made(ARANGE, locals())


def expand(
    *,
    x: Sequence[int],
    bound: Sequence[int],
    entries: int | None = None,
    dtype: str = "float16",
    dynamic: Sequence[str] = (),
) -> Workload[ExpandParams]:
    """x repeated along axes of extent 1, as NumPy broadcasts it to the extents in `shape`.

    Args:
        x: extents of x.
        bound: upper bounds of y's extents.
        entries: length of the argument shape, int64; default: one for each of bound.
        dynamic: ("x",) if the extents of x are read from memory, too.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> expand(x=(1, 8), bound=(100, 8)).outputs[0].shape
        (100, 8)
    """
    return made(EXPAND, locals())


def reshape(
    *, x: Sequence[int], bound: Sequence[int], allowzero: bool = False, dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload[ReshapeParams]:
    """The elements of x in their order, with the extents in `shape`: -1 stands for all that is left, 0 for an extent of x.

    Args:
        x: extents of x.
        bound: upper bounds of y's extents.
        allowzero: a 0 in shape is an extent of 0.
        dynamic: ("x",) if the extents of x are read from memory, too.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> [argument.name for argument in reshape(x=(100, 8), bound=(800,), dynamic=("x",)).signature]
        ['x', 'x_extents', 'shape']
    """
    return made(RESHAPE, locals())


def where(
    *, c: Sequence[int], a: Sequence[int], b: Sequence[int], dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload[WhereParams]:
    """a where c, an array of uint8, is not 0, elsewhere b; each repeated along axes of extent 1.

    Args:
        c, a, b: extents.
        dynamic: those of which the extents are read from memory.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> where(c=(100, 1), a=(100, 8), b=(1,)).outputs[0].shape
        (100, 8)
    """
    return made(WHERE, locals())


def dyn_concat(
    *, x: Sequence[Sequence[int]], axis: int = 0, dtype: str = "float16", dynamic: Sequence[str] = ()
) -> Workload[DynConcatParams]:
    """2 to 4 arrays one after the other along an axis, of which the extents may be on the device.

    Args:
        x: extents of each.
        dynamic: those of x0, x1 ... of which the extents are read from memory.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> dyn_concat(x=[(100, 8), (50, 8)], dynamic=("x0", "x1")).outputs[0].shape
        (150, 8)
    """
    return made(DYN_CONCAT, locals())
