"""Nodes that are the same as others for which there are kernels.

- Convolutions and pools with one dimension are those of images with one row (`schedsearch.network.compositions.rows`).
- A transposed convolution is a convolution of blocks of pixels (`schedsearch.network.transposed`).
- x * Sigmoid(x) is Swish, and x * HardSigmoid(x) of the usual slope is HardSwish; so is what models write out for it
  (`schedsearch.network.compositions.gates`).
- A Concat of dequantised numbers that is quantised is one of 8-bit numbers, and a view of dequantised numbers is one of
  8-bit numbers.
- Reductions over any axes are pools of whole images (`schedsearch.network.reductions`).
- A Gather of all elements in their order, as torch's exporter writes for `as_strided`, is a Reshape.
- Others are compositions (`schedsearch.network.compositions`), whose nodes may become others in their turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions import (
    attention,
    blocks,
    computed_filters,
    determinants,
    einsum,
    gates,
    losses,
    normalisations,
    pads,
    places,
    pools,
    products,
    quantised,
    resizing,
    rotary,
    sampling,
    spectra,
    sums,
    unpooling,
    volumes,
)
from schedsearch.network.compositions.composition import Rewrite
from schedsearch.network.compositions.rows import lift_rows
from schedsearch.network.facts import is_onnx, only_reader
from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.network.quantised import converted_from, converted_to
from schedsearch.network.settings import size_problem
from schedsearch.network.transposed import fold_filters, transposed_convolution

if TYPE_CHECKING:
    import onnx_ir as ir


_SIXTH = 1 / 6


def rewrite_nodes(model: ir.Model) -> None:
    """Replaces nodes in the graph, which must be simplified already. Those that nothing reads afterwards are removed, so
    that they do not count as readers."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    fold_filters(model)
    # before views of images come between the nodes of an activation, and while images may have one axis or three
    _rewrite(model, list(model.graph), _FIRST)
    lift_rows(model)
    volumes.rewrite_volumes(model)
    seen: set[ir.Node] = set()
    while new := [node for node in model.graph if node not in seen]:
        seen.update(new)
        _rewrite(model, new, REWRITES)
    RemoveUnusedNodesPass()(model)


def _rewrite(model: ir.Model, nodes: Iterable[ir.Node], rewrites: Mapping[str, Rewrite]) -> None:
    for node in nodes:
        rewrite = rewrites.get(node.op_type) if node.graph is not None and is_onnx(node) else None
        if rewrite is not None and not size_problem(node):
            rewrite(model, node)


# --- Activations --------------------------------------------------------------------------------------------------------
def _product(model: ir.Model, node: ir.Node) -> None:
    """x * Sigmoid(x) and x * HardSigmoid(x)."""
    import onnx_ir as ir

    if len(node.inputs) != 2:  # a product of several, of a reduction
        return
    first, second = node.inputs
    for x, gate in ((first, second), (second, first)):
        maker = None if gate is None else gate.producer()
        if maker is None or x is None or maker.inputs[0] is not x or gate is None:
            continue
        if len(list(gate.uses())) != 1 or gate.is_graph_output():
            continue
        op = {"Sigmoid": "Swish", "HardSigmoid": "HardSwish"}.get(maker.op_type)
        slope, middle = maker.attributes.get_float("alpha", 0.2), maker.attributes.get_float("beta", 0.5)
        if op == "HardSwish" and not (math.isclose(slope, _SIXTH, rel_tol=1e-6) and middle == 0.5):
            continue
        if op is not None:
            value = result(node.outputs[0], "activated", None)
            replace(model, node, [ir.Node("", op, [x], outputs=[value], name=node.name)])
            model.graph.remove(maker, safe=True)
            return


# --- Gathers ------------------------------------------------------------------------------------------------------------
def _gather(model: ir.Model, node: ir.Node) -> None:
    import onnx_ir as ir

    x, places = node.inputs
    if x is None or x.shape is None or len(x.shape) != 1 or places is None or places.const_value is None:
        return
    indices = places.const_value.numpy()
    if not x.shape.is_static() or not np.array_equal(indices.ravel(), np.arange(int(x.shape[0]))):
        return
    shape = constant(model, f"{node.outputs[0].name}.shape", np.array(indices.shape))
    value = result(node.outputs[0], "reshaped", list(indices.shape))
    replace(model, node, [ir.Node("", "Reshape", [x, shape], outputs=[value], name=node.name)])


# --- Concatenations -----------------------------------------------------------------------------------------------------
def _concat(model: ir.Model, node: ir.Node) -> None:
    """Of dequantised numbers, if only a QuantizeLinear reads the result: each is quantised on its own, and 8-bit numbers are
    concatenated. Those that have the scale of the result already stay as they are."""
    import onnx_ir as ir

    reader = only_reader(node.outputs[0])
    y = None if reader is None else converted_to(reader)
    parts = [None if value is None else converted_from(value) for value in node.inputs]
    if reader is None or y is None or y.scale is None or y.scale.size > 1:
        return
    nodes, wholes = [], []
    for number, (value, part) in enumerate(zip(node.inputs, parts)):
        if value is None or part is None or part.scale is None or part.scale.size > 1 or part.zero_point is None:
            return
        whole = part.value
        if (part.dtype, part.zero_point, part.scale.tolist()) != (y.dtype, y.zero_point, y.scale.tolist()):
            whole = ir.Value(name=f"{node.outputs[0].name}.part{number}", type=y.value.type, shape=value.shape)
            inputs = [value, *reader.inputs[1:]]
            nodes.append(ir.Node("", "QuantizeLinear", inputs, outputs=[whole], name=node.name))
        wholes.append(whole)
    codes = result(y.value, "concatenated", None)
    nodes.append(ir.Node("", "Concat", wholes, list(node.attributes.values()), outputs=[codes], name=node.name))
    replace(model, reader, nodes)
    model.graph.remove(node, safe=True)


# --- Views --------------------------------------------------------------------------------------------------------------
def _view(model: ir.Model, node: ir.Node) -> None:
    """Of dequantised numbers: a view of the 8-bit numbers, which are dequantised behind it."""
    import onnx_ir as ir

    x, y = node.inputs[0], node.outputs[0]
    converter = None if x is None else x.producer()
    part = None if x is None else converted_from(x)
    if part is None or converter is None or part.scale is None or part.scale.size > 1 or len(converter.inputs) < 2:
        return
    whole = ir.Value(name=f"{y.name}.whole", type=part.value.type, shape=y.shape)
    attributes = list(node.attributes.values())
    nodes = [ir.Node("", node.op_type, [part.value, *node.inputs[1:]], attributes, outputs=[whole], name=node.name)]
    value = result(y, "dequantised", None)
    nodes.append(ir.Node("", "DequantizeLinear", [whole, *converter.inputs[1:]], outputs=[value], name=node.name))
    replace(model, node, nodes)


def _quantise(model: ir.Model, node: ir.Node) -> None:
    """Of numbers that were dequantised with the same scale: the 8-bit numbers before. Two roundings do not change them."""
    import onnx_ir as ir

    quantised.QUANTISED_BY_MANY(model, node)
    if node.graph is None:
        return
    y, part = converted_to(node), None if node.inputs[0] is None else converted_from(node.inputs[0])
    if y is None or part is None or part.scale is None or y.scale is None or max(part.scale.size, y.scale.size) > 1:
        return
    if (part.dtype, part.zero_point, part.scale.tolist()) == (y.dtype, y.zero_point, y.scale.tolist()):
        replace(
            model, node, [ir.Node("", "Identity", [part.value], outputs=[result(y.value, "same", None)], name=node.name)]
        )


ACTIVATIONS: Mapping[str, Rewrite] = {"Mul": _product, **gates.REWRITTEN}
_FIRST: Mapping[str, Rewrite] = {
    **ACTIVATIONS,
    **blocks.REWRITTEN,
    **computed_filters.REWRITTEN,
    **unpooling.PLACES,
}
REWRITES: Mapping[str, Rewrite] = {
    **ACTIVATIONS,
    "ConvTranspose": transposed_convolution,
    "Gather": _gather,
    "Concat": _concat,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _view),
    "QuantizeLinear": _quantise,
    **pools.REWRITTEN,
    **sums.REWRITTEN,
    **places.REWRITTEN,
    **pads.REWRITTEN,
    **normalisations.REWRITTEN,
    **products.REWRITTEN,
    **quantised.REWRITTEN,
    **attention.REWRITTEN,
    **einsum.REWRITTEN,
    **rotary.REWRITTEN,
    **resizing.REWRITTEN,
    **determinants.REWRITTEN,
    **losses.REWRITTEN,
    **sampling.REWRITTEN,
    **spectra.REWRITTEN,
    **unpooling.REWRITTEN,
    **volumes.REWRITTEN,
}
