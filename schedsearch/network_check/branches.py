"""`If`s of a model: with the branches in their places that some inputs take, and inputs that take others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from schedsearch.network_check.draws import Wanted
from schedsearch.network_check.protos import subgraphs_of
from schedsearch.ops.dtypes import dtype
from schedsearch.typed import Array

_MOST_SETTINGS = 8  # elements of an input that is a setting rather than data
_MOST_CONSTANTS = 16  # of the model that such an input is tried with


def conditions(model: ModelProto) -> list[str]:
    """The conditions of the `If`s of the graph, without those inside of them."""
    return list(dict.fromkeys(node.input[0] for node in model.graph.node if node.op_type == "If"))


def with_branches(model: ModelProto, truths: Mapping[str, bool]) -> ModelProto:
    """A model with a branch in the place of each `If` of its graph. Values inside get new names.

    Args:
        truths: condition -> what it is.
    """
    made = ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for number, node in enumerate(model.graph.node):
        if node.op_type != "If":
            made.graph.node.append(node)
            continue
        branch = GraphProto()
        word = "then_branch" if truths[node.input[0]] else "else_branch"
        branch.CopyFrom(next(each.g for each in node.attribute if each.name == word))
        _rename(branch, {name: f"{name}/{word}{number}" for name in _own(branch)})
        made.graph.initializer.extend(branch.initializer)
        made.graph.node.extend(branch.node)
        made.graph.node.extend(
            helper.make_node("Identity", [result.name], [name], name=f"{node.name or node.output[0]}/{name}")
            for result, name in zip(branch.output, node.output)
            if name
        )
    return made


def _own(graph: GraphProto) -> set[str]:
    return {each.name for each in graph.initializer} | {name for node in graph.node for name in node.output if name}


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Gives values new names wherever they are made or read, in the graph and inside of its nodes."""
    for port in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        port.name = names.get(port.name, port.name)
    for node in graph.node:
        for some in (node.input, node.output):
            for place, name in enumerate(some):
                some[place] = names.get(name, name)
        for inner in subgraphs_of(node):
            hidden = {*_own(inner), *(each.name for each in inner.input)}
            _rename(inner, {name: to for name, to in names.items() if name not in hidden})


def candidates(inputs: Sequence[Wanted], drawn: Mapping[str, Array], model: ModelProto) -> Iterator[dict[str, Array]]:
    """Inputs that may take other branches than those drawn: integers that are settings as constants of the model, and
    numbers of one sign, of another magnitude, and zeros."""
    settings = [each for each in inputs if not dtype(each.dtype).is_float and np.prod(each.shape) <= _MOST_SETTINGS]
    for number in itertools.islice(_integers(model), _MOST_CONSTANTS):
        for each in settings:
            limits = np.iinfo(drawn[each.name].dtype)
            most = limits.max if each.below is None else each.below - 1
            for value in (number, number + 1, number - 1):
                if limits.min <= value <= most:
                    yield {**drawn, each.name: np.full(each.shape, value, drawn[each.name].dtype)}
    signed = [each for each in inputs if dtype(each.dtype).is_float or (each.below is None and "uint" not in each.dtype)]
    for change in (np.negative, np.abs, lambda x: -np.abs(x), np.zeros_like, lambda x: x / 8, lambda x: x * 8):
        changed = {each.name: np.asarray(change(drawn[each.name])).astype(drawn[each.name].dtype) for each in signed}
        yield {**drawn, **changed}


def _integers(model: ModelProto) -> Iterator[int]:
    """The single integers among the constants of a model, those behind comparisons first."""
    known = {each.name: each for each in model.graph.initializer}
    nodes: list[NodeProto] = list(model.graph.node)
    for node in nodes:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            known[node.output[0]] = node.attribute[0].t
    compared = [
        name
        for node in nodes
        if node.op_type in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
        for name in node.input
    ]
    found: dict[int, None] = {}
    for name in (*compared, *known):
        if name in known and np.prod(known[name].dims, dtype=int) == 1:
            array = numpy_helper.to_array(known[name])
            if array.dtype.kind in "iu":
                found[int(np.ravel(array)[0])] = None
    yield from found
