"""Which layouts of a value hold the same bytes, and which kernel turns one layout into another."""

from __future__ import annotations

from schedsearch.errors import WorkloadError
from schedsearch.network.graph import Value
from schedsearch.ops import Layout
from schedsearch.ops.layout_transform import layout_transform
from schedsearch.ops.transpose import transpose
from schedsearch.workload import Workload


def memory_order(value: Value, layout: str) -> tuple[tuple[str, int, int], ...]:
    """The dimensions in memory that are longer than 1, slowest first: axis, elements of it that a step skips, and extent.

    Two layouts with the same order hold the same bytes: NCHW and NHWC if C is 1, NCHW32c and NHWC if C is 32.

    Example:
        >>> memory_order(Value("x", "NCHW", (8, 32, 1, 1), "int8"), "NCHW32c")
        (('N', 1, 8), ('C', 1, 32))
    """
    parsed = Layout.parse(layout)
    units = {axis: list(parsed.units(axis)) for axis in parsed.axes}
    places = [(axis.upper(), units[axis.upper()].pop(0)) for axis in parsed.dimensions]
    extents = parsed.shape(dict(zip(value.axes, value.shape)))
    return tuple((axis, unit, extent) for (axis, unit), extent in zip(places, extents) if extent > 1)


def same_bytes(value: Value, one: str, other: str) -> bool:
    """Whether two layouts of a value are the same in memory."""
    return one == other or memory_order(value, one) == memory_order(value, other)


def conversion(value: Value, x: str, y: str) -> Workload | None:
    """The workload that turns a value from layout x into layout y, or None if no single kernel does that.

    Images change by layout_transform, other values by transpose. There is none for blocks that do not nest, for blocks of
    other values than images, and for formats that these operators do not move.
    """
    sizes = dict(zip(value.axes, value.shape))
    try:
        if sorted(value.axes) == sorted("NCHW"):
            n, c, h, w = (sizes[axis] for axis in "NCHW")
            return layout_transform(n=n, c=c, h=h, w=w, layout=x, to=y, dtype=value.dtype)
        if not x.isalpha() or not y.isalpha():
            return None
        return transpose(x=[sizes[axis] for axis in x], permutation=[x.index(axis) for axis in y], dtype=value.dtype)
    except WorkloadError:
        return None
