"""conv2d_mma with x loaded by TMA as patches: a tile's pixels with all that their taps read, once for all taps.

The ring has stages of weights, one for each tap of `bk` channels. In front of it are one or two patches, each with `bk`
channels of the positions of `strips.Strips`. A tap of a pixel is its position plus a shift, so ldmatrix reads the rows of
any tap where they are. Behind the barriers of the stages are those of the patches: full ones, then empty ones.

The rest of the kernel is that of `mma_tma`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.launch import TensorMap
from schedsearch.ops.conv2d import Conv2dParams, first_channel
from schedsearch.templates.conv2d.maps import L2_PROMOTION_BYTES, filter_map, pixel_map
from schedsearch.templates.conv2d.mma_kernel import tile_walk
from schedsearch.templates.conv2d.mma_sizes import Plan
from schedsearch.templates.conv2d.ring import swizzle
from schedsearch.templates.conv2d.strips import ROW_BYTES
from schedsearch.templates.parts import cluster, pipeline, ptx
from schedsearch.templates.parts.casts import i32, u16, u32
from schedsearch.templates.parts.hopper import BARRIER_BYTES
from schedsearch.workload import Workload

MAX_PIXELS = 2**29
# Names that the kernel captures; see `KernelStep`.
SHAPED_BY = frozenset({"accumulators", *(f"multiply_tile.{name}" for name in ("rows", "of_a", "of_b"))})


def patches_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why x cannot be loaded as patches where TMA can load it (one sentence: what, got, allowed), or None."""
    w, pixels = workload.params, math.prod(workload.output.shape) // workload.params.k
    if w.r * w.s == 1 or w.stride != (1, 1):
        return f"the kernel is {w.r}x{w.s} with stride {w.stride}; allowed: more than one tap, stride 1"
    if pixels >= MAX_PIXELS:
        return f"y has {pixels} pixels; allowed: less than 2**29, strips have up to twice as many"
    return None


def maps(workload: Workload[Conv2dParams], plan: Plan) -> tuple[TensorMap, TensorMap]:
    """x in boxes of a row of a patch, and the weights."""
    assert plan.strips is not None
    weights = filter_map(workload, plan.bn, plan.bk, L2_PROMOTION_BYTES, interleave=False)
    return pixel_map("x", workload, plan.bk, plan.strips.box, 1), weights


def loads(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`load_tiles(xmap, wmap, shared, full, empty)`: one thread loads the operands of all tiles of its block.

    A patch is loaded while taps of the one before are multiplied: as many taps into it as there are stages, because the
    patch before that has been read by then.
    """
    tiles, taps, blocks, bk = plan.tiling.tiles, plan.gemm.taps, plan.channel_blocks, plan.bk
    stages, stage_bytes, patches, k_total, w_offset = plan.stages, plan.stage_bytes, plan.patches, plan.gemm.k, plan.w_offset
    ahead, turn, barriers = min(stages, plan.steps), min(stages, taps - 1), 2 * stages * BARRIER_BYTES
    place, load_filters, load_patch = tile_walk(plan), cluster.tma_load_tiled(multicast=False), patch_load(workload, plan)
    advance, advance_patch = pipeline.producer(stages, stage_bytes).advance, pipeline.producer(patches, 0).advance
    group_channels, first = plan.gemm.c, first_channel(workload.params)

    def load_tiles(xmap: Any, wmap: Any, shared: Any, full: Any, empty: Any) -> None:
        ptx.prefetch_map(xmap)
        ptx.prefetch_map(wmap)
        stage, parity, patch, patch_parity = u32(0), u32(1), u32(0), u32(1)
        own = i32(cuda.blockIdx.x)
        _, group, k_first = place(own)
        for number in range(i32(ahead)):
            barrier = u32(full + number * BARRIER_BYTES)
            ptx.mbarrier_expect_bytes(barrier, stage_bytes)
            to, block = u32(shared + w_offset + number * stage_bytes), i32(u32(number) // u32(taps))
            tap = i32(number - block * taps)
            load_filters(to, wmap, i32(block * bk), tap, i32(group * k_total + k_first), barrier, u16(1))
        ptx.wait_for_predecessor()
        next_tile, next_block = own, i32(0)  # whose patch is loaded next
        for tile in range(own, i32(tiles), i32(cuda.gridDim.x)):
            _, group, k_first = place(tile)
            filters = i32(i32(group) * k_total + k_first)
            block, tap = i32(0), i32(0)
            while block < blocks:  # one loop over blocks and taps: of two, the compiler would unroll the inner one
                step = i32(block * taps + tap)
                begins = tile == own and step == 0
                if begins or (tap == turn and next_tile < tiles):
                    ptx.mbarrier_wait(full + barriers + (patches + patch) * BARRIER_BYTES, patch_parity)
                    m_next, of_group, _ = place(next_tile)
                    channel = i32(i32(of_group) * group_channels + first + next_block * bk)
                    load_patch(xmap, shared, full + barriers, patch, m_next, channel)
                    patch, patch_parity = advance_patch(patch, patch_parity)
                    next_block = i32(next_block + 1)
                    if next_block == blocks:
                        next_block, next_tile = i32(0), i32(next_tile + cuda.gridDim.x)
                if tile > own or step >= ahead:
                    ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
                    barrier = u32(full + stage * BARRIER_BYTES)
                    ptx.mbarrier_expect_bytes(barrier, stage_bytes)
                    to = u32(shared + w_offset + stage * stage_bytes)
                    load_filters(to, wmap, i32(block * bk), tap, filters, barrier, u16(1))
                stage, parity = advance(stage, parity)
                tap = i32(tap + 1)
                if tap == taps:
                    block, tap = i32(block + 1), i32(0)

    return load_tiles


def patch_load(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., None]:
    """`load(xmap, shared, full, patch, m_first, channel)`: the patch of the tile at `m_first`, row by row.

    `full` is the address of the first barrier of the patches. What lies outside of an image is zero.
    """
    strips, bm = plan.strips, plan.bm
    assert strips is not None
    width, pixels, out_h, (reach_h, _) = strips.width, strips.pixels, strips.out_h, strips.reach
    patch_bytes, loaded_bytes, row_bytes = strips.patch_bytes, strips.box * ROW_BYTES, strips.pitch * ROW_BYTES
    top, left, _, _ = workload.params.padding
    stop = out_h + reach_h - top  # the row behind the last one that the taps of an image read

    def load(xmap: Any, shared: Any, full: Any, patch: Any, m_first: Any, channel: Any) -> None:
        barrier, to = u32(full + patch * BARRIER_BYTES), u32(shared + patch * patch_bytes)
        strip = u32(u32(m_first) // u32(pixels))
        first = u32(m_first - strip * pixels)
        row, last_row = u32(first // u32(width)), u32((min(first + bm, pixels) - 1) // u32(width))
        image, last_image = i32(row // u32(out_h)), i32(last_row // u32(out_h))
        h, w = i32(row - image * out_h - top), i32(strip * width - left)
        rows = i32(last_row - row + 1 + (last_image - image + 1) * reach_h)
        ptx.mbarrier_expect_bytes(barrier, rows * loaded_bytes)
        for _ in range(rows):
            ptx.tma_load_4d(to, xmap, channel, w, h, image, barrier)
            to, h = u32(to + row_bytes), i32(h + 1)
            if h == stop:
                h, image = i32(-top), i32(image + 1)

    return load


def positions(plan: Plan) -> Callable[..., None]:
    """`locate(m_first, row, found)`: the positions in the patch of a lane's rows of x, 16 apart, for their first tap."""
    strips, count = plan.strips, plan.wm // 16
    assert strips is not None
    width, pixels, out_h, pitch, reach_h = strips.width, strips.pixels, strips.out_h, strips.pitch, strips.reach[0]

    def locate(m_first: Any, row: Any, found: Any) -> None:
        first = u32(u32(m_first) % u32(pixels))
        first_row = u32(first // u32(width))
        first_padded = u32(first_row + first_row // u32(out_h) * reach_h)
        for i in range(count):
            pixel = u32(first + row + i * 16)
            pixel_row = u32(pixel // u32(width))
            padded = u32(pixel_row + pixel_row // u32(out_h) * reach_h)  # rows of the images before have padding too
            found[i] = u32((padded - first_padded) * pitch + pixel - pixel_row * width)

    return locate


def multiplication(workload: Workload[Conv2dParams], plan: Plan) -> Callable[..., Any]:
    """`multiply_tile(acc, shared, barriers, warp, m_first, stage, parity, patch, patch_parity)`: see `mma_tma`."""
    strips, mma, w = plan.strips, plan.gemm.mma, workload.params
    assert strips is not None
    taps, kernel_w, patches, rows = plan.gemm.taps, w.s, plan.patches, plan.wm // 16
    stage_bytes, patch_bytes, w_offset = plan.stage_bytes, strips.patch_bytes, plan.w_offset
    parts, of_stages = plan.bk // mma.k // plan.slices, 2 * plan.stages * BARRIER_BYTES
    right, down = (
        w.dilation[1],
        w.dilation[0] * strips.pitch - w.s * w.dilation[1],
    )  # shifts: to the next tap, to the next row
    (take, advance), (take_patch, advance_patch) = pipeline.consumer(plan.stages), pipeline.consumer(patches)
    flip, locate, steps, of_a, of_b = swizzle(plan.chunks), positions(plan), plan.steps, plan.wm // 4, plan.wn // 4
    load = mma.load(plan.wm, plan.wn, ROW_BYTES, scattered=True)
    multiply = mma.multiply(plan.wm, plan.wn, ROW_BYTES, scattered=True)

    def multiply_tile(
        acc: Any, shared: Any, barriers: Any, warp: Any, m_first: Any, stage: Any, parity: Any, patch: Any, patch_parity: Any
    ) -> Any:
        full_patch = u32(barriers.full + of_stages)
        w_row = u32(warp.lane % 8 + warp.lane // 16 * 8)
        w_chunk = u32((warp.part * 2 + warp.lane // 8 % 2) ^ flip(w_row))
        w_first = u32(shared + w_offset + (warp.n + w_row) * ROW_BYTES + w_chunk * 16)
        x_chunk = u32(warp.part * 2 + warp.lane // 16)
        places = cuda.local.array(rows, u32)
        firsts = cuda.local.array(rows, u32)
        addresses = cuda.local.array(rows, u32)
        a = cuda.local.array(of_a, u32)
        b = cuda.local.array(of_b, u32)
        next_b = cuda.local.array(of_b, u32)
        locate(m_first, warp.m + warp.lane % 16, places)
        patch_parity = take_patch(full_patch, patch, patch_parity)
        for i in range(rows):
            firsts[i] = u32(shared + patch * patch_bytes + places[i] * ROW_BYTES + (x_chunk ^ flip(places[i])) * 16)
        parity = take(barriers.full, stage, parity)
        load(a, b, firsts, w_first + stage * stage_bytes)
        shift, tap, column = u32(0), i32(0), i32(0)
        for step in range(i32(steps)):
            for part in range(1, parts):  # as in `mma_tma`
                flips = u32(part * 32)
                for i in range(rows):
                    addresses[i] = u32(firsts[i] ^ flips)
                multiply(acc, a, b, next_b, addresses, (w_first + stage * stage_bytes) ^ flips)
                for i in range(of_b):
                    b[i] = next_b[i]
            ptx.fence_async_shared()  # TMA writes in another proxy: reads that are on their way must end before
            if warp.lane == 0:
                ptx.mbarrier_arrive(barriers.empty + stage * BARRIER_BYTES)
            stage, parity = advance(stage, parity)
            shift, tap, column = u32(shift + right), i32(tap + 1), i32(column + 1)
            if column == kernel_w:
                shift, column = u32(shift + down), i32(0)
            if tap == taps:
                ptx.fence_async_shared()
                if warp.lane == 0:
                    ptx.mbarrier_arrive(full_patch + (patches + patch) * BARRIER_BYTES)
                patch, patch_parity = advance_patch(patch, patch_parity)
                shift, tap, column = u32(0), i32(0), i32(0)
                if step + 1 < steps:
                    patch_parity = take_patch(full_patch, patch, patch_parity)
            for i in range(rows):
                place = u32(places[i] + shift)
                firsts[i] = u32(shared + patch * patch_bytes + place * ROW_BYTES + (x_chunk ^ flip(place)) * 16)
            if step + 1 < steps:
                parity = take(barriers.full, stage, parity)
            multiply(acc, a, b, next_b, firsts, w_first + stage * stage_bytes)
            for i in range(of_b):
                b[i] = next_b[i]
        return stage, parity, patch, patch_parity

    return multiply_tile
