"""The configuration space of conv2d_mma: knobs, derived quantities, constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.conv2d.mma_sizes import Gemms, ceil_div, shared_bytes
from schedsearch.workload import Workload


def config_space(workload: Workload, target: Target) -> ConfigSpace:
    """All configurations of conv2d_mma."""
    gemms = Gemms.of(workload)
    unit = gemms.single.mma.k
    knobs = [
        Knob("bm", (16, 32, 64, 128, 256), "output pixels of a block's tile"),
        Knob("bn", (16, 32, 64, 128, 256), "output channels of a block's tile"),
        Knob("bk", (unit, 2 * unit, 4 * unit, 8 * unit), "depth of one step along the reduction"),
        Knob("wm", (16, 32, 64), "output pixels of a warp's tile"),
        Knob("wn", (16, 32, 64), "output channels of a warp's tile"),
        Knob(
            "slices",
            (1, 2, 4),
            "warps that share one warp tile; each takes its part of every step, and the parts are summed at the end",
        ),
        Knob("stages", (2, 3, 4, 5, 6), "shared buffers in the ring; stages - 1 steps are loaded ahead"),
        Knob("panel", (1, 8, 64), "raster order: pixel tiles that are walked before the next channel tile"),
        Knob("blocks_per_sm", (0, 1, 2), "0: one block per tile; otherwise a persistent grid with this many blocks per SM"),
    ]
    if gemms.takes_batch_knob:
        knobs.append(Knob("batch", ("folded", "bound"), "whether a tile may have pixels of two images, or only of one"))
    if len(gemms.by_merged) > 1:
        knobs.append(
            Knob("merged", tuple(gemms.by_merged), "neighbouring groups that share a GEMM, with zeros between them")
        )
    return ConfigSpace(knobs=knobs, derived=_derived(gemms, target), constraints=_constraints(gemms, target))


def _derived(gemms: Gemms, target: Target) -> dict[str, Callable[[Columns], Any]]:
    mma = gemms.single.mma

    def registers(k: Columns) -> Any:
        """An estimate: accumulators, fragments of one step, three values per loaded row, addresses and counters."""
        fragments = (k["wm"] // 4 + k["wn"] // 2) * mma.registers_per_word
        return k["accumulators"] + fragments + 4 * k["rows_x"] + 40

    def tiles_m(k: Columns) -> Any:
        folded = ceil_div(gemms.single.m, k["bm"])
        if "batch" not in k:
            return folded
        return np.where(k["batch"] == "bound", gemms.single.n * ceil_div(gemms.single.pixels, k["bm"]), folded)

    return {
        "threads": lambda k: 32 * ceil_div(k["bm"], k["wm"]) * ceil_div(k["bn"], k["wn"]) * k["slices"],
        "accumulators": lambda k: k["wm"] * k["wn"] // 32,
        "shared_bytes": lambda k: shared_bytes(k["bm"], k["bn"], k["bk"] * mma.element_bytes, k["stages"], k["slices"]),
        "rows_x": lambda k: ceil_div(k["bm"] * k["bk"] // mma.chunk, k["threads"]),
        "rows_w": lambda k: ceil_div(k["bn"] * k["bk"] // mma.chunk, k["threads"]),
        "registers": registers,
        "tiles_m": tiles_m,
        "tiles_n": lambda k: ceil_div(gemms.column("k", k), k["bn"]) * gemms.column("groups", k),
        "tiles": lambda k: k["tiles_m"] * k["tiles_n"],
        "waves": lambda k: k["tiles"] / target.sms,
        "steps": lambda k: ceil_div(gemms.column("kk", k), k["bk"]),
        "flops_per_byte": lambda k: k["bm"] * k["bn"] / (k["bm"] + k["bn"]),
    }


def _constraints(gemms: Gemms, target: Target) -> list[Constraint]:
    mma, pixels = gemms.single.mma, gemms.single.pixels

    def copies(k: Columns) -> Any:
        pieces_x, pieces_w = (mma.chunk // gemms.column(piece, k) for piece in ("piece_x", "piece_w"))
        return k["rows_x"] * pieces_x + k["rows_w"] * pieces_w

    found = [
        Constraint(
            "a warp's tile divides the block's: wm <= bm, wn <= bn",
            lambda k: (k["wm"] <= k["bm"]) & (k["wn"] <= k["bn"]),
        ),
        Constraint(f"threads per block <= {MAX_BLOCK_THREADS}", lambda k: k["threads"] <= MAX_BLOCK_THREADS),
        Constraint(
            f"a slice has a depth of at least {mma.k}: {mma.k} slices <= bk", lambda k: mma.k * k["slices"] <= k["bk"]
        ),
        Constraint("at most 128 accumulators per thread, because more would spill", lambda k: k["accumulators"] <= 128),
        Constraint(
            f"registers (estimated) <= 255 per thread and {target.registers_per_sm} over the blocks of an SM",
            lambda k: (
                (k["registers"] <= 255)
                & (k["registers"] * k["threads"] * np.maximum(k["blocks_per_sm"], 1) <= target.registers_per_sm)
            ),
        ),
        Constraint("at most 16 rows and 64 copies per thread and step", lambda k: (k["rows_x"] <= 16) & (copies(k) <= 64)),
        Constraint(
            f"shared memory per block <= {target.shared_bytes_per_block} bytes",
            lambda k: k["shared_bytes"] <= target.shared_bytes_per_block,
        ),
        Constraint("bm is less than twice the output pixels", lambda k: _fits(k["bm"], 16, gemms.single.m)),
        Constraint(
            "bn is less than twice the output channels of a group", lambda k: _fits(k["bn"], 16, gemms.column("k", k))
        ),
        Constraint("bk is less than twice the reduction", lambda k: _fits(k["bk"], mma.k, gemms.column("kk", k))),
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
    ]
    if gemms.takes_batch_knob:
        found.append(
            Constraint(
                "batch is folded if bm divides the pixels of an image, or is twice as many or more",
                lambda k: (k["batch"] == "folded") | ((pixels % k["bm"] != 0) & (k["bm"] < 2 * pixels)),
            )
        )
    return found


def _fits(tile: Any, least: int, size: Any) -> Any:
    return (tile == least) | (tile < 2 * size)
