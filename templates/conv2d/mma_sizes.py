"""Sizes of conv2d_mma: the implicit GEMM of a workload, and the sizes that a configuration gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import Columns
from schedsearch.templates.conv2d.placement import neighbours
from schedsearch.templates.conv2d.ring import RING_KNOBS, RingGemm, RingPlan
from schedsearch.templates.conv2d.tiles import ceil_div
from schedsearch.templates.conv2d.weight_rows import WeightRows
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.hopper import BARRIER_BYTES
from schedsearch.templates.parts.mma import Mma
from schedsearch.workload import Workload

ROW_PADDING = 8  # sums of padding per row of the staged result: the 8-byte stores of a half warp then hit every bank once
MOST_MERGED = 64  # groups that one GEMM has at most
MERGED_BYTES, MERGED_OUTPUTS = 128, 128  # input channels in bytes, and output channels, of merged groups at most
WORD_BYTES = 4  # of the least asynchronous copy
LOADER_THREADS = 32  # that load by TMA and do nothing else
MOST_PIXELS = 256  # of a tile


@dataclass(frozen=True, kw_only=True)
class Gemm(RingGemm):
    """As `RingGemm`. Neighbouring groups of channels may be merged: they share a GEMM, and the weights between different
    groups are zero.

    Attributes:
        mma: the instruction.
        merged: groups of the workload in one GEMM.
        row: elements from one row of weights to the next.
        repacked: whether weights are first copied to `WeightRows`. Otherwise the workload's own array is in the order of the
            reduction.
        piece_x, piece_w: elements that one load takes.
        taps: of the kernel.
        out_bytes: bytes of an element of y.
    """

    mma: Mma
    merged: int
    row: int
    repacked: bool
    piece_x: int
    piece_w: int
    taps: int
    out_bytes: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], merged: int = 1) -> Gemm:
        w, mma = workload.params, mma_of(workload)
        chunk, groups = mma.chunk, w.groups // merged
        k, c = w.k // groups, w.c // groups
        kk = w.r * w.s * c
        out_h, out_w = CONV2D.output_hw(w)
        short = mma.element_bytes == 1 and kk % WORD_BYTES != 0
        repacked = merged > 1 or w.weight_layout != "OHWI" or short
        row = WeightRows(workload, merged).row if repacked else kk
        out_bytes = dtype_of(w.out_dtype).nbytes
        run = math.gcd(neighbours(workload, k), k)
        return cls(
            mma=mma,
            groups=groups,
            merged=merged,
            images=w.n,
            pixels=out_h * out_w,
            k=k,
            c=c,
            depth=kk,
            element_bytes=mma.element_bytes,
            row=row,
            repacked=repacked,
            piece_x=_piece(math.gcd(strides_of(workload, "x")["C"].run(c), *w.x_slice), chunk),
            piece_w=_piece(row, chunk),
            taps=w.r * w.s,
            vector=next(size for size in _VECTORS[out_bytes] if run % size == 0),
            out_bytes=out_bytes,
        )


@dataclass(frozen=True)
class Gemms:
    """The GEMMs of a workload, for the formulas of a space.

    Attributes:
        by_merged: how many groups are merged -> the GEMM then, in increasing order.
        takes_batch_knob: whether tiles may be bound to images.
    """

    by_merged: Mapping[int, Gemm]
    takes_batch_knob: bool

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Gemms:
        w = workload.params
        # Configurations of these workloads were recorded without the knobs `batch` and `merged`, and keep their ids.
        first = w.dtype in ("float16", "bfloat16") and (w.layout, w.weight_layout) == ("NHWC", "OHWI")
        return cls(
            {merged: Gemm.of(workload, merged) for merged in ((1,) if first else _mergeable(workload))},
            not first and w.n > 1,
        )

    @property
    def single(self) -> Gemm:
        """The GEMM of a group that is not merged."""
        return self.by_merged[1]

    def column(self, name: str, k: Columns) -> Any:
        """An attribute of the GEMM of each configuration."""
        if "merged" not in k:
            return getattr(self.single, name)
        values = np.array([getattr(gemm, name) for gemm in self.by_merged.values()])
        return values[np.searchsorted(list(self.by_merged), k["merged"])]


def _mergeable(workload: Workload[Conv2dParams]) -> tuple[int, ...]:
    """How many groups may be merged, in increasing order."""
    w = workload.params
    k, c_bytes = w.k // w.groups, w.c // w.groups * dtype_of(w.dtype).nbytes
    powers = (2**i for i in range(MOST_MERGED.bit_length()))
    return tuple(
        merged
        for merged in powers
        if merged == 1
        or (w.groups % merged == 0 and merged * c_bytes <= MERGED_BYTES and merged * k <= MERGED_OUTPUTS)
    )  # fmt: skip


_VECTORS = {1: (4, 1), 2: (8, 2, 1), 4: (2, 1)}  # bytes of an element of y -> how many one store may take


def _piece(elements: int, chunk: int) -> int:
    """The largest load (a chunk, or a half, a quarter ... of it) that divides a contiguous run of `elements`."""
    return math.gcd(elements, chunk)


def mma_of(workload: Workload[Conv2dParams]) -> Mma:
    """The instruction that multiplies the workload's elements."""
    w = workload.params
    return Mma(w.dtype, w.weight_dtype, 3 if w.dtype == "float32" and w.precision == "fp32" else 1)


@dataclass(frozen=True, kw_only=True)
class Plan(RingPlan[Gemm]):
    """As `RingPlan`.

    Attributes:
        wm, wn: output pixels and channels of a warp's tile.
        slices: warps that share a warp tile; each takes its part of every step.
        tma: whether a warp of its own loads by TMA; otherwise all threads copy. A step then has channels of one tap.
    """

    wm: int
    wn: int
    slices: int
    tma: bool = False

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], config: Config) -> Plan:
        knobs = {name: config[name] for name in ("bm", "bn", "bk", "wm", "wn", "slices", *RING_KNOBS)}
        gemm = Gemm.of(workload, int(config.get("merged", 1)))
        return cls(gemm=gemm, bound=config.get("batch") == "bound", tma=config.get("loads") == "tma", **knobs)

    @property
    def warps_n(self) -> int:
        """Warps along the channels of a tile."""
        return self.bn // self.wn

    @property
    def warps(self) -> int:
        """Warps of one slice."""
        return (self.bm // self.wm) * self.warps_n

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 32 * self.warps * self.slices

    @property
    def threads(self) -> int:
        return self.consumers + LOADER_THREADS * self.tma

    @property
    def steps(self) -> int:
        if self.tma:
            return int(self.gemm.taps * ceil_div(self.gemm.c, self.bk))
        return super().steps

    @property
    def wide_counts(self) -> bool:
        """Whether indices of pixels and tiles, up to one grid beyond the last, need 64 bits."""
        return max(self.gemm.m + self.bm, 2 * self.tiling.tiles) >= 2**31

    @property
    def accumulators(self) -> int:
        """Registers of sums per thread for its part of a warp's tile."""
        return self.wm * self.wn // 32

    @property
    def staged_row_bytes(self) -> int:
        """Distance from one row of the staged result to the next."""
        return (self.bn + ROW_PADDING) * 4

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice's staged result."""
        return self.bm * self.staged_row_bytes

    @property
    def staged_offset(self) -> int:
        """Where the staged results begin: behind the ring if that takes operands of the next tile in the meantime."""
        return self.stages * self.stage_bytes if self.tma and self.persistent else 0

    @property
    def barrier_offset(self) -> int:
        """Where the barriers of a ring of TMA begin: full ones, then empty ones."""
        return int(tma_shared_bytes(*self._sizes, self.persistent)) - 2 * BARRIER_BYTES * self.stages

    @property
    def shared_bytes(self) -> int:
        return int(tma_shared_bytes(*self._sizes, self.persistent) if self.tma else shared_bytes(*self._sizes))

    @property
    def _sizes(self) -> tuple[int, int, int, int, int]:
        return self.bm, self.bn, self.row_bytes, self.stages, self.slices


def shared_bytes(bm: Any, bn: Any, row_bytes: Any, stages: Any, slices: Any) -> Any:
    """Bytes of shared memory: the pipeline's buffers and the staged results (one per slice) take turns in it."""
    return np.maximum(_ring_bytes(bm, bn, row_bytes, stages), _staged_bytes(bm, bn, slices))


def tma_shared_bytes(bm: Any, bn: Any, row_bytes: Any, stages: Any, slices: Any, persistent: Any) -> Any:
    """The same for loads by TMA: a persistent block has place for both, and there are two barriers for each buffer."""
    ring, staged = _ring_bytes(bm, bn, row_bytes, stages), _staged_bytes(bm, bn, slices)
    return np.where(persistent, ring + staged, np.maximum(ring, staged)) + 2 * BARRIER_BYTES * stages


def _ring_bytes(bm: Any, bn: Any, row_bytes: Any, stages: Any) -> Any:
    return stages * (bm + bn) * row_bytes


def _staged_bytes(bm: Any, bn: Any, slices: Any) -> Any:
    return slices * bm * (bn + ROW_PADDING) * 4
