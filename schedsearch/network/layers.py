"""The layers of a network that schedsearch has operators for, as workloads.

A layer is a node, such as a convolution, with the nodes behind it that its epilogue computes: bias, residual addition,
relu, leaky relu, clip, and the conversions of quantised graphs. A value that leaves the network, or that several nodes
read, ends a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedsearch.errors import WorkloadError
from schedsearch.network.model import ModelError
from schedsearch.ops import STAGES
from schedsearch.task import Task
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

LAYOUT = "NHWC"
_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("int8", "uint8")
_DTYPES = {"FLOAT": "float32", "DOUBLE": "float64", "BOOL": "uint8"}  # where a format has another name than ONNX's
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
_FREE = ("Constant", "Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Dropout")  # they compute nothing


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        workloads: what it computes, once for each layout that was asked for and that can hold it.
        nodes: names of the nodes that it stands for, in order.
    """

    workloads: tuple[Workload, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Extraction:
    """What `extract` found.

    Attributes:
        layers: in the order of the graph.
        others: operator of ONNX -> names of its nodes that no layer stands for, without those that compute nothing.
        reasons: operator of ONNX -> why the first of its `others` is not a layer, although others of its kind may be.
    """

    layers: tuple[Layer, ...]
    others: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def tasks(self) -> tuple[Task, ...]:
        """Every distinct workload once, named after its first node, with the number of layers that have it as its weight."""
        counts: dict[Workload, int] = {}
        names: dict[Workload, str] = {}
        for layer in self.layers:
            for workload in layer.workloads:
                counts[workload] = counts.get(workload, 0) + 1
                several = f" {workload.params.get('layout')}" if len(layer.workloads) > 1 else ""
                names.setdefault(workload, layer.nodes[0] + several)
        return tuple(Task(workload, weight=count, name=names[workload]) for workload, count in counts.items())


def extract(model: ir.Model, *, dtype: str | None = None, layouts: Sequence[str] = (LAYOUT,)) -> Extraction:
    """The layers of a graph.

    Args:
        model: from `read_model`.
        dtype: float16, bfloat16 or float32, in place of the format of layers in floating point; default: the graph's own.
        layouts: of images, e.g. NHWC, NCHW or NCHW32c. Weights have the layout that belongs to it.

    Raises:
        ModelError: the shape of a layer is not known, its input and weight do not fit one another, or none of the layouts
            can hold it.
    """
    taken: set[ir.Node] = set()
    found: list[tuple[int, Layer]] = []
    nodes = list(model.graph)
    # Of two convolutions that are added to one another, the later one takes the addition: the other's result is there.
    # Data movements come last, because a convolution may store through them.
    for place, node in sorted(enumerate(nodes), key=lambda each: (each[1].op_type in _MOVEMENTS, -each[0])):
        read = _READERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if read is None or node in taken or (chain := read(node, taken)) is None:
            continue
        taken.update(chain.nodes)
        workloads = tuple(_workloads(chain, dtype, layouts))
        found.append((place, Layer(workloads, tuple(_name(each) for each in chain.nodes))))
    others: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for node in nodes:
        if node not in taken and node.op_type not in _FREE and not _feeds_only(node, taken):
            others.setdefault(node.op_type, []).append(_name(node))
            if reason := _why_not(node):
                reasons.setdefault(node.op_type, reason)
    layers = tuple(layer for _, layer in sorted(found, key=lambda each: each[0]))
    return Extraction(layers, {op: tuple(names) for op, names in others.items()}, reasons)


def _why_not(node: ir.Node) -> str:
    """Why a node is not a layer, if others of its kind are layers or if it hides some; otherwise empty."""
    if any(each.type.name in ("GRAPH", "GRAPHS") for each in node.attributes.values()):
        return "nodes inside of it are not read"
    if node.op_type not in _READERS or node.domain not in ("", "ai.onnx"):
        return ""
    x = _inputs(node, 1)[0]
    if node.op_type in _MOVEMENTS:
        return f"{x.name!r} is {_dtype(x)} {x.shape}; allowed: elements of 1, 2 or 4 bytes, 1 to 8 extents of at least 1"
    if x.shape is not None and len(x.shape) != 4:
        return f"{_name(node)} has {len(x.shape) - 2} spatial dimensions; allowed: 2"
    return f"{_name(node)} is {_dtype(x)}; allowed: {', '.join((*_FLOATS, *_INTEGERS))}"


def _feeds_only(node: ir.Node, taken: set[ir.Node]) -> bool:
    """Whether a conversion's results are read by layers only, which then read what was converted."""
    if node.op_type not in _CONVERSIONS:
        return False
    users = [user for value in node.outputs for user, _ in value.uses()]
    return bool(users) and all(user in taken or _feeds_only(user, taken) for user in users)


@dataclass
class _Chain:
    """A node and those behind it that one kernel can compute.

    Attributes:
        op, params: of the workload, without the dtype of floating point and the layout.
        nodes: in order.
        value: the last result.
        stages: the epilogue.
    """

    op: str
    params: dict[str, Any]
    nodes: list[ir.Node]
    value: ir.Value
    stages: list[str | dict[str, Any]]

    def next(self, taken: set[ir.Node]) -> ir.Node | None:
        """The only node that reads the value, if no layer has it yet."""
        uses = list(self.value.uses())
        if len(uses) != 1 or self.value.is_graph_output() or uses[0][0] in taken:
            return None
        return uses[0][0]

    def append(self, node: ir.Node, *stages: str | dict[str, Any]) -> None:
        self.nodes.append(node)
        self.stages += stages
        self.value = node.outputs[0]


def _workloads(chain: _Chain, dtype: str | None, layouts: Sequence[str]) -> Iterator[Workload]:
    params = dict(chain.params)
    if dtype and params["dtype"] in _FLOATS:
        params["dtype"] = dtype
    if dtype and params.get("out_dtype") in _FLOATS:
        params["out_dtype"] = dtype
    if chain.op in ("conv2d", "depthwise_conv2d"):
        params["epilogue"] = chain.stages
    if chain.op == "transpose":
        yield Workload(chain.op, params)
        return
    errors = []
    for layout in layouts:
        try:
            yield Workload(chain.op, {**params, "layout": layout})
        except WorkloadError as error:
            errors.append(str(error))
    if len(errors) == len(layouts):
        raise ModelError(f"node {_name(chain.nodes[0])} is not possible in {' or '.join(layouts)}: {errors[0]}")


# --- Nodes that begin a layer -------------------------------------------------------------------------------------------
_Read = Callable[["ir.Node", "set[ir.Node]"], "_Chain | None"]


def _conv(node: ir.Node, taken: set[ir.Node]) -> _Chain | None:
    x, weight = _inputs(node, 2)
    converted = [producer for value in (x, weight) if (producer := _dequantised(value))]
    if len(converted) == 2:
        return _quantised_conv(node, converted[0], converted[1], taken)
    params = _window(node, x, weight)
    if params is None or (dtype := _dtype(x)) not in _FLOATS:
        return None
    chain = _Chain("conv2d", {**params, "dtype": dtype}, [node], node.outputs[0], ["bias"] if _bias(node) else [])
    if params["groups"] == params["c"] > 1:
        chain.op = "depthwise_conv2d"
        chain.params = {key: value for key, value in chain.params.items() if key not in ("groups", "k")}
        chain.params["multiplier"] = params["k"] // params["c"]
    _float_stages(chain, taken)
    follower = chain.next(taken)
    if chain.op == "conv2d" and follower is not None and follower.op_type == "DepthToSpace":
        chain.append(follower, {"depth_to_space": _block(follower)})
    return chain


def _quantised_conv(node: ir.Node, of_x: ir.Node, of_weight: ir.Node, taken: set[ir.Node]) -> _Chain | None:
    """A convolution between DequantizeLinear and QuantizeLinear: integers in, and mostly integers out."""
    x, weight = of_x.inputs[0], of_weight.inputs[0]
    assert x is not None and weight is not None
    params = _window(node, x, weight)
    if params is None or _dtype(x) not in _INTEGERS or _dtype(weight) not in _INTEGERS:
        return None
    params |= {"dtype": _dtype(x), "weight_dtype": _dtype(weight)}
    params["zero_points"] = [name for name, each in (("x", of_x), ("weight", of_weight)) if _has_zero_point(each, 2)]
    chain = _Chain("conv2d", params, [node], node.outputs[0], ["bias"] if _bias(node) else [])
    follower = chain.next(taken)
    if follower is not None and follower.op_type == "Relu":
        chain.append(follower, "relu")
        follower = chain.next(taken)
    if follower is not None and (to := _quantised_to(follower)):
        chain.append(follower, {"requantise": {"to": to}})
        return chain
    chain.stages.append("dequantise")
    params["out_dtype"] = _dtype(chain.value)
    _float_stages(chain, taken)
    follower = chain.next(taken)
    if follower is not None and (to := _quantised_to(follower)):
        chain.append(follower, {"quantise": {"to": to}})
        del params["out_dtype"]
    return chain


def _qlinear_conv(node: ir.Node, taken: set[ir.Node]) -> _Chain | None:
    x, weight = node.inputs[0], node.inputs[3]
    params = None if x is None or weight is None else _window(node, x, weight)
    to = _dtype(node.outputs[0])
    if params is None or to not in _INTEGERS:
        return None
    assert x is not None and weight is not None
    params |= {"dtype": _dtype(x), "weight_dtype": _dtype(weight)}
    params["zero_points"] = [name for name, place in (("x", 2), ("weight", 5)) if _has_zero_point(node, place)]
    bias = ["bias"] if len(node.inputs) > 8 and node.inputs[8] is not None else []
    return _Chain("conv2d", params, [node], node.outputs[0], [*bias, {"requantise": {"to": to}}])


def _conv_integer(node: ir.Node, taken: set[ir.Node]) -> _Chain | None:
    x, weight = _inputs(node, 2)
    params = _window(node, x, weight)
    if params is None:
        return None
    params |= {"dtype": _dtype(x), "weight_dtype": _dtype(weight)}
    params["zero_points"] = [name for name, place in (("x", 2), ("weight", 3)) if _has_zero_point(node, place)]
    return _Chain("conv2d", params, [node], node.outputs[0], [])


def _blocks(op: str) -> _Read:
    def read(node: ir.Node, taken: set[ir.Node]) -> _Chain | None:
        (x,) = _inputs(node, 1)
        n, c, h, w = _extents(node, x)
        params = {"n": n, "c": c, "h": h, "w": w, "dtype": _dtype(x), **_block(node)}
        return _Chain(op, params, [node], node.outputs[0], [])

    return read


def _block(node: ir.Node) -> dict[str, Any]:
    return {"block": node.attributes.get_int("blocksize", 1), "mode": node.attributes.get_string("mode", "DCR")}


def _transpose(node: ir.Node, taken: set[ir.Node]) -> _Chain | None:
    (x,) = _inputs(node, 1)
    extents = _extents(node, x)
    permutation = list(node.attributes.get_ints("perm", tuple(reversed(range(len(extents))))))
    try:
        Workload("transpose", params := {"x": extents, "permutation": permutation, "dtype": _dtype(x)})
    except WorkloadError:  # more dimensions, or longer elements, than the operator has
        return None
    return _Chain("transpose", params, [node], node.outputs[0], [])


_MOVEMENTS: Mapping[str, _Read] = {
    "DepthToSpace": _blocks("depth_to_space"),
    "SpaceToDepth": _blocks("space_to_depth"),
    "Transpose": _transpose,
}
_READERS: Mapping[str, _Read] = {"Conv": _conv, "QLinearConv": _qlinear_conv, "ConvInteger": _conv_integer, **_MOVEMENTS}


# --- Nodes that go on with a layer --------------------------------------------------------------------------------------
def _float_stages(chain: _Chain, taken: set[ir.Node]) -> None:
    """Appends nodes in floating point as long as a stage computes them."""
    while (node := chain.next(taken)) is not None and (stage := _float_stage(chain, node)) is not None:
        known = STAGES[stage]
        if stage in chain.stages and not known.repeatable:
            return
        chain.append(node, stage)


def _float_stage(chain: _Chain, node: ir.Node) -> str | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "BatchNormalization":  # one that could not become part of the weights
        return "scale_shift"
    if node.op_type == "Clip":
        return "clip" if all(value is None or value.const_value is not None for value in node.inputs[1:]) else None
    if node.op_type == "Add":
        first, second = _inputs(node, 2)
        other = second if first is chain.value else first
        if other is chain.value:
            return None
        if other.const_value is not None:
            return "bias" if not chain.stages and _is_per_channel(other, chain.value) else None
        return "residual" if other.shape == chain.value.shape else None
    return {"Relu": "relu", "LeakyRelu": "leaky_relu"}.get(node.op_type)


def _is_per_channel(constant: ir.Value, like: ir.Value) -> bool:
    """Whether it has one element for each channel of NCHW, and is broadcast along the other axes."""
    if constant.shape is None or like.shape is None:
        return False
    shape = tuple(constant.shape)
    return (1,) * (4 - len(shape)) + shape == (1, like.shape[1], 1, 1)


# --- Facts about nodes and values ---------------------------------------------------------------------------------------
def _name(node: ir.Node) -> str:
    return node.name or f"{node.op_type} -> {node.outputs[0].name}"


def _inputs(node: ir.Node, count: int) -> list[ir.Value]:
    values = node.inputs[:count]
    if len(values) < count or any(value is None for value in values):
        raise ModelError(f"node {_name(node)} ({node.op_type}) has fewer than {count} inputs")
    return [value for value in values if value is not None]


def _extents(node: ir.Node, value: ir.Value) -> list[int]:
    if value.shape is None or not value.shape.is_static():
        got = "is unknown" if value.shape is None else f"is {value.shape}"
        raise ModelError(
            f"the shape of {value.name!r} at node {_name(node)} ({node.op_type}) {got}: a node before it hides it, "
            "such as one of a domain other than ONNX's; add this shape to the value_info of the model"
        )
    return [int(extent) for extent in value.shape]


def _dtype(value: ir.Value) -> str:
    """Its format by our names; empty if unknown."""
    return "" if value.dtype is None else _DTYPES.get(value.dtype.name, value.dtype.name.lower())


def _bias(node: ir.Node) -> bool:
    return len(node.inputs) > 2 and node.inputs[2] is not None


def _dequantised(value: ir.Value) -> ir.Node | None:
    producer = value.producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def _quantised_to(node: ir.Node) -> str:
    """The format that a QuantizeLinear rounds to; empty for other nodes and formats."""
    to = _dtype(node.outputs[0]) if node.op_type == "QuantizeLinear" else ""
    return to if to in _INTEGERS else ""


def _has_zero_point(node: ir.Node, place: int) -> bool:
    """Whether an input is a zero point that is not known to be 0."""
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None:
        return False
    return value.const_value is None or bool(value.const_value.numpy().any())


def _window(node: ir.Node, x: ir.Value, weight: ir.Value) -> dict[str, Any] | None:
    """Sizes and window of a two-dimensional convolution; None if it has another number of dimensions."""
    image, kernel = _extents(node, x), _extents(node, weight)
    if len(image) != 4:
        return None
    (n, c, h, w), (k, each, r, s) = image, kernel
    read = node.attributes
    if c != each * (groups := read.get_int("group", 1)):
        raise ModelError(
            f"node {_name(node)}: the weight takes {groups} x {each} input channels (groups x channels of each), but "
            f"{x.name!r} has {c}; correct the model"
        )
    stride, dilation = (list(read.get_ints(name, (1, 1))) for name in ("strides", "dilations"))
    padding = _padding(read.get_string("auto_pad", "NOTSET"), (h, w), (r, s), stride, dilation)
    return {
        "n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, "stride": stride, "dilation": dilation,
        "padding": list(read.get_ints("pads", (0, 0, 0, 0))) if padding is None else padding,
        "groups": groups,
    }  # fmt: skip


def _padding(
    auto_pad: str, image: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int] | None:
    """[top, left, bottom, right] by ONNX's `auto_pad`; None if the node's `pads` count."""
    if auto_pad == "NOTSET":
        return None
    if auto_pad == "VALID":
        return [0, 0, 0, 0]
    before, after = [], []
    for extent, taps, step, gap in zip(image, kernel, stride, dilation):
        total = max((-(-extent // step) - 1) * step + (taps - 1) * gap + 1 - extent, 0)
        smaller, larger = total // 2, total - total // 2
        before.append(smaller if auto_pad == "SAME_UPPER" else larger)
        after.append(larger if auto_pad == "SAME_UPPER" else smaller)
    return [*before, *after]
