"""Sizes of conv2d_halo: what follows from the workload, what from a configuration, the predicted time; its tensor maps.

Words (rectangle, patch, position, chunk) as in `conv2d_halo.py`, which has the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.launch import TensorMap
from schedsearch.ops import DTYPE_BYTES
from schedsearch.space import Columns
from schedsearch.target import Target
from schedsearch.templates import hopper
from schedsearch.templates.hopper import BARRIER_BYTES, LAUNCH_CYCLES, SWIZZLE_ROWS, WARPGROUP, WGMMA_K
from schedsearch.workload import Workload

WGMMA_CHANNELS = hopper.WGMMA_M  # output channels of a wgmma
MAX_POSITIONS = 256  # of a wgmma, its N
CHUNK = 64  # input channels that a patch holds
ROW_BYTES = 128  # of a position in a patch, of an output channel in a stage of weights, of a position of staged y
MAX_BOX = 256  # of TMA, along each axis
L2_PROMOTION_BYTES = 256

# Registers of a consumer thread beside its accumulators: addresses, descriptors, temporaries; more with an epilogue, and
# most with a residual of 32 bits, of which several loads are under way.
PLAIN_REGISTERS, EPILOGUE_REGISTERS, WIDE_RESIDUAL_REGISTERS = 36, 48, 72

# For the predicted time only: what a multiprocessor does in a clock cycle, and delays in cycles.
L2_BYTES_PER_CYCLE = (32, 64)  # when all multiprocessors load at once, and at most
SHARED_BYTES_PER_CYCLE = 128
LOAD_LATENCY_CYCLES = 1000  # from issuing a load to its bytes being in shared memory
TILE_OVERHEAD_CYCLES = 700  # draining the tensor cores, barriers, first store


@dataclass(frozen=True)
class Geometry:
    """The sizes of a workload that the kernel is made of.

    Attributes:
        out_h, out_w: output pixels of an image.
        taps: of the kernel.
        halo_h, halo_w: input pixels that a tile depends on beyond its own size.
        chunks: of CHUNK input channels, the last of them perhaps of fewer.
        k_steps: wgmma steps along k of a whole chunk, and of the last.
    """

    out_h: int
    out_w: int
    taps: int
    halo_h: int
    halo_w: int
    chunks: int
    k_steps: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload) -> Geometry:
        w = workload
        chunks = math.ceil(w.c / CHUNK)
        last = math.ceil((w.c - (chunks - 1) * CHUNK) / WGMMA_K)
        _, out_h, out_w, _ = w.output.shape
        halo_h, halo_w = (w.r - 1) * w.dilation[0], (w.s - 1) * w.dilation[1]
        return cls(out_h, out_w, w.r * w.s, halo_h, halo_w, chunks, (CHUNK // WGMMA_K, last))


def loads_residual(workload: Workload) -> bool:
    """Whether TMA loads a residual to where y will be staged; 32-bit values are read and stored from registers."""
    return "residual" in workload.epilogue and DTYPE_BYTES[workload.out_dtype] == 2


def overhead_registers(workload: Workload) -> int:
    if "residual" in workload.epilogue and not loads_residual(workload):
        return WIDE_RESIDUAL_REGISTERS
    return EPILOGUE_REGISTERS if workload.epilogue else PLAIN_REGISTERS


def pixel_map(buffer: str, workload: Workload, channels: int, width: int, height: int) -> TensorMap:
    """x, y or the residual as (channels, w, h, n), in boxes of `channels` x `width` x `height` of one image, swizzled."""
    spec = workload.output if buffer == "y" else next(spec for spec in workload.signature if spec.name == buffer)
    n, h, w, c = spec.shape
    size = DTYPE_BYTES[spec.dtype]
    return TensorMap(
        buffer,
        spec.dtype,
        dims=(c, w, h, n),
        strides_bytes=(c * size, w * c * size, h * w * c * size),
        element_strides=(1, 1, 1, 1),
        box=(channels, width, height, 1),
        swizzle_bytes=ROW_BYTES,
        l2_promotion_bytes=L2_PROMOTION_BYTES,
    )


def even_splits(size: int, most: int) -> list[int]:
    """The part sizes worth trying, up to `most`: the least for each number of parts."""
    return sorted({part for parts in range(1, size + 1) if (part := math.ceil(size / parts)) <= most})


def usable_tiles(workload: Workload, target: Target) -> dict[tuple[int, int], int]:
    """(tile_h, tile_w) -> positions of a wgmma, where they are few enough and one warpgroup's shared memory suffices."""
    geometry = Geometry.of(workload)
    found = {}
    sizes = derived_quantities(workload, target)
    least = {"channel_groups": 1, "row_groups": 1, "schedule": "together", "patches": 1, "weight_stages": 2}
    for tile_w in even_splits(geometry.out_w, MAX_BOX - geometry.halo_w):
        for tile_h in even_splits(geometry.out_h, MAX_BOX - geometry.halo_h):
            q: dict[str, Any] = {**least, "tile_h": tile_h, "tile_w": tile_w, "blocks_per_sm": 1}
            for name in sizes:
                if name == "waves":
                    break
                q[name] = sizes[name](q)
            if q["positions"] <= MAX_POSITIONS and q["shared_bytes"] <= target.shared_bytes_per_block:
                found[tile_h, tile_w] = int(q["positions"])
    return found


def derived_quantities(workload: Workload, target: Target) -> dict[str, Callable[[Columns], Any]]:
    """Name -> formula over knobs and earlier quantities; for arrays and for single values alike."""
    w, geometry = workload, Geometry.of(workload)
    out_bytes = DTYPE_BYTES[w.out_dtype]
    steps = geometry.taps * geometry.chunks
    all_k_steps = geometry.taps * ((geometry.chunks - 1) * geometry.k_steps[0] + geometry.k_steps[1])

    def rounded(positions: Any) -> Any:
        return -(-positions // SWIZZLE_ROWS) * SWIZZLE_ROWS

    def shared_bytes(q: Columns) -> Any:
        patches = q["patches"] * (q["patch_bytes"] + (q["turns"] + 1) * BARRIER_BYTES)
        weights = q["stages"] * (q["bn"] * ROW_BYTES + 2 * BARRIER_BYTES)
        staged = 0 if out_bytes == 4 else np.where(q["turns"] > 1, 0, q["groups"] * q["positions"] * ROW_BYTES)
        residual = q["groups"] * BARRIER_BYTES if loads_residual(w) else 0
        return patches + weights + staged + residual

    def predicted_cycles(q: Columns) -> Any:
        """Of the busiest multiprocessor: waves of tiles, each bound by tensor cores, shared memory, L2 or latency."""
        busy = np.minimum(q["tiles"] / q["blocks_per_sm"], target.sms)
        l2_rate = np.minimum(L2_BYTES_PER_CYCLE[1], L2_BYTES_PER_CYCLE[0] * target.sms / busy)
        in_turn, streamed = q["turns"] > 1, q["weight_stages"] > 0
        wgmmas = all_k_steps * q["groups"] / q["turns"]
        loaded = geometry.chunks * q["patch_bytes"] + np.where(streamed, steps * q["bn"] * ROW_BYTES, 0)
        stored = q["block_rows"] * q["tile_w"] * q["bn"] * out_bytes
        multiply = wgmmas * q["positions"] / 2
        shared = wgmmas * (WGMMA_CHANNELS + q["positions"]) * WGMMA_K * 2 + loaded + 2 * stored
        tile = np.maximum(multiply, np.maximum(shared / SHARED_BYTES_PER_CYCLE, loaded / l2_rate))
        store = stored / l2_rate + TILE_OVERHEAD_CYCLES
        if "residual" in w.epilogue:  # as many bytes again; together they are on their way during the multiplications
            store = store + stored / l2_rate + np.where(in_turn | (out_bytes == 4), LOAD_LATENCY_CYCLES, 0)
        latency = np.where(streamed, steps * LOAD_LATENCY_CYCLES / np.maximum(q["weight_stages"] - 1, 1), 0)
        waiting = np.where(q["patches"] == q["turns"], geometry.chunks * LOAD_LATENCY_CYCLES + loaded / l2_rate, 0)
        alone = np.where(
            in_turn,
            np.maximum(tile, (tile + store + waiting) / q["turns"]),
            np.maximum(tile, latency) + waiting + store,
        )
        waves = q["waves"] * np.maximum(alone, q["blocks_per_sm"] * tile)
        return LAUNCH_CYCLES + waves + LOAD_LATENCY_CYCLES + np.where(in_turn, store, 0)

    return {
        "bn": lambda q: q["channel_groups"] * WGMMA_CHANNELS,
        "groups": lambda q: q["channel_groups"] * q["row_groups"],
        "turns": lambda q: np.where(q["schedule"] == "in_turn", q["row_groups"], 1),
        "block_rows": lambda q: q["tile_h"] * q["row_groups"] // q["turns"],
        "patch_h": lambda q: q["block_rows"] + geometry.halo_h,
        "patch_w": lambda q: q["tile_w"] + geometry.halo_w,
        "positions": lambda q: rounded((q["tile_h"] - 1) * q["patch_w"] + q["tile_w"]),
        "patch_bytes": lambda q: rounded(q["patch_h"] * q["patch_w"]) * ROW_BYTES,
        "stages": lambda q: np.where(q["weight_stages"] == 0, steps, q["weight_stages"]),
        "shared_bytes": shared_bytes,
        "threads": lambda q: (q["groups"] + 1) * WARPGROUP,
        "row_tiles": lambda q: -(-geometry.out_h // q["block_rows"]),
        "strips": lambda q: -(-geometry.out_w // q["tile_w"]),
        "column_tiles": lambda q: -(-w.k // q["bn"]),
        "tiles": lambda q: w.n * q["row_tiles"] * q["strips"] * q["column_tiles"],
        "waves": lambda q: -(-q["tiles"] // (target.sms * q["blocks_per_sm"])),
        "registers": hopper.registers,
        "predicted_cycles": predicted_cycles,
    }


def evaluate(workload: Workload, target: Target, config: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of one configuration with its derived quantities, as ints."""
    return hopper.evaluated(derived_quantities(workload, target), config)
