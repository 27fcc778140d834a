"""`If`s and `Loop`s of a model: with the branches in their places that some inputs take, and as many copies of a body as
there are turns; and inputs that take other branches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from schedsearch.network_check.draws import Wanted
from schedsearch.network_check.protos import reads_of, subgraphs_of
from schedsearch.ops.dtypes import dtype
from schedsearch.typed import Array

_MOST_COPIES = 2000  # nodes of all copies of a body
_SMALL = (1, 2, 3)  # numbers of turns
_MOST_SETTINGS = 8  # elements of an input that is a setting rather than data
_MOST_TRUTHS = 4  # whose combinations are all tried
_MOST_CONSTANTS = 16  # of the model that such an input is tried with


def conditions(model: ModelProto) -> list[str]:
    """The conditions of the `If`s of the graph, without those inside of them."""
    return list(dict.fromkeys(node.input[0] for node in model.graph.node if node.op_type == "If"))


def loops(model: ModelProto) -> list[NodeProto]:
    """The `Loop`s of the graph that stack nothing that is read."""
    read = {name for node in model.graph.node for name in reads_of(node)} | {each.name for each in model.graph.output}
    return [
        node
        for node in model.graph.node
        if node.op_type == "Loop" and not read.intersection(node.output[len(_body(node, "body").input) - 2 :])
    ]


def counting(model: ModelProto) -> ModelProto:
    """A model in which each of `loops` carries one more number, which is how many turns it took at its end: `turns_of` it.
    onnx's evaluator cannot stack what no turn gives."""
    made = ModelProto()
    made.CopyFrom(model)
    for node in loops(made):
        body = next(each.g for each in node.attribute if each.name == "body")
        count, name = len(body.input) - 2, turns_of(node)
        one, before, after = (f"{name}/{word}" for word in ("one", "before", "after"))
        made.graph.initializer.append(numpy_helper.from_array(np.array(0), f"{name}/none"))
        body.initializer.append(numpy_helper.from_array(np.array(1), one))
        body.node.append(helper.make_node("Add", [before, one], [after]))
        body.input.append(helper.make_tensor_value_info(before, TensorProto.INT64, []))
        outputs, results = list(body.output), list(node.output)
        outputs.insert(1 + count, helper.make_tensor_value_info(after, TensorProto.INT64, []))
        results.insert(count, name)
        del body.output[:], node.output[:]
        body.output.extend(outputs)
        node.output.extend(results)
        node.input.append(f"{name}/none")
    return made


def turns_of(node: NodeProto) -> str:
    """The name of the number of `counting`."""
    return f"{node.output[0]}/turns"


def with_bodies(model: ModelProto, truths: Mapping[str, bool], turns: Mapping[str, int]) -> ModelProto:
    """A model with a branch in the place of each `If` of its graph, and with copies of the body in that of each of `loops`,
    unless these are very many. Values inside get new names.

    Args:
        truths: condition -> what it is.
        turns: by `turns_of`.
    """
    made, known = ModelProto(), {turns_of(node) for node in loops(model)}
    made.CopyFrom(model)
    del made.graph.node[:]
    for node in model.graph.node:
        here = next(filter(None, node.output), "")
        if node.op_type == "If":
            word = "then_branch" if truths[node.input[0]] else "else_branch"
            results = _inlined(made, _body(node, word), here, {})
        elif node.op_type == "Loop" and turns_of(node) in known:
            body, count = _body(node, "body"), turns[turns_of(node)]
            if count * len(body.node) > _MOST_COPIES:
                made.graph.node.append(node)
                continue
            results = list(node.input[2:])
            for turn in range(count):
                at = f"{here}.{turn}"
                given = [f"{at}/number", f"{at}/true"]
                for name, value in zip(given, (np.array(turn), np.array(True))):
                    made.graph.initializer.append(numpy_helper.from_array(value, name))
                formal = [each.name for each in body.input]
                results = _inlined(made, body, at, dict(zip(formal, [*given, *results])))[1:]
        else:
            made.graph.node.append(node)
            continue
        made.graph.node.extend(
            helper.make_node("Identity", [result], [name], name=f"{node.name or node.output[0]}/{name}")
            for result, name in zip(results, node.output)
            if name
        )
    return made


def _body(node: NodeProto, name: str) -> GraphProto:
    return next(each.g for each in node.attribute if each.name == name)


def _inlined(made: ModelProto, body: GraphProto, at: str, given: Mapping[str, str]) -> list[str]:
    """Adds a copy of a body to a model, and returns the names of its results.

    Args:
        at: makes names inside unlike others: a name of one value of the model, with a number.
        given: its inputs -> what they are.
    """
    copy = GraphProto()
    copy.CopyFrom(body)
    _rename(copy, {**{name: f"{name}/{at}" for name in _own(copy)}, **given})
    made.graph.initializer.extend(copy.initializer)
    made.graph.node.extend(copy.node)
    return [each.name for each in copy.output]


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
    """Inputs that may take other branches than those drawn: settings: truths, and integers as constants of the model;
    and numbers of one sign, of another magnitude, and zeros."""
    inputs = [each for each in inputs if each.value is None]
    settings = [each for each in inputs if not dtype(each.dtype).is_float and np.prod(each.shape) <= _MOST_SETTINGS]
    truths = [each for each in settings if each.below == 2][:_MOST_TRUTHS]
    for values in itertools.product((0, 1), repeat=len(truths)) if truths else ():
        told = {each.name: np.full(each.shape, value, drawn[each.name].dtype) for each, value in zip(truths, values)}
        yield {**drawn, **told}
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
    """The single integers among the constants of a model, those behind comparisons first, and small numbers."""
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
    yield from dict.fromkeys((*_SMALL, *found)) if any(node.op_type == "Loop" for node in nodes) else found
