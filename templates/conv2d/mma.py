"""conv2d on tensor cores through mma.sync, for every workload in NHWC x OHWI: sm_80 and later, fp16 or bf16.

Implicit GEMM, one per group: y[m, k] = sum over kk of patch[m, kk] * weight[k, kk], where m counts output pixels (n, p, q)
and kk the reduction (r, s, c) with c fastest, which is the order of OHWI weights. A block computes `bm` x `bn` of y in
steps of `bk` along kk. cp.async fills a ring of `stages` shared buffers ahead of the multiplication.

The unit of loading is a chunk: 8 consecutive kk, 16 bytes, one row of an 8x8 ldmatrix. It arrives in one piece if the
channels of a group are a multiple of 8. Otherwise a piece has 4, 2 or 1 elements, the largest number that divides the
channels, so a piece never straddles two taps or an unaligned address. The copy itself fills positions outside of the
tensor (padding, tails of m, k and kk) with zeros. The result goes through shared memory and is written in 16-byte words.

Sources: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k16, ldmatrix) and "cp.async".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X, Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.mma_kernel import SHAPED_BY, build_kernel
from schedsearch.templates.conv2d.mma_sizes import CHUNK, ELEMENT_BYTES, Gemm, Plan, ceil_div, shared_bytes
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

LARGEST_SIZE = 2**30  # limit of one axis, so that a sum of two sizes fits in int32


class Conv2dMma(Template):
    """Supports every shape, stride, dilation, padding, group count and epilogue."""

    name = "conv2d_mma"
    version = 1
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if target.compute_capability < (8, 0):
            major, minor = target.compute_capability
            return f"needs compute capability 8.0 or later, {target.name} has {major}.{minor}"
        if workload.dtype not in ("float16", "bfloat16"):
            return f"dtype must be float16 or bfloat16, got {workload.dtype}"
        if workload.layout != "NHWC" or workload.weight_layout != "OHWI":
            return f"layouts must be NHWC and OHWI, got {workload.layout} and {workload.weight_layout}"
        if reason := epilogue_problem(workload):
            return reason
        top, left, bottom, right = workload.padding
        sizes = {
            "n": workload.n,
            "padded h": workload.h + top + bottom,
            "padded w": workload.w + left + right,
            "c": workload.c,
            "k": workload.k,
            "r*s*c": Gemm.of(workload).kk,
            "stride": max(workload.stride),
        }
        for axis, size in sizes.items():
            if size >= LARGEST_SIZE:
                return f"{axis} must be below 2**30, got {size}"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        gemm = Gemm.of(workload)

        def fits(size: int, tile: str) -> Callable[[Columns], Any]:
            return lambda k: (k[tile] == 16) | (k[tile] < 2 * size)

        def registers(k: Columns) -> Any:
            """An estimate: accumulators, fragments of one step, three values per loaded row, addresses and counters."""
            return k["accumulators"] + k["wm"] // 4 + k["wn"] // 2 + 4 * k["rows_x"] + 40

        return ConfigSpace(
            knobs=[
                Knob("bm", (16, 32, 64, 128, 256), "output pixels of a block's tile"),
                Knob("bn", (16, 32, 64, 128, 256), "output channels of a block's tile"),
                Knob("bk", (16, 32, 64, 128), "depth of one step along the reduction"),
                Knob("wm", (16, 32, 64), "output pixels of a warp's tile"),
                Knob("wn", (16, 32, 64), "output channels of a warp's tile"),
                Knob(
                    "slices",
                    (1, 2, 4),
                    "warps that share one warp tile; each takes its part of every step, and the parts are summed at the end",
                ),
                Knob("stages", (2, 3, 4, 5, 6), "shared buffers in the ring; stages - 1 steps are loaded ahead"),
                Knob("panel", (1, 8, 64), "raster order: pixel tiles that are walked before the next channel tile"),
                Knob(
                    "blocks_per_sm",
                    (0, 1, 2),
                    "0: one block per tile; otherwise a persistent grid with this many blocks per SM",
                ),
            ],
            derived={
                "threads": lambda k: 32 * ceil_div(k["bm"], k["wm"]) * ceil_div(k["bn"], k["wn"]) * k["slices"],
                "accumulators": lambda k: k["wm"] * k["wn"] // 32,
                "shared_bytes": lambda k: shared_bytes(k["bm"], k["bn"], k["bk"], k["stages"], k["slices"]),
                "rows_x": lambda k: ceil_div(k["bm"] * k["bk"] // CHUNK, k["threads"]),
                "rows_w": lambda k: ceil_div(k["bn"] * k["bk"] // CHUNK, k["threads"]),
                "registers": registers,
                "tiles_m": lambda k: ceil_div(gemm.m, k["bm"]),
                "tiles_n": lambda k: ceil_div(gemm.k, k["bn"]) * gemm.groups,
                "tiles": lambda k: k["tiles_m"] * k["tiles_n"],
                "waves": lambda k: k["tiles"] / target.sms,
                "steps": lambda k: ceil_div(gemm.kk, k["bk"]),
                "flops_per_byte": lambda k: k["bm"] * k["bn"] / (k["bm"] + k["bn"]),
            },
            constraints=[
                Constraint("a warp's tile divides the block's: wm <= bm, wn <= bn", _warp_divides),
                Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
                Constraint("a slice has a depth of at least 16: 16 slices <= bk", lambda k: 16 * k["slices"] <= k["bk"]),
                Constraint(
                    "at most 128 accumulators per thread, because more would spill", lambda k: k["accumulators"] <= 128
                ),
                Constraint(
                    f"registers (estimated) <= 255 per thread and {target.registers_per_sm} over the blocks of an SM",
                    lambda k: (
                        (k["registers"] <= 255)
                        & (k["registers"] * k["threads"] * np.maximum(k["blocks_per_sm"], 1) <= target.registers_per_sm)
                    ),
                ),
                Constraint(
                    "at most 16 rows and 64 copies per thread and step",
                    lambda k: (
                        (k["rows_x"] <= 16)
                        & (k["rows_x"] * (CHUNK // gemm.piece_x) + k["rows_w"] * (CHUNK // gemm.piece_w) <= 64)
                    ),
                ),
                Constraint(
                    f"shared memory per block <= {target.shared_bytes_per_block} bytes",
                    lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
                ),
                Constraint("bm is less than twice the output pixels", fits(gemm.m, "bm")),
                Constraint("bn is less than twice the output channels of a group", fits(gemm.k, "bn")),
                Constraint("bk is less than twice the reduction", fits(gemm.kk, "bk")),
                Constraint("at most steps + 1 stages", lambda k: (k["stages"] == 2) | (k["stages"] <= k["steps"] + 1)),
                Constraint(
                    "panel is 1 unless there are at least that many pixel tiles and a second channel tile",
                    lambda k: (k["panel"] == 1) | ((k["panel"] <= k["tiles_m"]) & (k["tiles_n"] > 1)),
                ),
                Constraint(
                    f"with one block per tile: at most {MAX_GRID_X} tiles",
                    lambda k: (k["blocks_per_sm"] > 0) | (k["tiles"] <= MAX_GRID_X),
                ),
                Constraint(
                    "a persistent grid has more tiles than blocks, and its blocks fit on an SM together",
                    lambda k: (
                        (k["blocks_per_sm"] == 0)
                        | (
                            (k["tiles"] > k["blocks_per_sm"] * target.sms)
                            & (k["blocks_per_sm"] * (k["shared_bytes"] + 1024) <= target.shared_bytes_per_sm)
                            & (k["blocks_per_sm"] * k["threads"] <= target.threads_per_sm)
                        )
                    ),
                ),
            ],
        )

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The tile with the least estimated time: the number of waves over the SMs times multiplications plus loads of one.

        Per unit of depth, a tile of bm x bn does bm bn multiply-adds and loads bm + bn elements. Loading one element costs
        as much as about 64 multiply-adds. Everything else follows from the tile.
        """
        gemm = Gemm.of(workload)

        def cost(tile: tuple[int, int]) -> tuple[float, int]:
            bm, bn = tile
            tiles = ceil_div(gemm.m, bm) * ceil_div(gemm.k, bn) * gemm.groups
            return ceil_div(tiles, target.sms) * (bm * bn + 64 * (bm + bn)), -bm * bn

        sizes_m = [size for size in (16, 32, 64, 128) if size == 16 or size < 2 * gemm.m]
        sizes_n = [size for size in (16, 32, 64, 128) if size == 16 or size < 2 * gemm.k]
        bm, bn = min(((bm, bn) for bm in sizes_m for bn in sizes_n), key=cost)
        if gemm.piece_x < CHUNK or gemm.c % 64:
            bk = 16 if gemm.kk <= 16 else 32
        else:
            bk = 128 if bm * bn <= 64 * 32 and gemm.kk >= 1024 else 64 if bm * bn < 128 * 128 else 32
        if gemm.piece_x == CHUNK:
            wm, wn = min(bm, 64 if bm * bn >= 128 * 64 else 32), min(bn, 32)
        else:  # many small copies: with one row per thread they are unrolled, so their latencies overlap
            wm, wn = 16, max(16, bn // 2)
        warps = (bm // wm) * (bn // wn)
        steps = ceil_div(gemm.kk, bk)
        # More warps hide the latency of a small tile with a long reduction.
        slices = max(
            s for s in (1, 2, 4) if s == 1 or (bm * bn <= 64 * 64 and s * warps <= 8 and 16 * s <= bk and steps >= 8)
        )
        budget = target.shared_bytes_per_sm // 2 - 1024  # two blocks share an SM
        stages = max(s for s in (2, 3, 4, 5) if s == 2 or (s <= steps + 1 and shared_bytes(bm, bn, bk, s, slices) <= budget))
        tiles_m, tiles_n = ceil_div(gemm.m, bm), ceil_div(gemm.k, bn) * gemm.groups
        panel = 8 if tiles_m >= 8 and tiles_n > 1 else 1
        blocks_per_sm = 0 if tiles_m * tiles_n <= MAX_GRID_X else 1
        return Config(
            bm=bm, bn=bn, bk=bk, wm=wm, wn=wn, slices=slices, stages=stages, panel=panel, blocks_per_sm=blocks_per_sm
        )  # fmt: skip

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        plan, epilogue = Plan.of(workload, config), Epilogue(workload)
        step = KernelStep(
            build_kernel(workload, plan, epilogue),
            (Pointer("x"), Pointer("weight"), Pointer("y"), *epilogue.params),
            Grid(plan.tiles, config["blocks_per_sm"]),
            plan.threads,
            plan.shared_bytes,
            min_blocks_per_sm=max(config["blocks_per_sm"], 1),
            shaped_by=SHAPED_BY,
        )
        gemm = plan.gemm
        alignments = {arg.name: dtype_of(arg.dtype).nbytes for arg in workload.signature}
        if gemm.vector > 1:
            alignments |= epilogue.alignments
        alignments |= {
            "x": gemm.piece_x * ELEMENT_BYTES,
            "weight": gemm.piece_w * ELEMENT_BYTES,
            "y": gemm.vector * gemm.out_bytes,
        }
        return KernelSource("cuda", "native", (step,), alignments=alignments)


def _warp_divides(k: Columns) -> Any:
    return (k["wm"] <= k["bm"]) & (k["wn"] <= k["bn"])
