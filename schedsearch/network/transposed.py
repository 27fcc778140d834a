"""Transposed convolutions as convolutions whose channels are the pixels of a block, and a `DepthToSpace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.facts import folded, is_onnx, optional_input
from schedsearch.network.new_nodes import constant, replace, result
from schedsearch.network.shapes import forget_shapes_behind
from schedsearch.network.windows import Window
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def write_pads(model: ir.Model) -> bool:
    """Writes `auto_pad` and `output_shape` of transposed convolutions as pads, and says whether there were any.

    ONNX's formula: what the full result has more than the wanted one is cut off, with SAME_UPPER the smaller half in front,
    otherwise the larger one. SAME wants `strides` times the pixels of the image. If the full result has fewer pixels than
    that, runtimes differ, and the node stays as it is.
    """
    import onnx_ir as ir

    changed = False
    for node in model.graph:
        if node.op_type == "ConvTranspose" and is_onnx(node) and (pads := _wanted_pads(node)) is not None:
            for name in ("auto_pad", "output_shape"):
                node.attributes.pop(name, None)
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
            forget_shapes_behind(node)  # onnx's inference adds output_padding to them, runtimes do not
            changed = True
    return changed


def _wanted_pads(node: ir.Node) -> list[int] | None:
    """The pads that `auto_pad` or `output_shape` stands for; None if the node has neither, or its sizes are not known."""
    read = node.attributes
    wanted = read.get_ints("output_shape", None)
    image, kernel = (_pixels(value) for value in node.inputs[:2])
    if kernel is None or (wanted is not None and image is None):
        return None
    window = Window.of(node, kernel)
    if wanted is None and not window.is_same:
        return None
    more = read.get_ints("output_padding", (0,) * len(kernel))
    totals = [reach - stride + extra for reach, stride, extra in zip(window.reaches, window.strides, more)]
    if wanted is not None and image is not None:
        totals = [n * stride + total - out for n, stride, total, out in zip(image, window.strides, totals, wanted)]
    if any(total < 0 for total in totals) or len(totals) != len(kernel):
        return None
    halves = [total // 2 if window.auto_pad == "SAME_UPPER" else -(-total // 2) for total in totals]
    return [*halves, *(total - half for total, half in zip(totals, halves))]


def _pixels(value: ir.Value | None) -> list[int] | None:
    """The spatial extents of an image or filter, if its shape is known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return [int(extent) for extent in value.shape][2:]


def fold_filters(model: ir.Model) -> None:
    """Filters and biases of transposed convolutions that a DequantizeLinear makes of constants become constants: no kernel
    adds integers for them."""
    for node in model.graph:
        for place in (1, 2) if node.op_type == "ConvTranspose" and is_onnx(node) else ():
            value = optional_input(node, place)
            if value is None or value.const_value is not None or value.dtype is None:
                continue
            if (numbers := folded(value)) is not None:
                dequantised = constant(model, f"{value.name}.folded", numbers.astype(value.dtype.numpy()))
                node.replace_input_with(place, dequantised)


def transposed_problem(node: ir.Node) -> str:
    """Why a ConvTranspose cannot become a convolution; empty if it can."""
    x, weight = node.inputs[0], node.inputs[1]
    if x is None or x.shape is None or not x.shape.is_static() or len(x.shape) not in (4, 5):
        return "has an input of another shape than N, C, (D, H,) W; allowed: 1 to 3 spatial dimensions, of known extents"
    if weight is None or weight.const_value is None:
        return "has a weight that is computed; allowed: a constant"
    if Window.of(node).is_same or "output_shape" in node.attributes:
        return "has auto_pad or output_shape that asks for more pixels than there are; allowed: pads and output_padding"
    axes = [Axis.of(node, axis) for axis in range(len(x.shape) - 2)]
    if any(min(axis.before, axis.after) < 0 for axis in axes):
        return "has pads that are larger than its filters; allowed: smaller ones"
    return ""


class Axis:
    """Depth, height or width of a transposed convolution, as a convolution of blocks of `stride` pixels.

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
    def of(cls, node: ir.Node, axis: int) -> Axis:
        x, weight = node.inputs[0], node.inputs[1]
        assert x is not None and x.shape is not None and weight is not None and weight.shape is not None
        rank, taps = len(x.shape) - 2, [int(each) for each in weight.shape][2:]
        window, more = Window.of(node, taps), node.attributes.get_ints("output_padding", (0,) * rank)
        pads = window.given[axis], window.given[rank + axis]
        return cls(int(x.shape[2 + axis]), taps[axis], window.strides[axis], window.dilations[axis], pads, more[axis])

    def selection(self) -> Array:
        """(phase, tap of the convolution, tap of the filter): 1 where they belong together, else 0."""
        phase, tap, own = np.ogrid[: self.stride, : self.taps, : (self.reach - 1) // self.dilation + 1]
        found: Array = own * self.dilation == phase + self.pad - self.stride * (tap + self.first)
        return found.astype(np.float32)


def transposed_convolution(model: ir.Model, node: ir.Node) -> None:
    """Replaces a transposed convolution; one with a `transposed_problem` stays."""
    import onnx_ir as ir

    if transposed_problem(node) or len(node.inputs[0].shape) != 4:
        return
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert x is not None and x.shape is not None and weight is not None and weight.const_value is not None
    rows, columns = (Axis.of(node, axis) for axis in (0, 1))
    groups, strides = node.attributes.get_int("group", 1), (rows.stride, columns.stride)
    block = rows.stride * columns.stride
    by_phase = rows.stride == 1 < columns.stride and groups == 1
    filters = weight.const_value.numpy()
    c, k, r, s = filters.shape
    grouped = filters.reshape(groups, c // groups, k, r, s).astype(np.float32)
    order = "fegkcij" if by_phase else "gkfecij"
    made = np.einsum(f"gckrs,fir,ejs->{order}", grouped, rows.selection(), columns.selection())
    made = made.reshape(groups * k * block, c // groups, rows.taps, columns.taps).astype(filters.dtype)
    inputs = [x, constant(model, f"{weight.name}.blocks", made)]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = node.inputs[2]
        if bias.const_value is None:
            return
        numbers = bias.const_value.numpy()
        inputs.append(constant(model, f"{bias.name}.blocks", np.tile(numbers, block) if by_phase else numbers.repeat(block)))
    pads = [rows.before, columns.before, rows.after, columns.after]
    attributes = [ir.AttrInt64s("pads", pads), ir.AttrInt64("group", groups)]
    n, channels = int(x.shape[0]), groups * k
    value = result(y, "blocks", [n, channels * block, rows.blocks, columns.blocks])
    nodes = [ir.Node("", "Conv", inputs, attributes, outputs=[value], name=node.name)]
    if rows.stride == columns.stride > 1:
        shuffled = result(y, "pixels", [n, channels, rows.blocks * rows.stride, columns.blocks * columns.stride])
        shuffle = [ir.AttrInt64("blocksize", rows.stride), ir.AttrString("mode", "CRD")]
        nodes.append(ir.Node("", "DepthToSpace", [value], shuffle, outputs=[shuffled], name=node.name))
    elif block > 1:
        nodes += _pixels_of_blocks(model, node, value, strides, by_phase)
    if (rows.blocks * rows.stride, columns.blocks * columns.stride) != (rows.extent, columns.extent):
        ends = [constant(model, f"{y.name}.{name}", np.array(numbers)) for name, numbers in (
            ("starts", [0, 0]), ("ends", [rows.extent, columns.extent]), ("axes", [2, 3])
        )]  # fmt: skip
        value = result(y, "cut", [n, channels, rows.extent, columns.extent])
        nodes.append(ir.Node("", "Slice", [nodes[-1].outputs[0], *ends], outputs=[value], name=node.name))
    replace(model, node, nodes)


def _pixels_of_blocks(
    model: ir.Model, node: ir.Node, blocks: ir.Value, strides: tuple[int, int], by_phase: bool
) -> list[ir.Node]:
    """Nodes that move the pixels of blocks of different height and width to their places.

    Args:
        blocks: [n, channels * pixels of a block, rows of blocks, columns of blocks]; the pixels of a channel stand side by
            side, or `by_phase` all channels of a pixel do. An image in NHWC of blocks of one row has them in order then.
    """
    import onnx_ir as ir

    assert blocks.shape is not None
    n, c, p, q = (int(extent) for extent in blocks.shape)
    (r, s), nodes = strides, list[ir.Node]()

    def add(op: str, shape: list[int], numbers: list[int]) -> None:
        x = nodes[-1].outputs[0] if nodes else blocks
        value = result(node.outputs[0], f"pixels{len(nodes)}", shape)
        inputs = [x] if op == "Transpose" else [x, constant(model, f"{value.name}.shape", np.array(numbers, np.int64))]
        order = [ir.AttrInt64s("perm", numbers)] if op == "Transpose" else []
        nodes.append(ir.Node("", op, inputs, order, outputs=[value], name=node.name))

    k = c // (r * s)
    if by_phase:
        add("Transpose", [n, p, q, c], [0, 2, 3, 1])
        add("Reshape", [n, p, q * s, k], [n, p, q * s, k])
        add("Transpose", [n, k, p, q * s], [0, 3, 1, 2])
        return nodes
    parted, order = [n, k, r, s, p, q], [0, 1, 4, 2, 5, 3]
    add("Reshape", parted, parted)
    add("Transpose", [parted[axis] for axis in order], order)
    add("Reshape", [n, k, p * r, q * s], [n, k, p * r, q * s])
    return nodes
