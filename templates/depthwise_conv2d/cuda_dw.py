"""depthwise_conv2d on NVIDIA GPUs, dw: see docs/kernels/depthwise.md."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d.cuda_pixels import SUM_BYTES, Blocks, Rounds
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    BUFFERS,
    LARGEST_SIZE,
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
from schedsearch.templates.depthwise_conv2d.cuda_weight import (
    REDUCE_THREADS,
    Reduction,
    build_kernel,
    build_reduce,
    build_start,
)
from schedsearch.templates.depthwise_conv2d.cuda_weight_staged import buffer_bytes, build_staged_kernel
from schedsearch.templates.depthwise_conv2d.estimates import filters_us
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, Patch
from schedsearch.templates.depthwise_conv2d.tiles import copied_bytes
from schedsearch.workload import Workload

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SUMS = "filter_sums"
TILE = 64  # pixels along each side of what a block covers at once, if it is large


class DepthwiseConv2dDwCuda(Template[DepthwiseConv2dParams]):
    """dw: blocks add up the products of patches of dy and x; a second kernel, or atomics, add up the blocks' results."""

    name = "depthwise_conv2d_dw_cuda"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"
    added: ClassVar = {"buffers": 0}

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        if problem := direction_problem(workload, "grad_weight") or size_problem(workload, target):
            return problem
        shape = Shape.of(workload)
        units = shape.images * -(-shape.rows.targets // TILE) * -(-shape.columns.targets // TILE)
        if units >= LARGEST_SIZE:
            return f"dy has {units} tiles of {TILE} x {TILE} pixels; allowed: less than 2**30, blocks count them in 32 bits"
        return None

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape = Shape.of(workload)

        def units(k: Columns) -> Any:
            across = -(-shape.columns.targets // (k["columns"] * k["tile_w"]))
            return across * -(-shape.rows.targets // (k["rows"] * k["tile_h"])) * shape.images

        def shared_bytes(k: Columns) -> Any:
            block_sums = shape.taps * k["vector"] * k["channels"]
            threads = k["channels"] * k["columns"] * k["rows"]
            parts = np.maximum(1, np.minimum(threads // block_sums, k["columns"] * k["rows"]))
            h, w = k["rows"] * k["tile_h"], k["columns"] * k["tile_w"]
            tiles = staged_bytes(shape, h, w, k) + h * w * k["channels"] * k["vector"] * shape.nbytes + VECTOR_BYTES
            sums = (shape.taps * k["vector"] * threads + block_sums * parts) * SUM_BYTES
            return np.maximum(sums, k["buffers"] * tiles)

        derived = {
            **derived_of(shape),
            "units": units,
            "shared_bytes": shared_bytes,
            "blocks": lambda k: -(-shape.channels // (k["channels"] * k["vector"])) * shape.rounds * k["splits"],
            "waves": lambda k: k["blocks"] * k["threads"] / (target.sms * target.threads_per_sm),
            "patches": lambda k: k["units"] / k["splits"],
        }
        combine = ("workspace",) if workload.params.deterministic else ("workspace", "atomic")
        knobs = [
            *knobs_of(shape),
            Knob(
                "buffers", BUFFERS if stages_tiles(shape, target) else (0,),
                "0: threads load their patches; more: a block stages the tile of its threads in shared memory, and further "
                "ones while one is multiplied",
            ),
            Knob("splits", SPLITS, "blocks that share channels; each adds up a part of the images"),
            Knob(
                "combine", combine,
                "workspace: a second kernel adds up the results of splits in order; atomic: they add to one result",
            ),
        ]  # fmt: skip
        rules = [
            *rules_of(shape, target),
            Constraint("a split has at least one patch of each thread", lambda k: k["splits"] <= k["units"]),
            Constraint("fewer than 2**30 parts of the images", lambda k: k["units"] < LARGEST_SIZE),
            Constraint("one split needs no atomics", lambda k: (k["splits"] > 1) | (k["combine"] == "workspace")),
        ]
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The patch, the block and the splits with the least estimated time; see `estimates`."""
        shape = Shape.of(workload)

        def estimated(choice: dict[str, Any]) -> float:
            return filters_us(shape, target, choice, int(space.derived["shared_bytes"](choice)))

        choices = (
            choice
            for patch in candidates(shape)
            for threads in (64, 128, 256, 512)
            for buffers in ((0, 2) if stages_tiles(shape, target) else (0,))
            for choice in _configurations(shape, target, *patch, threads, buffers)
        )
        return first_roomy(space, target, iter(sorted(choices, key=estimated)))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One pixel of one channel at a time."""
        shape = Shape.of(workload)
        return first_roomy(
            space, target, (each for threads in (128, 1) for each in _configurations(shape, target, 1, 1, 1, threads))
        )

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        reduction = reduction_of(workload, config)
        blocks, element = reduction.blocks, dtype_of(p.dtype).nbytes
        before = Pointer("dw_before", optional=not p.accumulate)
        alone, in_place = reduction.splits == 1, reduction.atomic and p.dtype == "float32"
        out = Pointer("dw" if alone or in_place else SUMS)
        steps, workspaces = [], {}
        if out.buffer == SUMS:
            workspaces[SUMS] = (1 if reduction.atomic else reduction.splits) * reduction.filter_elements * SUM_BYTES
        if reduction.atomic:
            start = build_start(workload, reduction.filter_elements)
            grid = Grid(-(-reduction.filter_elements // REDUCE_THREADS))
            steps.append(KernelStep(start, (before, out), grid, REDUCE_THREADS))
        build, shared_bytes, (of_x, of_dy) = build_kernel, reduction.shared_bytes, blocks.patch.alignments
        if buffers := config["buffers"]:
            build = functools.partial(build_staged_kernel, buffers=buffers)
            shared_bytes = max(shared_bytes, buffers * buffer_bytes(blocks))
            of_x = of_dy = max(of_x, copied_bytes(blocks.channels, blocks.block_channels, element))
        steps.append(
            KernelStep(
                build(workload, reduction), (Pointer("x"), Pointer("dy"), before, out), Grid(reduction.count),
                blocks.threads, shared_bytes, min_blocks_per_sm=min_blocks(target, config),
            )
        )  # fmt: skip
        if out.buffer == SUMS:
            reduce = build_reduce(workload, reduction)
            parameters = (out, before, Pointer("dw"))
            shared = REDUCE_THREADS * SUM_BYTES
            steps.append(KernelStep(reduce, parameters, Grid(reduction.reduce_blocks), REDUCE_THREADS, shared))
        alignments = {arg.name: element for arg in (*workload.signature, workload.output)} | {"x": of_x, "dy": of_dy}
        return KernelSource("cuda", "native", tuple(steps), workspaces, alignments)


def reduction_of(workload: Workload[DepthwiseConv2dParams], config: Config) -> Reduction:
    """How the sums of one configuration come together."""
    shape = Shape.of(workload)
    patch = Patch.of(workload, config["tile_h"], config["tile_w"], shape.tap_h, shape.tap_w, config["vector"])
    blocks = Blocks(patch, shape.images, shape.channels, config["channels"], config["columns"], config["rows"], strip=1)
    return Reduction(blocks, Rounds(patch, filters=1), config["splits"], config["combine"] == "atomic")


def _configurations(
    shape: Shape, target: Target, vector: int, tile_h: int, tile_w: int, threads: int, buffers: int = 0
) -> Iterator[dict[str, Any]]:
    """Configurations with this patch: with splits for a part of what the device runs at once, for all of it or for twice as
    much."""
    lanes, across, down = threads_of(shape, vector, tile_h, tile_w, threads)
    others = -(-shape.channels // (lanes * vector)) * shape.rounds
    units = -(-shape.columns.targets // (across * tile_w)) * -(-shape.rows.targets // (down * tile_h)) * shape.images
    choice = dict(vector=vector, tile_h=tile_h, tile_w=tile_w, channels=lanes, columns=across, rows=down, buffers=buffers)
    enough = enough_registers(shape, choice)
    at_once = min(target.registers_per_sm // enough, target.threads_per_sm) // (lanes * across * down) * target.sms
    wanted = [1, *(at_once * share // others for share in (0.25, 0.5, 1, 2))]
    for splits in sorted({max(n for n in SPLITS if n == 1 or n <= min(units, 1.25 * most)) for most in wanted}):
        yield dict(**choice, registers=enough, splits=splits, combine="workspace")
