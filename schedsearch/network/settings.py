"""Inputs of nodes that are settings: a shape or an axis follows from their numbers. Kernels take constants for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.network.facts import deciding, is_given, is_onnx, name_of

if TYPE_CHECKING:
    import onnx_ir as ir

_AXES = {1: "axes"}
SETTINGS: Mapping[str, Mapping[int, str]] = {
    "ConstantOfShape": {0: "a shape"},
    "CumSum": {1: "an axis"},
    "Expand": {1: "a shape"},
    "OneHot": {1: "a depth"},
    "Pad": {1: "pads", 3: "axes"},
    "Range": {0: "a start", 1: "a limit", 2: "a step"},
    "Reshape": {1: "a shape"},
    "Resize": {2: "scales", 3: "sizes"},
    "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    "Split": {1: "parts"},
    "Squeeze": _AXES,
    "Tile": {1: "repeats"},
    "TopK": {1: "a k"},
    "Unsqueeze": _AXES,
    "Upsample": {1: "scales"},
    **{
        f"Reduce{each}": _AXES
        for each in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}
"""Operator -> place of an input -> what it is."""


def size_problem(node: ir.Node) -> str:
    """Why no kernel computes a node whose shape or axes are known only in a call; else empty."""
    for place, word in SETTINGS.get(node.op_type, {}).items():
        operand = node.inputs[place] if is_given(node, place) else None
        if operand is None or operand.const_value is not None or not is_onnx(node):
            continue
        if operand.is_graph_input():
            name = operand.name
            return f"{name_of(node)} gets {word} from the input {name!r}; allowed: a constant. {_remedy(str(name))}"
        names = sorted(deciding(operand))
        verb, allowed = ("is", "a constant") if word.startswith(("a ", "an ")) else ("are", "constants")
        text = f"{name_of(node)} has {word} that {verb} computed; allowed: {allowed}"
        return f"{text}. {_remedy(*names)}" if names else text
    return ""


def as_given(names: Sequence[str]) -> str:
    """How inputs of a model get values, on the command line and in Python."""
    options, pairs = " ".join(f"--input {name}=VALUE" for name in names), ", ".join(f"{name!r}: VALUE" for name in names)
    return f"{options}, in Python inputs={{{pairs}}}"


def _remedy(*names: str) -> str:
    return f"Give {', '.join(names)} a value: {as_given(names)}"
