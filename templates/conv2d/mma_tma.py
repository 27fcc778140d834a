"""The kernel of conv2d_mma whose operands come by TMA: one thread loads, all other warps multiply by mma.sync and store.

A ring of stages has the same bytes in the same places as that of `mma_kernel`: TMA's swizzle is `ring.swizzle`. A step has
`bk` channels of one tap, so a tap's last step may end in zeros. The loading thread waits until all warps have read a stage.
A block that loops over tiles keeps its results apart from the ring, so that the next tile is loaded while one is stored.

Sources: PTX ISA, "Data Movement: cp.async.bulk.tensor", "mbarrier" and "Warp Level Matrix Instructions" (ldmatrix).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.launch import TensorMap
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.target import Target
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.conv2d.maps import L2_PROMOTION_BYTES, filter_map, image_map
from schedsearch.templates.conv2d.mma_kernel import first_operands, image_end, images, tile_walk
from schedsearch.templates.conv2d.mma_sizes import MOST_PIXELS, Gemm, Plan
from schedsearch.templates.conv2d.mma_store import ChannelCorrections, output
from schedsearch.templates.conv2d.ring import filter_sets
from schedsearch.templates.parts import cluster, gather, pipeline, ptx
from schedsearch.templates.parts.casts import i32, u16, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, BARRIER_BYTES
from schedsearch.templates.parts.warm import warm_operands
from schedsearch.workload import Workload


def shaped_by(plan: Plan) -> frozenset[str]:
    """The names that shape the kernel; see `KernelStep`."""
    return frozenset({"accumulators", "multiply_tile.of_a", "multiply_tile.of_b"})


def tma_problem(workload: Workload[Conv2dParams], target: Target) -> str | None:
    """Why TMA cannot load the operands (one sentence: what, got, allowed), or None."""
    w, gemm, im2col = workload.params, Gemm.of(workload), Im2col.of(workload)
    if reason := target.older_than((9, 0)):
        return reason
    if w.layout != "NHWC" or w.weight_layout != "OHWI":
        return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
    elements = ALIGNMENT_BYTES // gemm.element_bytes
    for name, value in (("a group", gemm.c), *(("x_slice", each) for each in w.x_slice)):
        if value % elements:
            return f"{name} has {value} channels; allowed: multiples of {elements}, TMA's strides are of 16 bytes"
    return im2col.problem(MOST_PIXELS)


def maps(workload: Workload[Conv2dParams], plan: Plan) -> tuple[TensorMap, TensorMap]:
    """x and the weights as the kernel loads them."""
    sets = workload.params.n if plan.own_weights else 1
    gemm = Im2col.of(workload)
    weights = filter_map(workload, plan.bn, plan.bk, L2_PROMOTION_BYTES, sets, interleave=False)
    return image_map(workload, gemm, plan.bm, plan.bk, L2_PROMOTION_BYTES), weights


class Warp(NamedTuple):
    """What a thread multiplies.

    Attributes:
        lane: of the thread in its warp.
        m, n: the first pixel and the first channel of the warp's tile within the block's.
        part: the first instruction along k of the warp within a step.
    """

    lane: Any
    m: Any
    n: Any
    part: Any


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """The kernel of one configuration. It takes (x's map, weight's map, y, *epilogue.params)."""
    tiles, stages, consumers = plan.tiling.tiles, plan.stages, plan.consumers
    accumulators, bn, k_total, sum_type = plan.accumulators, plan.bn, plan.gemm.k, plan.gemm.mma.accumulator_type
    warps, warps_n, wm, wn, slices = plan.warps, plan.warps_n, plan.wm, plan.wn, plan.slices
    staged_row_bytes, slice_bytes, staged_offset = plan.staged_row_bytes, plan.slice_bytes, plan.staged_offset
    full_offset, parts = plan.barrier_offset, plan.bk // plan.gemm.mma.k // slices  # instructions of a warp in a step

    load_tiles, multiply_tile = loads(workload, plan), multiplication(plan)
    place, stop_of, initialise = tile_walk(plan), image_end(plan), pipeline.initialise
    stage_tile, store = plan.gemm.mma.stage(wm, wn, staged_row_bytes), output(workload, plan, epilogue, corrections)
    meet, warm = ptx.group_barrier(1, consumers), warm_operands(workload, epilogue.params)

    def kernel(xmap: Any, wmap: Any, y: Any, *operands: Any) -> None:
        shared = shared_base()
        full = u32(shared + full_offset)
        empty = u32(full + stages * BARRIER_BYTES)
        thread = u32(cuda.threadIdx.x)
        if thread == 0:
            initialise(full, stages, 1)
            initialise(empty, stages, warps * slices)
            ptx.mbarrier_init_fence()
        cuda.syncthreads()

        if thread >= consumers:
            # ---- load
            if thread == consumers:
                load_tiles(xmap, wmap, shared, full, empty)
        else:
            ptx.wait_for_predecessor()
            lane, warp = u32(thread % 32), u32(thread // 32)
            part_first, warp = u32(warp // warps * parts), u32(warp % warps)
            staged = u32(shared + staged_offset)
            out_slice = u32(staged + part_first // parts * slice_bytes)
            warp_m, warp_n = u32(warp // warps_n * wm), u32(warp % warps_n * wn)
            barriers, own = pipeline.Barriers(full, empty), Warp(lane, warp_m, warp_n, part_first)
            acc = cuda.local.array(accumulators, sum_type)
            stage, parity = u32(0), u32(0)

            for tile in range(i32(cuda.blockIdx.x), i32(tiles), i32(cuda.gridDim.x)):
                m_first, group, k_first = place(tile)
                k_left = i32(k_total - k_first)
                if thread < 32:  # this warp would wait for the first stage anyway
                    warm(lane, i32(group * k_total + k_first), i32(min(bn, k_left)), operands)

                # ---- multiply
                for i in range(accumulators):
                    acc[i] = sum_type(0)
                stage, parity = multiply_tile(acc, shared, barriers, own, stage, parity)

                # ---- store
                meet(0)  # all warps have read the ring, or the results of the tile before, which the next lines overwrite
                stage_tile(acc, out_slice + (warp_m + lane // 4) * staged_row_bytes + (warp_n + lane % 4 * 2) * 4)
                meet(0)
                store(y, staged, thread, m_first, stop_of(m_first), group, k_first, k_left, operands)

    return kernel


def multiplication(plan: Plan) -> Callable[..., Any]:
    """`multiply_tile(acc, shared, barriers, warp, stage, parity)` adds the products of a tile.

    It returns the last two as they are for the next tile, see `parts.pipeline`.
    """
    steps, stages, stage_bytes, row_bytes = plan.steps, plan.stages, plan.stage_bytes, plan.row_bytes
    mma, parts, of_a, of_b = plan.gemm.mma, plan.bk // plan.gemm.mma.k // plan.slices, plan.wm // 4, plan.wn // 4
    (take, advance), operands_of = pipeline.consumer(stages), first_operands(plan)
    load, multiply = mma.load(plan.wm, plan.wn, row_bytes), mma.multiply(plan.wm, plan.wn, row_bytes)

    def multiply_tile(acc: Any, shared: Any, barriers: Any, warp: Any, stage: Any, parity: Any) -> Any:
        x_first, w_first = operands_of(shared, warp.lane, warp.m, warp.n, warp.part)
        a = cuda.local.array(of_a, u32)
        b = cuda.local.array(of_b, u32)
        next_b = cuda.local.array(of_b, u32)
        parity = take(barriers.full, stage, parity)
        load(a, b, x_first + stage * stage_bytes, w_first + stage * stage_bytes)
        for step in range(i32(steps)):
            at = u32(stage * stage_bytes)
            for part in range(1, parts):  # the operands of each are loaded while those before are multiplied
                flips = u32(part * 32)  # bits of a chunk's number, which the swizzle only flips
                multiply(acc, a, b, next_b, (x_first + at) ^ flips, (w_first + at) ^ flips)
                for i in range(of_b):
                    b[i] = next_b[i]
            ptx.fence_async_shared()  # TMA writes in another proxy: reads that are on their way must end before
            if warp.lane == 0:
                ptx.mbarrier_arrive(barriers.empty + stage * BARRIER_BYTES)
            stage, parity = advance(stage, parity)
            if step + 1 < steps:  # behind the last step it loads what nobody multiplies
                parity = take(barriers.full, stage, parity)
            multiply(acc, a, b, next_b, x_first + stage * stage_bytes, w_first + stage * stage_bytes)
            for i in range(of_b):
                b[i] = next_b[i]
        return stage, parity

    return multiply_tile


def loads(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`load_tiles(xmap, wmap, shared, full, empty)`: one thread loads the operands of all tiles of its block.

    Weights of the first stages are constants: they are loaded before the wait for the kernel in front.
    """
    gemm, bk, k_total, x_bytes, stage_bytes = Im2col.of(workload), plan.bk, plan.gemm.k, plan.x_bytes, plan.stage_bytes
    tiles, taps, ahead = plan.tiling.tiles, gemm.taps, min(plan.stages, plan.steps)
    place, image_of, set_of = tile_walk(plan), images(plan), filter_sets(plan)
    advance = pipeline.producer(plan.stages, stage_bytes).advance
    load_image, load_filters = cluster.tma_load_im2col(multicast=False), cluster.tma_load_tiled(multicast=False)
    group_channels, first_channel, (dilation_h, dilation_w) = plan.gemm.c, gemm.first_channel, gemm.dilation
    base_pixel, first_load, next_load = gather.im2col(
        gemm.out_w, plan.gemm.pixels, gemm.stride, (-gemm.lower[1], -gemm.lower[0]), group_channels, bk, gemm.kernel_w
    )
    weights_ahead = not plan.own_weights

    def load_tiles(xmap: Any, wmap: Any, shared: Any, full: Any, empty: Any) -> None:
        ptx.prefetch_map(xmap)
        ptx.prefetch_map(wmap)
        stage, parity = u32(0), u32(1)
        first = i32(cuda.blockIdx.x)
        if not weights_ahead:
            ptx.wait_for_predecessor()
        for tile in range(first, i32(tiles), i32(cuda.gridDim.x)):
            m_first, group, k_first = place(tile)
            image, h, w = base_pixel(i32(m_first))
            channels = i32(i32(group) * group_channels + first_channel)
            filters = i32(i32(set_of(image_of(m_first), group)) * k_total + k_first)
            if tile == first:
                tap, channel, tap_h, tap_w = first_load(i32(0))
                for number in range(i32(ahead)):
                    barrier = u32(full + number * BARRIER_BYTES)
                    ptx.mbarrier_expect_bytes(barrier, stage_bytes)
                    to = u32(shared + number * stage_bytes + x_bytes)
                    load_filters(to, wmap, channel, tap, filters, barrier, u16(1))
                    tap, channel, tap_h, tap_w = next_load(tap, channel, tap_h, tap_w)
                if weights_ahead:
                    ptx.wait_for_predecessor()
            step = i32(0)
            tap, channel, tap_h, tap_w = first_load(step)
            while tap < taps:  # the compiler would unroll a loop over the steps
                to = u32(shared + stage * stage_bytes)
                barrier = u32(full + stage * BARRIER_BYTES)
                if tile > first or step >= ahead:
                    ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
                    ptx.mbarrier_expect_bytes(barrier, stage_bytes)
                    load_filters(to + x_bytes, wmap, channel, tap, filters, barrier, u16(1))
                tap_x, tap_y = u16(tap_w * dilation_w), u16(tap_h * dilation_h)
                load_image(to, xmap, i32(channels + channel), w, h, image, barrier, tap_x, tap_y, u16(1))
                tap, channel, tap_h, tap_w = next_load(tap, channel, tap_h, tap_w)
                stage, parity = advance(stage, parity)
                step = i32(step + 1)

    return load_tiles
