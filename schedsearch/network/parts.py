"""The parts of a `Network` while a graph is read: its values, constants and calls, each with a name of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import FLOATS, constant_of, dtype_of, extents_of, inputs_of, name_of
from schedsearch.network.graph import AnyNode, Constant, Control, Impossible, Network, Node, Subgraph, Value, View, axes_of
from schedsearch.network.implementations import IMAGE, implementations_of
from schedsearch.network.layouts import same_bytes
from schedsearch.network.subgraphs import Cut, subgraph
from schedsearch.ops import Layout

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass
class Parts:
    """What a network is made of so far.

    Attributes:
        fixed: outputs of the graph that are constants.
        arrays: names that no constant may have.
        calls: place of the last node of each call, and the call.
        members: name of a kernel call -> the nodes of its chain.
    """

    model: ir.Model
    dtype: str | None
    layouts: tuple[str, ...]
    mixed: bool
    over_time: bool
    fixed: Mapping[str, Constant]
    arrays: frozenset[str] = frozenset()
    calls: list[tuple[int, AnyNode]] = field(default_factory=list)
    members: dict[str, tuple[ir.Node, ...]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)

    def network(self, *, complete: bool) -> Network:
        """The network, without outputs if nothing stands for some of the nodes."""
        graph = self.model.graph
        inputs = tuple(self._value(value) for value in graph.inputs if value.name not in graph.initializers)
        outputs = tuple(self._value(value) for value in graph.outputs) if complete else ()
        calls = tuple(call for _, call in sorted(self.calls, key=lambda each: each[0]))
        return Network(inputs, outputs, self.values, self.constants, calls, self.fixed if outputs else {})

    # --- values and constants ---
    def _value(self, value: ir.Value) -> str:
        """Registers a value and returns its name."""
        name = str(value.name)
        if name not in self.values:
            producer, constant = value.producer(), self.fixed.get(name)
            if constant is not None:  # a file need not say its shape
                shape = list(constant.array.shape)
            else:
                shape = extents_of(producer, value) if producer is not None else [int(each) for each in value.shape or ()]
            dtype = dtype_of(value)
            if self.dtype is not None and dtype in FLOATS:
                dtype = self.dtype
            self.values[name] = Value(name, axes_of(len(shape)), tuple(shape), dtype)
        return name

    def _operand(self, operand: Operand) -> str:
        if not isinstance(operand, Constant):
            return self._value(operand)
        name, number = operand.name, 1
        while name in self.arrays or ((known := self.constants.get(name)) is not None and not _same(known, operand)):
            number += 1
            name = f"{operand.name}.{number}"
        self.constants.setdefault(name, replace(operand, name=name))
        return name

    # --- calls ---
    def add_chain(self, chain: Chain, place: int) -> None:
        if self.over_time:
            chain.make_over_time()
        workloads, letters = implementations_of(chain, self.dtype, self.layouts, mixed=self.mixed)
        arguments = {spec.name: self._operand(chain.arguments[spec.name]) for spec in workloads[0].signature}
        first = workloads[0].outputs[0].name
        outputs = {first: self._value(chain.value)} | {name: self._value(each) for name, each in chain.others.items()}
        defaults = {scalar.name: scalar.default for scalar in workloads[0].scalars}
        scalars = {name: number for name, number in chain.scalars.items() if defaults[name] != number}
        sources = tuple(dict.fromkeys(name_of(node) for node in chain.nodes))  # one node may have become several
        offsets = {} if chain.offset is None else {first: chain.offset}
        made = Node(self._name(sources[0]), sources, arguments, outputs, workloads, scalars, letters, offsets)
        self.members[made.name] = tuple(chain.nodes)
        self.calls.append((place, made))

    def add_subgraph(self, cut: Cut, place: int) -> None:
        made = subgraph(self.model, cut, self.dtype)
        for value in (*cut.reads, *cut.writes):
            self._value(value)
        self.calls.append((place, replace(made, name=self._name(made.name))))

    def add_control(self, node: ir.Node, bodies: Sequence[Network | Impossible], place: int) -> None:
        reads = []
        for value in node.inputs:
            assert value is not None
            array = None if value.is_graph_input() else constant_of(value)
            operand = value if array is None else Constant(str(value.name), axes_of(array.ndim), array)
            reads.append(self._operand(operand))
        writes = tuple(self._value(value) for value in node.outputs)
        kind: Any = node.op_type
        made = Control(self._name(name_of(node)), (name_of(node),), tuple(reads), writes, tuple(bodies), kind)
        self.calls.append((place, made))

    def _name(self, name: str) -> str:
        used, number, found = {call.name for _, call in self.calls}, 1, name
        while found in used:
            number += 1
            found = f"{name}.{number}"
        return found

    def add_view(self, node: ir.Node, place: int, pair: tuple[str, str] | None = None) -> None:
        """The view of a node: of these layouts, or of all in which x and y have the same bytes."""
        (before,) = inputs_of(node, 1)
        x, y = self.values[self._value(before)], self.values[self._value(node.outputs[0])]
        pairs = [(x.axes, y.axes)] if pair is None else [pair]
        if pair is None and x.shape == y.shape:
            pairs += [(layout, layout) for layout in self._possible(x)]
        elif pair is None:
            plain_x, plain_y = (
                [each.axes, *(layout for layout in self._possible(each) if same_bytes(each, layout, each.axes))]
                for each in (x, y)
            )
            pairs += [(of_x, of_y) for of_x in plain_x for of_y in plain_y]
        made = View(self._name(name_of(node)), (name_of(node),), x.name, y.name, tuple(dict.fromkeys(pairs)))
        self.calls.append((place, made))

    def _possible(self, value: Value) -> list[str]:
        """The layouts in which a value fills every block."""
        sizes = dict(zip(value.axes, value.shape))
        if value.axes != IMAGE:
            return []
        return [layout for layout in self.layouts if sizes["C"] % Layout.parse(layout).block("C") == 0]

    def sort(self) -> None:
        """Gives every call a place behind those that make what it reads, in the order of before where that is possible: a
        reader of a subgraph's first result may stand before the subgraph's last node."""
        calls = [call for _, call in sorted(self.calls, key=lambda each: each[0])]
        makers: dict[str, set[int]] = {}
        for number, call in enumerate(calls):
            for name in _writes(call):
                makers.setdefault(name, set()).add(number)
        # A kernel that reads a slice of a value stands before those that write the rest of it.
        order = TopologicalSorter(
            {
                number: {
                    maker
                    for name in _reads(call)
                    for maker in makers.get(name, ())
                    if maker < number or isinstance(calls[maker], Subgraph | Control)
                }
                for number, call in enumerate(calls)
            }
        )
        order.prepare()
        ready, self.calls = list(order.get_ready()), []
        while ready:
            number = min(ready)
            ready.remove(number)
            order.done(number)
            ready += order.get_ready()
            self.calls.append((len(self.calls), calls[number]))


def _reads(call: AnyNode) -> Iterable[str]:
    return call.arguments.values() if isinstance(call, Node) else (call.x,) if isinstance(call, View) else call.reads


def _writes(call: AnyNode) -> Iterable[str]:
    return call.outputs.values() if isinstance(call, Node) else (call.y,) if isinstance(call, View) else call.writes


def _same(one: Constant, other: Constant) -> bool:
    return one.axes == other.axes and one.array.shape == other.array.shape and bool((one.array == other.array).all())
