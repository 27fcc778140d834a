"""Sizes of conv2d_stem: those of the workload, those of a configuration, and the predicted time.

`stem.py` has the kernel and explains the words run, octet and patch. A value is an element of x or of the weights, of 2
bytes or of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns
from schedsearch.target import Target
from schedsearch.templates.conv2d.geometry import stores_rows
from schedsearch.templates.parts import hopper
from schedsearch.templates.parts.choosing import evaluated
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.machine import machine
from schedsearch.templates.parts.shared import SharedLayout
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.templates.parts.store import interleaved
from schedsearch.templates.parts.store_rows import row_bytes
from schedsearch.workload import Workload

GROUP_PIXELS = hopper.WGMMA_M  # of a warpgroup's tile
OCTET_BYTES = 16  # half of a wgmma's k: 8 values of 16 bits, or 16 of 8 bits
WORD_BYTES = 4  # of a register of wgmma's first operand
ROW_BYTES = 128  # of a swizzled row of an output channel's weights
STEPS_OF_ROW = 4  # wgmma steps in such a row
MAX_BOX = 256  # of TMA, along each axis
BOX_UNIT_BYTES = 128  # of the places in shared memory to which TMA copies boxes
TILE_WS = (8, 16, 32, 64)


def flattened(workload: Workload[Conv2dParams]) -> Workload[Conv2dParams]:
    """The same convolution with all pixels in one row of one image, if each output pixel has one input pixel.

    Tiles then have 64 neighbouring pixels, whatever the images' sizes are, and no row of x has to be a multiple of 16 bytes.
    Only layers whose channels fill no 16 bytes need that.
    """
    p = workload.params
    pointwise = (p.r, p.s, *p.stride) == (1, 1, 1, 1) and not any(p.padding)
    fits_in_one_box = TILE_WS[0] * p.c <= MAX_BOX and not stores_rows(workload)
    if not wide(workload) or not pointwise or fits_in_one_box or p.h == p.n == 1:
        return workload
    return workload.replace(n=1, h=1, w=p.n * p.h * p.w)


def wide(workload: Workload[Conv2dParams]) -> bool:
    """Whether a patch may be wider than one box of TMA: channels of x or y fill no 16 bytes, so that other kernels copy or
    load them in small pieces."""
    p = workload.params
    pointwise = (p.r, p.s) == (1, 1) and stores_rows(workload)
    return dtype_of(p.dtype).nbytes == 2 and (p.c % 8 != 0 or pointwise)


def patch_boxes(values: Any, element_bytes: int) -> Any:
    """(boxes, values of a box) for a row of `values` values of a patch: one box, or several of multiples of 128 bytes."""
    unit = BOX_UNIT_BYTES // element_bytes
    boxes = -(-values // MAX_BOX)
    return boxes, np.where(boxes == 1, values, -(-values // (boxes * unit)) * unit)


@dataclass(frozen=True)
class Runs:
    """The reduction of a workload.

    Attributes:
        element_bytes: of a value of x or of the weights.
        values: values of a run, `skipped` + S * C.
        skipped: values in front that have no weight, so that runs start at words of x.
        lead: values of a patch in front of its first run: TMA's first coordinate must be a multiple of 16 bytes.
        octets: octets of a run.
        steps: wgmma steps of 32 bytes along all runs.
        pixel_values: values from a pixel's run to the next pixel's.
        shifted: whether runs may start in the middle of a word, so that operands are not words of the patch.
        columns: wgmma's N: output channels, and up to 8 of filler.
    """

    element_bytes: int
    values: int
    skipped: int
    lead: int
    octets: int
    steps: int
    pixel_values: int
    shifted: bool
    columns: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Runs:
        w = workload.params
        size = dtype_of(w.dtype).nbytes
        word, octet = WORD_BYTES // size, OCTET_BYTES // size
        pixel_values, left = w.stride[1] * w.c, w.padding[1] * w.c
        shifted = pixel_values % word != 0
        skipped = 0 if shifted else -left % word
        values = skipped + w.s * w.c
        octets = math.ceil(values / octet)
        return cls(
            size, values, skipped, -(left + skipped) % octet, octets, math.ceil(w.r * octets / 2), pixel_values, shifted,
            math.ceil(w.k / 16) * 16,
        )  # fmt: skip

    @property
    def word_values(self) -> int:
        """Values of a word of wgmma's first operand."""
        return WORD_BYTES // self.element_bytes

    @property
    def octet_values(self) -> int:
        """Values of an octet."""
        return OCTET_BYTES // self.element_bytes

    @property
    def pixel_bytes(self) -> int:
        """Bytes from a pixel's run to the next pixel's."""
        return self.pixel_values * self.element_bytes


@dataclass(frozen=True)
class Staging:
    """A warpgroup's y in shared memory: segments of output channels, each in rows of one pixel; none of 32-bit numbers.

    Attributes:
        channels: output channels of a segment, whose rows have up to 128 bytes. They are swizzled over their width.
        row_bytes: bytes of a row.
        segments: segments that cover all columns; 0 if y is not stored by TMA.
        sums_bytes: bytes of a warpgroup's sums, if they are stored as `store_rows` says; else 0.
    """

    channels: int
    row_bytes: int
    segments: int
    sums_bytes: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Staging:
        size, columns = dtype_of(workload.params.out_dtype).nbytes, Runs.of(workload).columns
        channels = 64
        if interleaved(workload.params.out_dtype):
            channels = min(size for size in (32, 64, ROW_BYTES) if size >= min(columns, ROW_BYTES))
        if stores_rows(workload):
            return cls(channels, channels * size, 0, GROUP_PIXELS * row_bytes(columns))
        return cls(channels, channels * size, math.ceil(columns / channels) if size < 4 else 0, 0)

    @property
    def segment_bytes(self) -> int:
        return GROUP_PIXELS * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.segments * self.segment_bytes + self.sums_bytes


def row_values(workload: Workload[Conv2dParams]) -> int:
    """Values from a row of x to the next one, as TMA reads them: a multiple of 16 bytes."""
    p, octet = workload.params, Runs.of(workload).octet_values
    return -(-p.w * p.c // octet) * octet


def usable_tiles(workload: Workload[Conv2dParams], target: Target) -> list[int]:
    """The values of `tile_w` whose patches start at multiples of 16 bytes, and fit in shared memory with one warpgroup.

    Their rows fit in one TMA box, unless the workload is `wide` and needs more.
    """
    in_one_box, found = [], []
    widest = min(TILE_WS[-1], CONV2D.output_hw(workload.params)[1])
    for tile_w in TILE_WS:
        if tile_w * Runs.of(workload).pixel_bytes % ALIGNMENT_BYTES:
            continue
        least = {"tile_w": tile_w, "warpgroups": 1, "patches": 1, "register_steps": 1, "blocks_per_sm": 1}
        q = evaluate(workload, target, least)
        if q.patch_h > MAX_BOX or q.shared_bytes > target.shared_bytes_per_block:
            continue
        if q.boxes == 1:
            in_one_box.append(tile_w)
        if workload.params.h > 1 or tile_w >= widest:  # of one row, the other rows of a tile would be empty
            found.append(tile_w)
    return found if wide(workload) and (stores_rows(workload) or not in_one_box) else in_one_box


def bank_rounds(pixel_bytes: int) -> int:
    """Shared-memory accesses for a load of one word per lane: 8 pixels with 4 neighbouring words each."""
    words = {pixel * pixel_bytes // WORD_BYTES + word for pixel in range(8) for word in range(4)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


def shared_layout(workload: Workload[Conv2dParams], q: Columns) -> SharedLayout:
    """Shared memory of a block: the weights, then y, patches and barriers of each warpgroup.

    Weights are rows of 128 bytes of a channel. They and y are swizzled: 16-byte chunk ^= number of the 128-byte line.
    """
    runs = Runs.of(workload)
    patches = q["warpgroups"] * q["patches"]
    return SharedLayout.of(
        weights=-(-runs.steps // STEPS_OF_ROW) * runs.columns * ROW_BYTES,
        y=q["warpgroups"] * Staging.of(workload).nbytes,
        patches=patches * q["patch_bytes"],
        full=patches * BARRIER_BYTES,
    )


def derived_quantities(workload: Workload[Conv2dParams], target: Target) -> dict[str, Callable[[Columns], Any]]:
    """Name -> formula over knobs and earlier quantities. It works on arrays and on single values."""
    w, runs = workload.params, Runs.of(workload)
    octet = runs.octet_values
    _, out_h, out_w, _ = workload.output.shape
    out_bytes = dtype_of(w.out_dtype).nbytes
    card = machine(target)
    fit = card.stem
    staged_bytes = Staging.of(workload).nbytes
    y_bytes = GROUP_PIXELS * w.k * out_bytes  # of a tile
    words = 4 * 4 * runs.steps * bank_rounds(runs.pixel_bytes) * (2 if runs.shifted else 1)  # cycles of a tile's loads
    requantise = GROUP_PIXELS * w.k / card.requantised_per_cycle if out_bytes == 1 else 0  # cycles of a tile
    like_y = [
        dtype_of(operand.dtype).nbytes for operand in epilogue_operands(workload) if operand.present and operand.axes == "y"
    ]
    operand_bytes = runs.element_bytes * w.n * w.h * w.w * w.c + (out_bytes + sum(like_y)) * math.prod(workload.output.shape)
    memory_cycles = operand_bytes / (fit.memory_bytes_per_cycle * target.sms)

    def patch_values(q: Columns) -> Any:
        """Values of a row of a patch that a tile needs, in whole octets."""
        return -(-(runs.lead + (q["tile_w"] - 1) * runs.pixel_values + runs.octets * octet) // octet) * octet

    def predicted_cycles(q: Columns) -> Any:
        """The busiest multiprocessor's time: a warpgroup's tiles one after the other, or what all share, or memory."""
        multiply = runs.steps * runs.columns / 2
        shared = words + runs.steps * runs.columns / 4 + (q["patch_bytes"] + 2 * staged_bytes) / card.shared_bytes_per_cycle
        store = fit.tile_cycles + y_bytes / fit.store_bytes_per_cycle + requantise
        rounds = -(-runs.steps // q["register_steps"])
        load = np.where(q["patches"] == 1, fit.load_latency_cycles, fit.load_latency_cycles / q["patches"])
        alone = np.maximum(multiply + rounds * fit.round_cycles + words / 4 + store, load) + np.where(
            q["patches"] == 1, load, 0
        )
        blocks = -(-q["tiles"] // q["warpgroups"])
        at_once = q["warpgroups"] * np.minimum(q["blocks_per_sm"], -(-blocks // target.sms))
        tile = np.maximum(np.maximum(multiply, shared), max(y_bytes / fit.store_bytes_per_cycle, requantise))
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
        "boxes": lambda q: patch_boxes(patch_values(q), runs.element_bytes)[0],
        "patch_w": lambda q: q["boxes"] * patch_boxes(patch_values(q), runs.element_bytes)[1],
        "patch_h": lambda q: (q["tile_h"] - 1) * w.stride[0] + (w.r - 1) * w.dilation[0] + 1,
        "patch_bytes": lambda q: -(-q["patch_w"] * q["patch_h"] * runs.element_bytes // ROW_BYTES) * ROW_BYTES,
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
        boxes: boxes of TMA in a row of a patch; a box has all rows if it is the only one, else one row.
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
    boxes: int
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


def evaluate(workload: Workload[Conv2dParams], target: Target, config: Mapping[str, Any]) -> Plan:
    """The plan of one configuration."""
    q = evaluated(derived_quantities(workload, target), config)
    return Plan(**q, shared=shared_layout(workload, q))
