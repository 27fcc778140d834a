"""Reductions over threads of a block: groups of neighbouring threads, a power of two of them, combine a float32 each.

Up to 32 threads exchange numbers in their warp. Larger groups combine the results of their warps through shared memory.

Source: PTX ISA, "shfl.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import device_op
from schedsearch.templates.parts.casts import i32

WARP = 32

from_lane = device_op(  # all lanes of the warp take part
    "from_lane",
    "shfl.sync.bfly.b32 $found, $value, $distance, 0x1f, 0xffffffff;",
    ins={"value": "f32", "distance": "i32"},
    outs={"found": "f32"},
    convergent=True,
)


def over_group(lanes: int, threads: int, combine: Callable[[Any, Any], Any], slot: int) -> Callable[[Any, Any], Any]:
    """`over(partial, value)` for kernels: the numbers of all threads of a group, combined; every thread gets the result.

    Args:
        lanes: threads of a group.
        threads: of the block; all take part.
        slot: calls between which threads do not wait for one another have different ones. `partial` is an array in shared
            memory of `threads // 32` float32 for each slot.
    """
    in_warp, warps, exchange = min(lanes, WARP), lanes // WARP, from_lane
    first = slot * (threads // WARP)

    def over_lanes(value: Any, count: Any) -> Any:
        distance = i32(count // 2)
        while distance > 0:
            value = combine(value, exchange(value, distance))
            distance = i32(distance // 2)
        return value

    def over_warp(partial: Any, value: Any) -> Any:
        return over_lanes(value, in_warp)

    def over_warps(partial: Any, value: Any) -> Any:
        value = over_lanes(value, in_warp)
        thread = i32(cuda.threadIdx.x)
        if thread % WARP == 0:
            partial[first + thread // WARP] = value
        cuda.syncthreads()
        return over_lanes(partial[first + thread // lanes * warps + thread % warps], warps)

    return over_warp if lanes <= WARP else over_warps
