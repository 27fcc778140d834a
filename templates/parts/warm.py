"""Brings what belongs to a tile's output channels to L1 before the epilogue needs it.

An epilogue loads biases and scales for a few columns at a time, and its first loads of a block miss every cache. A tile of
128 columns waits four times for DRAM, while nothing else runs on a multiprocessor: up to a fifth of the time of layers with
few k steps. A warp that waits anyway, or has nothing to do, loads the same lines while the tile is multiplied.
docs/decisions/171-operands-of-channels-are-loaded-early.md has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.launch import Param, Pointer, TensorMap
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.workload import Workload

_SECTOR_BYTES = 32  # what a load brings to L1


def channel_operands(workload: Workload) -> tuple[str, ...]:
    """The operands of the workload's epilogue that have one element for each output channel."""
    return tuple(operand.name for operand in epilogue_operands(workload) if operand.axes == "K" and operand.present)


def warm_operands(workload: Workload, params: Sequence[Param]) -> Callable[..., None]:
    """`warm(lane, k, channels, operands)`: a warp loads what the epilogue reads for `channels` channels from k on.

    The warp waits for the data. It reads an element of each 32 bytes, up to 32 * 32 bytes of each operand, and nothing if
    `channels` is not positive. k + channels is at most K (both i32).

    Args:
        params: the launch parameters of `operands`; those of the workload's epilogue come first (`Epilogue.params`).
    """
    names = channel_operands(workload)
    vectors = tuple(
        (index, dtype_of(operand.dtype).nbytes)
        for index, operand in enumerate(epilogue_operands(workload))
        if operand.name in names
    )
    load = _load_sectors(vectors, tuple("u64" if isinstance(param, Pointer | TensorMap) else "f32" for param in params))

    def warm(lane: Any, k: Any, channels: Any, operands: Any) -> None:
        load(lane, k, channels, *operands)

    return warm


@functools.cache
def _load_sectors(vectors: tuple[tuple[int, int], ...], kinds: tuple[str, ...]) -> Callable[..., None]:
    """Loads one element of each sector of the vectors, (index among the operands, bytes of an element).

    There is an operation even without vectors, so that kernels with different epilogues share a run of the front end. A
    store that never happens keeps ptxas from dropping the loads. `prefetch.global.L1` brings data to L2 only.
    """
    ins = {"lane": "i32", "k": "i32", "channels": "i32", **{f"operand{index}": kind for index, kind in enumerate(kinds)}}
    lines = ["{ .reg .pred inside, never; .reg .b16 value16; .reg .b32 first, value32; .reg .b64 at;"]
    for index, nbytes in vectors:
        bits, value = 8 * nbytes, f"value{8 * nbytes}"
        lines += [
            f"mul.lo.s32 first, $lane, {_SECTOR_BYTES // nbytes}; setp.lt.s32 inside, first, $channels;",
            f"add.s32 first, first, $k; mad.wide.s32 at, first, {nbytes}, $operand{index}; mov.b{bits} {value}, 0;",
            f"@inside ld.global.nc.b{bits} {value}, [at]; setp.eq.s32 never, $channels, {-(2**31)};",
            f"@never st.global.b{bits} [at], {value};",
        ]
    return device_op("load_sectors", "\n".join([*lines, "}"]), ins=ins, unused=ins)
