"""The choices of implementations and layouts in a network as variables and tables for `Elimination`.

A variable is the layout in which a node reads or makes a value. Where all implementations of a node agree that one layout
follows from another, as in a concat whose arguments and result have one layout, these share a variable. The tables are:

- for a node, the time of its fastest implementation for each combination of its layouts;
- for a value, the time of the conversions that its readers need from the layout in which it is made. A conversion is paid
  once for all readers of its layout. If the value has many readers, a yes-or-no variable for each layout says whether the
  value is there in it. This takes tables of 2^layouts entries instead of layouts^readers.

See docs/decisions/130-layouts-by-exact-elimination.md.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from schedsearch.errors import UnsupportedError
from schedsearch.network.costs import Costs
from schedsearch.network.elimination import Elimination, Factor
from schedsearch.network.graph import AnyNode, Network, Node, Value
from schedsearch.network.layouts import Use, canonical, conversion, memory_order, uses
from schedsearch.workload import Workload

MOST_JOINT = 2500  # entries of a table over all readers of a value; above, yes-or-no variables are smaller


@dataclass(frozen=True)
class _Slot:
    """A place where a node reads or makes a value: its variable, and the value's layout (a number) in each state of it."""

    variable: int
    layouts: tuple[int, ...]


@dataclass(frozen=True)
class Occurrence:
    """Joint states of some variables in which a workload can be launched.

    Attributes:
        extra_ns: for each joint state what it costs more than the workload that is launched there; inf: it does not fit.
    """

    variables: tuple[int, ...]
    extra_ns: np.ndarray


class Choices:
    """Everything that a plan of a network can choose, with what it costs.

    Args:
        costs: of implementations and conversions. An implementation that costs inf is not chosen.

    Attributes:
        occurrences: each workload that a plan could launch, with the choices that launch it.

    Raises:
        UnsupportedError: a node has no way that a kernel can run, or no choice gives every reader its layout.
    """

    def __init__(self, network: Network, costs: Costs) -> None:
        self.network, self.costs = network, costs
        self.occurrences: dict[Workload, list[Occurrence]] = {}
        self._sizes: list[int] = []
        self._factors: list[Factor] = []
        self._layouts: dict[str, dict[tuple[tuple[str, int, int], ...], int]] = {name: {} for name in network.values}
        self._letters: dict[str, list[str]] = {name: [] for name in network.values}  # of a value's layouts, by number
        self._made: dict[str, _Slot] = {}
        self._read: dict[str, list[_Slot]] = {name: [] for name in network.values}
        self._picks: dict[
            str, tuple[tuple[int, ...], np.ndarray]
        ] = {}  # node -> variables, number of the implementation by their states
        for name in (*network.inputs, *network.fixed):
            self._made[name] = self._fixed(name)
        for node in network.nodes:
            self._add_node(node)
        for name in network.outputs:
            self._read[name].append(self._fixed(name))
        for name, value in network.values.items():
            if self._read[name]:
                self._add_conversions(value)
        self.solution = Elimination(self._sizes, self._factors)
        if not math.isfinite(self.solution.cost):
            raise UnsupportedError(
                "no choice of layouts gives every node of the network a layout that it can read: some layouts have no "
                "conversion between them. Give the nodes implementations in plain layouts such as NCHW, too"
            )

    def _variable(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _layout(self, name: str, letters: str) -> int:
        """The number of a layout of a value. Layouts that hold the same bytes have one number."""
        value = self.network.values[name]
        order = memory_order(value, letters)
        if order not in self._layouts[name]:
            self._layouts[name][order] = len(self._letters[name])
            self._letters[name].append(canonical(value, letters))
        return self._layouts[name][order]

    def _fixed(self, name: str) -> _Slot:
        """Of the caller, who gives inputs and takes outputs in the layouts of the network; constants are packed for that."""
        return _Slot(self._variable(1), (self._layout(name, self.network.io_layout(name)),))

    def _add_node(self, node: AnyNode) -> None:
        workloads = list(node.implementations) if isinstance(node, Node) else [None] * len(uses(self.network, node))
        times = [0.0 if workload is None else self.costs(workload).time_ns for workload in workloads]
        every = uses(self.network, node)
        rows = [
            (number, times[number], [self._layout(name, letters) for name, letters in (*use.reads, *use.writes)])
            for number, use in enumerate(every)
            if math.isfinite(times[number])
        ]
        if not rows:
            reasons = list(dict.fromkeys(self.costs(workload).reason for workload in workloads if workload is not None))
            more = len(reasons) - 1
            others = f". {more} other {'layout fails' if more == 1 else 'layouts fail'} too" if more else ""
            raise UnsupportedError(f"no kernel computes node {node.name} ({', '.join(node.sources)}): {reasons[0]}{others}")
        variables, states, slots = self._grouped([layouts for _, _, layouts in rows])
        table = np.full([self._sizes[each] for each in variables], np.inf)
        pick = np.zeros(table.shape, dtype=int)
        for (number, time_ns, _), state in zip(rows, states):
            if time_ns < table[state]:
                table[state], pick[state] = time_ns, number
        self._factors.append((variables, table))
        self._picks[node.name] = variables, pick
        for (number, time_ns, _), state in zip(rows, states):
            if (workload := workloads[number]) is not None:
                extra_ns = np.full(table.shape, np.inf)
                extra_ns[state] = time_ns - table[state]
                self.occurrences.setdefault(workload, []).append(Occurrence(variables, extra_ns))
        self._add_slots(every[0], slots)

    def _add_slots(self, use: Use, slots: Sequence[_Slot]) -> None:
        for (name, _), slot in zip(use.reads, slots):
            if slot not in self._read[name]:
                self._read[name].append(slot)
        for (name, _), slot in zip(use.writes, slots[len(use.reads) :]):
            if name in self._made:  # another node writes another slice of it
                self._agree(self._made[name], slot)
            else:
                self._made[name] = slot

    def _agree(self, one: _Slot, other: _Slot) -> None:
        """Two slots must have the same layout."""
        equal = np.equal.outer(one.layouts, other.layouts)
        self._factors.append(((one.variable, other.variable), np.where(equal, 0.0, np.inf)))

    def _grouped(self, rows: list[list[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[_Slot]]:
        """Variables for the layouts of a node, of which each row is a combination: the variables, the state of each row, and
        the slot of each column. Columns that follow from one another share a variable."""
        columns = [[row[place] for row in rows] for place in range(len(rows[0]))]
        patterns = [_first_places(column) for column in columns]
        if math.prod(len(set(pattern)) for pattern in set(patterns)) > MOST_JOINT:  # one variable for the node
            patterns = [_first_places([tuple(row) for row in rows])] * len(columns)
        made: dict[tuple[int, ...], tuple[int, list[int]]] = {}  # pattern -> variable, and the row that each state is of
        for pattern in patterns:
            if pattern not in made:
                starts = sorted(set(pattern))
                made[pattern] = self._variable(len(starts)), starts
        slots = [
            _Slot(made[pattern][0], tuple(column[row] for row in made[pattern][1]))
            for pattern, column in zip(patterns, columns)
        ]
        states = [tuple(starts.index(pattern[row]) for pattern, (_, starts) in made.items()) for row in range(len(rows))]
        return tuple(variable for variable, _ in made.values()), states, slots

    def _add_conversions(self, value: Value) -> None:
        made, read = self._made[value.name], self._read[value.name]
        wanted = sorted({layout for slot in read for layout in slot.layouts})
        variables = list(dict.fromkeys(slot.variable for slot in (made, *read)))
        if math.prod(self._sizes[each] for each in variables) > MOST_JOINT:
            self._add_presence(value, wanted)
            return
        axes = {each: place for place, each in enumerate(variables)}

        def spread(slot: _Slot) -> np.ndarray:
            shape = [1] * len(variables)
            shape[axes[slot.variable]] = -1
            return np.array(slot.layouts).reshape(shape)

        table = np.zeros([self._sizes[each] for each in variables])
        for y in wanted:
            needed = np.zeros(table.shape, dtype=bool)
            for slot in read:
                needed |= spread(slot) == y
            for x in sorted(set(made.layouts) - {y}):
                mask = needed & (spread(made) == x)
                table[mask] += self._price(value, x, y, tuple(variables), mask)
        self._factors.append((tuple(variables), table))

    def _add_presence(self, value: Value, wanted: Iterable[int]) -> None:
        """A yes-or-no variable for each layout: whether the value is there in it."""
        made, read = self._made[value.name], self._read[value.name]
        for y in wanted:
            there = self._variable(2)
            table = np.zeros((len(made.layouts), 2))
            for x in sorted(set(made.layouts) - {y}):
                mask = np.zeros(table.shape, dtype=bool)
                mask[[layout == x for layout in made.layouts], 1] = True
                table[mask] = self._price(value, x, y, (made.variable, there), mask)
            self._factors.append(((made.variable, there), table))
            for slot in read:
                if y in slot.layouts:
                    need = np.zeros((len(slot.layouts), 2))
                    need[[layout == y for layout in slot.layouts], 0] = np.inf
                    self._factors.append(((slot.variable, there), need))

    def _price(self, value: Value, x: int, y: int, variables: tuple[int, ...], mask: np.ndarray) -> float:
        """The time of a conversion, which is done in the joint states of some variables that the mask has."""
        letters = self._letters[value.name]
        workload = conversion(value, letters[x], letters[y])
        if workload is None:
            return math.inf
        time_ns = self.costs(workload).time_ns
        if math.isfinite(time_ns):
            where = Occurrence(variables, np.where(mask, 0.0, np.inf))
            self.occurrences.setdefault(workload, []).append(where)
        return time_ns

    def best(self) -> dict[str, int]:
        """Name of each node or view -> number of the implementation or pair of layouts that the best plan takes."""
        states = self.solution.states
        return {
            name: int(pick[tuple(states[each] for each in variables)]) for name, (variables, pick) in self._picks.items()
        }

    def made(self, name: str) -> str:
        """The layout in which the best plan makes a value."""
        slot = self._made[name]
        return self._letters[name][slot.layouts[self.solution.states[slot.variable]]]

    def losses_ns(self, name: str) -> dict[str, float]:
        """For each layout in which a value can be made: how much more the best plan that makes it so costs."""
        slot = self._made[name]
        least = self.solution.least(slot.variable) - self.solution.cost
        losses: dict[str, float] = {}
        for layout, loss_ns in zip(slot.layouts, least.tolist()):
            letters = self._letters[name][layout]
            losses[letters] = min(losses.get(letters, math.inf), max(0.0, loss_ns))
        return losses

    def forced_ns(self, where: Occurrence) -> float:
        """How much more the best plan costs that launches the workload there; inf if there is none."""
        least = self.solution.least(*where.variables) + where.extra_ns
        return max(0.0, float(least.min()) - self.solution.cost)


def _first_places(items: Sequence[Hashable]) -> tuple[int, ...]:
    """For each item the place at which an equal one comes first."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(item, place) for place, item in enumerate(items))
