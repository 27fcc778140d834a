"""Sizes of conv2d_simt: the implicit GEMM of a workload in words of 32 bits, and the sizes that a configuration gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.conv2d.placement import neighbours
from schedsearch.templates.conv2d.ring import CHUNK_BYTES, RING_KNOBS, RingGemm, RingPlan
from schedsearch.templates.conv2d.tiles import ceil_div
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.simt import CHUNK, WORD_BYTES, Product
from schedsearch.workload import Workload

WARP_ROWS, WARP_COLUMNS = 4, 8  # the lanes of a warp; each thread multiplies rows and columns of its own


@dataclass(frozen=True, kw_only=True)
class Gemm(RingGemm):
    """As `RingGemm`. An element of the reduction is a word: four int8 or uint8, neighbours in channels, or one float32.

    Attributes:
        product: how two words multiply.
        tap_words: words of one tap of the kernel: ceil(c / elements of a word).
        piece: words of x that one load takes: 4, 2 or 1; 0 if single bytes make up a word.
        pixels_first: neighbouring threads load neighbouring pixels, not neighbouring channels.
        pixels_first_out: neighbouring threads store neighbouring pixels.
        fills_padding: padding is not zero, because x has a zero point.
    """

    product: Product
    tap_words: int
    piece: int
    pixels_first: bool
    pixels_first_out: bool
    fills_padding: bool

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Gemm:
        p = workload.params
        product = Product.of(p.dtype, p.weight_dtype)
        out_h, out_w = CONV2D.output_hw(p)
        k, c = p.k // p.groups, p.c // p.groups
        size = dtype_of(p.dtype).nbytes
        run = strides_of(workload, "x")["C"].run(c)
        tap_words = ceil_div(c, product.elements)
        run_out = neighbours(workload, k)
        return cls(
            product=product,
            groups=p.groups,
            images=p.n,
            pixels=out_h * out_w,
            k=k,
            c=c,
            tap_words=tap_words,
            depth=p.r * p.s * tap_words,
            element_bytes=WORD_BYTES,
            piece=next((words for words in (4, 2, 1) if run * size % (words * WORD_BYTES) == 0), 0),
            pixels_first=run * size <= CHUNK_BYTES,
            vector=4 if k % 4 == 0 and run_out % 4 == 0 else 1,
            pixels_first_out=run_out <= 4,
            fills_padding="x" in p.zero_points and any(p.padding),
        )

    @property
    def chunks(self) -> int:
        """Chunks of the reduction, and of each row of the weight."""
        return int(ceil_div(self.depth, CHUNK))


@dataclass(frozen=True, kw_only=True)
class Plan(RingPlan[Gemm]):
    """As `RingPlan`.

    Attributes:
        tm, tn: output pixels and channels of a thread.
        asynchronous: chunks are copied by cp.async; otherwise they pass through registers.
    """

    tm: int
    tn: int
    asynchronous: bool

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], config: Config) -> Plan:
        knobs = {name: config[name] for name in ("bm", "bn", "bk", "tm", "tn", *RING_KNOBS)}
        gemm = Gemm.of(workload)
        return cls(gemm=gemm, asynchronous=config["loads"] == "async", bound=config["batch"] == "bound", **knobs)

    @property
    def threads_m(self) -> int:
        """Threads along the pixels of a tile, and the distance between the pixels of one thread."""
        return self.bm // self.tm

    @property
    def threads_n(self) -> int:
        """Threads along the channels of a tile, and the distance between the channels of one thread."""
        return self.bn // self.tn

    @property
    def threads(self) -> int:
        return self.threads_m * self.threads_n

    @property
    def pixels(self) -> int:
        """Pixels along which tiles are cut: those of an image, or of the whole batch."""
        return self.gemm.pixels * (1 if self.bound else self.gemm.images)

    @property
    def staged_row_bytes(self) -> int:
        """Distance from one row of the staged result to the next."""
        return int(staged_row_bytes(self.bn, self.gemm))

    @property
    def part_rows(self) -> int:
        """Pixels of a thread that are staged at once: as many as fit in the memory of the ring."""
        each = self.threads_m * self.staged_row_bytes
        return max(rows for rows in (1, 2, 4, 8, 16) if rows == 1 or (rows <= self.tm and rows * each <= self._ring_bytes))

    @property
    def _ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return int(shared_bytes(self.bm, self.bn, self.bk, self.tm, self.stages, self.gemm))


def staged_row_bytes(bn: Any, gemm: Gemm) -> Any:
    """Rows of sums in shared memory. The padding spreads a warp's stores, and loads along a column, over the banks."""
    return (bn + (9 if gemm.vector == 1 else 8)) * WORD_BYTES


def shared_bytes(bm: Any, bn: Any, bk: Any, tm: Any, stages: Any, gemm: Gemm) -> Any:
    """Bytes of shared memory: the ring, and the rows of the result that are staged at once, take turns in it."""
    return np.maximum(stages * (bm + bn) * bk * WORD_BYTES, bm // tm * staged_row_bytes(bn, gemm))
