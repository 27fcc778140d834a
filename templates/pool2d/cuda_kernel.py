"""The kernels of pool2d on a GPU. Pixels are runs of channels (`schedsearch.ops.images`); a thread has a vector of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import planes_of
from schedsearch.templates.parts import vectors
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

    @classmethod
    def of(cls, p: Workload, vector: int) -> Pool:
        planes, channels = planes_of(p.params)
        rows, columns = Axis.of(p, 0), Axis.of(p, 1)
        return cls(rows, columns, planes, channels, vector, p.dtype, p.mode == "max")

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.dtype).nbytes

    @property
    def vectors(self) -> int:
        """Vectors of a pixel."""
        return self.channels // self.vector

    def items(self, tile: int) -> int:
        """Threads, if each has `tile` neighbouring pixels of a row of y."""
        return self.planes * self.rows.outputs * -(-self.columns.outputs // tile) * self.vectors


def window_kernel(pool: Pool, tile: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) whose threads have `tile` neighbouring pixels of y each, and load the pixels of x that these share
    once.
    """
    vector, element, words = pool.vector, pool.element_bytes, vectors.words_of(pool.dtype, pool.vector)
    rows, columns, taps_h = pool.rows, pool.columns, pool.rows.taps
    height, width, across = rows.size, columns.size, columns.outputs
    stride_h, stride_w, step_h, step_w = rows.stride, columns.stride, rows.dilation, columns.dilation
    extent = (columns.taps - 1) * step_w + 1
    span, numbers = (tile - 1) * stride_w + extent, tile * vector
    place, address = _place(pool, tile), _address(pool)
    load, unpack = vectors.load(pool.dtype, vector), vectors.unpack(pool.dtype, vector)
    outside, combine, first = _outside(pool), _combine(pool), _first(pool)
    finish, items, top, left = _finish(pool), pool.items(tile), rows.before, columns.before
    rows_out, channels = rows.outputs, pool.channels

    def pool_windows(x, y) -> None:  # type: ignore[no-untyped-def]
        item = types.int64(cuda.blockIdx.x) * threads + types.int64(cuda.threadIdx.x)
        if item < items:
            found = cuda.local.array(numbers, types.float32)
            word = cuda.local.array(words, types.uint32)
            value = cuda.local.array(vector, types.float32)
            plane, row, column, channel = place(item)
            for i in range(numbers):
                found[i] = first
            h, w = types.int32(row * stride_h - top), types.int32(column * stride_w - left)
            for i in range(taps_h):
                for j in range(span):
                    at_h, at_w = types.int32(h + i * step_h), types.int32(w + j)
                    inside = (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width)
                    load(word, 0, x + types.uint64(address(plane, at_h, at_w, channel)), inside)
                    outside(word, inside)
                    unpack(word, 0, value, 0)
                    for t in range(tile):
                        if 0 <= j - t * stride_w < extent and (j - t * stride_w) % step_w == 0:
                            for e in range(vector):
                                found[t * vector + e] = combine(found[t * vector + e], value[e])
            for t in range(tile):
                if column + t < across:
                    to = (((plane * rows_out + row) * across + column + t) * channels + channel) * element
                    finish(found, t * vector, y + types.uint64(to), h, types.int32(w + t * stride_w))

    return pool_windows


def shared_kernel(pool: Pool, splits: int, threads: int) -> Callable[..., None]:
    """The kernel (x, y) in which `splits` threads of a block share each window, for few outputs with many pixels each."""
    vector, element, words = pool.vector, pool.element_bytes, vectors.words_of(pool.dtype, pool.vector)
    rows, columns = pool.rows, pool.columns
    taps, taps_w, lanes, numbers = rows.taps * columns.taps, columns.taps, threads // splits, threads * vector
    height, width, rows_out, across, channels = rows.size, columns.size, rows.outputs, columns.outputs, pool.channels
    stride_h, stride_w, step_h, step_w = rows.stride, columns.stride, rows.dilation, columns.dilation
    place, address = _place(pool, 1), _address(pool)
    load, unpack = vectors.load(pool.dtype, vector), vectors.unpack(pool.dtype, vector)
    combine, first = _combine(pool), _first(pool)
    finish, items, top, left = _finish(pool), pool.items(1), rows.before, columns.before
    in_flight = min(IN_FLIGHT, -(-taps // splits))
    held = words * in_flight
    along_channels = pool.vectors > 1  # neighbouring threads have neighbouring channels; else pixels

    def pool_shared(x, y) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(numbers, types.float32)
        found = cuda.local.array(vector, types.float32)
        word = cuda.local.array(held, types.uint32)
        value = cuda.local.array(vector, types.float32)
        thread = types.int32(cuda.threadIdx.x)
        lane, split = thread % lanes, thread // lanes
        if not along_channels:
            lane, split = thread // splits, thread % splits
        item = types.int64(cuda.blockIdx.x) * lanes + lane
        plane, row, column, channel = place(min(item, types.int64(items - 1)))
        h, w = types.int32(row * stride_h - top), types.int32(column * stride_w - left)
        for e in range(vector):
            found[e] = first
        for tap in range(split, taps, splits * in_flight):
            for i in range(in_flight):
                number = types.int32(tap + i * splits)
                at_h = types.int32(h + number // taps_w * step_h)
                at_w = types.int32(w + number % taps_w * step_w)
                inside = (number < taps) & (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width)
                load(word, i * words, x + types.uint64(address(plane, at_h, at_w, channel)), inside)
            for i in range(in_flight):
                number = types.int32(tap + i * splits)
                at_h = types.int32(h + number // taps_w * step_h)
                at_w = types.int32(w + number % taps_w * step_w)
                inside = (number < taps) & (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width)
                unpack(word, i * words, value, 0)
                for e in range(vector):
                    if inside:
                        found[e] = combine(found[e], value[e])
        for e in range(vector):
            partial[e * threads + thread] = found[e]
        half = splits // 2
        while half > 0:
            cuda.syncthreads()
            if split < half:
                other = thread + (half * lanes if along_channels else half)
                for e in range(vector):
                    found[e] = combine(found[e], partial[e * threads + other])
                    partial[e * threads + thread] = found[e]
            half //= 2
        if split == 0 and item < items:
            to = (((plane * rows_out + row) * across + column) * channels + channel) * element
            finish(found, 0, y + types.uint64(to), h, w)

    return pool_shared


def _place(pool: Pool, tile: int) -> Callable[[Any], Any]:
    """item -> (plane, row, first column, first channel) of y."""
    lanes, across, rows, vector = pool.vectors, -(-pool.columns.outputs // tile), pool.rows.outputs, pool.vector

    def place(item: Any) -> Any:
        rest = types.uint32(item)
        quotient = types.uint32(rest // types.uint32(lanes))
        channel = types.int64(rest - quotient * types.uint32(lanes)) * vector
        rest, quotient = quotient, types.uint32(quotient // types.uint32(across))
        column = types.int32((rest - quotient * types.uint32(across)) * types.uint32(tile))
        plane = types.uint32(quotient // types.uint32(rows))
        row = types.int32(quotient - plane * types.uint32(rows))
        return types.int64(plane), row, column, channel

    return place


def _address(pool: Pool) -> Callable[..., Any]:
    """(plane, row, column, channel) -> bytes from the beginning of x."""
    height, width, channels, element = pool.rows.size, pool.columns.size, pool.channels, pool.element_bytes

    def address(plane: Any, row: Any, column: Any, channel: Any) -> Any:
        return (((plane * height + row) * width + column) * channels + channel) * element

    return address


def _outside(pool: Pool) -> Callable[[Any, Any], None]:
    """`outside(words, inside)`: puts the number that changes nothing in the place of a pixel that is not `inside`."""
    words, lowest = vectors.words_of(pool.dtype, pool.vector), _LOWEST[pool.dtype]

    def lower(word: Any, inside: Any) -> None:
        for i in range(words):
            if not inside:
                word[i] = types.uint32(lowest)

    def nothing(word: Any, inside: Any) -> None:
        pass

    return lower if pool.largest and (pool.rows.padded or pool.columns.padded) else nothing


def _combine(pool: Pool) -> Callable[[Any, Any], Any]:
    larger = vectors.larger

    def largest(a: Any, b: Any) -> Any:
        return larger(a, b)

    def total(a: Any, b: Any) -> Any:
        return types.float32(a + b)

    return largest if pool.largest else total


def _first(pool: Pool) -> Any:
    return types.float32(-math.inf if pool.largest else 0.0)


def _finish(pool: Pool) -> Callable[..., None]:
    """`finish(found, at, address, h, w)`: divides the sums of the window that begins at (h, w), rounds and stores."""
    vector, words = pool.vector, vectors.words_of(pool.dtype, pool.vector)
    pack, store = vectors.pack(pool.dtype, vector), vectors.store(pool.dtype, vector)
    rows, columns, mean = pool.rows.counted(), pool.columns.counted(), not pool.largest
    exact = not dtype_of(pool.dtype).is_float  # a product with the reciprocal can miss a half

    def finish(found: Any, at: Any, address: Any, h: Any, w: Any) -> None:
        word = cuda.local.array(words, types.uint32)
        if mean:
            count = types.float32(rows(h) * columns(w))
            reciprocal = types.float32(types.float32(1) / count)
            for e in range(vector):
                if exact:
                    found[at + e] = types.float32(found[at + e] / count)
                else:
                    found[at + e] = types.float32(found[at + e] * reciprocal)
        pack(found, at, word, 0)
        store(word, 0, address)

    return finish
