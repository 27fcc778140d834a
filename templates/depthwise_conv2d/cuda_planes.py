"""depthwise_conv2d on NVIDIA GPUs, y and dx of small planes in NCHW: a block stages whole planes in shared memory.

Planes are contiguous, one after the other. A block copies `planes` of them to shared memory as they are, in vectors of 16
bytes, whatever their height and width. A thread computes a strip of whole rows from there and writes its results to shared
memory; then the block stores them in vectors of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from schedsearch.templates.depthwise_conv2d.cuda_space import (
    MOST_PRODUCTS,
    MOST_SUMS,
    MOST_UNROLLED_TAPS,
    OTHER_REGISTERS,
    REGISTERS,
    Shape,
    device_rules,
    direction_problem,
    size_problem,
)
from schedsearch.templates.depthwise_conv2d.patches import VECTOR_BYTES, Patch, arrays_of, filter_strides
from schedsearch.templates.depthwise_conv2d.plane_text import (
    Strip,
    bank_cycles,
    copy_element,
    copy_vector,
    correlate_strip,
    finish_strip,
    load_filter,
)
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.planes import copy_in_of, least_planes
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

LEAST_CAPABILITY = (8, 0)  # of cp.async
MOST_COLUMNS = 32  # of a plane: a thread has whole rows
PLANES = (2, 4, 8, 16, 32, 64, 128, 256)
HEIGHTS = (1, 2, 3, 4, 5, 7, 8, 14, 16)  # of a strip, in units of the stride of a gradient
BLOCK_CYCLES = 100  # that a block takes besides its threads' work
SHARED_BYTES_OF_A_DEFAULT = 32 * 1024  # so that several blocks are on the way on each multiprocessor


class DepthwiseConv2dPlanesCuda(Template[DepthwiseConv2dParams]):
    """y and dx in NCHW: planes of up to 32 columns, several to a block, staged in shared memory."""

    name = "depthwise_conv2d_planes_cuda"
    version = 1
    op = "depthwise_conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        if not dtype_of(workload.params.dtype).is_float:
            return f"dtype is {workload.params.dtype}; allowed: formats of floats, depthwise_conv2d_cuda takes all"
        if problem := direction_problem(workload, "forward", "grad_input") or planes_problem(workload, target):
            return problem
        shape = Shape.of(workload)
        if shape.images * shape.channels >= 2**30:
            return f"there are {shape.images * shape.channels} planes; allowed: less than 2**30"
        if not any(_fits(workload, target, planes, height) for planes in PLANES for height in heights_of(workload)):
            return (
                f"no strip of rows has at most {MOST_SUMS} elements and {MOST_PRODUCTS} products, with planes in "
                f"{target.shared_bytes_per_block} bytes of shared memory and threads in {target.registers_per_sm} registers"
            )
        return epilogue_problem(workload)

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        shape, heights = Shape.of(workload), heights_of(workload)
        element, all_planes = shape.nbytes, shape.images * shape.channels
        bytes_of_planes = plane_bytes_of(shape)
        whole = math.lcm(*(least_planes(each // element, element) for each in bytes_of_planes))

        def threads(k: Columns) -> Any:
            return k["planes"] * -(-shape.rows.targets // k["tile_h"])

        def registers(k: Columns) -> Any:
            return k["tile_h"] * shape.columns.targets + shape.taps + 3 * shape.columns.sources + OTHER_REGISTERS

        derived = {
            "threads": threads,
            "used_registers": registers,
            "shared_bytes": lambda k: k["planes"] * sum(bytes_of_planes) + 2 * VECTOR_BYTES,
            "blocks": lambda k: -(-all_planes // k["planes"]),
            "sums": lambda k: k["tile_h"] * shape.columns.targets,
            "waves": lambda k: k["blocks"] * threads(k) / (target.sms * target.threads_per_sm),
        }
        knobs = [
            Knob("planes", PLANES, "planes of a block"),
            Knob("tile_h", heights, "rows of a plane that a thread computes"),
            Knob(
                "order", ("planes", "strips"), "whether neighbouring threads have the next plane or the next strip of rows"
            ),
            Knob("registers", REGISTERS, "most registers of a thread; fewer let more blocks share a multiprocessor"),
        ]
        rules = [
            Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
            Constraint(
                "the planes of a block fill vectors of 16 bytes, and are less than twice as many as there are",
                lambda k: (k["planes"] % whole == 0) & ((k["planes"] == whole) | (k["planes"] < 2 * all_planes)),
            ),
            *device_rules(target),
            Constraint(f"at most {MAX_GRID_X} blocks", lambda k: k["blocks"] <= MAX_GRID_X),
        ]
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The strip, the planes and the order with the least estimated time; see docs/kernels/depthwise.md."""
        found = {config: _cycles(workload, target, config) for config in _configurations(workload, space)}
        small = [each for each in found if _shared_bytes(workload, each) <= SHARED_BYTES_OF_A_DEFAULT]
        return min(small or found, key=lambda each: found[each])

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """The lowest strips and the fewest planes."""
        return next(iter(_configurations(workload, space)))

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        shape, strip = Shape.of(workload), strip_of(workload, config["tile_h"])
        planes = Planes(strip, shape.images * shape.channels, shape.channels, config["planes"], config["order"])
        epilogue = Epilogue(workload, capability=target.compute_capability) if p.direction == "forward" else None
        source, to, weight = arrays_of(workload)
        before = f"{to}_before"
        step = KernelStep(
            build_kernel(workload, planes, epilogue),
            (
                Pointer(source), Pointer(weight), Pointer(before, optional=not p.accumulate), Pointer(to),
                *(epilogue.params if epilogue else ()),
            ),
            Grid(planes.blocks),
            planes.threads,
            planes.shared_bytes,
            min_blocks_per_sm=_blocks_per_sm(target, planes, config["registers"]),
        )  # fmt: skip
        alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature}
        alignments |= {source: VECTOR_BYTES, to: VECTOR_BYTES}
        if p.accumulate:
            alignments[before] = VECTOR_BYTES
        return KernelSource("cuda", "native", (step,), alignments=alignments)


@dataclass(frozen=True)
class Planes:
    """How blocks and threads share the planes.

    Attributes:
        strip: of a thread.
        count, channels: planes of all images, and of one.
        of_block: planes of a block.
        order: "planes": neighbouring threads have neighbouring planes; "strips": they have the strips of a plane.
    """

    strip: Strip
    count: int
    channels: int
    of_block: int
    order: str

    @property
    def strips(self) -> int:
        """Strips of a plane."""
        return -(-self.strip.patch.rows.targets // self.strip.patch.tile_h)

    @property
    def threads(self) -> int:
        return self.of_block * self.strips

    @property
    def blocks(self) -> int:
        return -(-self.count // self.of_block)

    @property
    def plane_bytes(self) -> tuple[int, int]:
        """Bytes of a plane of sources, and of targets."""
        patch = self.strip.patch
        of_source = patch.rows.sources * patch.columns.sources
        return of_source * patch.nbytes, patch.rows.targets * patch.columns.targets * patch.nbytes

    @property
    def target_offset(self) -> int:
        """Of the targets in shared memory."""
        return -(-self.of_block * self.plane_bytes[0] // VECTOR_BYTES) * VECTOR_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.target_offset + -(-self.of_block * self.plane_bytes[1] // VECTOR_BYTES) * VECTOR_BYTES

    def place(self) -> Callable[[Any], Any]:
        """thread -> (plane of the block, strip)."""
        of_block, strips = self.of_block, self.strips

        def planes_first(thread: Any) -> Any:
            strip = u32(thread // u32(of_block))
            return i32(thread - strip * of_block), i32(strip)

        def strips_first(thread: Any) -> Any:
            plane = u32(thread // u32(strips))
            return i32(plane), i32(thread - plane * strips)

        return planes_first if self.order == "planes" else strips_first


def planes_problem(workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
    """Why planes of the workload cannot be staged in the shared memory of the target; None if they can."""
    p = workload.params
    if problem := size_problem(workload, target):
        return problem
    if target.compute_capability < LEAST_CAPABILITY:
        found = ".".join(map(str, target.compute_capability))
        return f"asynchronous copies need compute capability 8.0 or later, {target.name} has {found}"
    if p.layout != "NCHW":
        return f"layout is {p.layout}; allowed: NCHW, whose planes are contiguous"
    if p.multiplier != 1:
        return f"multiplier is {p.multiplier}; allowed: 1"
    if max(p.r, p.s) > MOST_UNROLLED_TAPS:
        return f"the filter is {p.r} x {p.s}; allowed: up to {MOST_UNROLLED_TAPS} taps along an axis"
    columns = Shape.of(workload).columns
    widest = max(columns.targets, columns.sources)
    if widest > MOST_COLUMNS:
        return f"a plane has {widest} columns; allowed: up to {MOST_COLUMNS}"
    return None


def build_kernel(
    workload: Workload[DepthwiseConv2dParams], planes: Planes, epilogue: Epilogue | None
) -> Callable[..., None]:
    """The kernel (source, weight, before, target, *epilogue operands) of y or dx; `before` is dx_before."""
    strip, patch = planes.strip, planes.strip.patch
    threads, of_block, count, channels = planes.threads, planes.of_block, planes.count, planes.channels
    source_bytes, target_bytes = planes.plane_bytes
    element, target_offset = patch.nbytes, planes.target_offset
    sums_count, taps, tile_h = patch.tile_h * strip.width, patch.tap_h * patch.tap_w, patch.tile_h
    row_up, row_down, width = patch.rows.up, patch.rows.down, strip.width
    plane_elements, accumulate = target_bytes // element, workload.params.accumulate
    place = planes.place()
    copy_in, copy_out = copy_in_of(threads), _copy_out(threads, element)
    of_filter, of_row, of_column = (filter_strides(workload)[axis].outer for axis in "OHW")
    load_weights = load_filter(strip, (of_row, of_column))
    correlate = correlate_strip(strip)
    finish = finish_strip(strip, epilogue, workload.output.dtype, accumulate)

    def kernel(source: Any, weight: Any, before: Any, target: Any, *operands: Any) -> None:
        shared, thread = shared_base(), u32(cuda.threadIdx.x)
        first = i32(cuda.blockIdx.x * u32(of_block))
        inside = i32(min(i32(of_block), i32(count - first)))
        staged = u32(shared + target_offset)
        at = i64(first)
        copy_in(shared, u64(source + u64(at * source_bytes)), inside, thread, source_bytes)
        if accumulate:
            copy_in(staged, u64(before + u64(at * target_bytes)), inside, thread, target_bytes)
        ptx.cp_async_commit()
        own, number = place(thread)
        row, k = i32(number * tile_h), i32((first + own) % channels)
        weights = cuda.local.array(taps, f32)
        sums = cuda.local.array(sums_count, f32)
        if own < inside:
            load_weights(weights, u64(weight + u64(i64(k) * (of_filter * element))))
        wait_all()
        cuda.syncthreads()
        if own < inside:
            for i in range(sums_count):
                sums[i] = f32(0)
            correlate(sums, weights, u32(shared + own * source_bytes), i32(row // row_down * row_up))
            offset = i64(i64(at + own) * plane_elements + row * width)
            finish(sums, u32(staged + own * target_bytes), row, k, offset, *operands)
        cuda.syncthreads()
        copy_out(u64(target + u64(at * target_bytes)), staged, inside, thread, target_bytes)

    wait_all = ptx.cp_async_wait(0)
    return kernel


def _copy_out(threads: int, element: int) -> Callable[..., None]:
    """`copy_out(address, shared, planes, thread, plane_bytes)`: stores in vectors, and what is left in elements."""
    move_vector, move_element = copy_vector(), copy_element(element)

    def copy_out(address: Any, shared: Any, planes: Any, thread: Any, plane_bytes: Any) -> None:
        total = i32(planes * plane_bytes)
        vectors = i32(total & -VECTOR_BYTES)
        for at in range(i32(thread * VECTOR_BYTES), vectors, i32(threads * VECTOR_BYTES)):
            move_vector(u64(address + u64(at)), u32(shared + at))
        for at in range(i32(vectors + thread * element), total, i32(threads * element)):
            move_element(u64(address + u64(at)), u32(shared + at))

    return copy_out


# ---- configurations


def heights_of(workload: Workload[DepthwiseConv2dParams]) -> tuple[int, ...]:
    """Rows that a strip may have."""
    shape = Shape.of(workload)
    unit, targets = shape.rows.down, shape.rows.targets
    found = [unit * n for n in HEIGHTS if unit * n < targets] + [-(-targets // unit) * unit]
    return tuple(sorted({height for height in found if height * shape.columns.targets <= MOST_SUMS})) or (unit,)


def strip_of(workload: Workload[DepthwiseConv2dParams], height: int) -> Strip:
    shape = Shape.of(workload)
    unit = shape.columns.down
    width = -(-shape.columns.targets // unit) * unit
    return Strip(Patch.of(workload, height, width, shape.tap_h, shape.tap_w, 1))


def plane_bytes_of(shape: Shape) -> tuple[int, int]:
    rows, columns = shape.rows, shape.columns
    return rows.sources * columns.sources * shape.nbytes, rows.targets * columns.targets * shape.nbytes


def _fits(workload: Workload[DepthwiseConv2dParams], target: Target, planes: int, height: int) -> bool:
    shape, strip = Shape.of(workload), strip_of(workload, height)
    whole = math.lcm(*(least_planes(each // shape.nbytes, shape.nbytes) for each in plane_bytes_of(shape)))
    strips = -(-shape.rows.targets // height)
    return (
        planes % whole == 0
        and planes * strips <= MAX_BLOCK_THREADS
        and strip.products <= MOST_PRODUCTS
        and height * shape.columns.targets <= MOST_SUMS
        and planes * sum(plane_bytes_of(shape)) + 2 * VECTOR_BYTES <= target.shared_bytes_per_block
        and any(planes * strips * registers <= target.registers_per_sm for registers in _registers(shape, height))
    )


def _registers(shape: Shape, height: int) -> list[int]:
    """Values of the knob that strips of a height may have, the best first: with a third free, because compilers differ from
    the estimate, then the largest."""
    used = height * shape.columns.targets + shape.taps + 3 * shape.columns.sources + OTHER_REGISTERS
    enough = [n for n in REGISTERS if used <= n]
    return sorted(enough, key=lambda n: (3 * used > 2 * n, n if 3 * used <= 2 * n else -n))


def _shared_bytes(workload: Workload[DepthwiseConv2dParams], config: Config) -> int:
    return int(config["planes"]) * sum(plane_bytes_of(Shape.of(workload)))


def _blocks_per_sm(target: Target, planes: Planes, registers: int) -> int:
    """Blocks that share a multiprocessor if a thread has the registers of the knob."""
    fitting = min(target.registers_per_sm // (planes.threads * registers), target.threads_per_sm // planes.threads, 32)
    return int(max(1, fitting))


def _configurations(workload: Workload[DepthwiseConv2dParams], space: ConfigSpace) -> Iterator[Config]:
    """All configurations, each with the best registers that a block may have."""
    shape = Shape.of(workload)
    for height in heights_of(workload):
        for planes in PLANES:
            for order in ("planes", "strips"):
                for registers in _registers(shape, height):
                    config = Config(planes=planes, tile_h=height, order=order, registers=registers)
                    if not space.check(config):
                        yield config
                        break


def _cycles(workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> float:
    """Estimated cycles: instructions or accesses to shared memory, whichever take longer, and what one thread takes."""
    shape, strip = Shape.of(workload), strip_of(workload, config["tile_h"])
    planes = Planes(strip, shape.images * shape.channels, shape.channels, config["planes"], config["order"])
    place, patch = planes.place(), strip.patch
    source_bytes = planes.plane_bytes[0]
    row_bytes = patch.columns.sources * patch.nbytes * patch.rows.up // patch.rows.down * patch.tile_h
    at = []
    for thread in range(min(32, planes.threads)):
        plane, number = (int(each) for each in place(thread))
        at.append(plane * source_bytes + number * row_bytes)
    accesses = len(strip.rows) * len(strip.source_pieces) + patch.tile_h * len(strip.target_pieces)
    converted = (len(strip.rows) * len(strip.columns) + patch.tile_h * strip.width) * (2 if shape.nbytes == 2 else 0)
    one = strip.products + 2 * accesses + converted + shape.taps * 2 + 80
    warps = -(-planes.threads // 32) * planes.blocks / target.sms
    blocks = -(-planes.blocks // target.sms)  # of the busiest multiprocessor
    busy = blocks * target.sms / planes.blocks
    work = busy * warps * max(one / (4 * 0.6), bank_cycles(strip, at) / 0.8)
    return work + blocks * BLOCK_CYCLES + 2.5 * one
