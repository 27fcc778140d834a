"""Nodes that are the same as others for which there are kernels.

- A transposed convolution is a convolution whose channels are the pixels of a block, and a `DepthToSpace`.
- x * Sigmoid(x) is Swish, and x * HardSigmoid(x) of the usual slope is HardSwish.
- A Concat of dequantised numbers that is quantised is one of 8-bit numbers, and a view of dequantised numbers is one of
  8-bit numbers.
- Reductions over any axes are pools of whole images (`schedsearch.network.reductions`).
- A Gather of all elements in their order, as torch's exporter writes for `as_strided`, is a Reshape.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.facts import only_reader
from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.network.quantised import converted_from, converted_to
from schedsearch.network.reductions import REWRITTEN

if TYPE_CHECKING:
    import onnx_ir as ir

Array = np.ndarray[Any, np.dtype[Any]]

_SIXTH = 1 / 6


def rewrite_nodes(model: ir.Model) -> None:
    """Replaces nodes in the graph, which must be simplified already. Those that nothing reads afterwards are removed, so
    that they do not count as readers."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for node in list(model.graph):
        if node.domain in ("", "ai.onnx") and (rewrite := _REWRITES.get(node.op_type)) is not None:
            rewrite(model, node)
    RemoveUnusedNodesPass()(model)


# --- Transposed convolutions --------------------------------------------------------------------------------------------
def transposed_problem(node: ir.Node) -> str:
    """Why a ConvTranspose cannot become a convolution; empty if it can."""
    x, weight = node.inputs[0], node.inputs[1]
    if x is None or x.shape is None or not x.shape.is_static() or len(x.shape) != 4:
        return "has an input of another shape than N, C, H, W; allowed: 2 spatial dimensions, of known extents"
    if weight is None or weight.const_value is None:
        return "has a weight that is computed; allowed: a constant"
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in node.attributes:
        return "has auto_pad or output_shape; allowed: pads and output_padding"
    rows, columns = (_Axis.of(node, axis) for axis in (0, 1))
    if rows.stride != columns.stride:
        return f"has strides {rows.stride} and {columns.stride}; allowed: equal ones"
    if any(min(axis.before, axis.after) < 0 for axis in (rows, columns)):
        return "has pads that are larger than its filters; allowed: smaller ones"
    return ""


class _Axis:
    """Height or width of a transposed convolution, as a convolution of blocks of `stride` pixels.

    Pixel stride * q + f of the result is the sum of x[q + d] * weight[f + pad - stride * d]. The taps d that any phase f of
    a block has are those of the convolution; a phase has weight 0 where its own filter has no such tap. Source: Shi et al.,
    "Is the deconvolution layer the same as a convolutional layer?", 2016.

    Attributes:
        stride: pixels of a block.
        first, taps: the least d, and how many there are.
        before, after: the padding of the convolution.
        extent: of the result.
        blocks: of the convolution's result; they may reach beyond `extent`.
    """

    def __init__(
        self, extent: int, filter_extent: int, stride: int, dilation: int, pads: tuple[int, int], more: int
    ) -> None:
        self.stride, self.dilation, self.pad = stride, dilation, pads[0]
        reach = (filter_extent - 1) * dilation + 1
        self.reach = reach
        self.extent = (extent - 1) * stride + reach - sum(pads) + more
        self.blocks = -(-self.extent // stride)
        self.first = -((reach - 1 - pads[0]) // stride)
        self.taps = (stride - 1 + pads[0]) // stride - self.first + 1
        self.before = -self.first
        self.after = self.blocks - extent - self.before + self.taps - 1

    @classmethod
    def of(cls, node: ir.Node, axis: int) -> _Axis:
        x, weight = node.inputs[0], node.inputs[1]
        assert x is not None and x.shape is not None and weight is not None and weight.shape is not None
        read = node.attributes
        pads = read.get_ints("pads", (0, 0, 0, 0))
        stride, dilation = read.get_ints("strides", (1, 1))[axis], read.get_ints("dilations", (1, 1))[axis]
        more = read.get_ints("output_padding", (0, 0))[axis]
        extents = int(x.shape[2 + axis]), int(weight.shape[2 + axis])
        return cls(*extents, stride, dilation, (pads[axis], pads[2 + axis]), more)

    def selection(self) -> Array:
        """(phase, tap of the convolution, tap of the filter): 1 where they belong together, else 0."""
        phase, tap, own = np.ogrid[: self.stride, : self.taps, : (self.reach - 1) // self.dilation + 1]
        found: Array = own * self.dilation == phase + self.pad - self.stride * (tap + self.first)
        return found.astype(np.float32)


def _transposed_convolution(model: ir.Model, node: ir.Node) -> None:
    import onnx_ir as ir

    if transposed_problem(node):
        return
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert x is not None and x.shape is not None and weight is not None and weight.const_value is not None
    rows, columns = (_Axis.of(node, axis) for axis in (0, 1))
    groups, block = node.attributes.get_int("group", 1), rows.stride
    filters = weight.const_value.numpy()
    c, k, r, s = filters.shape
    grouped = filters.reshape(groups, c // groups, k, r, s).astype(np.float32)
    made = np.einsum("gckrs,fir,ejs->gkfecij", grouped, rows.selection(), columns.selection())
    made = made.reshape(groups * k * block**2, c // groups, rows.taps, columns.taps).astype(filters.dtype)
    inputs = [x, constant(model, f"{weight.name}.blocks", made)]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = node.inputs[2]
        if bias.const_value is None:
            return
        inputs.append(constant(model, f"{bias.name}.blocks", bias.const_value.numpy().repeat(block**2)))
    pads = [rows.before, columns.before, rows.after, columns.after]
    attributes = [ir.AttrInt64s("pads", pads), ir.AttrInt64("group", groups)]
    n = int(x.shape[0])
    channels = groups * k
    value = result(y, "blocks", [n, channels * block**2, rows.blocks, columns.blocks])
    nodes = [ir.Node("", "Conv", inputs, attributes, outputs=[value], name=node.name)]
    if block > 1:
        shuffled = result(y, "pixels", [n, channels, rows.blocks * block, columns.blocks * block])
        shuffle = [ir.AttrInt64("blocksize", block), ir.AttrString("mode", "CRD")]
        nodes.append(ir.Node("", "DepthToSpace", [value], shuffle, outputs=[shuffled], name=node.name))
        value = shuffled
    if (rows.blocks * block, columns.blocks * block) != (rows.extent, columns.extent):
        ends = [constant(model, f"{y.name}.{name}", np.array(numbers)) for name, numbers in (
            ("starts", [0, 0]), ("ends", [rows.extent, columns.extent]), ("axes", [2, 3])
        )]  # fmt: skip
        value = result(y, "cut", [n, channels, rows.extent, columns.extent])
        nodes.append(ir.Node("", "Slice", [nodes[-1].outputs[0], *ends], outputs=[value], name=node.name))
    replace(model, node, nodes)


# --- Activations --------------------------------------------------------------------------------------------------------
def _product(model: ir.Model, node: ir.Node) -> None:
    """x * Sigmoid(x) and x * HardSigmoid(x)."""
    import onnx_ir as ir

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

    y, part = converted_to(node), None if node.inputs[0] is None else converted_from(node.inputs[0])
    if y is None or part is None or part.scale is None or y.scale is None or max(part.scale.size, y.scale.size) > 1:
        return
    if (part.dtype, part.zero_point, part.scale.tolist()) == (y.dtype, y.zero_point, y.scale.tolist()):
        replace(
            model, node, [ir.Node("", "Identity", [part.value], outputs=[result(y.value, "same", None)], name=node.name)]
        )


_REWRITES = {
    "ConvTranspose": _transposed_convolution,
    "Mul": _product,
    "Gather": _gather,
    "Concat": _concat,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _view),
    "QuantizeLinear": _quantise,
    **REWRITTEN,
}
