"""Linear interpolation of single elements (NCHW) that loads each pixel of x once for the pixels of a thread.

If a tile of pixels of y is an integer of pixels of x long, every tile needs the same window of a row of x, seen from
its own place. Which pixels of the window a pixel of y mixes, and their weights, are then constants of the code. Doubling a
width, for example, takes 6 pixels of a row for 8 pixels of y, where one load for each use would be 16. Those that every
tile has inside the image, at multiples of a vector, are loaded as vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.resize import ResizeParams, coordinate, positions
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, u32, u64
from schedsearch.templates.resize.axes import between, pixels_around
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Window:
    """The pixels of a row of x for a tile of a row of y.

    Attributes:
        first, step: where the window of tile i begins: first + i * step, which may be outside of the row.
        count: pixels.
        rest: what is left of the division that gives `first`; see `axes`.
        leading: pixels before the first vector.
        vector, vectors: pixels of a vector, and how many there are.
    """

    first: int
    step: int
    count: int
    rest: int
    leading: int
    vector: int
    vectors: int

    @property
    def loads(self) -> int:
        return self.vectors + self.count - self.vectors * self.vector

    @classmethod
    def of(cls, workload: Workload[ResizeParams], tile: int) -> Window | None:
        """The window with the fewest loads; None if tiles differ, or if it has no fewer pixels than there are uses."""
        p = workload.params
        _, _, width, channels = positions(p)
        line = coordinate(p, 1)
        if p.mode != "linear" or channels > 1 or width % tile or line.factor * tile % line.divisor:
            return None
        first, rest = divmod(line.shift, line.divisor)
        step, count = line.factor * tile // line.divisor, (line.factor * (tile - 1) + rest) // line.divisor + 2
        if count >= 2 * tile:
            return None
        found, most = [], vectors.MOST_BYTES // dtype_of(p.dtype).nbytes
        for vector in (n for n in (1, 2, 4, 8, 16) if n <= most and p.w % n == 0 and step % n == 0):
            leading = -first % vector if first >= 0 else -first  # the image begins at a multiple of any vector
            inside = min(count - leading, p.w - first - step * (width // tile - 1) - leading)
            found.append(cls(first, step, count, rest, leading, vector, max(inside // vector, 0)))
        return min(found, key=lambda window: window.loads)


def linear_once(
    workload: Workload[ResizeParams], tile: int, window: Window
) -> tuple[Callable[..., None], Callable[..., None], int, int]:
    """As the functions of `resize_kernel` for each use; the only share is that of the second row."""
    p = workload.params
    height, width, element = p.h, p.w, dtype_of(p.dtype).nbytes
    line = coordinate(p, 1)
    factor, divisor, rest = line.factor, line.divisor, window.rest
    begin, step, count, vector, wide = window.first, window.step, window.count, window.vector, window.vectors
    before, after = window.leading, window.leading + window.vectors * window.vector
    singles, wide_words = count - wide * vector, vectors.words_of(p.dtype, vector)
    row_words, down = wide * wide_words + singles, pixels_around(workload, 0)
    load_one, load_wide = vectors.load(p.dtype, 1), vectors.load(p.dtype, vector)
    unpack_one, unpack_wide = vectors.unpack(p.dtype, 1), vectors.unpack(p.dtype, vector)
    pixels = 2 * count

    def fetch(word: Any, share: Any, x: Any, plane: Any, row: Any, column: Any, channel: Any) -> None:
        above, below, share[0] = down(row)
        first = i32(i32(u32(column) // u32(tile)) * step + begin)
        for r in range(2):
            line_at = (plane * height + (above if r == 0 else below)) * width
            for i in range(wide):
                at = line_at + (first + before + i * vector)
                load_wide(word, r * row_words + i * wide_words, x + u64(at * element), 1)
            for i in range(singles):
                place = i32(first + (i if i < before else after - before + i))
                at = line_at + min(max(place, i32(0)), i32(width - 1))
                load_one(word, r * row_words + wide * wide_words + i, x + u64(at * element), 1)

    def mix(word: Any, share: Any, number: Any) -> None:
        pixel = cuda.local.array(pixels, f32)
        for r in range(2):
            for i in range(wide):
                unpack_wide(word, r * row_words + i * wide_words, pixel, r * count + before + i * vector)
            for i in range(singles):
                place = i if i < before else after - before + i
                unpack_one(word, r * row_words + wide * wide_words + i, pixel, r * count + place)
        for t in range(tile):
            place = (t * factor + rest) // divisor
            weight = f32(f32((t * factor + rest) % divisor) / f32(divisor))
            above = between(pixel[place], pixel[place + 1], weight)
            below = between(pixel[count + place], pixel[count + place + 1], weight)
            number[t] = between(above, below, share[0])

    return fetch, mix, 2 * row_words, 1
