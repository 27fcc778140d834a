"""Products of a few rows with a matrix: every element of the weight is read once, at the speed of memory.

A tile of a tensor-core kernel has 16 rows or more, so with a few rows most of its work is wasted, and the weight's bytes
decide the time anyway. Here a warp computes all rows of `columns` columns of y. Its lanes read neighbouring chunks of the
weight's rows, 16 bytes each, `unroll` of them before the first product, and the same chunks of x from the caches. `slices`
warps share the columns, each with its part of k. Their sums meet in shared memory and are added up in a fixed order, so
results are deterministic. Zero points are subtracted from the sums, with sums of x and of the weight computed on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Float32, Grid, Param, Pointer, Scalar
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.products import MatrixProductParams
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.matmul.convolution import Convolution
from schedsearch.templates.matmul.cuda import after_transposing, in_rows, transposed_problem
from schedsearch.templates.parts import ptx, simt
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.choosing import least_predicted
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.row_products import CHUNK_BYTES, LANES, RowProducts
from schedsearch.templates.parts.stages import BYTES, CONVERTING, epilogue_problem
from schedsearch.workload import Workload

DTYPES = ("float16", "bfloat16", "float32", *INTEGERS)
LEAST_CAPABILITY = (7, 0)  # of loads that pass L1 by
LEAST_FOR_BULK = (9, 0)  # of bulk copies to L2
MAX_ROWS = 8
MAX_OFFSET = 2**31  # of an access from its address
MAX_REGISTERS = 200
COLUMNS, SLICES, GROUPS, UNROLLS = (1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8)
SHAPED_BY = frozenset({"sums_count", "addresses"})  # see `KernelStep`


class MatmulGemv(Template[MatrixProductParams]):
    """dense and batch_matmul with up to 8 rows of x; k in multiples of 16 bytes; fp16, bf16, fp32, int8 and uint8."""

    name = "matmul_gemv"
    version = 1
    op = "dense"
    kind = "cuda"
    renamed: ClassVar[Renamed] = {"parts": "slices"}

    @property
    def ops(self) -> tuple[str, ...]:
        return ("dense", "batch_matmul")

    def validate(self, workload: Workload[MatrixProductParams], target: Target) -> str | None:
        w = workload.params
        if w.dtype not in DTYPES:
            return f"dtype is {w.dtype}; allowed: {', '.join(DTYPES)}"
        if target.compute_capability < LEAST_CAPABILITY:
            return "needs compute capability 7.0 or later, {} has {}.{}".format(target.name, *target.compute_capability)
        sizes = Sizes.of(workload)
        if sizes.rows > MAX_ROWS:
            return f"{sizes.rows} rows of x for each weight; allowed: up to {MAX_ROWS}; the other templates take more"
        if sizes.row_bytes % CHUNK_BYTES:
            return f"a row of x has {sizes.row_bytes} bytes; allowed: multiples of {CHUNK_BYTES}"
        if sizes.rows * sizes.row_bytes >= MAX_OFFSET or sizes.matrices * w.n > MAX_GRID_X:
            return (
                f"x has {sizes.rows} rows of {sizes.row_bytes} bytes, y {sizes.matrices * w.n} columns; allowed: below 2**31"
            )
        return transposed_problem(workload, target) or epilogue_problem(
            Convolution.of(in_rows(workload)).workload,
            dtypes=("float16", "bfloat16", "float32", "int32", "uint32", *BYTES),
            converting=CONVERTING,
        )

    def space(self, workload: Workload[MatrixProductParams], target: Target) -> ConfigSpace:
        sizes = Sizes.of(workload)
        knobs = (
            Knob("columns", COLUMNS, "columns of y that a warp computes; more reuse each value of x, fewer make more warps"),
            Knob("slices", SLICES, "warps that share columns; each takes a part of k, and the parts are summed at the end"),
            Knob("groups", GROUPS, "warps side by side, or sets of `slices` warps, in a block"),
            Knob("unroll", UNROLLS, "chunks of each row that a lane loads before it multiplies"),
        )
        constraints = (
            Constraint("columns of a block are less than twice those of y",
                       lambda q: (q["columns"] * q["groups"] == 1) | (q["columns"] * q["groups"] < 2 * workload.params.n)),
            Constraint("a step of all lanes is less than twice a row",
                       lambda q: (q["slices"] * q["unroll"] == 1) | (LANES * q["slices"] * q["unroll"] < 2 * sizes.chunks)),
            Constraint("a block has 1 to 32 warps", lambda q: q["slices"] * q["groups"] <= 32),
            Constraint(
                f"registers (estimated) <= {MAX_REGISTERS} a thread and {target.registers_per_sm} of a block",
                lambda q: (q["registers"] <= MAX_REGISTERS) & (q["registers"] * q["threads"] <= target.registers_per_sm),
            ),
        )  # fmt: skip
        return ConfigSpace(knobs, constraints, _derived(workload, sizes, target))

    def default(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config:
        """The configuration with the least predicted time; of equals, that with the fewest warps that share columns."""
        return least_predicted(space, lambda q: (q["slices"], abs(q["threads"] - 128), q["unroll"]))

    def plain(self, workload: Workload[MatrixProductParams], target: Target, space: ConfigSpace) -> Config | None:
        """A warp for each column, one chunk at a time."""
        return Config(columns=1, slices=1, groups=1, unroll=1)

    def kernel(self, workload: Workload[MatrixProductParams], target: Target, config: Config) -> KernelSource:
        product = Convolution.of(in_rows(workload)).workload
        plan, epilogue = Plan.of(workload, config), Epilogue(product, capability=target.compute_capability)
        step = KernelStep(
            build_kernel(product, plan, epilogue, target.compute_capability),
            (
                *map(Pointer, ("x", "weight", "y")),
                *(_zero_point(name, workload) for name in ("x", "weight")),
                *epilogue.params,
            ),
            Grid(plan.blocks),
            plan.threads,
            plan.shared_bytes,
            shaped_by=SHAPED_BY,
            ahead=_read_ahead(plan.sizes, target.compute_capability),
        )
        alignments = {spec.name: dtype_of(spec.dtype).nbytes for spec in (*product.signature, *product.outputs)}
        alignments |= dict.fromkeys(("x", "weight"), CHUNK_BYTES)
        return after_transposing(workload, target, KernelSource("cuda", "native", (step,), alignments=alignments))


@dataclass(frozen=True)
class Sizes:
    """A workload as products of a few rows.

    Attributes:
        matrices: products.
        rows: rows of x in each.
        row_bytes: of a row of x, and of the weight.
        x_step, weight_step: bytes from the factor of one product to that of the next; 0 if they share it.
    """

    matrices: int
    rows: int
    row_bytes: int
    x_step: int
    weight_step: int

    @classmethod
    def of(cls, workload: Workload[MatrixProductParams]) -> Sizes:
        """
        >>> Sizes.of(Workload("batch_matmul", dict(b=4, m=1, n=128, k=64, x_batch=1)))
        Sizes(matrices=4, rows=1, row_bytes=128, x_step=0, weight_step=16384)
        """
        p = workload.params
        product = Convolution.of(in_rows(workload))
        images, rows, row_bytes = product.workload.params.n, product.workload.params.w, p.k * dtype_of(p.dtype).nbytes
        x_step = 0 if product.repeats_x else rows * row_bytes
        return cls(images, rows, row_bytes, x_step, p.n * row_bytes if product.own_weights else 0)

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.row_bytes // CHUNK_BYTES


def _read_ahead(sizes: Sizes, capability: tuple[int, int]) -> tuple[str, ...]:
    """What may be read before the kernel in front is complete: a weight that all products share, as a constant would be."""
    return ("weight",) if sizes.weight_step == 0 and capability >= LEAST_FOR_BULK else ()


# Of an H100 or H200, rounded; only their ratios count.
_BYTES_PER_CYCLE, _L1_BYTES_PER_CYCLE, _LATENCY_CYCLES = 18.0, 128.0, 1200.0
_SCHEDULERS, _MAX_WARPS, _LAUNCH_CYCLES = 4, 64, 2000.0


def _derived(workload: Workload[MatrixProductParams], sizes: Sizes, target: Target) -> dict[str, Callable[[Columns], Any]]:
    p = workload.params
    rows, numbers = sizes.rows, CHUNK_BYTES // dtype_of(p.dtype).nbytes
    adds = len(p.zero_points)

    def registers(q: Columns) -> Any:
        """An estimate: chunks on their way, sums, addresses, and all else."""
        return 4 * q["unroll"] * (rows + q["columns"]) + (rows + adds) * (q["columns"] + adds) + 2 * q["columns"] + 40

    def predicted_cycles(q: Columns) -> Any:
        """The time of a multiprocessor: its bytes from memory, its loads of x from L1, or its instructions."""
        warps = sizes.matrices * -(-p.n // q["columns"]) * q["slices"]
        at_once = np.minimum(_MAX_WARPS, target.registers_per_sm // (LANES * q["registers"]))
        resident = np.minimum(np.maximum(warps / target.sms, 1), at_once)
        steps = -(-sizes.chunks // (LANES * q["slices"] * q["unroll"]))
        chunks = -(-warps // target.sms) * steps * q["unroll"]  # warp-wide chunks of a multiprocessor
        on_their_way = resident * q["unroll"] * q["columns"] * LANES * CHUNK_BYTES
        speed = np.minimum(_BYTES_PER_CYCLE, on_their_way / _LATENCY_CYCLES)
        memory = chunks * q["columns"] * LANES * CHUNK_BYTES / speed
        from_l1 = chunks * rows * LANES * CHUNK_BYTES / _L1_BYTES_PER_CYCLE
        of_chunk = rows * q["columns"] * (4 if p.dtype in INTEGERS else numbers)
        of_chunk = of_chunk + (rows + q["columns"]) * (2 * numbers if numbers == 8 else 4)
        end = -(-warps // target.sms) * 10 * rows * q["columns"]
        issue = (chunks * of_chunk + end) / _SCHEDULERS
        return _LAUNCH_CYCLES + _LATENCY_CYCLES + np.maximum(memory, np.maximum(from_l1, issue)) + 60 * (q["slices"] > 1)

    return {
        "threads": lambda q: LANES * q["slices"] * q["groups"],
        "registers": registers,
        "blocks": lambda q: sizes.matrices * -(-p.n // (q["columns"] * q["groups"])),
        "warps_per_sm": lambda q: q["blocks"] * q["slices"] * q["groups"] / target.sms,
        "predicted_cycles": predicted_cycles,
    }


@dataclass(frozen=True)
class Plan:
    """Sizes of a configuration.

    Attributes:
        sizes: of the workload.
        products: what a lane computes.
        slices, groups, unroll: the knobs.
        n: columns of y.
    """

    sizes: Sizes
    products: RowProducts
    slices: int
    groups: int
    unroll: int
    n: int

    @classmethod
    def of(cls, workload: Workload[MatrixProductParams], config: Mapping[str, Any]) -> Plan:
        w, sizes = workload.params, Sizes.of(workload)
        zero = w.zero_points
        products = RowProducts(w.dtype, w.weight_dtype, sizes.rows, config["columns"], "x" in zero, "weight" in zero)
        return cls(sizes, products, config["slices"], config["groups"], config["unroll"], w.n)

    @property
    def warps(self) -> int:
        return self.slices * self.groups

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def block_columns(self) -> int:
        return self.groups * self.products.columns

    @property
    def column_blocks(self) -> int:
        return math.ceil(self.n / self.block_columns)

    @property
    def blocks(self) -> int:
        return self.sizes.matrices * self.column_blocks

    @property
    def shared_bytes(self) -> int:
        return 4 * self.warps * self.products.sums


def build_kernel(
    product: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, capability: tuple[int, int]
) -> Callable[..., None]:
    """The kernel (x, weight, y, x_zero_point, weight_zero_point, *epilogue.params); addresses are u64, zero points f32."""
    sizes, products = plan.sizes, plan.products
    rows, columns, n, parts, chunks = sizes.rows, products.columns, plan.n, plan.slices, sizes.chunks
    block_columns, column_blocks, threads = plan.block_columns, plan.column_blocks, plan.threads
    x_step, weight_step, row_bytes = sizes.x_step, sizes.weight_step, sizes.row_bytes
    distance = LANES * parts
    step_chunks = distance * plan.unroll
    steps = math.ceil(chunks / step_chunks)
    sums_count, addresses, sums_bytes = products.sums, columns + 1, 4 * products.sums
    sum_type = i32 if products.integer else f32
    accumulate, add_lanes = products.accumulate(plan.unroll, distance, row_bytes), products.add_lanes()
    keep, total_of = products.keep(), sum_of_parts(plan)
    out_bytes, single = dtype_of(product.params.out_dtype).nbytes, epilogue.single
    store = simt.store_global(1, product.params.out_dtype, epilogue.accumulator, capability)
    ahead = bool(_read_ahead(plan.sizes, capability))

    def kernel(x: Any, weight: Any, y: Any, x_zero_point: Any, weight_zero_point: Any, *operands: Any) -> None:
        shared = shared_base()
        thread = u32(cuda.threadIdx.x)
        lane, warp = u32(thread % 32), u32(thread // 32)
        group, part = u32(warp // u32(parts)), u32(warp % u32(parts))
        number = u32(cuda.blockIdx.x)
        matrix = u32(number // u32(column_blocks))
        first_column = u32((number - matrix * u32(column_blocks)) * u32(block_columns))
        first_chunk = u32(part * 32 + lane)

        # ---- multiply; columns past the last one repeat it
        sums = cuda.local.array(sums_count, sum_type)
        at = cuda.local.array(addresses, u64)
        for i in range(sums_count):
            sums[i] = sum_type(0)
        for i in range(columns):
            column = u32(min(u32(first_column + group * columns + i), u32(n - 1)))
            offset = u64(matrix) * u64(weight_step) + u64(column) * u64(row_bytes)
            at[i] = u64(weight + offset + u64(first_chunk * 16))
        at[columns] = u64(x + u64(matrix) * u64(x_step) + u64(first_chunk * 16))
        if ahead:
            if (part == 0) & (lane < columns):
                column = u32(min(u32(first_column + group * columns + lane), u32(n - 1)))
                ptx.prefetch_bulk(u64(weight + u64(column) * u64(row_bytes)), u32(row_bytes))
            ptx.wait_for_predecessor()
        left = i32(i32(chunks) - i32(first_chunk))
        for _ in range(i32(steps)):
            accumulate(sums, at, left)
            left = i32(left - step_chunks)
        add_lanes(sums)
        if lane == 0:
            keep(sums, u32(shared + warp * sums_bytes))
        cuda.syncthreads()

        # ---- store
        for item in range(i32(thread), i32(rows * block_columns), i32(threads)):
            row = u32(u32(item) // u32(block_columns))
            within = u32(u32(item) - row * u32(block_columns))
            to_column = u32(first_column + within)
            if to_column < u32(n):
                total = total_of(shared, row, within, x_zero_point, weight_zero_point)
                offset = (i64(matrix) * rows + i64(row)) * n + i64(to_column)
                value = single(total, 1, i32(to_column), offset, *operands)
                store(u64(y + u64(offset * out_bytes)), value)

    return kernel


def sum_of_parts(plan: Plan) -> Callable[..., Any]:
    """`total(shared, row, column, x_zero_point, weight_zero_point)`: a sum of the block, less what zero points add.

    sum (x - x0) (w - w0) = sum x w - x0 sum w - w0 sum x + k x0 w0
    """
    products, parts = plan.products, plan.slices
    rows, columns, sum_columns, sums = products.rows, products.columns, products.sum_columns, products.sums
    integer, of_x, of_weight = products.integer, products.adds_weights, products.adds_x
    count = plan.sizes.row_bytes  # products of a sum, of elements of one byte
    load = simt.load_shared(1, "int32" if integer else "float32")
    sum_type = i32 if integer else f32

    def add_up(shared: Any, group: Any, row: Any, column: Any) -> Any:
        at = u32(shared + (group * (parts * sums) + row * sum_columns + column) * 4)
        total = load(at)
        for part in range(1, parts):
            total = sum_type(total + load(u32(at + part * (sums * 4))))
        return total

    def of_floats(shared: Any, row: Any, column: Any, x_zero_point: Any, weight_zero_point: Any) -> Any:
        group = u32(column // u32(columns))
        return add_up(shared, group, row, u32(column - group * u32(columns)))

    def of_integers(shared: Any, row: Any, column: Any, x_zero_point: Any, weight_zero_point: Any) -> Any:
        group = u32(column // u32(columns))
        own = u32(column - group * u32(columns))
        x_zero, weight_zero = i32(x_zero_point), i32(weight_zero_point)
        total = add_up(shared, group, row, own)
        if of_x:
            total = i32(total - x_zero * add_up(shared, group, u32(rows), own))
        if of_weight:
            total = i32(total - weight_zero * add_up(shared, group, row, u32(columns)))
        return i32(total + count * x_zero * weight_zero)

    return of_integers if of_x or of_weight else of_floats


def _zero_point(name: str, workload: Workload[MatrixProductParams]) -> Param:
    """The zero point of a factor; 0 if the workload does not have it."""
    return Scalar(f"{name}_zero_point") if name in workload.params.zero_points else Float32(0.0)
