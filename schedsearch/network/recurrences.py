"""LSTM, GRU and RNN: a dense layer that multiplies the input of all steps at once, and the recurrence behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.facts import (
    FLOATS,
    constant_of,
    dtype_of,
    extents_of,
    folded,
    inputs_of,
    is_given,
    name_of,
    optional_input,
)
from schedsearch.network.graph import Constant, axes_of
from schedsearch.network.indexing import operand
from schedsearch.network.recurrence_rules import cell_of, functions_of
from schedsearch.ops.recurrent import CELLS, FUNCTIONS, MOST_HIDDEN
from schedsearch.typed import Array, ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir

_UNSETTLED = {"affine": ("alpha",), "thresholded_relu": ("alpha",), "scaled_tanh": ("alpha", "beta")}
"""Numbers for which ONNX's text has another default than ONNX Runtime, or none."""
_STATES = {5: "initial_h", 6: "initial_c"}


def _functions(node: ir.Node) -> ParamsByName | str:
    """The activations of a node with all of their numbers, or why there are none."""
    found = functions_of(node)
    if isinstance(found, str):
        return found
    for number in ("alpha", "beta"):
        for place, name in enumerate(found["activations"]):
            default = getattr(FUNCTIONS[name], number)
            if found[number][place] is None and default is not None and number in _UNSETTLED.get(name, ()):
                return f"has no activation_{number} for {name}, of which runtimes have different defaults; give it"
            if found[number][place] is None:
                found[number][place] = default or 0.0
    return found


def _recurrence(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, _, r = inputs_of(node, 3)
    cell, name, read = cell_of(node), name_of(node), node.attributes
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name} is {dtype}; allowed: {', '.join(FLOATS)}"
    if not all(extents_of(node, x)):
        return f"{name} reads an array without elements, {extents_of(node, x)}; allowed: at least one step of one row"
    weights, matrices, biases, peepholes = (_numbers(node, place) for place in (1, 2, 3, 7))
    for place, what, array in ((1, "W", weights), (2, "R", matrices), (3, "B", biases), (7, "P", peepholes)):
        if array is None and is_given(node, place):
            return f"{name} has a computed {what}; allowed: a constant"
    functions = _functions(node)
    if isinstance(functions, str):
        return f"{name} {functions}"
    assert weights is not None and matrices is not None
    batch_first = bool(read.get_int("layout", 0))
    t, n = extents_of(node, x)[:2][:: -1 if batch_first else 1]
    hidden, linear = matrices.shape[2], cell == "gru" and bool(read.get_int("linear_before_reset", 0))
    if hidden > MOST_HIDDEN:
        return f"{name} has {hidden} numbers in a state; allowed: up to {MOST_HIDDEN}"
    dense = _dense(node, x, weights, biases, linear)
    arguments: dict[str, Operand] = {"gates": dense.value, "r": Constant(str(r.name), "ABC", matrices)}
    if biases is not None and linear:
        last = biases[:, -hidden:]
        arguments["bias"] = Constant(f"{name}.bias", "AB", last)
    for place, state in _STATES.items():
        if (given := _argument(node, place, zero=True)) is not None:
            arguments[state] = given
    if peepholes is not None and peepholes.any():
        arguments["peepholes"] = Constant(f"{name}.peepholes", "AB", peepholes)
    if (lens := _lens(node, t)) is not None:
        arguments["sequence_lens"] = lens
    results = {
        result: value
        for result, value in zip(CELLS[cell].results, node.outputs)
        if value.name and (value.uses() or value.is_graph_output())
    }
    params: ParamsByName = {
        "cell": cell, "t": t, "n": n, "hidden": hidden, "direction": read.get_string("direction", "forward"),
        "optional": [each for each in arguments if each not in ("gates", "r")], "results": list(results), **functions,
        "clip": read.get_float("clip", 0.0), "linear_before_reset": linear,
        "input_forget": cell == "lstm" and bool(read.get_int("input_forget", 0)), "batch_first": batch_first, "dtype": dtype,
    }  # fmt: skip
    if not results:
        return f"{name} gives nothing that is read"
    first, *others = results
    chain = Chain("recurrent", params, [node], results[first], arguments, before=[dense])
    chain.others = {other: results[other] for other in others}
    return chain


def _dense(node: ir.Node, x: ir.Value, weights: Array, biases: Array | None, linear: bool) -> Chain:
    """x times the weights of all directions, with the biases that only add."""
    import onnx_ir as ir

    name, (*steps, inputs) = name_of(node), extents_of(node, x)
    directions, rows, _ = weights.shape
    value = ir.Value(name=f"{node.outputs[0].name or name}.gates", type=x.type, shape=ir.Shape([*steps, directions * rows]))
    arguments: dict[str, Operand] = {
        "x": operand(x),
        "weight": Constant(f"{name}.W", "NK", weights.reshape(directions * rows, inputs)),
    }
    params = {"m": steps[0] * steps[1], "n": directions * rows, "k": inputs, "dtype": dtype_of(x)}
    chain = Chain("dense", params, [node], value, arguments, channels=directions * rows, channel_axis=2)
    if biases is not None:
        of_x, of_h = biases[:, :rows].astype(np.float32), biases[:, rows:].astype(np.float32)
        if linear:
            of_h[:, 2 * rows // 3 :] = 0
        chain.stages.append("bias")
        arguments["bias"] = Constant(f"{name}.B", "K", (of_x + of_h).ravel())
    return chain


def _numbers(node: ir.Node, place: int) -> Array | None:
    value = optional_input(node, place)
    return None if value is None else folded(value)


def _argument(node: ir.Node, place: int, *, zero: bool = False) -> Operand | None:
    """An input; None if it is missing, or all zeros if `zero` says that these are the default."""
    value = optional_input(node, place)
    array = constant_of(value)
    if value is None or (zero and array is not None and not array.any()):
        return None
    return value if array is None else Constant(str(value.name), axes_of(array.ndim), array)


def _lens(node: ir.Node, t: int) -> Operand | None:
    """Lengths of the rows; None if all have all steps."""
    found = _argument(node, 4)
    return None if isinstance(found, Constant) and (found.array == t).all() else found


RECURRENCES: Mapping[str, Read] = dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrence)
