"""`If` of a computed condition whose branches give arrays of different shapes: everything behind it moves into the branches.

Inside of a branch all shapes are fixed. What the branches give then are the results of the graph, mostly of one shape again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.network.control.bodies import Names, bodies_of, rename, taken_by
from schedsearch.network.control.branches import branch_of
from schedsearch.network.facts import CONTROL, is_known, is_onnx

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_NODES = 10_000
"""Behind one `If`, with those inside of them."""


def move_tails(model: ir.Model) -> bool:
    """Moves what is behind the first `If` of different shapes into its branches. Returns whether there was one."""
    for node in model.graph:
        if node.op_type == "If" and is_onnx(node) and _differ(node):
            tail = _tail(model.graph, node)
            nodes = sum(1 + sum(1 for body in bodies_of(each) for _ in body.all_nodes()) for each in tail)
            if tail and nodes <= MOST_NODES and all(each.domain != CONTROL for each in tail):
                _move(model, node, tail)
                return True
    return False


def _differ(node: ir.Node) -> bool:
    """Whether the branches give known shapes that are not the same."""
    pairs = list(zip(*(branch_of(node, truth).outputs for truth in (True, False))))
    return all(is_known(value) for pair in pairs for value in pair) and any(one.shape != other.shape for one, other in pairs)


def _tail(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """The nodes that depend on a node, in order."""
    made, found = set(node.outputs), []
    for each in graph:
        if not made.isdisjoint(each.inputs) or not made.isdisjoint(taken_by(list(bodies_of(each)))):
            found.append(each)
            made.update(each.outputs)
    return found


def _move(model: ir.Model, node: ir.Node, tail: Sequence[ir.Node]) -> None:
    import onnx_ir as ir

    graph, names = model.graph, Names(model)
    made = {*node.outputs, *(value for each in tail for value in each.outputs)}
    results = list(dict.fromkeys(value for value in graph.outputs if value in made))
    outputs = {value: ir.Value(name=value.name, type=value.type) for value in results}
    for place, value in enumerate(graph.outputs):
        if value in outputs:
            graph.outputs[place] = outputs[value]
    graph.remove(tail)
    formal = {value: ir.Value(name=value.name, type=value.type) for value in node.outputs}
    behind = ir.Graph(list(formal.values()), results, nodes=tail, name="tail")
    for value, inner in formal.items():  # also in bodies that copies have replaced
        ir.convenience.replace_all_uses_with(value, inner, replace_graph_outputs=True)
    branches = [_continued(branch_of(node, truth), behind, names) for truth in (True, False)]
    attributes = [ir.AttrGraph(f"{word}_branch", branch) for word, branch in zip(("then", "else"), branches)]
    graph.append(ir.Node("", "If", node.inputs, attributes, outputs=list(outputs.values()), name=node.name))
    graph.remove(node, safe=True)


def _continued(branch: ir.Graph, behind: ir.Graph, names: Names) -> ir.Graph:
    """A branch with a copy of what comes behind it."""
    import onnx_ir as ir

    found, more = (each.clone(allow_outer_scope_values=True) for each in (branch, behind))
    results, nodes = list(more.outputs), list(more)
    more.outputs.clear()
    more.remove(nodes)
    rename(nodes, names)
    given = dict(zip(more.inputs, found.outputs, strict=True))
    for formal, actual in given.items():
        ir.convenience.replace_all_uses_with(formal, actual)
    found.extend(nodes)
    found.outputs[:] = [given.get(value, value) for value in results]
    return found
