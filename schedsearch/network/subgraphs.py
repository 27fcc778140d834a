"""Subgraphs of a graph that another runtime computes: which nodes go together, and the ONNX model that they make.

Nodes that no kernel computes are collected in as few subgraphs as possible. The depth of a node is the largest number of
times that a path to it leaves such nodes for ones with kernels. All such nodes of one depth are a subgraph. No path leaves a
subgraph and comes back, and there cannot be fewer subgraphs, because a path of the largest depth meets all of them.

See docs/decisions/143-parts-in-onnx-runtime.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedsearch.network.facts import FLOATS, dtype_of, extents_of, is_onnx, name_of
from schedsearch.network.graph import Subgraph
from schedsearch.network.invalid import ModelError
from schedsearch.network.older_opsets import runnable
from schedsearch.network.views import VIEWS
from schedsearch.ops.dtypes import DTYPES

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_LARGEST_BYTES = (1 << 31) - 1  # of an ONNX model: protobuf's limit


@dataclass(frozen=True, eq=False)
class Cut:
    """Nodes that another runtime is to compute together.

    Attributes:
        reasons: each node, in order -> why it has no kernel.
        reads, writes: values that cross its border; constants are inside.
    """

    reasons: Mapping[ir.Node, str]
    reads: tuple[ir.Value, ...]
    writes: tuple[ir.Value, ...]

    def with_writes(self, needed: Collection[ir.Value]) -> Cut:
        """The same, which also writes what others need of it: kernels read 8-bit numbers before a DequantizeLinear, which
        may itself be inside."""
        made = dict.fromkeys(value for node in self.reasons for value in node.outputs)
        return replace(self, writes=tuple(value for value in made if value in self.writes or value in needed))


def without_shape(model: ir.Model) -> dict[ir.Node, str]:
    """Nodes that read or make a value whose shape or dtype is not known, with the reason."""
    found: dict[ir.Node, str] = {}
    for node in model.graph:
        for value in (*inputs_of_all(node), *(each for each in node.outputs if each.name)):
            if value.const_value is None and (value.shape is None or not value.shape.is_static()):
                got = "unknown" if value.shape is None else str(value.shape)
                found.setdefault(node, f"the shape of {value.name!r} is {got}")
            elif value.const_value is None and dtype_of(value) not in DTYPES:
                found.setdefault(node, f"the dtype of {value.name!r} is {dtype_of(value) or 'unknown'}")
    return found


def cuts(model: ir.Model, reasons: Mapping[ir.Node, str]) -> list[Cut]:
    """The fewest subgraphs that these nodes can make, in an order in which they can run. Views between them come along.

    Args:
        reasons: node -> why it has no kernel.
    """
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        for value in inputs_of_all(node):
            readers.setdefault(value, []).append(node)
    inside = {**reasons, **dict.fromkeys(_views_between(model, reasons, readers), "only subgraphs read and write it")}
    depths: dict[ir.Node, int] = {}
    members: dict[int, dict[ir.Node, str]] = {}
    for node in model.graph:
        makers = [maker for value in inputs_of_all(node) if (maker := value.producer()) is not None]
        depths[node] = max((depths[each] + (each in inside and node not in inside) for each in makers), default=0)
        if node in inside:
            members.setdefault(depths[node], {})[node] = inside[node]
    return [_cut(model, members[depth], readers) for depth in sorted(members)]


def subgraph(model: ir.Model, cut: Cut, dtype: str | None) -> Subgraph:
    """The subgraph of a network that a cut becomes; its name need not be unique.

    Args:
        dtype: dtype of the network's numbers in floating point; None: the model's own, in which the subgraph computes.

    Raises:
        ModelError: a value on the border has a shape that is not known or a dtype that no array can have, or the weights
            are too large for one model.
    """
    for value in (*cut.reads, *cut.writes):
        extents_of(value.producer() or next(iter(cut.reasons)), value)
        if dtype_of(value) not in DTYPES:
            got = dtype_of(value) or "of unknown dtype"
            raise ModelError(
                f"{value.name!r} is {got} and would have to leave the subgraph that ONNX Runtime computes; allowed dtypes: "
                f"{', '.join(DTYPES)}. Cast it in the model"
            )
    nodes = tuple(cut.reasons)
    sources = dict.fromkeys(name_of(node) for node in nodes)
    because = {name_of(node): f"{node.op_type}: {reason}" for node, reason in reversed(list(cut.reasons.items()))}
    return Subgraph(
        name_of(nodes[0]),
        tuple(sources),
        tuple(because[name] for name in sources),
        tuple(str(value.name) for value in cut.reads),
        tuple(str(value.name) for value in cut.writes),
        _model(model, cut, dtype),
    )


def inputs_of_all(node: ir.Node) -> Iterator[ir.Value]:
    """Every value of the graph that a node reads, also inside of its bodies (If, Loop, Scan)."""
    own = {value for inner in nodes_inside(node) for value in inner.outputs}
    for graph in _bodies(node):
        own |= {*graph.inputs, *graph.initializers.values()}
    outer = (value for each in (node, *nodes_inside(node)) for value in each.inputs)
    yield from dict.fromkeys(value for value in outer if value is not None and value not in own)
    yield from dict.fromkeys(value for graph in _bodies(node) for value in graph.outputs if value not in own)


def nodes_inside(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of a node's bodies, and of the bodies inside of these."""
    for graph in _bodies(node):
        yield from graph


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            bodies = [attribute.as_graph()]
        else:
            bodies = list(attribute.as_graphs()) if attribute.type.name == "GRAPHS" else []
        for graph in bodies:
            yield graph
            for inner in graph:
                yield from _bodies(inner)


def _views_between(model: ir.Model, lacking: Collection[ir.Node], readers: Mapping[ir.Value, list[ir.Node]]) -> set[ir.Node]:
    """Views all of whose neighbours are in subgraphs; as nodes with kernels they would cost two more crossings."""
    found = {node for node in model.graph if node.op_type in VIEWS and is_onnx(node) and node not in lacking}
    while True:
        inside = {*lacking, *found}
        kept = {
            node
            for node in found
            if all(value.const_value is not None or value.producer() in inside for value in inputs_of_all(node))
            and not any(value.is_graph_output() for value in node.outputs)
            and all(reader in inside for value in node.outputs for reader in readers.get(value, []))
        }
        if kept == found:
            return found
        found = kept


def _cut(model: ir.Model, members: Mapping[ir.Node, str], readers: Mapping[ir.Value, list[ir.Node]]) -> Cut:
    made = {value for node in members for value in node.outputs}
    reads = dict.fromkeys(value for node in members for value in inputs_of_all(node) if value not in made)
    return Cut(
        members,
        tuple(value for value in reads if value.const_value is None),
        tuple(
            value
            for node in members
            for value in node.outputs
            if value.is_graph_output() or any(reader not in members for reader in readers.get(value, []))
        ),
    )


def _model(model: ir.Model, cut: Cut, dtype: str | None) -> bytes:
    """The nodes of a cut as an ONNX model. If the network computes in another dtype, its inputs and outputs have that, and
    the subgraph converts them: names on the border are then not those of the values, but the order is."""
    from onnx import helper
    from onnx_ir import serde

    nodes = runnable(cut.reasons, model.opset_imports.get("", 1))
    before, after = [], []
    inputs, outputs = [], []
    for value in cut.reads:
        inputs.append(_port(value, dtype))
        if inputs[-1].name != value.name:
            before.append(_cast(inputs[-1].name, str(value.name), value))
    for value in cut.writes:
        outputs.append(_port(value, dtype))
        if outputs[-1].name != value.name:
            after.append(_cast(str(value.name), outputs[-1].name, outputs[-1]))
    read = dict.fromkeys(value for node in cut.reasons for value in inputs_of_all(node))
    weights = [_tensor(value) for value in read if value.const_value is not None]
    graph = helper.make_graph([*before, *nodes, *after], "part", inputs, outputs, weights)
    opsets = [helper.make_opsetid(domain, version) for domain, version in sorted(model.opset_imports.items())]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    made.functions.extend(serde.serialize_function(each) for each in model.functions.values())
    if made.ByteSize() > _LARGEST_BYTES:
        raise ModelError(
            f"the nodes without a kernel, from {name_of(next(iter(cut.reasons)))} on, have more than 2 GiB of weights; "
            "allowed in one subgraph for ONNX Runtime: less than 2 GiB"
        )
    data: bytes = made.SerializeToString(deterministic=True)
    return data


def _port(value: ir.Value, dtype: str | None) -> onnx.ValueInfoProto:
    """A value on the border, in the network's dtype."""
    from onnx import TensorProto, helper

    assert value.dtype is not None and value.shape is not None
    shape = [int(extent) for extent in value.shape]
    own = dtype_of(value)
    if dtype is None or own == dtype or own not in FLOATS:
        return helper.make_tensor_value_info(value.name, int(value.dtype), shape)
    kinds = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}
    return helper.make_tensor_value_info(f"{value.name}/{dtype}", kinds[dtype], shape)


def _cast(x: str, y: str, like: ir.Value | onnx.ValueInfoProto) -> onnx.NodeProto:
    from onnx import ValueInfoProto, helper

    to = like.type.tensor_type.elem_type if isinstance(like, ValueInfoProto) else int(like.dtype or 0)
    return helper.make_node("Cast", [x], [y], name=f"{x} to {y}", to=to)


def _tensor(value: ir.Value) -> onnx.TensorProto:
    """A constant with its numbers inside, wherever the model keeps them."""
    import onnx_ir as ir
    from onnx_ir import serde

    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        tensor = ir.Tensor(tensor.numpy(), dtype=tensor.dtype)
    found = serde.serialize_tensor(tensor)
    found.name = str(value.name)
    return found
