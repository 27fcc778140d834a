"""`If` of a computed condition, and `Loop` of a computed number of turns: their bodies become models of their own.

Such a node keeps its operator, in a domain of our own, and reads every value that a body takes from outside. Its bodies are
no attributes, so that no pass moves anything into them or out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.control.bodies import Names, Place, bodies_of, graphs_of, taken_by
from schedsearch.network.control.branches import branch_of
from schedsearch.network.control.loops import NEVER_ENDS, turns_of
from schedsearch.network.facts import BODIES, CONTROL, dtype_of, is_known, is_onnx, name_of
from schedsearch.network.formats import narrowed
from schedsearch.network.graph import Impossible
from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

    _Simplify = Callable[[ir.Model, str], ir.Model]
    _Found = tuple[Sequence[ir.Value], Sequence[ir.Value], Sequence[ir.Model | Impossible]]

_PROBLEM = "schedsearch.problem"  # a key of a node's meta data
_FOR_EVER = np.iinfo(np.int64).max  # turns


def why_not_isolated(node: ir.Node) -> str:
    """Why the bodies of a node are no models of their own; "" if nobody tried."""
    return str(node.meta.get(_PROBLEM, ""))


def isolate(model: ir.Model, of_branch: _Simplify) -> bool:
    """Makes models of the bodies of each `If` and `Loop` of a graph, simplified ones, where results have fixed shapes: the
    same in both branches, or one of these cannot be computed at all; in a loop those of before. The shapes around them must
    be fixed.

    Args:
        of_branch: simplifies a model, given its name.

    Returns:
        Whether there was any.
    """
    changed = False
    for number, node in enumerate(list(model.graph)):
        if node.op_type in _ISOLATED and is_onnx(node) and _PROBLEM not in node.meta:
            found = _ISOLATED[node.op_type](model, node, of_branch)
            if isinstance(found, str):
                if found:
                    node.meta[_PROBLEM] = found
                continue
            _become(model, node, number, *found)
            changed = True
    return changed


def _become(
    model: ir.Model,
    node: ir.Node,
    number: int,
    reads: Sequence[ir.Value],
    results: Sequence[ir.Value],
    bodies: Sequence[ir.Model | Impossible],
) -> None:
    """Makes the node one whose bodies are models.

    Args:
        reads: what it reads.
        results: what its outputs look like.
    """
    import onnx_ir as ir

    node.resize_outputs(len(results))
    for value, like in zip(node.outputs, results):
        value.shape, value.type = like.shape, value.type or like.type  # float64 stays so until all of the graph is narrowed
    node.domain = CONTROL
    node.attributes.clear()
    node.attributes["number"] = ir.AttrInt64("number", number)  # two that read the same are not the same
    node.resize_inputs(len(reads))
    for place, value in enumerate(reads):
        node.replace_input_with(place, value)
    node.meta[BODIES] = tuple(bodies)
    model.opset_imports[CONTROL] = 1


def _branches(model: ir.Model, node: ir.Node, of_branch: _Simplify) -> _Found | str:
    """What an `If` reads, what it gives, and its branches; or why not; "" if that may change."""
    condition, graphs = node.inputs[0], [branch_of(node, truth) for truth in (True, False)]
    taken = taken_by(graphs)
    given = [value for value in taken if value.const_value is None]
    if condition is None or not is_known(condition) or not all(map(is_known, given)):
        return ""
    bodies: list[ir.Model | Impossible] = []
    for word, graph in zip(("then", "else"), graphs):
        try:
            made = _model_of(model, graph, taken)
            for result, like in zip(made.graph.outputs, node.outputs):
                result.type = result.type or like.type
            bodies.append(of_branch(made, f"the {word}_branch of {name_of(node)}"))
        except ModelError as error:
            bodies.append(Impossible(str(error).removesuffix(". Correct the model")))  # other shapes may do
    possible = [body for body in bodies if not isinstance(body, Impossible)]
    if not possible:
        return "; ".join(body.reason for body in bodies if isinstance(body, Impossible))
    for result, *several in zip(node.outputs, *(body.graph.outputs for body in possible)):
        if problem := next(filter(None, map(_problem, several)), ""):
            return problem
        kinds = [f"{dtype_of(value)} {value.shape}" for value in several]
        if len(set(kinds)) > 1:
            return f"its branches give {result.name!r} as {' and '.join(kinds)}"
    return [condition, *given], possible[0].graph.outputs, bodies


def _turns(model: ir.Model, node: ir.Node, of_branch: _Simplify) -> _Found | str:
    """The same of a `Loop`."""
    if turns_of(node, model.opset_imports.get("", 1)) == NEVER_ENDS:
        return "it goes on for ever"
    (graph,) = bodies_of(node)
    count, taken = len(graph.inputs) - 2, taken_by([graph])
    given = [value for value in taken if value.const_value is None]
    first = [value for value in node.inputs[2:] if value is not None]
    if len(first) != count or not count:
        return "it carries nothing from turn to turn, or nothing to begin with"
    if stacked := [value for value in node.outputs[count:] if value.name and (value.is_graph_output() or value.uses())]:
        return f"it stacks {stacked[0].name!r}, whose extent is the number of turns"
    numbers = [value for value in node.inputs[:2] if value is not None]
    if not all(map(is_known, (*numbers, *given, *first))):
        return ""
    place = Place(model, node, Names(model))
    most, condition = (
        value or place.constant(f"{node.outputs[0].name}.{name}", np.array(default))
        for value, name, default in zip((*node.inputs, None)[:2], ("most", "begins"), (_FOR_EVER, True))
    )
    try:
        body = of_branch(_turn_of(model, graph, taken, first), f"the body of {name_of(node)}")
    except ModelError as error:
        return str(error)
    for before, after in zip(first, body.graph.outputs[1:]):
        if problem := _problem(after):
            return problem
        if (str(before.shape), narrowed(dtype_of(before))) != (str(after.shape), dtype_of(after)):
            kinds = [f"{value.name!r} {dtype_of(value)} {value.shape}" for value in (before, after)]
            return f"what it carries changes from {' to '.join(kinds)}"
    return [most, condition, *first, *given], body.graph.outputs[1:], [body]


def _turn_of(model: ir.Model, graph: ir.Graph, taken: Sequence[ir.Value], first: Sequence[ir.Value]) -> ir.Model:
    """One turn as a model. It runs while the condition is true, so that is a constant inside."""
    import onnx_ir as ir

    made = _model_of(model, graph, taken)
    turn, condition, *carried = made.graph.inputs
    del made.graph.outputs[1 + len(first) :]
    for value, kind in ((turn, ir.DataType.INT64), (condition, ir.DataType.BOOL)):
        value.type, value.shape = ir.TensorType(kind), value.shape if is_known(value) else ir.Shape([])
    for value, like in zip(carried, first):
        value.type, value.shape = like.type, like.shape
    truth = ir.tensor(np.ones(tuple(map(int, condition.shape or ())), bool), name=f"{condition.name}.true")
    constant = ir.Value(name=truth.name, type=condition.type, shape=condition.shape, const_value=truth)
    ir.convenience.replace_all_uses_with(condition, constant, replace_graph_outputs=True)
    made.graph.register_initializer(constant)
    return made


_ISOLATED: dict[str, Callable[[ir.Model, ir.Node, _Simplify], _Found | str]] = {"If": _branches, "Loop": _turns}


def _model_of(model: ir.Model, body: ir.Graph, taken: Sequence[ir.Value]) -> ir.Model:
    """A body as a model. Values from outside are inputs behind its own, constants among them are its own."""
    import onnx_ir as ir

    graph = body.clone(allow_outer_scope_values=True)
    inner = {
        value: ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        for value in taken
    }
    for each in graphs_of(graph):
        for reader in each:
            for place, value in enumerate(reader.inputs):
                if value in inner:
                    reader.replace_input_with(place, inner[value])
        for place, value in enumerate(each.outputs):
            if value in inner:
                each.outputs[place] = inner[value]
    for value in inner.values():
        if value.const_value is None:
            graph.inputs.append(value)
        elif any(True for _ in value.uses()) or value in graph.outputs:
            graph.register_initializer(value)
    graph.opset_imports.update({domain: version for domain, version in model.opset_imports.items() if domain != CONTROL})
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def _problem(value: ir.Value) -> str:
    """Why a result of a body can be none of a network; "" if it can."""
    from schedsearch.ops.dtypes import DTYPES

    if not is_known(value):
        return f"the shape of {value.name!r}, a result inside, is not known"
    if dtype_of(value) not in DTYPES:
        return f"{value.name!r}, a result inside, is no array of numbers"
    return ""
