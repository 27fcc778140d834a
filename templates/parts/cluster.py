"""Device operations among the blocks of a thread-block cluster, sm_90: barriers, multicast, sums through shared memory.

A block is named by its rank in the cluster. A mask of blocks has bit r for rank r.

Source: PTX ISA, "barrier.cluster", "mapa", "State spaces: shared::cluster", "mbarrier", "st.async", "cp.async.bulk.tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.ptx import REGISTER

# A barrier in two halves, for every thread of every block of the cluster. Arriving is relaxed and does not wait for memory:
# the events that must come first are those that a thread has waited for (wgmma has read) or fenced (barriers are
# initialised). The barrier counts warps, so the lanes of a warp first synchronise. The operation is convergent, because a
# copy of it in a branch could let a warp arrive twice.
cluster_arrive = device_op(
    "cluster_arrive", "bar.warp.sync 0xffffffff; barrier.cluster.arrive.relaxed.aligned;", convergent=True
)
cluster_wait = device_op("cluster_wait", "bar.warp.sync 0xffffffff; barrier.cluster.wait.acquire.aligned;", convergent=True)
# The same in one, for data: what any thread of the cluster wrote to shared memory before, all see behind it.
cluster_sync = device_op(
    "cluster_sync",
    "bar.warp.sync 0xffffffff; barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    convergent=True,
)


# --- Barriers and numbers in each other's memory ----------------------------------------------------------------------
map_shared = device_op(  # the address in another block's memory that corresponds to `shared` in this block
    "map_shared",
    "mapa.shared::cluster.u32 $address, $shared, $rank;",
    ins={"shared": "u32", "rank": "u32"},
    outs={"address": "u32"},
    pure=True,
)
# Arrives at an address of `map_shared`. Only the event that the thread has waited for must come first (wgmma has read, TMA
# writes next), not the thread's own reads and writes. Cluster scope would order those too, by waiting for all memory.
mbarrier_arrive_at_peer = device_op(
    "mbarrier_arrive_at_peer", "mbarrier.arrive.shared::cluster.b64 _, [$shared];", ins={"shared": "u32"}
)
store_at_peer = device_op(  # to an address of `map_shared`
    "store_at_peer", "st.shared::cluster.f32 [$shared], $value;", ins={"shared": "u32", "value": "f32"}
)


# --- Tensor copies to several blocks: to the same place in the memory of each, counted by the same barrier of each --------
@functools.cache
def tma_load_im2col(multicast: bool) -> Callable[..., Any]:
    """Loads at (channel, w, h, n) of the first pixel with the offsets of a tap, to a mask of blocks or only to this one."""
    return device_op(
        "tma_load_im2col",
        _load("4d", ".im2col", "$c, $w, $h, $n", ", {$offset_w, $offset_h}", multicast),
        ins={
            "shared": "u32", "map": "u64", "c": "i32", "w": "i32", "h": "i32", "n": "i32", "barrier": "u32",
            "offset_w": "u16", "offset_h": "u16", "blocks": "u16",
        },
        unused=("blocks",),
    )  # fmt: skip


@functools.cache
def tma_load_tiled(multicast: bool) -> Callable[..., Any]:
    """Loads a box at three coordinates, to a mask of blocks or only to this one."""
    return device_op(
        "tma_load_tiled",
        _load("3d", "", "$c0, $c1, $c2", "", multicast),
        ins={"shared": "u32", "map": "u64", "c0": "i32", "c1": "i32", "c2": "i32", "barrier": "u32", "blocks": "u16"},
        unused=("blocks",),
    )


@functools.cache
def tma_load_interleaved(multicast: bool) -> Callable[..., Any]:
    """The same for a box of five axes, of which the third and fourth are loaded whole."""
    return device_op(
        "tma_load_interleaved",
        _load("5d", "", "$c0, $c1, 0, 0, $c4", "", multicast),
        ins={"shared": "u32", "map": "u64", "c0": "i32", "c1": "i32", "c4": "i32", "barrier": "u32", "blocks": "u16"},
        unused=("blocks",),
    )


@functools.cache
def tma_load_boxes(rank: int, multicast: bool) -> Callable[..., Any]:
    """Loads a box at `rank` coordinates, to a mask of blocks or only to this one."""
    names = [f"c{axis}" for axis in range(rank)]
    return device_op(
        "tma_load_boxes",
        _load(f"{rank}d", "", ", ".join(f"${name}" for name in names), "", multicast),
        ins={"shared": "u32", "map": "u64", **dict.fromkeys(names, "i32"), "barrier": "u32", "blocks": "u16"},
        unused=("blocks",),
    )


def _load(rank: str, mode: str, coordinates: str, offsets: str, multicast: bool) -> str:
    # Kernels with and without multicast have the same shape: the operation without leaves its operand `blocks` out.
    to_many, blocks = (".multicast::cluster", ", $blocks;") if multicast else ("", ";")
    return (
        f"cp.async.bulk.tensor.{rank}.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{to_many} "
        f"[$shared], [$map, {{{coordinates}}}], [$barrier]{offsets}{blocks}"
    )


# --- Sums ---------------------------------------------------------------------------------------------------------------
@functools.cache
def exchange_fragments(
    blocks: int, octets: int, own_octets: int, stride_bytes: int, accumulator: str = "float32"
) -> Callable[..., Any]:
    """Sends wgmma's accumulators to the blocks that add them up: block r of a tile gets the r-th `own_octets`.

    It takes (accumulators[4 * octets], own[4 * own_octets], shared, barrier, rank, first). This block's own columns go to
    `own`, all others to the other blocks' memory: 16 bytes for each 8 columns, `stride_bytes` apart, with a slot of
    `own_octets` for each sender, by rank. `shared` is this thread's address in the first slot. The receiver's `barrier`
    counts the bytes. Both addresses are the same in every block. `first` is the rank of the tile's first block in the
    cluster.
    """
    kind, number_type = REGISTER[accumulator], dtype_of(accumulator).ptx
    lines = ["{ .reg .pred mine, later; .reg .b32 slot, to, at, bar;"]
    for owner in range(blocks):
        lines += [
            f"setp.eq.u32 mine, $rank, {owner}; setp.gt.u32 later, $rank, {owner};",
            "selp.u32 slot, 1, 0, later; sub.u32 slot, $rank, slot;",
            f"mad.lo.u32 at, slot, {own_octets * stride_bytes}, $shared; add.u32 to, $first, {owner};",
            "mapa.shared::cluster.u32 at, at, to; mapa.shared::cluster.u32 bar, $barrier, to;",
        ]
        for number in range(max(0, min(own_octets, octets - owner * own_octets))):
            sums = [f"$accumulators[{4 * (owner * own_octets + number) + i}]" for i in range(4)]
            lines.append(
                f"@!mine st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.{number_type} "
                f"[at+{number * stride_bytes}], {{{', '.join(sums)}}}, [bar];"
            )
            lines += [f"@mine mov.{number_type} $own[{4 * number + i}], {value};" for i, value in enumerate(sums)]
    return device_op(
        "exchange_fragments",
        "\n".join([*lines, "}"]),
        inout={"accumulators": (kind, 4 * octets), "own": (kind, 4 * own_octets)},
        ins={"shared": "u32", "barrier": "u32", "rank": "u32", "first": "u32"},
    )


@functools.cache
def add_fragments(slots: int, octets: int, stride_bytes: int, accumulator: str = "float32") -> Callable[..., Any]:
    """Adds the slots at `shared` to sums[4 * octets], in their order. It takes (sums, shared)."""
    number_type = dtype_of(accumulator).ptx
    lines = [f"{{ .reg .{number_type} v<4>;"]
    for octet in range(octets):
        for slot in range(slots):
            lines.append(
                f"ld.shared.v4.{number_type} {{v0, v1, v2, v3}}, [$shared+{(slot * octets + octet) * stride_bytes}];"
            )
            lines += [f"add.{number_type} $sums[{4 * octet + i}], $sums[{4 * octet + i}], v{i};" for i in range(4)]
    return device_op(
        "add_fragments",
        "\n".join([*lines, "}"]),
        inout={"sums": (REGISTER[accumulator], 4 * octets)},
        ins={"shared": "u32"},
    )
