"""conv2d with few input channels on Hopper's tensor cores: a network's stem, without unfolding it in memory.

In NHWC the S * C values that one row of the kernel meets are neighbours in x: a run. A tile's input is therefore a patch of
rows of values, which one TMA instruction loads, padding included. k counts R runs, each padded to whole octets (8 values):

    y[pixel, k] = sum over rows r and values i of the run:  patch[row(pixel) * stride_h + r * dilation_h, first(pixel) + i]
                                                              * weight[k, r, i]

wgmma takes its first operand from registers, where a thread holds pairs of neighbouring values of two pixels. Each pair is
one word of the patch: a thread loads its operands from there, at addresses that differ by constants. No unfolded tile is
ever written, to any memory. Weights are put into shared memory once, in the layout that wgmma reads.

A warpgroup has 64 pixels at a time, a rectangle of one image, and its own ring of patches. The warpgroups of a block share
only the weights. docs/kernels/conv2d_stem.md explains more, including the use of each knob.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of A) and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.backend.ops import device_op, shared_base
from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d import geometry
from schedsearch.templates.conv2d.limits import LARGEST_SIZE
from schedsearch.templates.conv2d.maps import patch_map, pixel_map
from schedsearch.templates.conv2d.stem_sizes import (
    GROUP_PIXELS,
    MAX_BOX,
    OCTET,
    ROW_BYTES,
    SEGMENT,
    STEPS_OF_ROW,
    Plan,
    Runs,
    derived_quantities,
    evaluate,
    staged_y_bytes,
    usable_tiles,
)
from schedsearch.templates.parts import hopper, pipeline, ptx, store, walk
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, BARRIER_BYTES, ELEMENT_BYTES, WARPGROUP
from schedsearch.templates.parts.loads import load_run
from schedsearch.workload import Workload

MAX_RUN = 64  # values; beyond, there are enough channels for the other kernels
MAX_STEPS = 64
MAX_CHANNELS = 256  # wgmma's N
MAX_PIXELS = 2**31 - 1
SEGMENT_BYTES = GROUP_PIXELS * ROW_BYTES  # of staged y: 64 output channels of a tile's pixels
BASE_REGISTERS = 44  # of a thread beside accumulators and operands: addresses, descriptors, temporaries

SHAPED_BY = frozenset({"accumulators", "fused", "staged"})  # of what the kernel captures; see `KernelStep`

GROUPS = (1, 2, 3, 4)
PATCHES = (1, 2, 3, 4)
REGISTER_STEPS = (2, 4, 6, 12)
BLOCKS_PER_SM = (1, 2, 3, 4)


class Conv2dStem(Template):
    """conv2d for compute capability 9.0 and S * C up to 64: fp16 or bf16 in, fp32 accumulation, fp16, bf16 or fp32 out."""

    name = "conv2d_stem"
    version = 2
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        w = workload
        if w.groups != 1:
            return f"groups is {w.groups}; allowed: 1"
        if (w.layout, w.weight_layout) != ("NHWC", "OHWI"):
            return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
        if reason := geometry.problem(w.replace(c=OCTET), target, slices=w.out_dtype != "float32"):
            return reason  # any number of channels is possible
        runs = Runs.of(w)
        if w.s * w.c > MAX_RUN:
            return f"s * c is {w.s * w.c}; allowed: up to {MAX_RUN}, the values that a row of the kernel meets"
        if runs.steps > MAX_STEPS:
            return f"r * ceil(s * c / 8) is {w.r * runs.octets}; allowed: up to {2 * MAX_STEPS}"
        if w.s > 1 and w.dilation[1] > 1:
            return f"the horizontal dilation is {w.dilation[1]}; allowed: 1, so that a run's values are neighbours"
        if w.w * w.c % OCTET:
            return f"w * c is {w.w * w.c}; allowed: multiples of 8, TMA's strides are of 16 bytes"
        if w.w * w.c >= LARGEST_SIZE:
            return f"w * c is {w.w * w.c}; allowed: less than 2**30, coordinates have 32 bits"
        if w.k > MAX_CHANNELS:
            return f"k is {w.k}; allowed: up to {MAX_CHANNELS}, wgmma's columns"
        pixels = math.prod(w.output.shape[:3])
        if pixels > MAX_PIXELS - MAX_BOX**2:
            return f"the output has {pixels} pixels; allowed: less than 2**31 - 2**16, they are counted in 32 bits"
        if not usable_tiles(w, target):
            return (
                f"stride {w.stride} and a kernel that reaches over {(w.r - 1) * w.dilation[0] + 1} x {w.s} pixels; allowed: "
                f"patches of {MAX_BOX} rows x {MAX_BOX} values that fit {target.shared_bytes_per_block} bytes of shared "
                "memory beside the weights"
            )
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        steps = Runs.of(workload).steps
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
            *hopper.block_constraints(target, "columns", BASE_REGISTERS),
            Constraint(
                f"registers of two rounds of x, accumulators and {BASE_REGISTERS} more <= a thread's share of the file",
                lambda q: q["operand_registers"] + q["columns"] // 2 + BASE_REGISTERS <= q["registers"],
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

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The configuration with the least predicted time; among equals, the most patches, then the fewest threads."""
        return hopper.least_predicted(
            space,
            lambda q: (-q["patches"], q["threads"] * q["blocks_per_sm"], q["blocks_per_sm"], -q["register_steps"]),
        )

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        plan = evaluate(workload, target, config)
        epilogue = Epilogue(workload)
        output: Param = Pointer("y")
        if workload.out_dtype != "float32":
            output = pixel_map("y", workload, SEGMENT, plan.tile_w, plan.tile_h)
        step = KernelStep(
            build_kernel(workload, plan, epilogue),
            (patch_map(workload, plan.patch_w, plan.patch_h), Pointer("weight"), output, *epilogue.params),
            Grid(-(-plan.tiles // plan.warpgroups), plan.blocks_per_sm),
            plan.threads,
            plan.shared_bytes,
            min_blocks_per_sm=plan.blocks_per_sm,
            shaped_by=SHAPED_BY,
        )
        alignments = {"x": ALIGNMENT_BYTES, "weight": ELEMENT_BYTES * piece(workload), "y": ALIGNMENT_BYTES}
        return KernelSource("cuda", "sm_90a", (step,), alignments={**alignments, **epilogue.alignments})


def piece(workload: Workload) -> int:
    """Values of weight per load: the most that never cross the end of a run."""
    return 2 if workload.s * workload.c % 2 == 0 and not Runs.of(workload).skipped else 1


# --- The multiplication -----------------------------------------------------------------------------------------------


def octet_offsets(workload: Workload, patch_w: int) -> list[int | None]:
    """For each octet of k, its distance in bytes from a pixel's first value in the patch; None for an octet of filler."""
    w, runs = workload, Runs.of(workload)
    row_bytes = w.dilation[0] * patch_w * ELEMENT_BYTES
    offsets: list[int | None] = [
        row * row_bytes + octet * OCTET * ELEMENT_BYTES for row in range(w.r) for octet in range(runs.octets)
    ]
    return offsets + [None] * (2 * runs.steps - len(offsets))


def multiply_patch(workload: Workload, patch_w: int, register_steps: int) -> Callable[..., Any]:
    """A device operation: the 64 pixels of a warpgroup times all weights, over all of k, from patch to accumulators.

    It takes (accumulators[columns // 2], pixel, pixel_8, shift, shift_8, first_mask, last_mask, weights). `pixel` is the
    shared address of the thread's pair in the first octet of pixel lane / 4 of its warp, `pixel_8` that of pixel
    lane / 4 + 8, both rounded down to words; `shift` is 16 where that dropped a value, else 0. The masks have the bits of a
    pair that are of the run in its first and last octet: the patch holds other values beside it, which may be infinite.
    `weights` is the weights' matrix descriptor.
    """
    runs = Runs.of(workload)
    masks: list[tuple[str, ...]] = [()] * runs.octets
    if runs.skipped:
        masks[0] += ("$first_mask",)
    if runs.values % OCTET:
        masks[-1] += ("$last_mask",)
    return _multiply_patch(
        tuple(octet_offsets(workload, patch_w)), tuple(masks), runs.odd, runs.columns, register_steps, workload.dtype
    )


@functools.cache
def _multiply_patch(
    offsets: tuple[int | None, ...],
    masks: tuple[tuple[str, ...], ...],
    odd: bool,
    columns: int,
    register_steps: int,
    dtype: str,
) -> Callable[..., Any]:
    steps, kind = len(offsets) // 2, {ptx.F16: "f16", ptx.BF16: "bf16"}[dtype]
    lines = [f"{{ .reg .pred p; .reg .b64 db; .reg .b32 low, high, a<{4 * steps}>;"]
    for first in range(0, steps, register_steps):
        stop = min(first + register_steps, steps)
        for octet in range(2 * first, 2 * stop):
            for half, pixel in enumerate(("pixel", "pixel_8")):
                lines += _load_pair(f"a{2 * octet + half}", f"${pixel}", f"$shift{pixel[5:]}", offsets[octet], odd)
                if offsets[octet] is not None:
                    for mask in masks[octet % len(masks)]:
                        lines.append(f"and.b32 a{2 * octet + half}, a{2 * octet + half}, {mask};")
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(first, stop):
            a = ", ".join(f"a{4 * step + i}" for i in range(4))
            offset = step // STEPS_OF_ROW * columns * ROW_BYTES + step % STEPS_OF_ROW * (ROW_BYTES // STEPS_OF_ROW)
            lines.append(f"add.s64 db, $weights, {offset // 16}; setp.ne.b32 p, {int(step > 0)}, 0;")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{$acc}}, {{{a}}}, db, p, 1, 1, 0;"
            )
        lines.append("wgmma.commit_group.sync.aligned;")
        # The next round's operands may take the registers of the previous round.
        lines.append(f"wgmma.wait_group.sync.aligned {int(stop < steps)};")
    return device_op(
        "multiply_patch",
        "\n".join([*lines, "}"]) + " // $shift $shift_8 $first_mask $last_mask",
        inout={"acc": ("f32", columns // 2)},
        ins={
            "pixel": "u32",
            "pixel_8": "u32",
            "shift": "u32",
            "shift_8": "u32",
            "first_mask": "u32",
            "last_mask": "u32",
            "weights": "u64",
        },
    )


def _load_pair(to: str, pixel: str, shift: str, offset: int | None, odd: bool) -> list[str]:
    if offset is None:
        return [f"mov.b32 {to}, 0;"]
    if not odd:
        return [f"ld.shared.b32 {to}, [{pixel}+{offset}];"]
    return [
        f"ld.shared.b32 low, [{pixel}+{offset}]; ld.shared.b32 high, [{pixel}+{offset + 4}];",
        f"shf.r.wrap.b32 {to}, low, high, {shift};",
    ]


# --- The kernel -------------------------------------------------------------------------------------------------------


def build_kernel(workload: Workload, plan: Plan, epilogue: Epilogue) -> Callable[..., None]:
    """The kernel function of one configuration."""
    runs, layout = Runs.of(workload), plan.shared
    _, out_h, out_w, out_channels = workload.output.shape
    columns, tile_w, tiles = runs.columns, plan.tile_w, plan.tiles
    groups, patches, patch_bytes = plan.warpgroups, plan.patches, plan.patch_bytes

    # Addresses in shared memory.
    y_offset, patches_offset, full_offset = layout.offset("y"), layout.offset("patches"), layout.offset("full")
    staged, group_y_bytes = workload.out_dtype != "float32", staged_y_bytes(workload)

    # Load.
    tile_origin = walk.rectangles(plan.row_tiles, plan.strips, plan.tile_h, tile_w)
    load_patch, load_weights = _load_patch(workload, runs, plan), _load_weights(workload, runs, plan)
    load_first_patches = _load_first_patches(plan, load_patch)

    # Multiply.
    descriptor, accumulators = hopper.matrix_descriptor(ROW_BYTES), columns // 2
    multiply = multiply_patch(workload, plan.patch_w, plan.register_steps)
    place_of, address_of, masks_of = _place_of(tile_w), _address_of(workload, runs, plan), _masks_of(runs)
    _, advance = pipeline.consumer(patches)

    # Store.
    pixel_8_elements = (out_w if tile_w == 8 else 8) * out_channels  # from pixel lane / 4 of a warp to the one after 8
    fuse, fused = epilogue.fragments(out_channels // 8, pixel_8_elements), not epilogue.identity
    stage_y = store.stage_pairs(workload.out_dtype if staged else "float16", columns // 8, 8, SEGMENT_BYTES)
    store_direct = _store_direct(out_channels // 8, pixel_8_elements)
    group_barrier, segments = ptx.group_barrier(groups, WARPGROUP), -(-columns // SEGMENT)

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        shared = shared_base()
        thread = types.int32(cuda.threadIdx.x)
        group = types.int32(thread >> 7)
        lane = types.int32(thread & 31)
        leader = (thread & 127) == 0
        group_y = types.uint32(shared + y_offset + group * group_y_bytes)
        first_patch = types.uint32(shared + patches_offset + group * (patches * patch_bytes))
        full = types.uint32(shared + full_offset + group * (patches * BARRIER_BYTES))
        tile = types.int32(cuda.blockIdx.x * groups + group)
        stride = types.int32(cuda.gridDim.x * groups)

        # ---- load: the first patches, and meanwhile the weights
        if leader:
            load_first_patches(xmap, tile, stride, first_patch, full)
        load_weights(weight, shared, thread)
        ptx.fence_async_shared()
        cuda.syncthreads()

        # From each 8 pixels of its warp a thread has one, lane / 4; from each octet two values, starting at lane % 4 * 2.
        warp_pixel = types.int32(((thread >> 5) & 3) * 16)
        tile_row, tile_column = place_of(warp_pixel + (lane >> 2))
        tile_row_8, tile_column_8 = place_of(warp_pixel + (lane >> 2) + 8)
        value = types.uint32((lane & 3) * 2)
        at, at_shift = address_of(first_patch, tile_row, tile_column, value)
        at_8, at_8_shift = address_of(first_patch, tile_row_8, tile_column_8, value)
        first_mask, last_mask = masks_of(value)
        weights = types.uint64(descriptor) | types.uint64(shared >> 4)
        matrix_row = types.uint32(warp_pixel + (lane & 15))  # stmatrix: lane 8 q + i has the address of row i of matrix q
        matrix_address = types.uint32(group_y + matrix_row * ROW_BYTES)

        acc = cuda.local.array(accumulators, types.float32)
        buffer = types.uint32(0)
        parity = types.uint32(0)
        while tile < tiles:
            # ---- multiply
            barrier = types.uint32(full + buffer * BARRIER_BYTES)
            ptx.mbarrier_wait(barrier, parity)
            patch = types.uint32(buffer * patch_bytes)
            multiply(acc, at + patch, at_8 + patch, at_shift, at_8_shift, first_mask, last_mask, weights)
            if staged and leader:
                ptx.bulk_wait_read_all()  # the previous tile's stores have read group_y
            group_barrier(group)  # all have read the patch
            if leader and tile + patches * stride < tiles:
                load_patch(xmap, tile + patches * stride, first_patch + patch, barrier)
            buffer, parity = advance(buffer, parity)

            # ---- epilogue and store: from each 8 channels, a thread holds two neighbours of its two pixels
            image, row, column = tile_origin(tile)
            k = types.int32((lane & 3) * 2)
            pixel = types.int64(types.int64(image * out_h + row + tile_row) * out_w + (column + tile_column))
            offset = types.int64(pixel * out_channels + k)
            inside = (row + tile_row < out_h) & (column + tile_column < out_w)
            inside_8 = (row + tile_row_8 < out_h) & (column + tile_column_8 < out_w)
            if fused:
                fuse(acc, out_channels, inside, inside_8, k, offset, *operands)
            if staged:
                stage_y(acc, lane, matrix_address, matrix_row & 7, columns)
                ptx.fence_async_shared()
                group_barrier(group)
                if leader:
                    for segment in range(segments):
                        ptx.tma_store_4d(y, group_y + segment * SEGMENT_BYTES, segment * SEGMENT, column, row, image)
                    ptx.bulk_commit()
            else:
                store_direct(acc, y, inside, inside_8, offset)
            tile = types.int32(tile + stride)
        if staged and leader:
            ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel


# --- The functions that the kernel captures ----------------------------------------------------------------------------


def _place_of(tile_w: int) -> Callable[[Any], Any]:
    """(row, column) of a pixel of a tile."""

    def place_of(pixel: Any) -> Any:
        row = types.int32(types.uint32(pixel) // types.uint32(tile_w))
        return row, types.int32(pixel - row * tile_w)

    return place_of


def _address_of(workload: Workload, runs: Runs, plan: Plan) -> Callable[..., Any]:
    """(address, shift) of a value of the run of a pixel: the address rounded down to a word, and 16 where that dropped a
    value."""
    stride_h, patch_w, pixel_values, lead = workload.stride[0], plan.patch_w, runs.pixel_values, runs.lead

    def address_of(first_patch: Any, row: Any, column: Any, value: Any) -> Any:
        at = types.uint32((row * stride_h * patch_w + column * pixel_values + lead + value) * ELEMENT_BYTES)
        return types.uint32(first_patch + at - (at & 2)), types.uint32((at & 2) << 3)

    return address_of


def _masks_of(runs: Runs) -> Callable[[Any], Any]:
    """The masks of a pair of values in the first and in the last octet of a run; see `multiply_patch`."""
    skipped, last_values = runs.skipped, runs.values - (runs.octets - 1) * OCTET

    def masks_of(value: Any) -> Any:
        first, last = types.uint32(0xFFFF0000 if value < skipped else 0xFFFFFFFF), types.uint32(0)
        if value < last_values:
            last = types.uint32(0xFFFF if value + 1 == last_values else 0xFFFFFFFF)
        return first, last

    return masks_of


def _load_patch(workload: Workload, runs: Runs, plan: Plan) -> Callable[..., None]:
    """One thread loads the patch of a tile."""
    (stride_h, stride_w), (top, left) = workload.stride, workload.padding[:2]
    channels, before, loaded_bytes = workload.c, runs.skipped + runs.lead, plan.patch_w * plan.patch_h * ELEMENT_BYTES
    tile_origin = walk.rectangles(plan.row_tiles, plan.strips, plan.tile_h, plan.tile_w)

    def load_patch(x: Any, tile: Any, patch: Any, barrier: Any) -> None:
        image, row, column = tile_origin(tile)
        ptx.mbarrier_expect_bytes(barrier, loaded_bytes)
        value = types.int32((column * stride_w - left) * channels - before)
        ptx.tma_load_3d(patch, x, value, row * stride_h - top, image, barrier)

    return load_patch


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


def _load_weights(workload: Workload, runs: Runs, plan: Plan) -> Callable[..., None]:
    """All threads of a block write the weights to shared memory in wgmma's layout, with runs padded to whole octets."""
    kernel_h, out_channels, columns, threads = workload.r, workload.k, runs.columns, plan.threads
    run_octets, run_values, skipped, all_octets = runs.octets, runs.values, runs.skipped, 2 * runs.steps
    weight_chunks = columns * all_octets
    run = load_run(piece(workload))

    def load_weights(weight: Any, shared: Any, thread: Any) -> None:
        for chunk in range(thread, weight_chunks, threads):
            channel = types.int32(types.uint32(chunk) // types.uint32(all_octets))
            octet = types.int32(chunk - channel * all_octets)
            row = types.int32(types.uint32(octet) // types.uint32(run_octets))
            value = types.int32((octet - row * run_octets) * OCTET)
            first = types.int32(skipped - value)
            stop = types.int32(0)
            if (channel < out_channels) & (row < kernel_h):
                stop = types.int32(run_values - value)
            element = types.int64(channel * kernel_h + row) * (run_values - skipped) + (value - skipped)
            w0, w1, w2, w3 = run(types.uint64(weight + types.uint64(element * ELEMENT_BYTES)), first, stop)
            line = types.uint32((octet >> 3) * columns + channel)
            place = types.uint32(types.uint32(octet ^ channel) & types.uint32(7))
            ptx.store_shared_v4(shared + line * ROW_BYTES + place * 16, w0, w1, w2, w3)

    return load_weights


def _store_direct(octets: int, pixel_8_elements: int) -> Callable[..., None]:
    """Stores float32 from registers."""

    def store_direct(acc: Any, y: Any, inside: Any, inside_8: Any, offset: Any) -> None:
        for octet in range(octets):
            if inside:
                ptx.store_global_f32x2(y + types.uint64((offset + octet * 8) * 4), acc[4 * octet], acc[4 * octet + 1])
            if inside_8:
                ptx.store_global_f32x2(
                    y + types.uint64((offset + (pixel_8_elements + octet * 8)) * 4), acc[4 * octet + 2], acc[4 * octet + 3]
                )

    return store_direct
