"""Sizes of conv2d_stem: those of the workload, those of a configuration, and the predicted time.

`stem.py` has the kernel and explains the words run, octet and patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns
from schedsearch.target import Target
from schedsearch.templates.parts import hopper
from schedsearch.templates.parts.hopper import BARRIER_BYTES, ELEMENT_BYTES, WARPGROUP
from schedsearch.templates.parts.machine import machine
from schedsearch.templates.parts.shared import SharedLayout
from schedsearch.workload import Workload

GROUP_PIXELS = hopper.WGMMA_M  # of a warpgroup's tile
OCTET = 8  # values of a run, 16 bytes; half of a wgmma's k
ROW_BYTES = 128  # of a swizzled row: 64 values of an output channel's weights, or 64 output channels of a pixel of y
STEPS_OF_ROW = 4  # wgmma steps in such a row
SEGMENT = 64  # output channels of a row of staged y
MAX_BOX = 256  # of TMA, along each axis
TILE_WS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Runs:
    """The reduction of a workload.

    Attributes:
        values: values of a run, `skipped` + S * C.
        skipped: values in front that have no weight, so that runs start at even values of x.
        lead: values of a patch in front of its first run: TMA's first coordinate must be a multiple of 16 bytes.
        octets: octets of a run.
        steps: wgmma steps of 16 values along all runs.
        pixel_values: values from a pixel's run to the next pixel's.
        odd: whether runs may start at odd values, so that pairs are not words of the patch.
        columns: wgmma's N: output channels, and up to 8 of filler.
    """

    values: int
    skipped: int
    lead: int
    octets: int
    steps: int
    pixel_values: int
    odd: bool
    columns: int

    @classmethod
    def of(cls, workload: Workload) -> Runs:
        w = workload
        pixel_values, left = w.stride[1] * w.c, w.padding[1] * w.c
        odd = pixel_values % 2 == 1
        skipped = 0 if odd else left % 2
        values = skipped + w.s * w.c
        octets = math.ceil(values / OCTET)
        return cls(
            values, skipped, -(left + skipped) % OCTET, octets, math.ceil(w.r * octets / 2), pixel_values, odd,
            math.ceil(w.k / 16) * 16,
        )  # fmt: skip


def usable_tiles(workload: Workload, target: Target) -> list[int]:
    """The values of `tile_w` whose patch fits in one TMA box, and in shared memory with one warpgroup."""
    found = []
    for tile_w in TILE_WS:
        least = {"tile_w": tile_w, "warpgroups": 1, "patches": 1, "register_steps": 1, "blocks_per_sm": 1}
        q = evaluate(workload, target, least)
        if max(q.patch_w, q.patch_h) <= MAX_BOX and q.shared_bytes <= target.shared_bytes_per_block:
            found.append(tile_w)
    return found


def bank_rounds(pixel_values: int) -> int:
    """Shared-memory accesses for a load of one word per lane: 8 pixels with 4 neighbouring words each."""
    words = {pixel * pixel_values // 2 + word for pixel in range(8) for word in range(4)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


def staged_y_bytes(workload: Workload) -> int:
    """Bytes of a warpgroup's y in shared memory, in rows of 64 channels of a pixel; 0 for float32, stored from registers."""
    segments = math.ceil(Runs.of(workload).columns / SEGMENT)
    return GROUP_PIXELS * ROW_BYTES * segments if dtype_of(workload.out_dtype).nbytes == 2 else 0


def shared_layout(workload: Workload, q: Columns) -> SharedLayout:
    """Shared memory of a block: the weights, then y, patches and barriers of each warpgroup.

    Weights are rows of 64 values of a channel. They and y are swizzled: 16-byte chunk ^= row % 8.
    """
    runs = Runs.of(workload)
    patches = q["warpgroups"] * q["patches"]
    return SharedLayout.of(
        weights=-(-runs.steps // STEPS_OF_ROW) * runs.columns * ROW_BYTES,
        y=q["warpgroups"] * staged_y_bytes(workload),
        patches=patches * q["patch_bytes"],
        full=patches * BARRIER_BYTES,
    )


def derived_quantities(workload: Workload, target: Target) -> dict[str, Callable[[Columns], Any]]:
    """Name -> formula over knobs and earlier quantities. It works on arrays and on single values."""
    w, runs = workload, Runs.of(workload)
    _, out_h, out_w, _ = w.output.shape
    out_bytes = dtype_of(w.out_dtype).nbytes
    card = machine(target)
    fit = card.stem
    staged_bytes = staged_y_bytes(workload)
    y_bytes = GROUP_PIXELS * w.k * out_bytes  # of a tile
    words = 4 * 4 * runs.steps * bank_rounds(runs.pixel_values) * (2 if runs.odd else 1)  # cycles of a tile's loads
    operand_bytes = ELEMENT_BYTES * w.n * w.h * w.w * w.c + out_bytes * math.prod(w.output.shape)
    operand_bytes += out_bytes * math.prod(w.output.shape) if any(stage.name == "residual" for stage in w.epilogue) else 0
    memory_cycles = operand_bytes / (fit.memory_bytes_per_cycle * target.sms)

    def predicted_cycles(q: Columns) -> Any:
        """The busiest multiprocessor's time: a warpgroup's tiles one after the other, or what all share, or memory."""
        multiply = runs.steps * runs.columns / 2
        shared = words + runs.steps * runs.columns / 4 + (q["patch_bytes"] + 2 * staged_bytes) / card.shared_bytes_per_cycle
        store = fit.tile_cycles + y_bytes / fit.store_bytes_per_cycle
        rounds = -(-runs.steps // q["register_steps"])
        load = np.where(q["patches"] == 1, fit.load_latency_cycles, fit.load_latency_cycles / q["patches"])
        alone = np.maximum(multiply + rounds * fit.round_cycles + words / 4 + store, load) + np.where(
            q["patches"] == 1, load, 0
        )
        blocks = -(-q["tiles"] // q["warpgroups"])
        at_once = q["warpgroups"] * np.minimum(q["blocks_per_sm"], -(-blocks // target.sms))
        tile = np.maximum(np.maximum(multiply, shared), y_bytes / fit.store_bytes_per_cycle)
        weights = -(-runs.columns * 2 * runs.steps // q["threads"]) * fit.weight_cycles
        busy = q["waves"] * np.maximum(alone, at_once * tile)
        return (
            card.launch_cycles
            + fit.fill_cycles
            + fit.load_latency_cycles
            + weights
            + np.maximum(busy, memory_cycles)
            + 0.1 * busy
        )

    return {
        "columns": lambda q: runs.columns,
        "tile_h": lambda q: GROUP_PIXELS // q["tile_w"],
        "patch_w": lambda q: -(-(runs.lead + (q["tile_w"] - 1) * runs.pixel_values + runs.octets * OCTET) // OCTET) * OCTET,
        "patch_h": lambda q: (q["tile_h"] - 1) * w.stride[0] + (w.r - 1) * w.dilation[0] + 1,
        "patch_bytes": lambda q: -(-q["patch_w"] * q["patch_h"] * ELEMENT_BYTES // ROW_BYTES) * ROW_BYTES,
        "threads": lambda q: q["warpgroups"] * WARPGROUP,
        "shared_bytes": lambda q: shared_layout(workload, q).nbytes,
        "row_tiles": lambda q: -(-out_h // q["tile_h"]),
        "strips": lambda q: -(-out_w // q["tile_w"]),
        "tiles": lambda q: w.n * q["row_tiles"] * q["strips"],
        "waves": lambda q: -(-q["tiles"] // (target.sms * q["blocks_per_sm"] * q["warpgroups"])),
        "operand_registers": lambda q: 4 * np.minimum(2 * q["register_steps"], runs.steps),
        "registers": hopper.registers,
        "predicted_cycles": predicted_cycles,
    }


@dataclass(frozen=True)
class Plan:
    """A configuration of conv2d_stem with its sizes.

    Attributes:
        tile_w .. blocks_per_sm: the knobs.
        columns: output channels, rounded up to wgmma's N.
        tile_h: rows of a tile of 64 pixels.
        patch_w, patch_h: values and rows of a patch.
        patch_bytes: bytes of a patch in shared memory.
        threads, shared_bytes: threads and bytes of shared memory of a block.
        row_tiles, strips, tiles: tiles of an image down and along a row, and of all images.
        waves: tiles of the busiest warpgroup.
        operand_registers: registers of the rounds of x that are in registers at the same time.
        registers: most registers of a thread.
        predicted_cycles: the predicted time.
        shared: the layout of shared memory.
    """

    tile_w: int
    warpgroups: int
    patches: int
    register_steps: int
    blocks_per_sm: int
    columns: int
    tile_h: int
    patch_w: int
    patch_h: int
    patch_bytes: int
    threads: int
    shared_bytes: int
    row_tiles: int
    strips: int
    tiles: int
    waves: int
    operand_registers: int
    registers: int
    predicted_cycles: int
    shared: SharedLayout


def evaluate(workload: Workload, target: Target, config: Mapping[str, Any]) -> Plan:
    """The plan of one configuration."""
    q = hopper.evaluated(derived_quantities(workload, target), config)
    return Plan(**q, shared=shared_layout(workload, q))
