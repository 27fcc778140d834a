"""Knobs, rules and estimates that the templates of depthwise_conv2d on tensor cores share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schedsearch.launch import MAX_GRID_X
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.space import Columns, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import STEP_COLUMNS, STRIP_COLUMNS, STRIPS, StripBlocks
from schedsearch.templates.depthwise_conv2d.cuda_mma_text import band_words
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    Shape,
    below_twice,
    device_rules,
    direction_problem,
    size_problem,
)
from schedsearch.templates.depthwise_conv2d.estimates import ISSUED, L2_BYTES, RESERVED_BYTES, together
from schedsearch.workload import Workload

LEAST_CAPABILITY = (8, 0)  # of cp.async, and of mma.sync with bfloat16
LEAST_TAPS = 16  # fewer are multiplied by CUDA cores while memory is read
MOST_STEPS = 2  # products of a window
MOST_BAND_WORDS = 128
MOST_PRODUCTS = 384  # of a warp and tile, so that the code stays in the instruction caches
CHANNELS = (4, 8, 16, 32)
HEIGHTS = (2, 4, 7, 8, 14, 16)
ACROSS = (1, 2, 3, 4, 5, 7, 8)
DOWN = (1, 2, 3, 4, 8, 16)
TOGETHER = (1, 2, 4, 8, 16)
REGISTERS = (64, 80, 96, 128, 168, 255)
PRODUCT_CYCLES = 2  # of a multiprocessor
_LEAST = {"channels": min(CHANNELS), "height": min(HEIGHTS), "across": 1, "down": 1, "images": 1}


def blocks_of(workload: Workload[DepthwiseConv2dParams], choice: Mapping[str, Any]) -> StripBlocks:
    """The blocks of a configuration; without the knobs `each` and `tiles` these are 1."""
    numbers = {name: choice[name] for name in ("height", "across", "down")}
    further = {"each": choice.get("each", 1), "tiles": choice.get("tiles", 1)}
    return replace(_of_channels(workload, choice["channels"]), **numbers, **further, together=choice["images"])


@functools.lru_cache(256)
def _of_channels(workload: Workload[DepthwiseConv2dParams], channels: int) -> StripBlocks:
    return StripBlocks.of(workload, channels, each=1, height=min(HEIGHTS), across=1, down=1, together=1, tiles=1)


def least_blocks(workload: Workload[DepthwiseConv2dParams]) -> StripBlocks:
    """Of one strip a warp."""
    return blocks_of(workload, _LEAST)


def filter_problem(
    workload: Workload[DepthwiseConv2dParams], target: Target, shared_bytes: Callable[[StripBlocks], int], *directions: str
) -> str | None:
    """Why no blocks of strips compute the workload on the target (one sentence), or None.

    Args:
        shared_bytes: of a block.
        directions: that the template computes.
    """
    p = workload.params
    if p.dtype not in ("float16", "bfloat16"):
        return f"dtype is {p.dtype}; allowed: float16 and bfloat16, the templates on CUDA cores take others"
    if problem := direction_problem(workload, *directions) or size_problem(workload, target):
        return problem
    if target.compute_capability < LEAST_CAPABILITY:
        found = ".".join(map(str, target.compute_capability))
        return f"asynchronous copies need compute capability 8.0 or later, {target.name} has {found}"
    if p.multiplier != 1 or tuple(p.stride) != (1, 1):
        return f"multiplier is {p.multiplier} and stride is {p.stride[0]} x {p.stride[1]}; allowed: 1 and 1 x 1"
    if p.r * p.s < LEAST_TAPS:
        return f"the filter is {p.r} x {p.s}; allowed: at least {LEAST_TAPS} taps, fewer do not need tensor cores"
    least = least_blocks(workload)
    if least.steps > MOST_STEPS:
        return (
            f"8 results of a row read {least.slack + least.across_reach.extent + STRIP_COLUMNS - 1} columns, with those "
            f"that align them; allowed: up to {MOST_STEPS * STEP_COLUMNS}"
        )
    if band_words(least) > MOST_BAND_WORDS:
        return f"the filter is {p.r} x {p.s}; allowed: up to {MOST_BAND_WORDS // (2 * least.steps)} rows of this width"
    if (needed := shared_bytes(least)) > target.shared_bytes_per_block:
        return (
            f"the rows that two results read take {needed} bytes of shared memory; allowed: {target.shared_bytes_per_block}"
        )
    return None


def knobs_of_strips() -> list[Knob]:
    return [
        Knob("channels", CHANNELS, "channels of a block"),
        Knob("height", HEIGHTS, "rows of results of a strip, which is 8 columns wide"),
        Knob("across", ACROSS, "strips of a warp along the columns"),
        Knob("down", DOWN, "strips of a warp along the rows"),
        Knob("images", TOGETHER, "images of which a warp has strips"),
        Knob("registers", REGISTERS, "most registers of a thread; fewer let more blocks share a multiprocessor"),
    ]


def derived_of_strips(
    workload: Workload[DepthwiseConv2dParams],
    target: Target,
    shared_bytes: Callable[[StripBlocks], int],
    **own: Callable[[Columns], Any],
) -> dict[str, Callable[[Columns], Any]]:
    """
    Args:
        own: the template's `threads`, `used_registers` and `blocks`.
    """
    shape, least, names = Shape.of(workload), least_blocks(workload), tuple(_LEAST)

    @functools.cache
    def of_blocks(*numbers: int) -> int:
        return shared_bytes(blocks_of(workload, dict(zip(names, numbers))))

    every = np.vectorize(of_blocks, otypes=[np.int64])

    def tile_count(k: Columns) -> Any:
        across = -(-shape.columns.targets // (STRIP_COLUMNS * k["across"]))
        return across * -(-shape.rows.targets // (k["height"] * k["down"])) * -(-shape.images // k["images"])

    return {
        "strips": strips_of,
        "products": lambda k: k["height"] * least.down_reach.taps * least.steps,
        "tile_count": tile_count,
        "shared_bytes": lambda k: every(*(k[name] for name in names)),
        **own,
        "waves": lambda k: k["blocks"] * k["threads"] / (target.sms * target.threads_per_sm),
    }


def strips_of(k: Columns) -> Any:
    """Of a warp."""
    return k["across"] * k["down"] * k["images"]


def rules_of_strips(shape: Shape, target: Target) -> list[Constraint]:
    return [
        Constraint(f"a warp has at most {STRIPS} strips", lambda k: k["strips"] <= STRIPS),
        Constraint(f"at most {MOST_PRODUCTS} products of a warp", lambda k: k["products"] <= MOST_PRODUCTS),
        *device_rules(target),
        Constraint("a strip, and a tile, is less than twice as large as the images", lambda k: _below_twice(shape, k)),
        Constraint(f"at most {MAX_GRID_X} blocks", lambda k: k["blocks"] <= MAX_GRID_X),
    ]


def _below_twice(shape: Shape, k: Columns) -> Any:
    return (
        below_twice(k["height"], min(HEIGHTS), shape.rows.targets)
        & below_twice(k["down"] * k["height"], k["height"], shape.rows.targets)
        & below_twice(k["across"] * STRIP_COLUMNS, STRIP_COLUMNS, shape.columns.targets)
        & below_twice(k["images"], 1, shape.images)
        & below_twice(k["channels"], min(CHANNELS), shape.channels)
    )


def resident(target: Target, threads: int, registers: Any, shared_bytes: int = 0) -> int:
    """Blocks that share a multiprocessor if a thread has the registers of the knob."""
    fitting = min(target.registers_per_sm // (threads * registers), target.threads_per_sm // threads, 32)
    return int(max(1, min(fitting, target.shared_bytes_per_sm // (shared_bytes + RESERVED_BYTES))))


# ---- defaults


def choices_of(
    workload: Workload[DepthwiseConv2dParams], used: Callable[[Columns], Any], **further: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Configurations from which a default is chosen: those whose warps have about as many strips as they may have.

    Args:
        used: registers of a thread.
        further: values of the template's own knobs.
    """
    shape, found = Shape.of(workload), list[dict[str, Any]]()
    names = (*_LEAST, *further)
    for numbers in itertools.product(CHANNELS, (4, 7, 8), ACROSS, DOWN, TOGETHER, *further.values()):
        choice: dict[str, Any] = dict(zip(names, numbers))
        if strips_of(choice) <= STRIPS and _below_twice(shape, choice):
            found.append(choice)
    most = max(map(strips_of, found), default=0)
    for choice in found:
        if 4 * strips_of(choice) >= 3 * most:
            yield {**choice, "registers": next((n for n in REGISTERS if 3 * int(used(choice)) <= 2 * n), max(REGISTERS))}


def least_choices(**further: int) -> Iterator[dict[str, Any]]:
    """One strip a warp, with any registers."""
    return ({**_LEAST, **further, "registers": registers} for registers in (128, 255, 64))


def tile_cycles(blocks: StripBlocks, loads: int, copied: float, bytes_moved: float, finishing: float = 0.0) -> float:
    """Cycles of a multiprocessor for a tile of a block, if all of it hides behind something else.

    Args:
        loads: of a warp by ldmatrix.
        copied: elements of a channel that are staged or copied back.
        bytes_moved: of a channel, between L2 and the multiprocessor.
        finishing: further instructions of a warp.
    """
    products = blocks.height * blocks.down_reach.taps * blocks.steps
    accesses = copied / 32 / blocks.of_copy  # of a warp
    sectors = max(16 // blocks.block_channels, 1) if blocks.channels_last else 1  # half of one is read twice
    per_access = 20 + (2.5 * blocks.of_copy if blocks.channels_last else 0)
    return blocks.block_channels * together(
        products * PRODUCT_CYCLES,
        4 * loads + 2 * copied / 32,
        (products + loads + finishing + per_access * accesses) / ISSUED,
        sectors * bytes_moved / L2_BYTES,
    )
