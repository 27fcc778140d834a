"""The kernel of conv2d_halo whose tiles are shared by the blocks of a cluster: images of few pixels, with many channels.

A block multiplies some chunks of input channels, or some taps of one chunk (`halo_kernel` explains these words): every
weight and every pixel is then loaded by few blocks, and yet many multiprocessors work. At the end the blocks send one
another their sums. Each adds up some rows of the tile and stores them. A block has one tile.

See docs/decisions/456-halo-tiles-that-a-cluster-shares.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d import halo_weights
from schedsearch.templates.conv2d.halo_parts import (
    load_patches_of,
    multiply_tile_of,
    ring_barriers_of,
    tile_origin_of,
    warm_of,
)
from schedsearch.templates.conv2d.halo_sizes import WGMMA_CHANNELS, Geometry, Plan, loads_residual, stages_y
from schedsearch.templates.conv2d.halo_store import Place, Residual, Thread, staged_bytes, staging_offset_of, store_tile_of
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import cluster, pipeline, ptx, sharing, walk
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.pipeline import Barriers, Ring
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint
from schedsearch.workload import Workload

# Captured values that Numba must know; see `KernelStep.shaped_by`.
SHAPED_BY = frozenset(
    {"accumulators", "own_sums", "multiply_tile.merged", "multiply_tile.resident", "residual_index", "staged",
     "store_tile.fused", "store_tile.staged"}
)  # fmt: skip


def build_split_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> Callable[..., None]:
    """The kernel function of a configuration with split_k > 1."""
    geometry, layout, split_k = Geometry.of(workload, plan.merged), plan.shared, plan.split_k
    own_tile, tile_origin = walk.persistent(split_k), tile_origin_of(geometry, plan)
    own_place, ring_barriers = _place_of(geometry, plan, tile_origin), ring_barriers_of(plan)
    initialise, offsets = _initialise(workload, plan), ("weights", "y", "residual_full", "sums_full")
    weights_offset, y_offset, residual_offset, sums_offset = map(layout.offset, offsets)
    staged, warpgroup_y_bytes = stages_y(workload), staged_bytes(workload, plan)
    load_patches = load_patches_of(workload, geometry, plan)
    load_weights = halo_weights.load_weights(workload, geometry, plan, tile_origin)
    # Consumer warpgroups are numbered along a row of `warp_columns`, 64 output channels each.
    warp_columns, consumers = plan.channel_groups, plan.warpgroups * WARPGROUP
    row_patch_bytes = plan.tile_h * plan.patch_w * ROW_BYTES  # from a warpgroup to the one below
    wgmma, own_octets = Wgmma(workload.params.dtype), plan.own_positions // 8
    accumulators, own_sums, sum_type = wgmma.accumulators(plan.positions), 4 * own_octets, wgmma.accumulator_type
    add_up = sharing.add_up(split_k, plan.positions // 8, own_octets, consumers * 16, wgmma.accumulator)
    multiply_tile, staging_offset = multiply_tile_of(workload, geometry, plan), staging_offset_of(workload, plan)
    store_tile, residual_index = store_tile_of(workload, geometry, plan, epilogue, zero), epilogue.index("residual")
    warm, idle = warm_of(workload, geometry, plan, epilogue, tile_origin), consumers + 64  # a warp without other work

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        part = u32(u32(cuda.blockIdx.x) % u32(split_k))
        shared = shared_base()
        patch_full, patch_empty, weight_full, weight_empty = ring_barriers(shared)
        sums_full = u32(shared + sums_offset)
        thread = i32(cuda.threadIdx.x)
        tile, tiles_apart = own_tile()
        if thread == 0:
            initialise(Barriers(patch_full, patch_empty), Barriers(weight_full, weight_empty), shared, sums_full, part)
        cuda.syncthreads()

        group = thread >> 7
        lane = thread & 31
        leader = (thread & 127) == 0
        warp_row = i32(group // warp_columns)
        own_channel = i32((group - warp_row * warp_columns) * WGMMA_CHANNELS)
        warp_channel = i32(((thread >> 5) & 3) * 16)
        staged_y = u32(shared + y_offset + group * warpgroup_y_bytes)
        residual = Residual(operands[residual_index], u32(shared + residual_offset + group * BARRIER_BYTES))
        place = own_place(tile, part, warp_row, own_channel)
        acc = cuda.local.array(accumulators, sum_type)
        if thread == consumers:
            ptx.prefetch_map(xmap)
            ptx.wait_for_predecessor()
            load_patches(xmap, shared, patch_full, patch_empty, part, tile, tiles_apart)
        elif thread == consumers + 32:
            load_weights(weight, shared + weights_offset, weight_full, weight_empty, part, tile, tiles_apart)
        elif thread < consumers:
            ptx.wait_for_predecessor()
            multiply_tile(
                acc, u32(shared + warp_row * row_patch_bytes), u32(shared + weights_offset + own_channel * ROW_BYTES),
                patch_full, patch_empty, Barriers(weight_full, weight_empty), leader, i32(0),
                Ring(u32(0), u32(0), u32(0)), Ring(u32(0), u32(0), u32(0)), residual, staged_y, place, part,
            )  # fmt: skip

        cluster.cluster_arrive()  # all blocks have read patches and weights, which the sums overwrite
        cluster.cluster_wait()
        if thread < consumers:
            sums = cuda.local.array(own_sums, sum_type)
            add_up(acc, sums, shared, sums_full, thread, part, part)
            store_tile(
                sums, y, operands, shared,
                Thread(group, lane, leader, warp_channel, staging_offset(lane, warp_channel)), place, patch_empty, u32(0),
                residual, u32(0), staged_y,
            )  # fmt: skip
            if staged and leader:
                ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it
        elif thread >= idle and thread < idle + 32:
            warm(lane, tile, part, operands)  # the cluster's barrier has emptied L1

    return kernel


def _initialise(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`initialise(patches, weights, shared, sums_full, part)`: initialises the barriers of a block."""
    patches, stages, warpgroups, split_k = plan.patches, plan.stages, plan.warpgroups, plan.split_k
    residuals, residual_offset = warpgroups if loads_residual(workload) else 0, plan.shared.offset("residual_full")
    octets, own_octets, initialise_barriers = plan.positions // 8, plan.own_positions // 8, pipeline.initialise
    octet_bytes = warpgroups * WARPGROUP * 16

    def initialise(of_patches: Any, of_weights: Any, shared: Any, sums_full: Any, part: Any) -> None:
        initialise_barriers(of_patches.full, patches, 1)
        initialise_barriers(of_patches.empty, patches, warpgroups)
        initialise_barriers(of_weights.full, stages, 1)
        initialise_barriers(of_weights.empty, stages, warpgroups)
        initialise_barriers(u32(shared + residual_offset), residuals, 1)
        ptx.mbarrier_init(sums_full, 1)
        ptx.mbarrier_init_fence()
        received = i32(max(0, min(own_octets, octets - i32(part * own_octets))))
        ptx.mbarrier_expect_bytes(sums_full, received * ((split_k - 1) * octet_bytes))

    return initialise


def _place_of(geometry: Geometry, plan: Plan, tile_origin: Callable[..., Any]) -> Callable[..., Any]:
    """`place(tile, part, warp_row, own_channel)`: the rows of a warpgroup's part of a tile that a block stores."""
    tile_h, own_rows, out_h = plan.tile_h, plan.own_rows, geometry.out_h

    def place(tile: Any, part: Any, warp_row: Any, own_channel: Any) -> Any:
        image, row, column, conv_group, channel = tile_origin(tile, part)
        row = i32(row + warp_row * tile_h)
        first = i32(part * own_rows)
        rows_left = i32(min(own_rows, min(tile_h, out_h - row) - first))
        return Place(image, i32(row + first), column, conv_group, i32(channel + own_channel), rows_left)

    return place
