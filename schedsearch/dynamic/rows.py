"""Which nodes of a model compute with shapes, and the rows of numbers that they become: see `dynamic.numbers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.dynamic import numbers
from schedsearch.dynamic.dims import Unknown, traced
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.numbers import Computed, Range, Row
from schedsearch.network.facts import constant_input, constant_of, dtype_of, is_given

if TYPE_CHECKING:
    import onnx_ir as ir

WHOLE = ("int64", "int32", "uint8")  # uint8 are truths
READ = (
    "Shape", "Size", *numbers.BINARY, *numbers.UNARY, *numbers.SAME, *numbers.REDUCED, "Where", "Concat", "Gather", "Slice",
    "Clip",
)  # fmt: skip
_NEEDS_A_ROW = (*numbers.SAME, "Concat", "Gather", "Slice", "Where")  # of arrays there are other ways


class Rows:
    """The rows of a model so far.

    Args:
        names: value of the model -> value of the graph; grows while the model is read.
    """

    def __init__(self, graph: DynamicGraph, names: dict[ir.Value, str]) -> None:
        self.graph, self.names = graph, names
        self.of: dict[ir.Value, Row] = {}

    def read(self, node: ir.Node) -> bool:
        """Whether the node computes with shapes; its result is then a row or a constant."""
        if node.op_type not in READ:
            return False
        if node.op_type in ("Shape", "Size"):
            shape = self._shape(node)
            if shape is None:
                return True
            found, given = shape
        else:
            rows = [self.row(value) for value in node.inputs if value is not None]
            if any(row is None for row in rows[: 1 if node.op_type in (*numbers.SAME, "Slice", *numbers.REDUCED) else None]):
                return False
            if node.op_type in _NEEDS_A_ROW and not any(value in self.of for value in node.inputs if value is not None):
                return False
            if dtype_of(node.outputs[0]) not in ("", *WHOLE):
                return False
            computed = self._computed(node, [row for row in rows if row is not None])
            if isinstance(computed, Row):
                self.of[node.outputs[0]] = computed
                return True
            if computed is None:
                return False
            found, given = computed
        self._put(node, found, given)
        return True

    def row(self, value: ir.Value) -> Row | None:
        """A row, or the few whole numbers of a constant or an array of fixed extents."""
        if value in self.of:
            return self.of[value]
        constant = constant_of(value)
        if constant is not None:
            if constant.dtype.kind not in "iub" or not 1 <= constant.size <= numbers.MOST:
                return None
            if value not in self.names:
                array = constant.reshape(-1).astype(np.int64)
                self.names[value] = self.graph.constant(self.graph.unused(str(value.name)), array)
            ranges: list[Range] = [(int(n), int(n)) for n in constant.reshape(-1)]
            return Row(self.names[value], constant.shape, tuple(ranges))
        name = self.names.get(value)
        if name is None or self.graph.is_dynamic(name) or self.graph.bound(name).dtype not in ("int64", "int32"):
            return None
        rank = len(self.graph.bound(name).shape) if value.shape is None else len(value.shape)
        shape = self.graph.bound(name).shape if rank else ()
        count = math.prod(shape)
        return Row(name, shape, ((None, None),) * count) if 1 <= count <= numbers.MOST else None

    def ranges(self, name: str) -> list[Range]:
        """Of the extents of a value of the graph."""
        bound, sizes = self.graph.bound(name), self.graph.bound(name).sizes
        return [
            ((sizes[axis].least if axis in sizes else 0) if isinstance(dim, Unknown) else most, most)
            for axis, (dim, most) in enumerate(zip(self.graph.dims(name), bound.shape))
        ]

    def _shape(self, node: ir.Node) -> tuple[Computed, list[str]] | None:
        """The extents of an array, or None where they are constant and there is nothing to compute."""
        (x,) = node.inputs[:1]
        assert x is not None
        constant = constant_of(x)
        known = self.of[x].shape if x in self.of else None if constant is None else constant.shape
        ranges: list[Range] = [(n, n) for n in known] if known is not None else self.ranges(self.names[x])
        axes = range(len(ranges))[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(ranges))]
        if known is not None or (node.op_type == "Shape" and not axes):
            extents = np.array([math.prod(known or ())] if node.op_type == "Size" else [(known or ())[n] for n in axes])
            self._fold(node.outputs[0], extents.reshape(() if node.op_type == "Size" else -1).astype(np.int64))
            return None
        name = self.names[x]
        return (numbers.of_size(ranges) if node.op_type == "Size" else numbers.of_shape(ranges, axes.start, axes.stop)), [
            name
        ]

    def _computed(self, node: ir.Node, rows: Sequence[Row]) -> tuple[Computed, list[str]] | Row | None:
        """What a node computes, and of which values; a row if its numbers are those of another one."""
        op, read = node.op_type, node.attributes
        a = rows[0]
        if op in numbers.SAME:
            return self._same(node, a)
        if op in numbers.UNARY:
            return numbers.unary(op, a), [a.value]
        if op in numbers.BINARY:
            return self._joined(op, rows)
        if op == "Clip":
            return self._clipped(node, rows)
        if op in numbers.REDUCED:
            axes = constant_input(node, 1) if is_given(node, 1) else read.get_ints("axes", ())
            every = axes is not None and (not len(axes) or {int(n) % len(a.shape) for n in axes} == set(range(len(a.shape))))
            return (numbers.reduced(op, a, bool(read.get_int("keepdims", 1))), [a.value]) if every else None
        if op == "Where":
            return numbers.where(*rows), [row.value for row in rows]
        if op == "Concat":
            return self._joined(op, rows) if all(len(row.shape) == 1 for row in rows) else None
        every_place = np.arange(a.count).reshape(a.shape)
        if op == "Gather":
            indices = constant_input(node, 1)
            if indices is None:
                return (numbers.gathered(a, rows[1]), [a.value, rows[1].value]) if len(a.shape) == 1 else None
            return numbers.picked(a, np.take(every_place, indices, axis=read.get_int("axis", 0))), [a.value]
        parts = [constant_input(node, place) for place in range(1, len(node.inputs))]
        if any(part is None for part in parts):
            return None
        begin, end, *more = [[int(n) for n in part] for part in parts if part is not None]
        axes_, steps = more[0] if more else range(len(begin)), more[1] if len(more) > 1 else [1] * len(begin)
        slices: list[Any] = [slice(None)] * len(a.shape)
        for axis, first, last, step in zip(axes_, begin, end, steps):
            slices[axis] = slice(first, last if last >= 0 or step > 0 or last >= -len(every_place) else None, step)
        found = every_place[tuple(slices)]
        return (numbers.picked(a, found), [a.value]) if found.size else None

    def _clipped(self, node: ir.Node, rows: Sequence[Row]) -> tuple[Computed, list[str]] | Row:
        """Not less than the second input and not more than the third, each of which may be missing."""
        found, limits = rows[0], iter(rows[1:])
        for op, place in (("Max", 1), ("Min", 2)):
            if is_given(node, place):
                limit = next(limits)
                found = self._add(
                    f"{found.value} and {limit.value}", numbers.binary(op, found, limit), [found.value, limit.value]
                )
        return found

    def _joined(self, op: str, rows: Sequence[Row]) -> tuple[Computed, list[str]] | Row:
        """Several rows, two at a time."""
        found = rows[0]
        for number, row in enumerate(rows[1:], start=2):
            computed = numbers.concat(found, row) if op == "Concat" else numbers.binary(op, found, row)
            if number == len(rows):
                return computed, [found.value, row.value]
            found = self._add(f"{found.value} and {row.value}", computed, [found.value, row.value])
        return found

    def _same(self, node: ir.Node, a: Row) -> Row | None:
        """The same numbers in another shape."""
        shape: list[int] = list(a.shape)
        given = constant_input(node, 1) if is_given(node, 1) else node.attributes.get_ints("axes", ())
        if given is None:
            return None
        if node.op_type == "Unsqueeze":
            for axis in sorted(int(n) % (len(shape) + len(given)) for n in given):
                shape.insert(axis, 1)
        elif node.op_type == "Squeeze":
            axes = {int(n) % len(shape) for n in given} or {axis for axis, n in enumerate(shape) if n == 1}
            shape = [n for axis, n in enumerate(shape) if axis not in axes]
        elif node.op_type == "Reshape":
            shape = list(np.empty(a.shape, np.int8).reshape([int(n) or a.shape[i] for i, n in enumerate(given)]).shape)
        elif node.op_type == "Flatten":
            return None
        return Row(a.value, tuple(shape), a.ranges) if math.prod(shape) == a.count else None

    def _put(self, node: ir.Node, computed: Computed, given: Sequence[str]) -> None:
        (result,) = node.outputs
        function = computed.function
        parameters = function.inputs
        dims = {each: self.graph.dims(value) for each, value in zip(parameters, given)}
        known = {each: found for each, value in zip(parameters, given) if (found := self.graph.elements(value)) is not None}
        elements = traced(str(result.name), "", function, dims, known, (1,) * len(computed.ranges))
        if not any(isinstance(each, Unknown) for each in elements):
            kind = bool if dtype_of(result) == "uint8" else np.int32 if dtype_of(result) == "int32" else np.int64
            self._fold(result, np.array(elements, kind).reshape(computed.shape))
            return
        self.of[result] = self._add(str(result.name), computed, given)

    def _fold(self, result: ir.Value, array: np.ndarray[Any, Any]) -> None:
        import onnx_ir as ir

        result.const_value, result.shape = ir.tensor(array, name=result.name), ir.Shape(array.shape)

    def _add(self, name: str, computed: Computed, given: Sequence[str]) -> Row:
        value = self.graph.numbers(self.graph.unused(name), len(computed.ranges), computed.rule, given, computed.params)
        return Row(value, computed.shape, computed.ranges)
