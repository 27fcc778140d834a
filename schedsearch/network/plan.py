"""Which implementation computes each node of a network, and the conversions of layouts between them.

    costs = RecordCosts(Lookup("records.db"), target)
    plan = best_plan(network, costs)

Finding the best plan takes about 0.1 s for networks such as Inception-v3. `choices` says how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from schedsearch.errors import UnsupportedError, UsageError
from schedsearch.network.choices import Choices
from schedsearch.network.costs import Costs
from schedsearch.network.graph import AnyNode, Conversion, Network, Node, Plan, Value, View
from schedsearch.network.layouts import canonical, conversion, same_bytes, uses
from schedsearch.task import Task
from schedsearch.workload import Workload

AUTO = "auto"


def best_plan(network: Network, costs: Costs, layout: str = AUTO, choices: Choices | None = None) -> Plan:
    """The plan of the least time.

    Args:
        layout: auto, or a layout such as NHWC that all images are to have; see `uniform_plan`.
        choices: `Choices(network, costs)`, if the caller has them: to make them takes seconds in networks with many
            concatenations.

    Raises:
        UnsupportedError: a node has no way that a kernel can run, or no kernel does a conversion that is needed.

    Examples:
        >>> plan = best_plan(network, RecordCosts(lookup, target))
        >>> [f"{each.value}: {each.x} to {each.y}" for each in plan.conversions]
        ['input: NCHW to NHWC']
    """
    if layout != AUTO:
        return uniform_plan(network, costs, layout)
    return priced(complete(network, (choices or Choices(network, costs)).best()), costs)


def first_plan(network: Network) -> Plan:
    """The first implementation of every node, with the conversions that this needs. Its time is not predicted (0).

    Raises:
        UnsupportedError: no kernel does one of the conversions.
    """
    return complete(network, {node.name: 0 for node in network.nodes})


def uniform_plan(network: Network, costs: Costs, layout: str) -> Plan:
    """All images in one layout: the implementation of each node in which the fewest of them have another one, and of these
    the fastest.

    Raises:
        UnsupportedError: a node has no way that a kernel can run, or no kernel does a conversion that is needed.
        UsageError: no way of any node has the layout.
    """
    met = False
    ranks: dict[str, list[tuple[float, ...]]] = {}
    for node in network.nodes:
        others = []
        for use in uses(network, node):
            images = [(network.values[name], letters) for name, letters in (*use.reads, *use.writes)]
            images = [(value, letters) for value, letters in images if len(value.axes) == len("NHWC")]
            fitting = [_has(value, letters, layout) for value, letters in images]
            met = met or any(fitting)
            others.append(fitting.count(False))
        times = _times_ns(node, costs)
        ranks[node.name] = [(time_ns == float("inf"), count, time_ns) for time_ns, count in zip(times, others)]
    if not met:
        raise UsageError(f"no node of the network can have layout {layout}; allowed: auto, NHWC, NCHW")
    chosen = _least(network, ranks)
    return priced(complete(network, chosen), costs)


def fastest_kernels(network: Network, costs: Costs) -> Plan:
    """The fastest implementation of each node by itself, with the conversions that this needs. Nodes that write slices of
    one value count as one: they take the layout in which they are fastest together.

    Raises:
        UnsupportedError: see `uniform_plan`.
    """
    ranks = {node.name: [(time_ns,) for time_ns in _times_ns(node, costs)] for node in network.nodes}
    return priced(complete(network, _least(network, ranks)), costs)


def baselines(network: Network, costs: Costs) -> dict[str, Plan]:
    """The plans that `best_plan` is compared with, by name. One that no kernels can run is left out."""
    found: dict[str, Plan] = {}
    with contextlib.suppress(UsageError):  # a conversion that no kernel does, or no images
        found["all NHWC"] = uniform_plan(network, costs, "NHWC")
    with contextlib.suppress(UsageError):
        found["fastest kernels"] = fastest_kernels(network, costs)
    return found


def missing(network: Network, costs: Costs, choices: Choices | None = None) -> list[Task]:
    """What is worth measuring: workloads with an estimated cost that are in the best plan, or would be if they were as fast
    as the device allows. The first could change the plan's time most, where each launch is judged by itself.

    Args:
        choices: as of `best_plan`.

    Returns:
        Tasks whose `weight` is the number of times that the network launches the workload.
    """
    choices = choices or Choices(network, costs)
    found: list[tuple[float, Task]] = []
    for workload, places in choices.occurrences.items():
        cost = costs(workload)
        if cost.measured:
            continue
        spare_ns = cost.time_ns - cost.least_ns
        losses_ns = [choices.forced_ns(where) for where in places]
        gain_ns = sum(max(0.0, spare_ns - loss_ns) for loss_ns in losses_ns)
        if gain_ns > 0.0 or 0.0 in losses_ns:
            found.append((gain_ns, Task(workload, weight=len(places))))
    return [task for _, task in sorted(found, key=lambda each: (-each[0], each[1].workload.id))]


def complete(network: Network, chosen: Mapping[str, int]) -> Plan:
    """The plan with these implementations and the conversions that they need, without its time.

    Args:
        chosen: name of a node or view -> number of its implementation or pair of layouts.

    Raises:
        UnsupportedError: no kernel does one of the conversions.
    """
    made = {name: network.io_layout(name) for name in (*network.inputs, *network.fixed)}
    there = {name: [layout] for name, layout in made.items()}
    workloads: dict[str, Workload] = {}
    views: dict[str, tuple[str, str]] = {}
    conversions: list[Conversion] = []

    def bring(reads: Iterable[tuple[str, str]], reader: str) -> None:
        for name, layout in reads:
            value = network.values[name]
            if not any(same_bytes(value, layout, other) for other in there[name]):
                conversions.append(_conversion(value, made[name], layout, reader))
                there[name].append(layout)

    for node in network.nodes:
        use = uses(network, node)[chosen[node.name]]
        bring(use.reads, node.name)
        for name, layout in use.writes:
            made[name] = layout
            there[name] = [layout]
        if isinstance(node, View):
            views[node.name] = node.layouts[chosen[node.name]]
        elif isinstance(node, Node):
            workloads[node.name] = node.implementations[chosen[node.name]]
    bring(((name, network.io_layout(name)) for name in network.outputs), "the caller")
    return Plan(workloads, views, tuple(conversions), 0.0)


def priced(plan: Plan, costs: Costs) -> Plan:
    """The plan with its predicted time and the times that it was reckoned with."""
    launches = [*plan.implementations.values(), *(each.workload for each in plan.conversions)]
    of = {workload: costs(workload) for workload in launches}
    times = {workload.id: cost.time_ns for workload, cost in of.items()}
    measured = {workload.id: cost.time_ns for workload, cost in of.items() if cost.measured}
    predicted_ns = sum(of[workload].time_ns for workload in launches)
    return replace(plan, predicted_ns=predicted_ns, measured=measured, times_ns=times)


def _least(network: Network, ranks: Mapping[str, Sequence[tuple[float, ...]]]) -> dict[str, int]:
    """The implementation of the least rank of each node; nodes that write slices of one value write it in one layout.

    Args:
        ranks: name of a node or view -> the rank of each implementation.
    """
    writers: dict[str, list[tuple[str, list[str]]]] = {}  # value -> nodes that write it, with the layout of each choice
    for node in network.nodes:
        (name, _), *_ = (every := uses(network, node))[0].writes
        value = network.values[name]
        writers.setdefault(name, []).append((node.name, [canonical(value, use.writes[0][1]) for use in every]))
    chosen: dict[str, int] = {}
    for nodes in writers.values():
        joint: list[tuple[list[float], dict[str, int]]] = []
        for layout in sorted(set.intersection(*(set(layouts) for _, layouts in nodes))):
            picks = {
                name: min((rank, number) for number, rank in enumerate(ranks[name]) if layouts[number] == layout)
                for name, layouts in nodes
            }
            total = [sum(parts) for parts in zip(*(rank for rank, _ in picks.values()))]
            joint.append((total, {name: number for name, (_, number) in picks.items()}))
        chosen |= min(joint, key=lambda each: (each[0], list(each[1].values())))[1]
    return chosen


def _has(value: Value, letters: str, layout: str) -> bool:
    return sorted(value.axes) == sorted("NHWC") and same_bytes(value, letters, layout)


def _times_ns(node: AnyNode, costs: Costs) -> list[float]:
    if isinstance(node, Node):
        return [costs(workload).time_ns for workload in node.implementations]
    return [0.0] * (len(node.layouts) if isinstance(node, View) else 1)


def _conversion(value: Value, x: str, y: str, reader: str) -> Conversion:
    x, y = canonical(value, x), canonical(value, y)
    workload = conversion(value, x, y)
    if workload is None:
        raise UnsupportedError(
            f"{value.name} ({value.dtype} {value.axes} {value.shape}) is made in layout {x}, and {reader} reads it in {y}; "
            "no kernel converts that. Give one of the two nodes an implementation in a layout that the other has"
        )
    return Conversion(value.name, x, y, workload)
