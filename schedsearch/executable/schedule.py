"""The order of kernel calls of a network, and which of its arrays are the same memory.

`schedule` walks the network as its plan says. It needs no kernels: memory for workspaces is added by `build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedsearch.errors import UsageError
from schedsearch.network.graph import Control, Conversion, Network, Node, Plan, Subgraph, View
from schedsearch.network.layouts import same_bytes
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.workload import Workload

Kind = Literal["input", "output", "constant", "arena"]


@dataclass
class Memory:
    """Bytes that one or several arrays occupy.

    Attributes:
        kind: whose they are.
        number: of the input or output.
        nbytes: their number.
        first, last: numbers of the first and of the last call that uses them; -1 before the first call.
    """

    kind: Kind
    nbytes: int
    number: int = 0
    first: int = -1
    last: int = -1


@dataclass
class Held:
    """A value or constant in one layout; see `program.Array`."""

    name: str
    layout: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[int, ...]
    memory: Memory


@dataclass
class ScheduledCall:
    """One kernel call, one subgraph that another runtime computes, or a node with bodies; see `program.Call`."""

    name: str
    sources: tuple[str, ...]
    computes: Workload | Subgraph | Control
    arguments: dict[str, int]
    outputs: dict[str, int]
    scalars: Mapping[str, float] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)

    @property
    def arrays(self) -> Iterator[int]:
        yield from self.arguments.values()
        yield from self.outputs.values()


@dataclass
class Schedule:
    """Calls in the order in which they run, and every array. `inputs`, `outputs` and `copies` hold indices of arrays."""

    arrays: list[Held]
    calls: list[ScheduledCall]
    inputs: list[int]
    outputs: list[int]
    copies: list[tuple[int, int]]


def schedule(network: Network, plan: Plan, *, in_place: bool = True) -> Schedule:
    """The calls of a network according to a plan.

    Args:
        in_place: kernels may update arguments that nothing else reads.

    Conversions run right before the first call that reads their result. Views, and layouts that hold the same bytes, share
    memory with their source. A kernel that may update an argument in place does so when nothing else reads it later.
    """
    walk = _Walk(network, plan)
    for number, name in enumerate(network.inputs):
        walk.add_input(number, name)
    for name in network.fixed:
        walk.add_fixed(name)
    for node in network.nodes:
        if isinstance(node, View):
            walk.view(node)
        elif isinstance(node, Subgraph | Control):
            walk.whole(node)
        else:
            walk.call(node)
    done = walk.finish()
    _set_lifetimes(done)
    if in_place:
        _update_in_place(done)
    return done


class _Walk:
    """The state of one walk over the nodes."""

    def __init__(self, network: Network, plan: Plan) -> None:
        self._network, self._plan = network, plan
        self._there: dict[str, list[int]] = {}  # value -> its arrays so far
        self._constants: dict[tuple[str, str, str], int] = {}
        self._result = Schedule([], [], [], [], [])

    def add_input(self, number: int, name: str) -> None:
        self._result.inputs.append(self._add_port(name, Memory("input", 0, number)))

    def add_fixed(self, name: str) -> None:
        """An output that is a constant, in the caller's layout."""
        self._add_port(name, Memory("constant", 0))

    def view(self, node: View) -> None:
        x_layout, y_layout = self._plan.views[node.name]
        source = self._result.arrays[self._bring(node.x, x_layout)]
        value = self._network.values[node.y]
        self._add(node.y, y_layout, value.dtype, _stored(y_layout, value.axes, value.shape), source.memory)

    def call(self, node: Node) -> None:
        workload = self._plan.implementations[node.name]
        named = list(node.layouts(workload))
        arguments = {
            own.name: self._argument(name, spec)
            for own, (name, spec) in zip(workload.signature, named[: len(workload.signature)])
        }
        outputs = {
            own.name: self._output(name, self._network.layout(name, spec), spec, node)
            for own, (name, spec) in zip(workload.outputs, named[len(workload.signature) :])
        }
        offsets = {name: self._offset_bytes(outputs[name], channel) for name, channel in node.offsets.items()}
        self._result.calls.append(
            ScheduledCall(node.name, node.sources, workload, arguments, outputs, node.scalars, offsets)
        )

    def whole(self, node: Subgraph | Control) -> None:
        """A subgraph or a node with bodies, which take values in the order of their axes."""
        writes = [self._network.values[name] for name in node.writes]
        arguments = {f"x{number}": self._given(node, number, name) for number, name in enumerate(node.reads)}
        outputs = {f"y{number}": self._make(value.name, value.axes, value.dtype) for number, value in enumerate(writes)}
        self._result.calls.append(ScheduledCall(node.name, node.sources, node, arguments, outputs))

    def _given(self, node: Subgraph | Control, number: int, name: str) -> int:
        """A value or constant in the order of its axes."""
        if name in self._network.values:
            return self._bring(name, self._network.values[name].axes)
        assert isinstance(node, Control)
        constant = self._network.constants[name]
        return self._argument(name, ArgSpec(name, constant.axes, constant.array.shape, node.dtype(number)))

    def finish(self) -> Schedule:
        """Brings the outputs into the caller's layout and gives them memory of the caller."""
        found, network = self._result, self._network
        ends = [self._bring(name, network.io_layout(name)) for name in network.outputs]
        for number, (name, end) in enumerate(zip(network.outputs, ends)):
            memory = found.arrays[end].memory
            if memory.kind == "arena":
                memory.kind, memory.number = "output", number
                # A kernel may have made it in another layout that holds the same bytes.
                is_same = found.arrays[end].layout == network.io_layout(name)
                found.outputs.append(end if is_same else self._add_port(name, memory))
                continue
            copy = self._add_port(name, Memory("output", 0, number))
            found.copies.append((end, copy))
            found.outputs.append(copy)
        return found

    def _add_port(self, name: str, memory: Memory) -> int:
        """An input or output as the caller has it."""
        value, layout = self._network.values[name], self._network.io_layout(name)
        if value.dtype not in DTYPES:
            raise UsageError(
                f"{name!r}, an input or output of the model, is {value.dtype}; allowed: {', '.join(DTYPES)}. Change its "
                "dtype in the model"
            )
        return self._add(name, layout, value.dtype, _stored(layout, value.axes, value.shape), memory)

    def _argument(self, name: str, spec: ArgSpec) -> int:
        layout = self._network.layout(name, spec)
        if name in self._network.values:
            return self._bring(name, layout)
        key = name, layout, spec.dtype
        if key not in self._constants:
            constant = self._network.constants[name]
            self._constants[key] = len(self._result.arrays)
            memory, shape = Memory("constant", spec.nbytes), constant.array.shape
            stored = _stored(layout, constant.axes, shape) if layout else spec.shape
            self._result.arrays.append(Held(name, layout, constant.axes, shape, spec.dtype, stored, memory))
        return self._constants[key]

    def _output(self, name: str, layout: str, spec: ArgSpec, node: Node) -> int:
        """The array that a node writes, or of which it writes a slice as other nodes do."""
        if spec.name in node.offsets and name in self._there:
            found = self._find(name, layout)
            if found is None:
                raise ValueError(
                    f"{node.name} writes a slice of {name} in layout {layout}; other nodes write another layout"
                )
            return found
        value = self._network.values[name]
        # Sums of unsigned numbers are uint32 for us and int32 for ONNX: the same bits.
        dtype = value.dtype if (spec.dtype, value.dtype) == ("uint32", "int32") else spec.dtype
        return self._make(name, layout, dtype, spec.nbytes)

    def _offset_bytes(self, index: int, channel: int) -> int:
        """The bytes of an image before one of its channels, a multiple of the blocks of its layout."""
        held = self._result.arrays[index]
        sizes, first = dict(zip(held.axes, held.shape)), dict.fromkeys(held.axes, 0) | {"C": channel}
        return int(Layout.parse(held.layout).offset(sizes, first)) * dtype_of(held.dtype).nbytes

    def _make(self, name: str, layout: str, dtype: str, nbytes: int = 0) -> int:
        """An array in the arena, of at least so many bytes."""
        value = self._network.values[name]
        return self._add(name, layout, dtype, _stored(layout, value.axes, value.shape), Memory("arena", nbytes))

    def _bring(self, name: str, layout: str) -> int:
        """The array that holds a value in a layout. Adds the conversion that the plan has for it, if it needs one."""
        found = self._find(name, layout)
        if found is not None:
            return found
        step = self._conversion(name, layout)
        source = self._bring(name, step.x)
        (argument,), output = step.workload.signature, step.workload.output
        made = self._make(name, step.y, output.dtype, output.nbytes)
        self._result.calls.append(
            ScheduledCall(f"{name}: {step.x} to {step.y}", (), step.workload, {argument.name: source}, {output.name: made})
        )
        return made

    def _find(self, name: str, layout: str) -> int | None:
        value, arrays = self._network.values[name], self._result.arrays
        there = self._there.get(name, [])
        exact = next((index for index in there if arrays[index].layout == layout), None)
        if exact is not None:
            return exact
        return next((index for index in there if same_bytes(value, arrays[index].layout, layout)), None)

    def _conversion(self, name: str, layout: str) -> Conversion:
        value = self._network.values[name]
        for step in self._plan.conversions:
            if step.value == name and same_bytes(value, step.y, layout):
                return step
        there = ", ".join(self._result.arrays[index].layout for index in self._there.get(name, []))
        raise ValueError(f"the plan has {name} in layout {there or 'none'} and no conversion to {layout}")

    def _add(self, name: str, layout: str, dtype: str, stored: tuple[int, ...], memory: Memory) -> int:
        value = self._network.values[name]
        if dtype != value.dtype:
            raise ValueError(f"{name} is {value.dtype}, and a kernel writes it as {dtype}")
        held = Held(name, layout, value.axes, value.shape, dtype, stored, memory)
        memory.nbytes = max(memory.nbytes, _nbytes(held))
        self._result.arrays.append(held)
        index = len(self._result.arrays) - 1
        self._there.setdefault(name, []).append(index)
        return index


def _stored(layout: str, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return Layout.parse(layout).shape(dict(zip(axes, shape)))


def _nbytes(held: Held) -> int:
    count = 1
    for extent in held.stored:
        count *= extent
    return count * dtype_of(held.dtype).nbytes


def _set_lifetimes(found: Schedule) -> None:
    for number, call in enumerate(found.calls):
        for index in call.arrays:
            memory = found.arrays[index].memory
            memory.first = number if memory.first < 0 else memory.first
            memory.last = number
    for source, _ in found.copies:
        found.arrays[source].memory.last = len(found.calls)


def _update_in_place(found: Schedule) -> None:
    """Lets an output take the memory of the argument that it may share, where no other array of the network needs it."""
    for number, call in enumerate(found.calls):
        for spec in call.computes.signature if isinstance(call.computes, Workload) else ():
            if spec.aliases not in call.outputs:
                continue
            argument = found.arrays[call.arguments[spec.name]].memory
            output = found.arrays[call.outputs[spec.aliases]].memory
            readers = [index for index in call.arguments.values() if found.arrays[index].memory is argument]
            if not (argument.kind == output.kind == "arena" and argument.nbytes == output.nbytes == spec.nbytes):
                continue
            if argument.last != number or output.first != number or len(readers) != 1:
                continue
            argument.last = output.last
            for held in found.arrays:
                if held.memory is output:
                    held.memory = argument
