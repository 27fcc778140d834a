"""Networks of ours in the graph of an optimized model: `optimize_(..., networks=True)`."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx, nn
from torch.utils import _pytree as pytree

from schedsearch.deadline import Deadline
from schedsearch.torch.compiler import inductor
from schedsearch.torch.layers import graph_nodes, patterns
from schedsearch.torch.layers.report import PartReport
from schedsearch.torch.models.instance_forward import without_plans
from schedsearch.torch.models.plan import Plan
from schedsearch.torch.networks.frozen_network import copied
from schedsearch.torch.networks.frozen_weights import FrozenWeights
from schedsearch.torch.networks.selection import NetworkSelector, place
from schedsearch.torch.refusal import Refusal


def networks_in(
    module: nn.Module,
    plan: Plan,
    args: tuple[object, ...],
    selector: NetworkSelector,
    deadline: Deadline,
    keep: Callable[[fx.Node], bool],
) -> tuple[tuple[PartReport, ...], list[str]]:
    """Lets networks compute those subgraphs of a plan for which they win.

    What loses, and everything else, stays as it is; layers in it may still be swapped.

    Args:
        args: real inputs of the module.
        deadline: of building networks.
        keep: whether a node is left to PyTorch.

    Returns:
        What became of each subgraph, and remarks about the graph.
    """
    graph = fx.GraphModule(plan._root, copied(plan.graph)[0])
    tensors = plan.tensors_of(module)
    weights = dict(zip([node for node in graph.graph.nodes if node.op == "placeholder"], tensors))
    inputs = [*tensors, *pytree.tree_leaves((args, {}))]
    with without_plans(module):
        try:
            FrozenWeights(tensors)  # whether their changes can be noticed
        except Refusal as error:
            return (), [f"no networks: {error}"]
        placement = place(selector, graph, weights, inputs, deadline, keep=keep)
        placement.keep_winners(selector, inductor.compiled_or_eager)
    if placement.nets:
        made, plan.networks = placement.put_into(graph, weights)
        plan.graph = made.graph
        plan.found = patterns.find(plan.graph, tf32=plan.tf32 and selector.kernels.device.type == "cuda")
    notes = [f"no networks: {placement.report.reason}"] if placement.report.reason else []
    return placement.rows, [*notes, *placement.report.left]


def is_kept(part: nn.Module, path: str, wanted: Callable[[nn.Module, str], bool] | None) -> Callable[[fx.Node], bool]:
    """Whether a node is a layer that `filter_fn` leaves out."""

    def kept(node: fx.Node) -> bool:
        kind = graph_nodes.called(node)
        if wanted is None or kind is None or kind[0] not in ("conv", "shuffle", "unshuffle"):
            return False
        return not wanted(*named(part, path, graph_nodes.name_of(node)))

    return kept


def named(part: nn.Module, path: str, name: str) -> tuple[nn.Module, str]:
    """The module of a layer and its name in the model.

    Args:
        part: the part of the model that was read.
        path: its name in the model.
        name: of the layer in the part: of a module, or of a node of the graph if no module in the part makes it.
    """
    try:
        return part.get_submodule(name), f"{path}.{name}".strip(".")
    except AttributeError:  # the part makes it, by itself or by a call of a function
        alone = isinstance(part, nn.Conv2d | nn.PixelShuffle | nn.PixelUnshuffle)
        return part, path if alone and path else f"{path}.{name}".strip(".")
