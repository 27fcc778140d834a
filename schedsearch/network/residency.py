"""What a kernel call saves in a network, compared with its cold time: its arrays lie in the L2 cache, and it begins early.

A record's cold time is that of a kernel which finds nothing in the cache, behind a kernel that has ended. In a network the
call before has just written the array that a call reads. The call begins before that one ends, reads its weights meanwhile,
then waits for the cache instead of the memory once, before its first tile, and reads the array's bytes at the cache's rate.

    saved = call_ns + ns_per_byte * bytes of arrays that stay in the cache

A time in a chain (mode chain-graph-v1) is that of a call with its arrays in the cache and its weights in memory, behind a
kernel that it begins before the end of. What is left is small: that kernel is another one, and has just written the array,
so that a call takes `behind_ns` longer. Whether the weights lie in the cache hardly matters in either mode: they are read
ahead (docs/decisions/319-predictions-know-that-kernels-begin-early.md).

An array stays if it fills at most half of the cache: the cache has two halves, and an array that multiprocessors of both
read occupies both (NVIDIA A100 whitepaper, "A100 L2 cache"; the H100 has the same structure).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED
from schedsearch.network.graph import Network
from schedsearch.target import Target
from schedsearch.workload import Workload

Known = TypeVar("Known")
MOST_SAVED = 0.5  # of a cold time


@dataclass(frozen=True)
class Savings:
    """Attributes:
    call_ns: how much sooner a call ends that begins early, and whose first tile comes from the cache.
    ns_per_byte: how much sooner each byte does.
    """

    call_ns: float
    ns_per_byte: float


@dataclass(frozen=True)
class Neighbours:
    """What a call's time in a network differs in from that in a chain of itself.

    Attributes:
        behind_ns: how much longer it takes behind another kernel.
    """

    behind_ns: float


SAVINGS: Mapping[str, Savings] = {  # by the words of a target's key; fitted by benchmarks/network_predictions.py
    "NVIDIA H200": Savings(677.0, 9.9e-5),
}
"""Cards that are missing save nothing: the predicted time of a network is then that of cold calls, which is too long."""

NEIGHBOURS: Mapping[str, Neighbours] = {  # the same for times in a chain; fitted by benchmarks/network_predictions.py
    "NVIDIA H200": Neighbours(106.0),
}


@dataclass(frozen=True)
class Residency:
    """The arrays of a network that stay in a device's cache.

    Attributes:
        savings: against cold times; None: nothing is saved, or times are not cold.
        neighbours: of times in a chain; else None.
        most_bytes: of an array that stays.
    """

    savings: Savings | None
    most_bytes: float = 0.0
    neighbours: Neighbours | None = None

    @classmethod
    def of(cls, network: Network | None, target: Target, mode: str) -> Residency:
        """The residency for times that were measured in a mode."""
        savings = _of_card(SAVINGS, target) if mode in (COLD_GRAPH, COLD_GRAPH_PREPARED) else None
        neighbours = _of_card(NEIGHBOURS, target) if mode == CHAIN_GRAPH else None
        if network is None or (savings is None and neighbours is None):
            return cls(None)
        return cls(savings, target.l2_bytes / 2, neighbours)

    def saved_ns(self, workload: Workload, cold_ns: float) -> float:
        """How much less than its recorded time `cold_ns` a call takes; below zero if it takes longer."""
        if self.neighbours is not None:
            return -self.neighbours.behind_ns
        if self.savings is None:
            return 0.0
        saved = self.savings.call_ns + self.savings.ns_per_byte * self.cached_bytes(workload)
        return min(saved, MOST_SAVED * cold_ns)

    def cached_bytes(self, workload: Workload) -> int:
        """The bytes of a call's arrays that come from the cache."""
        arrays = (spec.nbytes for spec in workload.signature if not spec.constant)
        return sum(nbytes for nbytes in arrays if nbytes <= self.most_bytes)


def _of_card(known: Mapping[str, Known], target: Target) -> Known | None:
    return next((each for word, each in known.items() if target.key.endswith(word)), None)
