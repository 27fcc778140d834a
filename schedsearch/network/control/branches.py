"""`If`: the branch that a constant condition takes, or both branches of a condition that is computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.control.bodies import Names, Place, graphs_of
from schedsearch.network.facts import FLOATS, RANDOM, constant_input, constant_of, dtype_of, has_bodies, is_onnx, name_of

if TYPE_CHECKING:
    import onnx_ir as ir


def take_branches(model: ir.Model) -> bool:
    """Puts the branch that is taken in the place of each `If` whose condition is a constant, in the graph and in bodies.
    Returns whether there was any."""
    names = None
    changed = False
    for graph in list(graphs_of(model.graph)):
        for node in list(graph):
            if node.op_type != "If" or not is_onnx(node) or (condition := condition_of(node)) is None:
                continue
            names = names or Names(model)
            place = Place(model, node, names)
            place.replace(place.copy(branch_of(node, condition), []))
            changed = True
    return changed


def condition_of(node: ir.Node) -> bool | None:
    """What the condition of an `If` is; None if it is computed, or an input of the model."""
    value = node.inputs[0]
    array = None if value is None or value.is_graph_input() else constant_of(value)
    return None if array is None or np.size(array) != 1 else bool(np.ravel(array)[0])


def branch_of(node: ir.Node, condition: bool) -> ir.Graph:
    return node.attributes["then_branch" if condition else "else_branch"].as_graph()


# --- Computed conditions ------------------------------------------------------------------------------------------------
MOST_NODES = 100
MOST_BYTES = 1 << 24
MOST_ELEMENTS = 1 << 20
_BY_INDICES = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "RoiAlign", "OneHot")
_BY_DIVISORS = ("Div", "Mod")


def compute_both(model: ir.Model) -> bool:
    """Puts both branches and a `Where` in the place of each `If` of a computed condition where that is cheap and cannot
    fail, in the graph and in bodies, inner ones first. Shapes must be known. Returns whether there was any."""
    import onnx_ir as ir

    changed = False
    for graph in list(graphs_of(model.graph)):
        for node in list(graph):
            if node.op_type != "If" or not is_onnx(node) or why_not_both(node) or node.inputs[0] is None:
                continue
            place = Place(model, node, Names(model))
            condition = node.inputs[0]
            assert condition.shape is not None
            if len(condition.shape):
                shape = place.constant(f"{condition.name}.shape", np.array([], np.int64))
                condition = place.make("Reshape", [condition, shape], condition)
                condition.shape = ir.Shape([])
            ways = [place.copy(branch_of(node, truth), []) for truth in (True, False)]
            chosen = [place.make("Where", [condition, *pair], pair[0]) for pair in zip(*ways)]
            for old, value, like in zip(node.outputs, chosen, branch_of(node, True).outputs):
                value.shape, value.type = like.shape, old.type or like.type
            place.replace(chosen)
            changed = True
    return changed


def why_not_both(node: ir.Node) -> str:
    """Why the branches of an `If` cannot both be computed; "" if they can."""
    from schedsearch.ops.dtypes import DTYPES

    condition, ways = node.inputs[0], [branch_of(node, truth) for truth in (True, False)]
    if condition is None or condition.shape is None or not condition.shape.is_static():
        return "its condition has no known shape"
    for one, other in zip(*(way.outputs for way in ways)):
        shapes = [value.shape for value in (one, other)]
        if any(shape is None or not shape.is_static() for shape in shapes):
            return f"the shape of {one.name!r} or {other.name!r}, results of its branches, is not known"
        if shapes[0] != shapes[1]:
            return f"its branches give {one.name!r} {shapes[0]} and {other.name!r} {shapes[1]}"
        if any(dtype_of(value) not in DTYPES for value in (one, other)):
            return f"{one.name!r} or {other.name!r}, results of its branches, are no arrays of numbers"
    nodes = [inner for way in ways for inner in way]
    if len(nodes) > MOST_NODES:
        return f"its branches have {len(nodes)} nodes; both are computed up to {MOST_NODES}"
    if inner := next((inner for inner in nodes if may_fail(inner)), None):
        return f"{name_of(inner)} ({inner.op_type}) in a branch may fail, has branches itself or draws numbers"
    if large := next((each for inner in nodes for each in inner.outputs if _elements(each) > MOST_ELEMENTS), None):
        return f"{large.name!r} in a branch is larger than {MOST_ELEMENTS:,} elements, or of unknown shape"
    read = {value: value.const_value.nbytes for inner in nodes for value in inner.inputs if value and value.const_value}
    if sum(read.values()) > MOST_BYTES:
        return f"its branches read {sum(read.values()):,} bytes of constants; both are computed up to {MOST_BYTES:,}"
    return ""


def may_fail(node: ir.Node) -> bool:
    """Whether a node may fail on some numbers, draws numbers, or may do anything else than compute."""
    if not is_onnx(node) or has_bodies(node) or node.op_type in RANDOM:
        return True
    if node.op_type in _BY_INDICES:
        return constant_input(node, 2 if node.op_type == "RoiAlign" else 1) is None
    if node.op_type in _BY_DIVISORS and dtype_of(node.outputs[0]) not in FLOATS:
        divisor = constant_input(node, 1)
        return divisor is None or not np.all(divisor)
    return False


def _elements(value: ir.Value) -> float:
    if not value.name:
        return 0
    if value.shape is None or not value.shape.is_static():
        return math.inf
    return math.prod(int(extent) for extent in value.shape)
