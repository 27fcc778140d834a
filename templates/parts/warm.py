"""Brings what belongs to a tile's output channels to L1 before the epilogue needs it.

An epilogue loads biases and scales for a few columns at a time, and its first loads of a block miss every cache. A tile of
128 columns waits four times for DRAM, while nothing else runs on a multiprocessor: up to a fifth of the time of layers with
few k steps. A warp that waits anyway, or has nothing to do, loads the same lines while the tile is multiplied.
docs/decisions/171-operands-of-channels-are-loaded-early.md has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.workload import Workload

_SECTOR_BYTES = 32  # what a load brings to L1

Warm = Callable[[Any, Any, Any, Any], None]


def warm_operands(workload: Workload) -> Warm:
    """`warm(lane, k, channels, operands)`: a warp loads what the epilogue reads for `channels` channels from k on.

    The warp waits for the data. It reads an element of each 32 bytes, up to 32 * 32 bytes of each operand, and nothing if
    `channels` is not positive. `operands` are those of `Epilogue`; k + channels is at most K (both i32).
    """
    warm: Warm = _nothing
    for index, operand in enumerate(epilogue_operands(workload)):
        if operand.axes == "K" and operand.present:
            warm = _also(warm, _load_sectors(dtype_of(operand.dtype).nbytes), index)
    return warm


def _nothing(lane: Any, k: Any, channels: Any, operands: Any) -> None:
    """No operand belongs to channels."""


def _also(before: Warm, load: Callable[..., None], index: int) -> Warm:
    def warm(lane: Any, k: Any, channels: Any, operands: Any) -> None:
        before(lane, k, channels, operands)
        load(lane, k, channels, operands[index])

    return warm


@functools.cache
def _load_sectors(nbytes: int) -> Callable[..., None]:
    """A store that never happens keeps ptxas from dropping the load. `prefetch.global.L1` brings data to L2 only."""
    bits = 8 * nbytes
    lines = (
        f"{{ .reg .pred inside, never; .reg .b{bits} value; .reg .b32 first; .reg .b64 at;",
        f"mul.lo.s32 first, $lane, {_SECTOR_BYTES // nbytes}; setp.lt.s32 inside, first, $channels;",
        f"add.s32 first, first, $k; mad.wide.s32 at, first, {nbytes}, $address; mov.b{bits} value, 0;",
        f"@inside ld.global.nc.b{bits} value, [at]; setp.eq.s32 never, $channels, {-(2**31)};",
        f"@never st.global.b{bits} [at], value; }}",
    )
    ins = {"lane": "i32", "k": "i32", "channels": "i32", "address": "u64"}
    return device_op("load_sectors", "\n".join(lines), ins=ins)
