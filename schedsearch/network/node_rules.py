"""What onnx's checker and its shape inference leave out: words and numbers of attributes, and shapes that do not fit.

ONNX Runtime refuses these when it makes the kernel of a node, or when the node runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedsearch.network.facts import constant_input, differ, is_onnx, name_of, partial_extents, partial_shape
from schedsearch.network.invalid import ModelError
from schedsearch.network.product_rules import PRODUCT_RULES
from schedsearch.network.recurrence_rules import wrong_recurrence

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

# --- Attributes ---------------------------------------------------------------------------------------------------------
_PADDED = ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool", "LpPool")
_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTIONS = ("none", "add", "mul", "max", "min")
_WORDS: Mapping[tuple[str, str], Sequence[str]] = {  # operator, attribute -> the words that it can be
    **{(op, "auto_pad"): _PADS for op in _PADDED},
    **{(op, "mode"): ("DCR", "CRD") for op in ("DepthToSpace",)},
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("Resize", "mode"): ("nearest", "linear", "cubic"),
    ("Upsample", "mode"): ("nearest", "linear"),
    ("ScatterElements", "reduction"): _REDUCTIONS,
    ("ScatterND", "reduction"): _REDUCTIONS,
    ("RoiAlign", "mode"): ("avg", "max"),
    ("Gelu", "approximate"): ("none", "tanh"),
}
_LEAST: Mapping[tuple[str, str], int] = {  # operator, attribute -> its least number
    **{(op, "group"): 1 for op in ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv")},
    ("LRN", "size"): 1,
    ("DepthToSpace", "blocksize"): 1,
    ("SpaceToDepth", "blocksize"): 1,
    **{(op, "hidden_size"): 1 for op in ("LSTM", "GRU", "RNN")},
}
_NEEDED: Mapping[str, str] = dict.fromkeys(("LSTM", "GRU", "RNN"), "hidden_size")


def wrong_attribute(node: onnx.NodeProto) -> str | None:
    """What is wrong with an attribute of a node of ONNX's domain; arguments of functions are not known."""
    given = {each.name: each for each in node.attribute if not each.ref_attr_name}
    for name, each in given.items():
        words, least = _WORDS.get((node.op_type, name)), _LEAST.get((node.op_type, name))
        word = each.s.decode("utf-8", "replace")
        if words is not None and word not in words:
            return f"has {name} {word!r}; allowed: {', '.join(words)}"
        if least is not None and each.i < least:
            return f"has {name} {each.i}; allowed: {least} or more"
    needed = _NEEDED.get(node.op_type)
    if needed is not None and needed not in {each.name for each in node.attribute}:
        return f"has no {needed}; it is needed"
    if node.op_type == "ConstantOfShape" and "value" in given and list(given["value"].t.dims) not in ([], [1]):
        return f"has a value of shape {list(given['value'].t.dims)}; allowed: one number"
    return _wrong_pads(node, given) if node.op_type in _PADDED and "pads" in given else None


def _wrong_pads(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> str | None:
    pads = list(given["pads"].ints)
    if any(pads) and "auto_pad" in given and given["auto_pad"].s != b"NOTSET":
        return f"has auto_pad {given['auto_pad'].s.decode()!r} and pads {pads}; allowed: one of them"
    kernel = list(given["kernel_shape"].ints) if "kernel_shape" in given and node.op_type.endswith("Pool") else []
    if len(pads) == 2 * len(kernel) and any(pad >= taps for pad, taps in zip(pads, kernel * 2)):
        return f"has pads {pads} and windows of {kernel}; allowed: pads smaller than the window"
    return None


# --- Shapes -------------------------------------------------------------------------------------------------------------
_Extents = list[int | None]


def check_nodes(model: ir.Model, name: str) -> None:
    """Looks at the shapes of the nodes of a graph as far as they are known.

    Args:
        name: of the model, for messages.

    Raises:
        ModelError: the shapes of a node do not fit.
    """
    for node in model.graph:
        if not is_onnx(node):
            continue
        reason = next(_wrong_shapes(node), None)
        if reason:
            raise ModelError(f"{name}: node {name_of(node)} ({node.op_type}) {reason}. Correct the model")


def _is_static(shape: _Extents | None) -> bool:
    return shape is not None and None not in shape


def _wrong_shapes(node: ir.Node) -> Iterator[str]:
    for value in node.outputs:
        shape = partial_shape(value)
        if shape is not None and any(extent is not None and extent < 0 for extent in shape):
            yield f"makes {value.name!r} of shape {shape}; allowed: extents of 0 or more"
    rule = _RULES.get(node.op_type)
    if rule is not None:
        yield from rule(node)


def _reshape(node: ir.Node) -> Iterator[str]:
    x, y = partial_extents(node, 0), partial_shape(node.outputs[0])
    if _is_static(x) and _is_static(y) and math.prod(x or ()) != math.prod(y or ()):  # type: ignore[arg-type]
        yield f"makes {y} of {x}; allowed: a shape with as many elements"


def _convolution(node: ir.Node) -> Iterator[str]:
    quantised = node.op_type == "QLinearConv"
    x, w = partial_extents(node, 0), partial_extents(node, 3 if quantised else 1)
    if x is None or w is None or len(x) < 3 or len(w) != len(x):
        return
    group = node.attributes.get_int("group", 1)
    if differ(x[1], None if w[1] is None else w[1] * group):
        what = f"{w[1]} input channels" if group == 1 else f"{group} x {w[1]} input channels"
        yield f"has a weight that takes {what}, but its input has {x[1]}"
    if w[0] is not None and w[0] % group:
        yield f"has {w[0]} output channels in {group} groups; allowed: a multiple of the groups"
    yield from _kernel(node, w)
    bias = 8 if quantised else 2
    if node.op_type != "ConvInteger":
        yield from _row(node, bias, "bias", w[0])
    if quantised:
        for place, what in ((4, "weight's scale"), (5, "weight's zero point")):
            yield from _row(node, place, what, w[0], or_one=True)


def _transposed_convolution(node: ir.Node) -> Iterator[str]:
    x, w = partial_extents(node, 0), partial_extents(node, 1)
    if x is None or w is None or len(x) < 3 or len(w) != len(x):
        return
    group = node.attributes.get_int("group", 1)
    if differ(x[1], w[0]):
        yield f"has a weight that takes {w[0]} input channels, but its input has {x[1]}"
    if w[0] is not None and w[0] % group:
        yield f"has {w[0]} input channels in {group} groups; allowed: a multiple of the groups"
    yield from _kernel(node, w)
    yield from _row(node, 2, "bias", None if w[1] is None else w[1] * group)


def _kernel(node: ir.Node, w: _Extents) -> Iterator[str]:
    kernel = node.attributes.get_ints("kernel_shape", ())
    if kernel and any(differ(taps, extent) for taps, extent in zip(kernel, w[2:])):
        yield f"has kernel_shape {list(kernel)} and a weight of {w[2:]}; allowed: the same"


def _row(node: ir.Node, place: int, what: str, length: int | None, or_one: bool = False) -> Iterator[str]:
    """An input must be a row of a length; with `or_one`, one number is allowed, too."""
    shape = partial_extents(node, place)
    if shape is None or length is None or (or_one and shape in ([], [1])):
        return
    if len(shape) != 1 or differ(shape[0], length):
        yield f"has a {what} of shape {shape}; allowed: [{length}]"


def _normalised(node: ir.Node) -> Iterator[str]:
    x = partial_extents(node, 0)
    if x is None:
        return
    axis = node.attributes.get_int("axis", -1)
    if not -len(x) <= axis < len(x):
        yield f"has axis {axis}, but its input has {len(x)} dimensions"
        return
    for place, what in ((1, "scale"), (2, "bias")):
        yield from _broadcast(node, place, what, x[axis % len(x) :])


def _broadcast(node: ir.Node, place: int, what: str, to: _Extents | None) -> Iterator[str]:
    """An input must be one that is repeated to a shape."""
    shape = partial_extents(node, place)
    if shape is None or to is None:
        return
    pairs = zip(reversed(shape), reversed(to))
    if len(shape) > len(to) or any(one != 1 and differ(one, other) for one, other in pairs):
        yield f"has a {what} of shape {shape}; allowed: one that can be repeated to {to}"


def _channels(node: ir.Node) -> Iterator[str]:
    x = partial_extents(node, 0)
    if x is not None and len(x) > 1 and node.attributes.get_int("spatial", 1):  # before opset 9, one for each pixel
        for place, what in ((1, "scale"), (2, "bias")):
            yield from _row(node, place, what, x[1])


def _gemm(node: ir.Node) -> Iterator[str]:
    yield from PRODUCT_RULES["Gemm"](node)
    yield from _broadcast(node, 2, "bias", partial_shape(node.outputs[0]))


def _slopes(node: ir.Node) -> Iterator[str]:
    yield from _broadcast(node, 1, "slope", partial_extents(node, 0))


def _scales(node: ir.Node) -> Iterator[str]:
    x, scale, zero = (partial_extents(node, place) for place in range(3))
    if scale is None:
        return
    if zero is not None and math.prod(each or 1 for each in scale) > 1 and not _alike(scale, zero):
        yield f"has scales of shape {scale} and zero points of shape {zero}; allowed: the same"
    if x is None or len(scale) != 1 or scale == [1]:
        return
    axis = node.attributes.get_int("axis", 1)
    if not -len(x) <= axis < len(x):
        yield f"has axis {axis}, but its input has {len(x)} dimensions"
    elif differ(scale[0], x[axis]):
        yield f"has scales of shape {scale}; allowed: one number, or [{x[axis]}], the extent of axis {axis}"


def _alike(one: _Extents, other: _Extents) -> bool:
    return len(one) == len(other) and not any(differ(*pair) for pair in zip(one, other))


def _bounds(node: ir.Node) -> Iterator[str]:
    for place, what in ((1, "lower"), (2, "upper")):
        shape = partial_extents(node, place)
        if shape is not None and any(extent not in (1, None) for extent in shape):
            yield f"has a {what} bound of shape {shape}; allowed: one number"


def _update(node: ir.Node) -> Iterator[str]:
    x, places, update = (partial_extents(node, place) for place in range(3))
    if x is None or places is None or update is None:
        return
    if node.op_type == "ScatterElements":
        if not _alike(places, update) or len(places) != len(x):
            yield f"has updates of shape {update} and indices of shape {places} for {len(x)} dimensions; allowed: the same"
    elif places and (count := places[-1]) is not None and not _alike(places[:-1] + x[count:], update):
        yield f"has updates of shape {update}; allowed: {places[:-1] + x[count:]}"


def _number(wrong: Callable[[Any], bool], place: int, what: str) -> Callable[[ir.Node], Iterator[str]]:
    """A constant input none of whose numbers may be wrong."""

    def rule(node: ir.Node) -> Iterator[str]:
        numbers = constant_input(node, place)
        if numbers is not None and numbers.dtype.kind in "iuf" and wrong(numbers):
            yield f"has {what} {numbers.reshape(-1)[:8].tolist()}"

    return rule


def _resize(node: ir.Node) -> Iterator[str]:
    yield from _number(lambda numbers: bool((numbers <= 0).any()), 2, "scales")(node)
    yield from _number(lambda numbers: bool((numbers < 0).any()), 3, "sizes")(node)


_divisor = _number(lambda numbers: numbers.dtype.kind in "iu" and bool((numbers == 0).any()), 1, "a divisor of zero,")
_RULES: Mapping[str, Callable[[ir.Node], Iterator[str]]] = {
    "Reshape": _reshape,
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalised),
    **dict.fromkeys(("InstanceNormalization", "BatchNormalization"), _channels),
    **PRODUCT_RULES,
    "Gemm": _gemm,
    "PRelu": _slopes,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scales),
    "Clip": _bounds,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), wrong_recurrence),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _update),
    "Resize": _resize,
    **dict.fromkeys(("Div", "Mod"), _divisor),
    "TopK": _number(lambda numbers: bool((numbers < 0).any()), 1, "a k of"),
    "Dropout": _number(lambda numbers: bool(((numbers < 0) | (numbers >= 1)).any()), 1, "a ratio of"),
}
