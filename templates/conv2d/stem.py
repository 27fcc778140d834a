"""conv2d with few input channels on Hopper's tensor cores: a network's stem, without unfolding it in memory.

In NHWC the S * C values that one row of the kernel meets are neighbours in x: a run. A tile's input is therefore a patch of
rows of values, which one TMA instruction loads, padding included. k counts R runs, each padded to whole octets (16 bytes: 8
values of 16 bits, or 16 of int8 or uint8):

    y[pixel, k] = sum over rows r and values i of the run:  patch[row(pixel) * stride_h + r * dilation_h, first(pixel) + i]
                                                              * weight[k, r, i]

wgmma takes its first operand from registers, where a thread holds words of neighbouring values of two pixels: two values of
16 bits, or four of 8 bits. Each is one word of the patch: a thread loads its operands from there, at addresses that differ
by constants (`stem_products`). No unfolded tile is ever written, to any memory. Weights are put into shared memory once, in
the layout that wgmma reads.

TMA reads rows of x that lie a multiple of 16 bytes apart. Other rows are copied first, to rows with filler between them.

A warpgroup has 64 pixels at a time, a rectangle of one image, and its own ring of patches. The warpgroups of a block share
only the weights. docs/kernels/conv2d_stem.md explains more, including the use of each knob.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of A) and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops import Layout
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d import geometry
from schedsearch.templates.conv2d.limits import LARGEST_SIZE
from schedsearch.templates.conv2d.maps import patch_map, pixel_map
from schedsearch.templates.conv2d.stem_products import address_of_value, masks_of_word, multiply_patch
from schedsearch.templates.conv2d.stem_sizes import (
    MAX_BOX,
    ROW_BYTES,
    Plan,
    Runs,
    Staging,
    derived_quantities,
    evaluate,
    flattened,
    row_values,
    usable_tiles,
    wide,
)
from schedsearch.templates.conv2d.stem_store import channel_of_column, end_of_tile, place_in_tile, rows_of
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.mover import Mover
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.parts import hopper, pipeline, ptx, walk
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.choosing import least_predicted
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, BARRIER_BYTES, WARPGROUP
from schedsearch.templates.parts.loads import load_run, load_run_of_bytes
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.templates.parts.stages import reads_bytes
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.templates.parts.zero_points import ZeroPoint
from schedsearch.workload import Workload

MAX_RUN = 128  # values; beyond, there are enough channels for the other kernels
LONGEST_RUN = 512  # of channels that fill no 16 bytes, which the other kernels load in small pieces
MAX_STEPS = 64
MAX_CHANNELS = 256  # wgmma's N
MAX_CHANNELS_AHEAD = 128  # that leave registers for what is loaded ahead of an operand like y
MAX_PIXELS = 2**31 - 1
BASE_REGISTERS = 44  # of a thread beside accumulators and operands: addresses, descriptors, temporaries
RESIDUAL_REGISTERS = 16  # more of a thread that adds a quantised residual

# Captured values that Numba must know; see `KernelStep.shaped_by`.
SHAPED_BY = frozenset(
    {"accumulators", "array_ahead", "finish.fused", "finish.staged", "finish.words_ahead", "staged", "words_ahead"}
)
OF_FRAGMENTS = {"finish.fused", "finish.staged", "finish.words_ahead"}  # of those: of an epilogue on fragments

_ROWS = "x_rows"

GROUPS = (1, 2, 3, 4)
PATCHES = (1, 2, 3, 4)
REGISTER_STEPS = (2, 4, 6, 12)
BLOCKS_PER_SM = (1, 2, 3, 4)


class Conv2dStem(Template[Conv2dParams]):
    """conv2d for compute capability 9.0 and S * C up to 64: fp16 and bf16 with sums in fp32, int8 and uint8 with int32."""

    name = "conv2d_stem"
    version = 2
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if w.x_slice:
            return f"x is a slice of an array of {w.x_slice[0]} channels; allowed: an array of its own"
        if w.groups != 1:
            return f"groups is {w.groups}; allowed: 1"
        if (w.layout, w.weight_layout) != ("NHWC", "OHWI"):
            return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
        slices = dtype_of(w.out_dtype).nbytes < 4  # stored by TMA
        any_c = workload.replace(c=ALIGNMENT_BYTES)
        if reason := geometry.problem(any_c, target, integers=True, slices=slices, any_k=True):
            return reason  # any number of channels is possible
        workload = flattened(workload)
        w = workload.params
        runs = Runs.of(workload)
        octet = runs.octet_values
        longest = LONGEST_RUN if wide(workload) else MAX_RUN
        if w.s * w.c > longest:
            return f"s * c is {w.s * w.c}; allowed: up to {longest}, the values that a row of the kernel meets"
        if runs.steps > MAX_STEPS:
            return f"r * ceil(s * c / {octet}) is {w.r * runs.octets}; allowed: up to {2 * MAX_STEPS}"
        if w.s > 1 and w.dilation[1] > 1:
            return f"the horizontal dilation is {w.dilation[1]}; allowed: 1, so that a run's values are neighbours"
        if w.w * w.c >= LARGEST_SIZE:
            return f"w * c is {w.w * w.c}; allowed: less than 2**30, coordinates have 32 bits"
        if w.k > MAX_CHANNELS:
            return f"k is {w.k}; allowed: up to {MAX_CHANNELS}, wgmma's columns"
        if w.k > MAX_CHANNELS_AHEAD and reads_bytes(workload):
            return f"k is {w.k}, and the residual has 8 bits; allowed: up to {MAX_CHANNELS_AHEAD}, it is loaded to registers"
        if (widen := widened_rows(workload, target)) and (reason := widen.problem()):
            return reason
        pixels = math.prod(workload.output.shape[:3])
        if pixels > MAX_PIXELS - MAX_BOX**2:
            return f"the output has {pixels} pixels; allowed: less than 2**31 - 2**16, they are counted in 32 bits"
        if not usable_tiles(workload, target):
            return (
                f"stride {w.stride} and a kernel that reaches over {(w.r - 1) * w.dilation[0] + 1} x {w.s} pixels; allowed: "
                f"patches of {MAX_BOX} rows x {MAX_BOX} values that fit {target.shared_bytes_per_block} bytes of shared "
                "memory beside the weights"
            )
        return None

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        workload = flattened(workload)
        steps, base = Runs.of(workload).steps, BASE_REGISTERS
        base += (
            RESIDUAL_REGISTERS + workload.params.k // 8 if reads_bytes(workload) else 0
        )  # and words that are loaded ahead
        smallest_covering = min((s for s in REGISTER_STEPS if s >= steps), default=max(REGISTER_STEPS))
        knobs = (
            Knob("tile_w", tuple(usable_tiles(workload, target)), "output pixels of a row of a tile of 64"),
            Knob("warpgroups", GROUPS, "warpgroups of a block, each with its own tile; they share the weights"),
            Knob("patches", PATCHES, "patches of x of a warpgroup that are loaded ahead or being multiplied"),
            Knob("register_steps", tuple(s for s in REGISTER_STEPS if s <= smallest_covering),
                 "k steps whose part of x is loaded into registers before they are multiplied"),
            Knob("blocks_per_sm", BLOCKS_PER_SM, "blocks that share a multiprocessor"),
        )  # fmt: skip
        constraints = (
            *hopper.block_constraints(target, "columns", base),
            Constraint(
                f"registers of two rounds of x, accumulators and {base} more <= a thread's share of the file",
                lambda q: q["operand_registers"] + q["columns"] // 2 + base <= q["registers"],
            ),
            Constraint("at most as many patches as a warpgroup loads", lambda q: q["patches"] <= q["waves"]),
            Constraint(
                "another warpgroup only if multiprocessors have tiles for it",
                lambda q: (q["warpgroups"] == 1) | (q["tiles"] > target.sms * (q["warpgroups"] - 1)),
            ),
            Constraint(
                "another block per multiprocessor only if there are tiles for it",
                lambda q: (q["blocks_per_sm"] == 1) | (q["tiles"] > target.sms * q["warpgroups"] * (q["blocks_per_sm"] - 1)),
            ),
        )
        return ConfigSpace(knobs, constraints, derived_quantities(workload, target))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The configuration with the least predicted time; among equals, the most patches, then the fewest threads."""
        return least_predicted(
            space,
            lambda q: (-q["patches"], q["threads"] * q["blocks_per_sm"], q["blocks_per_sm"], -q["register_steps"]),
        )

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        workload = flattened(workload)
        plan, zero, staging = evaluate(workload, target, config), ZeroPoint.of(workload), Staging.of(workload)
        epilogue = Epilogue(workload, zero.params) if zero else Epilogue(workload)
        output: Param = Pointer("y")
        if staging.segments:
            output = pixel_map("y", workload, staging.channels, plan.tile_w, plan.tile_h)
        one_box = plan.boxes == 1
        image = patch_map(workload, row_values(workload), plan.patch_w // plan.boxes, plan.patch_h if one_box else 1)
        step = KernelStep(
            build_kernel(workload, plan, epilogue, zero),
            (image, Pointer("weight"), output, *epilogue.params),
            Grid(-(-plan.tiles // plan.warpgroups), plan.blocks_per_sm),
            plan.threads,
            plan.shared_bytes,
            min_blocks_per_sm=plan.blocks_per_sm,
            shaped_by=SHAPED_BY - OF_FRAGMENTS | {"finish.store_rows.held"} if staging.sums_bytes else SHAPED_BY,
            ahead=("weight",),
        )
        weight_bytes = dtype_of(workload.params.weight_dtype).nbytes * piece(workload)
        if zero and workload.params.c % 4 == 0:
            weight_bytes = max(weight_bytes, 4)  # see `ZeroPoint.step`
        alignments = {"x": ALIGNMENT_BYTES, "weight": weight_bytes, "y": ALIGNMENT_BYTES, **epilogue.alignments}
        if rows := rows_of(workload, plan):
            alignments |= rows.alignments(epilogue)
        source = KernelSource("cuda", "sm_90a", (step,), alignments=alignments)
        if widen := widened_rows(workload, target):
            how, nbytes = widen.default(), widen.move.y_bytes
            prepared = Prepared("x", _ROWS, nbytes, widen.step(how, x="x", y=_ROWS), widen.alignments(how)[0])
            source = over_prepared(source, [prepared])
        if zero is None:
            return source
        steps, alignments = (zero.step(), *source.steps), {**source.alignments, **zero.alignments}
        return dataclasses.replace(
            source, steps=steps, workspaces={**source.workspaces, **zero.workspaces}, alignments=alignments
        )


def piece(workload: Workload[Conv2dParams]) -> int:
    """Values of weight per load: the most that never cross the end of a run, up to a word."""
    runs = Runs.of(workload)
    return math.gcd(workload.params.s * workload.params.c, runs.skipped, runs.word_values)


def widened_rows(workload: Workload[Conv2dParams], target: Target) -> Mover | None:
    """The copy of x to rows a multiple of 16 bytes apart; None if they are, or if there is only one."""
    p, row = workload.params, row_values(workload)
    if row == p.w * p.c or (wide(workload) and p.h == p.n == 1):
        return None
    rows, sizes = Layout.parse("NC"), {"N": p.n * p.h, "C": p.w * p.c}
    permutation = Permutation.of(rows, rows, sizes, dtype_of(p.dtype).nbytes, y_sizes={"C": row})
    return Mover(Move.of_permutation(permutation), target)


# --- The kernel -------------------------------------------------------------------------------------------------------


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, zero: ZeroPoint | None
) -> Callable[..., None]:
    """The kernel function of one configuration."""
    runs, layout, staging = Runs.of(workload), plan.shared, Staging.of(workload)
    wgmma = Wgmma(workload.params.dtype, workload.params.weight_dtype)
    tile_w, tiles = plan.tile_w, plan.tiles
    groups, patches, patch_bytes = plan.warpgroups, plan.patches, plan.patch_bytes

    # Addresses in shared memory.
    y_offset, patches_offset, full_offset = layout.offset("y"), layout.offset("patches"), layout.offset("full")
    staged, group_y_bytes, y_row_bytes = staging.segments > 0, staging.nbytes, staging.row_bytes

    # Load.
    load_patch, load_weights = _load_patch(workload, runs, plan), _load_weights(workload, runs, plan)
    load_first_patches = _load_first_patches(plan, load_patch)

    # Multiply.
    descriptor, accumulators, sum_type = hopper.matrix_descriptor(ROW_BYTES), plan.columns // 2, wgmma.accumulator_type
    multiply, word_values = multiply_patch(workload, plan.patch_w, plan.register_steps), runs.word_values
    place_of, address_of, masks_of = (
        place_in_tile(tile_w),
        address_of_value(workload, runs, plan),
        masks_of_word(workload, runs),
    )
    _, advance = pipeline.consumer(patches)

    # Store.
    words_ahead, load_ahead, finish = end_of_tile(workload, plan, epilogue, zero)
    array_ahead = max(words_ahead, 1)  # an array has a constant size, not 0
    group_barrier = ptx.group_barrier(groups, WARPGROUP)

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        shared = shared_base()
        thread = i32(cuda.threadIdx.x)
        group = i32(thread >> 7)
        lane = i32(thread & 31)
        leader = (thread & 127) == 0
        group_y = u32(shared + y_offset + group * group_y_bytes)
        first_patch = u32(shared + patches_offset + group * (patches * patch_bytes))
        full = u32(shared + full_offset + group * (patches * BARRIER_BYTES))
        tile = i32(cuda.blockIdx.x * groups + group)
        stride = i32(cuda.gridDim.x * groups)

        # ---- load: the first patches, and meanwhile the weights, which warps without a leader read ahead
        if leader:
            ptx.wait_for_predecessor()
            load_first_patches(xmap, tile, stride, first_patch, full)
        load_weights(weight, shared, thread)
        ptx.fence_async_shared()
        ptx.wait_for_predecessor()
        cuda.syncthreads()

        # From each 8 pixels of its warp a thread has one, lane / 4; from each octet the word lane % 4.
        warp_pixel = i32(((thread >> 5) & 3) * 16)
        tile_row, tile_column = place_of(warp_pixel + (lane >> 2))
        tile_row_8, tile_column_8 = place_of(warp_pixel + (lane >> 2) + 8)
        value = u32((lane & 3) * word_values)
        at, at_shift = address_of(first_patch, tile_row, tile_column, value)
        at_8, at_8_shift = address_of(first_patch, tile_row_8, tile_column_8, value)
        first_mask, last_mask = masks_of(value)
        weights = u64(descriptor) | u64(shared >> 4)
        matrix_row = u32(warp_pixel + (lane & 15))  # stmatrix: lane 8 q + i has the address of row i of matrix q
        matrix_address = u32(group_y + matrix_row * y_row_bytes)
        places = tile_row, tile_column, tile_row_8, tile_column_8
        staged_at = group_y, matrix_address, matrix_row

        acc = cuda.local.array(accumulators, sum_type)
        ahead = cuda.local.array(array_ahead, i32)
        buffer = u32(0)
        parity = u32(0)
        while tile < tiles:
            if words_ahead:
                load_ahead(ahead, tile, lane, places, operands)
            # ---- multiply
            barrier = u32(full + buffer * BARRIER_BYTES)
            ptx.mbarrier_wait(barrier, parity)
            patch = u32(buffer * patch_bytes)
            multiply(acc, at + patch, at_8 + patch, at_shift, at_8_shift, first_mask, last_mask, weights)
            if staged and leader:
                ptx.bulk_wait_read_all()  # the previous tile's stores have read group_y
            group_barrier(group)  # all have read the patch
            if leader and tile + patches * stride < tiles:
                load_patch(xmap, tile + patches * stride, first_patch + patch, barrier)
            buffer, parity = advance(buffer, parity)

            # ---- epilogue and store
            finish(acc, ahead, y, tile, group, lane, leader, places, staged_at, operands)
            tile = i32(tile + stride)
        if staged and leader:
            ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel


# --- The functions that the kernel captures ----------------------------------------------------------------------------


def _load_patch(workload: Workload[Conv2dParams], runs: Runs, plan: Plan) -> Callable[..., None]:
    """One thread loads the patch of a tile."""
    p = workload.params
    (stride_h, stride_w), (top, left) = p.stride, p.padding[:2]
    channels, before, boxes, rows = p.c, runs.skipped + runs.lead, plan.boxes, plan.patch_h
    loaded_bytes, box_w = plan.patch_w * plan.patch_h * runs.element_bytes, plan.patch_w // plan.boxes
    box_bytes = box_w * runs.element_bytes
    tile_origin = walk.rectangles(plan.row_tiles, plan.strips, plan.tile_h, plan.tile_w)

    def load_patch(x: Any, tile: Any, patch: Any, barrier: Any) -> None:
        image, row, column = tile_origin(tile)
        ptx.mbarrier_expect_bytes(barrier, loaded_bytes)
        value = i32((column * stride_w - left) * channels - before)
        ptx.tma_load_3d(patch, x, value, row * stride_h - top, image, barrier)

    def load_boxes(x: Any, tile: Any, patch: Any, barrier: Any) -> None:
        image, row, column = tile_origin(tile)
        ptx.mbarrier_expect_bytes(barrier, loaded_bytes)
        value = i32((column * stride_w - left) * channels - before)
        for number in range(i32(rows * boxes)):
            of_row = i32(u32(number) // u32(boxes))
            first = i32(value + (number - of_row * boxes) * box_w)
            ptx.tma_load_3d(patch + number * box_bytes, x, first, row * stride_h - top + of_row, image, barrier)

    return load_patch if boxes == 1 else load_boxes


def _load_first_patches(plan: Plan, load_patch: Callable[..., None]) -> Callable[..., None]:
    """`load(x, tile, stride, first_patch, full)`: one thread initialises the barriers, and fills all patches."""
    patches, patch_bytes, tiles = plan.patches, plan.patch_bytes, plan.tiles

    def load_first_patches(x: Any, tile: Any, stride: Any, first_patch: Any, full: Any) -> None:
        for buffer in range(patches):
            ptx.mbarrier_init(full + buffer * BARRIER_BYTES, 1)
        ptx.mbarrier_init_fence()
        for buffer in range(patches):
            if tile + buffer * stride < tiles:
                load_patch(x, tile + buffer * stride, first_patch + buffer * patch_bytes, full + buffer * BARRIER_BYTES)

    return load_first_patches


def _load_weights(workload: Workload[Conv2dParams], runs: Runs, plan: Plan) -> Callable[..., None]:
    """All threads of a block write the weights to shared memory in wgmma's layout, with runs padded to whole octets."""
    p = workload.params
    kernel_h, out_channels, columns, threads = p.r, p.k, runs.columns, plan.threads
    run_octets, run_values, skipped, all_octets = runs.octets, runs.values, runs.skipped, 2 * runs.steps
    weight_chunks, element_bytes, octet_values = columns * all_octets, runs.element_bytes, runs.octet_values
    run, channel_of = _load_octet(workload), channel_of_column(p.out_dtype)

    def load_weights(weight: Any, shared: Any, thread: Any) -> None:
        for chunk in range(thread, weight_chunks, threads):
            column = i32(u32(chunk) // u32(all_octets))
            octet = i32(chunk - column * all_octets)
            channel = channel_of(column)
            row = i32(u32(octet) // u32(run_octets))
            value = i32((octet - row * run_octets) * octet_values)
            first = i32(skipped - value)
            stop = i32(0)
            if (channel < out_channels) & (row < kernel_h):
                stop = i32(run_values - value)
            element = i64(channel * kernel_h + row) * (run_values - skipped) + (value - skipped)
            w0, w1, w2, w3 = run(u64(weight + u64(element * element_bytes)), first, stop)
            line = u32((octet >> 3) * columns + column)
            place = u32(u32(octet ^ column) & u32(7))
            ptx.store_shared_v4(shared + line * ROW_BYTES + place * 16, w0, w1, w2, w3)

    return load_weights


def _load_octet(workload: Workload[Conv2dParams]) -> Callable[..., Any]:
    """`load(address, first, stop)`: an octet of weights as four words; those not in [first, stop) are zero."""
    if Runs.of(workload).element_bytes == 2:
        return load_run(piece(workload))
    load = load_run_of_bytes(piece(workload))

    def load_bytes(address: Any, first: Any, stop: Any) -> Any:
        return load(address, first, stop, u32(0))

    return load_bytes
