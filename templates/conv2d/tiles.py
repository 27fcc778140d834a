"""Knobs and rules of kernels whose blocks walk tiles of pixels x channels: conv2d_mma and conv2d_simt.

The spaces have the knobs `bm`, `bn`, `stages`, `panel` and `blocks_per_sm`, and the derived quantities `threads`,
`registers`, `shared_bytes`, `tiles_m`, `tiles_n`, `tiles` and `steps`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.launch import MAX_BLOCK_THREADS
from schedsearch.space import Columns, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.parts.hopper import BLOCK_RESERVED_BYTES

PANEL = Knob("panel", (1, 8, 64), "raster order: pixel tiles that are walked before the next channel tile")


def batch_knob(images: int) -> Knob:
    """Whether the pixels of all images are one axis that is cut into tiles. One image can only be folded."""
    doc = "folded: a tile may have pixels of two images; bound: tiles belong to one image"
    return Knob("batch", ("folded", "bound") if images > 1 else ("folded",), doc)


def blocks_per_sm_knob(most: tuple[int, ...]) -> Knob:
    doc = "0: one block per tile; otherwise a persistent grid with this many blocks per SM"
    return Knob("blocks_per_sm", (0, *most), doc)


def pixel_tiles(k: Columns, images: int, pixels: int) -> Any:
    """Tiles along the pixels of all images, each with `pixels`."""
    folded = ceil_div(images * pixels, k["bm"])
    if "batch" not in k:
        return folded
    return np.where(k["batch"] == "bound", images * ceil_div(pixels, k["bm"]), folded)


def resource_rules(target: Target) -> tuple[Constraint, ...]:
    """A block's threads, registers and shared memory are those of the target."""
    return (
        Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
        Constraint(
            f"registers (estimated) <= 255 per thread and {target.registers_per_sm} over the blocks of an SM",
            lambda k: (
                (k["registers"] <= 255)
                & (k["registers"] * k["threads"] * np.maximum(k["blocks_per_sm"], 1) <= target.registers_per_sm)
            ),
        ),
        Constraint(
            f"shared memory per block <= {target.shared_bytes_per_block} bytes",
            lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
        ),
    )


def schedule_rules(target: Target) -> tuple[Constraint, ...]:
    """Depth of the ring, raster order and persistent grid."""
    return (
        Constraint("at most steps + 1 stages", lambda k: (k["stages"] == 2) | (k["stages"] <= k["steps"] + 1)),
        Constraint(
            "panel is 1 unless there are at least that many pixel tiles and a second channel tile",
            lambda k: (k["panel"] == 1) | ((k["panel"] <= k["tiles_m"]) & (k["tiles_n"] > 1)),
        ),
        Constraint(
            "a persistent grid has more tiles than blocks, and its blocks fit on an SM together",
            lambda k: (
                (k["blocks_per_sm"] == 0)
                | (
                    (k["tiles"] > k["blocks_per_sm"] * target.sms)
                    & (k["blocks_per_sm"] * (k["shared_bytes"] + BLOCK_RESERVED_BYTES) <= target.shared_bytes_per_sm)
                    & (k["blocks_per_sm"] * k["threads"] <= target.threads_per_sm)
                )
            ),
        ),
    )


def below_twice(tile: Any, least: int, size: Any) -> Any:
    """Whether a tile is the smallest, or less than twice as large as what it covers."""
    return (tile == least) | (tile < 2 * size)


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)
