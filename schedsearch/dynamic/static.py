"""Subgraphs of a dynamic graph that are static networks: planned and fused as `schedsearch.network` does it.

A group of nodes becomes a model of its own, whose inputs have their bounds as shapes. `lower` fuses it, a planner chooses
layouts and kernels, and every planned call becomes a call of the dynamic graph. Nothing else is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.dynamic.dims import Unknown
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.program import Shown
from schedsearch.executable.references import packed
from schedsearch.executable.schedule import Held, Schedule, schedule
from schedsearch.network.facts import constant_of, name_of
from schedsearch.network.graph import Network, Plan
from schedsearch.network.lower import lowering
from schedsearch.network.model import simplified
from schedsearch.network.plan import first_plan
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Planner:
    """How static subgraphs are planned.

    Attributes:
        plan: chooses the way of each node, e.g. `lambda network: best_plan(network, costs)`.
        layouts: that images may have.
        apart: as of `schedsearch.network.lower.lower`.
    """

    plan: Callable[[Network], Plan] = first_plan
    layouts: tuple[str, ...] = ("NHWC", "NCHW")
    apart: tuple[str, ...] = ("DepthToSpace",)


class Refused(Exception):
    """Nodes of a group for which there is no static operator: node -> why."""

    def __init__(self, reasons: Mapping[ir.Node, str]) -> None:
        super().__init__("no static operator")
        self.reasons = reasons


def add_network(
    graph: DynamicGraph,
    nodes: Sequence[ir.Node],
    names: Mapping[ir.Value, str],
    results: Sequence[ir.Value],
    opsets: Mapping[str, int],
    planner: Planner,
) -> list[str]:
    """Adds the calls of some nodes.

    Args:
        nodes: in order.
        names: value of the model that other nodes make -> value of the graph, whose bound is its shape.
        results: what is needed of what the nodes make.

    Returns:
        The values of the graph that `results` are.

    Raises:
        Refused: some nodes have no static operator.
        ModelError: a node's arrays do not fit one another.
        UsageError: a call cannot take an array whose extents are known at run time.
    """
    model = _model(graph, nodes, names, results, opsets)
    given = [names[value] for value in _inputs(nodes, names)]
    in_rows = all(not isinstance(dim, Unknown) for name in given for dim in graph.dims(name)[1:])
    found = lowering(
        simplified(model, "the model"), layouts=planner.layouts, slices=None, cuts=in_rows, apart=planner.apart
    )  # fmt: skip
    if found.others:
        left = {name for each in found.others.values() for name in each}
        guilty = [node for node in nodes if name_of(node) in left]
        guilty = guilty or [node for node in nodes if node.op_type in found.others]
        raise Refused({node: found.reasons.get(node.op_type, "") for node in guilty or nodes})
    return _Calls(graph, found.network, schedule(found.network, planner.plan(found.network), in_place=False), given).add()


def _inputs(nodes: Sequence[ir.Node], names: Mapping[ir.Value, str]) -> list[ir.Value]:
    own = {value for node in nodes for value in node.outputs}
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    return [value for value in read if value not in own and constant_of(value) is None and value in names]


def _model(
    graph: DynamicGraph,
    nodes: Sequence[ir.Node],
    names: Mapping[ir.Value, str],
    results: Sequence[ir.Value],
    opsets: Mapping[str, int],
) -> ir.Model:
    import onnx_ir as ir

    inputs = _inputs(nodes, names)
    mine: dict[ir.Value | None, ir.Value | None] = {None: None}
    for value in inputs:
        shape = ir.Shape(graph.bound(names[value]).shape)
        mine[value] = ir.Value(name=value.name, type=value.type, shape=shape)
    constants = []
    for value in dict.fromkeys(value for node in nodes for value in node.inputs):
        if value is not None and value.const_value is not None:
            mine[value] = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            constants.append(mine[value])
    copies = []
    for node in nodes:
        outputs = [ir.Value(name=value.name, type=value.type) for value in node.outputs]
        mine |= dict(zip(node.outputs, outputs))
        given = [mine[value] for value in node.inputs]
        copies.append(
            ir.Node(node.domain, node.op_type, given, list(node.attributes.values()), outputs=outputs, name=node.name)
        )
    made = ir.Graph(
        [mine[value] for value in inputs],
        [mine[value] for value in results],
        nodes=copies,
        initializers=constants,
        opset_imports=dict(opsets),
        name="static part",
    )
    return ir.Model(made, ir_version=10)


class _Calls:
    """The calls of a schedule as those of a dynamic graph."""

    def __init__(self, graph: DynamicGraph, network: Network, found: Schedule, given: Sequence[str]) -> None:
        self.graph, self.network, self.found = graph, network, found
        self.made: dict[int, str] = dict(zip(found.inputs, given))  # number of an array -> value of the graph

    def add(self) -> list[str]:
        for call in self.found.calls:
            assert isinstance(call.computes, Workload)  # subgraphs for other runtimes are asked for
            workload = call.computes
            arguments = [
                self._as(self._array(call.arguments[spec.name]), spec.shape, spec.dtype) for spec in workload.signature
            ]
            name = self._unused(call.name)
            self.graph.call(workload, *arguments, name=name, scalars=call.scalars, source=f"node {call.name}")
            self.made |= {number: f"{name}.{output}" for output, number in call.outputs.items()}
            for number in call.outputs.values():
                held = self.found.arrays[number]
                if sorted(held.layout) == sorted(held.axes):
                    order = tuple(held.layout.index(axis) for axis in held.axes)
                    self.graph.shows.setdefault(held.name, Shown(self.made[number], order))
        copied = {copy: source for source, copy in self.found.copies}
        results = []
        for name, number in zip(self.network.outputs, self.found.outputs):
            value = self.network.values[name]
            results.append(self._as(self._array(copied.get(number, number)), value.shape, value.dtype))
        return results

    def _array(self, number: int) -> str:
        """The graph's value of an array: made by a call, a constant, or a view of an array with the same memory."""
        if number not in self.made:
            held = self.found.arrays[number]
            self.made[number] = (
                self._constant(held)
                if held.memory.kind == "constant"
                else next(name for other, name in self.made.items() if self.found.arrays[other].memory is held.memory)
            )
        return self.made[number]

    def _constant(self, held: Held) -> str:
        constant = self.network.all_constants[held.name]
        data = packed(constant.array, constant.axes, held.layout, held.dtype)
        array = np.frombuffer(data, dtype_of(held.dtype).storage).reshape(held.stored)
        return self.graph.constant(self._unused(f"{held.name} {held.layout} {held.dtype}"), array, held.dtype)

    def _as(self, name: str, shape: Sequence[int], dtype: str) -> str:
        return name if self.graph.bound(name).shape == tuple(shape) else self.graph.view(name, shape)

    def _unused(self, name: str) -> str:
        return self.graph.unused(name)
