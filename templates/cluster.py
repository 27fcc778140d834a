"""Device operations among the blocks of a thread-block cluster, sm_90: barriers, multicast, sums through shared memory.

A block is named by its rank in the cluster. A mask of blocks has bit r for rank r.

Source: PTX ISA, "barrier.cluster", "mapa", "State spaces: shared::cluster", "mbarrier" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op

# A barrier in two halves, for every thread of every block of the cluster: what was read or written before arriving is done
# for all who have waited. It counts warps, so that the lanes of one are brought together first. A copy of it in a branch
# could let a warp arrive twice, hence convergent.
cluster_arrive = device_op(
    "cluster_arrive", "bar.warp.sync 0xffffffff; barrier.cluster.arrive.release.aligned;", convergent=True
)
cluster_wait = device_op("cluster_wait", "bar.warp.sync 0xffffffff; barrier.cluster.wait.acquire.aligned;", convergent=True)


# --- Barriers in each other's memory ----------------------------------------------------------------------------------
map_shared = device_op(  # the address, in another block's memory, of what lies at `shared` in one's own
    "map_shared",
    "mapa.shared::cluster.u32 $address, $shared, $rank;",
    ins={"shared": "u32", "rank": "u32"},
    outs={"address": "u32"},
    pure=True,
)
# At an address of `map_shared`. It is what the thread has waited for that must come first (wgmma has read, TMA writes next),
# not its own reads and writes: those a scope of the cluster would order, by waiting for all memory at each arrival.
mbarrier_arrive_at_peer = device_op(
    "mbarrier_arrive_at_peer", "mbarrier.arrive.shared::cluster.b64 _, [$shared];", ins={"shared": "u32"}
)


# --- Tensor copies to several blocks: to the same place in the memory of each, counted by the same barrier of each --------
@functools.cache
def tma_load_im2col(multicast: bool) -> Callable[..., Any]:
    """Coordinates (channel, w, h, n) of the first pixel, offsets of the kernel's tap; a mask of blocks, or only this one."""
    return device_op(
        "tma_load_im2col",
        _load("4d", ".im2col", "$c, $w, $h, $n", ", {$offset_w, $offset_h}", multicast),
        ins={
            "shared": "u32", "map": "u64", "c": "i32", "w": "i32", "h": "i32", "n": "i32", "barrier": "u32",
            "offset_w": "u16", "offset_h": "u16", "blocks": "u16",
        },
    )  # fmt: skip


@functools.cache
def tma_load_tiled(multicast: bool) -> Callable[..., Any]:
    """A box at three coordinates; a mask of blocks, or only this one."""
    return device_op(
        "tma_load_tiled",
        _load("3d", "", "$c0, $c1, $c2", "", multicast),
        ins={"shared": "u32", "map": "u64", "c0": "i32", "c1": "i32", "c2": "i32", "barrier": "u32", "blocks": "u16"},
    )


def _load(rank: str, mode: str, coordinates: str, offsets: str, multicast: bool) -> str:
    """Without multicast `blocks` is not used: a kernel is the same but for the text, and that loads faster."""
    to_many, blocks = (".multicast::cluster", ", $blocks;") if multicast else ("", "; // unused: $blocks")
    return (
        f"cp.async.bulk.tensor.{rank}.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{to_many} "
        f"[$shared], [$map, {{{coordinates}}}], [$barrier]{offsets}{blocks}"
    )


# --- Sums ---------------------------------------------------------------------------------------------------------------
@functools.cache
def store_fragments(bn: int, stride_bytes: int) -> Callable[..., Any]:
    """Writes wgmma's accumulators to shared memory, 16 bytes for each 8 columns, `stride_bytes` from one 8 to the next.

    Called as (accumulators[bn // 2], shared); without bank conflicts when neighbouring threads write 16 bytes apart.
    """
    lines = [
        f"st.shared.v4.f32 [$shared+{octet * stride_bytes}], {{{', '.join(f'$acc[{4 * octet + i}]' for i in range(4))}}};"
        for octet in range(bn // 8)
    ]
    return device_op("store_fragments", "\n".join(lines), inout={"acc": ("f32", bn // 2)}, ins={"shared": "u32"})


@functools.cache
def sum_fragments(blocks: int, octets: int, stride_bytes: int) -> Callable[..., Any]:
    """Sums over blocks of neighbouring ranks, in their order, of what `store_fragments` wrote at one address.

    Called as (sums[4 * octets], shared, rank), with the address in this block's own memory of the first of `octets`, and the
    first block's rank.
    """
    lines = [f"{{ .reg .b32 at<{blocks}>; .reg .f32 v<{4 * blocks}>;"]
    for number in range(blocks):
        lines.append(f"add.u32 at{number}, $rank, {number}; mapa.shared::cluster.u32 at{number}, $shared, at{number};")
    for octet in range(octets):
        for number in range(blocks):
            values = ", ".join(f"v{4 * number + i}" for i in range(4))
            lines.append(f"ld.shared::cluster.v4.f32 {{{values}}}, [at{number}+{octet * stride_bytes}];")
        for i in range(4):
            lines.append(f"add.f32 $sums[{4 * octet + i}], v{i}, v{4 + i};")
            lines += [
                f"add.f32 $sums[{4 * octet + i}], $sums[{4 * octet + i}], v{4 * number + i};" for number in range(2, blocks)
            ]
    ins = {"shared": "u32", "rank": "u32"}
    return device_op("sum_fragments", "\n".join([*lines, "}"]), inout={"sums": ("f32", 4 * octets)}, ins=ins)
