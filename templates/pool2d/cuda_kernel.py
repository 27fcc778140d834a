"""The kernels of pool2d on a GPU. Pixels are runs of channels (`schedsearch.ops.images`); a thread has a vector of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda

from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import planes_of
from schedsearch.ops.pool2d import Pool2dParams
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.slices import place_of
from schedsearch.templates.pool2d.windows import Axis
from schedsearch.workload import Workload

IN_FLIGHT = 4  # loads of a thread that shares a window
# Words of the lowest number, which pixels outside of the image count as.
_LOWEST = {"float16": 0xFC00FC00, "bfloat16": 0xFF80FF80, "float32": 0xFF800000, "int8": 0x80808080, "uint8": 0}


@dataclass(frozen=True)
class Pool:
    """A pool as its kernels see it: `planes` of pixels with `channels`, in vectors of `vector` elements."""

    rows: Axis
    columns: Axis
    planes: int
    channels: int
    vector: int
    dtype: str
    largest: bool
    y: ArgSpec

    @classmethod
    def of(cls, p: Workload[Pool2dParams], vector: int) -> Pool:
        planes, channels = planes_of(p.params)
        rows, columns = Axis.of(p, 0), Axis.of(p, 1)
        return cls(rows, columns, planes, channels, vector, p.params.dtype, p.params.mode == "max", p.output)

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.dtype).nbytes

    @property
    def vectors(self) -> int:
        """Vectors of a pixel."""
        return self.channels // self.vector

    def items(self, tile: int, rows: int = 1) -> int:
        """Threads, if each has `rows` x `tile` neighbouring pixels of y."""
        return self.planes * -(-self.rows.outputs // rows) * -(-self.columns.outputs // tile) * self.vectors


def window_kernel(pool: Pool, tile_h: int, tile_w: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) whose threads have `tile_h` x `tile_w` neighbouring pixels of y each, and load the pixels of x that
    these share once. A row of x is combined along the windows' rows first, and then with each window that has it.
    """
    vector, element, words = pool.vector, pool.element_bytes, vectors.words_of(pool.dtype, pool.vector)
    rows, columns = pool.rows, pool.columns
    width, rows_out, across, channels = columns.size, rows.outputs, columns.outputs, pool.channels
    stride_h, stride_w, step_w = rows.stride, columns.stride, columns.dilation
    extent_h, extent_w = (rows.taps - 1) * rows.dilation + 1, (columns.taps - 1) * step_w + 1
    span_h, span_w = (tile_h - 1) * stride_h + extent_h, (tile_w - 1) * stride_w + extent_w
    step_h = rows.dilation if tile_h == 1 else 1
    pixel = channels * element  # bytes
    in_row, numbers, row_words = tile_w * vector, tile_h * tile_w * vector, span_w * words
    place, address, contains = _place(pool, tile_h, tile_w), _address(pool), _contains(pool, tile_h, tile_w)
    load, unpack = vectors.load(pool.dtype, vector), vectors.unpack(pool.dtype, vector)
    outside, combine = _outside(pool), combination(pool)
    finish, items, top, left = finishing(pool), pool.items(tile_w, tile_h), rows.before, columns.before
    stored = place_of(pool.y)

    def pool_windows(x, y) -> None:  # type: ignore[no-untyped-def]
        item = i64(cuda.blockIdx.x) * threads + i64(cuda.threadIdx.x)
        if item < items:
            found = cuda.local.array(numbers, f32)
            of_row = cuda.local.array(in_row, f32)
            word = cuda.local.array(row_words, u32)
            value = cuda.local.array(vector, f32)
            plane, row, column, channel = place(item)
            h, w = i32(row * stride_h - top), i32(column * stride_w - left)
            corner = x + u64(address(plane, h, w, channel))
            for i in range(0, span_h, step_h):
                for j in range(span_w):
                    inside = contains(h + i, w + j)
                    load(word, j * words, u64(corner + u64((i * width + j) * pixel)), inside)
                    outside(word, j * words, inside)
                for j in range(span_w):
                    unpack(word, j * words, value, 0)
                    for t in range(tile_w):
                        tap = j - t * stride_w
                        if 0 <= tap < extent_w and tap % step_w == 0:
                            for e in range(vector):
                                at = t * vector + e
                                of_row[at] = combine(of_row[at], value[e]) if tap > 0 else value[e]
                for u in range(tile_h):
                    if 0 <= i - u * stride_h < extent_h:
                        for e in range(in_row):
                            at = u * in_row + e
                            found[at] = combine(found[at], of_row[e]) if i > u * stride_h else of_row[e]
            for u in range(tile_h):
                for t in range(tile_w):
                    if (row + u < rows_out) & (column + t < across):
                        to = stored(((plane * rows_out + row + u) * across + column + t) * channels + channel) * element
                        at_h, at_w = i32(h + u * stride_h), i32(w + t * stride_w)
                        finish(found, u * in_row + t * vector, y + u64(to), at_h, at_w)

    return pool_windows


def shared_kernel(pool: Pool, splits: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) in which `splits` threads of a block share each window, for few outputs with many pixels each."""
    vector, element, words = pool.vector, pool.element_bytes, vectors.words_of(pool.dtype, pool.vector)
    rows, columns = pool.rows, pool.columns
    taps, taps_w, lanes = rows.taps * columns.taps, columns.taps, threads // splits
    pitch = threads + lanes  # floats between the elements of a vector, so that threads that read several use all banks
    numbers = pitch * vector
    width, rows_out, across, channels = columns.size, rows.outputs, columns.outputs, pool.channels
    stride_h, stride_w, step_h, step_w = rows.stride, columns.stride, rows.dilation, columns.dilation
    place, address, contains, pixel = _place(pool, 1, 1), _address(pool), _contains(pool, 1, 1), channels * element
    load, unpack = vectors.load(pool.dtype, vector), vectors.unpack(pool.dtype, vector)
    outside, combine, first = _outside(pool), combination(pool), neutral(pool)
    finish, items, top, left = finishing(replace(pool, vector=1)), pool.items(1), rows.before, columns.before
    stored = place_of(pool.y)
    in_flight = min(IN_FLIGHT, -(-taps // splits))
    held = words * in_flight
    along_channels = pool.vectors > 1  # neighbouring threads have neighbouring channels; else pixels
    between_lanes, between_splits = (1, lanes) if along_channels else (splits, 1)

    def pool_shared(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(numbers, f32)
        found = cuda.local.array(vector, f32)
        word = cuda.local.array(held, u32)
        value = cuda.local.array(vector, f32)
        thread = u32(cuda.threadIdx.x)
        lane = i32(thread // u32(between_lanes) % u32(lanes))
        split = i32(thread // u32(between_splits) % u32(splits))
        item = i64(cuda.blockIdx.x) * lanes + lane
        plane, row, column, channel = place(min(item, i64(items - 1)))
        h, w = i32(row * stride_h - top), i32(column * stride_w - left)
        corner = x + u64(address(plane, h, w, channel))
        for e in range(vector):
            found[e] = first
        for tap in range(split, taps, splits * in_flight):
            for i in range(in_flight):
                number = u32(tap + i * splits)
                quotient = u32(number // u32(taps_w))
                down = i32(quotient * u32(step_h))
                right = i32((number - quotient * u32(taps_w)) * u32(step_w))
                inside = (number < taps) & contains(h + down, w + right)
                load(word, i * words, u64(corner + u64(i64(down * width + right) * pixel)), inside)
                outside(word, i * words, inside)
            for i in range(in_flight):
                unpack(word, i * words, value, 0)
                for e in range(vector):
                    found[e] = combine(found[e], value[e])
        for e in range(vector):
            partial[e * pitch + thread] = found[e]
        cuda.syncthreads()
        for e in range(split, vector, splits):
            found[0] = first
            for i in range(splits):
                found[0] = combine(found[0], partial[e * pitch + lane * between_lanes + i * between_splits])
            if item < items:
                to = stored(((plane * rows_out + row) * across + column) * channels + channel + e) * element
                finish(found, 0, y + u64(to), h, w)

    return pool_shared


def _place(pool: Pool, tile_h: int, tile_w: int) -> Callable[[Any], Any]:
    """item -> (plane, first row, first column, first channel) of y."""
    lanes, vector = pool.vectors, pool.vector
    across, rows = -(-pool.columns.outputs // tile_w), -(-pool.rows.outputs // tile_h)

    def place(item: Any) -> Any:
        rest = u32(item)
        quotient = u32(rest // u32(lanes))
        channel = i64(rest - quotient * u32(lanes)) * vector
        rest, quotient = quotient, u32(quotient // u32(across))
        column = i32((rest - quotient * u32(across)) * u32(tile_w))
        plane = u32(quotient // u32(rows))
        row = i32((quotient - plane * u32(rows)) * u32(tile_h))
        return i64(plane), row, column, channel

    return place


def _address(pool: Pool) -> Callable[..., Any]:
    """(plane, row, column, channel) -> bytes from the beginning of x."""
    height, width, channels, element = pool.rows.size, pool.columns.size, pool.channels, pool.element_bytes

    def address(plane: Any, row: Any, column: Any, channel: Any) -> Any:
        return (((plane * height + row) * width + column) * channels + channel) * element

    return address


def _contains(pool: Pool, tile_h: int, tile_w: int) -> Callable[[Any, Any], Any]:
    """`contains(row, column)`: whether x has this pixel, among those that threads with `tile_h` x `tile_w` pixels load."""
    height, width = pool.rows.size, pool.columns.size
    check_rows = pool.rows.padded or pool.rows.outputs % tile_h > 0
    check_columns = pool.columns.padded or pool.columns.outputs % tile_w > 0

    def contains(row: Any, column: Any) -> Any:
        in_rows = ((row >= 0) & (row < height)) if check_rows else True
        in_columns = ((column >= 0) & (column < width)) if check_columns else True
        return in_rows & in_columns

    return contains


def _outside(pool: Pool) -> Callable[[Any, Any, Any], None]:
    """`outside(words, at, inside)`: puts the number that changes nothing in the place of a pixel that is not `inside`."""
    words, lowest = vectors.words_of(pool.dtype, pool.vector), _LOWEST[pool.dtype]

    def lower(word: Any, at: Any, inside: Any) -> None:
        for i in range(words):
            if not inside:
                word[at + i] = u32(lowest)

    def nothing(word: Any, at: Any, inside: Any) -> None:
        pass

    return lower if pool.largest else nothing


def combination(pool: Pool) -> Callable[[Any, Any], Any]:
    """`combine(a, b)` for kernels: the larger one of two numbers, or their sum."""
    larger = vectors.larger

    def largest(a: Any, b: Any) -> Any:
        return larger(a, b)

    def total(a: Any, b: Any) -> Any:
        return f32(a + b)

    return largest if pool.largest else total


def neutral(pool: Pool) -> Any:
    """The number that changes nothing when it is combined with another one."""
    return f32(-math.inf if pool.largest else 0.0)


def finishing(pool: Pool) -> Callable[..., None]:
    """`finish(found, at, address, h, w)`: divides the sums of the window that begins at (h, w), rounds and stores."""
    vector, words = pool.vector, vectors.words_of(pool.dtype, pool.vector)
    pack, store = vectors.pack(pool.dtype, vector), vectors.store(pool.dtype, vector)
    rows, columns, mean = pool.rows.counted(), pool.columns.counted(), not pool.largest
    exact = not dtype_of(pool.dtype).is_float  # a product with the reciprocal can miss a half

    def finish(found: Any, at: Any, address: Any, h: Any, w: Any) -> None:
        word = cuda.local.array(words, u32)
        if mean:
            count = f32(rows(h) * columns(w))
            reciprocal = f32(f32(1) / count)
            for e in range(vector):
                if exact:
                    found[at + e] = f32(found[at + e] / count)
                else:
                    found[at + e] = f32(found[at + e] * reciprocal)
        pack(found, at, word, 0)
        store(word, 0, address)

    return finish
