"""Knobs, rules and defaults that the CUDA templates of depthwise_conv2d share."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, Axis, arrays_of
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.workload import Workload

LEAST_CAPABILITY = {"float32": (5, 0), "float16": (8, 0), "bfloat16": (8, 0)}  # of the conversions to pairs
LEAST_CAPABILITY |= {"int8": (7, 2), "uint8": (7, 2)}  # of cvt.pack
MOST_EXACT_TAPS = 2**24 // 255**2  # of which a sum of products of 8-bit numbers is exact in float32
LARGEST_SIZE = 2**30  # of an axis: coordinates, and sums of two of them, stay within int32
LARGEST_STEP_BYTES = 2**31 - 1  # from a patch's first source to its last
MOST_UNROLLED_TAPS = 7  # along an axis; larger filters take several rounds
MOST_PRODUCTS = 3072  # of a patch, so that the code stays in the instruction caches
MOST_SUMS = 128
OTHER_REGISTERS = 26  # addresses, coordinates, predicates
REGISTERS = (64, 96, 128, 168, 255)

HEIGHTS = (1, 2, 4, 7, 8)  # of a patch, in units of a gradient's stride
WIDTHS = (1, 2, 4, 7, 8, 14, 16)
ACROSS = (1, 2, 4, 7, 8, 14, 16, 28, 32)
DOWN = (1, 2, 4, 7, 8, 14, 16, 32)
LANES = (1, 2, 4, 8, 16, 32, 64)
STRIPS = (1, 2, 4, 8)
BUFFERS = (0, 1, 2, 3)  # tiles in shared memory
LEAST_OF_COPIES = (8, 0)  # compute capability of cp.async


@dataclass(frozen=True)
class Shape:
    """What the knobs depend on.

    Attributes:
        rows, columns: the two axes.
        images, channels: of the targets.
        nbytes: of an element.
        channels_last: NHWC.
        vectors: lengths of a thread's vector of channels.
        tap_h, tap_w: taps that are unrolled.
        filters: as in `Rounds`.
        multiplier: target channels of a source channel.
    """

    rows: Axis
    columns: Axis
    images: int
    channels: int
    nbytes: int
    channels_last: bool
    vectors: tuple[int, ...]
    tap_h: int
    tap_w: int
    filters: int
    multiplier: int

    @classmethod
    def of(cls, workload: Workload[DepthwiseConv2dParams]) -> Shape:
        p = workload.params
        rows, columns = Axis.of(workload, 0), Axis.of(workload, 1)
        nbytes = dtype_of(p.dtype).nbytes
        of_dx = p.direction == "grad_input"
        channels = p.c if of_dx else p.c * p.multiplier
        together = p.layout == "NHWC" and p.multiplier == 1
        longest = math.gcd(channels, VECTOR_BYTES // nbytes) if together else 1
        vectors = tuple(n for n in (1, 2, 4, 8) if n <= longest)
        return cls(
            rows, columns, p.n, channels, nbytes, p.layout == "NHWC", vectors,
            unrolled(rows), unrolled(columns), p.multiplier if of_dx else 1, p.multiplier,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        """Taps that are unrolled."""
        return self.tap_h * self.tap_w

    @property
    def rounds(self) -> int:
        """Rounds of a filter."""
        return -(-self.rows.taps // self.tap_h) * -(-self.columns.taps // self.tap_w)

    def patches(self, vector: int, tile_h: int, tile_w: int) -> int:
        """Patches of all images."""
        rows, columns = -(-self.rows.targets // tile_h), -(-self.columns.targets // tile_w)
        return rows * columns * -(-self.channels // vector) * self.images

    def products(self, k: Columns) -> Any:
        """Of a patch in one round."""
        return k["tile_h"] * k["tile_w"] * k["vector"] * self.taps // (self.rows.down * self.columns.down)

    def window(self, axis: Axis, tile: Any, taps: int) -> Any:
        """Sources of a patch along an axis, at most."""
        return np.minimum(axis.reach(tile, taps), -(-(tile * taps) // axis.down))

    def loaded_words(self, k: Columns) -> Any:
        """Registers of the rows that are loaded ahead."""
        row = self.window(self.columns, k["tile_w"], self.tap_w) * k["vector"]
        return row * self.nbytes // 4 * 2 + row

    def used_registers(self, k: Columns) -> Any:
        """Of a thread, about."""
        sums = k["tile_h"] * k["tile_w"] * k["vector"]
        return sums + self.taps * k["vector"] + self.loaded_words(k) + OTHER_REGISTERS


def unrolled(axis: Axis) -> int:
    """Taps of a round along an axis: as many as are unrolled, and so that rounds start at whole sources."""
    if axis.taps <= MOST_UNROLLED_TAPS:
        return axis.taps
    unit = axis.down // math.gcd(axis.down, abs(axis.tap_step))
    return min(axis.taps, max(MOST_UNROLLED_TAPS // unit, 1) * unit)


def size_problem(workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
    """Why no kernel can count the workload's sizes, or why the target cannot run it (one sentence), or None."""
    p = workload.params
    least = LEAST_CAPABILITY[p.dtype]
    if target.compute_capability < least:
        needed, found = (".".join(map(str, each)) for each in (least, target.compute_capability))
        return f"{p.dtype} needs compute capability {needed} or later, {target.name} has {found}"
    shape = Shape.of(workload)
    sizes = {"n": p.n, "c * multiplier": p.c * p.multiplier}
    for name, axis in (("h", shape.rows), ("w", shape.columns)):
        reach = axis.taps * abs(axis.tap_step) + abs(axis.shift) + 64 * axis.up
        sizes[f"{name} with padding and filter"] = max(axis.sources, axis.targets * axis.up) + reach
    for name, size in sizes.items():
        if size >= LARGEST_SIZE:
            return f"{name} is {size}; allowed: less than 2**30, coordinates have 32 bits"
    rows = shape.rows
    tallest = max(n for n in HEIGHTS if below_twice(rows.down * n, rows.down, rows.targets))
    most_rows = (tallest * rows.up + shape.tap_h * abs(rows.tap_step) + abs(rows.shift), tallest * rows.down)
    for name, count in zip(arrays_of(workload), most_rows):
        step = count * strides_of(workload, name)["H"].outer * shape.nbytes
        if step > LARGEST_STEP_BYTES:
            return f"the rows of {name} that a patch needs reach over {step} bytes; allowed: less than 2**31"
    return None


def direction_problem(workload: Workload[DepthwiseConv2dParams], *allowed: str) -> str | None:
    """Why a template that computes the `allowed` directions refuses a workload, or None."""
    p = workload.params
    if p.direction in allowed:
        return None
    problem = f"direction is {p.direction}; allowed: {', '.join(allowed)}"
    if p.direction == "grad_both":
        problem += "; depthwise_conv2d_both_cuda computes both gradients"
    return problem


def knobs_of(shape: Shape) -> list[Knob]:
    unit_h, unit_w = shape.rows.down, shape.columns.down
    return [
        Knob("vector", shape.vectors, "channels of a thread, neighbours in memory"),
        Knob("tile_h", tuple(unit_h * n for n in HEIGHTS), "rows of a patch, which a thread computes at once"),
        Knob("tile_w", tuple(unit_w * n for n in WIDTHS), "columns of a patch"),
        Knob("channels", LANES, "threads of a block along the channels"),
        Knob("columns", ACROSS, "threads of a block along the columns"),
        Knob("rows", DOWN, "threads of a block along the rows"),
        Knob("registers", REGISTERS, "most registers of a thread; fewer let more blocks share a multiprocessor"),
    ]


def device_rules(target: Target) -> list[Constraint]:
    """What the derived quantities `used_registers`, `threads` and `shared_bytes` may be at most."""
    return [
        Constraint(
            "registers (estimated) <= the knob, and those of a block <= a multiprocessor's",
            lambda k: (k["used_registers"] <= k["registers"]) & (k["registers"] * k["threads"] <= target.registers_per_sm),
        ),
        Constraint(
            f"shared memory per block <= {target.shared_bytes_per_block} bytes",
            lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
        ),
    ]


def rules_of(shape: Shape, target: Target) -> list[Constraint]:
    unit_h, unit_w = shape.rows.down, shape.columns.down
    return [
        Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
        Constraint(f"at most {MOST_PRODUCTS} products of a patch are unrolled", lambda k: k["products"] <= MOST_PRODUCTS),
        Constraint(f"a patch has at most {MOST_SUMS} elements", lambda k: k["sums"] <= MOST_SUMS),
        *device_rules(target),
        Constraint(
            "a patch, and a block, is less than twice as large as the image",
            lambda k: (
                below_twice(k["tile_h"], unit_h, shape.rows.targets)
                & below_twice(k["tile_w"], unit_w, shape.columns.targets)
                & below_twice(k["columns"] * k["tile_w"], k["tile_w"], shape.columns.targets)
                & below_twice(k["rows"] * k["tile_h"], k["tile_h"], shape.rows.targets)
                & below_twice(k["channels"] * k["vector"], k["vector"], shape.channels)
            ),
        ),
        Constraint(f"at most {MAX_GRID_X} blocks", lambda k: k["blocks"] <= MAX_GRID_X),
    ]  # fmt: skip


def below_twice(tile: Any, least: Any, size: int) -> Any:
    return (tile == least) | (tile < 2 * size)


def derived_of(shape: Shape) -> dict[str, Callable[[Columns], Any]]:
    return {
        "threads": lambda k: k["channels"] * k["columns"] * k["rows"],
        "sums": lambda k: k["tile_h"] * k["tile_w"] * k["vector"],
        "products": shape.products,
        "loaded_words": shape.loaded_words,
        "used_registers": shape.used_registers,
        "row_waste": lambda k: -(-shape.rows.targets // k["tile_h"]) * k["tile_h"] / shape.rows.targets,
        "column_waste": lambda k: -(-shape.columns.targets // k["tile_w"]) * k["tile_w"] / shape.columns.targets,
    }


def stages_tiles(shape: Shape, target: Target) -> bool:
    """Whether blocks can stage tiles: pixels have their channels side by side, as many in both arrays."""
    return shape.channels_last and shape.multiplier == 1 and target.compute_capability >= LEAST_OF_COPIES


def staged_bytes(shape: Shape, height: Any, width: Any, k: Columns) -> Any:
    """Shared memory of the sources of a tile of height x width targets, at most; see `tiles.Tile`."""
    rows, columns = shape.rows.reach(height, shape.tap_h), shape.columns.reach(width, shape.tap_w)
    return rows * columns * k["channels"] * k["vector"] * shape.nbytes + VECTOR_BYTES


# ---- defaults


def candidates(shape: Shape) -> list[tuple[int, int, int]]:
    """(vector, tile_h, tile_w) from which a default is chosen: those with room for their registers, if there are any."""
    heights = [shape.rows.down * n for n in (1, 2, 4, 8)]
    widths = [shape.columns.down * n for n in (1, 2, 4, 8)]
    found = list(itertools.product(shape.vectors, heights, widths))

    def fits(vector: int, tile_h: int, tile_w: int) -> bool:
        patch: dict[str, Any] = {"vector": vector, "tile_h": tile_h, "tile_w": tile_w}
        return vector * tile_h * tile_w <= MOST_SUMS and 3 * int(shape.used_registers(patch)) <= 2 * max(REGISTERS)

    return [patch for patch in found if fits(*patch)] or found


def enough_registers(shape: Shape, choice: Mapping[str, Any]) -> int:
    """The least value of the knob of which a third stays free, because compilers differ from the estimate and from each
    other; a default that spills would be refused. The largest if none is enough."""
    used = int(shape.used_registers(choice))
    return next((n for n in REGISTERS if 3 * used <= 2 * n), max(REGISTERS))


def loads_of_row(shape: Shape, tile_w: int) -> float:
    """Accesses to a row of a patch's window, about."""
    window = int(shape.window(shape.columns, tile_w, shape.tap_w))
    if shape.channels_last:
        return window
    aligned = next(n for n in (8, 4, 2, 1) if n * shape.nbytes <= VECTOR_BYTES and shape.columns.sources % n == 0)
    return window / min(aligned, max(tile_w * shape.columns.up // shape.columns.down, 1)) + 1


def lines_of_load(shape: Shape, vector: int, tile_h: int, tile_w: int, across: int, down: int) -> int:
    """Lines of 128 bytes that a load of a warp touches: each is an access to L1. A block has across x down threads."""
    if shape.channels_last:
        return max(1, vector * shape.nbytes // 4)
    rows, columns = shape.rows, shape.columns
    touched = set()
    for thread in range(32):
        plane, row = divmod(thread // across, down)
        element = (plane * rows.sources + row * tile_h * rows.up // rows.down) * columns.sources
        element += thread % across * tile_w * columns.up // columns.down
        touched.add(element * shape.nbytes // 128)
    return len(touched)


def min_blocks(target: Target, config: Config) -> int:
    """Blocks that share a multiprocessor if a thread has the registers of the knob."""
    threads = config["channels"] * config["columns"] * config["rows"]
    fitting = min(target.registers_per_sm // (threads * config["registers"]), target.threads_per_sm // threads, 32)
    return int(max(1, fitting))


def threads_of(shape: Shape, vector: int, tile_h: int, tile_w: int, threads: int) -> tuple[int, int, int]:
    """(channels, columns, rows) of a block of up to `threads` threads: runs of 64 to 256 bytes, then a wide rectangle."""
    lanes_needed = -(-shape.channels // vector)
    across_needed = -(-shape.columns.targets // tile_w)
    down_needed = -(-shape.rows.targets // tile_h)
    lanes = 1
    if shape.channels_last:
        most = max(8, 128 // (vector * shape.nbytes))
        lanes = max(n for n in LANES if n == 1 or (n <= most and n < 2 * lanes_needed))
    side_by_side = lanes if shape.channels_last else 32  # in NCHW more channels fill up the warps, see below
    across, down = _fewest_idle(across_needed, down_needed, side_by_side, threads // lanes)
    while not shape.channels_last and lanes * 2 * across * down <= threads and lanes < lanes_needed and lanes < 64:
        lanes *= 2
    return lanes, across, down


@functools.cache
def _fewest_idle(across_needed: int, down_needed: int, lanes: int, most: int) -> tuple[int, int]:
    """(columns, rows) with a product of up to `most`, and with the fewest idle threads; of equals, the most columns.

    Idle are threads outside of the image, and those that the last warp of a block of lanes * columns * rows threads lacks.
    What a block costs, whatever its size, counts as much as 8 threads.
    """

    def cost(across: int, down: int) -> float:
        threads = lanes * across * down
        blocks = -(-across_needed // across) * -(-down_needed // down)
        return blocks * across * down / (across_needed * down_needed) * (-(-threads // 32) * 32 + 8) / threads

    fitting = [
        (across, down)
        for across, down in itertools.product(ACROSS, DOWN)
        if across * down <= max(most, 1)
        and (across == 1 or across < 2 * across_needed)
        and (down == 1 or down < 2 * down_needed)
    ]
    return min(fitting, key=lambda each: (round(cost(*each), 2), -each[0], -each[1]))


def first_roomy(space: ConfigSpace, target: Target, choices: Iterator[dict[str, Any]]) -> Config:
    """The first legal configuration whose registers surely suffice, or the first legal one if there is no such.

    Compilers differ from the estimate and from each other, so a third of the registers stays free. A default that spills
    would be refused.
    """
    room = Constraint(
        "a third of the registers is free, and two blocks share a multiprocessor",
        lambda k: (
            (3 * k["used_registers"] <= 2 * k["registers"]) & (2 * k["registers"] * k["threads"] <= target.registers_per_sm)
        ),
    )
    roomy, first = ConfigSpace(space.knobs, [*space.constraints, room], space.derived), None
    for choice in choices:
        config = Config(choice)
        if not roomy.check(config):
            return config
        if first is None and not space.check(config):
            first = config
    assert first is not None, "a space of depthwise_conv2d has a configuration with one thread per block"
    return first
