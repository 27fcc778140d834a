"""Which axes of a static operator's result have unknown extents, if those of its arguments have.

An operator that computes every image, row or element by itself may work on arrays of their bounds: what lies beyond the
extents of its arguments only makes what lies beyond those of its result. Others need a dynamic operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from schedsearch.dynamic.follow import enlarged
from schedsearch.network.compositions.normalisations import SOFTMAX_OPSET
from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.facts import constant_of, folded, optional_input
from schedsearch.network.others import RESIZES, resize_scales, resize_words
from schedsearch.network.windows import Window
from schedsearch.ops.resize import ResizeParams
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

Axes = set[int]


def unknown_axes(node: ir.Node, unknown: Mapping[ir.Value, Axes]) -> Axes | str:
    """The axes of the first result, or why a static operator would need to know them; the reason may be empty.

    Args:
        unknown: axes of unknown extents of each computed input.
    """
    x = node.inputs[0]
    if node.attributes.get_int("training_mode", 0) and node.op_type == "BatchNormalization":
        return "it takes mean and variance from its input, of which extents are known at run time only"
    if node.op_type in ELEMENTWISE:
        return _of_elements(unknown)
    if node.op_type == "Concat":
        return _of_concat(node, unknown)
    rank = None if x is None or x.shape is None else len(x.shape)
    if any(axes for value, axes in unknown.items() if value is not x):
        return ""
    axes = unknown.get(x, set()) if x is not None else set()
    if (rule := _OF_ANY_RANK.get(node.op_type)) is not None:
        return rule(node, axes, rank)
    return "" if rank is None or node.op_type not in _OF_RANK else _OF_RANK[node.op_type](node, axes, rank)


def _rows(node: ir.Node, axes: Axes, rank: int | None) -> Axes | str:
    return axes if axes <= {0} else _but_the_first(axes)


def _matrix(node: ir.Node, axes: Axes, rank: int | None) -> Axes | str:
    """Times a constant one."""
    is_matrix = constant_of(node.inputs[1]) is not None and rank == 2 and not node.attributes.get_int("transA", 0)
    return axes if is_matrix and axes <= {0} else _but_the_first(axes - {0})


def _padded(node: ir.Node, axes: Axes, rank: int) -> Axes | str:
    """With numbers, along axes of known extents."""
    if (mode := node.attributes.get_string("mode", "constant")) != "constant":
        return f"its mode is {mode}; allowed where extents are open: constant"
    pads = _numbers(node, "pads", 1)
    chosen = _numbers(node, "axes", 3)
    if pads is None or chosen is None:
        return "its pads or axes are computed"
    along = [axis % rank for axis in chosen] or list(range(rank))
    padded = {axis for place, axis in enumerate(along) if pads[place] or pads[place + len(along)]}
    listed = " and ".join(map(str, sorted(axes & padded)))
    return axes if not listed else f"the extent of axis {listed}, which it pads, is known at run time only"


def _numbers(node: ir.Node, name: str, place: int) -> list[int] | None:
    """An attribute, or the input that it is in later opsets; none if it is missing; None if it is computed."""
    if name in node.attributes:
        return list(node.attributes.get_ints(name, ()))
    value = optional_input(node, place)
    array = None if value is None else constant_of(value)
    return [] if value is None else None if array is None else [int(each) for each in array.ravel()]


def _norms(node: ir.Node, axes: Axes, rank: int) -> Axes | str:
    first = node.attributes.get_int("axis", -1) % rank
    if _gives_more(node):
        return "it gives the mean or deviation of rows whose number is known at run time only"
    return axes if max(axes, default=-1) < first else "extents of the rows that it normalises are known at run time only"


def _gives_more(node: ir.Node) -> bool:
    """Whether anything reads another result than the first one."""
    return any(value.uses() or value.is_graph_output() for value in node.outputs[1:])


def _along(default: int, does: str) -> Callable[[ir.Node, Axes, int], Axes | str]:
    """Of a node that does something along one axis."""

    def rule(node: ir.Node, axes: Axes, rank: int) -> Axes | str:
        axis = node.attributes.get_int("axis", default) % rank
        return axes if axis not in axes else f"the extent of axis {axis}, {does}, is known at run time only"

    return rule


def _softmax(node: ir.Node, axes: Axes, rank: int) -> Axes | str:
    """Before opset 13 of a matrix whose rows are all axes from `axis` on, which is the same if that is the last one."""
    old = node.graph is not None and node.graph.opset_imports.get("", SOFTMAX_OPSET) < SOFTMAX_OPSET
    if not old or node.attributes.get_int("axis", 1) % rank == rank - 1:
        return _along(1 if old else -1, "along which it sums")(node, axes, rank)
    return axes if axes <= {0} and node.attributes.get_int("axis", 1) % rank == 1 else _but_the_first(axes | {1})


def _permuted(node: ir.Node, axes: Axes, rank: int) -> Axes | str:
    order = list(node.attributes.get_ints("perm", range(rank)[::-1]))
    return {order.index(axis) for axis in axes}


def _but_the_first(axes: Axes) -> str:
    later = " and ".join(map(str, sorted(axes - {0})))
    return f"only the extent of its axis 0 may be known at run time only; here it is that of axis {later}" if later else ""


def _of_images(node: ir.Node, axes: Axes, rank: int | None) -> Axes | str:
    """Batch, height and width, where what windows do at the ends does not depend on these."""
    if axes and _gives_more(node):
        return "it gives the places of the largest pixels of an array whose extents are known at run time only"
    if axes and node.op_type == "Conv" and folded(node.inputs[1]) is None:
        return "its filters are computed, and extents of its images are known at run time only"
    if axes <= {0}:
        return axes
    if rank != 4 or 1 in axes:
        return "images may have an unknown batch, height and width; it gets others"
    if node.op_type in RESIZES:
        return axes if _enlarges(node) else ""
    read = node.attributes
    padding = read.get_string("auto_pad", "NOTSET")
    if padding not in ("NOTSET", "VALID") and any(n != 1 for n in read.get_ints("strides", ())):
        return f"auto_pad {padding} with these strides puts other pads before some images than before others; give pads"
    if read.get_int("ceil_mode", 0):
        return "ceil_mode depends on height and width; give pads"
    padded = padding not in ("NOTSET", "VALID") or any(read.get_ints("pads", ()))
    if node.op_type == "AveragePool" and padded and not read.get_int("count_include_pad", 0):
        return "an average without the pixels of padding depends on height and width; set count_include_pad"
    return axes


def _enlarges(node: ir.Node) -> bool:
    """Whether each pixel becomes as many whole ones, whatever height and width are."""
    words, scales = resize_words(node), resize_scales(node)
    if isinstance(words, str) or not isinstance(scales, list) or any(scale < 1 or scale % 1 for scale in scales):
        return False
    sizes = {"n": 1, "c": 1, "h": 2, "w": 2, "oh": 2 * int(scales[2]), "ow": 2 * int(scales[3])}
    return bool(enlarged(ResizeParams.of(Workload("resize", {**words, **sizes}).params)))


def computes_its_size(node: ir.Node) -> bool:
    """Whether the node has inputs, other than the first, that decide the size of its result and are computed."""
    return node.op_type in RESIZES and any(each is not None and constant_of(each) is None for each in node.inputs[1:])


def _of_transposed(node: ir.Node, axes: Axes, rank: int | None) -> Axes | str:
    """A transposed convolution that is a convolution of whole blocks of pixels: `network.rewrites` makes that of it."""
    if axes <= {0}:
        return axes
    weight, read = node.inputs[1], node.attributes
    if rank != 4 or 1 in axes or weight is None or weight.shape is None or "output_shape" in read:
        return "it takes images of an unknown batch, height and width, and a constant weight, without output_shape"
    window = Window.of(node, [int(each) for each in list(weight.shape)[2:]])
    strides, pads = window.strides, window.given
    if strides[0] != strides[1]:
        return f"its strides are {strides[0]} and {strides[1]}; allowed: equal ones where height and width are open"
    for axis in (0, 1):
        stride, reach = strides[axis], window.reaches[axis]
        more = reach - pads[axis] - pads[2 + axis] + read.get_ints("output_padding", (0, 0))[axis]
        if more % stride:
            return (
                f"its result ends within a block of {stride} pixels; allowed: pads and output_padding that give whole blocks"
            )
    return axes


# operators of which the first result has unknown extents from the first input only
_OF_ANY_RANK: Mapping[str, Callable[[ir.Node, Axes, int | None], Axes | str]] = {
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "SpaceToDepth"), _rows),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LRN"), _rows),
    **dict.fromkeys(("Conv", "MaxPool", "AveragePool", "Resize", "Upsample", "DepthToSpace"), _of_images),
    "ConvTranspose": _of_transposed,
    **dict.fromkeys(("Gemm", "MatMul"), _matrix),
}
_OF_RANK: Mapping[str, Callable[[ir.Node, Axes, int], Axes | str]] = {
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _norms),
    "Split": _along(0, "which it splits"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "Transpose": _permuted,
    "Pad": _padded,
}


def _of_elements(unknown: Mapping[ir.Value, Axes]) -> Axes | str:
    """Axes count from the last one."""
    ranks = {value: None if value.shape is None else len(value.shape) for value in unknown}
    if None in ranks.values():
        return ""
    bounds = [tuple(value.shape) for value in unknown if value.shape is not None]
    for back in range(1, max(map(len, bounds)) + 1):
        if len({bound[-back] for bound in bounds if len(bound) >= back} - {1}) > 1:
            return f"the largest sizes of its arguments, {' and '.join(map(str, map(list, bounds)))}, do not fit one another"
    most = max(rank for rank in ranks.values() if rank is not None)
    return {axis + most - (ranks[value] or 0) for value, axes in unknown.items() for axis in axes}


def _of_concat(node: ir.Node, unknown: Mapping[ir.Value, Axes]) -> Axes | str:
    """All parts have the same unknown axes, and are not put together along one of them."""
    (first, *_) = every = [unknown.get(value, set()) for value in node.inputs if value is not None]
    axis, x = node.attributes.get_int("axis", 0), node.inputs[0]
    if x is not None and x.shape is not None:
        axis %= max(1, len(x.shape))
    return first if axis >= 0 and axis not in first and all(each == first for each in every) else ""
