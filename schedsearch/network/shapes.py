"""Shapes where onnx's inference is wrong, or lacks an operator.

A pool with `ceil_mode` has one window more than without where pixels are left over, but not if that window would begin in
the padding behind the image, nor with `auto_pad` SAME. onnx's shape inference counts it all the same, and its checker
accepts that (findings/onnx_pool_ceil_mode_shape.sh). Such a pool is the same as one without `ceil_mode`, for which the
inference is right. Where the shape of the image follows from constants that are still to be folded, the pool is in a domain
of our own until it is known: nothing is inferred of it, and nothing wrong is folded behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from schedsearch.network.control.bodies import graphs_of
from schedsearch.network.facts import has_bodies, is_onnx, name_of
from schedsearch.network.invalid import ModelError
from schedsearch.network.windows import Window

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_POOLS = ("MaxPool", "AveragePool", "LpPool")
_HIDDEN = "schedsearch.hidden"  # the domain of pools whose images have no shape yet


def correct_shapes(model: ir.Model) -> None:
    """Infers shapes, and writes pools whose `ceil_mode` adds no window along some axis so that the inference is right.
    Values behind these lose the shapes that the file records, which may follow from the wrong ones.

    Args:
        model: its inputs have their shapes, and its nodes are in order. It is changed.

    Raises:
        ModelError: a pool cannot be written in another way.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    left = [node for node in model.graph if node.op_type in _POOLS and is_onnx(node) and _is_ceil(node)]
    for node in left:
        if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):  # this alone says how many windows there are
            node.attributes.pop("ceil_mode")
            forget_shapes_behind(node)
    while left:
        ShapeInferencePass()(model)
        wrong = next((node for node in left if any(axis.is_miscounted for axis in _axes(node))), None)
        if wrong is None:
            return
        left = left[left.index(wrong) + 1 :]
        _rewrite(wrong)
        forget_shapes_behind(wrong)


def settle_pools(model: ir.Model) -> bool:
    """As `correct_shapes`, while a graph is simplified: pools with `ceil_mode` are hidden until the shapes of their images
    are known. Returns whether there are nodes of which shapes can be inferred now, or are to be inferred anew.

    Raises:
        ModelError: as `correct_shapes`.
    """
    changed = False
    for node in [node for graph in graphs_of(model.graph) for node in graph if node.op_type in _POOLS and _is_ceil(node)]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or not (is_onnx(node) or node.domain == _HIDDEN):
            continue
        if x.shape is None or not x.shape.is_static():
            if node.domain != _HIDDEN:
                forget_shapes_behind(node)
            node.domain = _HIDDEN
            model.opset_imports[_HIDDEN] = 1
            y.type = y.type or x.type
            y.shape = None if x.shape is None else _open_images(x.shape)
            continue
        is_new = node.domain == _HIDDEN
        node.domain = ""
        if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
            node.attributes.pop("ceil_mode")
            is_new = True
        elif any(axis.is_miscounted for axis in _axes(node)):
            _rewrite(node)
            is_new = True
        if is_new:
            forget_shapes_behind(node)
        changed = changed or is_new
    return changed


def _open_images(shape: ir.Shape) -> ir.Shape:
    """The same images with other pixels."""
    import onnx_ir as ir

    return ir.Shape([extent if axis < 2 else None for axis, extent in enumerate(shape)])


def show_pools(model: ir.Model) -> None:
    """Ends what `settle_pools` began."""
    for node in (node for graph in graphs_of(model.graph) for node in graph):
        if node.domain == _HIDDEN:
            node.domain = ""
    model.opset_imports.pop(_HIDDEN, None)


def pad_open_windows(model: ir.Model) -> None:
    """Writes what windows over images of open extents do at the ends as padding, where that does not depend on the extents:
    `ceil_mode` of maxima if no window can begin behind an image, and `auto_pad` SAME if it puts as much before any image.

    Args:
        model: a graph whose shapes were inferred. It is changed.
    """
    for node in model.graph:
        x = node.inputs[0] if node.inputs else None
        is_open = x is not None and (x.shape is None or not x.shape.is_static())
        if is_open and node.op_type == "MaxPool" and is_onnx(node) and _is_ceil(node):
            _pad_open_pool(node)
        if is_open and node.op_type in ("Conv", "MaxPool", "AveragePool") and is_onnx(node):
            _pad_open_same(node)


def _pad_open_same(node: ir.Node) -> None:
    """SAME makes ceil(h / stride) windows. What it adds depends on the rest of h / stride: with strides, padding behind the
    image that no window of most images reaches has the same windows."""
    import onnx_ir as ir

    read, x = node.attributes, node.inputs[0]
    shape = node.inputs[1].shape if node.op_type == "Conv" and node.inputs[1] is not None else None
    taps_of = [int(each) for each in list(shape)[2:] if isinstance(each, int)] if shape is not None else None
    window = Window.of(node, None if "kernel_shape" in read else taps_of)
    if not window.is_same or x is None or x.shape is None or len(x.shape) != len(window.taps) + 2:
        return
    before: list[int] = []
    after: list[int] = []
    for extent, taps, stride, reach in zip(list(x.shape)[2:], window.taps, window.strides, window.reaches):
        if node.op_type != "Conv" and (reach > taps or stride > taps):
            return  # which runtimes pad in different ways
        rests = range(stride)
        if isinstance(extent, int):
            rests = range(extent % stride, extent % stride + 1)
        totals = [max(reach - (rest or stride), 0) for rest in rests]
        first = {total // 2 if window.auto_pad == "SAME_UPPER" else -(-total // 2) for total in totals}
        if len(first) > 1:
            return
        before += first
        after.append(max(totals) - before[-1])
    read.pop("auto_pad")
    read["pads"] = ir.AttrInt64s("pads", [*before, *after])


def _pad_open_pool(node: ir.Node) -> None:
    import onnx_ir as ir

    window = Window.of(node)
    if window.auto_pad != "NOTSET":
        return
    before, after = window.given[: len(window.taps)], window.given[len(window.taps) :]
    if all(pad + stride <= reach for pad, stride, reach in zip(after, window.strides, window.reaches)):
        after = tuple(pad + stride - 1 for pad, stride in zip(after, window.strides))
        node.attributes["pads"] = ir.AttrInt64s("pads", [*before, *after])
        node.attributes.pop("ceil_mode")


def infer_functions(model: ir.Model) -> bool:
    """Gives results of operators that ONNX defines by other operators, such as GreaterOrEqual, their shapes, in the graph
    and in bodies: onnx infers these for whole models only, and onnxscript infers node by node. Returns whether there was
    any."""
    changed = False
    for node in (node for graph in graphs_of(model.graph) for node in graph):
        unknown = [value for value in node.outputs if value.name and (value.shape is None or value.dtype is None)]
        if unknown and is_onnx(node) and not has_bodies(node) and _is_function(node, model):
            for value in unknown:
                changed = _typed(value, _inferred_alone(node, model)) or changed
    return changed


def _is_function(node: ir.Node, model: ir.Model) -> bool:
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports.get("", 1), "")
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _inferred_alone(node: ir.Node, model: ir.Model) -> Mapping[str, onnx.TypeProto]:
    """The types of the results of a node by those of its inputs."""
    import onnx
    from onnx_ir import serde

    given = {str(value.name): value for value in node.inputs if value is not None}
    if any(value.dtype is None or value.shape is None or not value.shape.is_static() for value in given.values()):
        return {}
    info, empty = onnx.helper.make_tensor_value_info, onnx.helper.make_empty_tensor_value_info
    inputs = [info(name, int(value.dtype or 0), [int(each) for each in value.shape or ()]) for name, value in given.items()]
    outputs = [empty(str(value.name)) for value in node.outputs if value.name]
    graph = onnx.helper.make_graph([serde.serialize_node(node)], "one", inputs, outputs)
    imports = [onnx.helper.make_opsetid("", model.opset_imports.get("", 1))]
    try:
        found = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, opset_imports=imports), strict_mode=True)
    except onnx.shape_inference.InferenceError:  # of a node against its rules, which others refuse
        return {}
    return {value.name: value.type for value in found.graph.output}


def _typed(value: ir.Value, types: Mapping[str, onnx.TypeProto]) -> bool:
    import onnx_ir as ir

    found = types.get(str(value.name))
    if found is None or not found.HasField("tensor_type") or not found.tensor_type.HasField("shape"):
        return False
    value.shape = ir.serde.deserialize_type_proto_for_shape(found)
    value.type = ir.serde.deserialize_type_proto_for_type(found)
    return True


class _Axis(NamedTuple):
    """What a pool does along one axis. A window that begins behind the image does not count."""

    extent: int
    taps: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def free(self) -> int:
        """How far the first window can move."""
        return self.extent + self.before + self.after - (self.taps - 1) * self.dilation - 1

    @property
    def left(self) -> int:
        """Pixels behind the last window, without `ceil_mode`."""
        return self.free % self.stride

    @property
    def adds_a_window(self) -> bool:
        begin = (self.free // self.stride + 1) * self.stride
        return self.left > 0 and begin < self.extent + self.before

    @property
    def is_miscounted(self) -> bool:
        """Whether onnx's inference counts a window that begins behind the image."""
        return self.left > 0 and not self.adds_a_window


def _is_ceil(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("ceil_mode", 0))


def _axes(node: ir.Node) -> list[_Axis]:
    """The axes of a pool; none if its shape is not known, or ONNX counts its windows in another way."""
    x, window = node.inputs[0] if node.inputs else None, Window.of(node)
    if x is None or x.shape is None or not x.shape.is_static() or window.is_same:
        return []
    shape, pads = [int(extent) for extent in x.shape][2:], window.fixed
    columns = (shape, window.taps, window.strides, window.dilations, pads[: len(shape)], pads[len(shape) :])
    if not shape or any(len(column) != len(shape) for column in columns):
        return []
    return [_Axis(*each) for each in zip(*columns)]


def _rewrite(node: ir.Node) -> None:
    """Writes the windows of a pool with `ceil_mode` in a way that onnx's inference counts right."""
    import onnx_ir as ir

    axes, read = _axes(node), node.attributes
    after = [axis.after for axis in axes]
    if not any(axis.adds_a_window for axis in axes):
        read.pop("ceil_mode")
        return
    counts_padding = node.op_type == "LpPool" or bool(read.get_int("count_include_pad", 0))
    if not counts_padding:  # more padding changes nothing but the number of windows
        read.pop("ceil_mode")
        after = [axis.after + axis.stride - axis.left if axis.adds_a_window else axis.after for axis in axes]
    else:
        after = [axis.after - axis.left if axis.is_miscounted else axis.after for axis in axes]
    if min(after) < 0:
        raise ModelError(
            f"node {name_of(node)} ({node.op_type}) has ceil_mode, counts its padding, and its strides are larger than its "
            "windows; onnx infers a wrong shape for it. Slice off the pixels that no window reads, and leave ceil_mode out"
        )
    read.pop("auto_pad", None)
    read["pads"] = ir.AttrInt64s("pads", [*(axis.before for axis in axes), *after])


def pads_of_windows(node: ir.Node) -> list[int]:
    """The pads with which a pool without `ceil_mode` has the windows of one that has it, or that has `auto_pad` VALID. More
    of the padding may count then. The shape of its input must be known."""
    axes = _axes(node)
    more = [axis.stride - axis.left if _is_ceil(node) and axis.adds_a_window else 0 for axis in axes]
    return [*(axis.before for axis in axes), *(axis.after + extra for axis, extra in zip(axes, more))]


def forget_shapes_behind(node: ir.Node) -> None:
    """Those of a node's results and of all that is computed from them."""
    left, seen = [node], {node}
    while left:
        each = left.pop()
        for value in each.outputs:
            value.shape = None
            readers = {user for user, _ in value.uses()} - seen
            seen |= readers
            left += readers
