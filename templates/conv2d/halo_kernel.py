"""The kernel of conv2d_halo: it loads each pixel once per tile, and a tap is a shift of the operand's address.

A tile of y is a rectangle of one image. TMA loads the rectangle of x that the tile depends on, halo and padding included, as
one patch of rows of 64 channels. Number its pixels row by row (positions): tap (r, s) reads the positions of tap (0, 0),
shifted by r * dilation_h * patch_w + s * dilation_w. Each tap is therefore the same wgmma operand at another start address.
Between the rows of a tile are the patch's halo columns. They are multiplied too, but never stored.

With a stride the patch is loaded in phases: phase (a, b) has every stride_h-th row from a on, and of these every stride_w-th
pixel from b on. A tap reads one phase and is a shift within it.

wgmma's 64 rows are output channels and its columns are positions: y^T = weight * x^T. An instruction is then wide even with
few channels; at 64 x 64 the tensor cores would wait for shared memory.

A block has consumer warpgroups, which multiply and store, and a producer warpgroup, of which one thread loads patches and
another loads weights, each into its own ring (`pipeline`). docs/kernels/conv2d_halo.md explains more.

In a grouped convolution a tile covers output channels of one group and loads only that group's input channels. Groups of few
channels are merged: several count as one, with weights of zero where input and output channel belong to different groups.
Merged weights stay in shared memory; each block writes them before its first tile.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor".

See docs/decisions/099-element-types-of-conv2d-halo.md.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.templates.conv2d import halo_weights
from schedsearch.templates.conv2d.halo_parts import (
    load_patches_of,
    multiply_tile_of,
    place_of,
    ring_barriers_of,
    tile_origin_of,
    warm_of,
)
from schedsearch.templates.conv2d.halo_sizes import WGMMA_CHANNELS, Geometry, Plan, loads_residual, stages_y
from schedsearch.templates.conv2d.halo_store import Residual, Thread, staged_bytes, staging_offset_of, store_tile_of
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import ptx, walk
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.pipeline import Barriers, Ring
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint
from schedsearch.workload import Workload

# Captured values that Numba must know; see `KernelStep.shaped_by`.
SHAPED_BY = frozenset(
    {"accumulators", "in_turn", "merged", "multiply_tile.merged", "multiply_tile.resident", "residual_index", "staged",
     "store_tile.fused", "store_tile.staged"}
)  # fmt: skip


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> Callable[..., None]:
    """The kernel function of one configuration."""
    geometry, layout = Geometry.of(workload, plan.merged), plan.shared
    chunks, patches, turns, tile_h = geometry.chunks, plan.patches, plan.turns, plan.tile_h
    resident, merged, in_turn = plan.weight_stages == 0, geometry.merged > 1, turns > 1
    # If weights stay, all tiles of a block are in one column of output channels. Its neighbours have the other columns.
    block_columns, tiles = (plan.column_tiles, plan.pixel_tiles) if resident else (1, plan.tiles)
    own_tiles, tile_origin = walk.persistent(block_columns), tile_origin_of(geometry, plan)
    own_place = place_of(geometry, plan, tile_origin)
    # Addresses in shared memory.
    weights_offset, y_offset, residual_offset = map(layout.offset, ("weights", "y", "residual_full"))
    ring_barriers = ring_barriers_of(plan)
    staged, staged_residual, warpgroups, stages = stages_y(workload), loads_residual(workload), plan.warpgroups, plan.stages
    warpgroup_y_bytes = staged_bytes(workload, plan)
    row_patch_bytes = 0 if in_turn else tile_h * plan.patch_w * ROW_BYTES  # from a warpgroup to the one below
    load_patches = load_patches_of(workload, geometry, plan)
    load_weights = halo_weights.load_weights(workload, geometry, plan, tile_origin)
    merge_weights = halo_weights.merge_weights(workload, geometry, plan, weights_offset)
    # Consumer warpgroups are numbered along a row of `warp_columns`, 64 output channels each.
    warp_columns, consumers = plan.channel_groups, plan.warpgroups * WARPGROUP
    wgmma = Wgmma(workload.params.dtype)
    accumulators, sum_type = wgmma.accumulators(plan.positions), wgmma.accumulator_type
    multiply_tile, staging_offset = multiply_tile_of(workload, geometry, plan), staging_offset_of(workload, plan)
    store_tile, residual_index = store_tile_of(workload, geometry, plan, epilogue, zero), epilogue.index("residual")
    warm, idle = warm_of(workload, geometry, plan, epilogue, tile_origin), consumers + 64  # a warp without other work

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        residual = operands[residual_index]
        own_column = u32(u32(cuda.blockIdx.x) % u32(block_columns))
        shared = shared_base()
        patch_full, patch_empty, weight_full, weight_empty = ring_barriers(shared)
        thread = i32(cuda.threadIdx.x)
        first_tile, next_tile = own_tiles()
        if thread == 0:
            for buffer in range(turns * patches):
                ptx.mbarrier_init(patch_full + buffer * BARRIER_BYTES, 1)
            for buffer in range(patches):
                ptx.mbarrier_init(patch_empty + buffer * BARRIER_BYTES, warpgroups // turns)
            for stage in range(stages):
                ptx.mbarrier_init(weight_full + stage * BARRIER_BYTES, 1)
                ptx.mbarrier_init(weight_empty + stage * BARRIER_BYTES, warpgroups)
            if staged_residual:
                for number in range(warpgroups):
                    ptx.mbarrier_init(shared + (residual_offset + number * BARRIER_BYTES), 1)
            ptx.mbarrier_init_fence()
        cuda.syncthreads()

        if thread >= consumers:
            # ---- load
            if thread == consumers:
                ptx.prefetch_map(xmap)
                ptx.wait_for_predecessor()
                load_patches(xmap, shared, patch_full, patch_empty, own_column, first_tile, next_tile)
            elif not merged and thread == consumers + 32:
                load_weights(weight, shared + weights_offset, weight_full, weight_empty, own_column, first_tile, next_tile)
            elif thread >= idle and thread < idle + 32 and first_tile < tiles:
                warm(thread & 31, first_tile, own_column, operands)
        else:
            group = thread >> 7
            lane = thread & 31
            leader = (thread & 127) == 0
            warp_row = i32(group // warp_columns)
            own_channel = i32((group - warp_row * warp_columns) * WGMMA_CHANNELS)
            own_row = i32(0 if in_turn else warp_row * tile_h)
            weights_start = u32(shared + weights_offset + own_channel * ROW_BYTES)
            patch_start = u32(shared + (0 if in_turn else warp_row * row_patch_bytes))
            staged_y = u32(shared + y_offset + group * warpgroup_y_bytes)
            warp_channel = i32(((thread >> 5) & 3) * 16)
            matrix_offset = staging_offset(lane, warp_channel)
            if merged:
                merge_weights(weight, shared, thread, own_column)
            ptx.wait_for_predecessor()

            acc = cuda.local.array(accumulators, sum_type)
            if in_turn:
                patch_full = u32(patch_full + warp_row * (patches * BARRIER_BYTES))
            patch_parities = u32(0)
            buffer = u32(warp_row * chunks if in_turn else 0) % u32(patches)
            previous_buffer = buffer
            stage = u32(0)
            previous_stage = stage
            weight_parity = u32(0)
            residual_full = u32(shared + residual_offset + group * BARRIER_BYTES)
            residual_parity = u32(0)
            held = i32(0)  # whether the last tile's patch must still be handed back
            tile = first_tile
            if in_turn:
                tile = i32(tile + warp_row * next_tile)
            while tile < tiles:
                place = own_place(tile, own_column, own_row, own_channel)
                # ---- multiply
                patch_ring, weight_ring = multiply_tile(
                    acc, patch_start, weights_start, patch_full, patch_empty, Barriers(weight_full, weight_empty),
                    leader, held, Ring(buffer, previous_buffer, patch_parities), Ring(stage, previous_stage, weight_parity),
                    Residual(residual, residual_full), staged_y, place, own_column,
                )  # fmt: skip
                buffer, previous_buffer, patch_parities = patch_ring
                stage, previous_stage, weight_parity = weight_ring
                # ---- epilogue and store
                staged_y, residual_parity = store_tile(
                    acc, y, operands, shared, Thread(group, lane, leader, warp_channel, matrix_offset), place,
                    patch_empty, previous_buffer, Residual(residual, residual_full), residual_parity, staged_y,
                )  # fmt: skip
                held = i32(1)
                if in_turn:
                    buffer = u32(buffer + (turns - 1) * chunks) % u32(patches)
                tile = i32(tile + next_tile * turns)
            if staged and leader:
                ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel
