"""The configuration space of conv2d_simt: knobs, derived quantities, constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.conv2d.limits import LARGEST_SIZE
from schedsearch.templates.conv2d.simt_loads import MOST_HELD, MOST_ROWS
from schedsearch.templates.conv2d.simt_sizes import WARP_COLUMNS, Gemm, shared_bytes
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
from schedsearch.templates.parts.simt import CHUNK
from schedsearch.workload import Workload

BLOCKS_PER_SM = (1, 2, 4)
ASYNC_CAPABILITY = (8, 0)  # cp.async
LEAST_ROWS = 8  # threads along each side of a tile; the swizzle repeats after 8 rows


def config_space(workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
    """All configurations of conv2d_simt."""
    gemm = Gemm.of(workload)
    asynchronous = target.compute_capability >= ASYNC_CAPABILITY and gemm.piece > 0 and not gemm.fills_padding
    knobs = [
        Knob("bm", (16, 32, 64, 128, 256), "output pixels of a block's tile"),
        Knob("bn", (8, 16, 32, 64, 128, 256), "output channels of a block's tile"),
        Knob("bk", (4, 8, 16, 32), "words of one step along the reduction: four 8-bit channels or one float32"),
        Knob("tm", (1, 2, 4, 8, 16), "output pixels of a thread"),
        Knob("tn", (1, 2, 4, 8, 16), "output channels of a thread"),
        Knob("stages", (2, 3, 4, 5), "shared buffers in the ring; stages - 1 steps are loaded ahead"),
        Knob(
            "loads",
            ("async", "registers") if asynchronous else ("registers",),
            "async: cp.async copies chunks to shared memory; registers: threads load the next step into registers, "
            "multiply, then store it",
        ),
        batch_knob(gemm.images),
        BAND,
        *persistent_knobs(BLOCKS_PER_SM),
    ]
    return ConfigSpace(knobs, _constraints(gemm, target), _derived(gemm, target))


def _derived(gemm: Gemm, target: Target) -> dict[str, Callable[[Columns], Any]]:
    def held(k: Columns) -> Any:
        return np.where(k["loads"] == "registers", CHUNK * (k["rows_x"] + k["rows_w"]), 0)

    def registers(k: Columns) -> Any:
        """An estimate: sums, fragments of one chunk, words on their way, three values per loaded row, counters."""
        return k["accumulators"] + 4 * k["tn"] + 4 + k["held"] + 4 * k["rows_x"] + 40

    return {
        "threads": lambda k: k["bm"] // k["tm"] * (k["bn"] // k["tn"]),
        "accumulators": lambda k: k["tm"] * k["tn"],
        "shared_bytes": lambda k: shared_bytes(k["bm"], k["bn"], k["bk"], k["tm"], k["stages"], gemm),
        "rows_x": lambda k: ceil_div(k["bm"] * k["bk"] // CHUNK, np.maximum(k["threads"], 1)),
        "rows_w": lambda k: ceil_div(k["bn"] * k["bk"] // CHUNK, np.maximum(k["threads"], 1)),
        "held": held,
        "registers": registers,
        "tiles_m": lambda k: pixel_tiles(k, gemm.images, gemm.pixels),
        "tiles_n": lambda k: ceil_div(gemm.k, k["bn"]) * gemm.groups,
        "tiles": lambda k: k["tiles_m"] * k["tiles_n"],
        "waves": lambda k: k["tiles"] / target.sms,
        "steps": lambda k: ceil_div(gemm.depth, k["bk"]),
        "products_per_word": lambda k: k["bm"] * k["bn"] / (k["bm"] + k["bn"]),
    }


def _constraints(gemm: Gemm, target: Target) -> list[Constraint]:
    pieces = CHUNK // max(gemm.piece, 1)

    def pixels(k: Columns) -> Any:
        """Pixels along the axis that tiles are cut from."""
        return np.where(k["batch"] == "bound", gemm.pixels, gemm.m)

    return [
        Constraint(
            f"at least {LEAST_ROWS} threads along each side of a tile: {LEAST_ROWS} tm <= bm, {LEAST_ROWS} tn <= bn",
            lambda k: (LEAST_ROWS * k["tm"] <= k["bm"]) & (LEAST_ROWS * k["tn"] <= k["bn"]),
        ),
        Constraint("at most 128 sums per thread, because more would spill", lambda k: k["accumulators"] <= 128),
        *resource_rules(target),
        Constraint(
            f"at most {MOST_ROWS} rows of x and 64 copies per thread and step, and {MOST_HELD} words on their way "
            "through registers",
            lambda k: (k["rows_x"] <= MOST_ROWS) & (k["rows_x"] * pieces + k["rows_w"] <= 64) & (k["held"] <= MOST_HELD),
        ),
        Constraint("registers hold one step: stages is 2", lambda k: (k["loads"] == "async") | (k["stages"] == 2)),
        Constraint(
            "bm is less than twice the output pixels (bound: of an image)", lambda k: below_twice(k["bm"], 16, pixels(k))
        ),
        Constraint(
            "bn is less than twice the output channels of a group", lambda k: below_twice(k["bn"], WARP_COLUMNS, gemm.k)
        ),
        Constraint("bk is less than twice the reduction", lambda k: below_twice(k["bk"], 4, gemm.depth)),
        Constraint("fewer than 2**30 tiles", lambda k: k["tiles"] < LARGEST_SIZE),
        Constraint("fewer than 2**30 pixels along the axis that tiles are cut from", lambda k: pixels(k) < LARGEST_SIZE),
        *schedule_rules(target),
        persistent_rule(BLOCKS_PER_SM),
    ]
