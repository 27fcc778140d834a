"""Bodies of nodes: which there are, and how their nodes come into the graph around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.facts import has_bodies, is_onnx

if TYPE_CHECKING:
    import onnx_ir as ir

_AXES_AS_INPUTS = 13  # the first opset in which the axes of Squeeze and Unsqueeze are inputs
_RANGES_AS_INPUTS = 10  # the first opset in which the places of a Slice are inputs


def bodies_of(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs inside of a node, without those inside of these."""
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            yield attribute.as_graph()
        elif attribute.type.name == "GRAPHS":
            yield from attribute.as_graphs()


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph and all graphs inside of it, inner ones first."""
    for node in graph:
        for body in bodies_of(node):
            yield from graphs_of(body)
    yield graph


class Names:
    """The names of a model's values and nodes, in the graph and in bodies: new ones are unlike all of them."""

    def __init__(self, model: ir.Model) -> None:
        self._values: set[str] = set()
        self._nodes: set[str] = set()
        for graph in graphs_of(model.graph):
            self._values.update(str(value.name) for value in (*graph.inputs, *graph.initializers.values()))
            for node in graph:
                self._nodes.add(node.name or "")
                self._values.update(str(value.name) for value in node.outputs if value.name)

    def value(self, name: str) -> str:
        return _new(name, self._values)

    def node(self, name: str) -> str:
        return _new(name, self._nodes)


def _new(name: str, taken: set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}.{number}"
    taken.add(found)
    return found


def rename(nodes: Sequence[ir.Node], names: Names) -> None:
    """Gives nodes and values names that no other has, also inside of their bodies. Shapes that the model declares for
    results are forgotten where they can be inferred."""
    for node in nodes:
        node.name = names.node(node.name) if node.name else node.name
        for value in node.outputs:
            value.name = names.value(value.name) if value.name else value.name
            if is_onnx(node) and not has_bodies(node) and node.op_type != "Constant":
                value.shape = None
        for body in bodies_of(node):
            for value in (*body.inputs, *body.initializers.values()):
                value.name = names.value(str(value.name))
            rename(list(body), names)


def taken_by(bodies: Sequence[ir.Graph]) -> list[ir.Value]:
    """The values that bodies take from outside."""
    found: dict[ir.Value, None] = {}
    for body in bodies:
        graphs = list(graphs_of(body))
        own = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        own |= {value for graph in graphs for inner in graph for value in inner.outputs}
        reads = (value for graph in graphs for inner in graph for value in inner.inputs)
        results = (value for graph in graphs for value in graph.outputs)
        found |= dict.fromkeys(value for value in (*reads, *results) if value is not None and value not in own)
    return list(found)


class Place:
    """A place in a graph, before a node, where new nodes go.

    Args:
        names: of the model.
    """

    def __init__(self, model: ir.Model, node: ir.Node, names: Names) -> None:
        assert node.graph is not None
        self.model, self.node, self.names = model, node, names
        self._opset = model.opset_imports.get("", _AXES_AS_INPUTS)

    def copy(self, body: ir.Graph, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies the nodes of a body to this place.

        Args:
            inputs: what its inputs are.

        Returns:
            What its outputs are.
        """
        import onnx_ir as ir

        made = body.clone(allow_outer_scope_values=True)
        results, nodes = list(made.outputs), list(made)
        given = dict(zip(made.inputs, inputs, strict=True))
        made.outputs.clear()
        made.remove(nodes)
        for formal, actual in given.items():
            ir.convenience.replace_all_uses_with(formal, actual, replace_graph_outputs=True)
        for value in list(made.initializers.values()):
            made.initializers.pop(str(value.name))
            value.name = self.names.value(str(value.name))
            self.model.graph.register_initializer(value)
        rename(nodes, self.names)
        self.add(nodes)
        return [given.get(value, value) for value in results]

    def add(self, nodes: Sequence[ir.Node]) -> None:
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, nodes)

    def make(
        self, op: str, inputs: Sequence[ir.Value | None], like: ir.Value, attributes: Sequence[ir.Attr] = ()
    ) -> ir.Value:
        """A new node of ONNX at this place, whose result has the dtype of another value.

        Args:
            like: also names the result.
        """
        import onnx_ir as ir

        value = ir.Value(name=self.names.value(f"{like.name}.{op.lower()}"), type=like.type)
        self.add([ir.Node("", op, inputs, list(attributes), outputs=[value], name=self.node.name)])
        return value

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        import onnx_ir as ir

        tensor = ir.tensor(array, name=self.names.value(name))
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def squeezed(self, x: ir.Value, axis: int, *, op: str = "Squeeze") -> ir.Value:
        import onnx_ir as ir

        if self._opset >= _AXES_AS_INPUTS:
            return self.make(op, [x, self.constant(f"{x.name}.axes", np.array([axis]))], x)
        return self.make(op, [x], x, [ir.AttrInt64s("axes", [axis])])

    def unsqueezed(self, x: ir.Value, axis: int) -> ir.Value:
        return self.squeezed(x, axis, op="Unsqueeze")

    def one_of(self, x: ir.Value, axis: int, place: int) -> ir.Value:
        """Element `place` of an array along an axis, which goes."""
        import onnx_ir as ir

        ranges = {"starts": place, "ends": place + 1, "axes": axis}
        if self._opset >= _RANGES_AS_INPUTS:
            given = [self.constant(f"{x.name}.{name}", np.array([number])) for name, number in ranges.items()]
            return self.squeezed(self.make("Slice", [x, *given], x), axis)
        attributes = [ir.AttrInt64s(name, [number]) for name, number in ranges.items()]
        return self.squeezed(self.make("Slice", [x], x, attributes), axis)

    def concatenated(self, arrays: Sequence[ir.Value], axis: int) -> ir.Value:
        import onnx_ir as ir

        return arrays[0] if len(arrays) == 1 else self.make("Concat", arrays, arrays[0], [ir.AttrInt64("axis", axis)])

    def replace(self, values: Sequence[ir.Value]) -> None:
        """Puts values in the place of the node's results, and removes it. Results of the graph keep their names."""
        import onnx_ir as ir

        for old, new in zip(self.node.outputs, values):
            if not old.name:
                continue
            if old.is_graph_output():
                name, old.name = old.name, self.names.value(f"{old.name}.replaced")
                kept = ir.Value(name=name, type=old.type, shape=old.shape)
                self.add([ir.Node("", "Identity", [new], outputs=[kept], name=self.node.name)])
                new = kept
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        assert self.node.graph is not None
        self.node.graph.remove(self.node, safe=True)
