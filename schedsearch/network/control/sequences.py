"""Sequences whose arrays are known: each node that reads one reads the arrays themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.control.bodies import Names, Place, bodies_of, graphs_of
from schedsearch.network.facts import constant_input, is_given, is_onnx

if TYPE_CHECKING:
    import onnx_ir as ir

_Known = dict["ir.Value", list["ir.Value"]]
MAKES = ("SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence", "SequenceMap")
READS = ("SequenceAt", "SequenceLength", "ConcatFromSequence")


def read_sequences(model: ir.Model) -> bool:
    """Puts arrays in the place of nodes that read sequences of known arrays, in the graph and in bodies. Returns whether
    there was any. Nodes that make sequences are left to those who remove what nothing reads."""
    changed = False
    names = None
    known: _Known = {}
    for graph in list(graphs_of(model.graph))[::-1]:  # outer ones first: bodies read sequences around them
        for node in list(graph):
            if not is_onnx(node) or node.op_type not in (*MAKES, *READS, "Identity"):
                continue
            if (made := _MADE.get(node.op_type)) is not None:
                arrays = made(node, known)
                if arrays is not None:
                    known[node.outputs[0]] = arrays
            elif node.op_type != "SplitToSequence" and node.inputs and node.inputs[0] in known:  # onnxscript splits
                names = names or Names(model)
                replaced = _mapped if node.op_type == "SequenceMap" else _read
                changed = replaced(Place(model, node, names), node, known) or changed
    return changed


def _place(node: ir.Node, number: int, count: int) -> int | None:
    """Input `number` as a place in a sequence of so many arrays; None if it is computed or out of range."""
    array = constant_input(node, number)
    if array is None or array.size != 1:
        return None
    place = int(array.ravel()[0])
    return place % count if -count <= place < count else count if place == count else None


# --- What makes sequences -----------------------------------------------------------------------------------------------
def _constructed(node: ir.Node, known: _Known) -> list[ir.Value] | None:
    return [value for value in node.inputs if value is not None]


def _same(node: ir.Node, known: _Known) -> list[ir.Value] | None:
    return known.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None


def _inserted(node: ir.Node, known: _Known) -> list[ir.Value] | None:
    arrays, value = _same(node, known), node.inputs[1]
    if arrays is None or value is None:
        return None
    place = _place(node, 2, len(arrays)) if is_given(node, 2) else len(arrays)
    return None if place is None else [*arrays[:place], value, *arrays[place:]]


def _erased(node: ir.Node, known: _Known) -> list[ir.Value] | None:
    arrays = _same(node, known)
    if not arrays:
        return None
    place = _place(node, 1, len(arrays)) if is_given(node, 1) else len(arrays) - 1
    return None if place is None or place == len(arrays) else [*arrays[:place], *arrays[place + 1 :]]


_MADE: Mapping[str, Callable[[ir.Node, _Known], list[ir.Value] | None]] = {
    "SequenceEmpty": lambda node, known: [],
    "SequenceConstruct": _constructed,
    "SequenceInsert": _inserted,
    "SequenceErase": _erased,
    "Identity": _same,
}


# --- What reads them ----------------------------------------------------------------------------------------------------
def _at(place: Place, node: ir.Node, arrays: list[ir.Value]) -> ir.Value | None:
    number = _place(node, 1, len(arrays))
    return None if number is None or number == len(arrays) else arrays[number]


def _count(place: Place, node: ir.Node, arrays: list[ir.Value]) -> ir.Value | None:
    return place.constant(f"{node.outputs[0].name}.count", np.array(len(arrays)))


def _joined(place: Place, node: ir.Node, arrays: list[ir.Value]) -> ir.Value | None:
    axis, is_new = node.attributes.get_int("axis", 0), bool(node.attributes.get_int("new_axis", 0))
    if not arrays:
        return None
    if axis < 0:
        if arrays[0].shape is None:
            return None
        axis += len(arrays[0].shape) + is_new
    return place.concatenated([place.unsqueezed(value, axis) for value in arrays] if is_new else arrays, axis)


def _read(place: Place, node: ir.Node, known: _Known) -> bool:
    value = _READ[node.op_type](place, node, known[node.inputs[0]])
    if value is not None:
        place.replace([value])
    return value is not None


_READ: Mapping[str, Callable[[Place, ir.Node, list[ir.Value]], ir.Value | None]] = {
    "SequenceAt": _at,
    "SequenceLength": _count,
    "ConcatFromSequence": _joined,
}


# --- SequenceMap --------------------------------------------------------------------------------------------------------
def _mapped(place: Place, node: ir.Node, known: _Known) -> bool:
    """A copy of the body for each array; the results are sequences of their results."""
    import onnx_ir as ir

    (body,) = bodies_of(node)
    given = [value for value in node.inputs if value is not None]
    count = len(known[given[0]])
    if any(len(known[value]) != count for value in given if value in known):
        return False
    turns = [[known[value][turn] if value in known else value for value in given] for turn in range(count)]
    results = [place.copy(body, turn) for turn in turns]
    sequences = []
    for number, old in enumerate(node.outputs):
        value = ir.Value(name=place.names.value(f"{old.name}.arrays"), type=old.type)
        inputs = [turn[number] for turn in results]
        op = "SequenceConstruct" if inputs else "SequenceEmpty"
        place.add([ir.Node("", op, inputs, outputs=[value], name=node.name)])
        known[value] = inputs
        sequences.append(value)
    place.replace(sequences)
    return True
