"""dyn_resize on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dyn_resize import DynResizeParams
from schedsearch.ops.resize import positions
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i64, u32, u64
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.templates.resize.axes import between
from schedsearch.templates.resize.dyn_axes import images_in_use, line_of_run, parameters, pixel_of_run, pixels_of_run
from schedsearch.workload import Workload

THREADS = (128, 256, 512)
EACH = (1, 4, 16)
_Compute = Callable[..., None]


class DynResizeCuda(Template[DynResizeParams]):
    """Blocks that loop over the pixels of y in use; a thread has a vector of channels of a pixel at a time."""

    name = "dyn_resize_cuda"
    version = 1
    op = "dyn_resize"
    kind = "cuda"

    def validate(self, workload: Workload[DynResizeParams], target: Target) -> str | None:
        return target.older_than(LEAST_CAPABILITY)

    def space(self, workload: Workload[DynResizeParams], target: Target) -> ConfigSpace:
        channels = positions(workload.params)[3]
        widest = math.gcd(channels, MOST_BYTES // dtype_of(workload.params.dtype).nbytes)
        vector = tuple(1 << i for i in range(widest.bit_length()))
        size = workload.outputs[0].size // widest
        each = tuple(n for n in EACH if n == 1 or n * THREADS[0] < size)
        return ConfigSpace(
            (
                Knob("vector", vector, "channels of a thread"),
                Knob("threads", THREADS, "threads of a block"),
                Knob("each", each, "vectors of a thread at the bound of y"),
            )
        )

    def default(self, workload: Workload[DynResizeParams], target: Target, space: ConfigSpace) -> Config:
        """The widest accesses; several of a thread where all multiprocessors stay busy."""
        vector = space.values["vector"][-1]
        busy = workload.outputs[0].size // (vector * target.sms * 2048)
        each = max(n for n in space.values["each"] if n == 1 or n <= busy)
        return Config(vector=vector, threads=256, each=each)

    def kernel(self, workload: Workload[DynResizeParams], target: Target, config: Config) -> KernelSource:
        vector, threads = config["vector"], config["threads"]
        blocks = -(-workload.outputs[0].size // (vector * threads * config["each"]))
        step = KernelStep(dyn_resize_kernel(workload, vector, threads), parameters(workload), Grid(blocks), threads)
        nbytes = vector * dtype_of(workload.params.dtype).nbytes
        return KernelSource("cuda", "native", (step,), alignments={"x": nbytes, "y": nbytes})


def dyn_resize_kernel(workload: Workload[DynResizeParams], vector: int, threads: int) -> Callable[..., None]:
    """The kernel over arguments and outputs in order."""
    p = workload.params
    _, most_rows, most_columns, channels = positions(p)
    lanes, element, y = channels // vector, dtype_of(p.dtype).nbytes, len(workload.signature)
    images, down, across = images_in_use(workload), line_of_run(workload, 0), line_of_run(workload, 1)
    compute, held, numbers = (_nearest if p.mode == "nearest" else _linear)(workload, vector)
    store, words_out = vectors.store(p.dtype, vector), vectors.words_of(p.dtype, vector)

    def dyn_resize(*operands: Any) -> None:
        thread = i64(cuda.blockIdx.x) * threads + i64(cuda.threadIdx.x)
        planes, height, width, rows, columns = images(operands, thread == 0)
        row_line, column_line = down(height, rows), across(width, columns)
        word = cuda.local.array(held, u32)
        number = cuda.local.array(numbers, f32)
        rounded = cuda.local.array(words_out, u32)
        step = i64(cuda.gridDim.x) * threads
        for item in range(thread, planes * rows * columns * lanes, step):
            rest = u32(item)
            above = u32(rest // u32(lanes))
            channel = i64(u32(rest - u32(above * u32(lanes)))) * vector
            rest, above = above, u32(above // u32(columns))
            column = i64(u32(rest - u32(above * u32(columns))))
            plane = u32(above // u32(rows))
            row = i64(u32(above - u32(plane * u32(rows))))
            place = i64(plane), row, column, channel
            compute(word, number, rounded, operands[0], place, (height, width), row_line, column_line)
            at = ((i64(plane) * most_rows + row) * most_columns + column) * channels + channel
            store(rounded, 0, operands[y] + u64(at * element))

    return dyn_resize


def _nearest(workload: Workload[DynResizeParams], vector: int) -> tuple[_Compute, int, int]:
    """`compute(words, numbers, rounded, x, place, sizes, line of rows, line of columns)` makes the vector at a place of y;
    and the lengths of the first two arrays. Elements stay as they are.
    """
    p = workload.params
    most_height, most_width, channels, element = p.h, p.w, positions(p)[3], dtype_of(p.dtype).nbytes
    down, across, load = pixel_of_run(workload, 0), pixel_of_run(workload, 1), vectors.load(p.dtype, vector)

    def compute(
        word: Any, number: Any, rounded: Any, x: Any, place: Any, sizes: Any, row_line: Any, column_line: Any
    ) -> None:
        plane, row, column, channel = place
        first = (plane * most_height + down(row, row_line, sizes[0])) * most_width
        at = (first + across(column, column_line, sizes[1])) * channels + channel
        load(rounded, 0, x + u64(at * element), 1)

    return compute, 1, 1


def _linear(workload: Workload[DynResizeParams], vector: int) -> tuple[_Compute, int, int]:
    """The same between four pixels, all of which are loaded first."""
    p = workload.params
    most_height, most_width, channels, element = p.h, p.w, positions(p)[3], dtype_of(p.dtype).nbytes
    down, across, words = pixels_of_run(workload, 0), pixels_of_run(workload, 1), vectors.words_of(p.dtype, vector)
    load, unpack, pack = (make(p.dtype, vector) for make in (vectors.load, vectors.unpack, vectors.pack))

    def compute(
        word: Any, number: Any, rounded: Any, x: Any, place: Any, sizes: Any, row_line: Any, column_line: Any
    ) -> None:
        plane, row, column, channel = place
        top, bottom, share = down(row, row_line, sizes[0])
        left, right, share_w = across(column, column_line, sizes[1])
        for i in range(4):
            first = (plane * most_height + (top if i < 2 else bottom)) * most_width
            at = (first + (left if i % 2 == 0 else right)) * channels + channel
            load(word, i * words, x + u64(at * element), 1)
        for i in range(4):
            unpack(word, i * words, number, i * vector)
        for e in range(vector):
            upper = between(number[e], number[vector + e], share_w)
            lower = between(number[2 * vector + e], number[3 * vector + e], share_w)
            number[e] = between(upper, lower, share)
        pack(number, 0, rounded, 0)

    return compute, 4 * words, 4 * vector
