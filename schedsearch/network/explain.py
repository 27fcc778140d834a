"""Says why a plan is as it is: the layout of each value and what the next best would cost, conversions, and baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schedsearch.network.choices import Choices
from schedsearch.network.costs import Costs
from schedsearch.network.graph import Network, Node, Plan, View
from schedsearch.network.layouts import canonical, same_bytes, uses
from schedsearch.network.plan import baselines
from schedsearch.ops.elementwise import ElementwiseParams, reads_of
from schedsearch.workload import Workload

_RIGHT = ("us", "more us", "launches")  # headings of columns of numbers
_WIDEST_NAME = 36
_WIDEST_LABEL = 56


@dataclass(frozen=True)
class Table:
    """Rows of strings under headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self, width: int = 120) -> str:
        """Aligned columns for a terminal. Lines are cut to `width` characters, which costs the end of the last column."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows)]
        lines = [self.title]
        for row in (self.headings, *self.rows):
            cells = [
                cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
                for heading, cell, width in zip(self.headings, row, widths)
            ]
            line = f"  {'  '.join(cells)}".rstrip()
            lines.append(line if len(line) <= width else f"{line[: width - 3]}...")
        return "\n".join(lines)

    def markdown(self) -> str:
        """For a page."""
        marks = ("---:" if heading in _RIGHT else "---" for heading in self.headings)
        lines = [f"**{self.title}**", "", _row(self.headings), f"|{'|'.join(marks)}|", *map(_row, self.rows)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """A plan in sentences.

    Attributes:
        summary: two sentences on a line each.
        plans: the plan beside its baselines.
        values: the layout in which each value is made, who reads it in which, and the next best layout with what the best
            plan that takes it costs more.
        conversions: each with its time and where that comes from.
        nodes: the workload of each with its time and where that comes from.
        slices: those that kernels read in place, without a copy.
    """

    summary: str
    plans: Table
    values: Table
    conversions: Table
    nodes: Table
    slices: Table

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(table for table in (self.plans, self.values, self.conversions, self.nodes, self.slices) if table.rows)

    def text(self, width: int = 120) -> str:
        """For a terminal of so many columns."""
        return "\n\n".join([self.summary, *(table.text(width) for table in self.tables)])

    def markdown(self) -> str:
        """For a page."""
        return "\n\n".join([self.summary, *(table.markdown() for table in self.tables)]) + "\n"

    def __str__(self) -> str:
        return self.text()


def explain(network: Network, plan: Plan, costs: Costs, choices: Choices | None = None) -> Explanation:
    """Why a plan is as it is.

    Args:
        plan: from `best_plan`, or any other plan of the network.
        costs: those that the plan was made with.
        choices: as of `best_plan`.

    Raises:
        UnsupportedError: the network has no plan.

    Examples:
        >>> print(explain(network, plan, costs))
        Predicted: 12.50 us for 2 kernels and 1 conversion of layouts, one after another.
        All times were measured.
        ...
    """
    choices = choices or Choices(network, costs)
    return Explanation(
        _summary(plan, costs),
        Table("Plans", ("plan", "us", "conversions"), tuple(_plans(network, plan, costs))),
        Table(
            "Layouts",
            ("value", "made in", "read in", "next best", "more us", "why"),
            tuple(_values(network, plan, choices)),
        ),
        Table("Conversions", ("value", "from", "to", "us", "time from"), tuple(_conversions(plan, costs))),
        Table("Kernels", ("node", "workload", "us", "time from"), tuple(_nodes(network, plan, costs))),
        Table("Slices read in place", ("value", "slice in memory", "read by"), tuple(_slices(network, plan))),
    )


def _summary(plan: Plan, costs: Costs) -> str:
    kernels, conversions = len(plan.implementations), len(plan.conversions)
    different = {*plan.implementations.values(), *(each.workload for each in plan.conversions)}
    estimated = sum(not costs(workload).measured for workload in different)
    measured = (
        f"The times of {estimated} of {len(different)} different workloads are estimated"
        if estimated
        else "All times were measured"
    )
    what = f"{_count(kernels, 'kernel')} and {_count(conversions, 'conversion')} of layouts"
    return f"Predicted: {_us(plan.predicted_ns)} us for {what}, one after another.\n{measured}."


def _plans(network: Network, plan: Plan, costs: Costs) -> Iterator[tuple[str, ...]]:
    for name, each in {"this plan": plan, **baselines(network, costs)}.items():
        total_ns = sum(costs(step.workload).time_ns for step in each.conversions)
        yield name, _us(each.predicted_ns), f"{len(each.conversions)} ({_us(total_ns)} us)"


def _values(network: Network, plan: Plan, choices: Choices) -> Iterator[tuple[str, ...]]:
    made, read = _layouts(network, plan)
    for name, layout in made.items():
        value = network.values[name]
        losses_ns = choices.losses_ns(name)
        own_ns = losses_ns.get(layout, 0.0)
        others = {
            other: loss_ns - own_ns for other, loss_ns in losses_ns.items() if other != layout and math.isfinite(loss_ns)
        }
        into = [other for other in read.get(name, []) if not same_bytes(value, other, layout)]
        reads = ", ".join(read.get(name, [])) or "nowhere"
        if not others:
            why = "the caller gives it so" if name in network.inputs else "no kernel makes it otherwise"
            yield _short(name), layout, reads, "", "", why
            continue
        other = min(others, key=lambda each: (others[each], each))
        if into:
            why = f"made faster so, in spite of {_count(len(into), 'conversion')}"
        elif others[other] < 0.5:
            why = "as fast as the next best"
        else:
            why = "all readers take it so"
        yield _short(name), layout, reads, other, f"+{_us(others[other])}", why


def _layouts(network: Network, plan: Plan) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The layout in which a plan makes each value, and those in which it is read."""
    made = {name: canonical(network.values[name], network.io_layout(name)) for name in network.inputs}
    read: dict[str, list[str]] = {}
    for node in network.nodes:
        every = uses(network, node)
        if isinstance(node, Node):
            use = every[node.implementations.index(plan.implementations[node.name])]
        else:
            use = every[node.layouts.index(plan.views[node.name]) if isinstance(node, View) else 0]
        for name, other in use.reads:
            read.setdefault(name, []).append(canonical(network.values[name], other))
        for name, other in use.writes:
            made[name] = canonical(network.values[name], other)
    for name in network.outputs:
        read.setdefault(name, []).append(canonical(network.values[name], network.io_layout(name)))
    return made, {name: list(dict.fromkeys(layouts)) for name, layouts in read.items()}


def _conversions(plan: Plan, costs: Costs) -> Iterator[tuple[str, ...]]:
    for each in plan.conversions:
        yield _short(each.value), each.x, each.y, *_cost(each.workload, costs)


def _nodes(network: Network, plan: Plan, costs: Costs) -> Iterator[tuple[str, ...]]:
    for name, workload in plan.implementations.items():
        yield _short(name), _beginning(workload.label), *_cost(workload, costs)


def _slices(network: Network, plan: Plan) -> Iterator[tuple[str, ...]]:
    for node in network.nodes:
        if isinstance(node, Node) and (workload := plan.implementations[node.name]).op == "elementwise":
            for each in reads_of(ElementwiseParams.of(workload.params)):
                if each.slice_of:
                    yield _short(node.arguments[each.name]), f"[{each.cut}]", _short(node.name)


def _cost(workload: Workload, costs: Costs) -> tuple[str, str]:
    cost = costs(workload)
    return _us(cost.time_ns), cost.reason if cost.measured else f"estimated: {cost.reason}"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:.2f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(name: str) -> str:
    """The end of a long name, which tells most of PyTorch's names apart."""
    return name if len(name) <= _WIDEST_NAME else "..." + name[3 - _WIDEST_NAME :]


def _beginning(label: str) -> str:
    return label if len(label) <= _WIDEST_LABEL else f"{label[: _WIDEST_LABEL - 3]}..."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
