"""Resizes that the operator `resize` does not compute: other axes, cubic, antialias, regions, symmetric coordinates.

Along each axis a position of the result is a sum of a few pixels with weights. Pixels and weights are constant tables: a
Gather moves the first pixels of all positions, then the second ones, and so on, and a chain of element-wise nodes reads
these as slices and adds them with their weights, in float32. `nearest` is the Gather alone. Coordinates are exact fractions.

Source: ONNX, Resize; Keys, "Cubic convolution interpolation for digital image processing", 1981.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, is_given, name_of
from schedsearch.network.others import RESIZES
from schedsearch.ops.resize import as_float32
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_TERMS = 7  # of one chain: each is two of its inputs
_HALF = Fraction(1, 2)
_COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric", "align_corners",
                "tf_crop_and_resize")  # fmt: skip


@dataclass(frozen=True)
class _Axis:
    """What a Resize does along one axis.

    Attributes:
        size, out: pixels before and after.
        scale: of coordinates.
        start, end: of the region, as a share of the axis.
    """

    axis: int
    size: int
    out: int
    scale: Fraction
    start: Fraction = Fraction(0)
    end: Fraction = Fraction(1)

    @property
    def is_kept(self) -> bool:
        return self.size == self.out and self.scale == 1 and self.start == 0 and self.end == 1

    def coordinate(self, mode: str, position: int) -> Fraction:
        """Where a position of the result lies, in pixels."""
        length = self.scale * self.size
        if mode == "align_corners":
            return Fraction(0) if self.out == 1 else Fraction(position * (self.size - 1), self.out - 1)
        if mode == "asymmetric":
            return position / self.scale
        if mode == "tf_crop_and_resize":
            share = (self.start + self.end) / 2
            if self.out > 1:
                share = self.start + position * (self.end - self.start) / (self.out - 1)
            return share * (self.size - 1)
        if mode == "pytorch_half_pixel" and self.out == 1:
            return Fraction(0)
        centred = (position + _HALF) / self.scale - _HALF
        return centred + (Fraction(self.size) / 2) * (1 - self.out / length) if mode == "half_pixel_symmetric" else centred

    def outside(self) -> list[bool]:
        """Positions of a region that lie beyond the axis."""
        at = (self.coordinate("tf_crop_and_resize", position) for position in range(self.out))
        return [not 0 <= each <= self.size - 1 for each in at]


@dataclass(frozen=True)
class _Kind:
    """How a Resize computes, by its attributes."""

    mode: str
    coordinates: str
    rounding: str
    cubic: float
    antialias: bool
    exclude_outside: bool
    extrapolated: float

    @classmethod
    def of(cls, node: ir.Node) -> _Kind:
        read = node.attributes
        old = node.op_type == "Upsample" or len(node.inputs) == 2
        mode = read.get_string("mode", "nearest")
        return cls(
            {"bilinear": "linear"}.get(mode, mode),
            "asymmetric" if old else read.get_string("coordinate_transformation_mode", "half_pixel"),
            "floor" if old else read.get_string("nearest_mode", "round_prefer_floor"),
            read.get_float("cubic_coeff_a", -0.75),
            bool(read.get_int("antialias", 0)),
            bool(read.get_int("exclude_outside", 0)),
            read.get_float("extrapolation_value", 0.0),
        )

    def nearest(self, at: Fraction) -> int:
        return {
            "floor": math.floor(at),
            "ceil": math.ceil(at),
            "round_prefer_floor": math.ceil(at - _HALF),
            "round_prefer_ceil": math.floor(at + _HALF),
        }[self.rounding]

    def taps(self, axis: _Axis, position: int) -> tuple[list[int], list[float]]:
        """The pixels of a position, some of them beyond the image, and their weights."""
        at = axis.coordinate(self.coordinates, position)
        if self.mode == "nearest":
            return [self.nearest(at)], [1.0]
        first, shrunk = math.ceil(at) - 1, min(axis.scale, Fraction(1)) if self.antialias else Fraction(1)
        reach = math.ceil((1 if self.mode == "linear" else 2) / shrunk)
        pixels = list(range(first - reach + 1, first + reach + 1))
        weights = [self.weight(float((pixel - at) * shrunk)) for pixel in pixels]
        if self.exclude_outside:
            weights = [weight if 0 <= pixel < axis.size else 0.0 for pixel, weight in zip(pixels, weights)]
        total = sum(weights)
        return pixels, [weight / total for weight in weights]

    def weight(self, distance: float) -> float:
        x, a = abs(distance), self.cubic
        if self.mode == "linear":
            return max(1 - x, 0.0)
        if x <= 1:
            return ((a + 2) * x - (a + 3)) * x * x + 1
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def resize_problem(node: ir.Node) -> str:
    """Why no composition computes a Resize; empty if one does."""
    found = _axes_of(node)
    if isinstance(found, str):
        return found
    kind, x = _Kind.of(node), node.inputs[0]
    if kind.coordinates not in _COORDINATES:
        return f"has coordinates {kind.coordinates}; allowed: {', '.join(_COORDINATES)}"
    if kind.mode not in ("nearest", "linear", "cubic"):
        return f"is {kind.mode}; allowed: nearest, linear, cubic"
    if x is not None and kind.mode != "nearest" and dtype_of(x) not in FLOATS:
        return f"interpolates {dtype_of(x) or 'an unknown dtype'}, which runtimes round in different ways; allowed: nearest"
    if node.op_type == "Upsample" or len(node.inputs) == 2:
        scales = [axis.scale for axis in found]
        if kind.mode == "nearest" and min(scales, default=1) < 1:
            return "shrinks an image by opset 10, of which runtimes take different pixels; use Resize of opset 11"
    if kind.coordinates == "align_corners" and any(axis.scale * axis.size != axis.out for axis in found):
        return "has align_corners and scales that give no whole number of pixels; give sizes instead"
    return ""


def _axes_of(node: ir.Node) -> list[_Axis] | str:
    """The axes that a Resize changes."""
    shape, out, read = extents(node.inputs[0]), extents(node.outputs[0]), node.attributes
    if shape is None or out is None or not math.prod(shape) or not math.prod(out):
        return "has extents that are not known or 0"
    rank = len(shape)
    old = node.op_type == "Upsample" or len(node.inputs) == 2
    axes = [axis % rank for axis in read.get_ints("axes", range(rank))]
    scales = constant_input(node, 1 if old else 2)
    if scales is None and "scales" in read:  # opset 7 and 8
        scales = np.array(read.get_floats("scales"))
    if scales is not None and scales.size == len(axes):
        found = {axis: Fraction(as_float32(float(scale))) for axis, scale in zip(axes, scales.ravel())}
    elif is_given(node, 3):
        found = {axis: Fraction(out[axis], shape[axis]) for axis in axes}
        if read.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
            found = _one_scale(node, shape, axes) or found
    else:
        return "has scales that are computed; allowed: constants"
    region = constant_input(node, 1) if not old and len(node.inputs) > 1 else None
    starts, ends = dict.fromkeys(axes, Fraction(0)), dict.fromkeys(axes, Fraction(1))
    if read.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        if region is None or region.size != 2 * len(axes):
            return "has a region that is computed, or of another length than twice its axes; allowed: a constant"
        numbers = [Fraction(float(number)) for number in region.ravel()]
        starts, ends = dict(zip(axes, numbers)), dict(zip(axes, numbers[len(axes) :]))
    every = [_Axis(axis, shape[axis], out[axis], found[axis], starts[axis], ends[axis]) for axis in sorted(axes)]
    return [axis for axis in every if not axis.is_kept]


def _one_scale(node: ir.Node, shape: Sequence[int], axes: Sequence[int]) -> dict[int, Fraction] | None:
    """The scale of all axes, where sizes are only bounds: the least or largest that the sizes stand for."""
    sizes = constant_input(node, 3)
    if sizes is None:
        return None
    scales = [Fraction(int(size), shape[axis]) for size, axis in zip(sizes.ravel(), axes)]
    chosen = min(scales) if node.attributes.get_string("keep_aspect_ratio_policy", "") == "not_larger" else max(scales)
    return dict.fromkeys(axes, chosen)


# --- Nodes --------------------------------------------------------------------------------------------------------------
def rewrite_resize(model: ir.Model, node: ir.Node) -> None:
    """Replaces a Resize or Upsample that the operator `resize` does not compute."""
    if resize_problem(node) or isinstance(RESIZES[node.op_type](node, set()), Chain):
        return
    axes, kind, x = _axes_of(node), _Kind.of(node), node.inputs[0]
    assert x is not None and not isinstance(axes, str)
    steps = Steps(model, node)
    for axis in axes:
        table = [kind.taps(axis, position) for position in range(axis.out)]
        pixels = np.array([each for each, _ in table]).clip(0, axis.size - 1)
        weights = np.array([each for _, each in table])
        if kind.coordinates == "tf_crop_and_resize" and any(outside := axis.outside()):
            x = _with_one_more(steps, x, axis.axis, kind.extrapolated)
            pixels[outside, 0], weights[outside] = axis.size, [1.0, *[0.0] * (weights.shape[1] - 1)]
        x = _resampled(steps, x, axis.axis, pixels, weights)
    if steps.last is None:
        steps.add("Identity", [x], extents(x) or [])
    steps.cast(x, node.outputs[0].dtype)
    steps.replace()


def _resampled(steps: Steps, x: ir.Value, axis: int, pixels: Array, weights: Array) -> ir.Value:
    """x with other pixels along an axis, each a sum of others; of float32 if there is more than one.

    Args:
        pixels, weights: (pixels of the result, terms).
    """
    shape = extents(x)
    assert shape is not None
    used = [term for term in range(weights.shape[1]) if weights[:, term].any()]
    pixels, weights = pixels[:, used], weights[:, used]
    count, terms = pixels.shape
    gathered = [*shape[:axis], count * terms, *shape[axis + 1 :]]
    moved = steps.add("Gather", [x, pixels.T.ravel().astype(np.int64)], gathered, like=x, axis=axis)
    if terms == 1 and (weights == 1).all():
        return moved
    made = [*shape[:axis], count, *shape[axis + 1 :]]
    along = [count if place == axis else 1 for place in range(len(shape))]
    total: ir.Value | None = None
    for term in range(terms):
        ends = [np.array([number], np.int64) for number in (term * count, (term + 1) * count, axis)]
        part = steps.in_float32(steps.add("Slice", [moved, *ends], made, like=x) if terms > 1 else moved)
        weighted = steps.add("Mul", [part, weights[:, term].astype(np.float32).reshape(along)], made, like=part)
        total = weighted if total is None else steps.add("Add", [total, weighted], made, like=part)
    assert total is not None
    return total


def _with_one_more(steps: Steps, x: ir.Value, axis: int, number: float) -> ir.Value:
    """x with one more pixel at the end of an axis, for all positions that lie outside."""
    shape = extents(x)
    assert shape is not None
    pads = [0] * 2 * len(shape)
    pads[len(shape) + axis] = 1
    made = [*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]]
    return steps.add("Pad", [x, np.array(pads, np.int64), number], made, like=x)


def _read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """The operator, or why neither it nor a composition computes a Resize."""
    found = RESIZES[node.op_type](node, taken)
    if isinstance(found, Chain):
        return found
    problem = resize_problem(node)
    return f"{name_of(node)} {problem}" if problem else found


RESIZED: Mapping[str, Read] = dict.fromkeys(RESIZES, _read)
REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = dict.fromkeys(("Resize", "Upsample"), rewrite_resize)
