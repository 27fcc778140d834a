"""Sizes of conv2d_wgmma: the sizes that a configuration gives, and the predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns, Constraint
from schedsearch.target import Target
from schedsearch.templates.conv2d.geometry import Im2col, stores_by_tma, stores_rows
from schedsearch.templates.parts import hopper, store_chunks, store_rows
from schedsearch.templates.parts.choosing import evaluated
from schedsearch.templates.parts.hopper import BARRIER_BYTES, WARPGROUP, WGMMA_M
from schedsearch.templates.parts.machine import Im2colFit, machine
from schedsearch.templates.parts.shared import SharedLayout
from schedsearch.templates.parts.store import Output, ShuffledOutput, interleaved
from schedsearch.templates.parts.store_words import WORD_BYTES, staged_columns
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.workload import Workload

GROUP_ROWS = WGMMA_M  # of a consumer warpgroup
LINE_BYTES, SECTOR_BYTES = 128, 32  # of L2
ROW_BYTES = (32, 64, 128)  # of a k step
ROW_STORES = ("chunks", "units")  # of rows that TMA cannot store: see `parts.store_rows` and `parts.store_chunks`


def bks(dtype: str) -> tuple[int, ...]:
    """The input channels that a k step may have."""
    return tuple(row // dtype_of(dtype).nbytes for row in ROW_BYTES)


def useful_bks(channels: int, dtype: str = "float16") -> tuple[int, ...]:
    """The k steps worth trying: less than twice as wide as needed, and with less padding than every wider one."""
    widest = min((bk for bk in bks(dtype) if bk >= channels), default=max(bks(dtype)))
    kept: list[int] = []
    for bk in sorted((bk for bk in bks(dtype) if bk <= widest), reverse=True):
        padded = math.ceil(channels / bk) * bk
        if all(padded < math.ceil(channels / wider) * wider for wider in kept):
            kept.append(bk)
    return tuple(kept)


def octets_per_block(workload: Workload[Conv2dParams], q: Columns) -> Any:
    """Octets of the tile's columns that each block of a split tile adds up. The last blocks may have fewer."""
    unit = store_columns(workload)
    return -(-q["bn"] // (unit * q["split_k"])) * (unit // 8)


def store_columns(workload: Workload[Conv2dParams]) -> int:
    """Columns that a thread's registers must fill together: 16 of 8-bit outputs, whose columns are interleaved, else 8."""
    return 16 if interleaved(workload.params.out_dtype) else 8


def store_segment(workload: Workload[Conv2dParams], gemm: Im2col, q: Mapping[str, Any]) -> int:
    """Columns that one TMA store writes: the largest of 16, 32, 64, 128 bytes that divides those of all blocks of a tile
    and the channels of a block of y, or those that are neighbours after depth_to_space."""
    unit = store_columns(workload)
    widest = LINE_BYTES // (unit * dtype_of(workload.params.out_dtype).nbytes)
    of_block = widest if gemm.y.plain else gemm.y.size // unit
    if gemm.shuffle:
        of_block = gemm.columns // gemm.shuffle.block // unit
    return unit * math.gcd(q["bn"] // unit, int(octets_per_block(workload, q)) * 8 // unit, widest, of_block)


def output_of(gemm: Im2col, bm: int) -> Output:
    """How y lies in memory, for tiles of bm rows."""
    y, padded = gemm.y, math.ceil(gemm.image_rows / bm) * bm
    steps = (y.image_step, y.block_step) if gemm.images > 1 else (0, 1)
    sizes = gemm.columns, gemm.images, gemm.image_rows, padded, y.size, *steps
    return ShuffledOutput(*sizes, gemm.shuffle, gemm.out_w) if gemm.shuffle else Output(*sizes)


def staged_bytes(workload: Workload[Conv2dParams], columns: Any, q: Columns) -> Any:
    """Bytes of shared memory for a row of `columns` columns of y; 0 if y does not go through it."""
    if stores_rows(workload):
        chunks, units = store_chunks.row_bytes(columns), store_rows.row_bytes(columns)
        return np.where(q["row_store"] == "chunks", chunks, units)
    if not stores_by_tma(workload):
        return 0 * columns
    nbytes = dtype_of(workload.params.out_dtype).nbytes
    return nbytes * (staged_columns(columns) if nbytes == WORD_BYTES else columns)


def stage_bytes(workload: Workload[Conv2dParams], q: Columns) -> Any:
    """A stage has bm rows of x, wgmma's A, then bn rows of the weights, its B: K-major, swizzled over their width."""
    return (q["bm"] + q["bn"]) * q["bk"] * dtype_of(workload.params.dtype).nbytes


def sums_bytes(workload: Workload[Conv2dParams], q: Columns) -> Any:
    """Bytes that the other blocks of a split tile send: 32-bit sums of this block's columns, 16 per thread and octet."""
    return (q["split_k"] - 1) * octets_per_block(workload, q) * q["bm"] * 32


def ring_bytes(workload: Workload[Conv2dParams], q: Columns) -> Any:
    """Bytes of the stages. At the end of a split tile, the other blocks' sums overwrite them, followed by y."""
    y = q["bm"] * staged_bytes(workload, octets_per_block(workload, q) * 8, q)
    at_end = np.where(q["split_k"] == 1, 0, sums_bytes(workload, q) + y)
    return np.maximum(q["stages"] * stage_bytes(workload, q), at_end)


def shared_layout(workload: Workload[Conv2dParams], q: Columns) -> SharedLayout:
    """Shared memory of a block: the ring, y of each consumer group, the barriers."""
    split = q["split_k"] > 1
    return SharedLayout.of(
        ring=q["ring_bytes"],
        y=np.where(split, 0, q["turns"] * q["bm"] * staged_bytes(workload, q["bn"], q)),
        # Each half has `full` barriers of its own: sharing them, it would skip phases, and a wait by parity could match a
        # stale phase.
        full=q["turns"] * q["stages"] * BARRIER_BYTES,
        empty=q["stages"] * BARRIER_BYTES,
        sums_full=split * BARRIER_BYTES,
    )


def l2_row_cost(channels: int, bk: int, fit: Im2colFit, element_bytes: int = 2) -> float:
    """L2's cost of loading bk of a pixel's channels, in bytes of rows that fill a line; a mean over the rows' starts."""
    row = min(bk, channels) * element_bytes
    starts = range(0, LINE_BYTES, math.gcd(channels * element_bytes, bk * element_bytes, LINE_BYTES))
    sectors = sum(-(-(start % SECTOR_BYTES + row) // SECTOR_BYTES) for start in starts) / len(starts)
    lines = sum(-(-(start + row) // LINE_BYTES) for start in starts) / len(starts)
    return fit.l2_sector_share * SECTOR_BYTES * sectors + fit.l2_line_cost * lines


def derived_quantities(
    workload: Workload[Conv2dParams], target: Target, gemm: Im2col | None = None
) -> dict[str, Callable[[Columns], Any]]:
    """Name -> formula over knobs and earlier quantities. It works on arrays and on single values."""
    gemm = gemm or Im2col.of(workload)
    w, out_bytes = workload.params, dtype_of(workload.params.out_dtype).nbytes
    element_bytes = dtype_of(w.dtype).nbytes
    card = machine(target)
    fit = card.im2col
    operand_bytes = (w.n * w.h * w.w * w.c + w.k * gemm.taps * gemm.channels) * element_bytes + gemm.rows * w.k * out_bytes
    memory_cycles = operand_bytes / (fit.memory_bytes_per_cycle * target.sms)
    row_costs = {
        bk: l2_row_cost(gemm.x.size if gemm.groups == 1 else gemm.channels, bk, fit, element_bytes) for bk in bks(w.dtype)
    }

    def predicted_cycles(q: Columns) -> Any:
        """The busiest multiprocessor's time: its blocks one after the other, or their shared bottleneck, or memory."""
        one_each = hopper.blocks_at_once(target, q["cluster"], 1)
        blocks = -(-q["blocks"] // one_each)
        neighbours = np.minimum(q["blocks_per_sm"], blocks)
        # All bytes of a step pass the multiprocessor's port, but L2 reads only once what is multicast.
        l2_rows = q["bm"] / q["cluster_n"] + q["bn"] / q["cluster_m"]
        from_l2 = l2_rows * sum(np.where(q["bk"] == bk, cost, 0) for bk, cost in row_costs.items())
        unlike = q["split_k"] * (q["bm"] + q["bn"]) / l2_rows
        all_l2 = fit.all_l2_bytes_per_cycle * target.sms * unlike**-fit.unlike_l2_exponent
        load = np.maximum(
            stage_bytes(workload, q) / fit.l2_bytes_per_cycle, from_l2 * np.minimum(q["blocks"], one_each) / all_l2
        )
        peers = q["cluster_m"] * q["cluster_n"] - 1
        late = np.where(peers == 0, 0, fit.peer_cycles)
        # wgmma's rate is that of its N columns, or of reading A and B from shared memory at 128 bytes per cycle.
        wgmma = np.maximum(q["bn"] / 2, 16 + q["bn"] / 4)
        multiply = (
            q["bm"] // GROUP_ROWS * (q["bk"] // Wgmma(w.dtype).k) * wgmma + fit.step_cycles + peers * fit.peer_step_cycles
        )
        # A buffer's round: it is loaded, waits for the step before it, is multiplied, and is handed back during the next.
        load_alone = np.maximum(load, (fit.load_latency_cycles + late + load + 2 * multiply) / q["stages"])
        split = fit.cluster_cycles + q["bm"] * q["bn"] * 4 * (1 - 1 / q["split_k"]) / fit.cluster_bytes_per_cycle
        store = fit.tile_cycles + q["bm"] * q["bn"] / q["split_k"] * out_bytes / fit.store_bytes_per_cycle
        results = q["bm"] * q["bn"] / q["split_k"]
        unit = store_columns(workload)
        segment = unit * np.gcd(np.gcd(q["bn"] // unit, octets_per_block(workload, q) * 8 // unit), 8)
        requantised = results if out_bytes == 1 else 0 * results
        convert, send = requantised / card.requantised_per_cycle, requantised / segment * card.stored_row_cycles
        store = store + np.where(q["split_k"] == 1, 0, split) + convert
        fill = fit.fill_cycles + late
        serial = fill + q["block_steps"] * np.maximum(load_alone, multiply) + store
        # Loads of a persistent block's next tile go on while this one is stored, and so, in turn, does multiplying.
        tensor = q["block_steps"] * multiply
        again = np.where(q["turns"] == 1, card.staged_again_cycles, 0) if out_bytes == 1 else 0
        turn = (tensor + store + again) / q["turns"]
        overlapped = np.maximum(q["block_steps"] * load_alone, np.maximum(tensor, turn))
        persistent = q["persistent"]
        alone = -(-blocks // neighbours) * np.where(persistent, overlapped, serial)
        alone = alone + np.where(persistent, fill + store, 0)
        steps = q["block_steps"] * np.maximum(load, multiply)
        shared = blocks * np.maximum(steps, np.maximum(convert, send)) + fill + store
        busy = np.maximum(alone, shared)
        # Memory is idle while all blocks start or store at once, as blocks with only one tile do.
        memory = memory_cycles + np.where(blocks == neighbours, fill + store, 0)
        slower, faster = np.maximum(busy, memory), np.minimum(busy, memory)
        return card.launch_cycles + slower + (1 - fit.memory_overlap) * faster

    return {
        "turns": lambda q: np.where(q["schedule"] == "in_turn", 2, 1),
        "bm": lambda q: -(-q["warpgroups"] // q["turns"]) * GROUP_ROWS,
        "threads": lambda q: (q["warpgroups"] + 1) * WARPGROUP,
        "k_steps": lambda q: gemm.taps * gemm.channel_steps(q["bk"]),
        "block_steps": lambda q: -(-q["k_steps"] // q["split_k"]),
        "row_tiles": lambda q: gemm.row_tiles(q["bm"]),
        "column_tiles": lambda q: -(-gemm.columns // q["bn"]),
        "tiles": lambda q: q["row_tiles"] * q["column_tiles"],
        "cluster": lambda q: q["cluster_m"] * q["cluster_n"] * q["split_k"],
        "cluster_rows": lambda q: -(-q["row_tiles"] // q["cluster_m"]),
        "cluster_columns": lambda q: -(-q["column_tiles"] // q["cluster_n"]),
        "blocks": lambda q: q["cluster_rows"] * q["cluster_columns"] * q["cluster"],  # including tiles past the end
        "waves": lambda q: -(-q["blocks"] // hopper.blocks_at_once(target, q["cluster"], q["blocks_per_sm"])),
        "ring_bytes": lambda q: ring_bytes(workload, q),
        "shared_bytes": lambda q: shared_layout(workload, q).nbytes,
        "registers": hopper.registers,
        "predicted_cycles": predicted_cycles,
    }


@dataclass(frozen=True)
class Plan:
    """A configuration of conv2d_wgmma with its sizes.

    Attributes:
        warpgroups .. l2_promotion: the knobs.
        row_store: the knob of outputs that have it.
        turns: tiles that a block computes at the same time; 2 with groups in turn.
        bm: rows (output pixels) of a tile.
        threads: threads of a block.
        k_steps, block_steps: k steps of a tile, and the most that a block of a split tile runs.
        row_tiles, column_tiles, tiles: tiles of the whole output.
        cluster: blocks of a cluster.
        cluster_rows, cluster_columns: rows and columns of clusters.
        blocks: blocks that compute a tile or a part of one, including those past the ends.
        waves: times that all multiprocessors are filled.
        ring_bytes, shared_bytes: bytes of the ring, and of all shared memory of a block.
        registers: most registers of a thread.
        predicted_cycles: the predicted time.
        own_octets: octets of a tile's columns that a block stores; fewer than all in a split tile.
        segment: columns that one TMA store writes.
        sums_bytes: bytes that a block of a split tile receives.
        shared: the layout of shared memory.
    """

    warpgroups: int
    schedule: str
    bn: int
    bk: int
    stages: int
    split_k: int
    cluster_m: int
    cluster_n: int
    persistent: bool
    blocks_per_sm: int
    band: int
    l2_promotion: int
    turns: int
    bm: int
    threads: int
    k_steps: int
    block_steps: int
    row_tiles: int
    column_tiles: int
    tiles: int
    cluster: int
    cluster_rows: int
    cluster_columns: int
    blocks: int
    waves: int
    ring_bytes: int
    shared_bytes: int
    registers: int
    predicted_cycles: int
    own_octets: int
    segment: int
    sums_bytes: int
    shared: SharedLayout
    row_store: str = ""


def evaluate(
    workload: Workload[Conv2dParams], target: Target, config: Mapping[str, Any], gemm: Im2col | None = None
) -> Plan:
    """The plan of one configuration."""
    gemm = gemm or Im2col.of(workload)
    q = evaluated(derived_quantities(workload, target, gemm), config)
    return Plan(
        **q,
        own_octets=int(octets_per_block(workload, q)),
        segment=store_segment(workload, gemm, q),
        sums_bytes=int(sums_bytes(workload, q)),
        shared=shared_layout(workload, q),
    )


def column_blocks(gemm: Im2col) -> list[int]:
    """The blocks of output channels that a tile's columns fill or divide: those of y and of the weights, which are equal."""
    if gemm.order:
        return [gemm.order.block]
    return [gemm.filter_block] if gemm.filter_block else [] if gemm.y.plain else [gemm.y.size]


def block_constraint(workload: Workload[Conv2dParams], block: int) -> Constraint:
    def fits(columns: Any) -> Any:
        return (columns % block == 0) | (block % np.maximum(columns, 1) == 0)

    return Constraint(
        f"the columns that a block loads, and those that it stores, fill blocks of {block} channels or divide one",
        lambda q: fits(q["bn"] // q["cluster_m"]) & fits(octets_per_block(workload, q) * 8),
    )
