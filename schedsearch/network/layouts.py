"""The layouts that implementations ask for, which of them hold the same bytes, and which kernel turns one into another."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from schedsearch.constructors.movement import layout_transform, transpose
from schedsearch.errors import WorkloadError
from schedsearch.network.graph import AnyNode, Control, Network, Subgraph, Value, View
from schedsearch.ops import Layout
from schedsearch.workload import Workload


@functools.lru_cache(maxsize=1 << 16)
def memory_order(value: Value, layout: str) -> tuple[tuple[str, int, int], ...]:
    """The dimensions in memory that are longer than 1, slowest first: axis, elements of it that a step skips, and extent.

    Two layouts with the same order hold the same bytes: NCHW and NHWC if C is 1, NCHW32c and NHWC if C is 32.

    Examples:
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


@functools.lru_cache(maxsize=1 << 16)
def conversion(value: Value, x: str, y: str) -> Workload | None:
    """The workload that turns a value from layout x into layout y, or None if no single kernel does that.

    Images change by layout_transform, other values by transpose. There is none for blocks that do not nest, for blocks of
    other values than images, and for dtypes that these operators do not move.
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


def canonical(value: Value, layout: str) -> str:
    """The letters for a layout: the plain order or NHWC where one of these holds the same bytes, else the layout itself."""
    both = (value.axes, "NHWC") if sorted(value.axes) == sorted("NCHW") else (value.axes,)
    return next((letters for letters in both if same_bytes(value, layout, letters)), layout)


@dataclass(frozen=True)
class Use:
    """What an implementation of a node reads and writes.

    Attributes:
        reads: (value, layout) of each argument that is not a constant.
        writes: (value, layout) of each output.
    """

    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]


def uses(network: Network, node: AnyNode) -> list[Use]:
    """The layouts that each implementation of a node, each pair of a view, a subgraph, or a node with bodies asks for.
    Layouts of constants cost nothing and are left out, because a constant is packed once when the network is loaded."""
    if isinstance(node, View):
        return [Use(((node.x, x),), ((node.y, y),)) for x, y in node.layouts]
    if isinstance(node, Subgraph | Control):
        plain = {name: (name, network.values[name].axes) for name in (*node.reads, *node.writes) if name in network.values}
        return [Use(tuple(plain[name] for name in node.reads if name in plain), tuple(plain[name] for name in node.writes))]
    found = []
    for workload in node.implementations:
        arrays = list(node.layouts(workload))
        reads, writes = arrays[: len(workload.signature)], arrays[len(workload.signature) :]
        found.append(
            Use(
                tuple((name, network.layout(name, spec)) for name, spec in reads if name in network.values),
                tuple((name, network.layout(name, spec)) for name, spec in writes),
            )
        )
    return found
