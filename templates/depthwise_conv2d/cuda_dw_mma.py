"""depthwise_conv2d on the tensor cores of NVIDIA GPUs, dw of large filters: see docs/kernels/depthwise.md.

The gradient of a band matrix is the product of the windows, transposed, and the targets, over the strips of a warp and their
rows. A filter's gradient is the sum along the diagonals of its bands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d import cuda_mma_text
from schedsearch.templates.depthwise_conv2d.cuda_dw import SPLITS, SUMS
from schedsearch.templates.depthwise_conv2d.cuda_mma_kernel import patch_of
from schedsearch.templates.depthwise_conv2d.cuda_mma_space import (
    blocks_of,
    choices_of,
    derived_of_strips,
    filter_problem,
    knobs_of_strips,
    least_blocks,
    least_choices,
    resident,
    rules_of_strips,
    tile_cycles,
)
from schedsearch.templates.depthwise_conv2d.cuda_mma_stage import stage_of
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import (
    ELEMENT_BYTES,
    MATRIX_WORDS,
    STEP_COLUMNS,
    STRIP_COLUMNS,
    WORD_BYTES,
    StripBlocks,
)
from schedsearch.templates.depthwise_conv2d.cuda_pixels import SUM_BYTES, Blocks, Rounds
from schedsearch.templates.depthwise_conv2d.cuda_space import OTHER_REGISTERS, Shape, first_roomy
from schedsearch.templates.depthwise_conv2d.cuda_weight import REDUCE_THREADS, Reduction, build_reduce, write_sum
from schedsearch.templates.depthwise_conv2d.estimates import (
    BLOCK_CYCLES,
    CYCLES_A_US,
    LATENCY,
    SECOND_KERNEL_US,
    WORKSPACE_BYTES_A_US,
)
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import f32, i32, u32
from schedsearch.workload import Workload


class DepthwiseConv2dDwMma(Template[DepthwiseConv2dParams]):
    """dw in 16 bits: gradients of band matrices on tensor cores; a second kernel adds up those of splits in order."""

    name = "depthwise_conv2d_dw_mma"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        return filter_problem(workload, target, _shared_bytes, "grad_weight")

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape, least = Shape.of(workload), least_blocks(workload)
        derived = derived_of_strips(
            workload,
            target,
            _shared_bytes,
            threads=lambda k: 32 * k["channels"],
            used_registers=lambda k: _used_registers(least, k),
            blocks=lambda k: -(-shape.channels // k["channels"]) * k["splits"],
        )
        knobs = [
            *knobs_of_strips(),
            Knob("splits", SPLITS, "blocks that share channels; each adds up a part of the tiles"),
        ]
        splits = Constraint("a split has at least one tile", lambda k: k["splits"] <= k["tile_count"])
        return ConfigSpace(knobs, [*rules_of_strips(shape, target), splits], derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile and the splits with the least estimated time. No card has measured the estimate."""
        least = least_blocks(workload)
        choices = choices_of(workload, lambda k: _used_registers(least, k), splits=(1, 4, 16, 64, 256))
        ranked = sorted(choices, key=lambda choice: cycles(workload, target, choice))
        return first_roomy(space, target, iter([*ranked, *least_choices(splits=1)]))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One strip of two rows for each warp, and one block for all images."""
        return first_roomy(space, target, least_choices(splits=1))

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        blocks, splits, element = _blocks(workload, config), config["splits"], dtype_of(workload.params.dtype).nbytes
        reduction = _reduction(workload, blocks, splits)
        before = Pointer("dw_before", optional=not workload.params.accumulate)
        out = Pointer("dw" if splits == 1 else SUMS)
        steps = [
            KernelStep(
                build_kernel(workload, blocks, reduction), (Pointer("x"), Pointer("dy"), before, out),
                Grid(blocks.channel_blocks * splits), blocks.threads, _shared_bytes(blocks),
                min_blocks_per_sm=resident(target, blocks.threads, config["registers"]),
            )
        ]  # fmt: skip
        workspaces = {}
        if splits > 1:
            workspaces[SUMS] = splits * reduction.filter_elements * SUM_BYTES
            reduce, shared = build_reduce(workload, reduction), REDUCE_THREADS * SUM_BYTES
            parameters = (out, before, Pointer("dw"))
            steps.append(KernelStep(reduce, parameters, Grid(reduction.reduce_blocks), REDUCE_THREADS, shared))
        alignments = {arg.name: element for arg in (*workload.signature, workload.output)}
        alignments |= {"x": blocks.sources.of_copy * element, "dy": blocks.targets.of_copy * element}
        return KernelSource("cuda", "native", tuple(steps), workspaces, alignments)


def build_kernel(
    workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, reduction: Reduction
) -> Callable[..., None]:
    """The kernel (x, dy, before, sums): it writes dw if there is one split, else the workspace."""
    sources, targets = blocks.sources, blocks.targets
    (row_words, image_words, _), (target_row, target_image, _) = sources.pitches, targets.pitches
    block_channels, channel_blocks, channels = blocks.block_channels, blocks.channel_blocks, blocks.channels
    strips, tiles, tile_count, slack = blocks.strips, blocks.tiles, blocks.tile_count, blocks.slack
    place, strip_place = blocks.place(), blocks.strip_place()
    plane_of, target_plane_of, targets_at = sources.plane_place(), targets.plane_place(), sources.nbytes
    stage_x = stage_of(blocks, sources, strides_of(workload, "x"), waits=False)
    stage_dy = stage_of(blocks, targets, strides_of(workload, "dy"))
    sums_count, bands_bytes = cuda_mma_text.band_sums(blocks), _bands_bytes(blocks)
    add_to_bands = cuda_mma_text.add_to_bands(blocks, workload.params.dtype)
    store_bands, write = cuda_mma_text.store_bands(blocks), write_sum(workload, reduction)
    taps_w, taps, column_step = blocks.columns.taps, blocks.rows.taps * blocks.columns.taps, blocks.across_reach.step
    band_rows = STEP_COLUMNS * blocks.steps

    def existing(strip: Any) -> Any:
        """Ones in the halves of a word of the strips that exist, of two."""
        return u32((0xFFFF if strip < strips else 0) | (0xFFFF0000 if strip + 1 < strips else 0))

    def kernel(x: Any, dy: Any, before: Any, out: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        part = u32(cuda.blockIdx.x // u32(channel_blocks))
        split, first = i32(part), i32(i32(cuda.blockIdx.x - part * u32(channel_blocks)) * block_channels)
        warp, lane = i32(thread // u32(32)), i32(thread % u32(32))
        sums = cuda.local.array(sums_count, f32)
        for i in range(sums_count):
            sums[i] = f32(0)

        # ---- the rows of matrices that the thread loads
        own = i32(lane // 16 * 8 + lane % 8)
        image, row, column = strip_place(u32(own if own < strips else 0))
        half = i32(lane // 8 % 2 * (MATRIX_WORDS * WORD_BYTES))
        window = i32((image * image_words + row * row_words) * WORD_BYTES + column * ELEMENT_BYTES + half)
        windows = u32(shared + plane_of(warp) + window)
        image, row, column = strip_place(u32(lane % 16 if lane % 16 < strips else 0))
        strip = i32((image * target_image + row * target_row) * WORD_BYTES + column * ELEMENT_BYTES)
        own_targets = u32(shared + targets_at + target_plane_of(warp) + strip)
        low, high = existing(i32(lane % 4 * 2)), existing(i32(lane % 4 * 2 + 8))

        # ---- tile by tile
        done = i32(min(i32(tiles), i32(tile_count - split * tiles)))
        for step in range(done):
            tile = place(u32(split * tiles + step))
            if step > 0:
                cuda.syncthreads()
            stage_x(shared, x, tile, first, thread)
            stage_dy(u32(shared + targets_at), dy, tile, first, thread)
            cuda.syncthreads()
            add_to_bands(sums, windows, own_targets, low, high)
        cuda.syncthreads()

        # ---- a tap is the sum along a diagonal
        bands = u32(shared + warp * bands_bytes)
        store_bands(sums, u32(bands + (lane // 4 * STRIP_COLUMNS + lane % 4 * 2) * SUM_BYTES))
        ptx.warp_barrier()
        for tap in range(lane, i32(taps), i32(32)):
            row = i32(tap // taps_w)
            column = i32(tap - row * taps_w)
            at = i32((row * band_rows + slack + column * column_step) * (STRIP_COLUMNS * SUM_BYTES))
            total = f32(0)
            for i in range(STRIP_COLUMNS):
                total = f32(total + ptx.load_shared_f32(u32(bands + at + i * ((STRIP_COLUMNS + 1) * SUM_BYTES))))
            if first + warp < channels:
                write(i32(first + warp), row, column, total, split, before, out)

    return kernel


def _blocks(workload: Workload[DepthwiseConv2dParams], choice: Mapping[str, Any]) -> StripBlocks:
    """A block has the tiles of a split."""
    blocks = blocks_of(workload, choice)
    return replace(blocks, tiles=-(-blocks.tile_count // choice["splits"]))


def _reduction(workload: Workload[DepthwiseConv2dParams], blocks: StripBlocks, splits: int) -> Reduction:
    """How the sums of splits come together."""
    patch = patch_of(workload, blocks)
    of_block = Blocks(patch, blocks.images, blocks.channels, blocks.block_channels, across=1, down=1, strip=1)
    return Reduction(of_block, Rounds(patch, filters=1), splits, atomic=False)


def _bands_bytes(blocks: StripBlocks) -> int:
    """Of shared memory, for the gradients of a channel's bands."""
    return blocks.down_reach.taps * blocks.steps * STEP_COLUMNS * STRIP_COLUMNS * SUM_BYTES


def _shared_bytes(blocks: StripBlocks) -> int:
    """Of the planes of x and dy, and later of the gradients of bands."""
    return max(blocks.sources.nbytes + blocks.targets.nbytes, blocks.block_channels * _bands_bytes(blocks))


def _used_registers(blocks: StripBlocks, k: Columns) -> Any:
    """Of a thread, about: its sums, the targets that a row of sources meets, two rows of windows, or pixels it stages."""
    staged = 2 * cuda_mma_text.pixel_words(blocks.sources) if blocks.channels_last else 0
    multiplying = 8 * blocks.steps + 2 * blocks.down_reach.extent
    return cuda_mma_text.band_sums(blocks) + max(multiplying, staged) + OTHER_REGISTERS


def cycles(workload: Workload[DepthwiseConv2dParams], target: Target, choice: Mapping[str, Any]) -> float:
    """Estimated cycles of a multiprocessor; see `cuda_mma.cycles`."""
    blocks, splits = _blocks(workload, choice), choice["splits"]
    at_once = resident(target, blocks.threads, choice["registers"], _shared_bytes(blocks))
    copied = sum(blocks.together * rows * columns for rows, columns in (blocks.sources.extents, blocks.targets.extents))
    loads = (blocks.height + blocks.down_reach.extent - 1) * blocks.steps + blocks.height // 2
    tile = tile_cycles(blocks, loads, copied, 2.0 * copied)
    products = blocks.height * blocks.down_reach.taps * blocks.steps
    once = (2 * LATENCY + 4 * loads + products * 8) / at_once
    waves = max(1.0, blocks.channel_blocks * splits / (target.sms * at_once))
    whole = -(-waves // 1) if waves < 4 else waves + 0.5
    start = (BLOCK_CYCLES + 2 * LATENCY) / at_once
    found = whole * at_once * (blocks.tiles * max(tile, once) + start)
    if splits > 1:
        workspace = 8 * splits * blocks.rows.taps * blocks.columns.taps * blocks.channels
        found += (SECOND_KERNEL_US + workspace / WORKSPACE_BYTES_A_US) * CYCLES_A_US
    return float(found)
