"""Graphs of PyTorch in which kernels take the place of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from schedsearch.torch.layers.candidates import operator_for
from schedsearch.torch.layers.graph_nodes import VIEWS, Layer, Norm, value_of
from schedsearch.torch.layers.kernel_op import Call, vector_places

_select, _slice = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


def rewrite(graph: fx.Graph, chosen: Sequence[tuple[Layer, Call]], *, candidates: bool = False) -> None:
    """Replaces the nodes of each layer by its call.

    The scales and shifts of batch norms are computed in the graph, all together, from the tensors that the model has when it
    runs. Nothing is prepared beforehand, so that no weight is ever out of date, in a captured CUDA graph either.

    Args:
        candidates: Inductor chooses between each call and its own code.
    """
    vectors = _vectors(graph, [(layer.norm, call) for layer, call in chosen if layer.norm is not None])
    new: dict[fx.Node, fx.Node] = {}
    for layer, call in chosen:
        last = layer.nodes[-1]
        arguments = {name: new.get(node, node) for name, node in layer.arguments.items()}
        if layer.norm is not None:
            arguments |= vectors[layer.norm, call.workload.params["dtype"]]
        with graph.inserting_before(last):
            arrays = [_viewed(graph, layer.views.get(spec.name), arguments[spec.name]) for spec in call.workload.signature]
            if candidates:
                node = graph.call_function(operator_for(arrays), (*arrays, call.key))
            else:
                node = graph.call_function(torch.ops.schedsearch.call.default, (call.key, arrays))
            node = _viewed(graph, layer.views.get("y"), node)
        node.meta = dict(last.meta)
        last.replace_all_uses_with(node)
        new[last] = node
        for old in reversed(layer.nodes):
            graph.erase_node(old)
    graph.lint()


def _viewed(graph: fx.Graph, name: str | None, node: fx.Node) -> fx.Node:
    """As `graph_nodes.viewed`, of a node."""
    if name is None:
        return node
    view, arguments = VIEWS[name]
    return graph.call_function(view, (node, *arguments))


def _vectors(graph: fx.Graph, norms: Sequence[tuple[Norm, Call]]) -> dict[tuple[Norm, str], dict[str, fx.Node]]:
    """Batch norm and format -> the nodes of its scale and shift; one operator for all that have the same epsilon."""
    groups: dict[tuple[Any, ...], list[Norm]] = {}
    for norm, call in norms:
        seen = value_of(norm.weight)
        group = groups.setdefault((norm.eps, call.workload.params["dtype"], seen.dtype, seen.device), [])
        if norm not in group:
            group.append(norm)
    found: dict[tuple[Norm, str], dict[str, fx.Node]] = {}
    first = next((node for node in graph.nodes if node.op not in ("placeholder", "get_attr")), None)
    if first is None or not groups:
        return found
    with graph.inserting_before(first):
        for (eps, dtype, *_), group in groups.items():
            parts = [_early(graph, getattr(norm, name)) for name in ("weight", "bias", "mean", "var") for norm in group]
            table = graph.call_function(
                torch.ops.schedsearch.batch_norm_vectors.default, (parts, eps, getattr(torch, dtype))
            )
            channels = [value_of(norm.weight).shape[0] for norm in group]
            rows = [(name, graph.call_function(_select, (table, 0, row))) for row, name in enumerate(("scale", "shift"))]
            for norm, start, count in zip(group, vector_places(channels)[0], channels):
                ends = 0, start, start + count
                found[norm, dtype] = {name: graph.call_function(_slice, (row, *ends)) for name, row in rows}
    return found


def _early(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A node for the same tensor at the beginning of the graph."""
    return node if node.op == "placeholder" else graph.get_attr(str(node.target))
