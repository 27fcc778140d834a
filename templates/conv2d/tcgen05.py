"""conv2d on the tensor cores of compute capability 10: NHWC x OHWI as an implicit GEMM, fed by TMA, summed in tensor memory.

A block computes 128 pixels x `bn` output channels. One thread loads a ring of stages, as in `mma_tma`; another one starts
the products of each stage as soon as it is full. A stage is free again when its products are done, and the tile is complete
when the last ones are. Four warps then move it to shared memory, where the store of conv2d_mma takes it.

No card has timed it. Like every other kernel it serves only where it has been verified.

Source: PTX ISA, "TensorCore 5th Generation Family Instructions" and "Data Movement: cp.async.bulk.tensor".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d import mma, mma_tma
from schedsearch.templates.conv2d.mma_kernel import image_end, tile_walk
from schedsearch.templates.conv2d.mma_sizes import LOADER_THREADS, Gemm, Plan, tma_shared_bytes
from schedsearch.templates.conv2d.mma_store import ChannelCorrections, output
from schedsearch.templates.conv2d.tiles import BAND, below_twice, ceil_div, least_cost, tile_sizes
from schedsearch.templates.parts import pipeline, ptx, tensor_memory
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import BARRIER_BYTES
from schedsearch.templates.parts.tensor_memory import LANES, WARP_LANES, Product
from schedsearch.templates.parts.warm import warm_operands
from schedsearch.workload import Workload

FLOATS = tuple(dtype for dtype in mma.DTYPES if dtype not in INTEGERS)
NO_INTEGERS = (10, 3)  # compute capability
STAGES = tuple(range(2, 9))
SHAPED_BY = frozenset({"part"})  # names that the kernel captures; see `KernelStep`
FURTHER_BYTES = 2 * BARRIER_BYTES  # the barrier of a complete tile, and the address of the sums


class Conv2dTcgen05(Template[Conv2dParams]):
    """conv2d of floats up to TF32, int8 and uint8, with every epilogue of conv2d_mma, on compute capability 10."""

    name = "conv2d_tcgen05"
    version = 1
    op = "conv2d"
    kind = "cuda"
    _MMA = mma.Conv2dMma()

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if target.compute_capability[0] != 10:
            got = ".".join(map(str, target.compute_capability))
            return f"tcgen05 needs compute capability 10, got {got}"
        if w.dtype in INTEGERS and target.compute_capability == NO_INTEGERS:
            return f"tcgen05 multiplies {w.dtype} on compute capability 10.0, got 10.3; allowed here: {', '.join(FLOATS)}"
        if w.dtype == "float32" and w.precision != "tf32":
            return f"precision is {w.precision}; allowed: tf32"
        return self._MMA.validate(workload, target) or mma_tma.tma_problem(workload, target) or _ends_problem(workload)

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        gemm = Gemm.of(workload)
        unit = gemm.mma.k

        def shared(k: Columns) -> Any:
            return tma_shared_bytes(LANES, k["bn"], k["bk"] * gemm.element_bytes, k["stages"], 1, False) + FURTHER_BYTES

        return ConfigSpace(
            knobs=[
                Knob("bn", (16, 32, 64, 128, 256), "output channels of a block's tile, which has 128 pixels"),
                Knob("bk", _depths(gemm), "depth of one step along the reduction: channels of one tap"),
                Knob("stages", STAGES, "shared buffers in the ring"),
                BAND,
            ],
            derived={
                "tiles_m": lambda k: ceil_div(gemm.m, LANES),
                "tiles_n": lambda k: ceil_div(gemm.k, k["bn"]) * gemm.groups,
                "tiles": lambda k: k["tiles_m"] * k["tiles_n"],
                "waves": lambda k: k["tiles"] / target.sms,
                "steps": lambda k: gemm.taps * ceil_div(gemm.c, k["bk"]),
                "shared_bytes": shared,
            },
            constraints=[
                Constraint(
                    f"shared memory per block <= {target.shared_bytes_per_block} bytes",
                    lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
                ),
                Constraint("at most steps + 1 stages", lambda k: (k["stages"] == 2) | (k["stages"] <= k["steps"] + 1)),
                Constraint(
                    "bn is less than twice the output channels of a group", lambda k: below_twice(k["bn"], 16, gemm.k)
                ),
                Constraint("bk is less than twice the channels of a group", lambda k: below_twice(k["bk"], unit, gemm.c)),
                Constraint(
                    "bk divides the channels of a group, if others follow them in x",
                    lambda k: (gemm.c % k["bk"] == 0) | (not _others_follow(workload)),
                ),
                Constraint(f"at most {MAX_GRID_X} tiles", lambda k: k["tiles"] <= MAX_GRID_X),
                Constraint(
                    "band is 1 unless there are at least that many pixel tiles and a second channel tile",
                    lambda k: (k["band"] == 1) | ((k["band"] <= k["tiles_m"]) & (k["tiles_n"] > 1)),
                ),
            ],
        )

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the least waves x (multiplications + 64 x elements loaded), steps that waste the least, and as many
        stages as fit."""
        gemm = Gemm.of(workload)
        tiling = least_cost(
            (gemm.tiling(LANES, bn, bound=False) for bn in tile_sizes((16, 32, 64, 128, 256), gemm.k)),
            target.sms,
            lambda tile: LANES * tile.bn + 64 * (LANES + tile.bn),
        )
        exact = _others_follow(workload)
        bks = [bk for bk in tile_sizes(_depths(gemm), gemm.c) if not exact or gemm.c % bk == 0]
        bk = min(bks, key=lambda bk: (ceil_div(gemm.c, bk) * bk, -bk))
        tried = (Config(bn=tiling.bn, bk=bk, stages=stages, band=tiling.band) for stages in reversed(STAGES))
        return next(config for config in tried if not space.check(config))

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        return source_of(workload, target, TensorPlan.of_config(workload, config))


def source_of(workload: Workload[Conv2dParams], target: Target, plan: Plan) -> KernelSource:
    """The steps of one plan; see `mma.source_of`."""
    return mma.source_of(workload, plan, build_kernel, SHAPED_BY, arch=f"{target.architecture}a")


def _depths(gemm: Gemm) -> tuple[int, int, int]:
    """Channels of a step: rows of 32, 64 and 128 bytes."""
    return gemm.mma.k, 2 * gemm.mma.k, 4 * gemm.mma.k


def _others_follow(workload: Workload[Conv2dParams]) -> bool:
    """Whether other channels than those of the GEMM follow in x."""
    return workload.params.groups > 1 or bool(workload.params.x_slice)


def _ends_problem(workload: Workload[Conv2dParams]) -> str | None:
    gemm = Gemm.of(workload)
    if _others_follow(workload) and gemm.c % gemm.mma.k:
        return f"a group of several, or a slice of x, has {gemm.c} channels; allowed: multiples of {gemm.mma.k}"
    return None


@dataclass(frozen=True, kw_only=True)
class TensorPlan(Plan):
    """As `Plan`: a warp has 32 lanes of the tile."""

    @classmethod
    def of_config(cls, workload: Workload[Conv2dParams], config: Config) -> TensorPlan:
        return cls(
            gemm=Gemm.of(workload), bm=LANES, bn=config["bn"], bk=config["bk"], stages=config["stages"], band=config["band"],
            persistent=False, blocks_per_sm=1, bound=False, wm=WARP_LANES, wn=config["bn"], slices=1, tma=True,
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """Those that store, a warp that loads, and one that starts products."""
        return self.consumers + 2 * LOADER_THREADS

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + FURTHER_BYTES


def build_kernel(
    workload: Workload[Conv2dParams], plan: Plan, epilogue: Epilogue, corrections: ChannelCorrections
) -> Callable[..., None]:
    """The kernel of one configuration. It takes (x's map, weight's map, y, *epilogue.params)."""
    product = Product(workload.params.dtype, plan.bn, workload.params.weight_dtype)
    steps, stages, consumers, bn, k_total = plan.steps, plan.stages, plan.consumers, plan.bn, plan.gemm.k
    stage_bytes, x_bytes, staged_row_bytes = plan.stage_bytes, plan.x_bytes, plan.staged_row_bytes
    full_offset, allocated, part = plan.barrier_offset, product.allocated, min(bn, 32)  # columns of a load
    place, stop_of = tile_walk(plan), image_end(plan)
    load_tiles, store = mma_tma.loads(workload, plan), output(workload, plan, epilogue, corrections)
    initialise, (take, advance) = pipeline.initialise, pipeline.consumer(stages)
    matrix, multiply = product.matrix(plan.row_bytes), product.steps(plan.bk // product.k)
    sum_type = plan.gemm.mma.accumulator_type
    load_lane = tensor_memory.load_lane(part, product.accumulator)
    store_row = tensor_memory.store_shared_row(part, product.accumulator)
    meet, warm = ptx.group_barrier(1, consumers), warm_operands(workload, epilogue.params)

    def kernel(xmap: Any, wmap: Any, y: Any, *operands: Any) -> None:
        shared = shared_base()
        full = u32(shared + full_offset)
        empty = u32(full + stages * BARRIER_BYTES)
        complete = u32(empty + stages * BARRIER_BYTES)
        thread = u32(cuda.threadIdx.x)
        if thread == 0:
            initialise(full, 2 * stages + 1, 1)
            ptx.mbarrier_init_fence()
        if thread < 32:
            tensor_memory.allocate(complete + BARRIER_BYTES, allocated)
        tensor_memory.fence_before()
        cuda.syncthreads()
        tensor_memory.fence_after()
        sums = u32(ptx.load_shared_i32(complete + BARRIER_BYTES))

        if thread == consumers:
            # ---- load
            load_tiles(xmap, wmap, shared, full, empty)
        elif thread == consumers + 32:
            # ---- multiply
            stage, parity = u32(0), u32(0)
            for step in range(i32(steps)):
                parity = take(full, stage, parity)
                tensor_memory.fence_after()
                x_at = u32(shared + stage * stage_bytes)
                multiply(sums, matrix(x_at), matrix(u32(x_at + x_bytes)), i32(step > 0))
                tensor_memory.commit(empty + stage * BARRIER_BYTES)
                stage, parity = advance(stage, parity)
            tensor_memory.commit(complete)
        elif thread < consumers:
            # ---- store
            ptx.wait_for_predecessor()
            m_first, group, k_first = place(i32(cuda.blockIdx.x))
            k_left = i32(k_total - k_first)
            if thread < 32:  # this warp would wait for the tile anyway
                warm(u32(thread % 32), i32(group * k_total + k_first), i32(min(bn, k_left)), operands)
            ptx.mbarrier_wait(complete, u32(0))
            tensor_memory.fence_after()
            values = cuda.local.array(part, sum_type)
            lane = u32(sums + (thread // 32 * 32 << 16))
            row = u32(shared + thread * staged_row_bytes)
            for first in range(0, bn, part):
                load_lane(values, lane + first)
                store_row(values, row + first * 4)
            tensor_memory.fence_before()
            meet(0)
            tensor_memory.fence_after()
            if thread < 32:
                tensor_memory.release(sums, allocated)
            store(y, shared, thread, m_first, stop_of(m_first), group, k_first, k_left, operands)

    return kernel
