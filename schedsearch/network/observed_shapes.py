"""Shapes that no inference finds, from two runs of a model in ONNX Runtime.

Nodes of other domains, loops, branches and sequences hide the shapes behind them, though all inputs have fixed shapes. Two
runs on different numbers show them. If they differ in a later run after all, the subgraph of the network that makes them
fails.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.facts import has_bodies, is_onnx
from schedsearch.network.older_opsets import runnable
from schedsearch.network.subgraphs import inputs_of_all
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_ERRORS_ONLY = 4  # level of ONNX Runtime's messages on stderr
_MOST_TURNS = 10_000  # of a loop in the first run, and one more in the second: then extents that only this limits differ


def observe_shapes(model: ir.Model) -> bool:
    """Gives values of unknown shape the one that they have in two runs, and says whether there were any.

    Args:
        model: a simplified graph whose inputs have their shapes. If ONNX Runtime is missing or cannot run it, or a value has
            another shape in the second run, it stays unknown; so do values behind nodes whose shapes follow from numbers,
            such as NonZero.
    """
    import onnx_ir as ir

    unknown = _hidden(model)
    first, second = (_run(model, unknown, turn) for turn in (0, 1)) if unknown else ([], [])
    changed = False
    for value, one, other in zip(unknown, first, second):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.shape == other.shape:
            value.shape, value.dtype = ir.Shape(one.shape), value.dtype or ir.DataType.from_numpy(one.dtype)
            changed = True
    return changed


def _hidden(model: ir.Model) -> list[ir.Value]:
    """The values of unknown shape that depend on no number, as far as their nodes tell."""
    by_numbers: set[ir.Value] = set()
    found = []
    for node in model.graph:
        unknown = [value for value in node.outputs if value.name and not _is_known(value)]
        given = [value for value in inputs_of_all(node) if value.const_value is None]
        is_plain = is_onnx(node) and "Sequence" not in node.op_type and not has_bodies(node)
        if by_numbers.intersection(given) or (is_plain and all(map(_is_known, given))):
            by_numbers.update(unknown)
        else:
            found += unknown
    return found


def _is_known(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def _run(model: ir.Model, wanted: list[ir.Value], turn: int) -> list[Any]:
    """What the values are in a run; none if it fails."""
    import onnx_ir as ir

    try:
        import onnxruntime

        proto = ir.to_proto(model)
        del proto.graph.node[:]
        proto.graph.node.extend(runnable(model.graph, model.opset_imports.get("", 1)))
        _limit_turns(proto.graph, _MOST_TURNS + turn)
        del proto.graph.output[:]
        proto.graph.output.extend(_port(value) for value in wanted)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {value.name: _numbers(value, turn) for value in model.graph.inputs if value.const_value is None}
        return list(session.run([value.name for value in wanted], feeds))
    except Exception:  # it is missing, lacks an operator or a dtype, or an input has no such numbers
        return []


def _limit_turns(graph: Any, most: int) -> None:
    """Loops that only their condition ends might never do so for these numbers: they get a number of turns."""
    import onnx

    constants = {each.name: each for each in graph.initializer}
    limit = onnx.numpy_helper.from_array(np.array(most, np.int64), "schedsearch.most_turns")
    graph.initializer.append(limit)
    left = list(graph.node)
    while left:
        node = left.pop()
        if node.op_type == "Loop" and not node.domain:
            given = constants.get(node.input[0])
            if not node.input[0] or (given is not None and onnx.numpy_helper.to_array(given).ravel()[0] > most):
                node.input[0] = limit.name
        for each in node.attribute:
            for body in (each.g, *each.graphs):
                constants |= {one.name: one for one in body.initializer}
                left += body.node


def _port(value: ir.Value) -> Any:
    import onnx

    if value.dtype is None:
        return onnx.helper.make_empty_tensor_value_info(value.name)
    return onnx.helper.make_tensor_value_info(value.name, int(value.dtype), None)


def _numbers(value: ir.Value, turn: int) -> Array:
    """An input of the first or second run. The runs differ in signs, integers, and how many booleans are true. No number is
    0, because a node may divide by it."""
    assert value.shape is not None and value.dtype is not None
    shape, dtype = value.shape.numpy(), value.dtype.numpy()
    if dtype.kind in "iu":
        return np.full(shape, 1 + turn).astype(dtype)
    if dtype.kind != "f":  # every second one, from the first, and every third one, from the second
        return np.asarray(np.arange(math.prod(shape)) % (2 + turn) == turn).reshape(shape).astype(dtype)
    numbers = np.random.default_rng(turn).standard_normal(shape)
    return np.asarray(-np.abs(numbers) if turn else numbers).astype(dtype)
