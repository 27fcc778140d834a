"""A network as nodes that kernels compute: the form between a model file and an executable.

`lower` makes it from a model, `plan` chooses a way for each node and with it the layouts of values, and the executable runs
what was chosen. Everything here is data; nothing knows ONNX, records or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.ops import ArgSpec
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Value:
    """An array that a node makes, or an input of the network, apart from its layout in memory.

    Attributes:
        axes: a capital letter for each dimension in the model's order: NCHW for images, else ABC and so on.
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
        array: NumPy array in the order of `axes`. A way may want it in another layout or dtype; see `Way.argument`.
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
        ways: workloads of which each computes the node. They differ in layouts only; at least one.
        scalars: call-time scalars of the workloads whose values are not the defaults.
    """

    name: str
    sources: tuple[str, ...]
    arguments: Mapping[str, str]
    outputs: Mapping[str, str]
    ways: tuple[Workload, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)

    def layouts(self, way: Workload) -> Iterator[tuple[str, ArgSpec]]:
        """The name of each value or constant that a way reads or writes, with the argument or output that says its layout
        in memory (`axes`), shape and dtype there."""
        for spec in way.signature:
            yield self.arguments[spec.name], spec
        for spec in way.outputs:
            yield self.outputs[spec.name], spec


@dataclass(frozen=True)
class View:
    """A value under another shape: Reshape, Flatten, Squeeze. It costs nothing where x is in the order of its axes.

    Attributes:
        layouts: pairs of layouts of x and y in which the bytes are the same, e.g. ("NHWC", "AB") if H and W are 1. The first
            is the plain one, which is always there: the orders of the axes of x and y.
    """

    name: str
    sources: tuple[str, ...]
    x: str
    y: str
    layouts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Network:
    """A network whose shapes are known.

    Attributes:
        inputs, outputs: names of values, as the model has them. They are in the order of their axes in memory.
        values: every value by name.
        constants: every constant by name.
        nodes: in an order in which they can run.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Constant]
    nodes: tuple[Node | View, ...]


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
    """The ways and layouts that were chosen for a network.

    Attributes:
        ways: name of a node -> the workload that computes it, one of its `ways`.
        conversions: each is done once, right before the first node that reads its result.
        predicted_ns: the sum of the costs of ways and conversions.
        measured: workload id -> nanoseconds that the plan reckoned with; ids that are missing were estimated.
    """

    ways: Mapping[str, Workload]
    conversions: tuple[Conversion, ...]
    predicted_ns: float
    measured: Mapping[str, float] = field(default_factory=dict)
