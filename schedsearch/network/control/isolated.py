"""`If` of a computed condition: its branches become models of their own, of which the network runs one.

Such a node keeps its operator, in a domain of our own, and reads the condition and every value that a branch takes from
outside. Its branches are no attributes, so that no pass moves anything into them or out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from schedsearch.network.control.bodies import graphs_of
from schedsearch.network.control.branches import branch_of
from schedsearch.network.facts import dtype_of, is_known, is_onnx, name_of
from schedsearch.network.graph import Impossible
from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "schedsearch.control"
_BODIES = "schedsearch.bodies"  # keys of a node's meta data
_PROBLEM = "schedsearch.problem"


def isolated(model: ir.Model) -> Iterator[tuple[ir.Node, tuple[ir.Model | Impossible, ...]]]:
    """The nodes of a graph whose branches are models, with these: for a true and for a false condition."""
    for node in model.graph:
        if node.domain == DOMAIN:
            yield node, node.meta[_BODIES]


def why_not_isolated(node: ir.Node) -> str:
    """Why the branches of an `If` are no models of their own; "" if nobody tried."""
    return str(node.meta.get(_PROBLEM, ""))


def isolate(model: ir.Model, of_branch: Callable[[ir.Model, str], ir.Model]) -> bool:
    """Makes models of the branches of each `If` of a graph, simplified ones, where these have results of the same fixed
    shapes, or where only one of them can be computed at all. The shapes around them must be fixed.

    Args:
        of_branch: simplifies a model, given its name.

    Returns:
        Whether there was any.
    """
    changed = False
    for number, node in enumerate(list(model.graph)):
        if node.op_type == "If" and is_onnx(node) and _PROBLEM not in node.meta:
            changed |= _isolate(model, node, number, of_branch)
    return changed


def _isolate(model: ir.Model, node: ir.Node, number: int, of_branch: Callable[[ir.Model, str], ir.Model]) -> bool:
    import onnx_ir as ir

    condition, taken = node.inputs[0], _taken(node)
    given = [value for value in taken if value.const_value is None]
    if condition is None or not is_known(condition) or not all(map(is_known, given)):
        return False  # perhaps later
    bodies: list[ir.Model | Impossible] = []
    for truth in (True, False):
        name = f"the {'then' if truth else 'else'}_branch of {name_of(node)}"
        try:
            bodies.append(of_branch(_model_of(model, node, truth, taken), name))
        except ModelError as error:
            bodies.append(Impossible(str(error).removesuffix(". Correct the model")))  # other shapes may do
    possible = [body for body in bodies if not isinstance(body, Impossible)]
    if problem := _difference(possible) if possible else "; ".join(str(body) for body in bodies):
        node.meta[_PROBLEM] = problem
        return False
    for value, like in zip(node.outputs, possible[0].graph.outputs):
        value.shape, value.type = like.shape, like.type
    node.domain = DOMAIN
    node.attributes.clear()
    node.attributes["number"] = ir.AttrInt64("number", number)  # two that read the same are not the same
    node.resize_inputs(1 + len(given))
    for place, value in enumerate(given):
        node.replace_input_with(1 + place, value)
    node.meta[_BODIES] = tuple(bodies)
    model.opset_imports[DOMAIN] = 1
    return True


def _taken(node: ir.Node) -> list[ir.Value]:
    """The values that the branches of a node take from outside."""
    found: dict[ir.Value, None] = {}
    for truth in (True, False):
        graphs = list(graphs_of(branch_of(node, truth)))
        own = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        own |= {value for graph in graphs for inner in graph for value in inner.outputs}
        reads = (value for graph in graphs for inner in graph for value in inner.inputs)
        results = (value for graph in graphs for value in graph.outputs)
        found |= dict.fromkeys(value for value in (*reads, *results) if value is not None and value not in own)
    return list(found)


def _model_of(model: ir.Model, node: ir.Node, truth: bool, taken: list[ir.Value]) -> ir.Model:
    """A branch as a model. Values from outside are its inputs, constants among them are its own."""
    import onnx_ir as ir

    graph = branch_of(node, truth).clone(allow_outer_scope_values=True)
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
    for result, like in zip(graph.outputs, node.outputs):
        result.type = result.type or like.type
    graph.opset_imports.update({domain: version for domain, version in model.opset_imports.items() if domain != DOMAIN})
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def _difference(models: Sequence[ir.Model]) -> str:
    """Why one of these models cannot stand for another; "" if it can."""
    from schedsearch.ops.dtypes import DTYPES

    for several in zip(*(model.graph.outputs for model in models)):
        for value in several:
            if not is_known(value):
                return f"the shape of {value.name!r}, a result of a branch, is not known"
            if dtype_of(value) not in DTYPES:
                return f"{value.name!r}, a result of a branch, is no array of numbers"
        kinds = [f"{value.name!r} {dtype_of(value)} {value.shape}" for value in several]
        if len({(str(value.shape), dtype_of(value)) for value in several}) > 1:
            return f"its branches give {' and '.join(kinds)}"
    return ""
