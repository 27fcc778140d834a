"""Estimated times of configurations of depthwise_conv2d_cuda and depthwise_conv2d_dw_cuda, from which defaults are chosen.

A multiprocessor works on the blocks that fit it at once. What they need for a patch of each thread is bounded by
instructions, by accesses to L1, by bytes, and by the time that one patch takes from its first load on, which only further
warps hide. The constants are those of an H200, fitted to the times of several hundred configurations
(docs/kernels/depthwise.md). Only their proportions matter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.target import Target
from schedsearch.templates.depthwise_conv2d.cuda_space import Shape, lines_of_load, loads_of_row
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES

CYCLES_A_US = 1700
LATENCY = 560  # cycles that a row of loads adds, as few are in flight
ISSUED = 2.7  # instructions that a multiprocessor issues in a cycle, if its warps wait now and then
ALONE = 1.8  # cycles of an instruction of one warp, without its loads
DRAM_BYTES, L2_BYTES = 19, 20  # of a multiprocessor in a cycle
COPY_INSTRUCTIONS = 27  # of a thread for each copy to shared memory
CONVERSIONS = {1: 2, 2: 1, 4: 0}  # instructions that make a float32 of an element of so many bytes
REGISTERS_LOADED, REGISTERS_STAGED = 0.84, 0.74  # of a thread, over those of `Shape.used_registers`
NORM = 1.6  # of bounds: each hides a part of the others
LAUNCH_US, SECOND_KERNEL_US = 1.4, 2.2
WORKSPACE_BYTES_A_US = 0.53e6  # the second kernel reads what the first one wrote
STAGED_CYCLES = 1300  # that threads wait for one another, for each tile
START_CYCLES = 110  # after which a multiprocessor begins with the next block
BLOCK_CYCLES = 580  # until a block's first load, and after its last store
RESERVED_BYTES = 1024  # of shared memory, for each block


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a configuration.

    Attributes:
        k: its knobs that are numbers.
        threads: of a block.
        resident: blocks that share a multiprocessor.
        waves: how often a multiprocessor has as many.
    """

    shape: Shape
    k: dict[str, Any]
    threads: int
    resident: int
    waves: float

    @classmethod
    def of(
        cls, shape: Shape, target: Target, config: Mapping[str, int | str | bool], count: int, shared_bytes: int
    ) -> _Blocks:
        k: dict[str, Any] = {name: value for name, value in config.items() if isinstance(value, int)}
        threads = k["channels"] * k["columns"] * k["rows"]
        used = int(shape.used_registers(k)) * (REGISTERS_STAGED if k.get("buffers") else REGISTERS_LOADED)
        fitting = min(
            target.registers_per_sm // int(threads * min(k["registers"], used)),
            target.threads_per_sm // threads,
            target.shared_bytes_per_sm // (shared_bytes + RESERVED_BYTES),
            32,
        )
        resident = min(max(fitting, 1), -(-count // target.sms))
        rounds = count / (target.sms * resident)
        # Blocks of a long grid begin whenever one ends; its last ones leave multiprocessors idle.
        return cls(shape, k, threads, resident, float(-(-rounds // 1)) if rounds < 4 else rounds + 0.5)

    @property
    def warps(self) -> int:
        """Of all blocks on a multiprocessor."""
        return self.resident * -(-self.threads // 32)

    @property
    def pixels(self) -> int:
        """Of a patch."""
        return int(self.k["tile_h"] * self.k["tile_w"])

    @property
    def target_bytes(self) -> int:
        """Of the patches of a block."""
        return int(self.pixels * self.threads * self.k["vector"] * self.shape.nbytes)

    @property
    def source_bytes(self) -> float:
        """Of the sources that they meet, each once."""
        rows, columns = self.shape.rows, self.shape.columns
        return self.target_bytes * rows.up * columns.up / (rows.down * columns.down)

    def patch_cycles(self, further: float, further_loads: float, writes: int = 1) -> tuple[float, float]:
        """Of a multiprocessor, for a patch of each thread, and before the first one.

        Args:
            further: instructions besides products, loads of the window and conversions of what they load.
            further_loads: accesses to L1 besides those of the window.
            writes: how often a sector of 32 bytes of the targets is accessed.
        """
        shape, k = self.shape, self.k
        window_h = int(shape.window(shape.rows, k["tile_h"], shape.tap_h))
        numbers = window_h * int(shape.window(shape.columns, k["tile_w"], shape.tap_w)) * k["vector"]
        loads = window_h * loads_of_row(shape, k["tile_w"])
        products = float(shape.products(k))
        instructions = products + 3 * loads + CONVERSIONS[shape.nbytes] * numbers + further
        lines = lines_of_load(shape, k["vector"], k["tile_h"], k["tile_w"], k["columns"], k["rows"])
        once = LATENCY * window_h**0.5 + ALONE * instructions  # a few rows are loaded ahead
        moved = (self.source_bytes + self.target_bytes * writes) / DRAM_BYTES
        first = 0.0
        if buffers := k.get("buffers", 0):
            height = int(shape.rows.reach(k["rows"] * k["tile_h"], shape.tap_h))
            width = int(shape.columns.reach(k["columns"] * k["tile_w"], shape.tap_w))
            tile = height * width * k["channels"] * k["vector"] * shape.nbytes
            of_pixel = shape.channels * shape.nbytes
            copies = tile / min(VECTOR_BYTES, of_pixel & -of_pixel) / self.threads
            instructions += COPY_INSTRUCTIONS * copies - 2 * loads
            pixel = k["channels"] * k["vector"] * shape.nbytes
            across, down = (
                tile * axis.up // axis.down * pixel
                for tile, axis in ((k["tile_w"], shape.columns), (k["tile_h"], shape.rows))
            )
            lines = _bank_cycles(k["channels"], k["columns"], k["vector"] * shape.nbytes, across, down * width)
            copying, computing = LATENCY + STAGED_CYCLES + 4 * copies, ALONE * instructions
            once = copying + computing
            if buffers > 1:
                first, once = copying, max(copying / (buffers - 1), computing)
            moved = max(moved, tile / L2_BYTES)
        cycles = together(
            self.warps * instructions / ISSUED, self.warps * (loads + further_loads) * lines, self.resident * moved, once
        )
        return cycles, first


@functools.cache
def _bank_cycles(lanes: int, across: int, nbytes: int, across_bytes: int, down_bytes: int) -> int:
    """Cycles of a warp's load of a tile in shared memory, `nbytes` for each thread: words of the same bank take turns.

    Args:
        lanes, across: threads of a block along the channels and columns.
        across_bytes, down_bytes: from what a thread reads to what the next one across, or down, does.
    """
    words = set[int]()
    for thread in range(32):
        pixel, lane = divmod(thread, lanes)
        at = pixel % across * across_bytes + pixel // across * down_bytes + lane * nbytes
        words.update(range(at // 4, (at + nbytes - 1) // 4 + 1))
    return bank_turns(words)


def bank_turns(words: set[int]) -> int:
    """Cycles of an access of a warp to these words of shared memory: words of the same bank take turns."""
    banks = [word % 32 for word in words]
    return max(map(banks.count, set(banks)))


def together(*bounds: float) -> float:
    """What takes about as long as the longest of several that run at once."""
    return float(sum(bound**NORM for bound in bounds) ** (1 / NORM))


def pixels_us(shape: Shape, target: Target, config: Mapping[str, int | str | bool], shared_bytes: int) -> float:
    """Microseconds of y or dx by blocks with so much shared memory, roughly."""
    direct = config["filters"] == "direct"
    k = {name: value for name, value in config.items() if isinstance(value, int)}
    across = -(-shape.columns.targets // (k["columns"] * k["tile_w"]))
    down = -(-shape.rows.targets // (k["rows"] * k["tile_h"] * k["strip"]))
    count = -(-shape.channels // (k["channels"] * k["vector"])) * across * down * shape.images
    blocks = _Blocks.of(shape, target, config, count, shared_bytes)
    stores = blocks.pixels
    if not shape.channels_last:
        aligned = next(n for n in (8, 4, 2, 1) if n * shape.nbytes <= VECTOR_BYTES and shape.columns.targets % n == 0)
        stores = k["tile_h"] * -(-k["tile_w"] // aligned)
    rounded = blocks.pixels * k["vector"] / 2 if shape.nbytes < 4 else 0
    in_parts = not shape.channels_last and k["tile_w"] * shape.nbytes > VECTOR_BYTES  # by two stores of a thread
    patch, before = blocks.patch_cycles(3 * stores + rounded + 60, stores, 2 if in_parts else 1)
    # The filters: each thread's own, or the block's, which it waits for, and then the thread's from shared memory.
    own = shape.taps * k["vector"]
    words = own * (1 + CONVERSIONS[shape.nbytes])
    begin = float(BLOCK_CYCLES + LATENCY + 2 * (words if direct else own))
    instructions = 2.0 * words
    if not direct:
        copied = shape.filters * shape.rounds * own * k["channels"] / blocks.threads
        begin += LATENCY * max(1.0, copied / 8) + 20 * copied
        instructions = own + 30 * copied
    first = before + together(begin, blocks.warps * instructions / ISSUED)
    cycles = blocks.waves * (k["strip"] * shape.filters * shape.rounds * patch + first)
    return LAUNCH_US + (cycles + START_CYCLES * count / target.sms) / CYCLES_A_US


def filters_us(shape: Shape, target: Target, config: Mapping[str, int | str | bool], shared_bytes: int) -> float:
    """Microseconds of dw by blocks with so much shared memory, roughly."""
    k = {name: value for name, value in config.items() if isinstance(value, int)}
    across = -(-shape.columns.targets // (k["columns"] * k["tile_w"]))
    units = across * -(-shape.rows.targets // (k["rows"] * k["tile_h"])) * shape.images
    count = -(-shape.channels // (k["channels"] * k["vector"])) * k["splits"] * shape.rounds
    blocks = _Blocks.of(shape, target, config, count, shared_bytes)
    own_targets = blocks.pixels if shape.channels_last else k["tile_h"]
    converted = blocks.pixels * k["vector"] * CONVERSIONS[shape.nbytes]
    patch, before = blocks.patch_cycles(3 * own_targets + converted + 40, own_targets)
    sums = shape.taps * k["vector"] * k["channels"]
    own = -(-sums // blocks.threads) * (8 * k["columns"] * k["rows"] + 100)
    other = before + 2 * shape.taps * k["vector"] + own * max(1.0, blocks.warps / 16) + BLOCK_CYCLES
    us = LAUNCH_US + blocks.waves * (-(-units // k["splits"]) * patch + other) / CYCLES_A_US
    if k["splits"] > 1:
        workspace = 8 * k["splits"] * shape.taps * shape.rounds * shape.channels
        us += SECOND_KERNEL_US + workspace / WORKSPACE_BYTES_A_US
    return us
