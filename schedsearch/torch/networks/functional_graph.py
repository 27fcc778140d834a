"""Graphs of PyTorch without writes: `relu_` becomes `relu`, so that parts of a graph can be cut out and run elsewhere."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from schedsearch.torch.layers import graph_nodes
from schedsearch.torch.refusal import Refusal


def without_writes(graph: fx.Graph) -> None:
    """Replaces each node that writes to its first argument by the node that returns the result.

    Later readers of the argument read the result. This is the same as long as no other value shares the argument's memory.

    Raises:
        Refusal: a node writes to an input of the graph, or to memory that another value shares, or is of an unknown kind.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    replaced: dict[fx.Node, set[fx.Node]] = {}  # value -> what it was before it was written to
    for node in list(graph.nodes):
        if not graph_nodes.writes(node):
            continue
        written = node.args[0] if node.args else None
        if not isinstance(written, fx.Node) or not _has_an_equal(node):
            raise Refusal(f"{graph_nodes.name_of(node)} writes to memory ({_shown(node)})")
        before = {written, *replaced.pop(written, set())}
        if any(each.op in ("placeholder", "get_attr") for each in before) or _is_shared(order, node, before):
            raise Refusal(f"{graph_nodes.name_of(node)} writes to memory that other values share ({_shown(node)})")
        _make_functional(node)
        written.replace_all_uses_with(node, lambda user, write=node: order[user] > order[write])
        replaced[node] = before
    graph.lint()


def _has_an_equal(node: fx.Node) -> bool:
    """Whether an operator returns what the node writes."""
    if node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target).removesuffix("_"))
    return _equal(node.target) is not None


def _make_functional(node: fx.Node) -> None:
    if node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.op == "call_method":
        node.target = str(node.target).removesuffix("_")
    else:
        node.target = _equal(node.target)


def _equal(target: object) -> Any:
    """The operator that returns what another one writes to its first argument; None if unknown."""
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target._schema.name.split("::")[1], target._overloadname
        mutated = [each.name for each in target._schema.arguments if each.alias_info and each.alias_info.is_write]
        found = getattr(getattr(torch.ops, target.namespace), packet.removesuffix("_"), None)
        if not packet.endswith("_") or len(mutated) != 1 or target._schema.arguments[0].name != mutated[0]:
            return None
        return getattr(found, overload, None)
    name = getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        return getattr(operator, name.removeprefix("i"), None) if name not in ("setitem", "delitem") else None
    module = torch.nn.functional if "functional" in str(getattr(target, "__module__", "")) else torch
    return getattr(module, name.removesuffix("_"), None) if name.endswith("_") else None


def _is_shared(order: dict[fx.Node, int], node: fx.Node, before: set[fx.Node]) -> bool:
    """Whether a value other than those before a write lies in the same memory and is read after it."""
    seen = graph_nodes.value_of(node.args[0])
    if seen is None:
        return True
    for each, place in order.items():
        value = graph_nodes.value_of(each)
        if place >= order[node] or each in before or value is None:
            continue
        if value.untyped_storage()._cdata != seen.untyped_storage()._cdata:
            continue
        if each.op in ("placeholder", "get_attr") or any(order[user] > order[node] for user in each.users):
            return True
    return False


def _shown(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
