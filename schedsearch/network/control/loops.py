"""`Loop`, `Scan` and `SequenceMap` whose number of turns is known, as copies of their bodies, one after the other.

The turns of a `Loop` whose condition is computed are counted by running what the condition depends on, if that starts from
constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.control.bodies import Names, Place, bodies_of, graphs_of
from schedsearch.network.facts import RANDOM, constant_of, has_bodies, is_onnx, optional_input
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_NODES = 10_000
"""Of all copies of the bodies of one node."""
NEVER_ENDS = "goes on for ever; allowed: a number of turns"
_SCAN_OF_BATCHES = 9  # before it, a Scan had a batch axis and lengths of sequences


def unroll(model: ir.Model) -> bool:
    """Puts copies of the body in the place of each `Loop` and `Scan` of a known number of turns, in the graph and in bodies.
    Returns whether there was any."""
    changed = False
    names = None
    for graph in list(graphs_of(model.graph)):
        for node in list(graph):
            if node.op_type not in _UNROLLED or not is_onnx(node):
                continue
            count, unrolled = _UNROLLED[node.op_type]
            turns = count(node, model.opset_imports.get("", 1))
            if isinstance(turns, str):
                continue
            names = names or Names(model)
            place = Place(model, node, names)
            results = unrolled(place, node, turns)
            if not isinstance(results, str):
                place.replace(results)
                changed = True
    return changed


def why_not_unrolled(node: ir.Node, opset: int) -> str:
    """Why a `Loop` or `Scan` is still there after everything was folded."""
    turns = _UNROLLED[node.op_type][0](node, opset)
    return turns if isinstance(turns, str) else "gives an empty result of unknown shape; allowed: at least one turn"


def _within_bound(node: ir.Node, turns: int) -> int | str:
    (body,) = bodies_of(node)
    nodes = turns * sum(1 for _ in body.all_nodes())
    if nodes > MOST_NODES:
        return f"takes {turns:,} turns, which would be {nodes:,} nodes; allowed: {MOST_NODES:,}. Give it fewer turns"
    return turns


# --- Loop ---------------------------------------------------------------------------------------------------------------
def turns_of(node: ir.Node, opset: int = 0) -> int | str:
    """The number of turns of a `Loop`, or why it is not known."""
    (body,) = bodies_of(node)
    most: int | None = None
    if (limit := optional_input(node, 0)) is not None:
        array = None if limit.is_graph_input() else constant_of(limit)
        if array is None or array.size != 1:
            return f"has a computed number of turns, {limit.name!r}; allowed: a constant"
        most = max(int(array.ravel()[0]), 0)
    if (first := optional_input(node, 1)) is not None:
        array = None if first.is_graph_input() else constant_of(first)
        if array is None or array.size != 1:
            return f"has a computed condition, {first.name!r}; allowed: a constant"
        if not array.ravel()[0]:
            return 0
    goes_on = _passed_on(body.outputs[0])
    constant = None if goes_on.is_graph_input() else constant_of(goes_on)
    if goes_on is body.inputs[1] or (constant is not None and constant.size == 1 and constant.ravel()[0]):
        return NEVER_ENDS if most is None else _within_bound(node, most)
    counted = _counted(node, body, most)
    return counted if isinstance(counted, str) else _within_bound(node, counted)


def _passed_on(value: ir.Value) -> ir.Value:
    """The value behind Identities."""
    while (maker := value.producer()) is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        value = maker.inputs[0]
    return value


def _counted(node: ir.Node, body: ir.Graph, most: int | None) -> int | str:
    """The number of turns of a loop whose body computes the condition: only what that depends on runs."""
    from onnx.reference import ReferenceEvaluator

    needed: dict[ir.Node, None] = {}
    carried: set[int] = set()  # places of carried values
    constants: dict[str, Array] = {}
    left = [body.outputs[0]]
    while left:
        value = left.pop()
        maker = value.producer()
        if value in body.inputs:
            place = body.inputs.index(value) - 2
            if place >= 0 and place not in carried:
                carried.add(place)
                left.append(body.outputs[1 + place])
        elif (array := None if value.is_graph_input() else constant_of(value)) is not None:
            constants[str(value.name)] = array
        elif maker is None or maker.graph is not body or has_bodies(maker) or not is_onnx(maker) or maker.op_type in RANDOM:
            return f"has a condition that depends on {value.name!r}, which is computed; allowed: what starts from constants"
        elif maker not in needed:
            needed[maker] = None
            left += [each for each in maker.inputs if each is not None]
    state: dict[str, Array] = {}
    for place in carried:
        start = node.inputs[2 + place]
        array = None if start is None or start.is_graph_input() else constant_of(start)
        if array is None:
            got = "nothing" if start is None else repr(start.name)
            return f"has a condition that depends on {got}, which is computed; allowed: what starts from constants"
        state[str(body.inputs[2 + place].name)] = array
    evaluator = ReferenceEvaluator(_slice_model(body, needed, carried, constants))
    turns, goes_on = 0, True
    limit = MOST_NODES if most is None else min(most, MOST_NODES)
    names = [str(body.inputs[2 + place].name) for place in sorted(carried)]
    while goes_on and turns < limit:
        feeds = {**constants, **state, str(body.inputs[0].name): np.array(turns), str(body.inputs[1].name): np.array(True)}
        try:
            condition, *after = evaluator.run(None, feeds)
        except Exception as error:  # the evaluator lacks operators, and fails in many ways for nodes against their rules
            return f"has a condition that onnx's evaluator cannot compute ({type(error).__name__}); allowed: a constant"
        turns, goes_on = turns + 1, bool(np.ravel(condition)[0])
        state = dict(zip(names, map(np.asarray, after)))
    return turns if not goes_on or turns == most else f"takes more than {MOST_NODES:,} turns; allowed: fewer"


def _slice_model(body: ir.Graph, needed: dict[ir.Node, None], carried: set[int], constants: dict[str, Array]) -> Any:
    """The nodes that the condition depends on as a model: condition and carried values of a turn from those before it."""
    from onnx import helper
    from onnx_ir import serde

    info = helper.make_empty_tensor_value_info
    inputs = [*body.inputs[:2], *(body.inputs[2 + place] for place in sorted(carried))]
    outputs = [body.outputs[0], *(body.outputs[1 + place] for place in sorted(carried))]
    nodes = [serde.serialize_node(node) for node in body if node in needed]
    kept, made = [], []
    for number, value in enumerate(outputs):  # one value may be several results
        made.append(helper.make_node("Identity", [str(value.name)], [f"result {number}"]))
        kept.append(info(f"result {number}"))
    given = [info(str(value.name)) for value in inputs] + [info(name) for name in constants]
    graph = helper.make_graph([*nodes, *made], "condition", given, kept)
    opsets = [helper.make_opsetid(domain, version) for domain, version in body.opset_imports.items()]
    return helper.make_model(graph, opset_imports=opsets or None)


def _unrolled_loop(place: Place, node: ir.Node, turns: int) -> list[ir.Value] | str:
    (body,) = bodies_of(node)
    count = len(body.inputs) - 2
    state = [value for value in node.inputs[2:] if value is not None]
    if len(state) != count:
        return "has a carried value without a start"
    scans: list[list[ir.Value]] = [[] for _ in body.outputs[1 + count :]]
    if not turns and any(_empty(value) is None for value in body.outputs[1 + count :]):
        return "gives an empty result of unknown shape"
    truth = place.constant(f"{node.outputs[0].name}.goes_on", np.array(True))
    for turn in range(turns):
        number = place.constant(f"{node.outputs[0].name}.turn", np.array(turn))
        results = place.copy(body, [number, truth, *state])
        state = results[1 : 1 + count]
        for scan, value in zip(scans, results[1 + count :]):
            scan.append(place.unsqueezed(value, 0))
    if not turns:
        return [*state, *(_constant_empty(place, value) for value in body.outputs[1 + count :])]
    return [*state, *(place.concatenated(scan, 0) for scan in scans)]


def _empty(value: ir.Value) -> Array | None:
    if value.shape is None or not value.shape.is_static() or value.dtype is None:
        return None
    return np.zeros((0, *(int(extent) for extent in value.shape)), value.dtype.numpy())


def _constant_empty(place: Place, value: ir.Value) -> ir.Value:
    array = _empty(value)
    assert array is not None
    return place.constant(f"{value.name}.none", array)


# --- Scan ---------------------------------------------------------------------------------------------------------------
def _length(node: ir.Node, opset: int) -> int | str:
    """The number of turns of a `Scan`."""
    if opset < _SCAN_OF_BATCHES:
        return f"is a Scan of opset {opset}, which has a batch axis; allowed: opset {_SCAN_OF_BATCHES} and later"
    arrays = _scanned(node)
    if not arrays:
        return "scans nothing; allowed: at least one array"
    lengths = set()
    for value, axis in arrays:
        if value is None or value.shape is None or not isinstance(extent := value.shape[axis], int):
            got = "nothing" if value is None else f"{value.name!r} of shape {value.shape}"
            return f"scans {got}; allowed: arrays whose extents along the scanned axes are known"
        lengths.add(extent)
    if len(lengths) > 1:
        return f"scans arrays of {' and '.join(map(str, sorted(lengths)))} elements; allowed: equally many"
    return _within_bound(node, lengths.pop())


def _scanned(node: ir.Node) -> list[tuple[ir.Value | None, int]]:
    """The arrays that a `Scan` takes element by element, and the axes along which it does."""
    count = node.attributes.get_int("num_scan_inputs", 0)
    axes = list(node.attributes.get_ints("scan_input_axes", ())) or [0] * count
    return list(zip(node.inputs[len(node.inputs) - count :], axes, strict=True))


def _unrolled_scan(place: Place, node: ir.Node, turns: int) -> list[ir.Value] | str:
    (body,) = bodies_of(node)
    read, arrays = node.attributes, _scanned(node)
    states = len(node.inputs) - len(arrays)
    state = [value for value in node.inputs[:states] if value is not None]
    outputs = body.outputs[states:]
    axes = list(read.get_ints("scan_output_axes", ())) or [0] * len(outputs)
    backwards = list(read.get_ints("scan_output_directions", ())) or [0] * len(outputs)
    reversed_inputs = list(read.get_ints("scan_input_directions", ())) or [0] * len(arrays)
    if not turns:
        return "has no turn"
    scans: list[list[ir.Value]] = [[] for _ in outputs]
    for turn in range(turns):
        elements = []
        for (value, axis), is_reversed in zip(arrays, reversed_inputs):
            assert value is not None and value.shape is not None
            elements.append(place.one_of(value, axis % len(value.shape), turns - 1 - turn if is_reversed else turn))
        results = place.copy(body, [*state, *elements])
        state = results[:states]
        for scan, value, own, axis in zip(scans, results[states:], outputs, axes):
            if axis < 0:
                if own.shape is None:
                    return f"stacks {own.name!r}, whose rank is unknown, along axis {axis}; allowed: an axis from 0"
                axis += len(own.shape) + 1
            scan.append(place.unsqueezed(value, axis))
    found = list(state)
    for scan, axis, is_backwards, own in zip(scans, axes, backwards, outputs):
        axis += 0 if axis >= 0 or own.shape is None else len(own.shape) + 1
        found.append(place.concatenated(scan[::-1] if is_backwards else scan, axis))
    return found


_UNROLLED: dict[str, tuple[Any, Any]] = {"Loop": (turns_of, _unrolled_loop), "Scan": (_length, _unrolled_scan)}
UNROLLED: Sequence[str] = tuple(_UNROLLED)
