"""Which way computes each node of a network, and the conversions of layouts between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schedsearch.errors import UnsupportedError
from schedsearch.network.graph import Conversion, Network, Node, Plan, Value, View
from schedsearch.network.layouts import conversion, same_bytes
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Use:
    """What a way of a node reads and writes.

    Attributes:
        reads: (value, layout) of each argument that is not a constant.
        writes: (value, layout) of each output.
    """

    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]


def uses(network: Network, node: Node | View) -> list[Use]:
    """The layouts that each way of a node, or each pair of a view, asks for. Layouts of constants cost nothing and are left
    out, because a constant is packed once when the network is loaded."""
    if isinstance(node, View):
        return [Use(((node.x, x),), ((node.y, y),)) for x, y in node.layouts]
    found = []
    for way in node.ways:
        arrays = list(node.layouts(way))
        reads, writes = arrays[: len(way.signature)], arrays[len(way.signature) :]
        found.append(
            Use(
                tuple((name, network.layout(name, spec)) for name, spec in reads if name in network.values),
                tuple((name, network.layout(name, spec)) for name, spec in writes),
            )
        )
    return found


def first_plan(network: Network) -> Plan:
    """The first way of every node, with the conversions that this needs. Its time is not predicted (0).

    Raises:
        UnsupportedError: no kernel does one of the conversions.
    """
    return complete(network, {node.name: 0 for node in network.nodes})


def complete(network: Network, chosen: Mapping[str, int]) -> Plan:
    """The plan with these ways and the conversions that they need.

    Args:
        chosen: name of a node or view -> number of its way or pair of layouts.

    Raises:
        UnsupportedError: no kernel does one of the conversions.
    """
    made = {name: network.values[name].axes for name in network.inputs}
    there = {name: [layout] for name, layout in made.items()}
    ways: dict[str, Workload] = {}
    views: dict[str, tuple[str, str]] = {}
    conversions: list[Conversion] = []

    def bring(reads: Iterable[tuple[str, str]], reader: str) -> None:
        for name, layout in reads:
            value = network.values[name]
            if not any(same_bytes(value, layout, other) for other in there[name]):
                conversions.append(Conversion(name, made[name], layout, _kernel(value, made[name], layout, reader)))
                there[name].append(layout)

    for node in network.nodes:
        use = uses(network, node)[chosen[node.name]]
        bring(use.reads, node.name)
        for name, layout in use.writes:
            made[name] = layout
            there[name] = [layout]
        if isinstance(node, View):
            views[node.name] = node.layouts[chosen[node.name]]
        else:
            ways[node.name] = node.ways[chosen[node.name]]
    bring(((name, network.values[name].axes) for name in network.outputs), "the caller")
    return Plan(ways, views, tuple(conversions), 0.0)


def _kernel(value: Value, x: str, y: str, reader: str) -> Workload:
    workload = conversion(value, x, y)
    if workload is None:
        raise UnsupportedError(
            f"{value.name} ({value.dtype} {value.axes} {value.shape}) is made in layout {x}, and {reader} reads it in {y}; "
            "no kernel converts that. Give one of the two nodes a way in a layout that the other has"
        )
    return workload
