"""depthwise_conv2d on NVIDIA GPUs, dw of small planes in NCHW: planes of x and dy are staged in shared memory.

A block has some channels and a part of the images. For one image after the other it copies the planes of its channels to
shared memory, in vectors of 16 bytes, whatever their height and width; a thread adds up the products of a strip of whole
rows. At the end the block adds up the sums of its threads, and a second kernel those of the splits, as in
depthwise_conv2d_dw_cuda.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X, Grid, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv2d.cuda_dw import SPLITS, SUMS
from schedsearch.templates.depthwise_conv2d.cuda_pixels import SUM_BYTES, Blocks, Rounds
from schedsearch.templates.depthwise_conv2d.cuda_planes import (
    PLANES,
    heights_of,
    plane_bytes_of,
    planes_problem,
    strip_of,
)
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    OTHER_REGISTERS,
    REGISTERS,
    Shape,
    device_rules,
    direction_problem,
)
from schedsearch.templates.depthwise_conv2d.cuda_weight import REDUCE_THREADS, Reduction, block_sums, build_reduce
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES
from schedsearch.templates.depthwise_conv2d.plane_text import Strip, add_products_strip
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.planes import copy_in_of, least_planes
from schedsearch.workload import Workload

THREADS_OF_A_DEFAULT = (128, 256, 64, 32, 512)  # in the order of preference


class DepthwiseConv2dDwPlanesCuda(Template[DepthwiseConv2dParams]):
    """dw in NCHW: planes of up to 32 columns, those of several channels to a block, staged in shared memory."""

    name = "depthwise_conv2d_dw_planes_cuda"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        if problem := direction_problem(workload, "grad_weight") or planes_problem(workload, target):
            return problem
        shape = Shape.of(workload)
        for name, nbytes in zip(("x", "dy"), plane_bytes_of(shape)):
            if shape.channels * nbytes % VECTOR_BYTES:
                return f"an image of {name} has {shape.channels * nbytes} bytes; allowed: multiples of {VECTOR_BYTES}"
        if next(_configurations(workload, target, self.space(workload, target)), None) is None:
            return f"no planes with strips of rows fit {target.shared_bytes_per_block} bytes of shared memory"
        return None

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape = Shape.of(workload)
        whole, planes_bytes = _whole(shape), sum(plane_bytes_of(shape))

        def threads(k: Columns) -> Any:
            return k["planes"] * -(-shape.rows.targets // k["tile_h"])

        def registers(k: Columns) -> Any:
            return (k["tile_h"] + 1) * shape.columns.targets + shape.taps + 2 * shape.columns.sources + OTHER_REGISTERS

        def sums_bytes(k: Columns) -> Any:
            return 2 * shape.taps * threads(k) * SUM_BYTES + shape.taps * k["planes"] * SUM_BYTES

        def blocks(k: Columns) -> Any:
            return -(-shape.channels // k["planes"]) * k["splits"]

        derived = {
            "threads": threads,
            "used_registers": registers,
            "shared_bytes": lambda k: _larger(k["buffers"] * (k["planes"] * planes_bytes + VECTOR_BYTES), sums_bytes(k)),
            "blocks": blocks,
            "waves": lambda k: blocks(k) * threads(k) / (target.sms * target.threads_per_sm),
        }
        knobs = [
            Knob("planes", PLANES, "channels of a block, whose planes of an image are staged together"),
            Knob("tile_h", heights_of(workload), "rows of a plane of dy that a thread multiplies"),
            Knob("buffers", (1, 2, 3), "images in shared memory: further ones are loaded while one is multiplied"),
            Knob("splits", SPLITS, "blocks that share channels; each adds up a part of the images"),
            Knob("registers", REGISTERS, "most registers of a thread; fewer let more blocks share a multiprocessor"),
        ]
        rules = [
            Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
            Constraint(
                "the planes of a block fill vectors of 16 bytes, and are less than twice as many as there are",
                lambda k: (k["planes"] % whole == 0) & ((k["planes"] == whole) | (k["planes"] < 2 * shape.channels)),
            ),
            Constraint("a split has at least one image", lambda k: k["splits"] <= shape.images),
            Constraint(
                "more buffers only if a split has more images",
                lambda k: (k["buffers"] == 1) | (k["buffers"] * k["splits"] <= shape.images),
            ),
            *device_rules(target),
            Constraint(f"at most {MAX_GRID_X} blocks", lambda k: k["blocks"] <= MAX_GRID_X),
        ]
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """Strips and planes for blocks of about 128 threads, and splits for 512 threads on each multiprocessor."""
        return next(_configurations(workload, target, space))

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One image after the other."""
        return next((each for each in _configurations(workload, target, space) if each["buffers"] == 1), None)

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        shape, strip = Shape.of(workload), strip_of(workload, config["tile_h"])
        reduction = _reduction(shape, strip, config)
        threads, alone = reduction.blocks.threads, reduction.splits == 1
        of_planes = config["planes"] * sum(plane_bytes_of(shape)) + VECTOR_BYTES
        before = Pointer("dw_before", optional=not workload.params.accumulate)
        out = Pointer("dw" if alone else SUMS)
        fitting = min(target.registers_per_sm // (threads * config["registers"]), target.threads_per_sm // threads, 32)
        steps = [
            KernelStep(
                build_kernel(workload, reduction, strip, config["buffers"]), (Pointer("x"), Pointer("dy"), before, out),
                Grid(reduction.count), threads, max(config["buffers"] * of_planes, reduction.shared_bytes),
                min_blocks_per_sm=max(1, fitting),
            )
        ]  # fmt: skip
        workspaces = {}
        if not alone:
            workspaces[SUMS] = reduction.splits * reduction.filter_elements * SUM_BYTES
            shared = REDUCE_THREADS * SUM_BYTES
            reduce = build_reduce(workload, reduction)
            steps.append(
                KernelStep(reduce, (out, before, Pointer("dw")), Grid(reduction.reduce_blocks), REDUCE_THREADS, shared)
            )
        element = dtype_of(workload.params.dtype).nbytes
        alignments = {arg.name: element for arg in (*workload.signature, workload.output)}
        return KernelSource("cuda", "native", tuple(steps), workspaces, alignments | {"x": VECTOR_BYTES, "dy": VECTOR_BYTES})


def build_kernel(
    workload: Workload[DepthwiseConv2dParams], reduction: Reduction, strip: Strip, buffers: int
) -> Callable[..., None]:
    """The kernel (x, dy, before, sums): it writes dw if there is one split, else the workspace."""
    blocks, patch = reduction.blocks, strip.patch
    planes, strips, threads, channels = blocks.lanes, blocks.down, blocks.threads, blocks.channels
    x_bytes, dy_bytes = plane_bytes_of(Shape.of(workload))
    dy_offset = -(-planes * x_bytes // VECTOR_BYTES) * VECTOR_BYTES
    buffer_bytes = planes * (x_bytes + dy_bytes) + VECTOR_BYTES
    buffer_bytes = buffer_bytes // VECTOR_BYTES * VECTOR_BYTES
    images, splits, channel_blocks = blocks.images, reduction.splits, blocks.channel_blocks
    images_of_a_split = -(-images // splits)
    sums_count, tile_h, row_up = reduction.thread_sums, patch.tile_h, patch.rows.up
    copy_in, add_products, add_up = copy_in_of(threads), add_products_strip(strip), block_sums(workload, reduction)
    wait = ptx.cp_async_wait(buffers - 1)

    def kernel(x: Any, dy: Any, before: Any, out: Any) -> None:
        shared, thread, block = shared_base(), u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        split = i32(block // u32(channel_blocks))
        first = i32((block - u32(split) * channel_blocks) * planes)
        inside = i32(min(i32(planes), i32(channels - first)))
        lane = i32(thread // u32(strips))
        row = i32((thread - u32(lane) * strips) * tile_h)
        sums = cuda.local.array(sums_count, f32)
        for i in range(sums_count):
            sums[i] = f32(0)

        def load(image: Any, stop: Any, to: Any) -> None:
            if image < stop:
                plane = i64(i64(image) * channels + first)
                copy_in(to, u64(x + u64(plane * x_bytes)), inside, thread, x_bytes)
                staged = u32(to + dy_offset)
                copy_in(staged, u64(dy + u64(plane * dy_bytes)), inside, thread, dy_bytes)
            ptx.cp_async_commit()

        image = i32(split * images_of_a_split)
        stop = i32(min(i32(image + images_of_a_split), i32(images)))
        for ahead in range(buffers - 1):
            load(i32(image + ahead), stop, u32(shared + ahead * buffer_bytes))
        here, there = i32(0), i32(buffers - 1)
        while image < stop:
            load(i32(image + buffers - 1), stop, u32(shared + there * buffer_bytes))
            wait()
            cuda.syncthreads()
            if lane < inside:
                planes_of_image = u32(shared + here * buffer_bytes)
                add_products(
                    sums,
                    u32(planes_of_image + lane * x_bytes),
                    u32(planes_of_image + dy_offset + lane * dy_bytes),
                    i32(row * row_up),
                    row,
                )
            cuda.syncthreads()
            here = i32(here + 1 if here + 1 < buffers else 0)
            there = i32(there + 1 if there + 1 < buffers else 0)
            image = i32(image + 1)
        add_up(sums, shared, thread, first, i32(0), i32(0), split, before, out)

    return kernel


def _reduction(shape: Shape, strip: Strip, config: Config) -> Reduction:
    """How the sums of threads, blocks and splits come together: a block has a lane for each channel, and rows for strips."""
    strips = -(-shape.rows.targets // strip.patch.tile_h)
    blocks = Blocks(strip.patch, shape.images, shape.channels, config["planes"], 1, strips, strip=1)
    return Reduction(blocks, Rounds(strip.patch, filters=1), config["splits"], atomic=False)


def _whole(shape: Shape) -> int:
    """The least number of planes of x, and of dy, that fill vectors."""
    return math.lcm(*(least_planes(nbytes // shape.nbytes, shape.nbytes) for nbytes in plane_bytes_of(shape)))


def _larger(one: Any, other: Any) -> Any:
    return one * (one >= other) + other * (one < other)


def _configurations(workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Iterator[Config]:
    """Legal configurations, the best first; a third of the registers is free, because compilers differ from the estimate."""
    shape = Shape.of(workload)
    for threads in THREADS_OF_A_DEFAULT:
        for height in sorted(heights_of(workload), key=lambda each: (abs(each * shape.columns.targets - 42), each)):
            used = (height + 1) * shape.columns.targets + shape.taps + 2 * shape.columns.sources + OTHER_REGISTERS
            registers = next((n for n in REGISTERS if 3 * used <= 2 * n), max(REGISTERS))
            strips = -(-shape.rows.targets // height)
            for planes in sorted(PLANES, key=lambda n: (abs(math.log2(n * strips / threads)), n)):
                others = -(-shape.channels // planes)
                wanted = max(1.0, 512 * target.sms / (planes * strips) / others)
                splits = max(n for n in SPLITS if n == 1 or (n <= shape.images and n <= 1.5 * wanted))
                for buffers in (2, 1):
                    config = Config(planes=planes, tile_h=height, buffers=buffers, splits=splits, registers=registers)
                    if not space.check(config):
                        yield config
