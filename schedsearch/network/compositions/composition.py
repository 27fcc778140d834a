"""How a composition is written: nodes that take the place of one, with the shapes of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Read
from schedsearch.network.evaluated import computed
from schedsearch.network.facts import name_of
from schedsearch.network.new_nodes import constant
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Rewrite = Callable[["ir.Model", "ir.Node"], None]
Compose = Callable[["Composition"], "str | None"]
"""Writes the nodes and calls `finish`; or returns why not, before it has written any. None without `finish`: the node stays
as it is, and lowering reads it."""
_FORMS = 13  # of older opsets, compositions write nodes in the forms of this one: axes and places are inputs
_REASON, _COUNT = "schedsearch.why_not_composed", "schedsearch.composed"  # among the notes of a node and a graph


class Composition:
    """The nodes that take the place of a node.

    What only constants are read by is computed at once.

    Attributes:
        node: it.
    """

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.node = model, node
        self._nodes: list[ir.Node] = []

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """Those that were added, in order."""
        return self._nodes

    # --- What the node has ---
    def input(self, place: int) -> ir.Value | None:
        """An input that may be missing."""
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    def needed(self, place: int) -> ir.Value:
        value = self.input(place)
        assert value is not None, f"{name_of(self.node)} lacks input {place}"  # the check of the model has looked
        return value

    def is_read(self, place: int) -> bool:
        """Whether anything reads an output of the node."""
        if place >= len(self.node.outputs):
            return False
        value = self.node.outputs[place]
        return bool(value.name) and bool(list(value.uses()) or value.is_graph_output())

    # --- New values and nodes ---
    def constant(self, array: Any, like: ir.Value | None = None) -> ir.Value:
        """Args: like: a value whose dtype the constant gets."""
        numbers = np.asarray(array)
        if like is not None:
            assert like.dtype is not None
            numbers = numbers.astype(like.dtype.numpy())
        return constant(self.model, self._name(), numbers)

    def add(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[int] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """The result of a new node.

        Args:
            shape: of the result; default: that to which the inputs are broadcast.
            dtype: of the result; default: that of the first input.
        """
        import onnx_ir as ir

        first = inputs[0]
        assert first is not None
        if shape is None:
            shape = np.broadcast_shapes(*(tuple(shape_of(each)) for each in inputs if each is not None))
        kind = first.dtype if dtype is None else dtype
        assert kind is not None
        name = self._name()
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(list(shape)))
        given = {name: each for name, each in attributes.items() if each is not None}
        made = ir.Node("", op, inputs, ir.convenience.convert_attributes(given), outputs=[value], name=self.node.name)
        if op != "DequantizeLinear" and all(each is None or each.const_value is not None for each in inputs):
            opset = max(self.model.opset_imports.get("", _FORMS), _FORMS)
            arrays = computed(made, {**self.model.opset_imports, "": opset})
            if arrays is not None:
                return constant(self.model, name, arrays[0].astype(kind.numpy(), copy=False).reshape(tuple(shape)))
        self._nodes.append(made)
        return value

    def several(
        self, op: str, inputs: Sequence[ir.Value | None], results: Sequence[tuple[Sequence[int], str]]
    ) -> tuple[ir.Value, ...]:
        """The results of a new node, of these shapes and of dtypes by ONNX's names."""
        import onnx_ir as ir

        values = [
            ir.Value(name=self._name(), type=ir.TensorType(ir.DataType[kind]), shape=ir.Shape(list(shape)))
            for shape, kind in results
        ]
        self._nodes.append(ir.Node("", op, inputs, outputs=values, name=self.node.name))
        return tuple(values)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        if shape_of(value) == list(shape):
            return value
        return self.add("Reshape", [value, self.constant(np.array(shape, np.int64))], shape)

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        if list(permutation) == sorted(permutation):
            return value
        extents = shape_of(value)
        return self.add("Transpose", [value], [extents[axis] for axis in permutation], perm=list(permutation))

    def swap(self, value: ir.Value) -> ir.Value:
        """The value with its last two axes exchanged."""
        rank = len(shape_of(value))
        return self.transpose(value, [*range(rank - 2), rank - 1, rank - 2])

    def slice(self, value: ir.Value, axis: int, start: int, stop: int, step: int = 1) -> ir.Value:
        extents = shape_of(value)
        chosen = range(extents[axis])[start:stop:step]
        if len(chosen) == extents[axis] and step == 1:
            return value
        extents[axis] = len(chosen)
        rows = [self.constant(np.array([number], np.int64)) for number in (start, stop, axis, step)]
        return self.add("Slice", [value, *rows], extents)

    def gather(self, value: ir.Value, axis: int, places: Array) -> ir.Value:
        """The entries of an axis at these places, which are constants."""
        extents = shape_of(value)
        if np.array_equal(places, np.arange(extents[axis])):
            return value
        extents[axis] = places.size
        return self.add("Gather", [value, self.constant(places)], extents, axis=axis)

    def patches(self, images: ir.Value, places: Sequence[Array]) -> ir.Value:
        """[n, *first, *second]: the pixels of images [n, *extents] at `places` of each axis, [first, second]."""
        n, rank = shape_of(images)[0], len(places)
        for axis, each in enumerate(places, 1):
            images = self.gather(images, axis, each.ravel())
        parted = self.reshape(images, [n, *(extent for each in places for extent in each.shape)])
        return self.transpose(parted, [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2)])

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        parts = [value for value in values if shape_of(value)[axis]]
        if len(parts) == 1:
            return parts[0]
        extents = shape_of(parts[0])
        extents[axis] = sum(shape_of(value)[axis] for value in parts)
        return self.add("Concat", parts, extents, axis=axis)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self.add("Cast", [value], None, dtype, to=int(dtype))

    def times(self, value: ir.Value, factor: float) -> ir.Value:
        return value if factor == 1.0 else self.add("Mul", [value, self.constant(factor, value)])

    def matmul(self, x: ir.Value, weight: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """Of at least two dimensions each."""
        first, second = shape_of(x), shape_of(weight)
        batch = np.broadcast_shapes(tuple(first[:-2]), tuple(second[:-2]))
        return self.add("MatMul", [x, weight], [*batch, first[-2], second[-1]], dtype)

    def last_axis(self, op: str, value: ir.Value) -> ir.Value:
        """A reduction over the last axis, which stays with extent 1."""
        extents = shape_of(value)
        axes = [len(extents) - 1]
        by_input = op == "ReduceSum" or self.model.opset_imports.get("", 18) >= 18
        inputs = [value, self.constant(np.array(axes, np.int64))] if by_input else [value]
        return self.add(op, inputs, [*extents[:-1], 1], axes=None if by_input else axes, keepdims=1)

    # --- The end ---
    def finish(self, *results: ir.Value | None) -> None:
        """Puts the nodes in the place of the node.

        Args:
            results: for each output of the node; None for one that nothing reads.
        """
        import onnx_ir as ir

        model, node = self.model, self.node
        made = {each.outputs[0] for each in self._nodes}
        for old, new in zip(node.outputs, results):
            if new is None:
                continue
            name, old.name = old.name, f"{old.name}.before"
            if new.const_value is not None:
                ir.convenience.replace_all_uses_with(
                    old, constant(model, str(name), new.const_value.numpy()), replace_graph_outputs=True
                )
                continue
            if new not in made:  # it has a name already
                new = self.add("Identity", [new], shape_of(new))
            made.discard(new)
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            new.name = name
        model.graph.insert_before(node, self._nodes)
        model.graph.remove(node, safe=True)

    def _name(self) -> str:
        """One that no other composition of the graph has."""
        notes = self.model.graph.meta
        notes[_COUNT] = notes.get(_COUNT, 0) + 1
        return f"{self.node.outputs[0].name}.composed{notes[_COUNT]}"


def shape_of(value: ir.Value) -> list[int]:
    """The extents of a value, which are known."""
    assert value.shape is not None and value.shape.is_static(), f"the shape of {value.name!r} is not known"
    return [int(extent) for extent in value.shape]


def known(values: Sequence[ir.Value | None]) -> bool:
    """Whether shapes and dtypes of values are known; those that are missing do not count."""
    return all(
        value is None or (value.shape is not None and value.shape.is_static() and value.dtype is not None)
        for value in values
    )


def rewrite(compose: Compose) -> Rewrite:
    """The rewrite of nodes that are composed of others. Nodes of unknown shapes stay."""

    def write(model: ir.Model, node: ir.Node) -> None:
        if not known(node.inputs):
            return
        note(node, compose(Composition(model, node)))

    return write


def note(node: ir.Node, reason: str | None) -> None:
    """Keeps why a node was not composed of others, for the message about it."""
    if reason is not None:
        node.meta[_REASON] = reason


def noted(node: ir.Node) -> str:
    """What `note` kept; empty if it was nothing."""
    return str(node.meta.get(_REASON, ""))


def left(node: ir.Node, taken: set[ir.Node]) -> str:
    """Why a node was not composed of others."""
    return f"{name_of(node)} {noted(node) or 'reads an array of unknown shape or dtype'}"


def left_of(rewritten: Mapping[str, Rewrite]) -> Mapping[str, Read]:
    return dict.fromkeys(rewritten, left)
