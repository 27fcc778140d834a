"""The configuration space of conv2d_mma: knobs, derived quantities, constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.launch import MAX_GRID_X
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.conv2d.mma_sizes import LOADER_THREADS, Gemms, shared_bytes, tma_shared_bytes
from schedsearch.templates.conv2d.mma_tma import tma_problem
from schedsearch.templates.conv2d.tiles import (
    BAND,
    batch_knob,
    below_twice,
    ceil_div,
    pixel_tiles,
    resource_rules,
    schedule_rules,
)
from schedsearch.templates.parts.grids import persistent_knobs, persistent_rule
from schedsearch.workload import Workload

BLOCKS_PER_SM = (1, 2, 3)
COPIED_STAGES = (2, 3, 4, 5, 6)
MORE_STAGES = (8, 10, 12)  # of loads by TMA
SWIZZLE_BYTES = 128  # of a row, the widest of TMA
PIXELS = (16, 32, 64, 96, 128, 192, 256)  # of a tile


def config_space(workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
    """All configurations of conv2d_mma."""
    gemms = Gemms.of(workload)
    unit, tma = gemms.single.mma.k, tma_problem(workload, target) is None
    knobs = [
        Knob("bm", PIXELS, "output pixels of a block's tile"),
        Knob("bn", (16, 32, 64, 128, 256), "output channels of a block's tile"),
        Knob("bk", (unit, 2 * unit, 4 * unit, 8 * unit), "depth of one step along the reduction"),
        Knob("wm", (16, 32, 48, 64), "output pixels of a warp's tile"),
        Knob("wn", (16, 32, 64), "output channels of a warp's tile"),
        Knob(
            "slices",
            (1, 2, 4),
            "warps that share one warp tile; each takes its part of every step, and the parts are summed at the end",
        ),
        Knob(
            "stages",
            (*COPIED_STAGES, *(MORE_STAGES if tma else ())),
            "shared buffers in the ring of steps that are loaded ahead",
        ),
        BAND,
        *persistent_knobs(BLOCKS_PER_SM),
        Knob(
            "loads",
            ("copies", *("tma",) * tma),
            "copies: all threads load by cp.async; tma: one warp loads by TMA",
        ),
    ]
    if gemms.takes_batch_knob:
        knobs.append(batch_knob(gemms.single.images))
    if len(gemms.by_merged) > 1:
        knobs.append(
            Knob("merged", tuple(gemms.by_merged), "neighbouring groups that share a GEMM, with zeros between them")
        )
    rules = (*_constraints(gemms, target), *(_tma_rules(workload, gemms) if tma else ()))
    return ConfigSpace(knobs=knobs, derived=_derived(gemms, target), constraints=rules)


def _derived(gemms: Gemms, target: Target) -> dict[str, Callable[[Columns], Any]]:
    mma, word = gemms.single.mma, gemms.single.mma.registers_per_word(target.compute_capability)

    def registers(k: Columns) -> Any:
        """An estimate: accumulators, fragments of one step, three values per loaded row, addresses and counters."""
        fragments = (k["wm"] // 4 + k["wn"] // 2) * word
        return k["accumulators"] + fragments + 4 * k["rows_x"] + 40

    def consumers(k: Columns) -> Any:
        return 32 * ceil_div(k["bm"], k["wm"]) * ceil_div(k["bn"], k["wn"]) * k["slices"]

    def shared(k: Columns) -> Any:
        sizes = k["bm"], k["bn"], k["bk"] * mma.element_bytes, k["stages"], k["slices"]
        return np.where(by_tma(k), tma_shared_bytes(*sizes, k["persistent"]), shared_bytes(*sizes))

    def steps(k: Columns) -> Any:
        of_taps = gemms.single.taps * ceil_div(gemms.column("c", k), k["bk"])
        return np.where(by_tma(k), of_taps, ceil_div(gemms.column("depth", k), k["bk"]))

    return {
        "threads": lambda k: consumers(k) + LOADER_THREADS * by_tma(k),
        "accumulators": lambda k: k["wm"] * k["wn"] // 32,
        "shared_bytes": shared,
        "rows_x": lambda k: np.where(by_tma(k), 0, ceil_div(k["bm"] * k["bk"] // mma.chunk, consumers(k))),
        "rows_w": lambda k: np.where(by_tma(k), 0, ceil_div(k["bn"] * k["bk"] // mma.chunk, consumers(k))),
        "registers": registers,
        "tiles_m": lambda k: pixel_tiles(k, gemms.single.images, gemms.single.pixels),
        "tiles_n": lambda k: ceil_div(gemms.column("k", k), k["bn"]) * gemms.column("groups", k),
        "tiles": lambda k: k["tiles_m"] * k["tiles_n"],
        "waves": lambda k: k["tiles"] / target.sms,
        "steps": steps,
        # Loads by TMA go on with the next tiles, if the block has any.
        "steps_ahead": lambda k: np.where(by_tma(k) & k["persistent"], 4 * k["steps"], k["steps"]),
        "flops_per_byte": lambda k: k["bm"] * k["bn"] / (k["bm"] + k["bn"]),
    }


def by_tma(k: Columns) -> Any:
    """Whether a configuration loads by TMA."""
    return k["loads"] == "tma"


def _tma_rules(workload: Workload[Conv2dParams], gemms: Gemms) -> list[Constraint]:
    """What loads by TMA need. Of channels that others follow in x, a row must not have any of the others': times the zeros
    that are loaded for their weights, an infinity would be a NaN."""
    gemm = gemms.single
    most = SWIZZLE_BYTES // gemm.element_bytes
    found = [
        Constraint(
            f"without TMA at most {COPIED_STAGES[-1]} stages", lambda k: by_tma(k) | (k["stages"] <= COPIED_STAGES[-1])
        ),
        Constraint(
            f"with TMA a row of a stage has at most {SWIZZLE_BYTES} bytes: bk <= {most}",
            lambda k: ~by_tma(k) | (k["bk"] <= most),
        ),
        Constraint(
            "with TMA bk is less than twice the channels of a group",
            lambda k: ~by_tma(k) | below_twice(k["bk"], gemm.mma.k, gemm.c),
        ),
    ]
    if gemm.groups > 1 or workload.params.x_slice:
        found.append(
            Constraint("with TMA bk divides the channels of a group", lambda k: ~by_tma(k) | (gemm.c % k["bk"] == 0))
        )
    if len(gemms.by_merged) > 1:
        found.append(Constraint("with TMA groups are not merged", lambda k: ~by_tma(k) | (k["merged"] == 1)))
    return found


def _constraints(gemms: Gemms, target: Target) -> list[Constraint]:
    mma, pixels = gemms.single.mma, gemms.single.pixels

    def copies(k: Columns) -> Any:
        pieces_x, pieces_w = (mma.chunk // gemms.column(piece, k) for piece in ("piece_x", "piece_w"))
        return k["rows_x"] * pieces_x + k["rows_w"] * pieces_w

    found = [
        Constraint(
            "a warp's tile divides the block's: wm divides bm, wn divides bn",
            lambda k: (k["bm"] % k["wm"] == 0) & (k["bn"] % k["wn"] == 0),
        ),
        Constraint(
            f"a slice has a depth of at least {mma.k}: {mma.k} slices <= bk", lambda k: mma.k * k["slices"] <= k["bk"]
        ),
        Constraint("at most 128 accumulators per thread, because more would spill", lambda k: k["accumulators"] <= 128),
        *resource_rules(target),
        Constraint("at most 16 rows and 64 copies per thread and step", lambda k: (k["rows_x"] <= 16) & (copies(k) <= 64)),
        Constraint("bm is less than twice the output pixels", lambda k: below_twice(k["bm"], 16, gemms.single.m)),
        Constraint(
            "bn is less than twice the output channels of a group", lambda k: below_twice(k["bn"], 16, gemms.column("k", k))
        ),
        Constraint("bk is less than twice the reduction", lambda k: below_twice(k["bk"], mma.k, gemms.column("depth", k))),
        Constraint(
            f"with one block per tile: at most {MAX_GRID_X} tiles",
            lambda k: k["persistent"] | (k["tiles"] <= MAX_GRID_X),
        ),
        *schedule_rules(target, "steps_ahead"),
        persistent_rule(BLOCKS_PER_SM),
    ]
    if gemms.takes_batch_knob:
        found.append(
            Constraint(
                "batch is folded if bm divides the pixels of an image, or is twice as many or more",
                lambda k: (k["batch"] == "folded") | ((pixels % k["bm"] != 0) & (k["bm"] < 2 * pixels)),
            )
        )
    return found
