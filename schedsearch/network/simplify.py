"""Graphs without what can be computed or written in a simpler way before they run.

Rounds of folding and of rules alternate until nothing changes; branches, loops and sequences are part of them, because a
branch that is taken has constants, and a constant decides a branch. onnxscript infers shapes, computes with them and folds;
what may be folded is decided here, by bytes. Its rules are used where they are right; where they are not
(findings/onnxscript_wrong_rewrites.sh), and for all that changes numbers, `schedsearch.network.fusions` has our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.contributed import rewrite_contributed_shapes
from schedsearch.network.contributed import rewrite_contributed
from schedsearch.network.control.bodies import Names, graphs_of
from schedsearch.network.control.branches import compute_both, take_branches
from schedsearch.network.control.isolated import isolate
from schedsearch.network.control.loops import unroll
from schedsearch.network.control.sequences import read_sequences
from schedsearch.network.control.tails import move_tails
from schedsearch.network.evaluated import computed
from schedsearch.network.facts import INTEGERS, RANDOM, dtype_of, has_bodies, is_onnx, name_of, partial_extents
from schedsearch.network.fusions import fuse
from schedsearch.network.indexing import check_indices
from schedsearch.network.new_nodes import constant
from schedsearch.network.node_rules import check_nodes
from schedsearch.network.shapes import infer_functions, settle_pools, show_pools
from schedsearch.network.transposed import write_pads
from schedsearch.typed import Array, GivenParams

if TYPE_CHECKING:
    import onnx_ir as ir


_MOST_BYTES = 1 << 30  # of a result that is folded and is larger than what it is computed from
_MOST_UNKNOWN = 1 << 16  # bytes of what a result of unknown shape is folded from
_MOST_SLOW = 8192  # elements that an operator reads whose reference is slow
_MOST_ROUNDS = 16
_SLOW = (
    *("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv", "AveragePool", "MaxPool", "LpPool", "Resize"),
    *("GridSample", "RoiAlign", "NonMaxSuppression", "RNN", "GRU", "LSTM", "Attention"),
)
_GROWING = ("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize", "Upsample", "OneHot", "Scan", "Loop")
_QUANTISED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Concat")  # they read 8-bit constants as they are
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def simplify(model: ir.Model, name: str, *, of_branch: Callable[[ir.Model, str], ir.Model] | None = None) -> None:
    """Inlines functions, infers shapes, folds constants and applies rules; the model is changed. All constants become
    initializers.

    Args:
        name: of the model, for messages.
        of_branch: simplifies a model, given its name. If it is given, branches of computed conditions become such models;
            see `control.isolated`.

    Raises:
        ConstantIndexError: a constant index of a node is out of range.
        ModelError: the shapes of a node do not fit.
    """
    import onnxscript.optimizer
    from onnx_ir.passes import common
    from onnxscript.rewriter import RewritePass

    common.InlinePass()(model)
    _constants_are_no_inputs(model)
    _type_constants(model)
    _drop_unnamed_masks(model)
    for node in model.graph:
        node.name = name_of(node)  # before a pass calls it "node"
    rules, opsets = RewritePass(_rules()), model.opset_imports

    def fold() -> Any:
        return onnxscript.optimizer.fold_constants(
            model,
            onnx_shape_inference=True,
            output_size_limit=_MOST_BYTES,
            should_fold=lambda node: is_foldable(node, opsets),
        )

    unknown = sum(node.op_type in _SAME_SHAPE or "ceil_mode" in node.attributes for node in model.graph)
    is_new, bodies = True, _count_bodies(model)  # whether there are nodes that were not checked
    for _ in range(_MOST_ROUNDS + unknown):
        settle_pools(model)
        counted = _count_from_the_front(model)
        padded = write_pads(model)
        found = fold()
        while is_new and rewrite_contributed_shapes(model):
            fold()
        whole = _write_splits(model) | _write_same_shapes(model)
        if is_new:  # functions are inlined, shapes are known, and no rule has relied on them yet
            check_nodes(model, name)
        inferred = infer_functions(model)
        controlled = any([take_branches(model), unroll(model), read_sequences(model)])
        changed = [
            controlled,
            inferred,
            counted,
            padded,
            whole,
            bool(found),
            _fold_identities(model),
            _fold(model),
            _know_constants(model),
            rules(model).modified,
            _register_constants(model),
            fuse(model),
        ]
        for clean in (common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass):
            clean()(model)
        if not (any(changed) or settle_pools(model) or compute_both(model) or _separate(model, of_branch)):
            break
        before, bodies = bodies, _count_bodies(model)
        is_new = bodies < before
        if is_new:
            rewrite_contributed(model)
    show_pools(model)
    _lift_outputs(model)
    for tidy in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        tidy(model)


def _separate(model: ir.Model, of_branch: Callable[[ir.Model, str], ir.Model] | None) -> bool:
    """Makes models of bodies, with what is behind them where that needs their shapes. Returns whether there were any."""
    return of_branch is not None and (move_tails(model) or isolate(model, of_branch))


def _count_bodies(model: ir.Model) -> int:
    """The number of nodes of the graph that have bodies: fewer, if their nodes came into the graph."""
    return sum(map(has_bodies, model.graph))


def _rules() -> list[Any]:
    """onnxscript's rules that move no number: views of views, transposes of transposes, what changes nothing."""
    from onnxscript.rewriter.rules import common
    from onnxscript.rewriter.rules.common import (
        _broadcast_to_matmul,
        _collapse_slices,
        _materialize_reshape_shape,
        _redundant_scatter_nd,
        _remove_optional_bias,
    )

    return [
        *_broadcast_to_matmul.rules,
        *_collapse_slices.rules,
        *_materialize_reshape_shape.rules,
        common.no_op_cast_rule,
        common.no_op_expand_rule,
        common.flatten_to_reshape_rule,  # before the rule of two Reshapes
        common.reshape_reshape_rule,
        common.no_op_transpose_rule,
        common.transpose_transpose_rule,
        common.unsqueeze_unsqueeze_rule,
        common.squeeze_reshape_1d_rule,
        *_redundant_scatter_nd.rules,
        *_remove_optional_bias.rules,
    ]


def _constants_are_no_inputs(model: ir.Model) -> None:
    """Files of old exporters list weights among the inputs, too; their numbers are those of the model."""
    graph = model.graph
    kept = [value for value in graph.inputs if value.name not in graph.initializers]
    if len(kept) < len(graph.inputs):
        graph.inputs[:] = kept


def _type_constants(model: ir.Model) -> None:
    """Gives constants the dtype and shape of their numbers: where one is an output, a file need not say them."""
    import onnx_ir as ir

    for value in model.graph.initializers.values():
        if value.const_value is not None and value.type is None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape)


def _drop_unnamed_masks(model: ir.Model) -> None:
    """A Dropout may name its mask "". onnxscript folds the mask to a constant, which needs a name."""
    for node in model.graph.all_nodes():
        if is_onnx(node) and node.op_type == "Dropout" and len(node.outputs) == 2 and not node.outputs[1].name:
            node.resize_outputs(1)


# --- Axes ---------------------------------------------------------------------------------------------------------------
def _count_from_the_front(model: ir.Model) -> bool:
    """Writes negative axes in attributes as others: shape inference of old opsets does not take them, runtimes do."""
    import onnx_ir as ir

    changed = False
    for node in model.graph:
        x = node.inputs[0] if node.inputs else None
        if not is_onnx(node) or x is None or x.shape is None:
            continue
        for name in ("axis", "axes"):
            given = node.attributes.get(name)
            if given is None or given.is_ref() or given.type not in (ir.AttributeType.INT, ir.AttributeType.INTS):
                continue
            axes = [given.as_int()] if given.type == ir.AttributeType.INT else list(given.as_ints())
            rank = len(x.shape) + (len(axes) if node.op_type == "Unsqueeze" else 0)
            if node.op_type in _NEW_AXIS or not any(-rank <= axis < 0 for axis in axes):
                continue
            axes = [axis + rank if -rank <= axis < 0 else axis for axis in axes]
            made = ir.AttrInt64(name, axes[0]) if given.type == ir.AttributeType.INT else ir.AttrInt64s(name, axes)
            node.attributes[name] = made
            changed = True
    return changed


def _write_splits(model: ir.Model) -> bool:
    """Writes the parts of each Split that onnxscript made of a SplitToSequence: it gives their number as an attribute,
    `num_outputs`, which opsets before 18 lack."""
    import onnx_ir as ir

    changed = False
    for node in model.graph:
        given, x = node.attributes.get("num_outputs"), node.inputs[0] if node.inputs else None
        if node.op_type != "Split" or given is None or model.opset_imports.get("", 18) >= 18:
            continue
        axis = node.attributes.get_int("axis", 0)
        extent = None if x is None or x.shape is None else x.shape[axis]
        if isinstance(extent, int):
            count = given.as_int()
            part = -(-extent // count)
            parts = [part] * (count - 1) + [extent - part * (count - 1)]
            node.attributes.pop("num_outputs")
            if model.opset_imports.get("", 18) < 13:
                node.attributes["split"] = ir.AttrInt64s("split", parts)
            else:
                node.resize_inputs(2)
                node.replace_input_with(1, constant(model, f"{node.outputs[0].name}.parts", np.array(parts)))
            changed = True
    return changed


_SAME_SHAPE = ("GroupNormalization", "MeanVarianceNormalization")


def _write_same_shapes(model: ir.Model) -> bool:
    """Writes the shapes that onnx does not infer: those of results that have the shape of the first input."""
    changed = False
    for node in model.graph:
        x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
        if is_onnx(node) and node.op_type in _SAME_SHAPE and x is not None and x.shape is not None and y.shape is None:
            y.shape, y.type = x.shape.copy(), y.type or x.type
            changed = True
    return changed


_NEW_AXIS = ("OneHot", "ConcatFromSequence", "SplitToSequence")  # their axes are not of the first input


# --- Constants ----------------------------------------------------------------------------------------------------------
def is_foldable(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Whether a node is computed when the model is read: it reads constants, and its results are not too large.

    Raises:
        ConstantIndexError: as `simplify`.
    """
    if not is_onnx(node) or node.op_type in (*RANDOM, "Constant") or has_bodies(node):
        return False
    given = [value for value in node.inputs if value is not None]
    if any(value.const_value is None or value.is_graph_input() for value in given):
        return False
    check_indices(node)
    if _stays_quantised(node):
        return False
    tensors = [value.const_value for value in given if value.const_value is not None]
    if node.op_type in _SLOW and any(tensor.size > _MOST_SLOW for tensor in tensors):
        return False
    read, made = sum(tensor.nbytes for tensor in tensors), _bytes_made(node, opsets)
    if made is None:
        return read <= _MOST_UNKNOWN and node.op_type not in _GROWING
    return bool(made <= max(read, _MOST_BYTES))


def _stays_quantised(node: ir.Node) -> bool:
    """Whether integers that are converted stay as they are, because their readers compute with them."""
    if node.op_type != "DequantizeLinear" or node.inputs[0] is None or node.attributes.get_int("block_size", 0):
        return False
    dtype, readers = dtype_of(node.inputs[0]), [user for value in node.outputs for user, _ in value.uses()]
    if dtype in INTEGERS:
        return any(reader.op_type in _QUANTISED for reader in readers)
    return dtype == "int32" and any(_is_sum_of_products(reader) for reader in readers)


def _is_sum_of_products(node: ir.Node) -> bool:
    """Whether a node adds a bias to a product, in integers if these are quantised."""
    if node.op_type in _PRODUCTS:
        return True
    makers = [value.producer() for value in node.inputs if value is not None]
    return node.op_type == "Add" and any(maker is not None and maker.op_type in _PRODUCTS for maker in makers)


def _bytes_made(node: ir.Node, opsets: Mapping[str, int]) -> int | None:
    """Of all results; None if a shape is not known."""
    import onnx_ir as ir

    total = 0
    inferred: Mapping[str, Any] | None = None
    for value in node.outputs:
        if not value.name:
            continue
        shape, dtype = value.shape, value.dtype
        if shape is None or not shape.is_static() or dtype is None:
            inferred = _inferred(node, opsets) if inferred is None else inferred
            if value.name not in inferred:
                return None
            shape = ir.serde.deserialize_type_proto_for_shape(inferred[value.name])
            dtype = ir.DataType(inferred[value.name].tensor_type.elem_type)
        if shape is None or not shape.is_static() or dtype == ir.DataType.STRING:
            return None
        total += math.ceil(math.prod(int(extent) for extent in shape) * dtype.itemsize)
    return total


def _inferred(node: ir.Node, opsets: Mapping[str, int]) -> Mapping[str, Any]:
    """Types of the results of a node that reads constants; none if they cannot be inferred."""
    import onnx
    import onnx_ir as ir

    constants = {str(value.name): value.const_value for value in node.inputs if value is not None}
    tensors = {name: tensor for name, tensor in constants.items() if tensor is not None}
    types = {
        name: onnx.helper.make_tensor_type_proto(tensor.dtype.value, tensor.shape.numpy())
        for name, tensor in tensors.items()
    }
    data = {name: ir.serde.serialize_tensor(tensor) for name, tensor in tensors.items() if tensor.size <= 64}
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, opsets.get("", 1)), "")
        found: GivenParams = onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), types, data)
    except (RuntimeError, onnx.defs.SchemaError):  # no such operator in the opset, or a node against its rules
        return {}
    return found


def _fold(model: ir.Model) -> bool:
    """Folds what onnxscript leaves: nodes with several results."""
    changed = False
    for node in [node for graph in graphs_of(model.graph) for node in graph]:
        if not is_foldable(node, model.opset_imports):
            continue
        arrays = computed(node, model.opset_imports)
        if arrays is None:
            continue
        _become(model, node, arrays)
        changed = True
    return changed


def _fold_identities(model: ir.Model) -> bool:
    """Folds each EyeLike of an array whose shape is known: it reads nothing else of it."""
    changed = False
    for node in [node for graph in graphs_of(model.graph) for node in graph if node.op_type == "EyeLike"]:
        shape, kind = partial_extents(node, 0), node.outputs[0].dtype
        if not is_onnx(node) or shape is None or len(shape) != 2 or kind is None:
            continue
        rows, columns = shape
        if rows is None or columns is None:
            continue
        _become(model, node, [np.eye(rows, columns, k=node.attributes.get_int("k", 0), dtype=kind.numpy())])
        changed = True
    return changed


def _know_constants(model: ir.Model) -> bool:
    """Gives constants the shapes that they have. One that was folded has the shape that was inferred before, which is open
    behind a NonZero."""
    changed = False
    for graph in graphs_of(model.graph):
        made = (value for node in graph for value in node.outputs)
        for value in (*graph.initializers.values(), *made):
            tensor = value.const_value
            if tensor is not None and value.shape != tensor.shape:
                value.shape = tensor.shape
                changed = True
    return changed


def _register_constants(model: ir.Model) -> bool:
    """Gives constants that have the name of another one a name of their own: two of onnxscript's rules name the shape of a
    Reshape after its input or its result, and the later one takes the place of the first among the initializers."""
    changed, names = False, None
    for graph in graphs_of(model.graph):
        for node in graph:
            for value in node.inputs:
                if value is None or value.const_value is None or value.producer() is not None or value.graph is not None:
                    continue
                names = names or Names(model)
                value.name = names.value(str(value.name))
                model.graph.register_initializer(value)
                changed = True
    return changed


def _lift_outputs(model: ir.Model) -> None:
    """Makes initializers of the Constants that are outputs, which onnx_ir's pass leaves."""
    import onnx_ir as ir

    for node in [node for node in model.graph if node.op_type == "Constant" and is_onnx(node)]:
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is not None and node.outputs[0].is_graph_output():
            _become(model, node, [tensor])


def _become(model: ir.Model, node: ir.Node, numbers: Sequence[Array | ir.TensorProtocol]) -> None:
    """Puts constants in the place of a node's results that have a name."""
    import onnx_ir as ir

    for old, each in zip([value for value in node.outputs if value.name], numbers):
        tensor = ir.tensor(each, name=old.name)
        new = ir.Value(name=old.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = f"{old.name}.computed"
        model.graph.register_initializer(new)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
