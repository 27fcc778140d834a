"""Operators for fixed sizes that may work on arrays of their bounds: which extents of y follow those of arguments, and how.

Each computes every row of y, every image or every pixel from the same one of its arguments, or from a window around it. What
lies beyond the extents of arguments then only makes what lies beyond those of y. A window that reaches beyond the extents of
an image meets padding there: `margin` says how far it reaches, and what the elements there have to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedsearch.ops.layout import Layout
from schedsearch.ops.resize import ResizeParams, nearest
from schedsearch.typed import GivenParams
from schedsearch.workload import Workload


class Along(NamedTuple):
    """An extent of y along `axis` that is (times * e + plus) // over, where e is that of an argument."""

    axis: int
    times: int = 1
    plus: int = 0
    over: int = 1

    def of(self, extent: Any) -> Any:
        """Of an integer, or of an `Unknown`."""
        return (extent * self.times + self.plus) // self.over


Follows = Mapping[int, Along]  # axis of the argument -> what follows it


class Margin(NamedTuple):
    """What a window reads beyond the extents of x.

    Attributes:
        width: along each axis of x.
        value: of the elements there, as of the operator `fill_margin`.
    """

    width: tuple[int, ...]
    value: str


def margin(workload: Workload) -> Margin | None:
    """The margin that an operator reads of an x of which any extents may be below the bound; None if there is none."""
    p = workload.params
    if workload.op not in _WINDOWS or not any(p["padding"][2:]):
        return None
    lowest = workload.op == "pool2d" and p["mode"] == "max"
    x = workload.signature[0]
    width = [0] * len(x.shape)
    for letter, padding in zip("HW", p["padding"][2:]):
        width[_place(x.axes, letter)] = padding
    return Margin(tuple(width), "lowest" if lowest else "zero")


def _place(axes: str, letter: str) -> int:
    return Layout.parse(axes).axes.index(letter)


_WINDOWS = ("conv2d", "depthwise_conv2d", "pool2d")


def _images(workload: Workload, argument: str) -> Follows:
    """Each image by itself, and each pixel or window; so does an operand of the epilogue that has y's shape."""
    spec, y = next(each for each in workload.signature if each.name == argument), workload.outputs[0]
    if argument != "x":
        return _same(range(len(y.shape))) if spec.shape == y.shape and not spec.constant else {}
    found = {_place(spec.axes, "N"): Along(_place(y.axes, "N"))}
    for letter, rule in _heights_and_widths(workload).items():
        found[_place(spec.axes, letter)] = Along(_place(y.axes, letter), *rule)
    return found


def _heights_and_widths(workload: Workload) -> Mapping[str, tuple[int, int, int]]:
    """(times, plus, over) of H and W, where they may be below the bound."""
    p = workload.params
    if workload.op in _WINDOWS:
        if "x" in p.get("zero_points", ()) and any(p["padding"]):
            return {}  # padding is the zero point, which is known at call time
        if workload.op == "pool2d" and (p["ceil_mode"] or (p["mode"] == "average" and _counts_pixels(p))):
            return {}
        found = {}
        for axis, (letter, taps) in enumerate((("H", p["r"]), ("W", p["s"]))):
            stride, reach = p["stride"][axis], (taps - 1) * p["dilation"][axis] + 1
            found[letter] = (1, p["padding"][axis] + p["padding"][axis + 2] - reach + stride, stride)
        return found
    if workload.op == "resize":
        return enlarged(ResizeParams.of(p))
    return {"H": (p["block"], 0, 1), "W": (p["block"], 0, 1)}  # depth_to_space


def _counts_pixels(p: GivenParams) -> bool:
    """An average divides by how many pixels of a window are in the image."""
    return any(p["padding"]) and not p["count_include_pad"]


def enlarged(p: ResizeParams) -> Mapping[str, tuple[int, int, int]]:
    """(times, plus, over) of H and W of a resize where each pixel becomes several, whatever the extents; otherwise none."""
    found = {}
    for axis, (letter, size, out) in enumerate((("H", p.h, p.oh), ("W", p.w, p.ow))):
        if p.mode != "nearest" or out % size or p.coordinates == "align_corners":
            return {}
        times, line = out // size, nearest(p, axis)
        places = [(line.factor * place + line.shift) // line.divisor for place in range(2 * times)]
        if line.divisor != times * line.factor or places != [place // times for place in range(2 * times)]:
            return {}
        found[letter] = (times, 0, 1)
    return found


def _same(axes: Any) -> Follows:
    return {axis: Along(axis) for axis in axes}


def _rows(workload: Workload, argument: str) -> Follows:
    """Each row of a matrix by itself; so does an operand of the epilogue that has y's shape."""
    spec = next(each for each in workload.signature if each.name == argument)
    return _same((0,)) if argument == "x" or (spec.shape == workload.outputs[0].shape and not spec.constant) else {}


def _permuted(workload: Workload, argument: str) -> Follows:
    return {axis: Along(to) for to, axis in enumerate(workload.params["permutation"])}


def _along(workload: Workload, argument: str) -> Follows:
    """Numbers along one axis together."""
    rank, axis = len(workload.outputs[0].shape), workload.params["axis"]
    return _same(each for each in range(rank) if each != axis % rank)


def _rows_of_norms(workload: Workload, argument: str) -> Follows:
    """Axes before those of a row."""
    p = workload.params
    return _same(range(p["axis"] % len(p["x"]))) if argument == "x" else {}


def _whole(workload: Workload, argument: str) -> Follows:
    """Axes of which a slice takes all."""
    x, y = workload.signature[0].shape, workload.outputs[0].shape
    strides = workload.params["strides"]
    return _same(axis for axis, stride in enumerate(strides) if stride == 1 and x[axis] == y[axis])


def _unpadded(workload: Workload, argument: str) -> Follows:
    """Axes that get no elements and lose none."""
    p = workload.params
    return _same(axis for axis in range(len(p["x"])) if not p["before"][axis] and not p["after"][axis])


def _layouts(workload: Workload, argument: str) -> Follows:
    """Axes that are not split stay axes."""
    source, to = (Layout.parse(workload.params[name]) for name in ("layout", "to"))
    whole = [axis for axis in source.axes if source.block(axis) == to.block(axis) == 1]
    return {source.axes.index(axis): Along(to.axes.index(axis)) for axis in whole}


def _batch(workload: Workload, argument: str) -> Follows:
    """Each row of a batch by itself."""
    return {0: Along(0)} if argument == "x" else {}


# (workload, argument) -> axis of the argument -> what follows it
FOLLOWS: Mapping[str, Callable[[Workload, str], Follows]] = {
    "conv2d": _images,
    "depthwise_conv2d": _images,
    "depthwise_conv1d": _batch,
    "dense": _rows,
    "pool2d": _images,
    "resize": _images,
    "depth_to_space": _images,
    "space_to_depth": _rows,
    "layout_transform": _layouts,
    "strided_slice": _whole,
    "pad": _unpadded,
    "softmax": _along,
    "concat": _along,
    "layer_norm": _rows_of_norms,
    "transpose": _permuted,
}
