"""`torch.ops.schedsearch.network`: a subgraph that a network of ours computes."""

from __future__ import annotations

import hashlib
import itertools
import operator
import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import fx

from schedsearch.errors import UsageError
from schedsearch.torch.networks.frozen_network import FrozenNetwork
from schedsearch.torch.networks.frozen_weights import FrozenWeights
from schedsearch.torch.networks.subgraphs import Subgraph

_library = torch.library.Library("schedsearch", "FRAGMENT")
_networks: weakref.WeakValueDictionary[str, NetworkCall] = weakref.WeakValueDictionary()  # by key


class NetworkCall:
    """A subgraph's network, as the operator runs it while somebody holds this object.

    Attributes:
        name: of the subgraph.
        key: what the operator takes: the same text for a subgraph that looks the same, and a number.
    """

    def __init__(self, subgraph: Subgraph, net: FrozenNetwork, weights: Sequence[torch.Tensor]) -> None:
        """Takes the tensors that the network copied, those of `subgraph.weights`; none: they are checked elsewhere."""
        self._net, self.name, self._warned = net, subgraph.name, False
        self._module = subgraph.module
        self._names = [node.name for node in subgraph.weights]
        self._frozen = FrozenWeights(weights)
        text = f"{subgraph.module.graph} {net.forms}"
        stem = hashlib.sha256(text.encode()).hexdigest()[:20]
        self.key = next(key for number in itertools.count() if (key := f"network-{stem}-{number}") not in _networks)
        _networks[self.key] = self

    def __call__(self, given: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        if weights and not self._frozen.are(weights):
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"weights of {self.name} are not those that its network was built with: PyTorch computes it; "
                    "call optimize_ again",
                    stacklevel=2,
                )
            tensors = dict(zip(self._names, weights))
            return list(torch.func.functional_call(self._module, tensors, tuple(given)))
        return self._net(given)

    def fake(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs without memory."""
        like = given[0]
        return [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in self._net.forms]


def replace(module: fx.GraphModule, calls: Sequence[tuple[Subgraph, NetworkCall]], *, checked: bool) -> None:
    """Lets operators compute subgraphs.

    Args:
        module: its nodes are those of the subgraphs.
        checked: whether operators check parameters and buffers in each call.
    """
    from torch.fx.passes.tools_common import legalize_graph

    graph, new = module.graph, dict[fx.Node, fx.Node]()
    for subgraph, call in calls:
        with graph.inserting_after(subgraph.nodes[-1]):
            inputs = [new.get(each, each) for each in subgraph.inputs]
            node = graph.call_function(
                torch.ops.schedsearch.network.default, (call.key, inputs, subgraph.weights if checked else [])
            )
        after = node
        for place, old in enumerate(subgraph.outputs):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (node, place))
            after.meta = dict(old.meta)
            old.replace_all_uses_with(after, lambda user, inside=frozenset(subgraph.nodes): user not in inside)
            new[old] = after
        for old in reversed(subgraph.nodes):
            graph.erase_node(old)
    legalize_graph(module)  # an operator comes after all that it reads, and before all that reads it
    module.graph.eliminate_dead_code()
    module.recompile()


def _find(key: str) -> NetworkCall:
    try:
        return _networks[key]
    except KeyError:
        raise UsageError(
            f"this process has no network {key}; call schedsearch.torch.optimize_ or torch.compile(model, "
            'backend="schedsearch") before it runs a graph that was saved'
        ) from None


def _run(key: str, given: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return _find(key)(given, weights)


def _fake(key: str, given: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return _find(key).fake(given)


_library.define("network(str key, Tensor[] given, Tensor[] weights) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("network", _run, _key)
torch.library.register_fake("schedsearch::network", _fake, lib=_library)
