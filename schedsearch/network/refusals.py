"""What a model is refused with: every node that no kernel computes, by name, why, and who could compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from schedsearch.network.control.bodies import bodies_of
from schedsearch.network.control.branches import condition_of, why_not_both
from schedsearch.network.control.isolated import why_not_isolated
from schedsearch.network.control.loops import UNROLLED, why_not_unrolled
from schedsearch.network.control.sequences import MAKES, READS
from schedsearch.network.facts import deciding, dtype_of, has_bodies, is_decided_in_calls, is_onnx, name_of
from schedsearch.network.invalid import BY_CALL, NoOperatorError
from schedsearch.network.settings import as_given
from schedsearch.ops.dtypes import DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir

LACKS = "schedsearch lacks this operator"
_KNOWN_DOMAINS = (
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "com.microsoft",
    "com.microsoft.nchwc",
    "com.ms.internal.nhwc",
    "org.pytorch.aten",
)
"""Whose operators ONNX Runtime has."""


def refused(left: Mapping[ir.Node, str]) -> NoOperatorError:
    """The error for nodes that nothing stands for.

    Args:
        left: each of them -> why.
    """
    nothing = {
        node: f"{own}; {reason}" if (own := _without_name(left[node], name_of(node))) else reason
        for node in left
        if (reason := why_nothing(node))
    }
    groups = grouped({node: reason for node, reason in left.items() if node not in nothing})
    text = ""
    if groups:
        text = f"schedsearch has no operator for these nodes of the model: {'; '.join(groups)}"
    if nothing:
        text += f"{'. ' if text else ''}Nothing here computes these nodes of the model: {'; '.join(grouped(nothing))}"
    results = [value for graph in {node.graph for node in left if node.graph is not None} for value in graph.outputs]
    of_calls = BY_CALL if any(map(is_decided_in_calls, results)) else None  # no subgraph of ONNX Runtime has such results
    return NoOperatorError(text, "" if nothing else of_calls)


def grouped(left: Mapping[ir.Node, str]) -> list[str]:
    """Nodes of one operator with one cause together, with all their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for node, reason in left.items():
        found.setdefault((node.op_type, _without_name(reason, name_of(node))), []).append(name_of(node))
    return [f"{op}: {', '.join(names)}{f' ({reason})' if reason else ''}" for (op, reason), names in found.items()]


def _without_name(reason: str, name: str) -> str:
    """A cause without the name of its node, which is said before it."""
    for start in (f"{name}: ", f"{name} "):
        if reason.startswith(start):
            return reason[len(start) :]
    return "" if reason == LACKS else reason


def why_nothing(node: ir.Node) -> str:
    """Why not even ONNX Runtime can compute a node in a network; "" if it may."""
    if node.domain not in _KNOWN_DOMAINS:
        return f"of the domain {node.domain!r}, which ONNX Runtime lacks; replace it in the model"
    for value in node.outputs:
        if not value.is_graph_output() or value.type is None:
            continue
        if not is_array(value):
            return f"its result {value.name!r}, a {kind_of(value)}, is an output of the model; allowed: arrays"
        if value.dtype is not None and dtype_of(value) not in DTYPES:
            return (
                f"its result {value.name!r}, of {dtype_of(value)}, is an output of the model; allowed: {', '.join(DTYPES)}"
            )
    return ""


def is_array(value: ir.Value) -> bool:
    """Whether a value is an array, as far as its type is known; others are sequences and optional values."""
    import onnx_ir as ir

    return value.type is None or isinstance(value.type, ir.TensorType)


def kind_of(value: ir.Value) -> str:
    """What a value is: array, sequence, optional or sparse array."""
    import onnx_ir as ir

    kinds = {ir.SequenceType: "sequence", ir.OptionalType: "value that may be missing", ir.SparseTensorType: "sparse array"}
    return next((word for kind, word in kinds.items() if isinstance(value.type, kind)), "array")


# --- Nodes with bodies, and of sequences --------------------------------------------------------------------------------
def why_left(node: ir.Node, taken: Iterable[str]) -> str:
    """Why a node with bodies, or of sequences, is still there after everything was folded; "" for other nodes.

    Args:
        taken: operators that have kernels: nodes of others inside of it are listed.
    """
    if node.op_type in (*MAKES, *READS) and is_onnx(node) and not has_bodies(node):
        return "its sequence is not known when the model is read; allowed: sequences of a fixed number of arrays"
    if not has_bodies(node):
        return ""
    opset = 1 if node.graph is None else node.graph.opset_imports.get("", 1)
    if is_onnx(node) and node.op_type == "If":
        cause = _why_if(node)
    elif is_onnx(node) and node.op_type in UNROLLED:
        cause = why_not_unrolled(node, opset)
        if inner := why_not_isolated(node):
            cause += f"; or a body that gives arrays of fixed shapes: {inner}"
    else:
        cause = "nodes inside of it are not read"
    inside = grouped({inner: "" for inner in _within(node) if inner.op_type not in taken or not is_onnx(inner)})
    lacking = f"; without a kernel inside of it: {'; '.join(inside)}" if inside else ""
    return cause + lacking


def _within(node: ir.Node) -> Iterator[ir.Node]:
    for body in bodies_of(node):
        for inner in body:
            if inner.op_type != "Constant":
                yield inner
            yield from _within(inner)


def _why_if(node: ir.Node) -> str:
    condition = node.inputs[0]
    assert condition is not None and condition_of(node) is None
    names = sorted(deciding(condition))
    given = f"; give {', '.join(names)} a value: {as_given(names)}" if names else ""
    others = f"or two branches that give arrays of the same fixed shapes; {why_not_isolated(node) or why_not_both(node)}"
    return f"its condition {condition.name!r} is computed; allowed: a constant{given}, {others}"
