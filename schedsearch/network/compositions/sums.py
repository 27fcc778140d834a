"""Running sums and products, and reductions that pools do not compute: those of integers, and products.

An element-wise kernel reads up to 16 slices of one array where they are. So an axis of n numbers takes about log16(n) steps:

- A running sum adds the 16 windows that end at each place, then windows that are 16 times as far apart. What lies before the
  first number is 0, so that an infinity spreads to the sums behind it only.
- A reduction adds 16 parts of the axis to one another. What is left over stands behind the sums.

Sums of float16 and bfloat16 are kept in float32 until the end, those of a mean of integers in int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.element_texts import WHOLES
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, name_of
from schedsearch.network.reductions import REDUCED, reduced_axes
from schedsearch.network.reductions import REWRITTEN as POOLED

if TYPE_CHECKING:
    import onnx_ir as ir

_PARTS = 16  # inputs of an element-wise kernel
_OPERATORS = {
    "ReduceSum": "Sum", "ReduceMean": "Sum", "ReduceL1": "Sum", "ReduceSumSquare": "Sum", "ReduceProd": "Mul",
    "ReduceMax": "Max", "ReduceMin": "Min",
}  # fmt: skip


# --- Running sums -------------------------------------------------------------------------------------------------------
def _running(op: str, neutral: float) -> Callable[[Any, Any], None]:
    def rewrite(model: ir.Model, node: ir.Node) -> None:
        x, shape = node.inputs[0], extents(node.inputs[0])
        if _running_problem(node) or x is None or shape is None:
            return
        axis = _axis(node, len(shape))
        steps = Steps(model, node)
        value = _in_float32(steps, x)
        backwards = bool(node.attributes.get_int("reverse", 0))
        if node.attributes.get_int("exclusive", 0):
            value = _shifted(steps, value, shape, axis, [1], neutral, backwards)[0]
        distance = 1
        while distance < shape[axis]:
            count = min(_PARTS, -(-shape[axis] // distance))
            distances = [distance * place for place in range(count)]
            windows = _shifted(steps, value, shape, axis, distances, neutral, backwards)
            value = steps.add(op, windows, shape, like=value)
            distance *= count
        steps.last = steps.cast(value, node.outputs[0].dtype)
        steps.replace()

    return rewrite


def _shifted(
    steps: Steps, x: ir.Value, shape: list[int], axis: int, distances: Sequence[int], neutral: float, backwards: bool
) -> list[ir.Value]:
    """x moved along an axis by some distances, with neutral numbers where nothing is moved to."""
    rank, most, extent = len(shape), max(distances), shape[axis]
    pads = [0] * (2 * rank)
    pads[axis + (rank if backwards else 0)] = most
    padded = [*shape[:axis], extent + most, *shape[axis + 1 :]]
    assert x.dtype is not None
    fill = np.array(neutral).astype(x.dtype.numpy())
    whole = steps.add("Pad", [x, np.array(pads, np.int64), fill], padded, like=x, mode="constant")
    starts = [each if backwards else most - each for each in distances]
    return [_cut(steps, whole, shape, axis, start, extent) for start in starts]


def _cut(steps: Steps, x: ir.Value, shape: Sequence[int], axis: int, start: int, count: int) -> ir.Value:
    bounds = [np.array([number], np.int64) for number in (start, start + count, axis)]
    cut = [*shape[:axis], count, *shape[axis + 1 :]]
    return steps.add("Slice", [x, *bounds], cut, like=x)


def _axis(node: ir.Node, rank: int) -> int:
    given = constant_input(node, 1)
    return 0 if given is None or not rank else int(given.flat[0]) % rank


def _running_problem(node: ir.Node) -> str:
    """Why a node is not rewritten; empty if it is."""
    x, shape, axis = node.inputs[0], extents(node.inputs[0]), constant_input(node, 1)
    if x is None or shape is None:
        return f"{name_of(node)} has an input of unknown extents"
    if axis is None:
        return f"{name_of(node)} has an axis that is computed; allowed: a constant"
    if dtype_of(x) not in (*FLOATS, *WHOLES):
        return f"{name_of(node)} reads {dtype_of(x) or 'an unknown dtype'}; allowed: {', '.join((*FLOATS, *WHOLES))}"
    if not shape or not math.prod(shape):
        return f"{name_of(node)} reads {'a scalar' if not shape else 'an array without elements'}; allowed: one or more axes"
    return ""


# --- Reductions ---------------------------------------------------------------------------------------------------------
def _reduction(model: ir.Model, node: ir.Node) -> None:
    """Of integers, and products; others are pools."""
    import onnx_ir as ir

    x, shape = node.inputs[0], extents(node.inputs[0])
    if x is None or (dtype_of(x) in FLOATS and node.op_type != "ReduceProd"):
        POOLED[node.op_type](model, node)
        return
    axes = reduced_axes(node)
    if shape is None or isinstance(axes, str) or _reduction_problem(node):
        return
    steps = Steps(model, node)
    value = _in_float32(steps, x)
    if node.op_type == "ReduceMean":  # it fits where the sum of 32-bit integers does not
        value = steps.cast(value, ir.DataType.INT64)
    if node.op_type == "ReduceL1":
        value = steps.add("Abs", [value], shape, like=value)
    elif node.op_type == "ReduceSumSquare":
        value = steps.add("Mul", [value, value], shape, like=value)
    sizes = list(shape)
    for first, last in _groups(axes):
        before, behind = math.prod(sizes[:first]), math.prod(sizes[last + 1 :])
        value = steps.reshape(value, [before, math.prod(sizes[first : last + 1]), behind])
        value = _folded(steps, _OPERATORS[node.op_type], value)
        sizes[first : last + 1] = [1] * (last + 1 - first)
    if node.op_type == "ReduceMean":
        count = math.prod(shape[axis] for axis in axes)
        value = steps.add("Div", [value, count], extents(value) or [], like=value)
    kept = node.attributes.get_int("keepdims", 1)
    made = [1 if axis in axes else extent for axis, extent in enumerate(shape) if kept or axis not in axes]
    steps.last = steps.cast(steps.reshape(value, made), node.outputs[0].dtype)
    steps.replace()


def _folded(steps: Steps, op: str, x: ir.Value) -> ir.Value:
    """The middle one of three axes becomes one number."""
    shape = extents(x)
    assert shape is not None
    while (extent := shape[1]) > 1:
        parts = next((count for count in range(min(_PARTS, extent), 3, -1) if extent % count == 0), min(_PARTS, extent))
        size = extent // parts
        cuts = [_cut(steps, x, shape, 1, place * size, size) for place in range(parts)]
        made = [shape[0], size, shape[2]]
        folded = steps.add(op, cuts, made, like=x)
        if rest := extent - parts * size:
            left = _cut(steps, x, shape, 1, parts * size, rest)
            made[1] += rest
            folded = steps.add("Concat", [folded, left], made, like=x, axis=1)
        x, shape = folded, made
    return x


def _groups(axes: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of axes that follow one another."""
    found: list[tuple[int, int]] = []
    for axis in axes:
        if found and found[-1][1] == axis - 1:
            found[-1] = (found[-1][0], axis)
        else:
            found.append((axis, axis))
    return found


def _reduction_problem(node: ir.Node) -> str:
    """Why a reduction of integers or a product is not rewritten; empty if it is."""
    x, shape, axes = node.inputs[0], extents(node.inputs[0]), reduced_axes(node)
    allowed = (*FLOATS, *WHOLES) if node.op_type in _OPERATORS else FLOATS
    if x is None or shape is None:
        return "has an input of unknown extents"
    if isinstance(axes, str):
        return axes
    if dtype_of(x) not in allowed:
        return f"reads {dtype_of(x) or 'an unknown dtype'}; allowed: {', '.join(allowed)}"
    return "" if math.prod(shape) else "reads an array without elements; allowed: at least one"


# --- Both ---------------------------------------------------------------------------------------------------------------
def _in_float32(steps: Steps, x: ir.Value) -> ir.Value:
    """Short floats as float32, and others as they are."""
    return steps.in_float32(x) if dtype_of(x) in FLOATS[:2] else x


def _left(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    return _running_problem(node)


def reduction_left(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    return f"{name_of(node)} {_reduction_problem(node)}"


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {
    **POOLED,
    **dict.fromkeys((*REDUCED, "ReduceProd"), _reduction),
    "CumSum": _running("Sum", 0.0),
    "CumProd": _running("Mul", 1.0),
}
LEFT: Mapping[str, Read] = {"CumSum": _left, "CumProd": _left, "ReduceProd": reduction_left}
