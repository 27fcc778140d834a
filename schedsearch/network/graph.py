"""A network as nodes that kernels compute: the form between a model file and an executable.

`lower` makes it from a model, `plan` chooses an implementation for each node and with it the layouts of values, and the
executable runs what was chosen. Everything here is data; nothing knows ONNX, records or devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from schedsearch.ops import ArgSpec, Layout
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import numpy as np


def axes_of(rank: int) -> str:
    """The letters of the dimensions of a value: NCHW of four, whatever they mean, else A, B, C ...; none of a scalar."""
    return "NCHW" if rank == 4 else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:rank]


@dataclass(frozen=True)
class Value:
    """An array that a node makes, or an input of the network, apart from its layout in memory.

    Attributes:
        axes: a capital letter for each dimension in the model's order; see `axes_of`.
        shape: the extents of `axes`.
        dtype: by our names, e.g. float16.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that is part of the network, such as a weight.

    Attributes:
        axes: as of a `Value`: OIHW for filters of convolutions, K for one element for each channel.
        array: NumPy array in the order of `axes`. An implementation may want another layout or dtype.
    """

    name: str
    axes: str
    array: np.ndarray


@dataclass(frozen=True)
class Node:
    """A kernel call: nodes of the model that one kernel computes together.

    Attributes:
        name: unique; that of the first node of the model.
        sources: names of the nodes of the model that it stands for, in order.
        arguments: argument of the workloads -> name of a value or a constant.
        outputs: output of the workloads -> name of the value.
        implementations: workloads of which each computes the node. They differ in layouts only; at least one.
        scalars: call-time scalars of the workloads whose values are not the defaults.
        letters: implementation -> argument or output -> its layout in the letters of the value, where the workload has other
            letters: an image in NHWC is ABCD for concat, whose letters are {"x0": "NHWC", "x1": "NHWC", "y": "NHWC"}.
        offsets: output -> its first channel in the value, of which the node writes a slice. Others write a whole value.
    """

    name: str
    sources: tuple[str, ...]
    arguments: Mapping[str, str]
    outputs: Mapping[str, str]
    implementations: tuple[Workload, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    letters: Mapping[Workload, Mapping[str, str]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)

    def layouts(self, workload: Workload) -> Iterator[tuple[str, ArgSpec]]:
        """The name of each value or constant that an implementation reads or writes, with the argument or output that says
        its layout in memory (`axes`), shape and dtype there. `Network.layout` turns it into a layout of the value."""
        letters = self.letters.get(workload, {})
        for spec in workload.signature:
            yield self.arguments[spec.name], replace(spec, axes=letters.get(spec.name, spec.axes))
        for spec in workload.outputs:
            yield self.outputs[spec.name], replace(spec, axes=letters.get(spec.name, spec.axes))


@dataclass(frozen=True)
class View:
    """A value under another shape: Reshape, Flatten, Squeeze. It costs nothing where x is in the order of its axes.

    Attributes:
        layouts: pairs of layouts of x and y in which the bytes are the same, e.g. ("NCHW", "AB"), or ("NHWC", "ABCD") for a
            transposition to NHWC; at least one.
    """

    name: str
    sources: tuple[str, ...]
    x: str
    y: str
    layouts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Nodes of the model that another runtime computes together, because no kernel does.

    It reads and writes values in the order of their axes.

    Attributes:
        name: unique; that of its first node.
        sources: names of the nodes of the model, in order.
        reasons: for each of `sources` its operator, and why it has no kernel, e.g. "LSTM: schedsearch lacks this operator".
        reads, writes: names of values, in the order of the inputs and outputs of `model`; at least one is written.
        model: the nodes as an ONNX model with its weights.
    """

    name: str
    sources: tuple[str, ...]
    reasons: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    model: bytes = field(repr=False)


@dataclass(frozen=True)
class Impossible:
    """A branch that cannot be computed for arrays of the network's shapes.

    Attributes:
        reason: why, for people.
    """

    reason: str


@dataclass(frozen=True, eq=False)
class Control:
    """A node that runs networks inside of it: an `If` of a computed condition, or a `Loop` of a computed number of turns.

    It reads and writes values in the order of their axes.

    Attributes:
        name: unique; that of the node of the model.
        reads: names of values and constants. Of an If, the condition, an array of one truth value, and the inputs of both
            bodies. Of a Loop, the most turns, the first condition, what is carried from turn to turn, and what else the body
            reads.
        writes: names of values. Of an If, the outputs of both bodies; of a Loop, what is carried.
        bodies: of an If, what runs if the condition is true, and if it is false; at least one of them is possible. Of a
            Loop, one: its inputs are the number of the turn, a true condition, and then what the Loop reads; its outputs are
            the condition and what is carried.
    """

    name: str
    sources: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bodies: tuple[Network | Impossible, ...] = field(repr=False)
    kind: Literal["If", "Loop"] = "If"

    def dtype(self, number: int) -> str:
        """Of what it reads, by its number."""
        body = self.networks[0]
        if self.kind == "If":
            return "bool" if number == 0 else body.values[body.inputs[number - 1]].dtype
        return body.values[body.inputs[number]].dtype

    @property
    def networks(self) -> tuple[Network, ...]:
        """The bodies that can run."""
        return tuple(body for body in self.bodies if isinstance(body, Network))


AnyNode = Node | View | Subgraph | Control


@dataclass(frozen=True)
class Network:
    """A network whose shapes are known.

    Attributes:
        inputs, outputs: names of values, as the model has them.
        values: every value by name.
        constants: every constant by name.
        nodes: in an order in which they can run.
        fixed: outputs that are constants of the model; their names are among `values`.
        io_layouts: input or output -> its layout in the caller's memory; others are in the order of their axes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Constant]
    nodes: tuple[AnyNode, ...]
    fixed: Mapping[str, Constant] = field(default_factory=dict)
    io_layouts: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_nodes(self) -> Iterator[AnyNode]:
        """Those of the network and of the bodies inside of it."""
        for node in self.nodes:
            yield node
            for body in node.networks if isinstance(node, Control) else ():
                yield from body.all_nodes

    @property
    def all_constants(self) -> Mapping[str, Constant]:
        """Those that kernels read and those that are outputs, by name."""
        return {**self.constants, **self.fixed}

    def with_io_layout(self, layout: str) -> Network:
        """The same network with all inputs and outputs of four dimensions in a layout, NCHW or NHWC, in the caller's
        memory."""
        ports = (self.values[name] for name in (*self.inputs, *self.outputs))
        return replace(self, io_layouts={value.name: layout for value in ports if len(value.axes) == len(layout)})

    def io_layout(self, name: str) -> str:
        """The layout of an input or output in the caller's memory."""
        return self.io_layouts.get(name, self.values[name].axes)

    def layout(self, name: str, spec: ArgSpec) -> str:
        """The layout in which an argument or output holds a value or constant, in the letters of its `axes`.

        A spec with the same letters names it itself. One with other letters, such as the MK of a matrix AB, is in the plain
        order; a node whose implementation has it otherwise says so in `letters`. It may have other dimensions than the
        value, such as one long row, where the bytes are the same.

        Raises:
            ValueError: it has another shape, or another number of elements, than the value or constant in this layout.
        """
        array = self.values[name] if name in self.values else self.constants[name]
        shape = array.shape if isinstance(array, Value) else array.array.shape
        layout = Layout.parse(spec.axes)
        if sorted(layout.axes) != sorted(array.axes):
            layout = Layout.parse(array.axes)
        in_memory = layout.shape(dict(zip(array.axes, shape)))
        wanted = spec.slice_of or spec.shape
        if (in_memory != wanted) if len(in_memory) == len(wanted) else (math.prod(in_memory) != spec.size):
            raise ValueError(f"{name} {array.axes} {shape} is not {spec.shape} in layout {layout}, as {spec.name} has it")
        return layout.text


@dataclass(frozen=True)
class Conversion:
    """A change of a value's layout, which a plan adds.

    Attributes:
        value: its name.
        x, y: the layouts before and after, e.g. NCHW and NHWC.
        workload: a layout_transform or transpose that does it.
    """

    value: str
    x: str
    y: str
    workload: Workload


@dataclass(frozen=True)
class Plan:
    """The implementations and layouts that were chosen for a network.

    A reader takes a value as it was made or after one of the conversions: the one of which the layout holds the same bytes
    as the reader's (`layouts.same_bytes`).

    Attributes:
        implementations: name of a node -> the workload that computes it, one of its `implementations`.
        views: name of a view -> the layouts of its x and y, one of its `layouts`.
        conversions: each is done once, right before the first node that reads its result.
        predicted_ns: the sum of the costs of implementations and conversions, and of the longest body of each `Control`.
        times_ns: workload id -> nanoseconds that the plan reckoned with.
        measured: those of them that were not estimated.
        bodies: name of a `Control` -> the plans of its `networks`.
    """

    implementations: Mapping[str, Workload]
    views: Mapping[str, tuple[str, str]]
    conversions: tuple[Conversion, ...]
    predicted_ns: float
    measured: Mapping[str, float] = field(default_factory=dict)
    times_ns: Mapping[str, float] = field(default_factory=dict)
    bodies: Mapping[str, tuple[Plan, ...]] = field(default_factory=dict)

    @property
    def workloads(self) -> Iterator[Workload]:
        """Of every kernel call, those of bodies included."""
        yield from self.implementations.values()
        yield from (step.workload for step in self.conversions)
        for body in (each for several in self.bodies.values() for each in several):
            yield from body.workloads
