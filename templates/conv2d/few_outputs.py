"""conv2d with few output channels, such as the last layer of a network that makes images: x is read once, at full speed.

A tile of a tensor-core kernel has 16 output channels or more, so 3 of them waste most of its multiplications and its
stores. Here a warp has `pixels` of a row and walks down `rows` rows of y. All weights stay in its registers, and so do the
sums of the kernel's height of rows. Each row of x is loaded to registers once for each tap of a row, and multiplied for all
rows of y that it takes part in (`parts.row_mma`). There is no shared memory and no barrier: neighbouring taps and warps find
their pixels in L1, and L2 prefetches rows ahead. Time is that of reading x.

docs/kernels/conv2d_few_outputs.md explains more, including the use of each knob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Grid, Pointer
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.limits import size_problem
from schedsearch.templates.conv2d.placement import shuffled_offset
from schedsearch.templates.parts import ptx, row_mma
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.choosing import least_predicted
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.row_mma import ELEMENT_BYTES, MMA_CHANNELS, MMA_COLUMNS, MMA_PIXELS, RowTile
from schedsearch.templates.parts.stages import epilogue_problem, moved_residual_problem
from schedsearch.workload import Workload

DTYPES = ("float16", "bfloat16")
MAX_COLUMNS = 2 * MMA_COLUMNS
BASE_REGISTERS = 36  # of a thread beside rows, weights and sums: addresses, offsets of y, temporaries
MAX_REGISTERS = 255
MAX_MASK_BITS = 32
LINE_BYTES = 128

PIXELS = (16, 32)
ROWS = (8, 16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8)
PREFETCHES = (0, 2, 4, 8, 16)
BLOCKS_PER_SM = (1, 2, 3, 4, 6, 8)
SHAPED_BY = frozenset({"sums", "row_words", "weight_words"})  # see `KernelStep`


class Conv2dFewOutputs(Template[Conv2dParams]):
    """conv2d with up to 16 output channels: fp16 or bf16, sm_80 and later, stride 1, in NHWC; y in NHWC or NCHW."""

    name = "conv2d_few_outputs"
    version = 1
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if target.compute_capability < (8, 0):
            return "mma needs compute capability 8.0 or later, {} has {}.{}".format(target.name, *target.compute_capability)
        if w.dtype not in DTYPES:
            return f"dtype is {w.dtype}; allowed: {', '.join(DTYPES)}"
        if (w.layout, w.weight_layout) != ("NHWC", "OHWI"):
            return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
        if w.k > MAX_COLUMNS:
            return f"k is {w.k}; allowed: up to {MAX_COLUMNS}; the other templates take more"
        if w.groups != 1:
            return f"groups is {w.groups}; allowed: 1"
        if w.c % MMA_CHANNELS:
            return f"c is {w.c}; allowed: multiples of {MMA_CHANNELS}"
        if (*w.stride, *w.dilation) != (1, 1, 1, 1):
            return f"stride and dilation are {w.stride} and {w.dilation}; allowed: 1"
        tile = row_tile(workload, min(PIXELS))
        if registers(tile) > MAX_REGISTERS or tile.halves > MAX_MASK_BITS:
            return (
                f"{w.r} x {w.s} taps of {w.c} channels need {registers(tile)} registers a thread; allowed: up to "
                f"{MAX_REGISTERS}, and kernels up to {MAX_MASK_BITS // 2} wide"
            )
        if reason := epilogue_problem(workload, shuffles=True) or moved_residual_problem(workload):
            return reason
        return size_problem(workload)

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        out_h, out_w = CONV2D.output_hw(workload.params)
        knobs = (
            Knob("pixels", PIXELS, "output pixels of a row that a warp computes"),
            Knob("rows", ROWS, "rows of y that a warp walks down; more read fewer rows twice, fewer make more tiles"),
            Knob("warps", WARPS, "warps of a block, side by side"),
            Knob("prefetch", PREFETCHES, "rows of x between the one that is loaded and the one that L2 fetches; 0: none"),
            Knob("blocks_per_sm", BLOCKS_PER_SM, "blocks that share a multiprocessor, for which registers must suffice"),
        )
        constraints = (
            Constraint(
                f"registers (estimated) <= {MAX_REGISTERS} a thread and {target.registers_per_sm} of a multiprocessor",
                lambda q: (
                    (q["registers"] <= MAX_REGISTERS)
                    & (q["registers"] * q["threads"] * q["blocks_per_sm"] <= target.registers_per_sm)
                ),
            ),
            Constraint("a mask of 32 bits has the pixels of all taps", lambda q: q["mask_bits"] <= MAX_MASK_BITS),
            Constraint(
                "pixels of a block, and rows, are less than twice those of y",
                lambda q: (
                    ((q["pixels"] == min(PIXELS)) & (q["warps"] == 1) | (q["pixels"] * q["warps"] < 2 * out_w))
                    & ((q["rows"] == min(ROWS)) | (q["rows"] < 2 * out_h))
                ),
            ),
            Constraint("fewer rows ahead than a warp walks down", lambda q: q["prefetch"] < q["rows"]),
            Constraint(f"at most {MAX_GRID_X} tiles", lambda q: q["tiles"] <= MAX_GRID_X),
        )
        return ConfigSpace(knobs, constraints, _derived(workload, target))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tiles whose loads fill the device with the least rows read twice; as many warps as registers allow."""
        few = space.restrict({"warps": [1, 4], "prefetch": [4]})
        return least_predicted(
            few, lambda q: (q["predicted_cycles"], q["pixels"], q["rows"], q["blocks_per_sm"], -q["warps"])
        )

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        plan, epilogue = Plan.of(workload, config), Epilogue(workload)
        step = KernelStep(
            build_kernel(workload, plan, epilogue),
            (Pointer("x"), Pointer("weight"), Pointer("y"), *epilogue.params),
            Grid(plan.tiles),
            32 * plan.warps,
            0,
            min_blocks_per_sm=config["blocks_per_sm"],
            shaped_by=SHAPED_BY,
            ahead=("weight",),
        )
        alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in (*workload.signature, *workload.outputs)}
        return KernelSource("cuda", "native", (step,), alignments=alignments | {"x": 8, "weight": 8})


def row_tile(workload: Workload[Conv2dParams], pixels: int) -> RowTile:
    """What a warp with this many pixels of a row computes from a row of x."""
    w = workload.params
    return RowTile(w.dtype, w.r, w.s, w.c // MMA_CHANNELS, pixels // MMA_PIXELS, math.ceil(w.k / MMA_COLUMNS))


def registers(tile: RowTile) -> int:
    """An estimate: two rows of x, the weights, the window of sums, and all else."""
    return 2 * tile.row_words + tile.weight_words + tile.sums + BASE_REGISTERS


def _derived(workload: Workload[Conv2dParams], target: Target) -> dict[str, Callable[[Columns], Any]]:
    w = workload.params
    out_h, out_w = CONV2D.output_hw(w)
    by_pixels = {pixels: row_tile(workload, pixels) for pixels in PIXELS}

    def of_tile(value: Callable[[RowTile], int]) -> Callable[[Columns], Any]:
        return lambda q: sum(np.where(q["pixels"] == pixels, value(tile), 0) for pixels, tile in by_pixels.items())

    def predicted_cycles(q: Columns) -> Any:
        """Cycles of a multiprocessor: waves of rows, each as long as its bytes from memory, or as a load's latency."""
        row_bytes = (q["pixels"] + w.s - 1) * w.c * ELEMENT_BYTES
        resident = q["blocks_per_sm"] * q["warps"]
        row = np.maximum(row_bytes * resident / _BYTES_PER_CYCLE, _LATENCY_CYCLES)
        waves = -(-q["tiles"] // (target.sms * q["blocks_per_sm"]))
        return waves * (q["rows"] + w.r - 1) * row

    return {
        "threads": lambda q: 32 * q["warps"],
        "registers": of_tile(registers),
        "mask_bits": of_tile(lambda tile: tile.halves),
        "strips": lambda q: -(-out_w // (q["pixels"] * q["warps"])),
        "tiles": lambda q: w.n * -(-out_h // q["rows"]) * q["strips"],
        "predicted_cycles": predicted_cycles,
    }


_BYTES_PER_CYCLE = 18  # that a multiprocessor gets from memory, if all of them read
_LATENCY_CYCLES = 500  # of a load that L2 has fetched, and of what waits for it


@dataclass(frozen=True)
class Plan:
    """Sizes of a configuration.

    Attributes:
        tile: what a warp computes from a row of x.
        pixels, rows: pixels of a row, and rows of y, of a warp.
        warps: warps of a block, side by side.
        prefetch: see the knob.
        strips, bands, tiles: blocks along a row, down an image, and of all images.
    """

    tile: RowTile
    pixels: int
    rows: int
    warps: int
    prefetch: int
    strips: int
    bands: int
    tiles: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], config: Mapping[str, Any]) -> Plan:
        out_h, out_w = CONV2D.output_hw(workload.params)
        pixels, rows, warps = config["pixels"], config["rows"], config["warps"]
        strips, bands = math.ceil(out_w / (pixels * warps)), math.ceil(out_h / rows)
        tile = row_tile(workload, pixels)
        return cls(tile, pixels, rows, warps, config["prefetch"], strips, bands, workload.params.n * bands * strips)


def build_kernel(workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue) -> Callable[..., None]:
    """The kernel (x, weight, y, *epilogue.params); addresses are u64."""
    w, tile = workload.params, plan.tile
    height, top, left, taps_h = w.h, w.padding[0], w.padding[1], w.r
    out_h = CONV2D.output_hw(w)[0]
    pixels, rows, warps, strips, bands = plan.pixels, plan.rows, plan.warps, plan.strips, plan.bands
    pixel_bytes = w.c * ELEMENT_BYTES
    row_bytes, filter_bytes, image_rows, k = w.w * pixel_bytes, w.r * w.s * pixel_bytes, w.h, w.k
    sums, row_words, weight_words = tile.sums, tile.row_words, tile.weight_words
    load_row, load_weights, multiply_row = row_mma.load_row(tile), row_mma.load_weights(tile), row_mma.multiply_row(tile)
    mask_of, fetch, store_row = column_mask(workload, plan), prefetch_row(workload, plan), store(workload, plan, epilogue)

    def kernel(x, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread & 31)
        pixel, quarter = i32(lane >> 2), i32(lane & 3)
        number = u32(cuda.blockIdx.x)
        band = u32(number // u32(strips))
        strip = u32(number - band * u32(strips))
        image = u32(band // u32(bands))
        first_row = i32((band - image * u32(bands)) * rows)
        first_column = i32((i32(strip) * warps + (thread >> 5)) * pixels)
        column = i32(first_column + pixel)

        weights = cuda.local.array(weight_words, u32)
        window = cuda.local.array(sums, f32)
        one = cuda.local.array(row_words, u32)  # two rows of x, one of which is loaded
        other = cuda.local.array(row_words, u32)
        load_weights(weights, u64(weight + u64(pixel * filter_bytes + quarter * 8)), i32(k - pixel))
        ptx.wait_for_predecessor()
        for i in range(sums):
            window[i] = f32(0)

        mask = mask_of(column)
        last_row = i32(min(out_h, first_row + rows))
        stop = i32(min(height, last_row - top + taps_h - 1))  # of rows of x
        row = i32(first_row - top)
        image_row = i64(image) * image_rows + row
        address = u64(x + u64(image_row * row_bytes + i64(column - left) * pixel_bytes + quarter * 8))
        to_row = i32(first_row - (taps_h - 1))  # of y, that the next row of x completes
        load_row(one, address, mask if u32(row) < u32(stop) else u32(0))
        while to_row < last_row:
            fetch(x, image, row, stop, first_column, lane)
            row = i32(row + 1)
            address = u64(address + u64(row_bytes))
            load_row(other, address, mask if u32(row) < u32(stop) else u32(0))
            multiply_row(window, one, weights)
            if to_row >= first_row:
                store_row(window, y, image, to_row, column, quarter, operands)
            fetch(x, image, row, stop, first_column, lane)
            row = i32(row + 1)
            address = u64(address + u64(row_bytes))
            load_row(one, address, mask if u32(row) < u32(stop) else u32(0))
            multiply_row(window, other, weights)
            if (to_row + 1 >= first_row) & (to_row + 1 < last_row):
                store_row(window, y, image, i32(to_row + 1), column, quarter, operands)
            to_row = i32(to_row + 2)

    return kernel


# --- The functions that the kernel captures ----------------------------------------------------------------------------
def column_mask(workload: Workload[Conv2dParams], plan: Plan) -> Callable[[Any], Any]:
    """`mask(column)`: for each of `RowTile.halves`, whether the thread's pixel at the tap is inside of the image."""
    width, left, halves, per_tap = workload.params.w, workload.params.padding[1], plan.tile.halves, 2 * plan.tile.pixel_tiles

    def mask_of(column: Any) -> Any:
        mask = u32(0)
        for number in range(halves):
            at = i32(column - left + number // per_tap + number % per_tap * 8)
            mask = u32(mask | (u32(u32(at) < u32(width)) << u32(number)))
        return mask

    return mask_of


def prefetch_row(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`fetch(x, image, row, stop, column, lane)`: brings the warp's part of the row `prefetch` rows ahead to L2."""
    w, ahead = workload.params, plan.prefetch
    pixel_bytes, image_rows, width = w.c * ELEMENT_BYTES, w.h, w.w
    row_bytes, part_bytes, rounds = width * pixel_bytes, plan.pixels * pixel_bytes, -(-plan.pixels * pixel_bytes // 4096)
    bring = row_mma.prefetch

    def fetch(x: Any, image: Any, row: Any, stop: Any, column: Any, lane: Any) -> None:
        there = i32(row + ahead)
        for part in range(rounds):
            within = i32(lane * LINE_BYTES + part * 32 * LINE_BYTES)
            at = i64(column) * pixel_bytes + within
            inside = (u32(there) < u32(stop)) & (within < part_bytes) & (at < row_bytes)
            offset = (i64(image) * image_rows + there) * row_bytes + at
            bring(u64(x + u64(offset)), i32(inside))

    def nothing(x: Any, image: Any, row: Any, stop: Any, column: Any, lane: Any) -> None:
        pass

    return fetch if ahead else nothing


def store(workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue) -> Callable[..., None]:
    """`store(sums, y, image, row, column, quarter, operands)`: the epilogue and the store of the window's first slot."""
    p = workload.params
    tile, k, out_w = plan.tile, p.k, CONV2D.output_hw(p)[1]
    strides = strides_of(workload, "y")
    of_image, of_channel, of_row, of_pixel = (strides[axis].outer for axis in "NCHW")
    out_bytes, write = dtype_of(p.out_dtype).nbytes, row_mma.store_element(p.out_dtype)
    single = epilogue.single
    parts, column_tiles = 2 * tile.pixel_tiles, tile.column_tiles

    def in_layout(image: Any, row: Any, column: Any, channel: Any) -> Any:
        in_row = i64(column) * of_pixel + i64(channel) * of_channel
        return i64(image) * of_image + i64(row) * of_row + in_row

    offset_of = in_layout
    if (shuffle := shuffled_offset(workload)) is not None:
        offset_in_y = shuffle

        def shuffled(image: Any, row: Any, column: Any, channel: Any) -> Any:
            return offset_in_y(image, u32(row) * u32(out_w) + u32(column), channel)

        offset_of = shuffled

    def store_row(sums: Any, y: Any, image: Any, row: Any, column: Any, quarter: Any, operands: Any) -> None:
        for part in range(parts):  # 8 pixels
            to_column = i32(column + 8 * part)
            for pair in range(column_tiles):
                for neighbour in range(2):
                    channel = i32(8 * pair + 2 * quarter + neighbour)
                    if (channel < k) & (to_column < out_w):
                        offset = i64(offset_of(image, row, to_column, channel))
                        value = sums[4 * (part // 2 * column_tiles + pair) + part % 2 * 2 + neighbour]
                        value = single(value, 1, channel, offset, *operands)
                        write(u64(y + u64(offset * out_bytes)), value)

    return store_row
