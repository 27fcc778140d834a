"""What readers of nodes of dynamic graphs share: arrays of the graph for values of the model, calls, bounds and views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.dynamic.dims import Unknown, traced
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.numbers import Range, Row
from schedsearch.dynamic.program import axes_of_view
from schedsearch.dynamic.rows import Rows
from schedsearch.network.facts import constant_input, constant_of, inputs_of, is_given, name_of
from schedsearch.network.invalid import ModelError
from schedsearch.network.views import random_problem, viewed
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.typed import ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir


class Nodes:
    """A graph while nodes are read into it.

    Args:
        operand: gives the graph's value of a value of the model.
        declared: bounds that the model declares for results; None where it does not.
    """

    def __init__(
        self,
        graph: DynamicGraph,
        rows: Rows,
        operand: Callable[[ir.Value], str],
        declared: Mapping[ir.Value, Sequence[int | None]],
    ) -> None:
        self.graph, self.rows, self.operand, self.declared = graph, rows, operand, declared

    def call(self, node: ir.Node, workload: Workload, arrays: Sequence[str]) -> list[str]:
        """The outputs of a call, without those that are only extents."""
        name = self.graph.unused(str(node.outputs[0].name))
        self.graph.call(workload, *arrays, name=name, source=f"node {name_of(node)} ({node.op_type})")
        outputs = {output.name: output for output in workload.outputs}
        return [f"{name}.{output}" for output in outputs if not is_extents(output, outputs)]

    def array_of(self, row: Row) -> str:
        """A row as an array of its shape."""
        if len(row.shape) == 1 or not row.shape or not self.graph.bound(row.value).numbers:
            return self.seen(row.value, row.shape or (1,)) if not self.graph.bound(row.value).numbers else row.value
        return self.seen(self.copied(row.value), row.shape)

    def copied(self, name: str) -> str:
        """The same numbers in an array that a call makes."""
        bound = self.graph.bound(name)
        count = bound.shape[0]
        every = self.graph.constant(self.graph.unused(f"0 to {count}"), np.arange(count))
        workload = Workload("gather", {"x": bound.shape, "indices": (count,), "dtype": bound.dtype})
        return self.graph.call(workload, name, every, name=self.graph.unused(f"{name} copied"))

    def seen(self, name: str, shape: Sequence[int]) -> str:
        return name if self.graph.bound(name).shape == tuple(shape) else self.graph.view(name, shape)

    def taken(self, node: ir.Node, count: int) -> list[str]:
        """The graph's values of a node's first inputs."""
        return [self.operand(value) for value in inputs_of(node, count)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.bound(name).shape

    def dtype(self, name: str) -> str:
        return self.graph.bound(name).dtype

    def number(self, node: ir.Node, place: int, default: float) -> float:
        if not is_given(node, place):
            return default
        found = constant_input(node, place)
        if found is None:
            raise ModelError(f"{name_of(node)} has an input {place} that is computed; allowed: a constant")
        return float(found.reshape(-1)[0])

    def axes(self, node: ir.Node, place: int, rank: int) -> tuple[int, ...] | None:
        """Constant axes; None if there are none."""
        given = constant_input(node, place) if is_given(node, place) else node.attributes.get_ints("axes", None)
        if given is None and is_given(node, place):
            raise ModelError(f"{name_of(node)} has axes that are computed; allowed: constants")
        return None if given is None else tuple(int(axis) % rank for axis in given)

    def wanted(self, node: ir.Node, shape: str) -> list[Range]:
        """The ranges of the extents that an array asks for."""
        value = node.inputs[-1]
        row = None if value is None else self.rows.row(value)
        return list(row.ranges) if row is not None else [(None, None)] * self.shape(shape)[0]

    def traced_bound(self, workload: Workload, arrays: Sequence[str]) -> list[int]:
        """The bound of a call's first output, less where an extent is known to be less."""
        function, names = workload.shape_functions["y"], [each.name for each in workload.signature]
        values = dict(zip((name for name in names if not is_extents(name, dict.fromkeys(names))), arrays))
        known = {name: found for name, value in values.items() if (found := self.graph.elements(value)) is not None}
        dims = {name: self.graph.dims(value) for name, value in values.items()}
        bound = workload.outputs[0].shape
        extents = traced("", workload.op, function, dims, known, bound)
        return [max(n, 1) if isinstance(n, int) else most for n, most in zip(extents, bound)]

    def bounds(self, node: ir.Node, ranges: Sequence[Range]) -> list[int]:
        """Bounds of a result: what follows from the inputs, or what the model declares."""
        result = node.outputs[0]
        declared = list(self.declared.get(result, ()))
        found = []
        for axis, (_, most) in enumerate(ranges):
            given = declared[axis] if len(declared) == len(ranges) else None
            bound = most if given is None else given if most is None else min(most, given)
            if bound is None:
                raise ModelError(
                    f"dimension {axis} of {result.name!r} ({node.op_type}) has no bound: its inputs do not limit it. "
                    "Give it a name in the model's value_info, and bounds for this name"
                )
            found.append(max(bound, 1))
        return found

    def dynamic(self, names: Mapping[str, str]) -> ParamsByName:
        """The parameter `dynamic`: the arguments of which extents are known at run time only."""
        return {"dynamic": [argument for argument, name in names.items() if self.graph.is_dynamic(name)]}

    # ---- views

    def view(self, node: ir.Node) -> str | None:
        """The same elements in another shape, if they are in the same places."""
        (x,) = inputs_of(node, 1)
        name = self.operand(x)
        shape = self.shape(name) if x.shape is None or len(x.shape) else ()
        target = self._target(node, name, shape) if node.op_type == "Reshape" else None
        if random_problem(node) or (node.op_type == "Reshape" and target is None):
            return None
        found = viewed(node, shape, target)
        if found is None:
            return None
        to = tuple(found) or (1,)
        if to == self.shape(name):
            return name
        unknown = [isinstance(dim, Unknown) for dim in self.graph.dims(name)]
        if (any(unknown) and axes_of_view(self.shape(name), to, unknown) is None) or self.graph.bound(name).numbers:
            return None
        return self.graph.view(name, to)

    def _target(self, node: ir.Node, name: str, shape: Sequence[int]) -> list[int] | None:
        """The shape that a Reshape asks for, if all that is unknown of it is a first extent that stays."""
        target = inputs_of(node, 2)[1]
        row, constant = self.rows.of.get(target), constant_of(target)
        if row is None:
            return None if constant is None else [int(n) for n in constant]
        wanted = list(self.graph.elements(row.value) or ())
        first = self.graph.dims(name)[:1]
        if wanted and isinstance(wanted[0], Unknown) and first and wanted[0] is first[0]:
            wanted[0] = shape[0]
        known = [extent for extent in wanted if not isinstance(extent, Unknown)]
        return known if len(known) == len(wanted) else None
