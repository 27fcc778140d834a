"""ONNX files as graphs in which every shape is known and nothing is left that a compiler would fold.

The graph is an `onnx_ir.Model`. Constants are folded, batch norms and constant pads are part of the convolution that they
belong to, and chains of relu and clip are one of them, by onnxscript's optimiser and rewrite rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import onnx_ir as ir

EXTRA = 'ONNX files need the extra `network`: pip install "schedsearch[network]"'
OLDEST_OPSET = 7  # the first without the legacy broadcasting of element-wise operators
_MOST_BYTES = 1 << 31  # of a file
_MOST_NAMES = 5  # of a list in a message


class ModelError(UsageError):
    """A model file cannot be read, or its graph cannot be compiled."""


class NoOperatorError(ModelError):
    """Nodes of a model have no operator.

    Attributes:
        nodes: what they are, without a remedy, for callers that run them in another way.
    """

    def __init__(self, nodes: str) -> None:
        self.nodes = nodes
        super().__init__(
            f"{nodes}. Run them in ONNX Runtime: build with --fallback onnxruntime (in Python fallback='onnxruntime')"
        )


def read_model(path: str | Path, shapes: Mapping[str, Sequence[int]] | None = None) -> ir.Model:
    """The simplified graph of an ONNX file.

    Args:
        path: a file in ONNX's binary format. Weights may lie in files beside it.
        shapes: input -> its shape, for inputs with dynamic dimensions.

    Raises:
        ModelError: the file is missing, truncated or no ONNX model, its opset is unknown, weights are missing or lie outside
            of its folder, the graph is empty or has a cycle, an input is unknown, has a dynamic dimension or another rank,
            or onnx, onnx-ir or onnxscript is not installed.
    """
    path = Path(path)
    return simplified(_checked(path), str(path), shapes)


def reader(path: Path) -> Callable[[Mapping[str, Sequence[int]]], ir.Model]:
    """Reads an ONNX file once, for graphs with other shapes: what it returns is `read_model` without the path.

    Raises:
        ModelError: as `read_model`; what is wrong with shapes is raised for these.
    """
    model = _checked(path)
    return lambda shapes: simplified(model.clone(), str(path), shapes)


def _checked(path: Path) -> ir.Model:
    model = load_model(path)
    _check_weights(model, path)
    return model


def load_model(path: Path) -> ir.Model:
    """The graph of an ONNX file as it is. Raises ModelError if the file is missing, truncated or no ONNX model."""
    needed()
    import onnx_ir as ir

    if not path.is_file():
        raise ModelError(f"{path} is not a file; give an ONNX model, e.g. model.onnx")
    nbytes = path.stat().st_size
    if not 0 < nbytes < _MOST_BYTES:
        raise ModelError(
            f"{path} has {nbytes:,} bytes; an ONNX file has at least 1 and less than {_MOST_BYTES:,}, protobuf's limit. "
            "Export it again, with large weights as external data"
        )
    try:
        with quiet():  # it warns of values that nothing makes; `_check_values` refuses them
            return ir.load(path)
    except Exception as error:  # protobuf's errors have no common base, and a damaged graph can break any rule
        raise ModelError(f"{path} is not an ONNX model, or it is damaged: {error}. Export or copy it again") from error


def needed() -> None:
    """Raises ModelError unless all packages of the extra are installed."""
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{EXTRA} ({error})") from error


def simplified(model: ir.Model, name: str, shapes: Mapping[str, Sequence[int]] | None = None) -> ir.Model:
    """A graph after it was checked, its shapes were fixed and everything was folded; the model is changed.

    Args:
        name: of the model, for messages.
        shapes: as of `read_model`.

    Raises:
        ModelError: as `read_model`.
    """
    _check_opset(model, name)
    if not len(model.graph):
        raise ModelError(f"{name} has no nodes; there is nothing to compile. Give a model that computes something")
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"{name}: the graph has a cycle, a node that needs its own result; correct the model") from error
    _check_values(model, name)
    _fix_shapes(model, shapes or {}, name)
    from schedsearch.network.contributed import rewrite_contributed
    from schedsearch.network.shapes import correct_shapes

    rewrite_contributed(model)
    with quiet():
        correct_shapes(model)
    return _folded(model)


def _check_opset(model: ir.Model, name: str) -> None:
    import onnx

    newest = onnx.defs.onnx_opset_version()
    opset = model.opset_imports.get("")
    if opset is None or not OLDEST_OPSET <= opset <= newest:
        got = "has no opset of ONNX" if opset is None else f"needs opset {opset}"
        raise ModelError(
            f"{name} {got}; allowed: {OLDEST_OPSET} to {newest}, those of the installed onnx. Export the model for one of "
            "these" + (", or upgrade onnx" if opset is not None and opset > newest else "")
        )


def _check_values(model: ir.Model, name: str) -> None:
    """Raises ModelError if a node reads what nothing makes, or a weight has other bytes than its shape needs."""
    import onnx_ir as ir

    inputs = {*model.graph.inputs, *model.graph.initializers.values()}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and value not in inputs and value.const_value is None:
                raise ModelError(
                    f"{name}: node {node.name or node.op_type} reads {value.name!r}, which no node makes and which is not "
                    "an input or a weight; correct the model"
                )
    for weight, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):  # `_check_weights` has looked at these
            continue
        try:
            tensor.numpy()
        except Exception as error:  # a damaged tensor can break any rule
            raise ModelError(
                f"{name}: weight {weight!r} of shape {tensor.shape} and format {tensor.dtype} is damaged: {error}; export "
                "or copy the model again"
            ) from error


def _check_weights(model: ir.Model, path: Path) -> None:
    import onnx_ir as ir

    folder = path.resolve().parent
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        place = (folder / tensor.location).resolve()
        if not place.is_relative_to(folder):
            raise ModelError(
                f"{path}: weight {name!r} is in {str(tensor.location)!r}, outside of the model's folder; allowed: files in "
                f"{folder}. Save the model again with its weights beside it"
            )
        needed = (tensor.offset or 0) + (tensor.length or 0)
        size = place.stat().st_size if place.is_file() else -1
        if size < needed:
            got = "does not exist" if size < 0 else f"has {size} bytes"
            raise ModelError(
                f"{path}: weight {name!r} needs {needed} bytes of {str(tensor.location)!r}, which {got}; copy the file that "
                f"belongs to the model to {place}"
            )


def _fix_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]], model_name: str) -> None:
    """Gives every input a shape without symbols."""
    import onnx_ir as ir

    if not isinstance(shapes, Mapping):
        raise ModelError(
            f"shapes is of type {type(shapes).__name__}; give a dictionary from inputs to shapes: {{'x': [1, 3, 9, 9]}}"
        )
    inputs = {str(value.name): value for value in model.graph.inputs if value.name not in model.graph.initializers}
    for name, given in shapes.items():
        if name not in inputs:
            raise ModelError(f"{model_name} has no input {name!r}{did_you_mean(name, inputs)}; it has {', '.join(inputs)}")
        declared = inputs[name].shape
        if not isinstance(given, list | tuple) or not all(isinstance(extent, int) and extent >= 1 for extent in given):
            raise ModelError(f"the shape of {name!r} is {given!r}; allowed: a list of whole numbers of at least 1")
        fixed = [None if declared is None or not isinstance(each, int) else each for each in declared or given]
        if len(fixed) != len(given) or any(old not in (None, new) for old, new in zip(fixed, given)):
            raise ModelError(
                f"{model_name}: input {name!r} is {declared}, but the shape given for it is {list(given)}; give "
                f"{len(fixed)} extents, and only names may become other numbers"
            )
        inputs[name].shape = ir.Shape(given)
    dynamic = [
        f"{name} {value.shape or 'of unknown rank'}"
        for name, value in inputs.items()
        if value.shape is None or not value.shape.is_static()
    ]
    if dynamic:
        example = next(value for value in inputs.values() if value.shape is None or not value.shape.is_static())
        extents = (
            [1, 3, 224, 224]
            if example.shape is None
            else [each if isinstance(each, int) else 224 if place > 1 else 1 for place, each in enumerate(example.shape)]
        )
        raise ModelError(
            f"{model_name} has inputs with dynamic dimensions: {'; '.join(dynamic)}. Shapes must be fixed; give them, "
            f"e.g. --shape {example.name}={','.join(map(str, extents))}, or build for a range of sizes: "
            "--dynamic NAME=LEAST..MOST"
        )


def _folded(model: ir.Model) -> ir.Model:
    import onnxscript.optimizer
    from onnxscript.rewriter import rewrite
    from onnxscript.rewriter.rules import common

    from schedsearch.network.indexing import check_folded_indices
    from schedsearch.network.rewrites import rewrite_nodes

    rules = (
        common.fuse_batchnorm_into_conv_rule,
        common.fuse_batchnorm_into_conv_transpose_rule,
        common.normalize_pad_format_conv_rule,
        common.fuse_pad_into_conv_rule,
        common.successive_clip_rule,
        common.successive_clip_relu_rule,
        common.successive_relu_clip_rule,
        common.successive_relu_rule,
    )
    names = {weight.name: node.name for node in model.graph if (weight := _weight(node))}
    with quiet():
        check_folded_indices(model)
        with names_of_inputs(model):
            onnxscript.optimizer.optimize(model)
        model = rewrite(model, pattern_rewrite_rules=rules)
    _without_splits(model)
    for node in model.graph:  # rules make new nodes, whose names say nothing
        if weight := _weight(node):
            node.name = names.get(weight.name, node.name)
    rewrite_nodes(model)
    return model


def _without_splits(model: ir.Model) -> None:
    """Replaces each Split by a Slice for each of its results whose shape is known."""
    import onnx_ir as ir

    for node in list(model.graph):
        if node.op_type != "Split" or node.domain not in ("", "ai.onnx") or node.inputs[0] is None:
            continue
        shapes = [value.shape for value in (node.inputs[0], *node.outputs)]
        if any(shape is None or not shape.is_static() for shape in shapes):
            continue
        axis = node.attributes.get_int("axis", 0)
        extents = [int(shape[axis]) for shape in shapes[1:] if shape is not None]
        for place, old in enumerate(node.outputs):
            start = sum(extents[:place])
            ranges = {"starts": start, "ends": start + extents[place], "axes": axis}
            constants = [_row(model, f"{old.name}.{name}", number) for name, number in ranges.items()]
            result = ir.Value(name=old.name, type=old.type, shape=old.shape)
            part = ir.Node("", "Slice", [node.inputs[0], *constants], outputs=[result], name=node.name)
            model.graph.insert_before(node, part)
            ir.convenience.replace_all_uses_with(old, part.outputs[0], replace_graph_outputs=True)
        model.graph.remove(node)


def _row(model: ir.Model, name: str, number: int) -> ir.Value:
    """A constant list of one whole number."""
    import onnx_ir as ir

    tensor = ir.tensor([number], ir.DataType.INT64, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _weight(node: ir.Node) -> ir.Value | None:
    """The weight of a convolution."""
    return node.inputs[1] if node.op_type.startswith("Conv") and len(node.inputs) > 1 else None


@contextmanager
def names_of_inputs(model: ir.Model) -> Iterator[None]:
    """Inputs keep their names: onnxscript's optimiser renames those that are outputs, too, and puts an Identity between."""
    names = {value: value.name for value in model.graph.inputs}
    yield
    for value, name in names.items():
        if value.name == name:
            continue
        for place, output in enumerate(model.graph.outputs):
            node = output.producer()
            if node is not None and node.op_type == "Identity" and node.inputs[0] is value and output.name == name:
                model.graph.outputs[place] = value
                model.graph.remove(node, safe=True)
        value.name = name


@contextmanager
def quiet() -> Iterator[None]:
    """onnxscript and onnx_ir report rules that do not apply as warnings."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def listed(names: Sequence[str]) -> str:
    """Names in a message, the first few of many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
