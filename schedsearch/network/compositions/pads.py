"""Pads with what stands at other places of the array.

What such a pad writes along an axis are pixels of the array: a Gather of all of them by a constant table, one axis after the
other. Along a long axis only the margins are gathered, and concatenated with the array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.facts import constant_input, is_given, number_of, optional_input
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_LONG = 1024  # pixels along an axis that are not worth an index each
_SHARE = 16  # so many times as many pixels as margins


@dataclass(frozen=True)
class Pads:
    """What a Pad does along each axis.

    Attributes:
        shape: of its input.
        before, after: pixels that are added at both ends; negative: that are cut off.
    """

    mode: str
    shape: list[int]
    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, node: ir.Node) -> Pads | str:
        """Of a node, or why it has none that are known and possible."""
        shape = extents(node.inputs[0])
        if shape is None:
            return "has an input of unknown extents"
        given, axes = constant_input(node, 1), constant_input(node, 3)
        if (given is None and is_given(node, 1)) or (axes is None and is_given(node, 3)):
            return "has pads that are computed; allowed: constants"
        pads = [int(pad) for pad in (node.attributes.get_ints("pads", ()) if given is None else given.ravel())]
        rank = len(shape)
        along = list(range(rank)) if axes is None else [int(axis) % rank for axis in axes.ravel()]
        if len(pads) != 2 * len(along):
            return f"has {len(pads)} pads for {len(along)} axes; allowed: {2 * len(along)}, first those in front of the axes"
        before, after = [0] * rank, [0] * rank
        for place, axis in enumerate(along):
            before[axis], after[axis] = pads[place], pads[len(along) + place]
        found = cls(node.attributes.get_string("mode", "constant"), shape, before, after)
        return found.problem() or found

    def kept(self, axis: int) -> range:
        """The pixels along an axis that are not cut off."""
        return range(max(-self.before[axis], 0), self.shape[axis] - max(-self.after[axis], 0))

    def problem(self) -> str:
        for axis, (before, after) in enumerate(zip(self.before, self.after)):
            left, most = len(self.kept(axis)), max(before, after)
            if left < 1 and (most > 0 or self.shape[axis] + before + after < 0):
                return (
                    f"cuts {-min(before, after)} of {self.shape[axis]} pixels off along axis {axis}; allowed: fewer pixels"
                )
            if self.mode == "reflect" and most >= max(left, 1):
                return (
                    f"reflects {most} pixels along axis {axis}, which has {left}; allowed: up to {left - 1}. Use "
                    "mode edge or wrap, or pad twice"
                )
        return ""

    def table(self, axis: int, places: range) -> list[int]:
        """The pixel of the array that each place of the result holds.

        Args:
            places: counted from the first pixel that is kept.
        """
        kept = self.kept(axis)
        last = len(kept) - 1
        if self.mode == "edge":
            return [kept[min(max(place, 0), last)] for place in places]
        if self.mode == "wrap":
            return [kept[place % len(kept)] for place in places]
        return [kept[last - abs(last - abs(place))] for place in places]


def rewrite_pad(model: ir.Model, node: ir.Node) -> None:
    """Replaces pads with another mode than constant, or with a computed number; a pad with a `problem` stays."""
    pads = Pads.of(node)
    x, y = node.inputs[0], extents(node.outputs[0])
    if isinstance(pads, str) or x is None or y is None:
        return
    steps = Steps(model, node)
    if pads.mode == "constant":
        value, number = optional_input(node, 2), fill_of(node)
        if number is None or not math.isfinite(number):  # else it is an operator of its own
            value = np.array(number, np.float32) if value is None else value  # before opset 11 an attribute, of floats
            padded = steps.add("Pad", [x, np.array([*pads.before, *pads.after], np.int64)], y)
            steps.add("Where", [_margins(pads, y), value, padded], y)
            steps.replace()
        return
    for axis, (before, after) in enumerate(zip(pads.before, pads.after)):
        if before or after:
            x = _padded(steps, x, pads, axis)
    if steps.last is None:
        steps.add("Identity", [x], y)
    steps.replace()


def fill_of(node: ir.Node) -> float | None:
    """The number that a Pad writes, an int of integers; None if it is computed."""
    if not is_given(node, 2):
        return float(node.attributes.get_float("value", 0.0))
    given = constant_input(node, 2)
    return int(given.flat[0]) if given is not None and given.size == 1 and given.dtype.kind in "iu" else number_of(given)


def _margins(pads: Pads, shape: Sequence[int]) -> Array:
    """Which elements of the result are not of the array."""
    found = np.ones(shape, bool)
    inside = (slice(max(first, 0), extent - max(last, 0)) for first, last, extent in zip(pads.before, pads.after, shape))
    found[tuple(inside)] = False
    return found


def _padded(steps: Steps, x: ir.Value, pads: Pads, axis: int) -> ir.Value:
    """x with the pixels of one axis."""
    shape, kept = extents(x), pads.kept(axis)
    assert shape is not None
    before, after, count = pads.before[axis], pads.after[axis], len(kept)
    margins = max(before, 0) + max(after, 0)
    if count < max(_LONG, _SHARE * margins) or count < shape[axis]:
        return _gathered(steps, x, axis, pads.table(axis, range(-max(before, 0), count + max(after, 0))))
    parts = [_gathered(steps, x, axis, pads.table(axis, range(-before, 0)))] if before > 0 else []
    parts.append(x)
    if after > 0:
        parts.append(_gathered(steps, x, axis, pads.table(axis, range(count, count + after))))
    return steps.add("Concat", parts, [*shape[:axis], count + margins, *shape[axis + 1 :]], axis=axis)


def _gathered(steps: Steps, x: ir.Value, axis: int, places: Sequence[int]) -> ir.Value:
    shape = extents(x)
    assert shape is not None
    return steps.add("Gather", [x, np.array(places, np.int64)], [*shape[:axis], len(places), *shape[axis + 1 :]], axis=axis)


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {"Pad": rewrite_pad}
