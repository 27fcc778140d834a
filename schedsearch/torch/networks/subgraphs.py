"""Subgraphs for networks of ours: a whole graph, or the largest convex sets of nodes that the importer takes.

Which nodes these are is asked of the importer itself: one graph that has each distinct node of a model once, with inputs of
its own, is exported and lowered.

See docs/decisions/153-networks-for-parts-of-a-model.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from schedsearch.errors import first_line, root_cause
from schedsearch.torch.layers.graph_nodes import name_of, value_of

if TYPE_CHECKING:
    import onnx_ir as ir

LEAST_NODES = 3  # smaller subgraphs are left to PyTorch: a network has to copy and to launch, too
MOST_SUBGRAPHS = 16  # each takes seconds to build


@dataclass(frozen=True)
class Unsupported:
    """Nodes that the importer does not take.

    Attributes:
        name: of the module that makes the first of them.
        what: the operator of PyTorch.
        count: how many nodes there are.
        reason: why the first is not taken.
    """

    name: str
    what: str
    count: int
    reason: str

    def __str__(self) -> str:
        several = "" if self.count == 1 else f", {self.count} times"
        return f"PyTorch computes {self.what} ({self.name}{several}): {self.reason}"


@dataclass
class Subgraph:
    """A convex set of nodes, which one node can replace.

    Attributes:
        nodes: in order.
        inputs: values that they read.
        weights: parameters and buffers that they read: inputs of the graph, too.
        outputs: values of theirs that others read.
        module: computes the outputs from the inputs. Weights are buffers of its own, with the names of their nodes, which
            share the memory.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    weights: list[fx.Node]
    outputs: list[fx.Node]
    module: fx.GraphModule

    @property
    def name(self) -> str:
        """The first and the last module of the model in it."""
        first, last = name_of(self.nodes[0]), name_of(self.nodes[-1])
        return first if first == last else f"{first} to {last}"

    def moved(self, places: Mapping[fx.Node, fx.Node]) -> Subgraph:
        """The same of a copy of the graph; `places`: node -> node of the copy."""
        nodes, inputs, weights, outputs = (
            [places[node] for node in each] for each in (self.nodes, self.inputs, self.weights, self.outputs)
        )
        return Subgraph(nodes, inputs, weights, outputs, self.module)


def whole(module: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor]) -> Subgraph:
    """All nodes of a graph; see `partition` for the arguments."""
    return _cut(_Source(module, weights), _computing(module.graph), module.graph.output_node())


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def everything(
    module: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor], keep: Callable[[fx.Node], bool]
) -> Subgraph | None:
    """The one subgraph that `partition` finds if the importer takes every node; None if a node is left to PyTorch anyway.

    The importer is not asked, which would take as long as the export of a network itself."""
    source = _Source(module, weights)
    nodes = _without_loose_ends(_computing(module.graph))
    if len(nodes) < LEAST_NODES or any(keep(node) or _unfit(node) for node in nodes):
        return None
    return _cut(source, nodes)


def partition(
    module: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor], keep: Callable[[fx.Node], bool] = lambda node: False
) -> tuple[list[Subgraph], list[Unsupported]]:
    """The subgraphs of a graph, the largest first, and the nodes that belong to none because the importer lacks them.

    Args:
        module: without writes, and with the shape of every value.
        weights: inputs that are parameters and buffers of the model.
        keep: whether a node is left to PyTorch.
    """
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    source = _Source(module, weights)
    reasons = _reasons(source)

    class Support(OperatorSupportBase):
        def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
            return reasons.get(node) == "" and not keep(node)

    proposed = CapabilityBasedPartitioner(module, Support(), allows_single_node_partition=True).propose_partitions()
    found = []
    for each in proposed:
        nodes = _without_loose_ends([node for node in module.graph.nodes if node in each.nodes])
        if len(nodes) >= LEAST_NODES:
            found.append(_cut(source, nodes))
    return sorted(found, key=lambda subgraph: -len(subgraph.nodes)), _unsupported(reasons)


def _without_loose_ends(nodes: list[fx.Node]) -> list[fx.Node]:
    """Nodes of a subgraph without those whose values are no tensors but leave it, such as a tuple that nobody unpacks."""
    kept = list(nodes)
    while loose := [node for node in kept if value_of(node) is None and any(user not in kept for user in node.users)]:
        kept = [node for node in kept if node not in loose]
    return kept


class _Source:
    """A graph from which others are made.

    Args:
        weights: inputs that become buffers of the graphs made.
    """

    def __init__(self, module: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor]) -> None:
        self.module, self._weights = module, weights

    def holds(self, node: fx.Node) -> bool:
        return node in self._weights or node.op == "get_attr"

    def copy_weight(self, node: fx.Node, graph: fx.Graph) -> fx.Node:
        new = graph.get_attr(node.name if node in self._weights else str(node.target))
        new.meta = dict(node.meta)
        return new

    def made(self, graph: fx.Graph) -> fx.GraphModule:
        weights = {node.name: each.detach() for node, each in self._weights.items()}
        wanted = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
        root = {name: weights[name] if name in weights else _attribute(self.module, name) for name in wanted}
        return fx.GraphModule(root, graph).eval()


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _cut(source: _Source, nodes: list[fx.Node], output: fx.Node | None = None) -> Subgraph:
    """The subgraph of some nodes. It returns what `output` returns; by default all values that others read."""
    inside, readers = set(nodes), nodes if output is None else [*nodes, output]
    read = dict.fromkeys(each for node in readers for each in node.all_input_nodes if each not in inside)
    inputs = [each for each in read if not source.holds(each)]
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    places = {each: graph.placeholder(f"input_{place}") for place, each in enumerate(inputs)}
    places |= {each: source.copy_weight(each, graph) for each in read if source.holds(each)}
    for node in nodes:
        places[node] = graph.node_copy(node, places.__getitem__)
    for old, new in places.items():
        new.meta = dict(old.meta)
    graph.output(fx.node.map_arg(tuple(outputs) if output is None else output.args[0], places.__getitem__))
    weights = [each for each in read if each.op == "placeholder" and source.holds(each)]
    return Subgraph(nodes, inputs, weights, outputs, source.made(graph))


def _unsupported(reasons: Mapping[fx.Node, str]) -> list[Unsupported]:
    found: dict[str, list[fx.Node]] = {}
    for node, reason in reasons.items():
        if reason and node.target is not operator.getitem:  # of a tuple that is not made either
            found.setdefault(_what(node), []).append(node)
    return [Unsupported(name_of(nodes[0]), what, len(nodes), reasons[nodes[0]]) for what, nodes in found.items()]


def _what(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


# ---- what the importer takes


@dataclass
class _Probe:
    """A node that stands for all that look like it."""

    node: fx.Node
    likes: list[fx.Node]


def _reasons(source: _Source) -> dict[fx.Node, str]:
    """Node -> why the importer does not take it; empty if it does. Nodes that compute nothing are missing."""
    probes: dict[Any, _Probe] = {}
    reasons: dict[fx.Node, str] = {}
    for node in _computing(source.module.graph):
        if reason := _unfit(node):
            reasons[node] = reason
            continue
        probes.setdefault(_look(node, source), _Probe(node, [])).likes.append(node)
    waiting = [list(probes.values())]
    while waiting:
        group = waiting.pop()
        if not group:
            continue
        try:
            found = _probed(source, [each.node for each in group])
        except Exception as error:  # torch's exporters raise errors of many kinds
            if len(group) > 1:  # one of them has no equal in ONNX at all
                waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
                continue
            found = [f"ONNX has no equal of it: {first_line(root_cause(error))}"[:200]]
        for probe, reason in zip(group, found):
            reasons |= dict.fromkeys(probe.likes, reason)
    return reasons


def _unfit(node: fx.Node) -> str:
    """Why a node cannot be exported on its own; empty if it can."""
    if node.op == "call_module":
        return "its module was not taken apart"
    values = [value_of(each) for each in node.all_input_nodes]
    if not values or any(value is None for value in values):
        return (
            ""
            if node.target is operator.getitem and _is_part_of_a_tuple(node)
            else "it reads something that is not a tensor"
        )
    tensors = [each for each in pytree.tree_leaves(_made(node)) if isinstance(each, torch.Tensor)]
    if not tensors:
        return "it returns something that is not a tensor"
    if not all(isinstance(extent, int) for each in (*values, *tensors) for extent in each.shape):
        return "its shape is dynamic; kernels are made for one shape"
    return ""


def _is_part_of_a_tuple(node: fx.Node) -> bool:
    (tuple_,) = node.all_input_nodes
    return isinstance(_made(tuple_), tuple | list) and value_of(node) is not None


def _made(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _look(node: fx.Node, source: _Source) -> Any:
    """What the importer sees of a node: operator, arguments and formats."""

    def seen(each: fx.Node) -> Any:
        if value_of(each) is None:
            return _look(each, source)
        values = [each for each in pytree.tree_leaves(_made(each)) if isinstance(each, torch.Tensor)]
        return source.holds(each), tuple((tuple(value.shape), value.dtype) for value in values)

    names = {each: place for place, each in enumerate(node.all_input_nodes)}
    words = fx.node.map_arg((node.args, node.kwargs), lambda each: f"<{names[each]}>")
    return node.op, node.target, repr(words), tuple(map(seen, names))


def _probed(source: _Source, nodes: Sequence[fx.Node]) -> list[str]:
    """For each node why the importer does not take it. Raises what an exporter raises."""
    from schedsearch.network.lower import lowering
    from schedsearch.network.torch_export import export

    graph = fx.Graph()
    given = [value for node in nodes for each in _tensors_read(node, source) if (value := value_of(each)) is not None]
    inputs = iter([graph.placeholder(f"input_{place}") for place in range(len(given))])
    results: list[list[fx.Node]] = []
    for node in nodes:
        places: dict[fx.Node, fx.Node] = {each: next(inputs) for each in _tensors_read(node, source)}
        for each in (*_tuples_read(node), node):
            for read in each.all_input_nodes:
                if source.holds(read):
                    places[read] = source.copy_weight(read, graph)
            places[each] = graph.node_copy(each, places.__getitem__)
        made = _made(node)
        if isinstance(made, torch.Tensor):
            results.append([places[node]])
        else:
            parts = range(len(made))
            results.append([graph.call_function(operator.getitem, (places[node], part)) for part in parts])
    graph.output(tuple(each for group in results for each in group))
    model = export(source.made(graph), tuple(map(_real, given)))
    found = lowering(model)
    reasons = _behind_outputs(model, {name: op for op, names in found.others.items() for name in names}, found.reasons)
    ends = iter(reasons)
    return [next((each for each in [next(ends) for _ in group] if each), "") for group in results]


def _tensors_read(node: fx.Node, source: _Source) -> list[fx.Node]:
    """The values that a node reads, and those behind a tuple of which it takes a part, without what the graph holds."""
    nodes = (node, *_tuples_read(node))
    found = (each for reader in nodes for each in reader.all_input_nodes if not source.holds(each))
    return [each for each in dict.fromkeys(found) if value_of(each) is not None]


def _tuples_read(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if value_of(each) is None]


def _real(value: torch.Tensor) -> torch.Tensor:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return torch.ones(tuple(value.shape), dtype=value.dtype, device=value.device)


def _behind_outputs(model: ir.Model, others: Mapping[str, str], reasons: Mapping[str, str]) -> list[str]:
    """For each output of a graph the reason of a node behind it that is not taken; empty if all are."""
    from schedsearch.network.facts import name_of as onnx_name

    found = []
    for output in model.graph.outputs:
        waiting, seen, reason = [output], set[Any](), ""
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (name := onnx_name(node)) in others:
                op = others[name]
                reason = reasons.get(op) or f"schedsearch has no operator {op}"
            waiting += [each for each in node.inputs if each is not None]
        found.append(reason)
    return found
