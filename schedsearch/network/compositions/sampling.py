"""GridSample: pixels of an image at computed places, as gathers of the pixels around a place and their weighted sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_MODES = {"bilinear": "linear", "linear": "linear", "nearest": "nearest", "bicubic": "cubic", "cubic": "cubic"}
_CUBIC = -0.75  # ONNX's coefficient
_PADDINGS = ("zeros", "border", "reflection")


def _grid_sample(c: Composition) -> str | None:
    x, grid, read = c.needed(0), c.needed(1), c.node.attributes
    shape, places = shape_of(x), shape_of(grid)
    mode, padding = read.get_string("mode", "bilinear"), read.get_string("padding_mode", "zeros")
    if mode not in _MODES:
        return f"is {mode}; allowed: {', '.join(_MODES)}"
    if padding not in _PADDINGS or dtype_of(x) not in FLOATS or x.dtype != grid.dtype:
        return f"has padding {padding} and reads {dtype_of(x)} and {dtype_of(grid)}; allowed: {', '.join(FLOATS)}"
    n, channels, *sizes = shape
    if _MODES[mode] == "cubic" and len(sizes) != 2:
        return f"is cubic, of {len(sizes)} spatial dimensions; allowed: 2"
    rank, count = len(sizes), math.prod(places[:-1])
    pixels = c.reshape(c.transpose(x, [0, *range(2, rank + 2), 1]), [n * math.prod(sizes), channels])
    aligned = bool(read.get_int("align_corners", 0))
    axes = []
    for axis, size in enumerate(sizes):  # the grid has the places along the last axis first
        at = _coordinate(c, grid, rank - 1 - axis, size, aligned)
        axes.append(_Places(c, at, size, _MODES[mode], padding, aligned).taps())
    image = np.repeat(np.arange(n) * math.prod(sizes), count // n).reshape(count, 1)
    total: ir.Value | None = None
    for taps in itertools.product(*axes):
        part = _pixels(c, pixels, [place for place, _ in taps], sizes, image)
        for _, weight in taps:
            part = part if weight is None else c.add("Mul", [part, weight])
        total = part if total is None else c.add("Add", [total, part])
    assert total is not None
    rows = c.reshape(total, [*places[:-1], channels])
    c.finish(c.transpose(rows, [0, rank + 1, *range(1, rank + 1)]))
    return None


def _pixels(c: Composition, pixels: ir.Value, places: Sequence[ir.Value], sizes: Sequence[int], image: Array) -> ir.Value:
    """Those at places along each axis, which are whole numbers inside of the image.

    Args:
        image: the number of the first pixel of each place's image, [count, 1].
    """
    import onnx_ir as ir

    index = c.cast(places[0], ir.DataType.INT64)
    for place, size in zip(places[1:], sizes[1:]):
        before = c.add("Mul", [index, c.constant(np.int64(size))])
        index = c.add("Add", [before, c.cast(place, ir.DataType.INT64)])
    if image.any():
        index = c.add("Add", [index, c.constant(image.astype(np.int64))])
    count, channels = len(image), shape_of(pixels)[1]
    return c.add("Gather", [pixels, c.reshape(index, [count])], [count, channels], axis=0)


def _coordinate(c: Composition, grid: ir.Value, axis: int, size: int, aligned: bool) -> ir.Value:
    """Where the grid points along an axis: in pixels, [count, 1]."""
    count = math.prod(shape_of(grid)[:-1])
    part = c.reshape(c.slice(grid, len(shape_of(grid)) - 1, axis, axis + 1), [count, 1])
    factor, offset = ((size - 1) / 2, (size - 1) / 2) if aligned else (size / 2, (size - 1) / 2)
    return c.add("Add", [c.add("Mul", [part, c.constant(factor, grid)]), c.constant(offset, grid)])


class _Places:
    """The pixels along an axis that a place has a share of."""

    def __init__(self, c: Composition, at: ir.Value, size: int, mode: str, padding: str, aligned: bool) -> None:
        self.c, self.size, self.mode, self.padding, self.aligned = c, size, mode, padding, aligned
        at = c.add("Round", [at]) if mode == "nearest" else at  # before it is reflected, which decides ties
        self.at = at if mode == "cubic" or padding == "zeros" else self._moved(at)

    def taps(self) -> list[tuple[ir.Value, ir.Value | None]]:
        """(pixel, its weight), both [count, 1]; a weight of None is 1."""
        c, at = self.c, self.at
        if self.mode == "nearest":
            return [self._inside(at, None)]
        first = c.add("Floor", [at])
        share = c.add("Sub", [at, first])
        if self.mode == "cubic":
            places = [c.add("Add", [first, self._number(step)]) if step else first for step in (-1, 0, 1, 2)]
            moved = places if self.padding == "zeros" else [self._moved(place) for place in places]
            return [self._inside(place, weight) for place, weight in zip(moved, self._cubic(share))]
        one = self._number(1.0)
        return [self._inside(first, c.add("Sub", [one, share])), self._inside(c.add("Add", [first, one]), share)]

    def _number(self, value: float) -> ir.Value:
        return self.c.constant(value, self.at)

    def _cubic(self, share: ir.Value) -> list[ir.Value]:
        """The weights of the pixels before, at and behind a place, by Keys' kernel: of the distance d to the pixel,
        (a + 2) d^3 - (a + 3) d^2 + 1 up to 1, and a d^3 - 5 a d^2 + 8 a d - 4 a up to 2."""
        c, a = self.c, _CUBIC
        other = c.add("Sub", [self._number(1.0), share])

        def polynomial(d: ir.Value, *factors: float) -> ir.Value:
            found = self._number(factors[0])
            for factor in factors[1:]:
                found = c.add("Mul", [found, d])
                found = c.add("Add", [found, self._number(factor)]) if factor else found
            return found

        near, far = (a + 2, -(a + 3), 0.0, 1.0), (a, -5 * a, 8 * a, -4 * a)
        distances = [c.add("Add", [each, self._number(1.0)]) for each in (share, other)]
        return [
            polynomial(distances[0], *far), polynomial(share, *near), polynomial(other, *near),
            polynomial(distances[1], *far),
        ]  # fmt: skip

    def _moved(self, at: ir.Value) -> ir.Value:
        """A place inside of the image for any place, by the padding that is not zeros."""
        c, size = self.c, self.size
        if self.padding == "reflection":
            low, span = (0.0, size - 1) if self.aligned else (-0.5, size)
            if span == 0:
                at = c.add("Mul", [at, c.constant(0.0, at)])
            else:
                at = self._reflected(at, low, span)
        return c.add("Clip", [at, c.constant(0.0, at), c.constant(size - 1, at)], shape_of(at))

    def _reflected(self, at: ir.Value, low: float, span: float) -> ir.Value:
        c = self.c

        def number(value: float) -> ir.Value:
            return c.constant(value, at)

        away = c.add("Abs", [c.add("Sub", [at, number(low)])])
        turns = c.add("Floor", [c.add("Div", [away, number(span)])])
        rest = c.add("Sub", [away, c.add("Mul", [turns, number(span)])])
        half = c.add("Mul", [turns, number(0.5)])
        odd = c.add("Mul", [c.add("Sub", [half, c.add("Floor", [half])]), number(2.0)])  # 1 where it runs backwards
        back = c.add("Mul", [odd, c.add("Sub", [number(span), c.add("Mul", [rest, number(2.0)])])])
        return c.add("Add", [c.add("Add", [rest, back]), number(low)])

    def _inside(self, pixel: ir.Value, weight: ir.Value | None) -> tuple[ir.Value, ir.Value | None]:
        """The nearest pixel of the image; one outside has weight 0 if the padding is zeros."""
        c, shape = self.c, shape_of(pixel)
        bounds = [c.constant(float(bound), pixel) for bound in (0, self.size - 1)]
        nearest = c.add("Clip", [pixel, *bounds], shape)
        if self.padding == "zeros":
            is_inside = c.cast(c.add("Equal", [pixel, nearest], shape, _truth()), pixel.dtype)
            weight = is_inside if weight is None else c.add("Mul", [weight, is_inside])
        return nearest, weight


def _truth() -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType.BOOL


REWRITTEN: Mapping[str, Rewrite] = {"GridSample": rewrite(_grid_sample)}
