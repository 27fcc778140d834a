"""Reductions over any axes as pools of whole images.

The array is viewed as images: what is reduced is their height, the axes in front of it are the batch and those behind it the
channels, so that rows of channels stay contiguous. If axes that are reduced do not stand side by side, they are moved to the
end first. A sum is an average times the number of its elements; a minimum is the negative of a maximum; the others are
element-wise nodes before and behind a sum. In float16 squares are rounded to float16: those beyond 65504 are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedsearch.network.chain import Read
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, extents_of, inputs_of, is_given, name_of
from schedsearch.network.new_nodes import constant, replace

if TYPE_CHECKING:
    import onnx_ir as ir

_POOLS = {"ReduceMax": "GlobalMaxPool", "ReduceMin": "GlobalMaxPool"}  # others are averages
_BEFORE = {"ReduceMin": "Neg", "ReduceL1": "Abs"}
_BEHIND = {"ReduceMin": "Neg", "ReduceL2": "Sqrt", "ReduceLogSum": "Log"}
_SQUARED = ("ReduceL2", "ReduceSumSquare")
REDUCED = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum")
_LARGE = 1 << 15  # a factor that float16 has
_MOST_AT_ONCE = 256  # numbers of a sum


class Reduction(NamedTuple):
    """What a node reduces.

    Attributes:
        shape: of x.
        axes: sorted, from 0.
    """

    x: ir.Value
    shape: list[int]
    axes: list[int]


def reduction_of(node: ir.Node) -> Reduction | str:
    """What a node reduces, or why it cannot become a pool."""
    (x,) = inputs_of(node, 1)
    if x.shape is None or not x.shape.is_static():
        return "has an input of unknown extents"
    shape, axes = extents_of(node, x), reduced_axes(node)
    if isinstance(axes, str):
        return axes
    if dtype_of(x) not in FLOATS:
        return f"reads {dtype_of(x) or 'an unknown dtype'}; allowed: {', '.join(FLOATS)}"
    if not math.prod(shape):
        return "reads an array without elements; allowed: at least one"
    return Reduction(x, shape, axes)


def reduced_axes(node: ir.Node) -> list[int] | str:
    """The axes that a node reduces, sorted, from 0; or what is wrong with them."""
    (x,) = inputs_of(node, 1)
    axes = constant_input(node, 1)
    if axes is None and is_given(node, 1):
        return "has axes that are computed; allowed: constants"
    rank = 0 if x.shape is None else len(x.shape)
    given = [int(axis) for axis in (node.attributes.get_ints("axes", ()) if axes is None else axes.ravel())]
    if strange := [axis for axis in given if not -rank <= axis < rank]:
        return f"has axis {strange[0]}, but {rank} axes; allowed: {-rank} to {rank - 1}"
    if not given and not node.attributes.get_int("noop_with_empty_axes", 0):
        given = list(range(rank))
    return sorted({axis % rank for axis in given})


def rewrite_reduction(model: ir.Model, node: ir.Node) -> None:
    """Puts a pool of whole images, and what is before and behind it, in the place of a reduction."""
    found = reduction_of(node)
    if isinstance(found, str):
        return
    _, shape, axes = found
    if node.op_type == "ReduceMean" and len(shape) == 4 and axes == [2, 3]:
        return  # a pool already
    steps = _Steps(model, node, found)
    op = node.op_type
    if op in _BEFORE:
        steps.add(_BEFORE[op], shape)
    if op in _SQUARED:
        steps.add("Mul", shape, [steps.value])
    count = math.prod(shape[axis] for axis in axes)
    if count > 1:
        steps.pool(_POOLS.get(op, "GlobalAveragePool"), axes)
        if op not in ("ReduceMean", *_POOLS):
            for factor in (count,) if count <= _LARGE else (count / _LARGE, _LARGE):
                steps.add("Mul", steps.shape, [steps.number(factor)])
    if op in _BEHIND:
        steps.add(_BEHIND[op], steps.shape)
    keeps = node.attributes.get_int("keepdims", 1)
    out = [1 if axis in axes else extent for axis, extent in enumerate(shape) if keeps or axis not in axes]
    steps.reshape(out)
    replace(model, node, steps.nodes)


class _Steps:
    """Nodes one behind another, which take the place of one.

    Attributes:
        value, shape: of the last one.
    """

    def __init__(self, model: ir.Model, node: ir.Node, reduction: Reduction) -> None:
        self.model, self.node = model, node
        self.x = self.value = reduction.x
        self.shape = reduction.shape
        self.nodes: list[ir.Node] = []

    def add(
        self, op: str, shape: Sequence[int], others: Sequence[ir.Value] = (), attributes: Sequence[ir.Attr] = ()
    ) -> None:
        import onnx_ir as ir

        value = ir.Value(
            name=f"{self.node.outputs[0].name}.{len(self.nodes)}", type=self.x.type, shape=ir.Shape(list(shape))
        )
        self.nodes.append(ir.Node("", op, [self.value, *others], list(attributes), outputs=[value], name=self.node.name))
        self.value, self.shape = value, list(shape)

    def number(self, number: float) -> ir.Value:
        assert self.x.dtype is not None
        return constant(self.model, f"{self.node.outputs[0].name}.factor", np.array(number).astype(self.x.dtype.numpy()))

    def reshape(self, shape: Sequence[int]) -> None:
        target = constant(self.model, f"{self.node.outputs[0].name}.shape", np.array(shape, np.int64))
        self.add("Reshape", shape, [target])

    def transpose(self, permutation: Sequence[int]) -> None:
        import onnx_ir as ir

        self.add("Transpose", [self.shape[axis] for axis in permutation], (), [ir.AttrInt64s("perm", list(permutation))])

    def pool(self, op: str, axes: Sequence[int]) -> None:
        """Views the array as images whose pixels are reduced, and reduces them, many in two stages."""
        shape = self.shape
        if any(shape[axis] > 1 for axis in range(axes[0], axes[-1]) if axis not in axes):  # others stand between them
            kept = [axis for axis in range(len(shape)) if axis not in axes]
            self.transpose([*kept, *axes])
            shape, axes = self.shape, range(len(kept), len(shape))
        before, behind = math.prod(shape[: axes[0]]), math.prod(shape[axes[-1] + 1 :])
        pixels = math.prod(shape[axes[0] : axes[-1] + 1])
        parts = _parts(pixels) if op == "GlobalAveragePool" else 1
        for rows, height in ((before * parts, pixels // parts), (before, parts))[: 1 + (parts > 1)]:
            if behind == 1:
                self.reshape([1, rows, height, 1])
                self.add(op, [1, rows, 1, 1])
            else:
                self.reshape([rows, height, 1, behind])
                self.transpose([0, 3, 1, 2])
                self.add(op, [rows, behind, 1, 1])


def _parts(pixels: int) -> int:
    """In how many equal parts so many pixels are summed on their own first: the rounding errors of a sum of float32 numbers
    grow with their number. About as many as pixels of each."""
    if pixels <= _MOST_AT_ONCE:
        return 1
    return next(parts for parts in range(math.isqrt(pixels), 0, -1) if pixels % parts == 0)


def rewrite_log_sum_exp(model: ir.Model, node: ir.Node) -> None:
    """log(sum(exp(x - m))) + m with the largest x as m, so that nothing overflows; an infinite x has a finite m."""
    import onnx_ir as ir

    found = reduction_of(node)
    if isinstance(found, str):
        return
    x, shape, axes = found
    ones = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    steps, places = _Steps(model, node, found), constant(model, f"{node.outputs[0].name}.axes", np.array(axes, np.int64))
    noop = [ir.AttrInt64("noop_with_empty_axes", 1)]
    steps.add("ReduceMax", ones, [places], noop)
    assert x.dtype is not None
    steps.add("Clip", ones, [steps.number(float(x.dtype.min)), steps.number(float(x.dtype.max))])
    largest = steps.value
    steps.value = x
    steps.add("Sub", shape, [largest])
    steps.add("Exp", shape)
    steps.add("ReduceSum", ones, [places], noop)
    steps.add("Log", ones)
    steps.add("Add", ones, [largest])
    if not node.attributes.get_int("keepdims", 1):
        steps.reshape([extent for axis, extent in enumerate(shape) if axis not in axes])
    replace(model, node, steps.nodes)
    for each in steps.nodes:
        if each.op_type in REDUCED:
            rewrite_reduction(model, each)


def _left(node: ir.Node, taken: set[ir.Node]) -> str:
    """Of a reduction that did not become a pool."""
    return f"{name_of(node)} {reduction_of(node)}"


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = {
    **dict.fromkeys(REDUCED, rewrite_reduction),
    "ReduceLogSumExp": rewrite_log_sum_exp,
}
REDUCTIONS: Mapping[str, Read] = dict.fromkeys((op for op in REWRITTEN if op != "ReduceMean"), _left)
