"""conv2d on Hopper's tensor cores that loads each pixel once per tile, not once per tap: for kernels beyond 1x1, and groups.

This module has the supported workloads, the knobs, the tensor maps and the launch. `halo_kernel.py` has the kernel and
explains how it computes. `halo_sizes.py` has the sizes that the knobs give. docs/kernels/conv2d_halo.md explains each knob.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.geometry import channel_order
from schedsearch.templates.conv2d.geometry import problem as wgmma_problem
from schedsearch.templates.conv2d.halo_kernel import SHAPED_BY, build_kernel
from schedsearch.templates.conv2d.halo_sizes import (
    MAX_BOX,
    MAX_ELEMENT_STRIDE,
    MAX_GROUPS,
    MAX_MERGED_TAPS,
    MAX_POSITIONS,
    WGMMA_CHANNELS,
    Geometry,
    chunk_channels,
    derived_quantities,
    evaluate,
    loads_residual,
    mergeable,
    overhead_registers,
    shuffle_problem,
    split_ks,
    stages_y,
    store_segment,
    units,
    usable_tiles,
    weight_piece,
)
from schedsearch.templates.conv2d.halo_split import SHAPED_BY as SPLIT_SHAPED_BY
from schedsearch.templates.conv2d.halo_split import build_split_kernel
from schedsearch.templates.conv2d.maps import L2_PROMOTION_BYTES, filter_map, ordered_filter_map, pixel_map, shuffled_map
from schedsearch.templates.parts import hopper
from schedsearch.templates.parts.choosing import least_predicted
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES
from schedsearch.templates.parts.warm import channel_operands
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint
from schedsearch.workload import Workload

MAX_PIXELS = 2**31 - 1

PATCHES = (1, 2, 3, 4, 6)
WEIGHT_STAGES = (0, 2, 3, 4, 6, 8, 12)
BLOCKS_PER_SM = (1, 2, 3)


class Conv2dHalo(Template[Conv2dParams]):
    """conv2d for compute capability 9.0, R * S > 1 or groups: floats of 16 and 8 bits, TF32, int8 and uint8."""

    name = "conv2d_halo"
    version = 5
    op = "conv2d"
    kind = "cuda"
    added: ClassVar = {"split_k": 1}

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if reason := wgmma_problem(
            workload, target, every_dtype=True, takes_groups=True, shuffles=True, slices=True, staged=("residual",)
        ):
            return reason
        if workload.output.slice_of and not stages_y(workload):
            return f"y is a slice of {w.out_dtype}; allowed: outputs of 2 bytes or 1, which are stored by TMA"
        if loads_residual(workload) and dtype_of(w.out_dtype).nbytes != 2:
            return f"the residual has 16 bits and y is {w.out_dtype}; allowed: 16 bits both, or a residual of 32 bits"
        if reason := shuffle_problem(workload):
            return reason
        if w.r * w.s == 1 and w.groups == 1:
            return "the kernel is 1x1 and groups is 1; allowed: larger kernels, or groups (one tap shares no pixels)"
        if max(w.stride) > MAX_ELEMENT_STRIDE:
            return f"stride is {w.stride}; allowed: 1 to {MAX_ELEMENT_STRIDE}, TMA's element strides"
        if not mergeable(workload):
            allowed = " and ".join(map(str, sorted({*units(workload)})))
            return (
                f"{w.groups} groups have {w.c // w.groups} input and {w.k // w.groups} output channels each, and "
                f"{w.r * w.s} taps; allowed: multiples of {allowed} channels, or with up to {MAX_MERGED_TAPS} taps those of "
                f"which several groups make such multiples, up to {chunk_channels(workload)} and {WGMMA_CHANNELS}; "
                "conv2d_mma takes all"
            )
        pixels = math.prod(workload.output.shape[:3])
        if pixels > MAX_PIXELS - MAX_BOX**2:
            return f"the output has {pixels} pixels; allowed: less than 2**31 - 2**16, they are counted in 32 bits"
        if not usable_tiles(workload, target):
            geometry = Geometry.of(workload, min(mergeable(workload)))
            return (
                f"the kernel reaches over (size - 1) * dilation / stride = {geometry.halo_h} x {geometry.halo_w} pixels of "
                f"{geometry.phases} phases; allowed: what fits {MAX_BOX} x {MAX_BOX} pixels and "
                f"{target.shared_bytes_per_block} bytes of shared memory"
            )
        return None

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        w, merges = workload, mergeable(workload)
        geometry, outputs = Geometry.of(workload, min(merges)), w.params.k // w.params.groups
        tiles = usable_tiles(w, target)
        least_positions = min(64, max(tiles.values()))
        unit = Wgmma(w.params.dtype).column_unit
        channel_groups = math.ceil(outputs / WGMMA_CHANNELS)

        def tiles_of(q: Columns) -> Any:
            """Tiles that a block computes one after the other."""
            return np.where(q["split_k"] == 1, q["waves"], 1)

        knobs = (
            Knob("tile_h", tuple(sorted({h for h, _ in tiles})), "rows of output pixels that a consumer warpgroup computes"),
            Knob("tile_w", tuple(sorted({w for _, w in tiles})), "output pixels of such a row"),
            Knob("channel_groups", tuple(range(1, min(channel_groups, MAX_GROUPS) + 1)),
                 "warpgroups side by side, each 64 output channels of the same pixels"),
            Knob("row_groups", tuple(range(1, MAX_GROUPS + 1)), "warpgroups one below the other, or taking turns"),
            Knob("schedule", ("together", "in_turn"),
                 "together: row groups share a tile and its patch; in_turn: each takes the block's next tile, so that one "
                 "stores while another multiplies"),
            Knob("patches", PATCHES, "patches of x (tile and halo, 128 bytes of a pixel), loaded ahead or being multiplied"),
            Knob("weight_stages", WEIGHT_STAGES if 1 in merges else WEIGHT_STAGES[:1],
                 "taps of weights that are loaded ahead or being multiplied; 0: all weights stay in shared memory"),
            Knob("blocks_per_sm", BLOCKS_PER_SM, "blocks that share a multiprocessor: one stores while another multiplies"),
            *(Knob("merged", merges, "neighbouring groups that are merged into one, with zero weights between them"),)
            * (len(merges) > 1),
            Knob("split_k", split_ks(workload, target),
                 "blocks of a cluster that share a tile, each with a part of the input channels or of the taps"),
        )  # fmt: skip
        constraints = (
            Constraint(
                f"positions of a wgmma, ((tile_h - 1) * patch_w + tile_w) rounded up to {unit}, from {least_positions} "
                f"to {MAX_POSITIONS}",
                lambda q: (q["positions"] >= least_positions) & (q["positions"] <= MAX_POSITIONS),
            ),
            Constraint(
                f"a patch, times the stride, has at most {MAX_BOX} rows of {MAX_BOX} pixels, TMA's box",
                lambda q: (q["patch_w"] * w.params.stride[1] <= MAX_BOX) & (q["patch_h"] * w.params.stride[0] <= MAX_BOX),
            ),
            Constraint(f"at most {MAX_GROUPS} consumer warpgroups", lambda q: q["warpgroups"] <= MAX_GROUPS),
            Constraint(
                "warpgroups in turn: two or more, of 64 output channels, and all weights in shared memory",
                lambda q: (
                    (q["schedule"] == "together")
                    | ((q["row_groups"] > 1) & (q["channel_groups"] == 1) & (q["weight_stages"] == 0))
                ),
            ),
            Constraint(
                "split_k is 1, or warpgroups work together, weights are loaded ahead, and half as many blocks would leave "
                "multiprocessors idle",
                lambda q: (q["split_k"] == 1) | ((q["schedule"] == "together") & (q["weight_stages"] > 0)
                    & (q["tiles"] * q["split_k"] < 2 * target.sms * q["blocks_per_sm"])),
            ),
            Constraint(
                "accumulators and the sums of a split tile fit a thread's share of the register file",
                lambda q: (q["split_k"] == 1)
                    | ((q["positions"] + q["own_positions"]) // 2 + overhead_registers(w) <= q["registers"]),
            ),
            Constraint("merged weights stay", lambda q: (q["merged"] == 1) | (q["weight_stages"] == 0)),
            *hopper.block_constraints(target, "positions", overhead_registers(w)),
            Constraint(
                "every warpgroup has rows inside the output",
                lambda q: (q["schedule"] == "in_turn") | (q["tile_h"] * (q["row_groups"] - 1) < geometry.out_h),
            ),
            Constraint("every warpgroup has channels inside the output",
                       lambda q: WGMMA_CHANNELS * (q["channel_groups"] - 1) < q["merged"] * outputs),
            Constraint("a tile for each warpgroup in turn, and a patch", lambda q: (q["turns"] <= q["waves"])
                       & (q["turns"] <= q["patches"])),
            Constraint("at most as many patches as a block loads", lambda q: q["patches"] <= q["own_chunks"] * tiles_of(q)),
            Constraint(
                "at most as many stages of weights as a block loads; 2 are always allowed",
                lambda q: q["weight_stages"] <= np.maximum(2, q["own_taps"] * q["own_chunks"] * tiles_of(q)),
            ),
            Constraint(
                "another block per multiprocessor only if there are tiles for it",
                lambda q: (q["blocks_per_sm"] == 1)
                | (q["tiles"] * q["split_k"] > target.sms * (q["blocks_per_sm"] - 1)),
            ),
        )  # fmt: skip
        return ConfigSpace(knobs, constraints, derived_quantities(workload, target))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The configuration with the least predicted time; among equals, the fewest threads and the most patches.

        No block shares its tile: the prediction of that has not been compared with times.
        """
        alone = space.restrict({"split_k": [1]})
        return least_predicted(alone, lambda q: (q["threads"], -q["patches"], -q["weight_stages"]))

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        plan = evaluate(workload, target, config)
        geometry = Geometry.of(workload, plan.merged)
        zero = ZeroPoint.of(workload)
        epilogue = Epilogue(workload, zero.params) if zero else Epilogue(workload)
        shuffle = pixel_shuffle(workload.params.epilogue, workload.params.k)
        output: Param = Pointer("y")
        epilogue_params = epilogue.params
        alignments = {**dict.fromkeys(("x", "weight", "y"), ALIGNMENT_BYTES), **epilogue.alignments}
        if geometry.merged > 1:
            alignments["weight"] = weight_piece(workload) * dtype_of(workload.params.weight_dtype).nbytes
        if stages_y(workload):
            output = pixel_map("y", workload, WGMMA_CHANNELS, plan.tile_w, 1, groups=geometry.groups)
            if shuffle:
                output = shuffled_map(workload, shuffle, geometry.out_w, store_segment(workload), plan.tile_w)
        if loads_residual(workload):
            residual = pixel_map("residual", workload, WGMMA_CHANNELS, plan.tile_w, 1, groups=geometry.groups)
            epilogue_params = tuple(residual if p == Pointer("residual") else p for p in epilogue_params)
            alignments["residual"] = ALIGNMENT_BYTES
        chunk = geometry.chunk
        image = pixel_map(
            "x", workload, chunk, plan.patch_w, plan.patch_h, groups=geometry.groups, stride=workload.params.stride
        )
        weights: Param = Pointer("weight")
        if geometry.merged == 1:
            weights = filter_map(workload, plan.bn, chunk, L2_PROMOTION_BYTES)
            if order := channel_order(shuffle):
                weights = ordered_filter_map(workload, order, plan.bn, chunk, L2_PROMOTION_BYTES)
        grid = Grid(plan.tiles, plan.blocks_per_sm)
        if plan.column_blocks and plan.column_tiles > 1:  # the same number for each column, on any card
            grid = Grid(plan.column_tiles * plan.column_blocks)
        if plan.split_k > 1:
            grid = Grid(plan.tiles * plan.split_k)
        step = KernelStep(
            (build_split_kernel if plan.split_k > 1 else build_kernel)(workload, plan, epilogue, zero),
            (image, weights, output, *epilogue_params),
            grid,
            plan.threads,
            plan.shared_bytes,
            cluster=plan.split_k,
            min_blocks_per_sm=plan.blocks_per_sm,
            shaped_by=SPLIT_SHAPED_BY if plan.split_k > 1 else SHAPED_BY,
            ahead=("weight", *channel_operands(workload)),
        )
        if zero is None:
            return KernelSource("cuda", "sm_90a", (step,), alignments=alignments)
        return KernelSource("cuda", "sm_90a", (zero.step(), step), zero.workspaces, {**alignments, **zero.alignments})
