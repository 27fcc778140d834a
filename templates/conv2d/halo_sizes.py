"""Sizes of conv2d_halo: those of the workload, those of a configuration, the predicted time; its tensor maps.

`halo_kernel.py` explains the words rectangle, patch, position and chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.space import Columns
from schedsearch.target import Target
from schedsearch.templates.conv2d.geometry import channel_order
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import hopper
from schedsearch.templates.parts.choosing import evaluated
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, BARRIER_BYTES, SWIZZLE_ROWS, WARPGROUP
from schedsearch.templates.parts.machine import machine
from schedsearch.templates.parts.shared import SharedLayout
from schedsearch.templates.parts.stages import moved_residual_problem
from schedsearch.templates.parts.store_channels import position_bytes
from schedsearch.templates.parts.wgmma import K_BYTES, Wgmma
from schedsearch.workload import Workload

WGMMA_CHANNELS = hopper.WGMMA_M  # output channels of a wgmma
MAX_POSITIONS = 256  # of a wgmma, its N
MAX_BOX = 256  # of TMA, along each axis
MAX_ELEMENT_STRIDE = 8  # of TMA
MAX_GROUPS = 4  # consumer warpgroups of a block
MAX_CLUSTER = 8  # blocks, on any card
MAX_MERGED_TAPS = 25  # most taps of a kernel whose merged weights stay in shared memory: 8 KiB per tap

# Registers of a consumer thread besides its accumulators: addresses, descriptors, temporaries. An epilogue needs more, and
# a residual that threads read the most, because several of its loads are in flight.
PLAIN_REGISTERS, EPILOGUE_REGISTERS, WIDE_RESIDUAL_REGISTERS = 36, 48, 72


@dataclass(frozen=True)
class Geometry:
    """The sizes of a workload that the kernel uses, for a given number of merged groups.

    Attributes:
        out_h, out_w: output pixels of an image.
        taps: taps of the kernel.
        merged: groups of the workload that are computed as one, with zeros for the weights between them.
        groups, inputs, outputs: number of merged groups, and input and output channels of each one.
        stride: (vertical, horizontal).
        period_h, period_w: taps after which a row or column of the kernel reads the same phase again.
        phases_h, phases_w: phases that the kernel reads, rows and columns of them.
        halo_h, halo_w: pixels of a phase that a tile depends on beyond its own size.
        chunk, chunks: input channels of a patch, 128 bytes of them, and the patches for all; the last one may have fewer.
        k_steps: wgmma steps along k of a whole chunk, and of the last.
    """

    out_h: int
    out_w: int
    taps: int
    merged: int
    groups: int
    inputs: int
    outputs: int
    stride: tuple[int, int]
    period_h: int
    period_w: int
    phases_h: int
    phases_w: int
    halo_h: int
    halo_w: int
    chunk: int
    chunks: int
    k_steps: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], merged: int) -> Geometry:
        w = workload.params
        groups, chunk = w.groups // merged, chunk_channels(workload)
        chunks, wgmma_k = math.ceil(w.c // groups / chunk), Wgmma(w.dtype).k
        last = math.ceil((w.c // groups - (chunks - 1) * chunk) / wgmma_k)
        out_h, out_w = CONV2D.output_hw(w)
        period_h, period_w = (stride // math.gcd(stride, dilation) for stride, dilation in zip(w.stride, w.dilation))
        halo_h, halo_w = (w.r - 1) * w.dilation[0] // w.stride[0], (w.s - 1) * w.dilation[1] // w.stride[1]
        return cls(
            out_h, out_w, w.r * w.s, merged, groups, w.c // groups, w.k // groups, w.stride, period_h, period_w,
            min(w.r, period_h), min(w.s, period_w), halo_h, halo_w, chunk, chunks, (chunk // wgmma_k, last),
        )  # fmt: skip

    @property
    def phases(self) -> int:
        return self.phases_h * self.phases_w


def chunk_channels(workload: Workload[Conv2dParams]) -> int:
    """Input channels that a patch holds."""
    return ROW_BYTES // dtype_of(workload.params.dtype).nbytes


def units(workload: Workload[Conv2dParams]) -> tuple[int, int]:
    """Input and output channels of 16 bytes, TMA's unit; of the outputs at least the 8 of a store of 32-bit numbers."""
    inputs, outputs = (
        ALIGNMENT_BYTES // dtype_of(dtype).nbytes for dtype in (workload.params.dtype, workload.params.out_dtype)
    )
    return inputs, max(8, outputs)


def mergeable(workload: Workload[Conv2dParams]) -> tuple[int, ...]:
    """The numbers of neighbouring groups that can be computed as one; 1 means each separately, () that none is possible.

    TMA needs channels of a group in whole units. Merged groups may fill a wgmma; their weights must stay in shared memory.
    """
    w = workload.params
    inputs, outputs = w.c // w.groups, w.k // w.groups
    input_unit, output_unit = units(workload)
    fills = min(chunk_channels(workload) // inputs, WGMMA_CHANNELS // outputs) if w.r * w.s <= MAX_MERGED_TAPS else 1
    return tuple(
        merged
        for merged in range(1, max(1, min(w.groups, fills)) + 1)
        if w.groups % merged == 0 and merged * inputs % input_unit == merged * outputs % output_unit == 0
    )


def stages_y(workload: Workload[Conv2dParams]) -> bool:
    """Whether y goes through shared memory. Threads store 32-bit numbers directly from their registers."""
    return dtype_of(workload.params.out_dtype).nbytes < 4


def store_segment(workload: Workload[Conv2dParams]) -> int:
    """Output channels of a position that one TMA store takes, and that staged y has in a row."""
    p = workload.params
    shuffle = pixel_shuffle(p.epilogue, p.k)
    return math.gcd(WGMMA_CHANNELS, p.k // shuffle.block) if shuffle else WGMMA_CHANNELS


def shuffle_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why y cannot be stored through depth_to_space, beyond the limits of TMA, or None."""
    w = workload.params
    shuffle = pixel_shuffle(w.epilogue, w.k)
    if shuffle is None:
        return None
    if w.groups != 1 or dtype_of(w.out_dtype).nbytes != 2:
        return f"depth_to_space of {w.out_dtype} in {w.groups} groups; allowed: outputs of 16 bits, one group"
    if store_segment(workload) % 16:
        return f"k / block of depth_to_space is {w.k // shuffle.block}; allowed: multiples of 16"
    order = channel_order(shuffle)
    if order is not None and (order.block % 16 or (WGMMA_CHANNELS % order.block and order.block % WGMMA_CHANNELS)):
        return f"k / block**2 of depth_to_space in mode CRD is {order.block}; allowed: 16, 32 and multiples of 64"
    return moved_residual_problem(workload)


def residual_bytes(workload: Workload[Conv2dParams]) -> int:
    """Bytes of an element of the residual; 0 if there is none."""
    return sum(dtype_of(spec.dtype).nbytes for spec in workload.signature if spec.name == "residual")


def loads_residual(workload: Workload[Conv2dParams]) -> bool:
    """Whether TMA loads a residual of 16 bits to the place where y will be staged. Threads read others directly."""
    return residual_bytes(workload) == 2


def overhead_registers(workload: Workload[Conv2dParams]) -> int:
    if residual_bytes(workload) in (1, 4):
        return WIDE_RESIDUAL_REGISTERS
    return EPILOGUE_REGISTERS if workload.params.epilogue else PLAIN_REGISTERS


def weight_piece(workload: Workload[Conv2dParams]) -> int:
    """Merged weights that are neighbours both in memory and in shared memory, at most 16 bytes of them."""
    return math.gcd(workload.params.c // workload.params.groups, units(workload)[0])


def split_ks(workload: Workload[Conv2dParams], target: Target) -> tuple[int, ...]:
    """How many blocks may share a tile, each with an equal part of the products; (1,) if none need.

    A part is as many chunks of input channels as any other, or a part of the taps of one chunk.
    """
    w = workload.params
    if w.groups != 1 or pixel_shuffle(w.epilogue, w.k):
        return (1,)
    geometry = Geometry.of(workload, 1)
    warpgroups = w.n * geometry.out_h * geometry.out_w * w.k / (MAX_POSITIONS * WGMMA_CHANNELS)
    fewest_tiles = math.ceil(warpgroups / MAX_GROUPS)
    chunks, taps = geometry.chunks, geometry.taps
    return tuple(
        split_k
        for split_k in range(1, MAX_CLUSTER + 1)
        if (chunks % split_k == 0 or (split_k % chunks == 0 and taps % (split_k // chunks) == 0))
        and (split_k == 1 or fewest_tiles * split_k < 2 * target.sms)
    )


def even_splits(size: int, most: int) -> list[int]:
    """The part sizes worth trying, up to `most`: the smallest for each number of parts."""
    return sorted({part for parts in range(1, size + 1) if (part := math.ceil(size / parts)) <= most})


def usable_tiles(workload: Workload[Conv2dParams], target: Target) -> dict[tuple[int, int], int]:
    """(tile_h, tile_w) -> positions of a wgmma, for tiles within its limit that fit one warpgroup's shared memory."""
    merged = min(mergeable(workload))
    geometry = Geometry.of(workload, merged)
    found = {}
    sizes = derived_quantities(workload, target)
    least = {
        "channel_groups": 1, "row_groups": 1, "schedule": "together", "patches": 1, "merged": merged,
        "weight_stages": 2 if merged == 1 else 0, "split_k": 1,
    }  # fmt: skip
    most_h, most_w = (MAX_BOX // stride for stride in geometry.stride)
    for tile_w in even_splits(geometry.out_w, most_w - geometry.halo_w):
        for tile_h in even_splits(geometry.out_h, most_h - geometry.halo_h):
            q: dict[str, Any] = {**least, "tile_h": tile_h, "tile_w": tile_w, "blocks_per_sm": 1}
            for name in sizes:
                if name == "column_blocks":
                    break
                q[name] = sizes[name](q)
            if q["positions"] <= MAX_POSITIONS and q["shared_bytes"] <= target.shared_bytes_per_block:
                found[tile_h, tile_w] = int(q["positions"])
    return found


def shared_layout(workload: Workload[Conv2dParams], q: Columns) -> SharedLayout:
    """Shared memory of a block: the patches, the stages of weights, y of each consumer warpgroup, the barriers.

    All operands are rows of 128 bytes, swizzled by address. A warpgroup in turn stages its y in the patch that it was
    computed from. The last positions may reach past the end of a patch: their columns are never stored. At the end of a
    split tile the other blocks' sums overwrite patches and weights.
    """
    in_turn, warpgroups, split = q["turns"] > 1, q["warpgroups"], q["split_k"] > 1
    staged = position_bytes(workload.params.out_dtype) if stages_y(workload) else 0
    return SharedLayout.of(
        patches=q["patches"] * q["patch_bytes"],
        weights=np.maximum(q["stages"] * q["bn"] * ROW_BYTES, q["sums_bytes"] - q["patches"] * q["patch_bytes"]),
        y=np.where(in_turn, 0, warpgroups * q["own_positions"] * staged),
        # Warpgroups in turn have `full` barriers of their own: sharing them, one would skip phases, and a wait by parity
        # could match a stale phase.
        patch_full=q["turns"] * q["patches"] * BARRIER_BYTES,
        patch_empty=q["patches"] * BARRIER_BYTES,
        weight_full=q["stages"] * BARRIER_BYTES,
        weight_empty=q["stages"] * BARRIER_BYTES,
        residual_full=warpgroups * BARRIER_BYTES if loads_residual(workload) else 0,
        sums_full=split * BARRIER_BYTES,
    )


def derived_quantities(workload: Workload[Conv2dParams], target: Target) -> dict[str, Callable[[Columns], Any]]:
    """Name -> formula over knobs and earlier quantities. It works on arrays and on single values."""
    w, merges = workload.params, mergeable(workload)
    geometry = Geometry.of(workload, min(merges))  # the sizes that do not depend on the number of merged groups
    inputs, outputs = w.c // w.groups, w.k // w.groups
    out_bytes = dtype_of(w.out_dtype).nbytes
    card = machine(target)
    fit = card.halo

    # Rows of staged y start at multiples of 128 bytes, because TMA needs that.
    row_unit = max(1, ROW_BYTES // (store_segment(workload) * dtype_of(w.out_dtype).nbytes))

    def rounded(positions: Any, unit: Any = SWIZZLE_ROWS) -> Any:
        return -(-positions // unit) * unit

    def predicted_cycles(q: Columns) -> Any:
        """The busiest multiprocessor's time: waves of tiles, each bound by tensor cores, shared memory, L2 or latency."""
        steps = q["own_taps"] * q["own_chunks"]
        busy = np.minimum(q["tiles"] * q["split_k"] / q["blocks_per_sm"], target.sms)
        l2_rate = np.minimum(fit.l2_bytes_per_cycle[1], fit.l2_bytes_per_cycle[0] * target.sms / busy)
        in_turn, streamed = q["turns"] > 1, q["weight_stages"] > 0
        k_steps = -(-q["merged"] * inputs // Wgmma(w.dtype).k) / q["split_k"]
        wgmmas = geometry.taps * k_steps * q["warpgroups"] / q["turns"]
        weights = steps * q["bn"] * ROW_BYTES
        loaded = q["own_chunks"] * q["patch_bytes"] + np.where(streamed, weights, 0)
        stored = q["block_rows"] * q["tile_w"] * q["bn"] * out_bytes / q["split_k"]
        multiply = wgmmas * q["positions"] / 2
        shared = wgmmas * (WGMMA_CHANNELS + q["positions"]) * K_BYTES + loaded + 2 * stored
        tile = np.maximum(multiply, np.maximum(shared / card.shared_bytes_per_cycle, loaded / l2_rate))
        results = q["warpgroups"] / q["turns"] * WGMMA_CHANNELS * q["positions"] / q["split_k"]
        convert = 0 if out_bytes > 1 else results / card.requantised_per_cycle
        sent = card.im2col.cluster_cycles + q["sums_bytes"] / card.im2col.cluster_bytes_per_cycle
        store = stored / l2_rate + fit.tile_cycles + convert + np.where(q["split_k"] == 1, 0, sent)
        if residual_bytes(workload):
            # The same number of bytes again; both are in flight during the multiplications.
            store = store + stored / l2_rate + np.where(in_turn | (out_bytes == 4), fit.load_latency_cycles, 0)
        # Weights that stay are loaded while the first tile is multiplied; merged ones are written before. Blocks request the
        # same data from L2, so its lower rate is not the bound.
        loading = np.maximum(0, q["blocks_per_sm"] * weights / fit.l2_bytes_per_cycle[1] + loaded / l2_rate - tile)
        writing = weights * q["merged"] * outputs / q["bn"] / card.shared_bytes_per_cycle
        first = np.where(streamed, 0, np.where(q["merged"] == 1, loading, writing))
        latency = np.where(streamed, steps * fit.load_latency_cycles / np.maximum(q["weight_stages"] - 1, 1), 0)
        waiting = np.where(q["patches"] == q["turns"], q["own_chunks"] * fit.load_latency_cycles + loaded / l2_rate, 0)
        alone = np.where(
            in_turn,
            np.maximum(tile, (tile + store + waiting) / q["turns"]),
            np.maximum(tile, latency) + waiting + store,
        )
        waves = q["waves"] * np.maximum(alone, q["blocks_per_sm"] * np.maximum(tile, convert))
        return card.launch_cycles + waves + fit.load_latency_cycles + first + np.where(in_turn, store, 0)

    def column_blocks(q: Columns) -> Any:
        """If weights stay, the number of blocks that share the tiles of each column; otherwise 0: all share all."""
        apart = np.minimum(q["pixel_tiles"], np.maximum(1, target.sms * q["blocks_per_sm"] // q["column_tiles"]))
        return np.where(q["weight_stages"] == 0, apart, 0)

    def waves(q: Columns) -> Any:
        """Tiles of the busiest block, times the turns that blocks take if not all are resident."""
        resident = target.sms * q["blocks_per_sm"]
        apart = -(-q["pixel_tiles"] // np.maximum(1, q["column_blocks"]))
        apart = apart * -(-q["column_blocks"] * q["column_tiles"] // resident)
        return np.where(q["column_blocks"] == 0, -(-q["tiles"] * q["split_k"] // resident), apart)

    return {
        **({} if len(merges) > 1 else {"merged": lambda q: merges[0]}),  # otherwise it is a knob
        "bn": lambda q: q["channel_groups"] * WGMMA_CHANNELS,
        "warpgroups": lambda q: q["channel_groups"] * q["row_groups"],
        "turns": lambda q: np.where(q["schedule"] == "in_turn", q["row_groups"], 1),
        "block_rows": lambda q: q["tile_h"] * q["row_groups"] // q["turns"],
        "patch_h": lambda q: q["block_rows"] + geometry.halo_h,
        # Blocks that share a tile add up whole rows of it, which are then whole groups of 8 positions.
        "patch_w": lambda q: rounded(q["tile_w"] + geometry.halo_w, np.where(q["split_k"] > 1, SWIZZLE_ROWS, row_unit)),
        "positions": lambda q: rounded((q["tile_h"] - 1) * q["patch_w"] + q["tile_w"], Wgmma(w.dtype).column_unit),
        "tap_parts": lambda q: np.maximum(1, q["split_k"] // geometry.chunks),
        "own_chunks": lambda q: geometry.chunks * q["tap_parts"] // q["split_k"],
        "own_taps": lambda q: geometry.taps // q["tap_parts"],
        "own_rows": lambda q: -(-q["tile_h"] // q["split_k"]),
        "own_positions": lambda q: np.where(q["split_k"] > 1, q["own_rows"] * q["patch_w"], q["positions"]),
        "sums_bytes": lambda q: (q["split_k"] - 1) * q["own_positions"] * q["warpgroups"] * (WGMMA_CHANNELS * 4),
        "phase_bytes": lambda q: rounded(q["patch_h"] * q["patch_w"]) * ROW_BYTES,
        "patch_bytes": lambda q: geometry.phases * q["phase_bytes"],
        "stages": lambda q: np.where(q["weight_stages"] == 0, geometry.taps * geometry.chunks, q["weight_stages"]),
        "shared_bytes": lambda q: shared_layout(workload, q).nbytes,
        "threads": lambda q: (q["warpgroups"] + 1) * WARPGROUP,
        "row_tiles": lambda q: -(-geometry.out_h // q["block_rows"]),
        "strips": lambda q: -(-geometry.out_w // q["tile_w"]),
        "group_tiles": lambda q: -(-q["merged"] * outputs // q["bn"]),
        "column_tiles": lambda q: w.groups // q["merged"] * q["group_tiles"],
        "pixel_tiles": lambda q: w.n * q["row_tiles"] * q["strips"],
        "tiles": lambda q: q["pixel_tiles"] * q["column_tiles"],
        "column_blocks": column_blocks,
        "waves": waves,
        "registers": hopper.registers,
        "predicted_cycles": predicted_cycles,
    }


@dataclass(frozen=True)
class Plan:
    """A configuration of conv2d_halo with its sizes.

    Attributes:
        tile_h .. split_k: the knobs; `merged` is a knob only if the workload has a choice. `channel_groups` warpgroups are
            side by side, `row_groups` of them one below the other. `split_k` blocks, a cluster, share a tile.
        bn: output channels of a tile.
        warpgroups: warpgroups that multiply.
        turns: tiles that a block computes at the same time; 1 if its warpgroups share one.
        block_rows: rows of output pixels of a tile, of all warpgroups that share it.
        patch_h, patch_w: rows and pixels of a patch, or of each of its phases.
        positions: positions of a wgmma, its N.
        tap_parts: blocks that share the taps of a chunk.
        own_chunks, own_taps: chunks that a block multiplies, and taps of each.
        own_rows, own_positions: rows of a warpgroup's part of a tile that a block adds up and stores, and their positions;
            all of them, unless the tile is split.
        sums_bytes: what other blocks send of a split tile.
        phase_bytes, patch_bytes: bytes in shared memory, rounded up to the swizzle.
        stages: stages of weights; if weights stay, one for each tap and chunk.
        shared_bytes, threads: bytes of shared memory and threads of a block.
        row_tiles, strips: tiles of an image, down and along a row.
        group_tiles, column_tiles: tiles of the output channels of one convolution group, and of all.
        pixel_tiles, tiles: tiles of pixels, and of the whole output.
        column_blocks: blocks of each column of tiles if weights stay; otherwise 0.
        waves: tiles of the busiest multiprocessor's share of blocks, one after the other.
        registers: most registers of a thread.
        predicted_cycles: the predicted time.
        shared: the layout of shared memory.
    """

    tile_h: int
    tile_w: int
    channel_groups: int
    row_groups: int
    schedule: str
    patches: int
    weight_stages: int
    blocks_per_sm: int
    merged: int
    split_k: int
    bn: int
    warpgroups: int
    turns: int
    block_rows: int
    patch_h: int
    patch_w: int
    positions: int
    tap_parts: int
    own_chunks: int
    own_taps: int
    own_rows: int
    own_positions: int
    sums_bytes: int
    phase_bytes: int
    patch_bytes: int
    stages: int
    shared_bytes: int
    threads: int
    row_tiles: int
    strips: int
    group_tiles: int
    column_tiles: int
    pixel_tiles: int
    tiles: int
    column_blocks: int
    waves: int
    registers: int
    predicted_cycles: int
    shared: SharedLayout


def evaluate(workload: Workload[Conv2dParams], target: Target, config: Mapping[str, Any]) -> Plan:
    """The plan of one configuration."""
    q = evaluated(derived_quantities(workload, target), config)
    return Plan(**q, shared=shared_layout(workload, q))
