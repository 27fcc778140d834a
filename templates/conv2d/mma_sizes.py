"""Sizes of conv2d_mma: the implicit GEMM of a workload, and the sizes that a configuration gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.workload import Workload

CHUNK = 8  # elements
ELEMENT_BYTES = 2
ROW_PADDING = 8  # floats of padding per row of the staged result: the 8-byte stores of a half warp then hit every bank once


@dataclass(frozen=True)
class Gemm:
    """The implicit GEMM of one workload.

    Attributes:
        groups: groups of channels, each of them a GEMM.
        m: output pixels.
        k: output channels of a group.
        c: input channels of a group.
        kk: length of the reduction.
        piece_x, piece_w: elements that one load takes.
        vector: channels of y that one store takes.
        out_bytes: bytes of an element of y.
    """

    groups: int
    m: int
    k: int
    c: int
    kk: int
    piece_x: int
    piece_w: int
    vector: int
    out_bytes: int

    @classmethod
    def of(cls, workload: Workload) -> Gemm:
        n, out_h, out_w, channels = workload.output.shape
        k, c = channels // workload.groups, workload.c // workload.groups
        kk = workload.r * workload.s * c
        out_bytes = dtype_of(workload.out_dtype).nbytes
        vector = 8 if k % 8 == 0 and out_bytes == 2 else 2 if k % 2 == 0 else 1
        return cls(workload.groups, n * out_h * out_w, k, c, kk, _piece(c), _piece(kk), vector, out_bytes)


def _piece(elements: int) -> int:
    """The largest load (8, 4, 2 or 1 elements) that divides a contiguous run of `elements`."""
    return next(size for size in (8, 4, 2, 1) if elements % size == 0)


@dataclass(frozen=True)
class Plan:
    """Sizes of one configuration.

    Attributes:
        gemm: the GEMM of the workload.
        bm, bn, bk: output pixels and channels of a block's tile, depth of a step.
        wm, wn: output pixels and channels of a warp's tile.
        slices: warps that share a warp tile; each takes its part of every step.
        stages: buffers of the pipeline.
        panel: pixel tiles that are walked before the next channel tile.
        persistent: whether blocks loop over tiles; otherwise there is one block per tile.
    """

    gemm: Gemm
    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    slices: int
    stages: int
    panel: int
    persistent: bool

    @classmethod
    def of(cls, workload: Workload, config: Config) -> Plan:
        knobs = {name: config[name] for name in ("bm", "bn", "bk", "wm", "wn", "slices", "stages", "panel")}
        return cls(gemm=Gemm.of(workload), persistent=config["blocks_per_sm"] > 0, **knobs)

    @property
    def warps_n(self) -> int:
        """Warps along the channels of a tile."""
        return self.bn // self.wn

    @property
    def warps(self) -> int:
        """Warps of one slice."""
        return (self.bm // self.wm) * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.slices

    @property
    def steps(self) -> int:
        """Steps along the reduction."""
        return int(ceil_div(self.gemm.kk, self.bk))

    @property
    def tiles_m(self) -> int:
        return int(ceil_div(self.gemm.m, self.bm))

    @property
    def group_tiles(self) -> int:
        """Channel tiles of one group."""
        return int(ceil_div(self.gemm.k, self.bn))

    @property
    def tiles_n(self) -> int:
        return self.group_tiles * self.gemm.groups

    @property
    def tiles(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def wide_counts(self) -> bool:
        """Whether indices of pixels and tiles, up to one grid beyond the last, need 64 bits."""
        return max(self.gemm.m + self.bm, 2 * self.tiles) >= 2**31

    @property
    def accumulators(self) -> int:
        """Float32 registers per thread for its part of a warp's tile."""
        return self.wm * self.wn // 32

    @property
    def chunks(self) -> int:
        """Chunks of a row in shared memory."""
        return self.bk // CHUNK

    @property
    def row_step(self) -> int:
        """Distance between the rows that one thread loads. Each thread loads one column of chunks."""
        return self.threads // self.chunks

    @property
    def row_bytes(self) -> int:
        return self.bk * ELEMENT_BYTES

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage. The weights follow them."""
        return self.bm * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        return (self.bm + self.bn) * self.row_bytes

    @property
    def staged_row_bytes(self) -> int:
        """Distance from one row of the staged result to the next."""
        return (self.bn + ROW_PADDING) * 4

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice's staged result."""
        return self.bm * self.staged_row_bytes

    @property
    def shared_bytes(self) -> int:
        return int(shared_bytes(self.bm, self.bn, self.bk, self.stages, self.slices))


def shared_bytes(bm: Any, bn: Any, bk: Any, stages: Any, slices: Any) -> Any:
    """Bytes of shared memory: the pipeline's buffers and the staged results (one per slice) take turns in it."""
    return np.maximum(stages * (bm + bn) * bk * ELEMENT_BYTES, slices * bm * (bn + ROW_PADDING) * 4)


def ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)
