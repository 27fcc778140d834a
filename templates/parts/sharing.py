"""Sharing among the blocks of a cluster: loads by multicast, stages that all must have read, the sums of a split tile.

A kernel captures the functions that `ClusterTiles` makes, and they become part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.templates.parts import cluster, ptx
from schedsearch.templates.parts.casts import i32, u16, u32


@dataclass(frozen=True)
class ClusterTiles:
    """A cluster of `m` rows and `n` columns of neighbouring tiles, each computed by `split_k` blocks.

    Blocks in a row of tiles need the same rows of A, and blocks in a column the same columns of B. Each block loads a part
    of both and multicasts it. Each of a tile's blocks multiplies its part of the k steps. Ranks in the cluster run over the
    parts of a tile first, then down a column.
    """

    m: int
    n: int
    split_k: int

    @property
    def blocks(self) -> int:
        return self.m * self.n * self.split_k

    @property
    def multicasts(self) -> bool:
        return self.m * self.n > 1

    @property
    def peers(self) -> int:
        """Number of blocks that a block sends to, including itself."""
        return self.m + self.n - 1

    def place(self) -> Callable[[], Any]:
        """`place()` returns a block's (rank in the cluster, part of the k steps, row, column)."""
        blocks, split_k, rows = self.blocks, self.split_k, self.m

        def place() -> Any:
            rank = u32(u32(cuda.blockIdx.x) % u32(blocks))
            part = u32(rank % u32(split_k))
            tile = u32(rank // u32(split_k))
            return rank, part, u32(tile % u32(rows)), u32(tile // u32(rows))

        return place

    def masks(self) -> Callable[..., Any]:
        """`masks(part, row, column)` returns the blocks with the same rows of A, and those with the same columns of B."""
        split_k, rows = self.split_k, self.m
        column_mask = sum(1 << (m * split_k) for m in range(self.m))
        row_mask = sum(1 << (n * split_k * rows) for n in range(self.n))

        def masks(part: Any, row: Any, column: Any) -> Any:
            same_rows = u16(row_mask << (part + row * split_k))
            same_columns = u16(column_mask << (part + column * (split_k * rows)))
            return same_rows, same_columns

        return masks

    def begin(self) -> Callable[[], None]:
        """`begin()` waits until the barriers of all blocks that this one sends to are initialised."""

        def with_cluster() -> None:
            cluster.cluster_arrive()
            cluster.cluster_wait()

        def alone() -> None:
            cuda.syncthreads()

        return with_cluster if self.multicasts else alone

    def releases(self) -> Callable[..., Any]:
        """`releases(empty, part, row, column)` returns whether a consumer's thread hands stages back, and to which barrier.

        One thread of a warpgroup tells each block that sends to this one: those of the same column, then the others of the
        same row.
        """
        rows, split_k, peers = self.m, self.split_k, self.peers

        def to_itself(empty: Any, part: Any, row: Any, column: Any) -> Any:
            return (i32(cuda.threadIdx.x) & 127) == 0, empty

        def to_peers(empty: Any, part: Any, row: Any, column: Any) -> Any:
            thread = i32(cuda.threadIdx.x)
            releases = (thread & 127) < peers
            peer = u32(min(thread & 127, peers - 1))
            peer_m, peer_n = peer, column
            if peer >= rows:
                other_n = u32(peer - rows)
                peer_m, peer_n = row, u32(other_n + u32(other_n >= column))
            barrier = cluster.map_shared(empty, u32((peer_n * rows + peer_m) * split_k + part))
            return releases, barrier

        return to_peers if self.multicasts else to_itself

    def arrive(self) -> Callable[..., Any]:
        """The arrival at a barrier that `releases` returned."""
        return cluster.mbarrier_arrive_at_peer if self.multicasts else ptx.mbarrier_arrive


def add_up(split_k: int, octets: int, own_octets: int, octet_bytes: int, accumulator: str) -> Callable[..., None]:
    """`add_up(acc, sums, shared, sums_full, thread, in_cluster, part)`: `sums` of the octets of columns that this block
    stores of a split tile; block r of it stores the r-th `own_octets`.

    The other blocks' sums come to `shared`, 16 bytes of each thread, octets `octet_bytes` apart. The barrier `sums_full`
    expects their bytes. All blocks of the tile must have read what lies there.
    """
    exchange_fragments = cluster.exchange_fragments(split_k, octets, own_octets, octet_bytes, accumulator)
    add_fragments = cluster.add_fragments(max(split_k - 1, 1), own_octets, octet_bytes, accumulator)

    def add(acc: Any, sums: Any, shared: Any, sums_full: Any, thread: Any, in_cluster: Any, part: Any) -> None:
        slots = u32(shared + thread * 16)
        exchange_fragments(acc, sums, slots, sums_full, part, u32(in_cluster - part))
        ptx.mbarrier_wait(sums_full, 0)
        add_fragments(sums, slots)

    return add
