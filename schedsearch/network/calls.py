"""The functions of an ONNX model: whether calls fit them, and how many nodes inlining them makes.

A small file can hold functions that call one another so that inlining them would not end in any time: each of thirty that
calls the next one twice is a thousand million nodes.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx

MOST_NODES = 100_000  # that inlining may make; exporters write functions of tens of nodes
MOST_BYTES = 1 << 31  # of tensors in these nodes: as many as a file can hold
_Key = tuple[str, str, str]  # domain, name and overload


@dataclass(frozen=True)
class _Size:
    nodes: int = 0
    nbytes: int = 0

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.nodes + other.nodes, self.nbytes + other.nbytes)


def functions_of(model: onnx.ModelProto) -> dict[_Key, onnx.FunctionProto]:
    return {(each.domain, each.name, each.overload): each for each in model.functions}


def key_of(node: onnx.NodeProto) -> _Key:
    """The function that a node would call."""
    return node.domain, node.op_type, node.overload


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their bodies."""
    for node in nodes:
        yield node
        for graph in bodies_of(node):
            yield from nodes_within(graph.node)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def check_calls(model: onnx.ModelProto, what: str, *, most_nodes: int | None = None, most_bytes: int | None = None) -> None:
    """Looks at the functions of a model without inlining them.

    Args:
        what: the model, for messages.
        most_nodes, most_bytes: limits of what inlining makes; default: `MOST_NODES` and `MOST_BYTES`.

    Raises:
        ModelError: two functions have one name, a function has that of an operator of ONNX, a function calls itself, also
            through others, a call does not fit its function, or inlining makes more than the limits.
    """
    functions = functions_of(model)
    if not functions:
        return
    if len(functions) < len(model.functions):
        names = [name for _, name, _ in ((each.domain, each.name, each.overload) for each in model.functions)]
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"{what} has two functions of the name {twice!r}; correct the model")
    for domain, name, _ in functions:
        if not name or domain in ("", "ai.onnx"):
            raise ModelError(
                f"{what} has a function {name!r} of the domain {domain!r}, which is that of ONNX's own operators; correct "
                "the model: give it a name and a domain of its own"
            )
    inner = {key: list(nodes_within(each.node)) for key, each in functions.items()}
    order = _callees_first(inner, functions, what)
    for node in (*nodes_within(model.graph.node), *(node for nodes in inner.values() for node in nodes)):
        if key_of(node) in functions:
            _check_call(node, functions[key_of(node)], inner[key_of(node)], what)
    sizes: dict[_Key, _Size] = {}
    for key in order:
        sizes[key] = _made(inner[key], sizes, own=True)
    made = _made(nodes_within(model.graph.node), sizes, own=False)
    nodes, nbytes = most_nodes or MOST_NODES, most_bytes or MOST_BYTES
    if made.nodes > nodes or made.nbytes > nbytes:
        raise ModelError(
            f"{what}: its functions would become {_about(made.nodes)} nodes with {_about(made.nbytes)} bytes of constants "
            f"when they are inlined; allowed: {nodes:,} nodes with {nbytes:,} bytes. Export the model without functions"
        )


def settle_opsets(model: onnx.ModelProto, what: str) -> None:
    """Gives functions the opsets of the model, where ONNX defines all operators in them alike in both.

    Raises:
        ModelError: an operator of a function that is called is another one in the opset of the model; or a function is for
            a version below 1.
    """
    versions, functions = {each.domain: each.version for each in model.opset_import}, functions_of(model)
    nodes = (model.graph.node, *(each.node for each in model.functions))
    called = {key_of(node) for each in nodes for node in nodes_within(each)}
    for key, function in functions.items():
        for each in function.opset_import:
            if each.version < 1:
                raise ModelError(
                    f"{what}: the function {function.name!r} is for version {each.version} of {each.domain or 'ai.onnx'!r}; "
                    "allowed: from 1. Correct the model"
                )
            wanted = versions.get(each.domain, each.version)
            ops = {node.op_type for node in nodes_within(function.node) if _of_domain(node) == each.domain}
            changed = next((op for op in sorted(ops) if _differ(op, each.domain, each.version, wanted)), None)
            if changed is None:
                each.version = wanted
            elif key in called:
                raise ModelError(
                    f"{what}: the function {function.name!r} is for opset {each.version}, the model for {wanted}, and "
                    f"{changed} differs between them; allowed: one opset. Let onnx convert it: "
                    "onnx.inliner.inline_local_functions(model, convert_version=True)"
                )


def _of_domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)


def _differ(op: str, domain: str, version: int, other: int) -> bool:
    """Whether an operator of ONNX is not the same in two opsets."""
    import onnx

    found: list[int] = []
    for each in (version, other):
        try:
            found.append(onnx.defs.get_schema(op, each, domain).since_version)
        except onnx.defs.SchemaError:  # of another domain, or of none of this opset
            found.append(0)
    return found[0] != found[1]


def _callees_first(
    inner: Mapping[_Key, list[onnx.NodeProto]], functions: Mapping[_Key, onnx.FunctionProto], what: str
) -> list[_Key]:
    calls = {key: [key_of(node) for node in nodes if key_of(node) in functions] for key, nodes in inner.items()}
    try:
        return list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        names = " -> ".join(repr(name) for _, name, _ in error.args[1][:6])
        raise ModelError(f"{what}: a function calls itself, {names}; correct the model") from error


def _made(nodes: Iterable[onnx.NodeProto], sizes: Mapping[_Key, _Size], *, own: bool) -> _Size:
    """What calls among the nodes become, and with `own` the other nodes, too."""
    total = _Size()
    for node in nodes:
        if key_of(node) in sizes:
            total += sizes[key_of(node)]
        elif own:
            total += _Size(1, sum(attribute.t.ByteSize() for attribute in node.attribute if attribute.HasField("t")))
    return total


def _about(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"about 10^{len(str(number)) - 1}"


def _check_call(node: onnx.NodeProto, function: onnx.FunctionProto, inner: list[onnx.NodeProto], what: str) -> None:
    import onnx

    where = f"{what}: node {node.name or node.op_type!r} calls the function {function.name!r}"
    for kind in ("input", "output"):
        got, allowed = len(getattr(node, kind)), len(getattr(function, kind))
        if got > allowed:
            raise ModelError(f"{where} with {got} {kind}s; allowed: {allowed}. Correct the model")
    given = {attribute.name: attribute.type for attribute in node.attribute}
    for each in inner:
        for attribute in each.attribute:
            kind = given.get(attribute.ref_attr_name, attribute.type) if attribute.ref_attr_name else attribute.type
            if kind != attribute.type:
                wanted, got = (onnx.AttributeProto.AttributeType.Name(number) for number in (attribute.type, kind))
                raise ModelError(
                    f"{where} with an attribute {attribute.ref_attr_name!r} of type {got}, where {each.op_type} in it wants "
                    f"{wanted}; correct the model"
                )
