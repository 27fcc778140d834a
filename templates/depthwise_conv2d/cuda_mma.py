"""depthwise_conv2d on the tensor cores of NVIDIA GPUs, y and dx of large filters: see docs/kernels/depthwise.md."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Grid, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d.cuda_mma_kernel import build_kernel, patch_of
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import STEP_COLUMNS, STRIP_COLUMNS, STRIPS, StripBlocks
from schedsearch.templates.depthwise_conv2d.cuda_mma_text import band_words, pixel_words
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    OTHER_REGISTERS,
    Shape,
    below_twice,
    device_rules,
    direction_problem,
    first_roomy,
    size_problem,
)
from schedsearch.templates.depthwise_conv2d.estimates import (
    BLOCK_CYCLES,
    DRAM_BYTES,
    ISSUED,
    L2_BYTES,
    LATENCY,
    RESERVED_BYTES,
    together,
)
from schedsearch.templates.depthwise_conv2d.held import held_operands
from schedsearch.templates.depthwise_conv2d.patches import arrays_of
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.templates.parts.warm import channel_operands
from schedsearch.workload import Workload

LEAST_CAPABILITY = (8, 0)  # of cp.async, and of mma.sync with bfloat16
LEAST_TAPS = 16  # fewer are multiplied by CUDA cores while memory is read
MOST_STEPS = 2  # products of a window
MOST_BAND_WORDS = 128
MOST_PRODUCTS = 384  # of a warp and tile, so that the code stays in the instruction caches
CHANNELS = (4, 8, 16, 32)
EACH = (1, 2)
HEIGHTS = (2, 4, 7, 8, 14, 16)
ACROSS = (1, 2, 3, 4, 5, 7, 8)
DOWN = (1, 2, 3, 4, 8, 16)
TOGETHER = (1, 2, 4, 8, 16)
TILES = (1, 2, 4, 8)
REGISTERS = (64, 80, 96, 128, 168, 255)
PRODUCT_CYCLES = 2  # of a multiprocessor


class DepthwiseConv2dMma(Template[DepthwiseConv2dParams]):
    """y and dx in 16 bits: rows of the filter as band matrices, multiplied by windows of 16 columns on tensor cores."""

    name = "depthwise_conv2d_mma"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.dtype not in ("float16", "bfloat16"):
            return f"dtype is {p.dtype}; allowed: float16 and bfloat16, depthwise_conv2d_cuda takes all"
        if problem := direction_problem(workload, "forward", "grad_input") or size_problem(workload, target):
            return problem
        if target.compute_capability < LEAST_CAPABILITY:
            found = ".".join(map(str, target.compute_capability))
            return f"asynchronous copies need compute capability 8.0 or later, {target.name} has {found}"
        if p.multiplier != 1 or tuple(p.stride) != (1, 1):
            return f"multiplier is {p.multiplier} and stride is {p.stride[0]} x {p.stride[1]}; allowed: 1 and 1 x 1"
        if p.r * p.s < LEAST_TAPS:
            return f"the filter is {p.r} x {p.s}; allowed: at least {LEAST_TAPS} taps, fewer do not need tensor cores"
        least = _blocks(workload, _LEAST)
        if least.steps > MOST_STEPS:
            return (
                f"8 results of a row read {least.slack + least.across_reach.extent + STRIP_COLUMNS - 1} columns, with those "
                f"that align them; allowed: up to {MOST_STEPS * STEP_COLUMNS}"
            )
        if band_words(least) > MOST_BAND_WORDS:
            return f"the filter is {p.r} x {p.s}; allowed: up to {MOST_BAND_WORDS // (2 * least.steps)} rows of this width"
        if least.shared_bytes > target.shared_bytes_per_block:
            return (
                f"the rows that two results read take {least.shared_bytes} bytes of shared memory; allowed: "
                f"{target.shared_bytes_per_block}"
            )
        return epilogue_problem(workload)

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape, least = Shape.of(workload), _blocks(workload, _LEAST)

        @functools.cache
        def shared_bytes(*numbers: int) -> int:
            return _blocks(workload, {**_LEAST, **dict(zip(_OF_SHARED, numbers))}).shared_bytes

        every = np.vectorize(shared_bytes, otypes=[np.int64])

        def tile_count(k: Columns) -> Any:
            across = -(-shape.columns.targets // (STRIP_COLUMNS * k["across"]))
            return across * -(-shape.rows.targets // (k["height"] * k["down"])) * -(-shape.images // k["images"])

        derived = {
            "threads": lambda k: 32 * k["channels"] // k["each"],
            "strips": _strips,
            "products": lambda k: k["height"] * least.down_reach.taps * least.steps,
            "used_registers": lambda k: _used_registers(least, k),
            "tile_count": tile_count,
            "shared_bytes": lambda k: every(*(k[name] for name in _OF_SHARED)),
            "blocks": lambda k: -(-shape.channels // k["channels"]) * -(-k["tile_count"] // k["tiles"]),
            "waves": lambda k: k["blocks"] * k["threads"] / (target.sms * target.threads_per_sm),
        }
        knobs = [
            Knob("channels", CHANNELS, "channels of a block"),
            Knob("each", EACH, "channels of a warp, one after the other"),
            Knob("height", HEIGHTS, "rows of results of a strip, which is 8 columns wide"),
            Knob("across", ACROSS, "strips of a warp along the columns"),
            Knob("down", DOWN, "strips of a warp along the rows"),
            Knob("images", TOGETHER, "images of which a warp has strips"),
            Knob("tiles", TILES, "tiles of a block, one after the other; it has the filters in registers meanwhile"),
            Knob("registers", REGISTERS, "most registers of a thread; fewer let more blocks share a multiprocessor"),
        ]
        rules = [
            Constraint(f"a warp has at most {STRIPS} strips", lambda k: k["strips"] <= STRIPS),
            Constraint(f"at most {MOST_PRODUCTS} products of a warp", lambda k: k["products"] <= MOST_PRODUCTS),
            *device_rules(target),
            Constraint(
                "a strip, and a tile, is less than twice as large as the images",
                lambda k: _below_twice(shape, k),
            ),
            Constraint(
                "a block has fewer tiles than there are twice",
                lambda k: (k["tiles"] == 1) | (k["tiles"] < 2 * k["tile_count"]),
            ),
            Constraint(f"at most {MAX_GRID_X} blocks", lambda k: k["blocks"] <= MAX_GRID_X),
        ]
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the least estimated time. No card has measured the estimate."""
        choices = sorted(_choices(workload), key=lambda choice: _cycles(workload, target, choice))
        return first_roomy(space, target, iter([*choices, *_least_choices()]))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One strip of two rows for each warp."""
        return first_roomy(space, target, _least_choices())

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        p, blocks = workload.params, _blocks(workload, config)
        epilogue = Epilogue(workload, capability=target.compute_capability) if p.direction == "forward" else None
        source, to, weight = arrays_of(workload)
        before = f"{to}_before"
        held = channel_operands(workload) if held_operands(patch_of(workload, blocks), epilogue) else ()
        step = KernelStep(
            build_kernel(workload, blocks, epilogue),
            (
                Pointer(source), Pointer(weight), Pointer(before, optional=not p.accumulate), Pointer(to),
                *(epilogue.params if epilogue else ()),
            ),
            Grid(blocks.count),
            blocks.threads,
            blocks.shared_bytes,
            min_blocks_per_sm=_resident(target, blocks.threads, config["registers"]),
            ahead=(weight, *held),
        )  # fmt: skip
        element = dtype_of(p.dtype).nbytes
        moved = blocks.of_copy * element
        alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature} | {source: moved}
        if blocks.channels_last:
            alignments[to] = moved
        else:
            alignments[to] = patch_of(workload, blocks).alignments[1]
            alignments |= {before: alignments[to]} if p.accumulate else {}
        return KernelSource("cuda", "native", (step,), alignments=alignments)


_NUMBERS = ("channels", "each", "height", "across", "down", "images", "tiles")
_LEAST = {"channels": min(CHANNELS), "each": 1, "height": min(HEIGHTS), "across": 1, "down": 1, "images": 1, "tiles": 1}


_OF_SHARED = ("channels", "height", "across", "down", "images")  # what the bytes of shared memory depend on


@functools.lru_cache(256)
def _channels(workload: Workload[DepthwiseConv2dParams], channels: int) -> StripBlocks:
    return StripBlocks.of(workload, *({**_LEAST, "channels": channels}[name] for name in _NUMBERS))


def _blocks(workload: Workload[DepthwiseConv2dParams], choice: Mapping[str, Any]) -> StripBlocks:
    numbers = {name: choice[name] for name in ("each", "height", "across", "down", "tiles")}
    return replace(_channels(workload, choice["channels"]), **numbers, together=choice["images"])


def _below_twice(shape: Shape, k: Columns) -> Any:
    """Whether a strip, and a tile, is less than twice as large as the images."""
    return (
        below_twice(k["height"], min(HEIGHTS), shape.rows.targets)
        & below_twice(k["down"] * k["height"], k["height"], shape.rows.targets)
        & below_twice(k["across"] * STRIP_COLUMNS, STRIP_COLUMNS, shape.columns.targets)
        & below_twice(k["images"], 1, shape.images)
        & below_twice(k["channels"], min(CHANNELS), shape.channels)
    )


def _used_registers(blocks: StripBlocks, k: Columns) -> Any:
    """Of a thread, about: its sums, its bands, two rows of windows, or pixels that it stages."""
    windows = 8 * blocks.steps
    staged = 2 * pixel_words(blocks) if blocks.channels_last else 0
    return 4 * k["height"] + k["each"] * band_words(blocks) + max(windows, staged) + OTHER_REGISTERS


def _resident(target: Target, threads: int, registers: Any) -> int:
    """Blocks that share a multiprocessor if a thread has the registers of the knob."""
    return int(max(1, min(target.registers_per_sm // (threads * registers), target.threads_per_sm // threads, 32)))


# ---- defaults


def _choices(workload: Workload[DepthwiseConv2dParams]) -> Iterator[dict[str, Any]]:
    """Configurations from which a default is chosen: those whose warps have about as many strips as they may have."""
    least, shape = _blocks(workload, _LEAST), Shape.of(workload)
    names = ("channels", "each", "height", "across", "down", "images", "tiles")
    found = list[dict[str, Any]]()
    for numbers in itertools.product(CHANNELS, EACH, (4, 7, 8), ACROSS, DOWN, TOGETHER, (1, 4)):
        choice: dict[str, Any] = dict(zip(names, numbers))
        if _strips(choice) <= STRIPS and _below_twice(shape, choice):
            found.append(choice)
    most = max(map(_strips, found), default=0)
    for choice in found:
        if 4 * _strips(choice) >= 3 * most:
            yield {**choice, "registers": _enough(least, choice)}


def _strips(k: Columns) -> Any:
    return k["across"] * k["down"] * k["images"]


def _least_choices() -> Iterator[dict[str, Any]]:
    """One strip a warp, with any registers."""
    return ({**_LEAST, "registers": registers} for registers in (128, 255, 64))


def _enough(blocks: StripBlocks, choice: Columns) -> int:
    """The least value of the knob of which a third stays free; see `first_roomy`."""
    used = int(_used_registers(blocks, choice))
    return next((n for n in REGISTERS if 3 * used <= 2 * n), max(REGISTERS))


def _cycles(workload: Workload[DepthwiseConv2dParams], target: Target, choice: Mapping[str, Any]) -> float:
    """Estimated cycles of a multiprocessor: its blocks' products, instructions and bytes hide one another."""
    blocks = _blocks(workload, choice)
    resident = min(
        _resident(target, blocks.threads, choice["registers"]),
        max(target.shared_bytes_per_sm // (blocks.shared_bytes + RESERVED_BYTES), 1),
    )
    source_rows = blocks.height + blocks.down_reach.extent - 1
    products = blocks.height * blocks.down_reach.taps * blocks.steps
    loads = source_rows * blocks.steps
    staged = blocks.together * blocks.staged_rows * blocks.staged_columns
    results = blocks.strips * blocks.height * STRIP_COLUMNS
    moved = (staged + results) / 32 / blocks.of_copy  # accesses of a warp for each channel
    sectors = max(32 // (2 * blocks.block_channels), 1) if blocks.channels_last else 1  # half of one is read twice
    per_access = 20 + (2.5 * blocks.of_copy if blocks.channels_last else 0)
    instructions = products + loads + 8 * blocks.height + per_access * moved
    tile = blocks.block_channels * together(
        products * PRODUCT_CYCLES,
        4 * loads + 2 * blocks.of_copy * moved,
        instructions / ISSUED,
        2 * max(sectors * staged / L2_BYTES, 2 * results / DRAM_BYTES),
    )
    once = (2 * LATENCY + blocks.each * (4 * loads + products * 8)) / resident  # of a tile, while other blocks work
    waves = max(1.0, blocks.count / (target.sms * resident))
    whole = -(-waves // 1) if waves < 4 else waves + 0.5
    start = (BLOCK_CYCLES + 2 * LATENCY) / resident + 2 * blocks.block_channels * band_words(blocks)
    return whole * resident * (blocks.tiles * max(tile, once) + start)
