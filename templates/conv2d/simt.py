"""conv2d on CUDA cores: int8 and uint8 by dp4a, float32 by fma, for every layout, group, stride, dilation and zero point.

Implicit GEMM, one per group: y[m, k] = sum over kk of patch[m, kk] * weight[k, kk], where m counts output pixels and kk the
words of the reduction (r, s, c), c fastest. A word has 32 bits: four 8-bit channels or one float32. The first launch copies
the weight to `weight_rows`, once for many calls, because weights are constant. x is read where it lies, in the widest
loads that its layout allows. See docs/kernels/conv2d_simt.md.

Sources: PTX ISA, "Integer Arithmetic Instructions: dp4a" and "cp.async".
"""

from __future__ import annotations

from typing import ClassVar

from schedsearch.config import Config
from schedsearch.launch import Float32, Grid, Param, Pointer, Scalar
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.conv2d.limits import LARGEST_SIZE, size_problem
from schedsearch.templates.conv2d.ring import CHUNK_BYTES
from schedsearch.templates.conv2d.simt_kernel import SHAPED_BY, build_kernel, build_sums, reads_ahead
from schedsearch.templates.conv2d.simt_sizes import Gemm, Plan, shared_bytes
from schedsearch.templates.conv2d.simt_space import BLOCKS_PER_SM, LEAST_ROWS, config_space
from schedsearch.templates.conv2d.tiles import Tiling, ceil_div, least_cost, tile_sizes
from schedsearch.templates.conv2d.weight_rows import ROWS, WeightRows
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.grids import earlier_blocks_per_sm
from schedsearch.templates.parts.simt import CHUNK, WORD_BYTES
from schedsearch.templates.parts.stages import BYTES, CONVERTING, epilogue_problem, moved_residual_problem
from schedsearch.workload import Workload

DTYPES = {"float32": (5, 0), "int8": (6, 1), "uint8": (6, 1)}  # of x, and the least compute capability; dp4a came with 6.1
SUM_THREADS = 32


class Conv2dSimt(Template[Conv2dParams]):
    """Supports every shape, stride, dilation, padding, layout, group count, zero point and epilogue of its dtypes."""

    name = "conv2d_simt"
    version = 1
    op = "conv2d"
    kind = "cuda"
    renamed: ClassVar[Renamed] = {
        "panel": "band", "copy": "loads", "blocks_per_sm": earlier_blocks_per_sm(BLOCKS_PER_SM),
    }  # fmt: skip

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.dtype not in DTYPES:
            return f"dtype is {p.dtype}; allowed: {', '.join(DTYPES)}"
        if target.compute_capability < (least := DTYPES[p.dtype]):
            needed, found = (".".join(map(str, each)) for each in (least, target.compute_capability))
            return f"{p.dtype} needs compute capability {needed} or later, {target.name} has {found}"
        if reason := epilogue_problem(
            workload, dtypes=("float16", "bfloat16", "float32", "int32", "uint32", *BYTES), converting=CONVERTING,
            shuffles=True, slices=True,
        ):  # fmt: skip
            return reason
        if reason := moved_residual_problem(workload):
            return reason
        gemm = Gemm.of(workload)
        least_tiles = gemm.images * ceil_div(gemm.pixels, 256) * ceil_div(gemm.k, 256) * gemm.groups
        return size_problem(
            workload,
            output_pixels_of_an_image=gemm.pixels,
            stride=max(p.stride),
            the_number_of_tiles=least_tiles,
        )

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        return config_space(workload, target)

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the least estimated time: the number of waves over the SMs times products plus loads of one.

        Per word of depth, a tile of bm x bn does bm bn products and loads bm + bn words. Loading one word costs as much as
        about 16 products. A small thread tile loads more from shared memory: 128-bit loads, each as long as 16 products of a
        thread. Everything else follows from the tile.
        """
        gemm = Gemm.of(workload)
        folded = gemm.m < LARGEST_SIZE
        m = gemm.m if folded else gemm.pixels

        def cost(tile: Tiling) -> float:
            tm, tn = _thread_tile(tile.bm, tile.bn)
            shared = 4 * tile.bm * tile.bn * (1 / tm + 1 / tn)  # loads of words from shared memory, as products
            return tile.bm * tile.bn + shared + 16 * (tile.bm + tile.bn)

        sizes_m, sizes_n = tile_sizes((16, 32, 64, 128), m), tile_sizes((8, 16, 32, 64, 128), gemm.k)
        tilings = (gemm.tiling(bm, bn, bound=not folded) for bm in sizes_m for bn in sizes_n)
        tiling = least_cost(tilings, target.sms, cost)
        bm, bn = tiling.bm, tiling.bn
        tm, tn = _thread_tile(bm, bn)
        asynchronous = "async" in next(knob.values for knob in space.knobs if knob.name == "loads") and gemm.piece == CHUNK
        most = 48 << 10 if target.compute_capability < (7, 0) else target.shared_bytes_per_sm // 2 - 1024
        for bk in (16, 8, 4):  # the deepest step that fits
            steps = ceil_div(gemm.depth, bk)
            stages = (2, 3, 4) if asynchronous else (2,)
            fitting = [s for s in stages if s <= max(steps + 1, 2) and shared_bytes(bm, bn, bk, tm, s, gemm) <= most]
            config = Config(
                bm=bm, bn=bn, bk=bk, tm=tm, tn=tn, stages=max(fitting, default=2),
                loads="async" if asynchronous else "registers",
                batch="folded" if folded else "bound", band=tiling.band, persistent=False, blocks_per_sm=1,
            )  # fmt: skip
            if not space.check(config):
                break
        return config

    def plain(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One output of one thread in tiles of 16 x 8, without loads ahead of more than a step."""
        config = Config(
            bm=16, bn=8, bk=4, tm=1, tn=1, stages=2, loads="registers", batch="bound" if workload.params.n > 1 else "folded",
            band=1, persistent=False, blocks_per_sm=1,
        )  # fmt: skip
        return None if space.check(config) else config

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        return source_of(workload, target, Plan.of(workload, config))


def source_of(workload: Workload[Conv2dParams], target: Target, plan: Plan) -> KernelSource:
    """The steps of one plan. If images have weights of their own, `weight` is that of all images."""
    p = workload.params
    epilogue, gemm = Epilogue(workload, capability=target.compute_capability), plan.gemm
    filters = workload.replace(n=1, k=p.n * p.k) if plan.own_weights else workload
    rows = WeightRows(filters, multiple=gemm.product.elements)
    steps, workspaces = [rows.step()], {ROWS: rows.nbytes}
    if "x" in p.zero_points:
        workspaces["weight_sums"] = WORD_BYTES * filters.params.k
        add_up = build_sums(workload, gemm), (Pointer(ROWS), Pointer("weight_sums")), Grid(filters.params.k), SUM_THREADS
        steps.append(KernelStep(*add_up, SUM_THREADS * CHUNK_BYTES, constant=True, shaped_by=frozenset()))
    zero_points = tuple(_scalar(f"{name}_zero_point", workload) for name in ("x", "weight"))
    pointers = Pointer("x"), Pointer(ROWS), Pointer("weight_sums", optional=len(steps) == 1), Pointer("y")
    convolve = KernelStep(
        build_kernel(workload, plan, epilogue, target.compute_capability),
        (*pointers, *zero_points, *epilogue.params),
        plan.grid,
        plan.threads,
        plan.shared_bytes,
        min_blocks_per_sm=plan.blocks_per_sm,
        shaped_by=SHAPED_BY,
        ahead=(ROWS,) if reads_ahead(plan) else (),
    )
    alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature}
    if gemm.vector > 1:
        alignments |= epilogue.alignments
    alignments |= {
        "x": max(WORD_BYTES * gemm.piece, dtype_of(p.dtype).nbytes),
        "weight": rows.alignment,
        "y": gemm.vector * dtype_of(workload.output.dtype).nbytes,
    }
    return KernelSource("cuda", "native", (*steps, convolve), workspaces, alignments)


def _thread_tile(bm: int, bn: int) -> tuple[int, int]:
    """Pixels and channels of a thread: 8 x 8 in large tiles; in small ones fewer, so that a block has at least 4 warps."""
    tm, tn = min(8, bm // LEAST_ROWS), min(8, bn // LEAST_ROWS)
    while tm * tn > 1 and (bm // tm) * (bn // tn) < 128:
        tm, tn = (tm // 2, tn) if tm >= tn else (tm, tn // 2)
    return tm, tn


def _scalar(name: str, workload: Workload[Conv2dParams]) -> Param:
    """A call-time scalar; 0 if the workload does not have it."""
    return Scalar(name) if any(scalar.name == name for scalar in workload.scalars) else Float32(0.0)
