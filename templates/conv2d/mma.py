"""conv2d on tensor cores through mma.sync, for every workload: sm_80 and later; fp16, bf16, TF32, float8, int8 and uint8.

Implicit GEMM, one per group: y[m, k] = sum over kk of patch[m, kk] * weight[k, kk], where m counts output pixels (n, p, q)
and kk the reduction (r, s, c) with c fastest, which is the order of OHWI weights. A block computes `bm` x `bn` of y in
steps of `bk` along kk. cp.async fills a ring of `stages` shared buffers ahead of the multiplication.

The unit of loading is a chunk: 16 bytes along kk, one row of an 8x8 ldmatrix. It arrives in one piece if neighbouring
channels of a group fill it. Otherwise a piece has a half, a quarter ... of a chunk, the largest part that divides the
channels, so a piece never straddles two taps, two blocks of channels or an unaligned address. The copy itself fills
positions outside of the tensor (padding, tails of m, k and kk) with zeros. The result goes through shared memory and is
written in words.

An element type is an `Mma` (`parts.mma`). A layout of x and y is strides and the length of a run of channels
(`parts.addressing`). Weights in other layouts than OHWI, and those of merged groups, are copied to `weight_rows` first.

Sources: PTX ISA, "Warp Level Matrix Instructions" and "cp.async".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Param, Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.conv2d_formats import FLOAT8, INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.conv2d import mma_kernel, mma_tma
from schedsearch.templates.conv2d.limits import size_problem
from schedsearch.templates.conv2d.mma_sizes import Gemms, Plan, shared_bytes
from schedsearch.templates.conv2d.mma_space import BLOCKS_PER_SM, config_space
from schedsearch.templates.conv2d.mma_store import ChannelCorrections
from schedsearch.templates.conv2d.tiles import ceil_div, least_cost, tile_sizes
from schedsearch.templates.conv2d.weight_rows import ROWS, WeightRows
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.grids import earlier_blocks_per_sm
from schedsearch.templates.parts.stages import BYTES, CONVERTING, epilogue_problem, moved_residual_problem
from schedsearch.templates.parts.window_sums import WindowSums, window_sums_problem
from schedsearch.templates.parts.zero_points import ZeroPoint, zero_point_problem
from schedsearch.workload import Workload

DTYPES = ("float16", "bfloat16", "float32", *FLOAT8, *INTEGERS)


class Conv2dMma(Template[Conv2dParams]):
    """Supports every shape, stride, dilation, padding, group count, layout and epilogue."""

    name = "conv2d_mma"
    version = 3  # 2 released buffers of TMA before they were read
    op = "conv2d"
    kind = "cuda"
    renamed: ClassVar[Renamed] = {"panel": "band", "blocks_per_sm": earlier_blocks_per_sm(BLOCKS_PER_SM)}
    added: ClassVar = {"loads": "copies"}

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if w.dtype not in DTYPES:
            return f"dtype must be one of {', '.join(DTYPES)}, got {w.dtype}"
        needed = (8, 9) if w.dtype in FLOAT8 else (8, 0)
        if target.compute_capability < needed:
            (major, minor), has = needed, "{}.{}".format(*target.compute_capability)
            return f"{w.dtype} needs compute capability {major}.{minor} or later, {target.name} has {has}"
        if reason := zero_point_problem(workload, of_weight=True) or window_sums_problem(workload):
            return reason
        of_one_byte: dict[str, Any] = {
            "dtypes": ("float16", "bfloat16", "float32", "int32", "uint32", *BYTES),
            "converting": CONVERTING,
        }
        if reason := epilogue_problem(
            workload, shuffles=True, slices=True, x_slices=True, **(of_one_byte if w.dtype in (*FLOAT8, *INTEGERS) else {})
        ):
            return reason
        if reason := moved_residual_problem(workload):
            return reason
        return size_problem(workload, stride=max(w.stride))

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        return config_space(workload, target)

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the least estimated time: the number of waves over the SMs times multiplications plus loads of one.

        Per unit of depth, a tile of bm x bn does bm bn multiply-adds and loads bm + bn elements. Loading one element costs
        as much as about 64 multiply-adds. Everything else follows from the tile. Groups are merged until their channels
        fill a chunk and the columns of a tile.
        """
        gemms = Gemms.of(workload)
        filled = (merged for merged, gemm in gemms.by_merged.items() if gemm.c >= gemm.mma.chunk and gemm.k >= 16)
        gemm = gemms.by_merged[next(filled, max(gemms.by_merged))]
        chunk, unit, element_bytes = gemm.mma.chunk, gemm.mma.k, gemm.element_bytes
        word = gemm.mma.registers_per_word(target.compute_capability)

        sizes_m, sizes_n = (tile_sizes((16, 32, 64, 128), extent) for extent in (gemm.m, gemm.k))
        tiling = least_cost(
            (
                gemm.tiling(bm, bn, bound=False)
                for bm in sizes_m
                for bn in sizes_n
                if word < 4 or bm * bn < 128 * 128  # fragments that are widened leave registers for half of that
            ),
            target.sms,
            lambda tile: tile.bm * tile.bn + 64 * (tile.bm + tile.bn),
        )
        bm, bn = tiling.bm, tiling.bn
        budget = target.shared_bytes_per_sm // 2 - 1024  # two blocks share an SM
        if gemm.piece_x < chunk or gemm.c % (4 * unit):
            bk = unit if gemm.depth <= unit else 2 * unit
        else:
            long = bm * bn <= 64 * 32 and gemm.depth >= 64 * unit
            # Of a larger tile, long steps halve the barriers, if two stages of them fit.
            deep = 64 * 128 <= bm * bn < 128 * 128 and gemm.c % (8 * unit) == 0 and gemm.depth >= 64 * unit
            deep = deep and word == 1
            deep = deep and shared_bytes(bm, bn, 8 * unit * element_bytes, 2, 1) <= budget
            bk = 8 * unit if long or deep else 4 * unit if bm * bn < 128 * 128 else 2 * unit
        if gemm.piece_x == chunk:
            large = bm * bn >= 128 * 64 and word < 4
            wm, wn = min(bm, 64 if large else 32), min(bn, 32)
        else:
            wm, wn = _warp_tile_of_small_copies(bm, bn, word)
        warps = (bm // wm) * (bn // wn)
        steps = ceil_div(gemm.depth, bk)
        # More warps hide the latency of a small tile with a long reduction.
        slices = max(
            s for s in (1, 2, 4) if s == 1 or (bm * bn <= 64 * 64 and s * warps <= 8 and unit * s <= bk and steps >= 8)
        )
        row_bytes = bk * element_bytes
        stages = max(
            s for s in (2, 3, 4, 5) if s == 2 or (s <= steps + 1 and shared_bytes(bm, bn, row_bytes, s, slices) <= budget)
        )
        return Config(
            bm=bm, bn=bn, bk=bk, wm=wm, wn=wn, slices=slices, stages=stages, band=tiling.band,
            persistent=tiling.tiles > MAX_GRID_X, blocks_per_sm=1, loads="copies",
            **({"batch": "folded"} if gemms.takes_batch_knob else {}),
            **({"merged": gemm.merged} if len(gemms.by_merged) > 1 else {}),
        )  # fmt: skip

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        return source_of(workload, Plan.of(workload, config))


def _warp_tile_of_small_copies(bm: int, bn: int, registers_per_word: int) -> tuple[int, int]:
    """The tile of a warp that copies many small pieces. With one row per thread the copies are unrolled, so their latencies
    overlap; so many threads must have enough registers for the parts of split products, and for float8 that is widened.
    """
    if bm == 128 and bn * registers_per_word >= 256:
        return 32, 32
    return 16, max(16, bn // 2)


def source_of(
    workload: Workload[Conv2dParams],
    plan: Plan,
    build: Callable[..., Callable[..., None]] | None = None,
    shaped_by: frozenset[str] | None = None,
    arch: str = "native",
) -> KernelSource:
    """The steps of one plan. If images have weights of their own, `weight` is that of all, and x has no zero point.

    Args:
        build: another builder of a kernel with the parameters of `mma_tma.build_kernel`, and what shapes it.
    """
    zero, windows, gemm = ZeroPoint.of(workload), WindowSums.of(workload), plan.gemm
    further = (*(zero.params if zero else ()), *(windows.params if windows else ()))
    epilogue = Epilogue(workload, further)
    weight = ROWS if gemm.repacked else "weight"
    x_and_weight: tuple[Param, Param] = Pointer("x"), Pointer(weight)
    if plan.tma:
        build, shaped_by = build or mma_tma.build_kernel, shaped_by or mma_tma.shaped_by(plan)
        x_and_weight = mma_tma.maps(workload, plan)
    else:
        build, shaped_by = mma_kernel.build_kernel, mma_kernel.SHAPED_BY
    convolve = KernelStep(
        build(workload, plan, epilogue, ChannelCorrections(epilogue, zero, windows)),
        (*x_and_weight, Pointer("y"), *epilogue.params),
        plan.grid,
        plan.threads,
        plan.shared_bytes,
        min_blocks_per_sm=plan.blocks_per_sm,
        shaped_by=shaped_by,
        ahead=() if plan.own_weights else (weight,),
    )
    alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature}
    if gemm.vector > 1:
        alignments |= epilogue.alignments
    alignments |= {"x": gemm.piece_x * gemm.element_bytes, "y": gemm.vector * gemm.out_bytes}
    steps: list[KernelStep] = []
    workspaces: dict[str, int] = {}
    if gemm.repacked:
        filters = workload.replace(n=1, k=workload.params.n * workload.params.k) if plan.own_weights else workload
        rows = WeightRows(filters, gemm.merged)
        steps.append(rows.step())
        workspaces[ROWS] = rows.nbytes
        alignments["weight"] = rows.alignment
    else:
        alignments["weight"] = gemm.piece_w * gemm.element_bytes
    if zero:
        steps.append(zero.step())
        workspaces |= zero.workspaces
        alignments |= zero.alignments | {"weight": max(alignments["weight"], 4)}
    if windows:
        steps.append(windows.step())
        workspaces |= windows.workspaces
        alignments["x"] = max(alignments["x"], windows.run)
    return KernelSource("cuda", arch, (*steps, convolve), workspaces=workspaces, alignments=alignments)
