"""conv2d on Hopper's tensor cores: NHWC x OHWI as an implicit GEMM, fed by TMA, multiplied by wgmma.

A tile of y is bm pixels x bn output channels; a k step is `bk` input channels of one tap. A block has

- a producer warpgroup, one thread of which loads pixels into a ring of `stages` (`pipeline`), and another one weights;
- `warpgroups` of 64 rows each, which multiply, apply the epilogue and store (`store`).

With split_k > 1 the blocks of a cluster share a tile. Each multiplies its part of the k steps, sends the others its sums of
their columns, and adds up all sums of its own columns in a fixed order, so that results are deterministic.

With cluster_m x cluster_n > 1 a cluster has neighbouring tiles, cluster_m rows of cluster_n. Blocks in a row need the same
x, those in a column the same weights; each loads a part of both and multicasts it to its row or column (`sharing`). `empty`
therefore counts the consumers of every block that this one multicasts to. Tiles past the end are computed but not stored;
skipping them would deadlock the blocks that expect their share of the loads.

With both, a cluster has split_k blocks for each of its tiles, and blocks with the same part of the k steps share loads.

With schedule in_turn, each half of the consumer groups takes every other tile of a block: one half stores while the other
multiplies. The ring is filled tile after tile, which gives the halves their turns.

Channels past C read as zero in both operands; rows past M and columns past K are not stored. No size therefore has to divide
another. Channels of y that are no multiple of 8 leave through shared memory without TMA (`store_rows`, `store_chunks`).
docs/kernels/conv2d_wgmma.md explains more, including the use of each knob.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.conv2d import geometry
from schedsearch.templates.conv2d.geometry import Im2col, stores_by_tma, stores_rows
from schedsearch.templates.conv2d.maps import blocked_filter_map, filter_map, image_map, ordered_filter_map, output_map
from schedsearch.templates.conv2d.weight_rows import ROWS, WeightRows
from schedsearch.templates.conv2d.wgmma_loads import load_of, own_part_of, tile_origin
from schedsearch.templates.conv2d.wgmma_sizes import (
    GROUP_ROWS,
    ROW_STORES,
    Plan,
    block_constraint,
    column_blocks,
    derived_quantities,
    evaluate,
    output_of,
    store_columns,
    useful_bks,
)
from schedsearch.templates.conv2d.wgmma_store import FragmentCorrections, add_up_of, finish_of, rows_of
from schedsearch.templates.parts import cluster, hopper, pipeline, ptx, store, walk
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.choosing import least_predicted
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.grids import PERSISTENT_DOC
from schedsearch.templates.parts.hopper import (
    ALIGNMENT_BYTES,
    BARRIER_BYTES,
    SWIZZLE_ROWS,
    WARPGROUP,
)
from schedsearch.templates.parts.prepared import over_workspaces
from schedsearch.templates.parts.sharing import ClusterTiles
from schedsearch.templates.parts.stages import reads_bytes
from schedsearch.templates.parts.store_chunks import StagedChunks
from schedsearch.templates.parts.store_rows import StagedRows
from schedsearch.templates.parts.warm import channel_operands, warm_operands
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.window_sums import WindowSums
from schedsearch.workload import Workload

# Registers of a consumer thread besides its bn/2 accumulators (addresses, descriptors, temporaries), and with an epilogue.
OVERHEAD_REGISTERS = (32, 48)

# Captured values that Numba must know; see `KernelStep.shaped_by`.
SHAPED_BY = frozenset({
    "accumulators", "array_ahead", "by_tma", "finish.words_ahead", "in_turn", "initialise.split_k",
    "load.load_pixels.multicasts", "own_sums", "split_k", "words_ahead",
})  # fmt: skip

SHORT_STEPS, SHORT_RING = 2, 4  # k steps of a short reduction, and the stages that it needs

# Knobs in records of earlier versions: see `Template.renamed`.
RENAMED: Renamed = {
    "consumer_groups": "warpgroups",
    "group_m": "band",
    "grid": {"persistent": {"persistent": True}, "split": {"persistent": False}},
}

GROUPS = (1, 2, 3, 4)
BNS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
STAGES = tuple(range(2, 13))
BLOCKS_PER_SM = (1, 2, 3)
WIDEST_WITH_WORDS = 224  # that leaves registers for what is loaded ahead of an operand like y
SPLIT_KS = (1, 2, 4, 8)
CLUSTER_SIDES = (1, 2, 4)
MAX_CLUSTER = 8  # blocks that every device takes


class Conv2dWgmma(Template[Conv2dParams]):
    """conv2d for compute capability 9.0: floats of 16 and 8 bits and TF32 with sums in fp32, int8 and uint8 with int32."""

    name = "conv2d_wgmma"
    version = 7
    op = "conv2d"
    kind = "cuda"
    renamed = RENAMED

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        reason = geometry.problem(
            workload, target, every_dtype=True, takes_blocks=True, shuffles=True, slices=True, weight_zero_point=True,
            any_k=True, x_slices=True,
        )  # fmt: skip
        if reason:
            return reason
        gemm = Im2col.of(workload)
        if gemm.shuffle and gemm.out_w % SWIZZLE_ROWS:
            return (
                f"rows of {gemm.out_w} output pixels before depth_to_space; allowed: multiples of {SWIZZLE_ROWS}, TMA's "
                "addresses in shared memory are of 128 bytes"
            )
        return gemm.problem(max_tile_rows=GROUP_ROWS * max(GROUPS))

    def space(self, workload: Workload[Conv2dParams], target: Target, gemm: Im2col | None = None) -> ConfigSpace:
        """The configurations; x and y lie in memory as `gemm` says, or else as the workload's layout says."""
        w = workload = _merged(workload)
        gemm = gemm or Im2col.of(workload)
        group_columns = w.params.k // w.params.groups
        columns = max(SWIZZLE_ROWS, store_columns(w))
        smallest_covering_k = min((bn for bn in BNS if bn >= group_columns), default=max(BNS))
        widest = min(smallest_covering_k, WIDEST_WITH_WORDS if reads_bytes(w) else max(BNS))
        most_row_tiles = gemm.row_tiles(GROUP_ROWS)
        fewest_tiles = gemm.row_tiles(GROUP_ROWS * max(GROUPS)) * math.ceil(w.params.k / smallest_covering_k)
        bks = useful_bks(gemm.channels if gemm.x.plain else gemm.x.size, w.params.dtype)
        most_k_steps = gemm.taps * gemm.channel_steps(min(bks))
        split_ks = [
            split_k
            for split_k in SPLIT_KS
            if split_k == 1 or (most_k_steps >= 2 * split_k and fewest_tiles * split_k < 2 * target.sms * max(BLOCKS_PER_SM))
        ]
        cluster_ms = [m for m in CLUSTER_SIDES if m <= most_row_tiles and gemm.fits(m * GROUP_ROWS * max(GROUPS))]
        cluster_ns = [n for n in CLUSTER_SIDES if n <= math.ceil(w.params.k / min(BNS))]
        bands = [1] if w.params.k <= min(BNS) else [g for g in (1, 2, 4, 8, 16, 64, 256) if g < 2 * most_row_tiles]
        knobs: tuple[Knob, ...] = (
            Knob("warpgroups", GROUPS, "warpgroups that multiply, each 64 rows (output pixels) of its tile"),
            Knob(
                "schedule",
                ("together", "in_turn"),
                "together: groups share a tile; in_turn: each half takes the block's next tile, so that one half stores "
                "while the other multiplies",
            ),
            Knob("bn", tuple(bn for bn in BNS if bn <= widest), "columns (output channels) of a tile"),
            Knob("bk", bks, "input channels of a k step; more is faster, less wastes less of the last step"),
            Knob("stages", STAGES, "k steps that are loaded ahead or being multiplied"),
            Knob(
                "split_k",
                tuple(split_ks),
                "blocks of a cluster that share a tile's k steps and add up their sums; helps if there are few tiles",
            ),
            Knob(
                "cluster_m",
                tuple(cluster_ms),
                "row tiles of a cluster; blocks with the same columns share weights; helps if L2 is the bound",
            ),
            Knob("cluster_n", tuple(cluster_ns), "column tiles of a cluster; blocks with the same rows share pixels"),
            Knob("persistent", (True, False), PERSISTENT_DOC),
            Knob("blocks_per_sm", BLOCKS_PER_SM, "blocks that share a multiprocessor: one stores while another multiplies"),
            Knob(
                "band",
                tuple(bands),
                "raster order: row tiles (of clusters) walked before the next column tile; for reuse in L2",
            ),
            Knob("l2_promotion", (128, 256), "bytes that L2 fetches from memory when a load misses"),
        )
        if stores_rows(w):
            doc = "how rows leave that TMA cannot store: units of 1, 2 or 4 channels, or chunks of 16 bytes and what is left"
            knobs += (Knob("row_store", ROW_STORES, doc),)
        constraints = (
            *hopper.block_constraints(target, "bn", OVERHEAD_REGISTERS[bool(w.params.epilogue)]),
            Constraint("every consumer group has rows inside the output", lambda q: q["bm"] < gemm.image_rows + GROUP_ROWS),
            Constraint(
                "at most as many stages as a block runs k steps; 2 are always allowed",
                lambda q: q["stages"] <= np.maximum(2, q["block_steps"] * np.where(q["persistent"], q["waves"], 1)),
            ),
            Constraint(
                "groups in turn: an even number of groups, and a persistent grid",
                lambda q: (q["turns"] == 1) | ((q["warpgroups"] % 2 == 0) & q["persistent"]),
            ),
            Constraint(
                "split_k is 1 or leaves each block at least 2 k steps, without a persistent grid",
                lambda q: (q["split_k"] == 1) | ((q["k_steps"] >= 2 * q["split_k"]) & ~q["persistent"]),
            ),
            Constraint(
                "split_k is 1 or half of it would leave multiprocessors idle",
                lambda q: (q["split_k"] == 1) | (q["blocks"] < 2 * target.sms * q["blocks_per_sm"]),
            ),
            *_cluster_constraints(columns),
            Constraint(
                "a persistent grid has more tiles than resident blocks",
                lambda q: ~q["persistent"] | (q["blocks"] > target.sms * q["blocks_per_sm"]),
            ),
            Constraint(
                "another block per multiprocessor only if there is work for it",
                lambda q: (q["blocks_per_sm"] == 1) | (q["blocks"] > target.sms * (q["blocks_per_sm"] - 1)),
            ),
            Constraint(
                "band is 1 with one column of clusters, and less than twice the rows of clusters",
                lambda q: (q["band"] == 1) | ((q["cluster_columns"] > 1) & (q["band"] < 2 * q["cluster_rows"])),
            ),
        )
        if gemm.groups > 1:
            constraints += (
                Constraint(
                    "the columns of a tile, and those of the tiles that share pixels, divide the output channels of a group",
                    lambda q: group_columns % (q["bn"] * q["cluster_n"]) == 0,
                ),
            )
        constraints += tuple(block_constraint(w, block) for block in column_blocks(gemm))
        return ConfigSpace(knobs, constraints, derived_quantities(workload, target, gemm))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The configuration with the least predicted time; among equals, the smallest cluster and the deepest ring.

        Short reductions with 8-bit results take a ring of about 4 stages instead.
        """
        bands = [int(value) for value in space.knobs[space.names.index("band")].values]
        band = min(bands, key=lambda value: abs(value - 8))  # 1 is the only value with one column tile
        # 256 gains at most 2 %, and loses up to 17 % if pixels are not a multiple of 128 bytes.
        few = {"l2_promotion": [128], "band": sorted({1, band})}
        of_8_bits = store.interleaved(workload.params.out_dtype)

        def ties(q: Columns) -> tuple[Any, ...]:
            # Rings of 8 and 12 stages took 2 to 11 % longer than 4 for 32x56x56x64 -> 256 in int8.
            short = of_8_bits & (q["block_steps"] <= SHORT_STEPS)
            return q["cluster"], np.where(short, np.abs(q["stages"] - SHORT_RING), -q["stages"]), q["threads"], -q["band"]

        return least_predicted(space.restrict(few), ties)

    def kernel(
        self, workload: Workload[Conv2dParams], target: Target, config: Config, gemm: Im2col | None = None
    ) -> KernelSource:
        """The kernel; x and y lie in memory as `gemm` says, or else as the workload's layout says.

        With a zero point of the weight x lies as the layout says.
        """
        source, windows = self.without_window_sums(workload, target, config, gemm), WindowSums.of(workload)
        return windows.before(source) if windows else source

    def without_window_sums(
        self, workload: Workload[Conv2dParams], target: Target, config: Config, gemm: Im2col | None = None
    ) -> KernelSource:
        """The same for templates that move x to a workspace, where it may lie differently.

        If the weight has a zero point, they add the step that reads x where it was, by `WindowSums.before`.
        """
        merged, corrections, given = geometry.merged_groups(workload), FragmentCorrections.of_workload(workload), workload
        workload = _merged(workload)
        gemm = gemm or Im2col.of(workload)
        plan = evaluate(workload, target, config, gemm)
        epilogue = Epilogue(workload, corrections.params) if corrections.params else Epilogue(workload)
        image = image_map(workload, gemm, plan.bm // plan.cluster_n, plan.bk, plan.l2_promotion)
        own_filters = plan.bn // plan.cluster_m
        if gemm.order:
            weights = ordered_filter_map(workload, gemm.order, own_filters, plan.bk, plan.l2_promotion)
        elif gemm.filter_block:
            weights = blocked_filter_map(workload, own_filters, plan.bk, plan.l2_promotion)
        else:
            sets = gemm.images if gemm.own_weights else 1
            weights = filter_map(workload, own_filters, plan.bk, plan.l2_promotion, sets)
        output: Param = Pointer("y")
        if stores_by_tma(workload):
            output = output_map(workload, output_of(gemm, plan.bm), plan.segment, GROUP_ROWS)
        rows = rows_of(workload, plan)
        step = KernelStep(
            build_kernel(workload, gemm, plan, epilogue, corrections),
            (image, weights, output, *epilogue.params),
            Grid(plan.blocks, plan.blocks_per_sm if plan.persistent else 0),
            plan.threads,
            plan.shared_bytes,
            cluster=plan.cluster,
            min_blocks_per_sm=plan.blocks_per_sm,
            shaped_by=SHAPED_BY - {"finish.words_ahead"} | _row_arrays(rows) if rows else SHAPED_BY,
            ahead=(*channel_operands(workload), *(() if gemm.own_weights else ("weight",))),
        )
        alignments = {"x": ALIGNMENT_BYTES, "weight": ALIGNMENT_BYTES, "y": ALIGNMENT_BYTES, **epilogue.alignments}
        if rows:
            alignments |= rows.alignments(epilogue)
        steps: tuple[KernelStep, ...] = (step,)
        workspaces: dict[str, int] = {}
        if merged > 1:
            weight_rows = WeightRows(given, merged)
            steps = (weight_rows.step(), over_workspaces(step, {"weight": ROWS}))
            workspaces = {ROWS: weight_rows.nbytes}
        if zero := corrections.zero:
            steps, workspaces = (zero.step(), *steps), workspaces | zero.workspaces
            alignments |= zero.alignments
        return KernelSource("cuda", "sm_90a", steps, workspaces, alignments)


def _cluster_constraints(columns: int) -> tuple[Constraint, ...]:
    """Args: columns: that a block loads at a time."""
    return (
        Constraint(f"blocks of a cluster <= {MAX_CLUSTER}", lambda q: q["cluster"] <= MAX_CLUSTER),
        Constraint(
            f"each of cluster_m blocks loads a multiple of {columns} of the tile's columns, or all",
            lambda q: (q["cluster_m"] == 1) | (q["bn"] % (columns * q["cluster_m"]) == 0),
        ),
        Constraint(
            "cluster_m is at most the row tiles, cluster_n the column tiles",
            lambda q: (q["cluster_m"] <= q["row_tiles"]) & (q["cluster_n"] <= q["column_tiles"]),
        ),
    )


def _row_arrays(rows: StagedRows | StagedChunks) -> set[str]:
    """Lengths of local arrays of the stores of rows; see `KernelStep.shaped_by`."""
    return {f"finish.store_rows.{name}" for name in rows.shaped_by}


def _merged(workload: Workload[Conv2dParams]) -> Workload[Conv2dParams]:
    """The workload with neighbouring small groups as one."""
    merged = geometry.merged_groups(workload)
    return workload if merged == 1 else workload.replace(groups=workload.params.groups // merged)


# --- The kernel -------------------------------------------------------------------------------------------------------


def build_kernel(
    workload: Workload[Conv2dParams], gemm: Im2col, plan: Plan, epilogue: Epilogue, corrections: FragmentCorrections
) -> Callable[..., None]:
    """The kernel function of one configuration."""
    wgmma, layout = Wgmma(workload.params.dtype, workload.params.weight_dtype), plan.shared
    bn, stages, split_k, turns, k_steps, columns = plan.bn, plan.stages, plan.split_k, plan.turns, plan.k_steps, gemm.columns
    in_turn, by_tma, consumers = turns > 1, stores_by_tma(workload), plan.warpgroups * WARPGROUP
    full_offset, empty_offset, sums_offset = (layout.offset(region) for region in ("full", "empty", "sums_full"))
    next_turn = (turns - 1) * k_steps % stages  # stages of tiles that the other half takes
    accumulators, sum_type = wgmma.accumulators(bn), wgmma.accumulator_type
    tiles = ClusterTiles(plan.cluster_m, plan.cluster_n, split_k)  # they have the number of their cluster
    place, begin, releases, arrive_empty = tiles.place(), tiles.begin(), tiles.releases(), tiles.arrive()
    clusters, own_tiles = plan.cluster_rows * plan.cluster_columns, walk.persistent(tiles.blocks)
    warm, idle = warm_operands(workload, epilogue.params), consumers + 64  # the first thread of a warp without other work
    origin, load, own_turn = tile_origin(plan), load_of(workload, gemm, plan, warm), _own_turn(plan)
    thread_of_warpgroup, initialise = store.thread_of_warpgroup, _initialise(plan, tiles)
    take, advance_taken = pipeline.consumer(stages, phases="some" if in_turn else "all")
    multiply_step, wait_previous, wait_all = _multiply_step(wgmma, plan), wgmma.wait(1, bn), wgmma.wait(0, bn)
    begin_store, words_ahead, load_ahead, finish = finish_of(workload, gemm, plan, epilogue, corrections)
    own_part, own_sums, add_up = own_part_of(gemm, plan), 4 * plan.own_octets, add_up_of(wgmma, plan)
    array_ahead = max(words_ahead, 1)  # an array has a constant size, not 0

    def kernel(xmap, wmap, y, *operands) -> None:  # type: ignore[no-untyped-def]
        in_cluster, part, cluster_row, cluster_column = place()
        shared = shared_base()
        full = u32(shared + full_offset)
        empty = u32(shared + empty_offset)
        sums_full = u32(shared + sums_offset)
        thread, group, lane, warp_row, leader = thread_of_warpgroup()
        store_place = begin_store(group, lane, warp_row, leader)
        first_tile, next_tile = own_tiles()
        first_step = i32(part * k_steps // split_k)
        stop_step = i32((part + 1) * k_steps // split_k)
        if thread == 0:
            initialise(full, empty, sums_full, part)
        begin()

        stage = u32(0)
        acc = cuda.local.array(accumulators, sum_type)
        ahead = cuda.local.array(array_ahead, i32)
        if thread >= consumers:
            load(
                xmap, wmap, shared, full, empty, part, cluster_row, cluster_column, first_tile, next_tile, first_step,
                stop_step, thread, lane, operands,
            )  # fmt: skip
        else:
            ptx.wait_for_predecessor()
            releases_stages, empty_at = releases(empty, part, cluster_row, cluster_column)
            tile_group = i32(group)  # rank among the blocks that share a tile
            parity = u32(0)
            previous = u32(0)
            tile = first_tile
            if words_ahead and split_k > 1:
                row, column, own_columns = own_part(first_tile, part, cluster_row, cluster_column)
                load_ahead(ahead, row + group * GROUP_ROWS, column, own_columns, lane, warp_row, operands)
            if in_turn:
                tile_group, full, stage, tile = own_turn(tile_group, full, tile, next_tile)
            while tile < clusters:
                row, column = origin(tile, cluster_row, cluster_column)
                if words_ahead and split_k == 1:
                    load_ahead(
                        ahead, i32(row + tile_group * GROUP_ROWS), column, i32(columns - column), lane,
                        warp_row, operands,
                    )  # fmt: skip
                for step in range(first_step, stop_step):
                    parity = take(full, stage, parity)
                    multiply_step(acc, shared, stage, tile_group, i32(step > first_step))
                    wait_previous(acc)
                    if releases_stages and step > first_step:
                        arrive_empty(empty_at + previous * BARRIER_BYTES)
                    previous = stage
                    stage, parity = advance_taken(stage, parity)
                wait_all(acc)
                if releases_stages:
                    arrive_empty(empty_at + previous * BARRIER_BYTES)
                if split_k == 1:
                    finish(
                        acc, ahead, i32(row + tile_group * GROUP_ROWS), column, i32(columns - column), y,
                        store_place, lane, warp_row, operands,
                    )  # fmt: skip
                if in_turn:
                    stage = u32(stage + next_turn) % u32(stages)
                tile = i32(tile + next_tile * turns)

        if split_k > 1:
            # ---- add up the tile's sums of this block's columns, and store them
            cluster.cluster_arrive()  # all blocks have read the ring, which the sums overwrite
            cluster.cluster_wait()
            row, column, own_columns = own_part(first_tile, part, cluster_row, cluster_column)
            if thread < consumers:
                sums = cuda.local.array(own_sums, sum_type)
                add_up(acc, sums, shared, sums_full, thread, in_cluster, part)
                row = row + group * GROUP_ROWS
                finish(sums, ahead, row, column, own_columns, y, store_place, lane, warp_row, operands)
            elif thread >= idle and thread < idle + 32:
                warm(lane, i32(column), own_columns, operands)  # the cluster's barrier has emptied L1
        if by_tma and leader:
            ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel


# --- The functions that the kernel captures ----------------------------------------------------------------------------


def _initialise(plan: Plan, tiles: ClusterTiles) -> Callable[..., None]:
    """`initialise(full, empty, sums_full, part)`: initialises the barriers of a block."""
    stages, split_k, turns, octets, own_octets = plan.stages, plan.split_k, plan.turns, plan.bn // 8, plan.own_octets
    initialise_barriers, tile_groups, peers = pipeline.initialise, plan.warpgroups // turns, tiles.peers
    octet_bytes = plan.bm * 32

    def initialise(full: Any, empty: Any, sums_full: Any, part: Any) -> None:
        initialise_barriers(full, turns * stages, 2)  # pixels and weights
        initialise_barriers(empty, stages, tile_groups * peers)
        if split_k > 1:
            ptx.mbarrier_init(sums_full, 1)
        ptx.mbarrier_init_fence()
        if split_k > 1:
            received = i32(max(0, min(own_octets, octets - i32(part * own_octets))))
            ptx.mbarrier_expect_bytes(sums_full, received * ((split_k - 1) * octet_bytes))

    return initialise


def _own_turn(plan: Plan) -> Callable[..., Any]:
    """`own_turn(group, full, tile, next_tile)`: (rank among the warpgroups of its tiles, full barriers, first stage, first
    tile) of a warpgroup, if halves of the warpgroups take tiles in turn."""
    stages, k_steps, tile_groups = plan.stages, plan.k_steps, plan.warpgroups // plan.turns

    def own_turn(group: Any, full: Any, tile: Any, next_tile: Any) -> Any:
        turn = i32(group // tile_groups)
        ring = u32(full + turn * (stages * BARRIER_BYTES))
        return i32(group - turn * tile_groups), ring, u32(turn * k_steps) % u32(stages), i32(tile + turn * next_tile)

    return own_turn


def _multiply_step(wgmma: Wgmma, plan: Plan) -> Callable[..., None]:
    """`multiply_step(acc, shared, stage, tile_group, accumulate)` starts to multiply the operands in a stage."""
    row_bytes = plan.bk * wgmma.element_bytes
    a_bytes, group_a_bytes, stage_bytes = plan.bm * row_bytes, GROUP_ROWS * row_bytes, (plan.bm + plan.bn) * row_bytes
    matrix, multiply = wgmma.matrix(row_bytes), wgmma.steps(plan.bn, plan.bk // wgmma.k)

    def multiply_step(acc: Any, shared: Any, stage: Any, tile_group: Any, accumulate: Any) -> None:
        a = u32(shared + stage * stage_bytes)
        b = u32(a + a_bytes)
        a = u32(a + tile_group * group_a_bytes)
        multiply(acc, matrix(a), matrix(b), accumulate)

    return multiply_step
