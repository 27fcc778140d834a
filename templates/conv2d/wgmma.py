"""conv2d on Hopper's tensor cores: NHWC x OHWI as an implicit GEMM, fed by TMA, multiplied by wgmma.

One tile of y is bm pixels x bn channels; a k step is `bk` input channels of one tap. A block has

- a producer warpgroup, one thread of which issues all loads (see `im2col.py`) into a ring of `stages` buffers;
- `consumer_groups` warpgroups of 64 rows each, which multiply, apply the epilogue and store;
- per stage two mbarriers: `full` (the bytes have landed) and `empty` (every consumer has read them).

With split_k > 1 blocks of a cluster share a tile: each multiplies its part of the k steps, sends the others its sums of
their parts of the columns, and adds up all sums of its own part, in an order that never changes: deterministic.

With cluster_m x cluster_n > 1 a cluster has neighbouring tiles, cluster_m rows of cluster_n. Blocks in a row need the same
x, those in a column the same weights: each loads a part of both and multicasts it to its row or column. So `empty` counts
the consumers of all blocks that a block sends to, and tiles past the end are multiplied (and not stored), lest a block waits
for what nobody sends.

With both, a cluster has split_k blocks for each of its tiles, and those with the same part of the k steps share loads.

With schedule in_turn, each half of the consumer groups has a block's every other tile, so that one half stores while the
other multiplies. The ring is filled tile after tile, which is what gives the halves their turns.

What is out of range is zero in both operands (channels past C) or not stored (rows past M, columns past K), so no size
has to divide another. docs/kernels/conv2d_wgmma.md tells more, and what each knob is for.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d import geometry
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.conv2d.maps import filter_map, image_map, output_map
from schedsearch.templates.conv2d.wgmma_sizes import (
    GROUP_ROWS,
    derived_quantities,
    evaluate,
    octets_per_block,
    store_segment,
    stores_by_tma,
    useful_bks,
)
from schedsearch.templates.parts import cluster, hopper, ptx
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import (
    ALIGNMENT_BYTES,
    BARRIER_BYTES,
    ELEMENT_BYTES,
    SWIZZLE_ROWS,
    WARPGROUP,
    WGMMA_K,
)
from schedsearch.workload import Workload

# Registers of a consumer thread beside its bn/2 accumulators: addresses, descriptors, temporaries; and with an epilogue.
OVERHEAD_REGISTERS = (32, 48)

# Of what the kernel captures; see `KernelStep`.
SHAPED_BY = frozenset({"accumulators", "clustered", "in_turn", "own_sums", "paired", "split_k", "staged"})

GROUPS = (1, 2, 3, 4)
BNS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
STAGES = tuple(range(2, 13))
BLOCKS_PER_SM = (1, 2, 3)
SPLIT_KS = (1, 2, 4, 8)
CLUSTER_SIDES = (1, 2, 4)
MAX_CLUSTER = 8  # blocks that every device takes


class Conv2dWgmma(Template):
    """conv2d for compute capability 9.0: fp16 or bf16 in, fp32 accumulation, fp16, bf16 or fp32 out."""

    name = "conv2d_wgmma"
    version = 6
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return geometry.problem(workload, target) or Im2col.of(workload).problem(max_tile_rows=GROUP_ROWS * max(GROUPS))

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        w, gemm = workload, Im2col.of(workload)
        smallest_covering_k = min((bn for bn in BNS if bn >= w.k), default=max(BNS))
        most_row_tiles = math.ceil(gemm.rows / GROUP_ROWS)
        fewest_tiles = math.ceil(gemm.rows / (GROUP_ROWS * max(GROUPS))) * math.ceil(w.k / smallest_covering_k)
        most_k_steps = gemm.taps * math.ceil(w.c / min(useful_bks(w.c)))
        split_ks = [
            split_k
            for split_k in SPLIT_KS
            if split_k == 1 or (most_k_steps >= 2 * split_k and fewest_tiles * split_k < 2 * target.sms * max(BLOCKS_PER_SM))
        ]
        cluster_ms = [m for m in CLUSTER_SIDES if m <= most_row_tiles and gemm.fits(m * GROUP_ROWS * max(GROUPS))]
        cluster_ns = [n for n in CLUSTER_SIDES if n <= math.ceil(w.k / min(BNS))]
        group_ms = [1] if w.k <= min(BNS) else [g for g in (1, 2, 4, 8, 16, 64, 256) if g < 2 * most_row_tiles]
        knobs = (
            Knob("consumer_groups", GROUPS, "warpgroups that multiply, each 64 rows (output pixels) of its tile"),
            Knob(
                "schedule",
                ("together", "in_turn"),
                "groups share a tile, or each half of them takes the block's next: one stores while the other multiplies",
            ),
            Knob("bn", tuple(bn for bn in BNS if bn <= smallest_covering_k), "columns (output channels) of a tile"),
            Knob("bk", useful_bks(w.c), "input channels of a k step; more is better, less wastes less of the last step"),
            Knob("stages", STAGES, "k steps that are loaded ahead or being multiplied"),
            Knob("split_k", tuple(split_ks), "blocks of a cluster that share a tile's k steps"),
            Knob("cluster_m", tuple(cluster_ms), "row tiles of a cluster; blocks with the same columns share weights"),
            Knob("cluster_n", tuple(cluster_ns), "column tiles of a cluster; blocks with the same rows share pixels"),
            Knob("grid", ("persistent", "split"), "blocks that loop over tiles, or split_k blocks a tile"),
            Knob("blocks_per_sm", BLOCKS_PER_SM, "blocks that share a multiprocessor: one stores while another multiplies"),
            Knob("group_m", tuple(group_ms), "row tiles (of clusters) walked before the next column tile; for reuse in L2"),
            Knob("l2_promotion", (128, 256), "bytes that L2 fetches from memory when a load misses"),
        )
        constraints = (
            *hopper.block_constraints(target, "bn", OVERHEAD_REGISTERS[bool(w.epilogue)]),
            Constraint("no consumer group whose rows all lie past the output", lambda q: q["bm"] < gemm.rows + GROUP_ROWS),
            Constraint(
                "no more stages than k steps that a block runs, but 2",
                lambda q: q["stages"] <= np.maximum(2, q["block_steps"] * np.where(q["grid"] == "split", 1, q["waves"])),
            ),
            Constraint(
                "groups in turn are an even number, of a persistent grid",
                lambda q: (q["turns"] == 1) | ((q["consumer_groups"] % 2 == 0) & (q["grid"] == "persistent")),
            ),
            Constraint(
                "split_k is 1 or leaves each block at least 2 k steps, with grid split",
                lambda q: (q["split_k"] == 1) | ((q["k_steps"] >= 2 * q["split_k"]) & (q["grid"] == "split")),
            ),
            Constraint(
                "split_k is 1 or half of it would leave multiprocessors idle",
                lambda q: (q["split_k"] == 1) | (q["blocks"] < 2 * target.sms * q["blocks_per_sm"]),
            ),
            Constraint(f"blocks of a cluster <= {MAX_CLUSTER}", lambda q: q["cluster"] <= MAX_CLUSTER),
            Constraint(
                f"each of cluster_m blocks loads a multiple of {SWIZZLE_ROWS} of the tile's columns, or all",
                lambda q: (q["cluster_m"] == 1) | (q["bn"] % (SWIZZLE_ROWS * q["cluster_m"]) == 0),
            ),
            Constraint(
                "cluster_m is at most the row tiles, cluster_n the column tiles",
                lambda q: (q["cluster_m"] <= q["row_tiles"]) & (q["cluster_n"] <= q["column_tiles"]),
            ),
            Constraint(
                "a persistent grid has more tiles than resident blocks",
                lambda q: (q["grid"] == "split") | (q["blocks"] > target.sms * q["blocks_per_sm"]),
            ),
            Constraint(
                "another block a multiprocessor only if there is work for it",
                lambda q: (q["blocks_per_sm"] == 1) | (q["blocks"] > target.sms * (q["blocks_per_sm"] - 1)),
            ),
            Constraint(
                "group_m is 1 with one column of clusters, and less than twice their rows",
                lambda q: (q["group_m"] == 1) | ((q["cluster_columns"] > 1) & (q["group_m"] < 2 * q["cluster_rows"])),
            ),
        )
        return ConfigSpace(knobs, constraints, derived_quantities(workload, target))

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The configuration of the least predicted time; the smallest cluster and the deepest ring among equals."""
        group_ms = [int(value) for value in space.knobs[space.names.index("group_m")].values]
        group_m = min(group_ms, key=lambda value: abs(value - 8))  # 1 is what one column tile has
        # 256 wins up to 2 % where it wins, and loses up to 17 % where pixels are no multiple of 128 bytes.
        few = {"l2_promotion": [128], "group_m": sorted({1, group_m})}
        return hopper.least_predicted(
            space.restrict(few), lambda q: (q["cluster"], -q["stages"], q["threads"], -q["group_m"])
        )

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        plan = evaluate(workload, target, config)
        epilogue = Epilogue(workload)
        bn, bk, l2_bytes = plan["bn"], plan["bk"], plan["l2_promotion"]
        image = image_map(workload, plan["bm"] // plan["cluster_n"], bk, l2_bytes)
        weights = filter_map(workload, bn // plan["cluster_m"], bk, l2_bytes)
        output: Param = Pointer("y")
        if stores_by_tma(workload):
            output = output_map(workload, store_segment(plan), GROUP_ROWS)
        step = KernelStep(
            build_kernel(workload, plan, epilogue),
            (image, weights, output, *epilogue.params),
            Grid(plan["blocks"], plan["blocks_per_sm"] if config["grid"] == "persistent" else 0),
            plan["threads"],
            plan["shared_bytes"],
            cluster=plan["cluster"],
            min_blocks_per_sm=plan["blocks_per_sm"],
            shaped_by=SHAPED_BY,
        )
        alignments = {"x": ALIGNMENT_BYTES, "weight": ALIGNMENT_BYTES, "y": ALIGNMENT_BYTES, **epilogue.alignments}
        return KernelSource("cuda", "sm_90a", (step,), alignments=alignments)


# --- The kernel -------------------------------------------------------------------------------------------------------


def build_kernel(workload: Workload, plan: Mapping[str, Any], epilogue: Epilogue) -> Callable[..., None]:
    """The kernel function for one configuration; `plan` is what `evaluate` returns."""
    gemm = Im2col.of(workload)
    bm, bn, bk, stages, groups = plan["bm"], plan["bn"], plan["bk"], plan["stages"], plan["consumer_groups"]
    rows, columns, channels = gemm.rows, gemm.columns, gemm.channels
    out_w, out_hw = gemm.out_w, gemm.out_h * gemm.out_w
    kernel_w = gemm.kernel_w
    stride_h, stride_w = gemm.stride
    dilation_h, dilation_w = gemm.dilation
    left, top = -gemm.lower[0], -gemm.lower[1]
    k_steps, group_m, split_k = plan["k_steps"], plan["group_m"], plan["split_k"]
    # Clusters of cluster_m x cluster_n tiles with split_k blocks each; their ranks run over split_k, then cluster_m.
    cluster_m, cluster_n, cluster_blocks = plan["cluster_m"], plan["cluster_n"], plan["cluster"]
    cluster_rows, cluster_columns = plan["cluster_rows"], plan["cluster_columns"]
    clusters = cluster_rows * cluster_columns  # a block's tile goes by the number of the cluster
    clustered = cluster_m * cluster_n > 1
    peers = cluster_m + cluster_n - 1  # blocks that a block sends to, itself among them
    turns = plan["turns"]
    in_turn = turns > 1
    tile_groups = groups // turns  # that share a tile
    next_turn = (turns - 1) * k_steps % stages  # stages of the tiles that the others take
    channel_steps = -(-channels // bk)
    # Clusters are walked in bands of group_m rows, each band column by column.
    band_clusters = group_m * cluster_columns
    uneven_bands = cluster_rows % group_m != 0

    # Shared memory: `stages` times (bm x bk of x, wgmma's A, and bn x bk of weight, its B), y of each consumer group, the
    # barriers. All matrices are K-major rows of bk * 2 bytes, swizzled over that width.
    row_bytes = bk * ELEMENT_BYTES
    a_bytes = bm * row_bytes
    stage_bytes = a_bytes + bn * row_bytes
    own_pixels, own_filters = bm // cluster_n, bn // cluster_m  # that a block loads
    group_a_bytes = GROUP_ROWS * row_bytes
    staged = stores_by_tma(workload)
    octets, own_octets = bn // 8, int(octets_per_block(plan))  # of a tile's columns; those that a block stores
    # At the end of a split tile other blocks' sums come over the stages, 16 bytes a thread for each octet, and y after them.
    octet_bytes = groups * WARPGROUP * 16
    y_offset = plan["ring_bytes"] if split_k == 1 else (split_k - 1) * own_octets * octet_bytes
    group_y_bytes = GROUP_ROWS * own_octets * 8 * dtype_of(workload.out_dtype).nbytes if staged else 0
    full_offset = plan["ring_bytes"] + (groups * group_y_bytes if split_k == 1 else 0)
    # Each half has `full` barriers of its own: of a shared one it would miss phases, and parities be ambiguous.
    empty_offset = full_offset + turns * stages * BARRIER_BYTES
    sums_offset = empty_offset + stages * BARRIER_BYTES
    assert sums_offset + (BARRIER_BYTES if split_k > 1 else 0) == plan["shared_bytes"]

    load_image, load_filters = cluster.tma_load_im2col(cluster_n > 1), cluster.tma_load_tiled(cluster_m > 1)
    arrive_empty = cluster.mbarrier_arrive_at_peer if clustered else ptx.mbarrier_arrive
    # Of the blocks with the first tile's columns, or rows, and the first part of the k steps.
    column_mask = sum(1 << (m * split_k) for m in range(cluster_m))
    row_mask = sum(1 << (n * split_k * cluster_m) for n in range(cluster_n))

    descriptor = hopper.matrix_descriptor(row_bytes)
    accumulators = bn // 2
    multiply = ptx.wgmma_steps(bn, bk // WGMMA_K, workload.dtype)
    wait_previous, wait_all = ptx.wgmma_wait(1, bn), ptx.wgmma_wait(0, bn)

    # A store's segment: 64 rows of chunks of 16 bytes (8 columns); chunk ^= row's 128-byte line modulo the chunks a row.
    segment = store_segment(plan)
    own_segments = own_octets * 8 // segment
    segment_row_bytes = segment * 2
    segment_chunks = segment // 8
    segment_bytes = GROUP_ROWS * segment_row_bytes
    paired = segment_chunks > 1  # stmatrix stores two octets
    out_bytes = dtype_of(workload.out_dtype).nbytes
    pack = ptx.pack_pair(workload.out_dtype if staged else "float16")
    fused = not epilogue.identity

    consumers = groups * WARPGROUP
    group_barrier = ptx.group_barrier(groups, WARPGROUP)

    own_sums = 4 * own_octets
    fuse = epilogue.fragments(own_octets, 8 * columns)
    exchange_fragments = cluster.exchange_fragments(split_k, octets, own_octets, octet_bytes)
    add_fragments = cluster.add_fragments(max(split_k - 1, 1), own_octets, octet_bytes)

    def kernel(xmap, wmap, y, *operands) -> None:  # type: ignore[no-untyped-def]
        in_cluster = types.uint32(types.uint32(cuda.blockIdx.x) % types.uint32(cluster_blocks))
        rank = types.uint32(in_cluster % types.uint32(split_k))  # among the blocks that share a tile
        tile_in_cluster = types.uint32(in_cluster // types.uint32(split_k))
        rank_m = types.uint32(tile_in_cluster % types.uint32(cluster_m))
        rank_n = types.uint32(tile_in_cluster // types.uint32(cluster_m))

        def tile_origin(tile: Any) -> Any:
            """(first row, first column) of the block's tile."""
            tile = types.uint32(tile)
            band = types.uint32(tile // types.uint32(band_clusters))
            within = types.uint32(tile - band * types.uint32(band_clusters))
            height = types.uint32(group_m)
            if uneven_bands:
                height = types.uint32(min(group_m, cluster_rows - band * group_m))
            column = ptx.divide_u32(within, height)
            row = types.uint32(band * group_m + within - column * height)
            return types.int32((row * cluster_m + rank_m) * bm), types.int32((column * cluster_n + rank_n) * bn)

        shared = shared_base()
        full = types.uint32(shared + full_offset)
        empty = types.uint32(shared + empty_offset)
        sums_full = types.uint32(shared + sums_offset)
        thread = types.int32(cuda.threadIdx.x)
        group = thread >> 7
        lane = thread & 31
        warp_row = types.int32(((thread >> 5) & 3) * 16)
        leader = (thread & 127) == 0
        group_y = types.uint32(shared + y_offset + group * group_y_bytes)
        segment_row = types.uint32(warp_row + (lane & 15))
        row_address = types.uint32(group_y + segment_row * segment_row_bytes)
        flip = types.uint32((segment_row * segment_row_bytes >> 7) & (segment_chunks - 1))

        def finish(values: Any, row: Any, column: Any, inside_columns: Any) -> None:
            """Epilogue and store of a warpgroup's part of a tile, 64 rows x own_octets * 8 columns from (row, column) on.

            Of each 8 columns a thread holds two neighbours in one row, and two in the row 8 below.
            """
            first_row = types.int32(row + warp_row + (lane >> 2))
            first_column = types.int32(column + (lane & 3) * 2)
            first_offset = types.int64(first_row) * columns + first_column
            if fused:
                fuse(
                    values, inside_columns, first_row < rows, first_row + 8 < rows, first_column, first_offset,
                    *operands,
                )  # fmt: skip
            if staged:
                if leader:
                    ptx.bulk_wait_read_all()  # the previous tile's stores have read group_y
                group_barrier(group)
                if paired:
                    for pair in range(own_octets // 2):
                        # a branch even where always true: ptxas would else pack all pairs into further registers
                        if 16 * pair < inside_columns:
                            chunk = types.uint32((2 * pair) % segment_chunks + (lane >> 4))
                            ptx.stmatrix_x4(
                                row_address + (2 * pair) // segment_chunks * segment_bytes + ((chunk ^ flip) << 4),
                                pack(values[8 * pair], values[8 * pair + 1]),
                                pack(values[8 * pair + 2], values[8 * pair + 3]),
                                pack(values[8 * pair + 4], values[8 * pair + 5]),
                                pack(values[8 * pair + 6], values[8 * pair + 7]),
                            )
                else:
                    for octet in range(own_octets):
                        if 8 * octet < inside_columns:
                            ptx.stmatrix_x2(
                                row_address + octet * segment_bytes,
                                pack(values[4 * octet], values[4 * octet + 1]),
                                pack(values[4 * octet + 2], values[4 * octet + 3]),
                            )
                ptx.fence_async_shared()
                group_barrier(group)
                if leader:
                    for part in range(own_segments):
                        if part * segment < inside_columns:
                            ptx.tma_store_2d(y, group_y + part * segment_bytes, column + part * segment, row)
                    ptx.bulk_commit()
            else:
                for pair in range(2 * own_octets):
                    if (first_row + (pair & 1) * 8 < rows) & ((pair >> 1) * 8 < inside_columns):
                        offset = types.int64(first_offset + ((pair & 1) * 8 * columns + (pair >> 1) * 8))
                        address = types.uint64(y + types.uint64(offset * out_bytes))
                        ptx.store_global_f32x2(address, values[2 * pair], values[2 * pair + 1])

        first_tile = types.int32(types.uint32(cuda.blockIdx.x) // types.uint32(cluster_blocks))
        next_tile = types.int32(types.uint32(cuda.gridDim.x) // types.uint32(cluster_blocks))
        first_step = types.int32(rank * k_steps // split_k)
        stop_step = types.int32((rank + 1) * k_steps // split_k)
        if thread == 0:
            for stage in range(turns * stages):
                ptx.mbarrier_init(full + stage * BARRIER_BYTES, 1)
            for stage in range(stages):
                ptx.mbarrier_init(empty + stage * BARRIER_BYTES, tile_groups * peers)
            if split_k > 1:
                ptx.mbarrier_init(sums_full, 1)
            ptx.mbarrier_init_fence()
            if split_k > 1:
                received = types.int32(max(0, min(own_octets, octets - types.int32(rank * own_octets))))
                ptx.mbarrier_expect_bytes(sums_full, received * ((split_k - 1) * octet_bytes))
        if clustered:  # no block sends to another, or arrives there, before that one's barriers exist
            cluster.cluster_arrive()
            cluster.cluster_wait()
        else:
            cuda.syncthreads()

        stage = types.uint32(0)
        acc = cuda.local.array(accumulators, types.float32)
        if thread >= consumers:
            # ---- load
            if thread == consumers:
                parity = types.uint32(1)  # of the phase before the first: every stage starts empty
                same_rows = types.uint16(row_mask << (rank + rank_m * split_k))
                same_columns = types.uint16(column_mask << (rank + rank_n * (split_k * cluster_m)))
                x_offset = types.uint32(rank_n * own_pixels * row_bytes)
                weight_offset = types.uint32(a_bytes + rank_m * own_filters * row_bytes)
                tile = first_tile
                while tile < clusters:
                    row, column = tile_origin(tile)
                    row = types.int32(row + rank_n * own_pixels)
                    column = types.int32(column + rank_m * own_filters)
                    image = types.int32(types.uint32(row) // types.uint32(out_hw))
                    pixel = types.uint32(row - image * out_hw)
                    out_row = types.uint32(pixel // types.uint32(out_w))
                    h = types.int32(out_row * stride_h) - top
                    w = types.int32((pixel - out_row * out_w) * stride_w) - left
                    tap = types.int32(types.uint32(first_step) // types.uint32(channel_steps))
                    channel = types.int32((first_step - tap * channel_steps) * bk)
                    tap_h = types.int32(types.uint32(tap) // types.uint32(kernel_w))
                    tap_w = types.int32(tap - tap_h * kernel_w)
                    for _ in range(first_step, stop_step):
                        ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
                        barrier = types.uint32(full + stage * BARRIER_BYTES)
                        a = types.uint32(shared + stage * stage_bytes)
                        ptx.mbarrier_expect_bytes(barrier, stage_bytes)
                        tap_x, tap_y = types.uint16(tap_w * dilation_w), types.uint16(tap_h * dilation_h)
                        load_image(a + x_offset, xmap, channel, w, h, image, barrier, tap_x, tap_y, same_rows)
                        load_filters(a + weight_offset, wmap, channel, tap, column, barrier, same_columns)
                        channel = types.int32(channel + bk)
                        if channel >= channels:
                            channel = types.int32(0)
                            tap = types.int32(tap + 1)
                            tap_w = types.int32(tap_w + 1)
                            if tap_w == kernel_w:
                                tap_w = types.int32(0)
                                tap_h = types.int32(tap_h + 1)
                        stage = types.uint32(stage + 1)
                        if stage == stages:
                            stage = types.uint32(0)
                            parity = types.uint32(parity ^ 1)
                    if in_turn:
                        full = types.uint32(full + stages * BARRIER_BYTES)
                        if full == empty:
                            full = types.uint32(shared + full_offset)
                    tile = types.int32(tile + next_tile)
                if clustered:
                    # Other blocks' consumers arrive here, and still read what was sent: stay until all have.
                    for _ in range(stages):
                        ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
                        stage = types.uint32(stage + 1)
                        if stage == stages:
                            stage = types.uint32(0)
                            parity = types.uint32(parity ^ 1)
        else:
            releases, empty_at = leader, empty
            if clustered:  # a thread for each block to tell: those with the same columns, then the others with the same rows
                releases = (thread & 127) < peers
                peer = types.uint32(min(thread & 127, peers - 1))
                peer_m, peer_n = peer, rank_n
                if peer >= cluster_m:
                    other_n = types.uint32(peer - cluster_m)
                    peer_m, peer_n = rank_m, types.uint32(other_n + types.uint32(other_n >= rank_n))
                empty_at = cluster.map_shared(empty, types.uint32((peer_n * cluster_m + peer_m) * split_k + rank))
            tile_group = types.int32(group)  # among those that share a tile
            parity = types.uint32(0)  # in turn a bit for each stage
            previous = types.uint32(0)
            tile = first_tile
            if in_turn:
                turn = types.int32(tile_group // tile_groups)
                tile_group = types.int32(tile_group - turn * tile_groups)
                full = types.uint32(full + turn * (stages * BARRIER_BYTES))
                stage = types.uint32(turn * k_steps) % types.uint32(stages)
                tile = types.int32(tile + turn * next_tile)
            while tile < clusters:
                row, column = tile_origin(tile)
                # ---- multiply; a stage is handed back when the next step has been issued and its own has finished
                for step in range(first_step, stop_step):
                    if in_turn:
                        ptx.mbarrier_wait(full + stage * BARRIER_BYTES, (parity >> stage) & types.uint32(1))
                        parity = types.uint32(parity ^ (types.uint32(1) << stage))
                    else:
                        ptx.mbarrier_wait(full + stage * BARRIER_BYTES, parity)
                    a = types.uint32(shared + stage * stage_bytes)
                    b = types.uint32(a + a_bytes)
                    a = types.uint32(a + tile_group * group_a_bytes)
                    multiply(
                        acc,
                        types.uint64(descriptor) | types.uint64(a >> 4),
                        types.uint64(descriptor) | types.uint64(b >> 4),
                        types.int32(step > first_step),
                    )
                    wait_previous(acc)
                    if releases and step > first_step:
                        arrive_empty(empty_at + previous * BARRIER_BYTES)
                    previous = stage
                    stage = types.uint32(stage + 1)
                    if stage == stages:
                        stage = types.uint32(0)
                        if not in_turn:
                            parity = types.uint32(parity ^ 1)
                wait_all(acc)
                if releases:
                    arrive_empty(empty_at + previous * BARRIER_BYTES)

                if split_k == 1:
                    finish(acc, types.int32(row + tile_group * GROUP_ROWS), column, types.int32(columns - column))
                if in_turn:
                    stage = types.uint32(stage + next_turn) % types.uint32(stages)
                tile = types.int32(tile + next_tile * turns)

        if split_k > 1:
            # ---- add up the tile's sums of this block's columns
            cluster.cluster_arrive()  # all blocks have read what the sums are sent over
            cluster.cluster_wait()
            if thread < consumers:
                octet = types.int32(rank * own_octets)
                sums = cuda.local.array(own_sums, types.float32)
                slots = types.uint32(shared + thread * 16)
                exchange_fragments(acc, sums, slots, sums_full, rank, types.uint32(in_cluster - rank))
                ptx.mbarrier_wait(sums_full, 0)
                add_fragments(sums, slots)
                row, column = tile_origin(first_tile)
                own_columns = types.int32(min(columns, column + bn) - (column + octet * 8))
                finish(sums, row + group * GROUP_ROWS, column + octet * 8, own_columns)
        if staged and leader:
            ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel
