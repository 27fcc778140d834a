"""What a kernel call saves in a network, compared with its cold time: its arrays lie in the L2 cache.

A record's cold time is that of a kernel which finds nothing in the cache. In a network the call before has just written the
array that a call reads. The call then waits for the cache instead of the memory once, before its first tile, and reads the
array's bytes at the cache's rate. If all weights of the network fit in the cache as well, they stay there from run to run,
and the wait for their first tile is shorter, too.

    saved = latency_ns * (1 + 1 if the weights stay) + ns_per_byte * bytes of arrays that stay

A time in a chain (mode chain-graph-v1) is that of a call with its arrays in the cache and its weights in memory, behind a
kernel that it may begin before the end of. What is left is small: that kernel is another one, and has just written the
array, so that a call takes `behind_ns` longer; and the wait for weights that stay is shorter.

    saved = -behind_ns + weights_ns (if the weights stay)

An array stays if it fills at most half of the cache: the cache has two halves, and an array that multiprocessors of both
read occupies both (NVIDIA A100 whitepaper, "A100 L2 cache"; the H100 has the same structure).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED
from schedsearch.network.graph import Network, Node
from schedsearch.target import Target
from schedsearch.workload import Workload

Known = TypeVar("Known")
MOST_SAVED = 0.5  # of a cold time


@dataclass(frozen=True)
class Savings:
    """Attributes:
    latency_ns: how much sooner the first tile comes from the cache than from memory.
    ns_per_byte: how much sooner each byte does.
    """

    latency_ns: float
    ns_per_byte: float


@dataclass(frozen=True)
class Neighbours:
    """What a call's time in a network differs in from that in a chain of itself.

    Attributes:
        behind_ns: how much longer it takes behind another kernel.
        weights_ns: how much shorter it takes if its weights stay in the cache.
    """

    behind_ns: float
    weights_ns: float


SAVINGS: Mapping[str, Savings] = {  # by the words of a target's key; fitted by benchmarks/network_predictions.py
    "NVIDIA H200": Savings(354.0, 9.9e-5),
}
"""Cards that are missing save nothing: the predicted time of a network is then that of cold calls, which is too long."""

NEIGHBOURS: Mapping[str, Neighbours] = {  # the same for times in a chain; fitted to two networks, see decision 249
    "NVIDIA H200": Neighbours(180.0, 320.0),
}


@dataclass(frozen=True)
class Residency:
    """The arrays of a network that stay in a device's cache.

    Attributes:
        savings: against cold times; None: nothing is saved, or times are not cold.
        neighbours: of times in a chain; else None.
        most_bytes: of an array that stays.
        weights_stay: whether all weights do.
    """

    savings: Savings | None
    most_bytes: float = 0.0
    weights_stay: bool = False
    neighbours: Neighbours | None = None

    @classmethod
    def of(cls, network: Network | None, target: Target, mode: str) -> Residency:
        """The residency for times that were measured in a mode."""
        savings = _of_card(SAVINGS, target) if mode in (COLD_GRAPH, COLD_GRAPH_PREPARED) else None
        neighbours = _of_card(NEIGHBOURS, target) if mode == CHAIN_GRAPH else None
        if network is None or (savings is None and neighbours is None):
            return cls(None)
        most_bytes = target.l2_bytes / 2
        return cls(savings, most_bytes, weight_bytes(network) <= most_bytes, neighbours)

    def saved_ns(self, workload: Workload, cold_ns: float) -> float:
        """How much less than its recorded time `cold_ns` a call takes; below zero if it takes longer."""
        if self.neighbours is not None:
            weights_stay = self.weights_stay and bool(workload.constants)
            return min(self.neighbours.weights_ns * weights_stay - self.neighbours.behind_ns, MOST_SAVED * cold_ns)
        if self.savings is None:
            return 0.0
        latencies, nbytes = self.terms(workload)
        saved = self.savings.latency_ns * latencies + self.savings.ns_per_byte * nbytes
        return min(saved, MOST_SAVED * cold_ns)

    def terms(self, workload: Workload) -> tuple[int, int]:
        """How many waits are shorter, and how many bytes come from the cache."""
        arrays = [spec for spec in workload.signature if not spec.constant]
        weights = len(arrays) < len(workload.signature)
        return 1 + (weights and self.weights_stay), sum(each.nbytes for each in arrays if each.nbytes <= self.most_bytes)


def _of_card(known: Mapping[str, Known], target: Target) -> Known | None:
    return next((each for word, each in known.items() if target.key.endswith(word)), None)


def weight_bytes(network: Network) -> int:
    """Bytes of the constants that the kernels read."""
    found: dict[str, int] = {}
    for node in network.nodes:
        if isinstance(node, Node):
            found |= {node.arguments[spec.name]: spec.nbytes for spec in node.implementations[0].signature if spec.constant}
    return sum(found.values())
