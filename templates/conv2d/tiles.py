"""Knobs and rules of kernels whose blocks walk tiles of pixels x channels: conv2d_mma and conv2d_simt.

The spaces have the knobs `bm`, `bn`, `stages`, `band`, `persistent` and `blocks_per_sm`, and the derived quantities
`threads`, `registers`, `shared_bytes`, `tiles_m`, `tiles_n`, `tiles` and `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.launch import MAX_BLOCK_THREADS
from schedsearch.space import Columns, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.parts.hopper import BLOCK_RESERVED_BYTES

BAND = Knob("band", (1, 8, 64), "raster order: pixel tiles that are walked before the next channel tile")


@dataclass(frozen=True)
class Tiling:
    """Tiles of bm output pixels x bn output channels that cover y.

    Attributes:
        bm, bn: output pixels and channels of a tile.
        images: images of the batch.
        pixels: output pixels of an image.
        channels: output channels of a group.
        groups: groups of channels. Tiles do not straddle them.
        bound: a tile has pixels of one image; otherwise the pixels of all images are one long axis.
    """

    bm: int
    bn: int
    images: int
    pixels: int
    channels: int
    groups: int
    bound: bool

    @property
    def image_tiles(self) -> int:
        """Pixel tiles of an image, or of the whole batch if tiles are not bound."""
        return int(ceil_div(self.pixels * (1 if self.bound else self.images), self.bm))

    @property
    def tiles_m(self) -> int:
        """Pixel tiles."""
        return self.image_tiles * (self.images if self.bound else 1)

    @property
    def group_tiles(self) -> int:
        """Channel tiles of one group."""
        return int(ceil_div(self.channels, self.bn))

    @property
    def tiles_n(self) -> int:
        """Channel tiles."""
        return self.group_tiles * self.groups

    @property
    def tiles(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def band(self) -> int:
        """A good value of the knob `band`."""
        return 8 if self.tiles_m >= 8 and self.tiles_n > 1 else 1


def least_cost(tilings: Iterable[Tiling], sms: int, tile_cost: Callable[[Tiling], float]) -> Tiling:
    """The tiling with the least estimated time: the number of waves over `sms` multiprocessors times the cost of a tile.

    Of equals, the one with the largest tiles.
    """
    return min(tilings, key=lambda t: (ceil_div(t.tiles, sms) * tile_cost(t), -t.bm * t.bn))


def tile_sizes(sizes: Iterable[int], extent: int) -> list[int]:
    """The sizes that are less than twice the extent, and the first one."""
    first, *others = sizes
    return [first, *(size for size in others if size < 2 * extent)]


def batch_knob(images: int) -> Knob:
    """Whether the pixels of all images are one axis that is cut into tiles. One image can only be folded."""
    doc = "folded: a tile may have pixels of two images; bound: tiles belong to one image"
    return Knob("batch", ("folded", "bound") if images > 1 else ("folded",), doc)


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
                (k["registers"] <= 255) & (k["registers"] * k["threads"] * k["blocks_per_sm"] <= target.registers_per_sm)
            ),
        ),
        Constraint(
            f"shared memory per block <= {target.shared_bytes_per_block} bytes",
            lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
        ),
    )


def schedule_rules(target: Target, ahead: str = "steps") -> tuple[Constraint, ...]:
    """Depth of the ring, raster order and persistent grid.

    Args:
        ahead: the quantity that says how many steps may be loaded ahead.
    """
    return (
        Constraint(f"at most {ahead} + 1 stages", lambda k: (k["stages"] == 2) | (k["stages"] <= k[ahead] + 1)),
        Constraint(
            "band is 1 unless there are at least that many pixel tiles and a second channel tile",
            lambda k: (k["band"] == 1) | ((k["band"] <= k["tiles_m"]) & (k["tiles_n"] > 1)),
        ),
        Constraint(
            "a persistent grid has more tiles than blocks, and its blocks fit on an SM together",
            lambda k: (
                ~k["persistent"]
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
