"""depthwise_conv2d on the tensor cores of NVIDIA GPUs, y and dx of large filters: see docs/kernels/depthwise.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d.cuda_mma_kernel import build_kernel, patch_of
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
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import STRIP_COLUMNS, StripBlocks
from schedsearch.templates.depthwise_conv2d.cuda_mma_text import band_words, pixel_words
from schedsearch.templates.depthwise_conv2d.cuda_space import OTHER_REGISTERS, Shape, first_roomy
from schedsearch.templates.depthwise_conv2d.estimates import BLOCK_CYCLES, LATENCY
from schedsearch.templates.depthwise_conv2d.held import held_operands
from schedsearch.templates.depthwise_conv2d.patches import arrays_of
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.templates.parts.warm import channel_operands
from schedsearch.workload import Workload

EACH = (1, 2)
TILES = (1, 2, 4, 8)


class DepthwiseConv2dMma(Template[DepthwiseConv2dParams]):
    """y and dx in 16 bits: rows of the filter as band matrices, multiplied by windows of 16 columns on tensor cores."""

    name = "depthwise_conv2d_mma"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        return filter_problem(workload, target, _shared_bytes, "forward", "grad_input") or epilogue_problem(workload)

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape, least = Shape.of(workload), least_blocks(workload)
        derived = derived_of_strips(
            workload,
            target,
            _shared_bytes,
            threads=lambda k: 32 * k["channels"] // k["each"],
            used_registers=lambda k: _used_registers(least, k),
            blocks=lambda k: -(-shape.channels // k["channels"]) * -(-k["tile_count"] // k["tiles"]),
        )
        knobs = [
            *knobs_of_strips(),
            Knob("each", EACH, "channels of a warp, one after the other"),
            Knob("tiles", TILES, "tiles of a block, one after the other; it has the filters in registers meanwhile"),
        ]
        tiles = Constraint(
            "a block has fewer tiles than there are twice", lambda k: (k["tiles"] == 1) | (k["tiles"] < 2 * k["tile_count"])
        )
        return ConfigSpace(knobs, [*rules_of_strips(shape, target), tiles], derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the least estimated time. No card has measured the estimate."""
        least = least_blocks(workload)
        choices = choices_of(workload, lambda k: _used_registers(least, k), each=EACH, tiles=(1, 4))
        ranked = sorted(choices, key=lambda choice: cycles(workload, target, choice))
        return first_roomy(space, target, iter([*ranked, *least_choices(each=1, tiles=1)]))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One strip of two rows for each warp."""
        return first_roomy(space, target, least_choices(each=1, tiles=1))

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        p, blocks = workload.params, blocks_of(workload, config)
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
            _shared_bytes(blocks),
            min_blocks_per_sm=resident(target, blocks.threads, config["registers"]),
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


def _shared_bytes(blocks: StripBlocks) -> int:
    return blocks.sources.nbytes


def _used_registers(blocks: StripBlocks, k: Columns) -> Any:
    """Of a thread, about: its sums, its bands, two rows of windows, or pixels that it stages."""
    windows = 8 * blocks.steps
    staged = 2 * pixel_words(blocks.sources) if blocks.channels_last else 0
    return 4 * k["height"] + k["each"] * band_words(blocks) + max(windows, staged) + OTHER_REGISTERS


def cycles(workload: Workload[DepthwiseConv2dParams], target: Target, choice: Mapping[str, Any]) -> float:
    """Estimated cycles of a multiprocessor: its blocks' products, instructions and bytes hide one another."""
    blocks = blocks_of(workload, choice)
    at_once = resident(target, blocks.threads, choice["registers"], _shared_bytes(blocks))
    rows, columns = blocks.sources.extents
    staged, results = blocks.together * rows * columns, blocks.strips * blocks.height * STRIP_COLUMNS
    loads = (blocks.height + blocks.down_reach.extent - 1) * blocks.steps
    tile = tile_cycles(blocks, loads, staged + results, 2.0 * (staged + results), 8 * blocks.height)
    products = blocks.height * blocks.down_reach.taps * blocks.steps
    once = (2 * LATENCY + blocks.each * (4 * loads + products * 8)) / at_once  # of a tile, while other blocks work
    waves = max(1.0, blocks.count / (target.sms * at_once))
    whole = -(-waves // 1) if waves < 4 else waves + 0.5
    start = (BLOCK_CYCLES + 2 * LATENCY) / at_once + 2 * blocks.block_channels * band_words(blocks)
    return whole * at_once * (blocks.tiles * max(tile, once) + start)
