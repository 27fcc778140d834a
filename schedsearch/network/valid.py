"""Whether an ONNX model is valid: the one place that decides it, for every command that reads a model.

A model is looked at in this order, and each step may rely on those before it. No step reads the weights, so the cost
depends on the number of nodes.

1. Versions, and the names of values: each is made once, before it is read (`_Names`).
2. Functions: what inlining them makes has a limit (`schedsearch.network.calls`).
3. Tensors: their bytes are there, wherever a graph, a body or a function holds them (`schedsearch.network.stored`).
4. Nodes: their attributes and the numbers of their inputs are those of their operators, by onnx's checker.
5. Dtypes and shapes follow from the inputs without a contradiction (`schedsearch.network.outline`).

ONNX Runtime refuses what fails here when it loads a model, or when it runs it for the first time. A node of another domain
than ONNX's is not checked: whether somebody computes it is found out later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.errors import first_line
from schedsearch.network.calls import bodies_of, check_calls, functions_of, key_of, nodes_within, settle_opsets
from schedsearch.network.facts import OF_RUNTIME
from schedsearch.network.invalid import ModelError
from schedsearch.network.node_rules import wrong_attribute
from schedsearch.network.outline import Outline
from schedsearch.network.stored import External, check_tensor, tensors_of

if TYPE_CHECKING:
    import onnx

OLDEST_OPSET = 7  # the first without the legacy broadcasting of element-wise operators
OF_ONNX = ("", "ai.onnx")
_NO_NAMES = ("?", "-1", "None")  # of open extents, as exporters write them


def check(model: onnx.ModelProto, what: str, folder: Path | None = None) -> Outline:
    """Refuses a model that is not valid.

    Names of ONNX's domain become one, functions get the opsets of the model, open extents of inputs get names, nodes are
    put in the order in which they can run, and external data becomes part of the nodes that hold it, and of small
    weights; that of larger weights stays outside.

    Args:
        what: the model, for messages.
        folder: the resolved folder of its file, in which external data must lie.

    Returns:
        Its outline, which tells shapes and dtypes.

    Raises:
        ModelError: it is not valid.
    """
    _check_versions(model, what)
    if not model.graph.node:
        raise ModelError(f"{what} has no nodes; there is nothing to compile. Give a model that computes something")
    _name_open_extents(model.graph)
    _check_types(model, what)
    _sort(model.graph, _check_names(model, what))
    check_calls(model, what)
    settle_opsets(model, what)
    _check_tensors(model, what, folder)
    _check_nodes(model, what)
    if not model.graph.output:
        raise ModelError(f"{what} has no outputs; there is nothing to compute. Name the results as outputs of the graph")
    return Outline(model, what)


def _check_versions(model: onnx.ModelProto, what: str) -> None:
    import onnx

    if not model.HasField("graph"):
        raise ModelError(f"{what} has no graph; it is not an ONNX model, or it is damaged. Export or copy it again")
    if not model.HasField("ir_version") or model.ir_version > onnx.IR_VERSION:
        got = f"version {model.ir_version}" if model.HasField("ir_version") else "no version"
        raise ModelError(
            f"{what} has {got} of ONNX's format; allowed: up to {onnx.IR_VERSION}, that of the installed onnx. Export the "
            "model for one of these, or upgrade onnx"
        )
    newest = onnx.defs.onnx_opset_version()
    for imports in (model.opset_import, *(each.opset_import for each in model.functions)):
        _check_opsets(imports, what, newest)
    opset = next((each.version for each in model.opset_import if each.domain == ""), None)
    if opset is None or opset < OLDEST_OPSET:
        got = "has no opset of ONNX" if opset is None else f"needs opset {opset}"
        raise ModelError(
            f"{what} {got}; allowed: {OLDEST_OPSET} to {newest}, those of the installed onnx. Export the model for "
            "one of these"
        )


def _check_opsets(imports: Iterable[onnx.OperatorSetIdProto], what: str, newest: int) -> None:
    versions: dict[str, int] = {}
    for each in imports:
        if each.domain == "ai.onnx":
            each.domain = ""
        if versions.setdefault(each.domain, each.version) != each.version:
            raise ModelError(
                f"{what} needs two opsets of the domain {each.domain!r}, {versions[each.domain]} and {each.version}; "
                "allowed: one. Correct the model"
            )
    if versions.get("", 0) > newest:
        raise ModelError(
            f"{what} needs opset {versions['']}; allowed: {OLDEST_OPSET} to {newest}, those of the installed onnx. Export "
            "the model for one of these, or upgrade onnx"
        )


def _name_open_extents(graph: onnx.GraphProto) -> None:
    """Every open extent of an input has a name, and extents have one name only if they are the same.

    Some exporters write -1 for an extent that is open, some leave it empty, and Paddle's calls all of them "?". In an input
    they become INPUT.AXIS, such as "x.2", and elsewhere they are nothing.
    """
    values = (*graph.input, *graph.output, *graph.value_info)
    shapes = [each.type.tensor_type.shape.dim for each in values if each.type.HasField("tensor_type")]
    for extent in (each for shape in shapes for each in shape):
        if (extent.HasField("dim_value") and extent.dim_value < 0) or extent.dim_param in _NO_NAMES:
            extent.Clear()
    taken = {extent.dim_param for shape in shapes for extent in shape}
    for value in graph.input:
        for axis, extent in enumerate(value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ()):
            if extent.WhichOneof("value") is None:
                name = f"{value.name}.{axis}"
                while name in taken:
                    name += "_"
                extent.dim_param = name


def _check_types(model: onnx.ModelProto, what: str) -> None:
    import onnx

    known = set(onnx.TensorProto.DataType.values())
    graphs = [model.graph, *_graphs(model.graph.node)]
    for value in (each for graph in graphs for each in (*graph.input, *graph.output, *graph.value_info)):
        kind = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else int(onnx.TensorProto.FLOAT)
        if not kind:
            raise ModelError(f"{what}: {value.name!r} is an array without a dtype; correct the model")
        if kind not in known:
            raise ModelError(f"{what}: {value.name!r} has the unknown dtype {kind}; correct the model, or upgrade onnx")
    for value in model.graph.input:
        if not value.type.WhichOneof("value"):
            raise ModelError(f"{what}: input {value.name!r} has no type; correct the model")
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    for value in (each for graph in graphs for each in (*graph.input, *graph.output, *graph.value_info)):
        if _has_maps(value.type):
            maker = f", which {makers[value.name]} makes," if value.name in makers else ""
            raise ModelError(
                f"{what}: {value.name!r}{maker} holds maps; allowed: arrays. Remove what makes maps from the model; "
                "skl2onnx leaves it out with options={'zipmap': False}"
            )


def _has_maps(kind: onnx.TypeProto) -> bool:
    """Whether values of the type are maps, or sequences of them."""
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        return _has_maps(getattr(kind, which).elem_type)
    return bool(which == "map_type")


# --- Names --------------------------------------------------------------------------------------------------------------
@dataclass
class _Names:
    """The names of one graph, body or function.

    Attributes:
        where: it, for messages.
        given: inputs and weights.
        made: name -> the place of its node.
    """

    where: str
    given: set[str]
    made: dict[str, int] = field(default_factory=dict)

    def reads(self, node: onnx.NodeProto) -> dict[str, None]:
        """What a node reads: its inputs, and what its bodies read of the graph around them."""
        found = dict.fromkeys(name for name in node.input if name)
        for body in bodies_of(node):
            found |= dict.fromkeys(_free_names(body, f"{self.where}, in {_named(node)}"))
        return found

    def add(self, place: int, node: onnx.NodeProto) -> None:
        outputs = [name for name in node.output if name]
        if not outputs:
            raise ModelError(f"{self.where}: {_named(node)} has no result; correct the model")
        for name in outputs:
            if name in self.given or name in self.made:
                raise ModelError(
                    f"{self.where}: {_named(node)} makes {name!r}, which is already the name of another value; allowed: "
                    "each name once. Correct the model"
                )
            self.made[name] = place

    def check_outputs(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.made and name not in self.given:
                raise ModelError(f"{self.where}: nothing makes the output {name!r}; correct the model")


def _named(node: onnx.NodeProto) -> str:
    return f"node {node.name or node.op_type}"


def _check_names(model: onnx.ModelProto, what: str) -> list[int]:
    """Looks at all names; returns an order in which the nodes of the graph can run."""
    for function in model.functions:
        where = f"{what}, in the function {function.name!r}"
        free = _checked_in_order(_Names(where, _once(function.input, where)), function.node, function.output)
        _refuse_unknown(free, function.node, where)
    names = _Names(what, _given(model.graph, what))
    for place, node in enumerate(model.graph.node):
        names.add(place, node)
    names.check_outputs(each.name for each in model.graph.output)
    needs = [names.reads(node) for node in model.graph.node]
    _refuse_unknown({name for read in needs for name in read} - names.given - set(names.made), model.graph.node, what)
    return _order([[names.made[name] for name in read if name in names.made] for read in needs], what)


def _free_names(graph: onnx.GraphProto, where: str) -> set[str]:
    """What a body reads of the graph around it."""
    return _checked_in_order(_Names(where, _given(graph, where)), graph.node, [each.name for each in graph.output])


def _checked_in_order(names: _Names, nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> set[str]:
    """Looks at nodes that must be in the order in which they run; returns what they read from outside."""
    free: set[str] = set()
    for place, node in enumerate(nodes):
        free |= names.reads(node).keys() - names.given - names.made.keys()
        names.add(place, node)
        if early := free & set(node.output):
            raise ModelError(
                f"{names.where}: {min(early)!r} is read before {_named(node)} makes it; allowed in bodies and functions: "
                "nodes in the order in which they run. Correct the model"
            )
    names.check_outputs(outputs)
    return free


def _refuse_unknown(unknown: set[str], nodes: Iterable[onnx.NodeProto], where: str) -> None:
    if not unknown:
        return
    node = next(each for each in nodes if unknown & {name for inner in nodes_within([each]) for name in inner.input})
    (name, *_) = sorted(unknown & {name for inner in nodes_within([node]) for name in inner.input})
    raise ModelError(
        f"{where}: {_named(node)} reads {name!r}, which no node makes and which is not an input or a weight; correct "
        "the model"
    )


def _once(names: Iterable[str], where: str) -> set[str]:
    found: set[str] = set()
    for name in names:
        if not name or name in found:
            raise ModelError(
                f"{where}: {f'two inputs have the name {name!r}' if name else 'an input has no name'}; correct it"
            )
        found.add(name)
    return found


def _given(graph: onnx.GraphProto, where: str) -> set[str]:
    """The names of inputs and weights; a weight may also be an input, which it is the default of."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"{where}: weight {name!r} is sparse; allowed: dense weights. Save the model with dense ones")
    weights: dict[str, onnx.TensorProto] = {}
    for tensor in graph.initializer:
        if not tensor.name:
            raise ModelError(f"{where}: a weight has no name; correct the model")
        if weights.setdefault(tensor.name, tensor) != tensor:
            raise ModelError(f"{where}: two different weights have the name {tensor.name!r}; correct the model")
    return _once((each.name for each in graph.input), where) | weights.keys()


def _order(needs: Sequence[Sequence[int]], what: str) -> list[int]:
    """Places in an order in which each comes after those that it needs; the given order, if it is one."""
    import graphlib

    if all(need < place for place, read in enumerate(needs) for need in read):
        return list(range(len(needs)))
    try:
        return list(graphlib.TopologicalSorter(dict(enumerate(needs))).static_order())
    except graphlib.CycleError as error:
        raise ModelError(f"{what}: the graph has a cycle, a node that needs its own result; correct the model") from error


def _sort(graph: onnx.GraphProto, order: list[int]) -> None:
    if order == list(range(len(order))):
        return
    import onnx

    nodes = onnx.GraphProto()
    nodes.node.extend(graph.node[place] for place in order)
    del graph.node[:]
    graph.node.extend(nodes.node)


# --- Tensors and nodes --------------------------------------------------------------------------------------------------
def _graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The bodies of nodes, and the bodies inside of these."""
    for node in nodes:
        for graph in bodies_of(node):
            yield graph
            yield from _graphs(graph.node)


def _check_tensors(model: onnx.ModelProto, what: str, folder: Path | None) -> None:
    """Shapes may depend on the numbers of small weights."""
    for tensor in model.graph.initializer:
        external = check_tensor(tensor, f"{what}: weight {tensor.name!r}", folder)
        if external and Outline.is_small(tensor):
            _take_in(tensor, external)
    scopes = [(model.graph.node, what)]
    scopes += [(each.node, f"{what}, in the function {each.name!r}") for each in model.functions]
    for nodes, where in scopes:
        held = [
            (tensor, f"{where}: {_named(node)} ({node.op_type}): the tensor of its attribute {name!r}")
            for node in nodes_within(nodes)
            for name, tensor in tensors_of(node)
        ]
        held += [(each, f"{where}: weight {each.name!r}") for graph in _graphs(nodes) for each in graph.initializer]
        for tensor, text in held:
            external = check_tensor(tensor, text, folder)
            if external:
                _take_in(tensor, external)


def _take_in(tensor: onnx.TensorProto, external: External) -> None:
    import onnx

    tensor.raw_data = external.read()
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def _check_nodes(model: onnx.ModelProto, what: str) -> None:
    functions = functions_of(model)
    scopes = [(model.graph.node, model.opset_import, what)]
    scopes += [(each.node, each.opset_import, f"{what}, in the function {each.name!r}") for each in model.functions]
    for nodes, imports, where in scopes:
        _check_unique_names(nodes, where)
        for graph in _graphs(nodes):
            _check_unique_names(graph.node, where)
        opsets = {each.domain: each.version for each in imports}
        for node in nodes_within(nodes):
            if node.domain in OF_ONNX and key_of(node) not in functions and node.op_type not in OF_RUNTIME:
                _check_node(node, opsets, model.ir_version, where)
                continue
            names = [each.name for each in node.attribute]
            if "" in names or len({*names}) < len(names):
                what_is_wrong = "an attribute has no name" if "" in names else "two attributes have the same name"
                raise ModelError(f"{where}: {_named(node)} ({node.op_type}): {what_is_wrong}; correct the model")


def _check_unique_names(nodes: Iterable[onnx.NodeProto], where: str) -> None:
    """Of all nodes but Constants, which ONNX Runtime makes weights before it looks at names."""
    seen: set[str] = set()
    for node in nodes:
        if node.op_type == "Constant" and node.domain in OF_ONNX:
            continue
        if node.name and node.name in seen:
            raise ModelError(f"{where}: two nodes have the name {node.name!r}; allowed: each name once. Correct the model")
        seen.add(node.name)


def _check_node(node: onnx.NodeProto, opsets: dict[str, int], ir_version: int, where: str) -> None:
    """Looks at the attributes of a node and counts its inputs and outputs."""
    import onnx

    node.domain = ""
    for attribute in node.attribute:
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            raise ModelError(
                f"{where}: {_named(node)} ({node.op_type}): its attribute {attribute.name!r} is a sparse tensor; allowed: "
                "dense ones. Save the model with dense ones"
            )
        if attribute.ref_attr_name and ", in the function" not in where:
            raise ModelError(
                f"{where}: {_named(node)} ({node.op_type}): its attribute {attribute.name!r} is that of a function, but the "
                "node is in none; correct the model"
            )
    if reason := wrong_attribute(node):
        raise ModelError(f"{where}: {_named(node)} ({node.op_type}) {reason}. Correct the model")
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = ir_version, _checked_as(node, opsets)
    try:
        onnx.checker.check_node(_without_contents(node), context)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{where}: {_named(node)} ({node.op_type}): {first_line(error)}; correct the model") from error
    except UnicodeDecodeError as error:  # in a message of onnx, which quotes the name
        raise ModelError(
            f"{where}: {_named(node)} ({node.op_type!r}): a name of it is not UTF-8 text; the file is damaged. Export or "
            "copy it again"
        ) from error


def _checked_as(node: onnx.NodeProto, opsets: dict[str, int]) -> dict[str, int]:
    """The opsets by which onnx looks at a node. It deprecates the GroupNormalization of opset 18, which ONNX Runtime
    computes: a factor for each group, otherwise as in opset 21."""
    if node.op_type != "GroupNormalization":
        return opsets
    return {name: max(version, 21) if name in OF_ONNX and version >= 18 else version for name, version in opsets.items()}


def _without_contents(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node with empty tensors and bodies, which have been looked at before."""
    import onnx

    if not any(each.HasField("t") or each.tensors or each.HasField("g") or each.graphs for each in node.attribute):
        return node
    found = onnx.NodeProto(op_type=node.op_type, domain=node.domain, input=node.input, output=node.output, name=node.name)
    for attribute in node.attribute:
        added = found.attribute.add()
        for kind, value in attribute.ListFields():
            if kind.name == "t":
                added.t.CopyFrom(onnx.TensorProto(dims=[0], data_type=onnx.TensorProto.FLOAT, raw_data=b"", name="t"))
            elif kind.name == "g":
                added.g.name = "body"
            elif isinstance(value, str | bytes | int | float):
                setattr(added, kind.name, value)
            elif kind.name in ("ints", "floats", "strings"):
                getattr(added, kind.name).extend(value)
    return found
