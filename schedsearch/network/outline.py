"""The outline of an ONNX model: its nodes without large numbers, from which dtypes and shapes follow.

onnx infers them, in its strict mode, in which what contradicts itself is an error; ONNX Runtime does the same when it loads
a model. What a model declares about results is used for dtypes only: declared shapes are notes of a tool, which are often
out of date, and ONNX Runtime ignores those that are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.errors import first_line
from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx

_SMALL = 4096  # elements of a tensor that a shape may depend on
_UNREAD = "schedsearch.unread"  # domain of nodes of which nothing is inferred
_OPSET_OF_UNIQUE = 11
_WEIGHTS_ALONE = 4  # the first version of the format in which weights need not be inputs, too
_INFERRED_WRONG = ("MeanVarianceNormalization",)  # onnx 1.23.2 refuses its own definition of it
_POOLS = ("MaxPool", "AveragePool", "LpPool")
_PREFIX = re.compile(r"\[\w+Error\] |Inference error\(s\): ")
_PLACE = re.compile(r"\(op_type:(\w+), node name: (.*?)\): ")

Shapes = Mapping[str, Sequence[int]]


class Outline:
    """What of a model its dtypes and shapes follow from.

    Args:
        model: a model whose names, functions, tensors and nodes were checked.
        what: the model, for messages.
    """

    def __init__(self, model: onnx.ModelProto, what: str) -> None:
        import onnx

        self._what = what
        self._model = onnx.ModelProto(ir_version=max(model.ir_version, _WEIGHTS_ALONE), opset_import=model.opset_import)
        opset = next(each.version for each in model.opset_import if each.domain == "")
        graph, copied = self._model.graph, _Copier({(each.domain, each.name) for each in model.functions}, opset)
        copied.graph(model.graph, graph)
        graph.input.extend(model.graph.input)
        for function in model.functions:
            added = self._model.functions.add()
            for name in ("name", "domain", "overload"):
                if value := getattr(function, name):
                    setattr(added, name, value)
            for name in ("input", "output", "attribute", "attribute_proto", "opset_import"):
                getattr(added, name).extend(getattr(function, name))
            copied.nodes(function.node, added.node)
            _import(added.opset_import, (_UNREAD,))
        _import(self._model.opset_import, (_UNREAD,))

    @staticmethod
    def is_small(tensor: onnx.TensorProto) -> bool:
        """Whether shapes may depend on the numbers of a tensor."""
        elements = 1
        for extent in tensor.dims:
            elements *= extent
        return elements <= _SMALL

    def shapes(self, inputs: Shapes | None = None) -> dict[str, onnx.TypeProto]:
        """The types of all values of the graph, as far as they follow from the inputs.

        Args:
            inputs: input -> its shape, in place of the declared one.

        Raises:
            ModelError: a dtype or a shape is impossible.
        """
        import onnx

        model = self._model
        if inputs:
            model = onnx.ModelProto()
            model.CopyFrom(self._model)
            for value in model.graph.input:
                if value.name in inputs and value.type.HasField("tensor_type"):
                    value.type.tensor_type.ClearField("shape")
                    value.type.tensor_type.shape.dim.extend(
                        onnx.TensorShapeProto.Dimension(dim_value=extent) for extent in inputs[value.name]
                    )
        try:
            found = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except Exception as error:  # onnx's errors of shapes, dtypes and files have no common base
            raise ModelError(f"{self._what} is not valid: {_explained(error)}; correct the model") from error
        values = (*found.graph.input, *found.graph.value_info, *found.graph.output)
        return {value.name: value.type for value in values}


def _explained(error: Exception) -> str:
    """The text of an error of onnx without the names of its functions. Its first line is about the first node that is wrong,
    which is the last node in it; the next lines are about nodes that read what that one should have made."""
    text = _PREFIX.sub("", " ".join((str(error).strip().splitlines() or [""])[0].split()))
    places = list(_PLACE.finditer(text))
    if not places:
        return first_line(ValueError(text))
    last = places[-1]
    return f"node {last[2]} ({last[1]}): {text[last.end() :].rstrip('. ')}"


def _import(opsets: Iterable[onnx.OperatorSetIdProto], domains: Collection[str]) -> None:
    known = {each.domain for each in opsets}
    for domain in domains:
        if domain not in known:
            opsets.add(domain=domain, version=1)  # type: ignore[attr-defined]  # a repeated field of protobuf


class _Copier:
    """Copies what shapes follow from.

    A node of which nothing is inferred becomes one of a domain of our own: onnx's strict mode takes no value without a
    dtype, so a node that reads such a value becomes one, too.

    Args:
        functions: domain and name of the functions of the model.
        opset: of the model.
    """

    def __init__(self, functions: Collection[tuple[str, str]], opset: int) -> None:
        self._functions, self._opset = functions, opset

    def graph(self, graph: onnx.GraphProto, to: onnx.GraphProto, unknown: frozenset[str] = frozenset()) -> None:
        """Copies all but the inputs of the graph."""
        to.name = graph.name or "graph"
        for tensor in graph.initializer:
            _copy_tensor(tensor, to.initializer.add())
        inner = {each.name for each in graph.input} | {each.name for each in graph.initializer}
        made = {name for node in graph.node for name in node.output}
        for value in graph.output:
            _copy_type(value, to.output.add())
        typed = {value.name for value in graph.output if _has_format(value)}
        for value in graph.value_info:
            if value.name in made and value.name not in typed and _has_format(value):
                typed.add(value.name)
                _copy_type(value, to.value_info.add())
        self.nodes(graph.node, to.node, unknown - inner - made, typed)

    def nodes(
        self,
        nodes: Iterable[onnx.NodeProto],
        to: Iterable[onnx.NodeProto],
        unknown: frozenset[str] = frozenset(),
        typed: Collection[str] = (),
    ) -> None:
        """Copies nodes.

        Args:
            unknown: values of which no dtype is known.
            typed: results whose dtypes are declared.
        """
        untyped = set(unknown)
        for node in nodes:
            copy = to.add()  # type: ignore[attr-defined]  # a repeated field of protobuf
            is_read = node.domain == "" or (node.domain, node.op_type) in self._functions
            is_read = is_read and node.op_type not in _INFERRED_WRONG
            if is_read and not untyped.intersection(node.input):
                self._node(node, copy, frozenset(untyped))
                if self._opset >= _OPSET_OF_UNIQUE and _is_shaped_wrong(node):
                    _hide_extents(copy, to)
                continue
            copy.op_type, copy.domain, copy.name = node.op_type, _UNREAD, _name(node)
            copy.input.extend(node.input)
            copy.output.extend(node.output)
            untyped.update(name for name in node.output if name and name not in typed)

    def _node(self, node: onnx.NodeProto, copy: onnx.NodeProto, unknown: frozenset[str]) -> None:
        copy.op_type, copy.domain, copy.overload, copy.name = node.op_type, node.domain, node.overload, _name(node)
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        for attribute in node.attribute:
            added = copy.attribute.add()
            if attribute.HasField("t"):
                added.name, added.type = attribute.name, attribute.type
                _copy_tensor(attribute.t, added.t)
            elif attribute.HasField("g"):
                added.name, added.type = attribute.name, attribute.type
                self.graph(attribute.g, added.g, unknown)
                for value in attribute.g.input:
                    _copy_type(value, added.g.input.add())
            else:
                added.CopyFrom(attribute)


def _is_shaped_wrong(node: onnx.NodeProto) -> bool:
    """Whether onnx 1.23.2 infers a wrong shape, by its own evaluator, ONNX Runtime and PyTorch: with ceil_mode it counts a
    window that would start in the padding, and it adds output_padding to a result whose extents auto_pad says."""
    read = {each.name: each for each in node.attribute}
    if node.op_type in _POOLS:
        return "ceil_mode" in read and bool(read["ceil_mode"].i)
    same = node.op_type == "ConvTranspose" and "auto_pad" in read and read["auto_pad"].s.startswith(b"SAME")
    return same and "output_padding" in read and any(read["output_padding"].ints)


def _hide_extents(node: onnx.NodeProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Puts a Slice between places that nobody knows behind a node: the result has its dtype and rank, but no extents."""
    for place, name in enumerate(node.output):
        if not name:
            continue
        whole, start = f"{name}/whole", f"{name}/start"
        node.output[place] = whole
        for op, inputs, outputs in (("Unique", [whole], ["", start]), ("Slice", [whole, start, start], [name])):
            nodes.add(op_type=op, input=inputs, output=outputs, name=f"{name}/{op}")  # type: ignore[attr-defined]


def _name(node: onnx.NodeProto) -> str:
    return node.name or f"{node.op_type} -> {next((name for name in node.output if name), '')}"


def _has_format(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.elem_type != 0)


def _copy_type(value: onnx.ValueInfoProto, to: onnx.ValueInfoProto) -> None:
    """Copies the name and the dtype, without the shape."""
    to.name = value.name
    if _has_format(value):
        to.type.CopyFrom(value.type)
        if to.type.HasField("tensor_type"):
            to.type.tensor_type.ClearField("shape")


def _copy_tensor(tensor: onnx.TensorProto, to: onnx.TensorProto) -> None:
    if Outline.is_small(tensor) and not tensor.external_data:
        to.CopyFrom(tensor)
        return
    to.name, to.data_type = tensor.name, tensor.data_type
    to.dims.extend(tensor.dims)
