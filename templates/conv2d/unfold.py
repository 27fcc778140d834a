"""conv2d on Hopper for channels that TMA cannot load (not a multiple of 8, e.g. RGB): unfold them, then run conv2d_wgmma.

The columns of the kernel become channels, in two workspaces:

    x_unfolded[n, h, q, s * C + c] = x[n, h, q * stride_w - left + s * dilation_w, c]      0 outside of the image
    weight_unfolded[k, r, 0, s * C + c] = weight[k, r, s, c]

Zeros fill up the S * C channels to `channels`, a multiple of 8. The remaining convolution has R x 1 taps:

    y[n, p, q, k] = sum over r and i of x_unfolded[n, row(p, r), q, i] * weight_unfolded[k, r, 0, i]
    row(p, r) = p * stride_h - top + r * dilation_h

The first launch unfolds both arguments. The second one is conv2d_wgmma's kernel. See docs/kernels/conv2d_unfold.md.

For int8 and uint8 the chunk of 16 bytes has 16 channels. If x has a zero point, columns outside of the image are filled with
it. Rows outside of the image are TMA's zeros, whose sums conv2d_wgmma corrects (`parts.zero_points`). If the weight has a
zero point, a step before both adds up x over each window, as it is given (`parts.window_sums`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer, Scalar
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.hopper import DTYPES
from schedsearch.templates.parts.loads import load_four_bytes, load_halves, load_run, load_run_of_bytes
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.templates.parts.window_sums import WindowSums
from schedsearch.templates.parts.zero_points import SCALAR, ZeroPoint
from schedsearch.workload import Workload

CHUNK_BYTES = 16  # that a thread writes at once
MAX_UNFOLDED_BYTES = 256  # of a pixel; beyond this, the larger x costs more than loading it tap by tap
MAX_ELEMENTS = 2**31 - 1  # limit for a row of pixels and for the weights; positions in them are 32-bit

UNFOLD_THREADS = (64, 128, 256)
UNFOLD_CHUNKS = (1, 2, 4)

_INNER = Conv2dWgmma()
_X, _WEIGHT = "x_unfolded", "weight_unfolded"


class Conv2dUnfold(Template[Conv2dParams]):
    """conv2d for compute capability 9.0 and channels that are not a multiple of 8: fp16/bf16 in, fp16, bf16 or fp32 out.

    A configuration is one of conv2d_wgmma for the unfolded workload, plus the distribution of the unfolding over threads.
    """

    name = "conv2d_unfold"
    version = 1 + Conv2dWgmma.version  # if either version changes, a configuration means another kernel
    op = "conv2d"
    kind = "cuda"
    renamed = Conv2dWgmma.renamed

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        w = workload.params
        if (w.layout, w.weight_layout) != ("NHWC", "OHWI"):
            return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI"
        if w.output_layout != w.layout:
            return f"output_layout is {w.output_layout}; allowed: {w.layout}, as that of x"
        if w.groups != 1:
            return f"groups is {w.groups}; allowed: 1"
        size = dtype_of(w.dtype).nbytes
        if w.dtype not in (*DTYPES, *INTEGERS):
            return f"dtype is {w.dtype}; allowed: {', '.join((*DTYPES, *INTEGERS))}"
        chunk, most = CHUNK_BYTES // size, MAX_UNFOLDED_BYTES // size
        if w.c % chunk == 0:
            return f"c is {w.c}; allowed: no multiples of {chunk}, which conv2d_wgmma takes as they are"
        if size == 2 and (reason := epilogue_problem(workload, slices=True)):
            return reason
        unfolded = Unfolded.of(workload)
        if unfolded.channels > most:
            return f"s * c is {w.s * w.c}; allowed: up to {most}, the channels of an unfolded pixel"
        for meaning, elements in (
            ("a padded row of x", (w.w + w.padding[1] + w.padding[3]) * w.c),
            ("an unfolded row of x", unfolded.row_chunks * chunk),
            ("the unfolded weight", unfolded.weight_chunks * chunk),
        ):
            if elements > MAX_ELEMENTS:
                return f"{meaning} has {elements} elements; allowed: less than 2**31"
        reason = _INNER.validate(unfolded.workload, target)
        return reason and f"as {unfolded.workload.label}: {reason}"

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        unfolded = Unfolded.of(workload)
        inner = _INNER.space(unfolded.workload, target)
        most = 2 * unfolded.chunks  # most chunks per block; more would be idle
        knobs = (
            *inner.knobs,
            Knob("unfold_threads", UNFOLD_THREADS, "threads of a block that unfolds"),
            Knob(
                "unfold_chunks",
                UNFOLD_CHUNKS,
                f"chunks of {unfolded.chunk} unfolded channels per thread; more chunks make fewer, longer blocks",
            ),
        )
        constraints = (
            *inner.constraints,
            Constraint(
                "a block has 64 chunks, or less than twice the chunks that there are to unfold",
                lambda k: (
                    (k["unfold_threads"] * k["unfold_chunks"] == 64) | (k["unfold_threads"] * k["unfold_chunks"] < most)
                ),
            ),
        )
        derived = {
            **inner.derived,
            "unfold_blocks": lambda k: unfolded.blocks(k["unfold_threads"] * k["unfold_chunks"]),
            "unfold_waves": lambda k: k["unfold_blocks"] * k["unfold_threads"] / (target.sms * target.threads_per_sm),
        }
        return ConfigSpace(knobs, constraints, derived)

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """conv2d_wgmma's default for the unfolded workload. Two chunks per thread if that still fills the device twice."""
        unfolded = Unfolded.of(workload)
        threads = max(
            t for t in UNFOLD_THREADS if t == min(UNFOLD_THREADS) or unfolded.chunks >= t * target.sms
        )  # small blocks if there is little work, so that every multiprocessor gets some
        chunks = 2 if unfolded.chunks >= 4 * target.sms * target.threads_per_sm else 1
        inner = _INNER.default(unfolded.workload, target, _INNER.space(unfolded.workload, target))
        return Config({**inner, "unfold_threads": threads, "unfold_chunks": chunks})

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        unfolded = Unfolded.of(workload)
        threads, chunks = config["unfold_threads"], config["unfold_chunks"]
        inner_config = Config({name: config[name] for name in _INNER.space(unfolded.workload, target).names})
        inner = _INNER.without_window_sums(unfolded.workload, target, inner_config)
        unfold = KernelStep(
            build_unfold(workload, threads, chunks),
            (*map(Pointer, ("x", _X, "weight", _WEIGHT)), *_zero_point(workload)),
            Grid(unfolded.blocks(threads * chunks)),
            threads,
            shaped_by=frozenset({"contiguous"}),
        )
        *before, convolve = inner.steps
        loaded = unfolded.element_bytes * unfolded.piece
        aligned_weight = loaded
        if before:  # the table of a zero point; the weights are those of R x 1 taps over S * C channels
            zero = ZeroPoint.of(unfolded.workload.replace(c=workload.params.s * workload.params.c))
            assert zero is not None and len(before) == 1
            before, aligned_weight = [zero.step()], max(loaded, 4)
        x = Prepared("x", _X, CHUNK_BYTES * unfolded.x_chunks, unfold, loaded)
        weight = Prepared("weight", _WEIGHT, CHUNK_BYTES * unfolded.weight_chunks, alignment=aligned_weight)
        source = over_prepared(dataclasses.replace(inner, steps=(convolve,)), [x, weight])
        source = dataclasses.replace(source, steps=(*before, *source.steps))
        windows = WindowSums.of(workload)  # of x as it is given
        return windows.before(source) if windows else source


@dataclass(frozen=True)
class Unfolded:
    """Sizes of the unfolded arguments, and the remaining convolution.

    Attributes:
        workload: R x 1 taps over `channels` channels, with the same output.
        channels: S * C, filled up to whole chunks.
        pixel_chunks, row_chunks: 16-byte chunks of an unfolded pixel and of a row of them.
        x_chunks, weight_chunks: 16-byte chunks of the whole arguments.
        piece: elements of x and weight per load: the most that stay within a tap and are aligned, up to 4 bytes.
        element_bytes: of x and weight.
    """

    workload: Workload[Conv2dParams]
    channels: int
    pixel_chunks: int
    row_chunks: int
    x_chunks: int
    weight_chunks: int
    piece: int
    element_bytes: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Unfolded:
        w = workload.params
        out_w = workload.output.shape[2]
        size = dtype_of(w.dtype).nbytes
        chunk = CHUNK_BYTES // size
        pixel_chunks = math.ceil(w.s * w.c / chunk)
        top, _, bottom, _ = w.padding
        inner = workload.replace(
            w=out_w, c=pixel_chunks * chunk, s=1, stride=(w.stride[0], 1), padding=(top, 0, bottom, 0),
            dilation=(w.dilation[0], 1),
        )  # fmt: skip
        assert inner.output == workload.output
        return cls(
            inner,
            pixel_chunks * chunk,
            pixel_chunks,
            out_w * pixel_chunks,
            w.n * w.h * out_w * pixel_chunks,
            w.k * w.r * pixel_chunks,
            piece=math.gcd(w.c, 4 // size),
            element_bytes=size,
        )

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.element_bytes

    @property
    def chunks(self) -> int:
        return self.x_chunks + self.weight_chunks

    def blocks(self, block_chunks: Any) -> Any:
        """Number of blocks that unfold x and of blocks that unfold the weights, with `block_chunks` chunks each."""
        return -(-self.x_chunks // block_chunks) - (-self.weight_chunks // block_chunks)


def _zero_point(workload: Workload[Conv2dParams]) -> tuple[Scalar, ...]:
    """The further parameters of the unfolding: the zero point of x, if it has one."""
    return (Scalar(SCALAR),) if "x" in workload.params.zero_points else ()


def _loads(unfolded: Unfolded) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """How a thread loads a chunk of four words.

    Returns:
        `run(address, first, stop, fill)`: of neighbouring elements, of which [first, stop) are valid.
        `words(row, first, element, position_of, address_of, fill)`: of elements from `element` on. Their positions in the
            row at address `row` are `position_of(first, element)`, negative outside of the image.
        `fill_of(scalars)`: a word of elements outside of the image.
    """
    run_of_halves, run_of_bytes = load_run(min(unfolded.piece, 2)), load_run_of_bytes(unfolded.piece)

    def halves(address: Any, first: Any, stop: Any, fill: Any) -> Any:
        return run_of_halves(address, first, stop)

    def pair(row: Any, first: Any, element: Any, position_of: Any, address_of: Any) -> Any:
        low, high = position_of(first, element), position_of(first, i32(element + 1))
        return load_halves(address_of(row, low), i32(low >= 0), address_of(row, high), i32(high >= 0))

    def words_of_halves(row: Any, first: Any, element: Any, position_of: Any, address_of: Any, fill: Any) -> Any:
        w0 = pair(row, first, element, position_of, address_of)
        w1 = pair(row, first, i32(element + 2), position_of, address_of)
        w2 = pair(row, first, i32(element + 4), position_of, address_of)
        w3 = pair(row, first, i32(element + 6), position_of, address_of)
        return w0, w1, w2, w3

    def four(row: Any, first: Any, element: Any, position_of: Any, fill: Any) -> Any:
        p0, p1 = position_of(first, element), position_of(first, i32(element + 1))
        p2, p3 = position_of(first, i32(element + 2)), position_of(first, i32(element + 3))
        return load_four_bytes(row, p0, p1, p2, p3, fill)

    def words_of_bytes(row: Any, first: Any, element: Any, position_of: Any, address_of: Any, fill: Any) -> Any:
        w0 = four(row, first, element, position_of, fill)
        w1 = four(row, first, i32(element + 4), position_of, fill)
        w2 = four(row, first, i32(element + 8), position_of, fill)
        w3 = four(row, first, i32(element + 12), position_of, fill)
        return w0, w1, w2, w3

    def zero_point(scalars: Any) -> Any:
        return u32((i32(scalars[0]) & 255) * 0x01010101)

    def zero(scalars: Any) -> Any:
        return u32(0)

    fill_of = zero_point if "x" in unfolded.workload.params.zero_points else zero
    if unfolded.element_bytes == 2:
        return halves, words_of_halves, fill_of
    return run_of_bytes, words_of_bytes, fill_of


def build_unfold(workload: Workload[Conv2dParams], threads: int, thread_chunks: int) -> Callable[..., None]:
    """The kernel (x, x_unfolded, weight, weight_unfolded): blocks of `threads` threads, with `thread_chunks` chunks each.

    Neighbouring threads write neighbouring chunks and mostly read the same lines. A block finds its row of pixels in 64 bits
    if there are that many chunks. From there on 32 bits are enough.
    """
    p = workload.params
    unfolded = Unfolded.of(workload)
    c, width, left = p.c, p.w, p.padding[1]
    stride_w, dilation_w = p.stride[1], p.dilation[1]
    row_elements, taps_elements = width * c, p.s * c
    pixel_chunks, row_chunks = unfolded.pixel_chunks, unfolded.row_chunks
    x_chunks, weight_chunks = unfolded.x_chunks, unfolded.weight_chunks
    block_chunks = threads * thread_chunks
    x_blocks = -(-x_chunks // block_chunks)
    count = u64 if x_chunks + block_chunks >= 2**32 else u32
    contiguous = dilation_w == 1 or p.s == 1  # neighbouring taps are neighbours in x
    chunk_elements, element_bytes = unfolded.chunk, unfolded.element_bytes
    run, words, fill_of = _loads(unfolded)

    def unfold(x, x_unfolded, weight, weight_unfolded, *scalars) -> None:  # type: ignore[no-untyped-def]
        def position_of(first: Any, element: Any) -> Any:
            """The position in its row of x of an element, for the pixel whose first tap is column `first`; -1 if outside."""
            tap = i32(u32(element) // u32(c))
            column = i32(first + tap * dilation_w)
            position = i32(column * c + element - tap * c)
            if (u32(column) >= u32(width)) | (element >= taps_elements):
                position = i32(-1)
            return position

        def address_of(row: Any, position: Any) -> Any:
            return u64(row + u64(i64(position) * element_bytes))

        block, thread = u32(cuda.blockIdx.x), u32(cuda.threadIdx.x)
        if block < x_blocks:
            first_chunk = count(count(block) * count(block_chunks))
            first_row = count(first_chunk // count(row_chunks))
            within = u32(first_chunk - first_row * count(row_chunks))
            for i in range(thread_chunks):
                chunk = u32(thread + u32(i * threads))
                if count(first_chunk + chunk) < x_chunks:
                    place = u32(within + chunk)
                    rows = u32(place // u32(row_chunks))
                    place = u32(place - rows * u32(row_chunks))
                    pixel = u32(place // u32(pixel_chunks))
                    element = i32((place - pixel * u32(pixel_chunks)) * chunk_elements)
                    column = i32(i32(pixel) * stride_w - left)  # column of the first tap
                    row = u64(first_row) + u64(rows)
                    address = u64(x + u64(row) * u64(row_elements * element_bytes))
                    if contiguous:
                        position = i32(column * c + element)
                        stop = min(i32(row_elements - position), i32(taps_elements - element))
                        w0, w1, w2, w3 = run(address_of(address, position), i32(-position), stop, fill_of(scalars))
                    else:
                        w0, w1, w2, w3 = words(address, column, element, position_of, address_of, fill_of(scalars))
                    to = (u64(first_chunk) + u64(chunk)) * u64(CHUNK_BYTES)
                    ptx.store_global_v4(u64(x_unfolded + to), w0, w1, w2, w3)
        else:
            for i in range(thread_chunks):
                chunk = u32((block - u32(x_blocks)) * u32(block_chunks))
                chunk = u32(chunk + thread + u32(i * threads))
                if chunk < weight_chunks:
                    rows = u32(chunk // u32(pixel_chunks))
                    element = i32((chunk - rows * u32(pixel_chunks)) * chunk_elements)
                    address = u64(weight + u64(rows) * u64(taps_elements * element_bytes))
                    stop = i32(taps_elements - element)
                    w0, w1, w2, w3 = run(address_of(address, element), i32(0), stop, u32(0))
                    to = u64(chunk) * u64(CHUNK_BYTES)
                    ptx.store_global_v4(u64(weight_unfolded + to), w0, w1, w2, w3)

    return unfold
