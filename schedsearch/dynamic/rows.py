"""Which nodes of a model compute with shapes, and the rows of numbers that they become: see `dynamic.numbers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.dynamic import numbers
from schedsearch.dynamic.dims import Unknown, traced
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.numbers import Computed, Range, Row
from schedsearch.network.facts import constant_input, constant_of, dtype_of, is_given, name_of
from schedsearch.network.invalid import ModelError
from schedsearch.network.views import viewed
from schedsearch.ops import float_words
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


WHOLE = ("int64", "int32", "uint8")  # uint8 are truths
_OF_FLOATS = (
    "Add", "Sub", "Mul", "Div", "Min", "Max", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Neg", "Abs",
    "Floor", "Ceil", "Round", "Reciprocal", "Clip", "ReduceMax", "ReduceMin", "Where", "Gather", "Slice", "Concat",
    *numbers.SAME,
)  # fmt: skip
_TYPES = {"FLOAT": "float32", "DOUBLE": "float64", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}
_NEEDS_A_ROW = (*numbers.SAME, "Concat", "Gather", "Slice", "Where")  # of arrays there are other ways


_Result = tuple[Computed, list[str]] | Row | None


class Rows:
    """The rows of a model so far.

    Args:
        names: value of the model -> value of the graph; grows while the model is read.
    """

    def __init__(self, graph: DynamicGraph, names: dict[ir.Value, str]) -> None:
        self.graph, self.names = graph, names
        self.of: dict[ir.Value, Row] = {}
        self._constants: dict[ir.Value, str] = {}  # of the model -> the words in the graph

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
            given_rows = [row for row in rows if row is not None]
            if not self._is_possible(node, given_rows):
                return False
            computed = _READERS[node.op_type](self, node, given_rows)
            if isinstance(computed, Row):
                self.of[node.outputs[0]] = computed
                return True
            if computed is None:
                return False
            found, given = computed
        if found.dtype in float_words.DTYPES and any(None in each for each in found.ranges):
            raise ModelError(
                f"{name_of(node)} ({node.op_type}) may give an infinite number or none, which shape arithmetic cannot have; "
                "limit its inputs, e.g. a divisor by the least of a size, Size('n', 1, 64), or by Max with 1"
            )
        self._put(node, found, given)
        return True

    def _is_possible(self, node: ir.Node, rows: Sequence[Row]) -> bool:
        """Whether there is arithmetic of such numbers.

        Raises:
            ModelError: there is none of floats.
        """
        op = node.op_type
        if not any(row.is_float for row in rows):
            to = "" if op != "Cast" else _type_of(node)
            whole = dtype_of(node.outputs[0]) in ("", *WHOLE) and op not in ("Floor", "Ceil", "Round", "Reciprocal")
            narrow = any(row.dtype not in ("int64", "int32", "bool") for row in rows) and op not in _NEEDS_A_ROW
            return bool(to) if op == "Cast" else whole and not narrow
        computed = [self.of[value] for value in node.inputs if value is not None and value in self.of]
        if not any(row.is_float for row in computed):
            return op == "Where" and dtype_of(node.outputs[0]) in float_words.DTYPES and len(computed) > 0
        if op not in _OF_FLOATS:
            raise ModelError(
                f"{name_of(node)} ({op}) computes with the floats of a shape; allowed: {', '.join(sorted(_OF_FLOATS))}"
            )
        return True

    def row(self, value: ir.Value) -> Row | None:
        """A row, or the few integers of a constant or an array of fixed extents."""
        if value in self.of:
            return self.of[value]
        constant = constant_of(value)
        if constant is not None:
            return self._row_of_constant(value, constant)
        name = self.names.get(value)
        if name is None or self.graph.is_dynamic(name) or self.graph.bound(name).dtype not in ("int64", "int32"):
            return None
        rank = len(self.graph.bound(name).shape) if value.shape is None else len(value.shape)
        shape = self.graph.bound(name).shape if rank else ()
        count = math.prod(shape)
        dtype = self.graph.bound(name).dtype
        return Row(name, shape, ((None, None),) * count, dtype) if 1 <= count <= numbers.MOST else None

    def _row_of_constant(self, value: ir.Value, constant: Array) -> Row | None:
        """The words of the numbers; those of floats have a name of their own."""
        dtype = constant.dtype.name
        is_float = dtype in float_words.DTYPES
        if not (is_float or constant.dtype.kind in "iub") or not 1 <= constant.size <= numbers.MOST:
            return None
        if is_float and not (np.abs(constant) <= float_words.number_of(float_words.MOST)).all():
            return None
        words = [float_words.word_of(float(n)) if is_float else int(n) for n in constant.reshape(-1)]
        if max(words) >= 2**63:
            return None
        if value not in self._constants:
            name = self.graph.unused(f"{value.name}")
            self._constants[value] = self.graph.constant(name, np.array(words, np.int64))
            if not is_float:
                self.names.setdefault(value, self._constants[value])
        return Row(self._constants[value], constant.shape, tuple((n, n) for n in words), dtype)

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
        of_size = node.op_type == "Size"
        return (numbers.of_size(ranges) if of_size else numbers.of_shape(ranges, axes.start, axes.stop)), [name]

    # ---- what a node computes, and of which values; a row if its numbers are those of another one

    def _unary(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        return self._in_format(numbers.unary(node.op_type, rows[0]), [rows[0].value])

    def _reciprocal(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        word = float_words.word_of(1.0)
        one = self.graph.constant(self.graph.unused("one"), np.array([word]))
        return numbers.binary("Div", Row(one, (), ((word, word),), rows[0].dtype), rows[0]), [one, rows[0].value]

    def _reduced(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        """All numbers as one."""
        a, read = rows[0], node.attributes
        axes = constant_input(node, 1) if is_given(node, 1) else read.get_ints("axes", ())
        if axes is None or (len(axes) and {int(n) % len(a.shape) for n in axes} != set(range(len(a.shape)))):
            return None
        return self._in_format(numbers.reduced(node.op_type, a, bool(read.get_int("keepdims", 1))), [a.value])

    def _where(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        return numbers.where(*rows), [row.value for row in rows]

    def _gathered(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        a, indices = rows[0], constant_input(node, 1)
        if indices is not None:
            places = np.take(a.places, indices, axis=node.attributes.get_int("axis", 0))
            return numbers.picked(a, places), [a.value]
        found = numbers.gathered(a, rows[1]) if len(a.shape) == 1 else None
        return None if found is None else (found, [a.value, rows[1].value])

    def _sliced(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        a, given = rows[0], [constant_input(node, place) for place in range(1, len(node.inputs))]
        if any(each is None for each in given):
            return None
        begin, end, *more = [[int(n) for n in each] for each in given if each is not None]
        axes, steps = more[0] if more else range(len(begin)), more[1] if len(more) > 1 else [1] * len(begin)
        slices: list[Any] = [slice(None)] * len(a.shape)
        for axis, first, last, step in zip(axes, begin, end, steps):
            slices[axis] = slice(first, last if last >= 0 or step > 0 or last >= -len(a.places) else None, step)
        found = a.places[tuple(slices)]
        return (numbers.picked(a, found), [a.value]) if found.size else None

    def _clipped(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        """Not less than the second input and not more than the third, each of which may be missing."""
        found, limits = rows[0], iter(rows[1:])
        for op, place in (("Max", 1), ("Min", 2)):
            if is_given(node, place):
                limit = next(limits)
                found = self._add(
                    f"{found.value} and {limit.value}", numbers.binary(op, found, limit), [found.value, limit.value]
                )
        return found

    def _joined(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        """Several rows, two at a time."""
        op, found = node.op_type, rows[0]
        if op == "Concat" and any(len(row.shape) != 1 for row in rows):
            return None
        for number, row in enumerate(rows[1:], start=2):
            computed = numbers.concat(found, row) if op == "Concat" else numbers.binary(op, found, row)
            if number == len(rows):
                return self._in_format(computed, [found.value, row.value])
            found = self._add(f"{found.value} and {row.value}", computed, [found.value, row.value])
        return found

    def _in_format(self, computed: Computed, given: list[str]) -> tuple[Computed, list[str]]:
        """What arithmetic gives; that of int32 may need another step."""
        if numbers.wrapped(computed, "") is None:
            return computed, given
        made = self._add("before it wraps", computed, given)
        then = numbers.wrapped(computed, made.value)
        assert then is not None
        return then, [made.value]

    def _cast(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        a, dtype = rows[0], _type_of(node)
        try:
            computed = numbers.converted(a, dtype)
        except ValueError as error:
            raise ModelError(
                f"{name_of(node)} (Cast to {dtype}): {error}; limit them, by bounds of sizes or by Min and Max before it"
            ) from None
        return Row(a.value, a.shape, a.ranges, dtype) if computed is None else (computed, [a.value])

    def _same(self, node: ir.Node, rows: Sequence[Row]) -> _Result:
        """The same numbers in another shape."""
        a = rows[0]
        if node.op_type == "Flatten":
            return None
        shape = viewed(node, a.shape)
        return None if shape is None else Row(a.value, tuple(shape), a.ranges, a.dtype)

    def _put(self, node: ir.Node, computed: Computed, given: Sequence[str]) -> None:
        (result,) = node.outputs
        function = computed.function
        parameters = function.inputs
        dims = {each: self.graph.dims(value) for each, value in zip(parameters, given)}
        known = {each: found for each, value in zip(parameters, given) if (found := self.graph.elements(value)) is not None}
        elements = traced(str(result.name), "", function, dims, known, (1,) * len(computed.ranges))
        if not any(isinstance(each, Unknown) for each in elements):
            known_numbers = [float_words.number_of(n) if computed.dtype in float_words.DTYPES else n for n in elements]
            self._fold(result, np.array(known_numbers, computed.dtype).reshape(computed.shape))
            return
        self.of[result] = self._add(str(result.name), computed, given)

    def _fold(self, result: ir.Value, array: Array) -> None:
        import onnx_ir as ir

        result.const_value, result.shape = ir.tensor(array, name=result.name), ir.Shape(array.shape)

    def _add(self, name: str, computed: Computed, given: Sequence[str]) -> Row:
        value = self.graph.numbers(self.graph.unused(name), len(computed.ranges), computed.rule, given, computed.params)
        return Row(value, computed.shape, computed.ranges, computed.dtype)


_READERS: Mapping[str, Callable[[Rows, Any, Sequence[Row]], _Result]] = {
    **dict.fromkeys(numbers.SAME, Rows._same),
    "Cast": Rows._cast,
    **dict.fromkeys(numbers.UNARY, Rows._unary),
    "Reciprocal": Rows._reciprocal,
    **dict.fromkeys((*numbers.BINARY, "Concat"), Rows._joined),
    "Clip": Rows._clipped,
    **dict.fromkeys(numbers.REDUCED, Rows._reduced),
    "Where": Rows._where,
    "Gather": Rows._gathered,
    "Slice": Rows._sliced,
}
READ = ("Shape", "Size", *_READERS)


def _type_of(node: ir.Node) -> str:
    """What a Cast makes; empty if it is not a dtype of shape arithmetic."""
    import onnx_ir as ir

    return _TYPES.get(ir.DataType(node.attributes.get_int("to", 0)).name, "")


def arithmetic(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes, of those of a graph in order, that may compute with shapes although kernels take their integers, too.

    They compute with extents, constants and a few integers of arrays. Floats of rows cannot become an array, so nodes that
    lead to floats that arrays meet are left out.
    """
    found: list[ir.Node] = []
    of_rows: dict[ir.Value, bool] = {}  # value -> whether it holds floats

    def is_number(value: ir.Value) -> bool:
        return value in of_rows or _is_small_constant(value) or _is_small(value)

    for node in nodes:
        given = [value for value in node.inputs if value is not None]
        if node.op_type in READ and (node.op_type in ("Shape", "Size") or all(map(is_number, given))):
            found.append(node)
            dtype = _type_of(node) if node.op_type == "Cast" else dtype_of(node.outputs[0])
            floats = any(of_rows.get(value, dtype_of(value) in float_words.DTYPES) for value in given)
            of_rows[node.outputs[0]] = dtype in float_words.DTYPES if dtype else floats and node.op_type != "Shape"
    known: set[ir.Node] = set(found)
    meets: set[ir.Value] = set()
    for node in reversed(found):
        (result,) = node.outputs
        users = [user for user, _ in result.uses()]
        if any(user in known and user.outputs[0] in meets for user in users) or (
            of_rows[result] and (result.is_graph_output() or any(user not in known for user in users))
        ):
            meets.add(result)
    needs = (*_NEEDS_A_ROW, "Shape", "Size")
    return {node for node in found if node.op_type not in needs and node.outputs[0] not in meets}


def _is_small(value: ir.Value) -> bool:
    """Whether an array holds a few integers, as far as the model declares it."""
    extents = None if value.shape is None else [extent for extent in value.shape if isinstance(extent, int)]
    if extents is None or value.shape is None or len(extents) != len(value.shape) or value.const_value is not None:
        return False
    return dtype_of(value) in ("int64", "int32") and 1 <= math.prod(extents) <= numbers.MOST


def _is_small_constant(value: ir.Value) -> bool:
    return value.const_value is not None and 1 <= value.const_value.size <= numbers.MOST
