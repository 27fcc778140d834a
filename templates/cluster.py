"""Device operations among the blocks of a thread-block cluster, sm_90: a barrier, and sums through each other's memory.

Source: PTX ISA, "barrier.cluster", "mapa" and "State spaces: shared::cluster".
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
    """Sums over the blocks of a cluster, in the order of their ranks, of what `store_fragments` wrote at one address.

    Called as (sums[4 * octets], shared), with the address in this block's own memory of the first of `octets`.
    """
    lines = [f"{{ .reg .b32 at<{blocks}>; .reg .f32 v<{4 * blocks}>;"]
    lines += [f"mapa.shared::cluster.u32 at{rank}, $shared, {rank};" for rank in range(blocks)]
    for octet in range(octets):
        for rank in range(blocks):
            values = ", ".join(f"v{4 * rank + i}" for i in range(4))
            lines.append(f"ld.shared::cluster.v4.f32 {{{values}}}, [at{rank}+{octet * stride_bytes}];")
        for i in range(4):
            lines.append(f"add.f32 $sums[{4 * octet + i}], v{i}, v{4 + i};")
            lines += [
                f"add.f32 $sums[{4 * octet + i}], $sums[{4 * octet + i}], v{4 * rank + i};" for rank in range(2, blocks)
            ]
    return device_op("sum_fragments", "\n".join([*lines, "}"]), inout={"sums": ("f32", 4 * octets)}, ins={"shared": "u32"})
