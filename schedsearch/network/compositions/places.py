"""Nodes that compare places with numbers, or choose elements by places that are known or computed.

- OneHot and Trilu compare with the numbers 0, 1, 2 ... along an axis, inside the element-wise chain that reads them.
- Tile views each axis as two, and repeats the first of them.
- ArgMax and ArgMin are TopK of one number: of equal ones the first, or the last one of the array read backwards. A NaN is
  larger than all numbers. Hardmax compares places with that of the largest number.
- ReverseSequence and Compress are Gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions.steps import Steps, extents
from schedsearch.network.element_texts import NUMBERS
from schedsearch.network.facts import constant_input, constant_of, dtype_of, name_of, optional_input
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.topk import DTYPES as RANKED

if TYPE_CHECKING:
    import onnx_ir as ir

_FLAT_OPSET = 13  # before it, Hardmax made one axis of `axis` and all behind it
_Problem = Callable[["ir.Node"], str]
_MOST_AXES = len(AXES)


def _shaped(node: ir.Node) -> str:
    """Why a node is not rewritten that needs the shape of its first input only; empty if it is."""
    return "" if extents(node.inputs[0]) is not None else "has an input of unknown extents"


def _filled(node: ir.Node) -> str:
    empty = 0 in (extents(node.inputs[0]) or []) or 0 in (extents(node.outputs[0]) or [])
    return "reads or makes an array without elements; allowed: at least one" if empty else ""


def _numbers(node: ir.Node) -> str:
    x = node.inputs[0]
    dtype = "" if x is None else dtype_of(x)
    if dtype not in NUMBERS:
        return f"reads {dtype or 'an unknown dtype'}; allowed: {', '.join(NUMBERS)}"
    return _shaped(node) or _filled(node)


# --- Places compared with numbers ---------------------------------------------------------------------------------------
def _along(count: int, axis: int, rank: int) -> Any:
    """0, 1, 2 ... along an axis."""
    return np.arange(count, dtype=np.int64).reshape([count if place == axis else 1 for place in range(rank)])


def _truths(steps: Steps, op: str, inputs: Sequence[Any], shape: Sequence[int]) -> ir.Value:
    import onnx_ir as ir

    given = [each if isinstance(each, ir.Value) else steps.constant(each) for each in inputs]
    return steps.add(op, given, shape, ir.DataType.BOOL)


def _whole(steps: Steps, x: ir.Value) -> ir.Value:
    """x as int64."""
    import onnx_ir as ir

    return steps.cast(x, ir.DataType.INT64)


def _one_hot_problem(node: ir.Node) -> str:
    depth, shape = constant_input(node, 1), extents(node.inputs[0])
    if depth is None:
        return "has a depth that is computed; allowed: a constant"
    if depth.size == 1 and depth.flat[0] < 1:
        return f"has depth {int(depth.flat[0])}; allowed: 1 or more"
    if shape is not None and len(shape) >= _MOST_AXES:
        return f"makes {len(shape) + 1} axes; allowed: up to {_MOST_AXES}"
    return _numbers(node)


def _one_hot(model: ir.Model, node: ir.Node) -> None:
    """A negative index counts from the end, and others out of range are nowhere."""
    indices, values = node.inputs[0], node.inputs[2]
    shape, depth = extents(indices), constant_input(node, 1)
    assert indices is not None and values is not None and shape is not None and depth is not None
    count, rank = int(depth.flat[0]), len(shape) + 1
    axis = node.attributes.get_int("axis", -1) % rank
    steps = Steps(model, node)
    one = [*shape[:axis], 1, *shape[axis:]]
    index = steps.reshape(_whole(steps, indices), one)
    negative = _truths(steps, "Less", [index, np.array(0, np.int64)], one)
    behind = steps.add("Add", [index, np.array(count, np.int64)], one, like=index)
    index = steps.add("Where", [negative, behind, index], one, like=index)
    made = [*shape[:axis], count, *shape[axis:]]
    hot = _truths(steps, "Equal", [index, _along(count, axis, rank)], made)
    pair = constant_of(values)
    if pair is not None:
        off, on = (np.array(each) for each in pair)
    else:
        off, on = (
            steps.add("Slice", [values, *(np.array([n], np.int64) for n in (at, at + 1, 0))], [1], like=values)
            for at in (0, 1)
        )
    steps.add("Where", [hot, on, off], made)
    steps.replace()


def _trilu_problem(node: ir.Node) -> str:
    shape = extents(node.inputs[0])
    if shape is not None and len(shape) < 2:
        return f"reads an array of {len(shape)} axes; allowed: 2 or more"
    return _numbers(node)


def _trilu(model: ir.Model, node: ir.Node) -> None:
    x, shape, k = node.inputs[0], extents(node.inputs[0]), optional_input(node, 1)
    assert x is not None and shape is not None and x.dtype is not None
    (rows, columns), steps = shape[-2:], Steps(model, node)
    op = "GreaterOrEqual" if node.attributes.get_int("upper", 1) else "LessOrEqual"
    shift: Any = np.array(0, np.int64) if k is None else k
    begin = steps.add("Add", [_along(rows, 0, 2), shift], [rows, 1], like=steps.constant(np.array(0, np.int64)))
    kept = _truths(steps, op, [_along(columns, 1, 2), begin], [rows, columns])
    steps.add("Where", [kept, x, np.array(0).astype(x.dtype.numpy())], shape)
    steps.replace()


# --- Repeats ------------------------------------------------------------------------------------------------------------
def _tile_problem(node: ir.Node) -> str:
    repeats, shape = constant_input(node, 1), extents(node.inputs[0])
    if repeats is None:
        return "has repeats that are computed; allowed: constants"
    if shape is not None and len(_tiles(shape, repeats.tolist())[0]) > _MOST_AXES:
        return f"repeats too many axes of {shape}; allowed: repeats that are {_MOST_AXES} axes at most once each is two"
    return _numbers(node)


def _tiles(shape: Sequence[int], repeats: Sequence[int]) -> tuple[list[int], list[int]]:
    """Shapes before and after repeating: two axes for one that is repeated, and one for those that are not and stand side
    by side."""
    before: list[int] = []
    after: list[int] = []
    merges = False
    for extent, count in zip(shape, repeats):
        if count != 1:
            before += [1, extent]
            after += [count, extent]
        elif merges:
            before[-1], after[-1] = before[-1] * extent, after[-1] * extent
            continue
        else:
            before.append(extent)
            after.append(extent)
        merges = True
    return before, after


def _tile(model: ir.Model, node: ir.Node) -> None:
    x, shape, repeats = node.inputs[0], extents(node.inputs[0]), constant_input(node, 1)
    assert x is not None and shape is not None and repeats is not None
    before, after = _tiles(shape, repeats.tolist())
    steps = Steps(model, node)
    value = steps.reshape(x, before)
    if after != before:
        value = steps.add("Expand", [value, np.array(after, np.int64)], after)
    steps.last = steps.reshape(value, [extent * int(count) for extent, count in zip(shape, repeats)])
    steps.replace()


# --- Places of the largest numbers --------------------------------------------------------------------------------------
def _extreme_problem(node: ir.Node) -> str:
    x = node.inputs[0]
    dtype = "" if x is None else dtype_of(x)
    if dtype not in RANKED:
        return f"reads {dtype or 'an unknown dtype'}; allowed: {', '.join(RANKED)}"
    return _shaped(node) or _filled(node)


def _extreme(model: ir.Model, node: ir.Node) -> None:
    x, shape = node.inputs[0], extents(node.inputs[0])
    assert x is not None and shape is not None
    whole = list(shape) or [1]
    axis, steps = node.attributes.get_int("axis", 0) % len(whole), Steps(model, node)
    last = bool(node.attributes.get_int("select_last_index", 0))
    given = x if shape else steps.reshape(x, whole)
    if last:
        given = _backwards(steps, given, whole, axis)
    index = _first(steps, given, whole, axis, largest=node.op_type == "ArgMax")
    made = [*whole[:axis], 1, *whole[axis + 1 :]]
    if last:
        index = steps.add("Sub", [np.array(whole[axis] - 1, np.int64), index], made)
    kept = node.attributes.get_int("keepdims", 1) and shape
    steps.last = steps.reshape(index, made if kept else [*whole[:axis], *whole[axis + 1 :]])
    steps.replace()


def _backwards(steps: Steps, x: ir.Value, shape: Sequence[int], axis: int) -> ir.Value:
    bounds = [np.array([number], np.int64) for number in (-1, -shape[axis] - 1, axis, -1)]
    return steps.add("Slice", [x, *bounds], shape, like=x)


def _first(steps: Steps, x: ir.Value, shape: Sequence[int], axis: int, *, largest: bool) -> ir.Value:
    """The place of the largest or smallest number along an axis, the first of equal ones; int64 with this axis."""
    import onnx_ir as ir

    values = steps.add(
        "TopK", [x, np.array([1], np.int64)], [*shape[:axis], 1, *shape[axis + 1 :]], like=x, axis=axis, largest=int(largest)
    )
    node = values.producer()
    assert node is not None
    node.resize_outputs(2)
    index = node.outputs[1]
    index.name, index.type = f"{values.name}.place", ir.TensorType(ir.DataType.INT64)
    index.shape = values.shape
    return index


def _hardmax(model: ir.Model, node: ir.Node) -> None:
    x, shape = node.inputs[0], extents(node.inputs[0])
    assert x is not None and shape is not None
    old = node.graph is not None and node.graph.opset_imports.get("", _FLAT_OPSET) < _FLAT_OPSET
    axis, steps = node.attributes.get_int("axis", 1 if old else -1) % len(shape), Steps(model, node)
    given, whole = x, list(shape)
    if old:
        whole, axis = [math.prod(shape[:axis]), math.prod(shape[axis:])], 1
        given = steps.reshape(x, whole)
    index = _first(steps, given, whole, axis, largest=True)
    hot = _truths(steps, "Equal", [index, _along(whole[axis], axis, len(whole))], whole)
    steps.last = steps.reshape(steps.cast(hot, node.outputs[0].dtype), shape)
    steps.replace()


# --- Elements by their places -------------------------------------------------------------------------------------------
def _reverse_problem(node: ir.Node) -> str:
    shape, read = extents(node.inputs[0]), node.attributes
    axes = {read.get_int("time_axis", 0), read.get_int("batch_axis", 1)}
    if shape is not None and axes != {0, 1}:
        return f"has time_axis and batch_axis {sorted(axes)}; allowed: 0 and 1"
    return _shaped(node)


def _reverse_sequence(model: ir.Model, node: ir.Node) -> None:
    """A Gather of the rows of all sequences in one array."""
    x, lengths, shape = node.inputs[0], node.inputs[1], extents(node.inputs[0])
    assert x is not None and lengths is not None and shape is not None
    time, batch = node.attributes.get_int("time_axis", 0), node.attributes.get_int("batch_axis", 1)
    steps, plane, rows = Steps(model, node), shape[:2], math.prod(shape[:2])
    at, sequence = _along(shape[time], time, 2), _along(shape[batch], batch, 2)
    step = math.prod(plane[time + 1 :])  # rows from one time to the next
    start = sequence * math.prod(plane[batch + 1 :])
    known = constant_of(lengths)
    places: Any
    if known is not None:
        length = known.astype(np.int64).reshape([-1 if axis == batch else 1 for axis in (0, 1)])
        places = (np.where(at < length, length - 1 - at, at) * step + start).reshape(rows)
    else:
        one = [shape[batch] if axis == batch else 1 for axis in (0, 1)]
        length = steps.reshape(_whole(steps, lengths), one)
        inside = _truths(steps, "Less", [at, length], plane)
        last = steps.add("Sub", [length, np.array(1, np.int64)], one, like=length)
        back = steps.add("Sub", [last, at], plane, like=length)
        chosen = steps.add("Where", [inside, back, at], plane, like=length)
        scaled = steps.add("Mul", [chosen, np.array(step, np.int64)], plane, like=length)
        places = steps.reshape(steps.add("Add", [scaled, start], plane, like=length), [rows])
    wide = [rows, math.prod(shape[2:])]
    moved = steps.add("Gather", [steps.reshape(x, wide), places], wide, like=x, axis=0)
    steps.last = steps.reshape(moved, shape)
    steps.replace()


def _compress_problem(node: ir.Node) -> str:
    if constant_input(node, 1) is None:
        return "has a condition that is computed, so that its size is known at run time only; allowed: a constant"
    return _shaped(node) or _filled(node)


def _compress(model: ir.Model, node: ir.Node) -> None:
    x, shape, condition = node.inputs[0], extents(node.inputs[0]), constant_input(node, 1)
    assert x is not None and shape is not None and condition is not None
    given, steps = node.attributes.get("axis"), Steps(model, node)
    value = x if given is not None else steps.reshape(x, [math.prod(shape)])
    whole = shape if given is not None else [math.prod(shape)]
    axis = 0 if given is None else int(given.as_int()) % len(shape)
    places = np.flatnonzero(condition[: whole[axis]])
    steps.add("Gather", [value, places], [*whole[:axis], len(places), *whole[axis + 1 :]], axis=axis)
    steps.replace()


_RULES: Mapping[str, tuple[_Problem, Callable[[Any, Any], None]]] = {
    "OneHot": (_one_hot_problem, _one_hot),
    "Trilu": (_trilu_problem, _trilu),
    "Tile": (_tile_problem, _tile),
    **dict.fromkeys(("ArgMax", "ArgMin"), (_extreme_problem, _extreme)),
    "Hardmax": (_extreme_problem, _hardmax),
    "ReverseSequence": (_reverse_problem, _reverse_sequence),
    "Compress": (_compress_problem, _compress),
}


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    problem, rewrite = _RULES[node.op_type]
    if not problem(node):
        rewrite(model, node)


def _left(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    return f"{name_of(node)} {_RULES[node.op_type][0](node)}"


def _eye_left(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    return f"{name_of(node)} has an input of unknown extents"  # others were folded


REWRITTEN: Mapping[str, Callable[[Any, Any], None]] = dict.fromkeys(_RULES, _rewrite)
LEFT: Mapping[str, Read] = {**dict.fromkeys(_RULES, _left), "EyeLike": _eye_left}
