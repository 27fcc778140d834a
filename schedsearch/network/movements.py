"""Nodes that only move elements: depth_to_space, transposes, slices, concatenations and pads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.errors import WorkloadError
from schedsearch.network import shuffles
from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions.pads import Pads, fill_of
from schedsearch.network.convolutions import block_of
from schedsearch.network.facts import constant_input, dtype_of, extents_of, inputs_of, is_given, name_of
from schedsearch.network.indexing import operand
from schedsearch.network.quantised import same_scale
from schedsearch.typed import ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir


def _blocks(op: str) -> Read:
    def read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
        (x,) = inputs_of(node, 1)
        n, c, h, w = extents_of(node, x)
        return _chain(node, op, {"n": n, "c": c, "h": h, "w": w, "dtype": dtype_of(x), **block_of(node)}, taken)

    return read


def _transpose(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    (x,) = inputs_of(node, 1)
    if (shuffle := shuffles.alone(node, taken)) is not None:
        return shuffle
    extents = extents_of(node, x)
    permutation = list(node.attributes.get_ints("perm", tuple(reversed(range(len(extents))))))
    return _chain(node, "transpose", {"x": extents, "permutation": permutation, "dtype": dtype_of(x)}, taken)


def _slice(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    (x,) = inputs_of(node, 1)
    extents = extents_of(node, x)
    found: dict[str, list[int]] = {}
    for place, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        numbers = _numbers(node, place, name)
        if isinstance(numbers, str):
            return numbers
        found[name] = numbers
    rank = len(extents)
    axes = [axis % rank for axis in found["axes"]] or list(range(len(found["starts"])))
    begin, end, strides = [0] * rank, list(extents), [1] * rank
    for axis, start, stop, step in zip(axes, found["starts"], found["ends"], found["steps"] or [1] * len(axes)):
        chosen = _chosen(extents[axis], start, stop, step)
        begin[axis], strides[axis] = chosen.start, chosen.step
        end[axis] = chosen.stop if chosen.stop >= 0 else -extents[axis] - 1
    params = {"x": extents, "begin": begin, "end": end, "strides": strides, "dtype": dtype_of(x)}
    return _chain(node, "strided_slice", params, taken)


def _chosen(extent: int, start: int, stop: int, step: int) -> range:
    """The positions of a Slice along an axis. A start before the first position counts as the first one, also backwards,
    where NumPy takes nothing."""
    if step < 0 and start < -extent:
        start = 0
    return range(extent)[slice(start, stop, step)] or range(0)


def _concat(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    values = inputs_of(node, len(node.inputs))
    if (shuffle := shuffles.concatenated(node, taken)) is not None:
        return shuffle
    shapes = [extents_of(node, value) for value in values]
    axis = node.attributes.get_int("axis", 1) % len(shapes[0])
    return _chain(node, "concat", {"x": shapes, "axis": axis, "dtype": dtype_of(node.outputs[0])}, taken)


def _pad(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """Pads with a constant number; others have become gathers, if they are possible."""
    (x,) = inputs_of(node, 1)
    pads, fill = Pads.of(node), fill_of(node)
    if isinstance(pads, str):
        return f"{name_of(node)} {pads}"
    if fill is None:
        return f"{name_of(node)} pads with a number that is computed; allowed: a constant"
    params = {"x": pads.shape, "before": pads.before, "after": pads.after, "value": fill, "dtype": dtype_of(x)}
    return _chain(node, "pad", params, taken)


MOVEMENTS: Mapping[str, Read] = {
    "DepthToSpace": _blocks("depth_to_space"),
    "SpaceToDepth": _blocks("space_to_depth"),
    "Transpose": _transpose,
    "Slice": _slice,
    "Concat": _concat,
    "Pad": _pad,
}


def _chain(node: ir.Node, op: str, params: ParamsByName, taken: set[ir.Node]) -> Chain | str:
    """A chain of one node; why not if the operator does not do it. It moves 8-bit numbers if it stands between conversions
    with the same scale."""
    count = len(node.inputs) if op == "concat" else 1
    values = inputs_of(node, count)
    names = [f"x{number}" for number in range(count)] if op == "concat" else ["x"]
    chain = Chain(op, params, [node], node.outputs[0], {name: operand(value) for name, value in zip(names, values)})
    follower = chain.next(taken)
    whole = same_scale(values, follower) if op != "pad" else None
    if whole and follower is not None:
        chain.params["dtype"] = whole[0].dtype
        chain.append(follower, arguments={name: each.value for name, each in zip(names, whole)})
    try:
        Workload(op, chain.params)
    except WorkloadError as error:
        return f"{name_of(node)}: {error}"
    return chain


def _numbers(node: ir.Node, place: int, attribute: str) -> list[int] | str:
    """Integers of an input, or of the attribute of older opsets; empty if there are none."""
    if is_given(node, place):
        found = constant_input(node, place)
        if found is None:
            return f"{name_of(node)} has {attribute} that are computed; allowed: constants"
        return [int(each) for each in found.ravel()]
    return list(node.attributes.get_ints(attribute, ()))
