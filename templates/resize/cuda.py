"""resize on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.resize import ResizeParams, positions
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.slices import place_of, vector_limits
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.templates.resize.axes import between, nearest_pixel, pixels_around
from schedsearch.templates.resize.windows import Window, linear_once
from schedsearch.workload import Workload

THREADS = (64, 128, 256, 512)
TILES = (1, 2, 4, 8, 16)
_MOST_NUMBERS = 32  # of a thread


class ResizeCuda(Template[ResizeParams]):
    """A thread has a vector of channels of neighbouring pixels of y."""

    name = "resize_cuda"
    version = 1
    op = "resize"
    kind = "cuda"
    renamed: ClassVar[Renamed] = {"loads": "reads"}

    def validate(self, workload: Workload[ResizeParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        items = workload.output.size
        return None if items <= MAX_GRID_X else f"y has {items} elements; allowed: less than 2**31"

    def space(self, workload: Workload[ResizeParams], target: Target) -> ConfigSpace:
        _, _, width, channels = positions(workload.params)
        nbytes = dtype_of(workload.params.dtype).nbytes
        limits = vector_limits(workload.output)
        widest = math.gcd(channels, MOST_BYTES // nbytes, *limits)
        # Where a pixel is one element, the pixels of a thread are stored as one vector.
        tiles = (
            [n for n in TILES if math.gcd(width, *limits) % n == 0 and n * nbytes <= MOST_BYTES]
            if channels == 1
            else [1, 2, 4]
        )
        once = [tile for tile in tiles if Window.of(workload, tile)]
        return ConfigSpace(
            (
                Knob("vector", tuple(1 << i for i in range(widest.bit_length())), "channels of a thread"),
                Knob("tile", tuple(tiles), "neighbouring pixels of a row of y of a thread"),
                Knob("threads", THREADS, "threads of a block"),
                Knob(
                    "reads",
                    ("each", *(("once",) if once else ())),
                    "once: a pixel of x that several pixels of the tile need is loaded once, and neighbours together",
                ),
            ),
            (
                Constraint("the tiles of a row need x alike", lambda k: (k["reads"] == "each") | np.isin(k["tile"], once)),
                Constraint(
                    f"a thread has at most {_MOST_NUMBERS} numbers", lambda k: k["vector"] * k["tile"] <= _MOST_NUMBERS
                ),
            ),
        )

    def default(self, workload: Workload[ResizeParams], target: Target, space: ConfigSpace) -> Config:
        """The widest accesses; two pixels of a thread, or as many as a store holds, if there are enough."""
        values = space.values
        _, _, _, channels = positions(workload.params)
        vector = values["vector"][-1]
        enough = workload.output.size // (2 * vector) >= 2 * target.sms * target.threads_per_sm
        tile = values["tile"][-1] if channels == 1 else 2 if enough and 2 * vector <= _MOST_NUMBERS else 1
        reads = "once" if Window.of(workload, tile) else "each"
        return Config(vector=vector, tile=tile, threads=256 if enough else 128, reads=reads)

    def plain(self, workload: Workload[ResizeParams], target: Target, space: ConfigSpace) -> Config | None:
        """One element of y a thread."""
        return Config(vector=1, tile=1, threads=128, reads="each")

    def kernel(self, workload: Workload[ResizeParams], target: Target, config: Config) -> KernelSource:
        vector, tile, threads = config["vector"], config["tile"], config["threads"]
        planes, height, width, channels = positions(workload.params)
        items, nbytes = planes * height * -(-width // tile) * (channels // vector), dtype_of(workload.params.dtype).nbytes
        window = Window.of(workload, tile) if config["reads"] == "once" else None
        function = resize_kernel(workload, vector, tile, threads, window)
        step = KernelStep(function, (Pointer("x"), Pointer("y")), Grid(-(-items // threads)), threads)
        stored = tile if channels == 1 else vector
        loaded = window.vector if window else vector
        return KernelSource("cuda", "native", (step,), alignments={"x": loaded * nbytes, "y": stored * nbytes})


def resize_kernel(
    workload: Workload[ResizeParams], vector: int, tile: int, threads: int, window: Window | None
) -> Callable[..., None]:
    """The kernel (x, y). A thread loads all pixels before it computes, each once if there is a `window`."""
    p = workload.params
    planes, rows, width, channels = positions(p)
    groups, lanes, element = -(-width // tile), channels // vector, dtype_of(p.dtype).nbytes
    items, numbers = planes * rows * groups * lanes, tile * vector
    together = channels == 1  # pixels are stored as one vector
    stored = tile if together else vector
    stores, words_out = numbers // stored, vectors.words_of(p.dtype, stored)
    fetch, mix, held, weights = linear_once(workload, tile, window) if window else _fetch(workload, vector, tile)
    pack, store, place = vectors.pack(p.dtype, stored), vectors.store(p.dtype, stored), place_of(workload.output)

    def resize(x, y) -> None:  # type: ignore[no-untyped-def]
        item = i64(cuda.blockIdx.x) * threads + i64(cuda.threadIdx.x)
        if item < items:
            word = cuda.local.array(held, u32)
            share = cuda.local.array(weights, f32)
            number = cuda.local.array(numbers, f32)
            rounded = cuda.local.array(words_out, u32)
            rest = u32(item)
            quotient = u32(rest // u32(lanes))
            channel = i64(rest - quotient * u32(lanes)) * vector
            rest, quotient = quotient, u32(quotient // u32(groups))
            column = i32((rest - quotient * u32(groups)) * u32(tile))
            plane = u32(quotient // u32(rows))
            row = i32(quotient - plane * u32(rows))
            fetch(word, share, x, i64(plane), row, column, channel)
            mix(word, share, number)
            for i in range(stores):
                if column + i < width:
                    pack(number, i * stored, rounded, 0)
                    at = place(((i64(plane) * rows + row) * width + column + i) * channels + channel)
                    store(rounded, 0, y + u64(at * element))

    return resize


def _fetch(p: Workload[ResizeParams], vector: int, tile: int) -> tuple[Callable[..., None], Callable[..., None], int, int]:
    """`fetch(words, shares, x, plane, row, column, channel)` loads what `tile` pixels of y need, and
    `mix(words, shares, numbers)` computes them; and the lengths of both arrays.
    """
    return (_nearest if p.params.mode == "nearest" else _linear)(p, vector, tile)


def _nearest(
    workload: Workload[ResizeParams], vector: int, tile: int
) -> tuple[Callable[..., None], Callable[..., None], int, int]:
    p = workload.params
    height, width, out_w = p.h, p.w, p.ow
    channels, element, words = positions(p)[3], dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    down, across = nearest_pixel(workload, 0), nearest_pixel(workload, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)

    def fetch(word: Any, share: Any, x: Any, plane: Any, row: Any, column: Any, channel: Any) -> None:
        first = (plane * height + down(row)) * width
        for t in range(tile):
            position = min(i32(column + t), i32(out_w - 1))
            at = (first + across(position)) * channels + channel
            load(word, t * words, x + u64(at * element), 1)

    def mix(word: Any, share: Any, number: Any) -> None:
        for t in range(tile):
            unpack(word, t * words, number, t * vector)

    return fetch, mix, tile * words, 1


def _linear(
    workload: Workload[ResizeParams], vector: int, tile: int
) -> tuple[Callable[..., None], Callable[..., None], int, int]:
    """The shares are that of the second row, then that of the second column of each pixel."""
    p = workload.params
    height, width, out_w = p.h, p.w, p.ow
    channels, element, words = positions(p)[3], dtype_of(p.dtype).nbytes, vectors.words_of(p.dtype, vector)
    down, across = pixels_around(workload, 0), pixels_around(workload, 1)
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    four = 4 * vector

    def fetch(word: Any, share: Any, x: Any, plane: Any, row: Any, column: Any, channel: Any) -> None:
        above, below, share[0] = down(row)
        first, second = (plane * height + above) * width, (plane * height + below) * width
        for t in range(tile):
            left, right, share[1 + t] = across(min(i32(column + t), i32(out_w - 1)))
            for i in range(4):
                at = (first if i < 2 else second) + (left if i % 2 == 0 else right)
                load(word, (4 * t + i) * words, x + u64((at * channels + channel) * element), 1)

    def mix(word: Any, share: Any, number: Any) -> None:
        pixel = cuda.local.array(four, f32)
        for t in range(tile):
            for i in range(4):
                unpack(word, (4 * t + i) * words, pixel, i * vector)
            for e in range(vector):
                above = between(pixel[e], pixel[vector + e], share[1 + t])
                below = between(pixel[2 * vector + e], pixel[3 * vector + e], share[1 + t])
                number[t * vector + e] = between(above, below, share[0])

    return fetch, mix, 4 * tile * words, 1 + tile
