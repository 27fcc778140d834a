"""depthwise_conv2d on NVIDIA GPUs, y and dx: see docs/kernels/depthwise.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d.cuda_pixels import Blocks, Rounds, build_kernel, filter_pitch
from schedsearch.templates.depthwise_conv2d.cuda_pixels_staged import build_staged_kernel, filter_bytes
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    BUFFERS,
    MOST_EXACT_TAPS,
    STRIPS,
    Shape,
    candidates,
    derived_of,
    direction_problem,
    enough_registers,
    first_roomy,
    knobs_of,
    min_blocks,
    rules_of,
    size_problem,
    staged_bytes,
    stages_tiles,
    threads_of,
)
from schedsearch.templates.depthwise_conv2d.estimates import pixels_us
from schedsearch.templates.depthwise_conv2d.held import held_operands
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, Patch, arrays_of, filter_pieces
from schedsearch.templates.depthwise_conv2d.tiles import Tile, copied_bytes
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import BYTES, CONVERTING, epilogue_problem
from schedsearch.templates.parts.warm import channel_operands
from schedsearch.workload import Workload

MOST_STRIDE_SUMS = 128  # of dx: a patch has an integer of strides along both axes


class DepthwiseConv2dCuda(Template[DepthwiseConv2dParams]):
    """y and dx: a thread computes patches of pixels for a vector of channels, with all taps unrolled."""

    name = "depthwise_conv2d_cuda"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"
    added: ClassVar = {"buffers": 0}

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        p = workload.params
        if problem := direction_problem(workload, "forward", "grad_input") or size_problem(workload, target):
            return problem
        shape = Shape.of(workload)
        if (least := shape.rows.down * shape.columns.down) > MOST_STRIDE_SUMS:
            return f"a gradient's patch has the strides' product, {least}, elements; allowed: up to {MOST_STRIDE_SUMS}"
        if p.dtype not in INTEGERS:
            return epilogue_problem(workload)
        if p.r * p.s > MOST_EXACT_TAPS:
            return (
                f"filters of {p.r * p.s} taps; allowed: up to {MOST_EXACT_TAPS}, of which sums of products of "
                "8-bit numbers are exact in float32; conv2d with groups takes more"
            )
        dtypes = ("float16", "bfloat16", "float32", "int32", "uint32", *BYTES)
        return epilogue_problem(workload, dtypes=dtypes, converting=CONVERTING)

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape = Shape.of(workload)

        def blocks(k: Columns) -> Any:
            pixels = -(-shape.columns.targets // (k["columns"] * k["tile_w"])) * -(
                -shape.rows.targets // (k["rows"] * k["strip"] * k["tile_h"])
            )
            return -(-shape.channels // (k["channels"] * k["vector"])) * pixels * shape.images

        def shared_bytes(k: Columns) -> Any:
            filters = shape.filters * shape.rounds * shape.taps * filter_pitch(k["channels"] * k["vector"], k["vector"])
            tiles = k["buffers"] * staged_bytes(shape, k["rows"] * k["tile_h"], k["columns"] * k["tile_w"], k)
            return np.where(k["filters"] == "direct", 0, filters) + tiles

        derived = {
            **derived_of(shape),
            "shared_bytes": shared_bytes,
            "blocks": blocks,
            "waves": lambda k: blocks(k) * k["threads"] / (target.sms * target.threads_per_sm),
        }
        knobs = [
            *knobs_of(shape),
            Knob("strip", STRIPS, "patches of a thread, one after the other down the image"),
            Knob(
                "filters",
                ("shared", "direct") if shape.filters * shape.rounds == 1 else ("shared",),
                "shared: a block copies its filters to shared memory first; direct: each thread reads its own",
            ),
            Knob(
                "buffers",
                BUFFERS
                if stages_tiles(shape, target) and workload.params.dtype not in INTEGERS and shape.rounds == 1
                else (0,),
                "0: threads load their patches; more: a block stages the tile of its threads in shared memory, and those of "
                "its next patches while one is multiplied",
            ),
            Knob("border", ("test", "branch"), "test: every load is tested; branch: patches inside of the image are not"),
        ]
        strips = Constraint(
            "a strip is less than twice as long as the image",
            lambda k: (k["strip"] == 1) | (k["strip"] * k["rows"] * k["tile_h"] < 2 * shape.rows.targets),
        )
        staged = Constraint(
            "tiles are staged for patches of a strip, without tests of borders",
            lambda k: (k["buffers"] == 0) | ((k["buffers"] <= k["strip"]) & (k["border"] == "test")),
        )
        return ConfigSpace(knobs, [*rules_of(shape, target), strips, staged], derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The patch, the block and the strip with the least estimated time; see `estimates`."""
        shape = Shape.of(workload)

        def estimated(choice: dict[str, Any]) -> float:
            return pixels_us(shape, target, choice, int(space.derived["shared_bytes"](choice)))

        choices = (
            choice
            for patch in candidates(shape)
            for threads in (64, 128, 256)
            for choice in _configurations(shape, *patch, threads)
        )
        return first_roomy(space, target, iter(sorted(choices, key=estimated)))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One pixel of one channel a thread."""
        shape = Shape.of(workload)
        tile_h, tile_w = shape.rows.down, shape.columns.down
        return first_roomy(
            space,
            target,
            (each for threads in (128, 1) for each in _configurations(shape, 1, tile_h, tile_w, threads)),
        )

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        shape = Shape.of(workload)
        patch = Patch.of(workload, config["tile_h"], config["tile_w"], shape.tap_h, shape.tap_w, config["vector"])
        blocks = Blocks(
            patch, shape.images, shape.channels, config["channels"], config["columns"], config["rows"], config["strip"]
        )
        rounds = Rounds(patch, shape.filters)
        epilogue = Epilogue(workload, capability=target.compute_capability) if p.direction == "forward" else None
        source, to, weight = arrays_of(workload)
        before, direct, buffers = f"{to}_before", config["filters"] == "direct", config["buffers"]
        shared_bytes = 0 if direct else rounds.shared_bytes(blocks.block_channels)
        if buffers:
            kernel = build_staged_kernel(workload, blocks, rounds, epilogue, buffers, direct)
            shared_bytes = filter_bytes(blocks, rounds, direct) + buffers * Tile.of_sources(blocks).bytes
        else:
            kernel = build_kernel(workload, blocks, rounds, epilogue, config["border"] == "branch", direct)
        step = KernelStep(
            kernel,
            (
                Pointer(source), Pointer(weight), Pointer(before, optional=not p.accumulate), Pointer(to),
                *(epilogue.params if epilogue else ()),
            ),
            Grid(blocks.count),
            blocks.threads,
            shared_bytes,
            min_blocks_per_sm=min_blocks(target, config),
            ahead=(weight, *(channel_operands(workload) if held_operands(patch, epilogue) else ())),
        )  # fmt: skip
        read, written = patch.alignments
        if buffers:
            read = max(read, copied_bytes(blocks.channels, blocks.block_channels, patch.nbytes))
        alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature} | {source: read, to: written}
        if p.dtype in INTEGERS:  # y may have wider elements, which are stored in pieces
            alignments[to] = min(written * dtype_of(workload.output.dtype).nbytes, VECTOR_BYTES)
        if p.accumulate:
            alignments[before] = written
        if direct:
            neighbours = patch.vector if p.weight_layout in ("HWOI", "HWIO") else filter_pieces(patch)[0].length
            alignments[weight] = neighbours * patch.nbytes
        return KernelSource("cuda", "native", (step,), alignments=alignments)


def _configurations(shape: Shape, vector: int, tile_h: int, tile_w: int, threads: int) -> Iterator[dict[str, Any]]:
    """Configurations with this patch."""
    lanes, across, down = threads_of(shape, vector, tile_h, tile_w, threads)
    strips = -(-shape.rows.targets // (down * tile_h))
    choice = dict(vector=vector, tile_h=tile_h, tile_w=tile_w, channels=lanes, columns=across, rows=down, buffers=0)
    for strip in (n for n in (1, 2, 4) if strips % n == 0):
        for filters in ("direct", "shared") if shape.filters * shape.rounds == 1 else ("shared",):
            yield dict(**choice, registers=enough_registers(shape, choice), strip=strip, filters=filters, border="test")
