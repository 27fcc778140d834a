"""conv2d on tensor cores through mma.sync, for every workload in NHWC x OHWI: sm_80 and later, fp16 or bf16.

Implicit GEMM, one per group: y[m, k] = sum over kk of patch[m, kk] * weight[k, kk], where m counts output pixels (n, p, q)
and kk the reduction (r, s, c) with c fastest, which is the order of OHWI weights. A block computes `bm` x `bn` of y in
steps of `bk` along kk; cp.async fills a ring of `stages` shared buffers ahead of the multiplication.

The unit of loading is a chunk: 8 consecutive kk, 16 bytes, one row of an 8x8 ldmatrix. It arrives in one piece where the
channels of a group are a multiple of 8, else in pieces of the largest of 4, 2, 1 elements that divides them, so that a
piece never straddles two taps or an unaligned address. Whatever lies outside (padding, tails of m, k and kk) is filled
with zeros by the copy itself. The result goes through shared memory to be written in 16-byte words.

Sources: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k16, ldmatrix) and "cp.async".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.config import Config
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X, Grid, Pointer
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

CHUNK = 8  # elements
ELEMENT_BYTES = 2
ROW_PADDING = 8  # floats between rows of the staged result: the 8-byte stores of a half warp then hit every bank once
LARGEST_SIZE = 2**30  # of one axis: sums of two stay within int32
OUTSIDE = -(2**30)  # a row coordinate that no tap can bring back into the image
SHAPED_BY = frozenset({"accumulators", "float_out", "rows_x", "vector"})  # of what the kernel captures; see `KernelStep`
_COPY = {8: ptx.cp_async_16, 4: ptx.cp_async_8, 2: ptx.cp_async_4, 1: ptx.copy_2}


@dataclass(frozen=True)
class Gemm:
    """The implicit GEMM of one workload.

    Attributes:
        m: output pixels.
        k: output channels of a group.
        c: input channels of a group.
        kk: length of the reduction.
        piece_x, piece_w: elements that are loaded at once.
        vector: channels of y that are written at once.
    """

    groups: int
    m: int
    k: int
    c: int
    kk: int
    piece_x: int
    piece_w: int
    vector: int

    @classmethod
    def of(cls, workload: Workload) -> Gemm:
        n, out_h, out_w, channels = workload.output.shape
        k, c = channels // workload.groups, workload.c // workload.groups
        kk = workload.r * workload.s * c
        vector = 8 if k % 8 == 0 and workload.out_dtype != "float32" else 2 if k % 2 == 0 else 1
        return cls(workload.groups, n * out_h * out_w, k, c, kk, _piece(c), _piece(kk), vector)


def _piece(elements: int) -> int:
    """The largest load (8, 4, 2 or 1 elements) that divides a contiguous run of `elements`."""
    return next(size for size in (8, 4, 2, 1) if elements % size == 0)


def swizzle(row: Any, chunk: Any, chunks: int) -> Any:
    """Where chunk number `chunk` of a shared row of `chunks` chunks lies: any 8 consecutive rows use all 32 banks."""
    band, bits = _swizzle_pattern(chunks)
    return chunk ^ (row // band % bits)


def _swizzle_pattern(chunks: int) -> tuple[int, int]:
    """(rows that share 128 bytes, patterns until they repeat): `swizzle` as the kernel spells it out."""
    return max(8 // chunks, 1), min(chunks, 8)


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


class Conv2dMma(Template):
    """Takes every shape, stride, dilation, padding, group count and epilogue."""

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
            """An estimate: accumulators, fragments of one step, three values a loaded row, addresses and counters."""
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
                    "warps that share one warp tile, each with its part of every step; summed at the end",
                ),
                Knob("stages", (2, 3, 4, 5, 6), "shared buffers in the ring; stages - 1 steps are loaded ahead"),
                Knob("panel", (1, 8, 64), "raster order: pixel tiles that are walked before the next channel tile"),
                Knob("blocks_per_sm", (0, 1, 2), "0: one block a tile; else a persistent grid of so many blocks per SM"),
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
                Constraint("a slice has at least 16 of the depth: 16 slices <= bk", lambda k: 16 * k["slices"] <= k["bk"]),
                Constraint("at most 128 accumulators a thread, more spill", lambda k: k["accumulators"] <= 128),
                Constraint(
                    f"registers (estimated) <= 255 a thread and {target.registers_per_sm} over the blocks of an SM",
                    lambda k: (
                        (k["registers"] <= 255)
                        & (k["registers"] * k["threads"] * np.maximum(k["blocks_per_sm"], 1) <= target.registers_per_sm)
                    ),
                ),
                Constraint(
                    "at most 16 rows and 64 copies a thread and step",
                    lambda k: (
                        (k["rows_x"] <= 16)
                        & (k["rows_x"] * (CHUNK // gemm.piece_x) + k["rows_w"] * (CHUNK // gemm.piece_w) <= 64)
                    ),
                ),
                Constraint(
                    f"shared memory per block <= {target.shared_bytes_per_block} bytes",
                    lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
                ),
                Constraint("bm is not twice the output pixels or more", fits(gemm.m, "bm")),
                Constraint("bn is not twice the output channels of a group or more", fits(gemm.k, "bn")),
                Constraint("bk is not twice the reduction or more", fits(gemm.kk, "bk")),
                Constraint("no more stages than steps + 1", lambda k: (k["stages"] == 2) | (k["stages"] <= k["steps"] + 1)),
                Constraint(
                    "panel is 1 unless there are as many pixel tiles and a second channel tile",
                    lambda k: (k["panel"] == 1) | ((k["panel"] <= k["tiles_m"]) & (k["tiles_n"] > 1)),
                ),
                Constraint(
                    f"one block a tile: at most {MAX_GRID_X} tiles",
                    lambda k: (k["blocks_per_sm"] > 0) | (k["tiles"] <= MAX_GRID_X),
                ),
                Constraint(
                    "a persistent grid has more tiles than blocks, and its blocks fit an SM together",
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
        """The tile with the least estimated time: waves over the SMs, each as long as its multiplications plus loads.

        A tile of bm x bn multiplies bm bn and loads bm + bn elements a step; one loaded element costs as much as about 64
        multiply-adds. Everything else follows from the tile.
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
        else:  # many small copies: with one row a thread they are unrolled, so that their latencies overlap
            wm, wn = 16, max(16, bn // 2)
        warps = (bm // wm) * (bn // wn)
        steps = ceil_div(gemm.kk, bk)
        # A small tile with a long reduction: more warps hide its latency.
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
        gemm = Gemm.of(workload)
        epilogue = Epilogue(workload)
        bm, bn, bk, slices = (config[name] for name in ("bm", "bn", "bk", "slices"))
        threads = 32 * (bm // config["wm"]) * (bn // config["wn"]) * slices
        tiles = ceil_div(gemm.m, bm) * ceil_div(gemm.k, bn) * gemm.groups
        step = KernelStep(
            _make_kernel(workload, config, epilogue),
            (Pointer("x"), Pointer("weight"), Pointer("y"), *epilogue.params),
            Grid(tiles, config["blocks_per_sm"]),
            threads,
            int(shared_bytes(bm, bn, bk, config["stages"], slices)),
            min_blocks_per_sm=max(config["blocks_per_sm"], 1),
            shaped_by=SHAPED_BY,
        )
        out_bytes = 4 if workload.out_dtype == "float32" else 2
        alignments = {arg.name: 4 if arg.dtype == "float32" else 2 for arg in workload.signature}
        if gemm.vector > 1:
            alignments |= epilogue.alignments
        alignments |= {
            "x": gemm.piece_x * ELEMENT_BYTES,
            "weight": gemm.piece_w * ELEMENT_BYTES,
            "y": gemm.vector * out_bytes,
        }
        major, minor = target.compute_capability
        return KernelSource("cuda", f"sm_{major}{minor}", (step,), alignments=alignments)


def _warp_divides(k: Columns) -> Any:
    return (k["wm"] <= k["bm"]) & (k["wn"] <= k["bn"])


def shared_bytes(bm: Any, bn: Any, bk: Any, stages: Any, slices: Any) -> Any:
    """The ring of stages and the staged result (one a slice) take turns in the same memory."""
    return np.maximum(stages * (bm + bn) * bk * ELEMENT_BYTES, slices * bm * (bn + ROW_PADDING) * 4)


def _make_kernel(workload: Workload, config: Config, epilogue: Epilogue) -> Callable[..., None]:
    """The kernel of one configuration: (x, weight, y, *epilogue.params), addresses as u64."""
    # The problem.
    gemm = Gemm.of(workload)
    m_total, k_total, kk_total, c_group = gemm.m, gemm.k, gemm.kk, gemm.c
    _, out_h, out_w, k_all = workload.output.shape
    h, w, c_all, kernel_w = workload.h, workload.w, workload.c, workload.s
    stride_h, stride_w = workload.stride
    dilation_h, dilation_w = workload.dilation
    pad_top, pad_left = workload.padding[:2]
    padded = any(workload.padding)
    out_pixels = out_h * out_w

    # The schedule.
    bm, bn, bk, wm, wn = (config[name] for name in ("bm", "bn", "bk", "wm", "wn"))
    stages, panel, persistent = config["stages"], config["panel"], config["blocks_per_sm"] > 0
    slices = config["slices"]
    warps_n = bn // wn
    warps = (bm // wm) * warps_n  # of one slice
    threads = 32 * warps * slices
    steps = ceil_div(kk_total, bk)
    tiles_m, group_tiles = ceil_div(m_total, bm), ceil_div(k_total, bn)
    tiles_n = group_tiles * gemm.groups
    tiles = tiles_m * tiles_n
    # Pixels and tiles are counted in 32 bits where all of them, and one grid beyond, fit.
    index, count = (types.int32, types.uint32) if max(m_total + bm, 2 * tiles) < 2**31 else (types.int64, types.int64)

    # Loading: a thread takes one column of chunks, in rows `row_step` apart.
    piece_x, piece_w = gemm.piece_x, gemm.piece_w
    pieces_x, pieces_w = CHUNK // piece_x, CHUNK // piece_w
    copy_x, copy_w = _COPY[piece_x], _COPY[piece_w]
    one_tap = c_group % bk == 0  # then a step lies within one tap, and its arithmetic is the same for all threads
    chunks = bk // CHUNK
    row_step = threads // chunks
    rows_x, rows_w = ceil_div(bm, row_step), ceil_div(bn, row_step)
    ragged_x, ragged_w = bm % row_step != 0, bn % row_step != 0
    row_bytes = bk * ELEMENT_BYTES
    w_at = bm * row_bytes  # of the weights in a stage
    stage_bytes = (bm + bn) * row_bytes
    band, patterns = _swizzle_pattern(chunks)

    # Multiplying.
    accumulators = wm * wn // 32
    parts = bk // 16 // slices  # of a warp, in one step
    multiply = ptx.mma_warp_tile(wm, wn, row_bytes, workload.dtype)
    wait_stage, wait_all = ptx.cp_async_wait(stages - 2), ptx.cp_async_wait(0)
    commit = ptx.cp_async_commit

    # Storing.
    out_row_bytes = (bn + ROW_PADDING) * 4
    slice_bytes = bm * out_row_bytes
    store_tile = ptx.store_warp_tile(wm, wn, out_row_bytes)
    vector = gemm.vector
    vectors = bn // vector  # of a row
    float_out = workload.out_dtype == "float32"
    out_bytes = 4 if float_out else 2
    pair, single = epilogue.pair, epilogue.single
    pack = ptx.pack_pair("float16" if float_out else workload.out_dtype)

    def kernel(x: Any, weight: Any, y: Any, *operands: Any) -> None:
        shared = shared_base()
        thread = types.uint32(cuda.threadIdx.x)  # unsigned, so that division by a power of two is a shift
        lane, warp = types.uint32(thread % 32), types.uint32(thread // 32)
        part_first, warp = types.uint32(warp // warps * parts), types.uint32(warp % warps)
        out_slice = types.uint32(shared + part_first // parts * slice_bytes)
        warp_m, warp_n = types.uint32(warp // warps_n * wm), types.uint32(warp % warps_n * wn)

        # Where this thread's chunks go, and where its fragments come from.
        column = types.uint32(thread % chunks)
        row = types.uint32(thread // chunks)
        x_row = types.uint32(lane % 16)
        w_row = types.uint32(lane % 8 + lane // 16 * 8)
        x_fragment = types.uint32(shared + (warp_m + x_row) * row_bytes)
        w_fragment = types.uint32(shared + w_at + (warp_n + w_row) * row_bytes)
        x_swizzle = types.uint32(x_row // band % patterns)
        w_swizzle = types.uint32(w_row // band % patterns)

        h0 = cuda.local.array(rows_x, types.int32)  # of the pixel's first tap, may be negative
        w0 = cuda.local.array(rows_x, types.int32)
        x_rows = cuda.local.array(rows_x, types.uint64)
        acc = cuda.local.array(accumulators, types.float32)

        def fill(step: Any, slot: Any, w_first: Any, k_left: Any) -> None:
            """Loads the tiles of one step; beyond the last one it writes zeros and reads nothing."""
            stage = types.uint32(shared + slot * stage_bytes)
            for piece in range(pieces_x):
                kk = types.uint32(step * bk + column * CHUNK + piece * piece_x)
                tap = types.uint32(types.uint32(step * bk) if one_tap else kk) // c_group
                tap_h = tap // kernel_w
                down = types.int32(tap_h * dilation_h)
                right = types.int32((tap - tap_h * kernel_w) * dilation_w)
                offset = (types.int64(down) * w + right) * c_all + (kk - tap * c_group)
                for i in range(rows_x):
                    to_row = types.uint32(row + i * row_step)
                    if not ragged_x or to_row < bm:
                        inside = (types.uint32(h0[i] + down) < types.uint32(h)) & (kk < types.uint32(kk_total))
                        if padded:
                            inside = inside & (types.uint32(w0[i] + right) < types.uint32(w))
                        at = types.uint32((column ^ (to_row // band % patterns)) * 16 + piece * piece_x * 2)
                        to = types.uint32(stage + to_row * row_bytes) + at
                        copy_x(to, x_rows[i] + types.uint64(offset * 2), piece_x * 2 if inside else 0)
            for piece in range(pieces_w):
                kk = types.uint32(step * bk + column * CHUNK + piece * piece_w)
                for i in range(rows_w):
                    to_row = types.uint32(row + i * row_step)
                    if not ragged_w or to_row < bn:
                        inside = (types.int32(to_row) < k_left) & (kk < types.uint32(kk_total))
                        offset = types.int64(i * row_step) * kk_total + kk
                        at = types.uint32((column ^ (to_row // band % patterns)) * 16 + piece * piece_w * 2)
                        to = types.uint32(stage + w_at + to_row * row_bytes) + at
                        copy_w(to, w_first + types.uint64(offset * 2), piece_w * 2 if inside else 0)

        for tile in range(index(cuda.blockIdx.x), index(tiles), index(cuda.gridDim.x)):
            # Panels of `panel` pixel tiles; within one, pixels run fastest, then channels, groups one after the other.
            first = count(count(tile) // (panel * tiles_n) * panel)
            height = count(min(tiles_m - first, panel))
            inside_panel = count(count(tile) % (panel * tiles_n))
            tile_n = count(inside_panel // height)
            tile_m = count(first + inside_panel % height)
            group = count(tile_n // group_tiles)
            m_first = count(tile_m * bm)
            k_first = types.int32((tile_n - group * group_tiles) * bn)

            for i in range(rows_x):
                m = count(m_first + row + i * row_step)
                n = count(m // out_pixels)
                pixel = count(m - n * out_pixels)
                p = count(pixel // out_w)
                down = types.int32(p * stride_h - pad_top)
                right = types.int32((pixel - p * out_w) * stride_w - pad_left)
                h0[i] = down if m < m_total else types.int32(OUTSIDE)
                w0[i] = right
                x_rows[i] = x + types.uint64(
                    (((types.int64(n) * h + down) * w + right) * c_all + types.int64(group) * c_group) * 2
                )
            w_first = weight + types.uint64((types.int64(group) * k_total + k_first + row) * kk_total * 2)
            k_left = types.int32(k_total - k_first)

            for i in range(accumulators):
                acc[i] = types.float32(0)
            for step in range(stages - 1):
                fill(types.int32(step), types.int32(step), w_first, k_left)
                commit()
            read, write = types.int32(0), types.int32(stages - 1)
            for step in range(types.int32(steps)):
                wait_stage()
                cuda.syncthreads()
                fill(types.int32(step + stages - 1), write, w_first, k_left)
                commit()
                for part in range(parts):
                    x_chunk = types.uint32((((part_first + part) * 2 + lane // 16) ^ x_swizzle) * 16)
                    w_chunk = types.uint32((((part_first + part) * 2 + lane // 8 % 2) ^ w_swizzle) * 16)
                    stage = types.uint32(read * stage_bytes)
                    multiply(acc, x_fragment + stage + x_chunk, w_fragment + stage + w_chunk)
                read = types.int32(read + 1 if read + 1 < stages else 0)
                write = types.int32(write + 1 if write + 1 < stages else 0)
            wait_all()
            cuda.syncthreads()

            store_tile(acc, out_slice + (warp_m + lane // 4) * out_row_bytes + (warp_n + lane % 4 * 2) * 4)
            cuda.syncthreads()
            for item in range(types.int32(thread), types.int32(bm * vectors), types.int32(threads)):
                out_row = types.uint32(item) // vectors
                out_column = types.uint32(item) % vectors * vector
                m = count(m_first + out_row)
                if m < m_total and out_column < k_left:
                    k = types.int32(group * k_total + k_first + out_column)
                    offset = types.int64(m) * k_all + k
                    address = y + types.uint64(offset * out_bytes)
                    staged = types.uint32(shared + out_row * out_row_bytes + out_column * 4)
                    if vector == 1:
                        a0 = ptx.load_shared_f32(staged)
                        for other in range(1, slices):
                            a0 += ptx.load_shared_f32(staged + other * slice_bytes)
                        v0 = single(a0, 1, k, offset, *operands)
                        if float_out:
                            ptx.store_global_f32(address, v0)
                        else:
                            ptx.store_global_u16(address, pack(v0, types.float32(0)))
                    else:
                        words = cuda.local.array(4, types.uint32)
                        for i in range(vector // 2):
                            a0, a1 = ptx.load_shared_f32x2(staged + i * 8)
                            for other in range(1, slices):
                                b0, b1 = ptx.load_shared_f32x2(staged + i * 8 + other * slice_bytes)
                                a0, a1 = a0 + b0, a1 + b1
                            v0, v1 = pair(a0, a1, 1, k + i * 2, offset + i * 2, *operands)
                            if float_out:
                                ptx.store_global_f32x2(address, v0, v1)
                            else:
                                words[i] = pack(v0, v1)
                        if vector == 8:
                            ptx.store_global_v4(address, words[0], words[1], words[2], words[3])
                        elif not float_out:
                            ptx.store_global_u32(address, words[0])
            if persistent:
                cuda.syncthreads()  # the ring is filled again only when all have read the result

    return kernel
