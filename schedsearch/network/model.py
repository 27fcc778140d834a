"""ONNX files as graphs in which every shape is known and nothing is left that a compiler would fold.

The graph is an `onnx_ir.Model`. Constants are folded, batch norms and constant pads are part of the convolution that they
belong to, and chains of relu and clip are one of them, by onnxscript's optimiser and rewrite rules.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.errors import did_you_mean, first_line, root_cause
from schedsearch.network.given_inputs import Inputs, with_given_inputs
from schedsearch.network.invalid import ModelError, NoOperatorError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from schedsearch.network.outline import Outline

__all__ = ["EXTRA", "Loaded", "ModelError", "NoOperatorError", "load", "read_model", "simplified"]

EXTRA = 'ONNX files need the extra `network`: pip install "schedsearch[network]"'
_MOST_BYTES = 1 << 31  # of a file
_MOST_NAMES = 5  # of a list in a message


def read_model(
    path: str | Path, shapes: Mapping[str, Sequence[int]] | None = None, inputs: Inputs | None = None
) -> ir.Model:
    """The simplified graph of an ONNX file.

    Args:
        path: a file in ONNX's binary format. Weights may lie in files beside it.
        shapes: input -> its shape, for inputs with dynamic dimensions.
        inputs: input -> the value that it always has; see `given_inputs`. The graph does not have these inputs.

    Raises:
        ModelError: the file is missing, truncated or no ONNX model, its opset is unknown, weights are missing or lie outside
            of its folder, the graph is empty or has a cycle, an input is unknown, has a dynamic dimension or another rank,
            or onnx, onnx-ir or onnxscript is not installed.
    """
    return load(Path(path), inputs).graph(shapes)


@dataclass(frozen=True)
class Loaded:
    """A valid model as it is.

    Attributes:
        name: of the file, for messages.
        model: its graph. Weights in external data stay there until they are read.
        outline: what its shapes follow from.
        proto: what the graph was made of, and shares its numbers with.
    """

    name: str
    model: ir.Model
    outline: Outline
    proto: onnx.ModelProto

    def graph(self, shapes: Mapping[str, Sequence[int]] | None = None) -> ir.Model:
        """The simplified graph for some shapes, as `read_model` gives it. Raises ModelError for what is wrong with them."""
        return simplified(self.model.clone(), self.name, shapes, self.outline)

    def at(self, extents: Mapping[str, int]) -> Loaded:
        """The same model with dimensions of its inputs, by name, that are no longer open."""
        import onnx_ir as ir

        model = self.model.clone()
        for value in model.graph.inputs:
            if value.shape is not None:
                known = (each if isinstance(each, int) else extents.get(str(each.value), each) for each in value.shape)
                value.shape = ir.Shape(known)
        return replace(self, model=model)


def load(model: Path | onnx.ModelProto, inputs: Inputs | None = None) -> Loaded:
    """The graph of an ONNX file, or of a model in memory, as it is but for inputs that become constants.

    Args:
        inputs: as of `read_model`.

    Raises:
        ModelError: the file is missing, truncated or not a valid ONNX model, or the model has no inputs.
    """
    needed()
    from schedsearch.network.valid import check

    if isinstance(model, Path):
        name, folder = str(model), model.resolve().parent
        proto, outline = read_proto(model, inputs)
    else:
        name, folder = "the model", None
        proto = copy.deepcopy(model)  # the check changes what is written in several ways
        with_given_inputs(proto, inputs or {}, name)
        outline = check(proto, name)
    graph = graph_of(proto, name, folder)
    if all(value.name in graph.graph.initializers for value in graph.graph.inputs):
        raise ModelError(f"{name} has no inputs, so its results are constants; allowed: a model of at least one input")
    return Loaded(name, graph, outline, proto)


def read_proto(path: Path, inputs: Inputs | None = None) -> tuple[onnx.ModelProto, Outline]:
    """An ONNX file after it was checked, as `load`. Weights in external data stay there."""
    needed()
    import onnx

    from schedsearch.network.valid import check

    if not path.is_file():
        raise ModelError(f"{path} is not a file; give an ONNX model, e.g. model.onnx")
    try:
        nbytes = path.stat().st_size
        if not 0 < nbytes < _MOST_BYTES:
            raise ModelError(
                f"{path} has {nbytes:,} bytes; an ONNX file has at least 1 and less than {_MOST_BYTES:,}, protobuf's limit. "
                "Export it again, with large weights as external data"
            )
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; give an ONNX model, e.g. model.onnx") from error
    try:
        proto = onnx.ModelProto.FromString(data)
    except Exception as error:  # protobuf's errors have no common base
        raise ModelError(f"{path} is not an ONNX model, or it is damaged: {error}. Export or copy it again") from error
    with_given_inputs(proto, inputs or {}, str(path))
    return proto, check(proto, str(path), path.resolve().parent)


def graph_of(proto: onnx.ModelProto, name: str, folder: Path | None = None) -> ir.Model:
    """The graph of a model that was checked.

    Args:
        name: of the model, for messages.
        folder: where its external data lies.

    Raises:
        ModelError: onnx_ir cannot hold it.
    """
    import onnx_ir as ir

    try:
        with quiet():
            model = ir.from_proto(proto)
            if folder is not None:
                ir.external_data.set_base_dir(model.graph, folder)
    except Exception as error:  # a kind of value or attribute that it does not know can break any rule
        raise ModelError(f"{name} is not an ONNX model, or it is damaged: {error}. Export or copy it again") from error
    return model


def needed() -> None:
    """Raises ModelError unless all packages of the extra are installed."""
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{EXTRA} ({error})") from error


def simplified(
    model: ir.Model, name: str, shapes: Mapping[str, Sequence[int]] | None = None, outline: Outline | None = None
) -> ir.Model:
    """A valid graph after its shapes were fixed and everything was folded; the model is changed.

    Args:
        name: of the model, for messages.
        shapes: as of `read_model`.
        outline: of the model, if it comes from elsewhere: its shapes are checked.

    Raises:
        ModelError: as `read_model`.
    """
    _check_inputs(model, name)
    _fix_shapes(model, shapes or {}, name)
    _forget_symbols(model)
    return _for_kernels(prepared(model, name, outline, of_branch=simplified))


def prepared(
    model: ir.Model,
    name: str,
    outline: Outline | None = None,
    *,
    of_branch: Callable[[ir.Model, str], ir.Model] | None = None,
) -> ir.Model:
    """A valid graph in order, without what can be computed or written in a simpler way, whatever extents are open; the model
    is changed. All operators are ONNX's own where they can be, and every node has a name of its own.

    Args:
        name, outline: as of `simplified`.
        of_branch: as of `simplify`.

    Raises:
        ModelError: as `read_model`.
    """
    from schedsearch.network.contributed import rewrite_contributed
    from schedsearch.network.shapes import correct_shapes, pad_open_windows
    from schedsearch.network.simplify import simplify
    from schedsearch.network.sizes import forget_decided_shapes, remember_shapes

    model.graph.sort()
    _check_inputs(model, name)
    if outline is not None:
        _check_shapes(model, outline)
    declared = forget_decided_shapes(model)
    rewrite_contributed(model)
    with simplifying(name), names_of_inputs(model):
        correct_shapes(model)
        simplify(model, name, of_branch=of_branch)
    remember_shapes(model, declared)
    pad_open_windows(model)
    _check_ports(model, name)
    return model


def _for_kernels(model: ir.Model) -> ir.Model:
    """Replaces nodes by those for which there are kernels."""
    from schedsearch.network.formats import narrow_doubles
    from schedsearch.network.rewrites import rewrite_nodes

    narrow_doubles(model)
    _without_splits(model)
    rewrite_nodes(model)
    return model


def _check_inputs(model: ir.Model, name: str) -> None:
    """Refuses inputs that are no arrays."""
    from schedsearch.network.refusals import is_array, kind_of

    for value in model.graph.inputs:
        if not is_array(value):
            raise ModelError(
                f"{name}: input {value.name!r} is a {kind_of(value)}; allowed: arrays. Make each array an input of its own"
            )


def _check_ports(model: ir.Model, name: str) -> None:
    """Refuses constant results that cannot be arrays of numbers."""
    from schedsearch.network.facts import dtype_of
    from schedsearch.ops.dtypes import DTYPES

    for value in model.graph.outputs:
        if value.const_value is not None and (kind := dtype_of(value)) not in ("", *DTYPES):
            raise ModelError(
                f"{name}: output {value.name!r} is of dtype {kind}; allowed: {', '.join(DTYPES)}. Cast it in the model"
            )


def _check_shapes(model: ir.Model, outline: Outline) -> None:
    """Refuses shapes that contradict one another, and forgets declared shapes of results that are wrong.

    Raises:
        ModelError: a dtype or a shape is impossible.
    """
    from schedsearch.network.facts import note_wrong_shape

    fixed = {
        str(value.name): [int(extent) for extent in value.shape]
        for value in model.graph.inputs
        if value.shape is not None and value.shape.is_static()
    }
    found = outline.shapes(fixed)
    for value in (each for node in model.graph for each in node.outputs):
        if value.name in found and found[value.name].HasField("tensor_type") and value.shape is not None:
            kind = found[value.name].tensor_type
            extents = [each.dim_value if each.HasField("dim_value") else None for each in kind.shape.dim]
            if kind.HasField("shape") and not _agree(extents, list(value.shape)):
                note_wrong_shape(value)
                value.shape = None


def _agree(inferred: Sequence[int | None], declared: Sequence[object]) -> bool:
    """Whether two shapes have one rank and no extent in which they differ."""
    return len(inferred) == len(declared) and all(
        ours is None or not isinstance(theirs, int) or ours == theirs for ours, theirs in zip(inferred, declared)
    )


def _fix_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]], model_name: str) -> None:
    """Gives every input a shape without symbols. A dimension of several inputs needs to be given for one of them."""
    import onnx_ir as ir

    if not isinstance(shapes, Mapping):
        raise ModelError(
            f"shapes is of type {type(shapes).__name__}; give a dictionary from inputs to shapes: {{'x': [1, 3, 9, 9]}}"
        )
    inputs = {str(value.name): value for value in model.graph.inputs if value.name not in model.graph.initializers}
    declared = {name: value.shape for name, value in inputs.items()}
    for name, given in shapes.items():
        if name not in inputs:
            raise ModelError(f"{model_name} has no input {name!r}{did_you_mean(name, inputs)}; it has {', '.join(inputs)}")
        _fix_shape(inputs[name], given, model_name)
    known = _shared(declared, shapes)
    for name in (each for each in inputs if each not in shapes):
        if (shape := declared[name]) is not None:
            extents = (each if isinstance(each, int) else known.get(str(each.value), each) for each in shape)
            inputs[name].shape = ir.Shape(extents)
    if left := [value for value in inputs.values() if value.shape is None or not value.shape.is_static()]:
        dynamic = "; ".join(f"{value.name} {value.shape or 'of unknown rank'}" for value in left)
        raise ModelError(
            f"{model_name} has inputs with dynamic dimensions: {dynamic}. Shapes must be fixed; give them, e.g. --shape "
            f"{left[0].name}={','.join(map(str, _example(left[0])))}, or build for a range of sizes: "
            "--dynamic NAME=LEAST..MOST"
        )


def _fix_shape(value: ir.Value, given: Sequence[int], model_name: str) -> None:
    """Gives an input a shape. Raises ModelError if it is none, or contradicts the declared one."""
    import onnx_ir as ir

    declared = value.shape
    if not isinstance(given, list | tuple) or not all(isinstance(extent, int) and extent >= 1 for extent in given):
        raise ModelError(f"the shape of {value.name!r} is {given!r}; allowed: a list of integers of at least 1")
    fixed = [None if declared is None or not isinstance(each, int) else each for each in declared or given]
    if len(fixed) != len(given) or any(old not in (None, new) for old, new in zip(fixed, given)):
        raise ModelError(
            f"{model_name}: input {value.name!r} is {declared}, but the shape given for it is {list(given)}; give "
            f"{len(fixed)} extents, and only names may become other numbers"
        )
    value.shape = ir.Shape(given)


def _shared(declared: Mapping[str, ir.Shape | None], given: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The extents that named dimensions have by the shapes given for some inputs, where these agree."""
    found: dict[str, set[int]] = {}
    for name, extents in given.items():
        for old, new in zip(declared[name] or (), extents):
            if not isinstance(old, int):
                found.setdefault(str(old.value), set()).add(new)
    return {name: extents.pop() for name, extents in found.items() if len(extents) == 1}


def _forget_symbols(model: ir.Model) -> None:
    """Forgets declared shapes of results that have names for extents: with fixed inputs shapes follow anew, and a declared
    one may even have another rank."""
    from schedsearch.network.facts import has_bodies, is_onnx

    for node in model.graph:
        for value in node.outputs if is_onnx(node) and not has_bodies(node) else ():
            if value.shape is not None and not value.shape.is_static():
                value.shape = None


def _example(value: ir.Value) -> list[int]:
    """A shape that an input could have."""
    if value.shape is None:
        return [1, 3, 224, 224]
    return [each if isinstance(each, int) else 224 if place > 1 else 1 for place, each in enumerate(value.shape)]


def _without_splits(model: ir.Model) -> None:
    """Replaces each Split by a Slice for each of its results whose shape is known."""
    import numpy as np
    import onnx_ir as ir

    from schedsearch.network.new_nodes import constant

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
            constants = [constant(model, f"{old.name}.{name}", np.array([number])) for name, number in ranges.items()]
            result = ir.Value(name=old.name, type=old.type, shape=old.shape)
            part = ir.Node("", "Slice", [node.inputs[0], *constants], outputs=[result], name=node.name)
            model.graph.insert_before(node, part)
            ir.convenience.replace_all_uses_with(old, part.outputs[0], replace_graph_outputs=True)
        model.graph.remove(node)


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


@contextmanager
def simplifying(name: str) -> Iterator[None]:
    """onnxscript folds and rewrites a model. What it cannot do is an error of the model, such as a division of integers by
    the constant zero.

    Raises:
        ModelError: onnxscript fails.
    """
    try:
        with quiet():
            yield
    except ModelError:
        raise
    except Exception as error:  # its passes, and the evaluator that folds constants, raise many kinds
        reason = first_line(root_cause(error))
        raise ModelError(f"{name}: onnxscript cannot simplify the graph: {reason}. Correct the model") from error


def listed(names: Sequence[str]) -> str:
    """Names in a message, the first few of many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
