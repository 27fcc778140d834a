"""Nodes behind a convolution or matrix product that a stage of its epilogue computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import (
    INTEGERS,
    constant_input,
    constant_of,
    dtype_of,
    folded,
    inputs_of,
    is_given,
    is_onnx,
    name_of,
    only_reader,
)
from schedsearch.network.graph import Constant
from schedsearch.network.quantised import Quantised, converted_from, converted_to
from schedsearch.ops import STAGES
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


LARGEST = float(np.finfo(np.float32).max)
_CLIP_BY_INPUTS = 11  # the first opset in which the bounds of a Clip are inputs


def float_stages(chain: Chain, taken: set[ir.Node], *, everywhere: bool = False) -> None:
    """Appends nodes in floating point as long as a stage computes them.

    Args:
        everywhere: only those that treat every element alike, whichever its channel and place.
    """
    while (node := chain.next(taken)) is not None and (found := _float_stage(chain, node)) is not None:
        stage, arguments, scalars = found
        if (everywhere and arguments) or (stage in chain.stages and not STAGES[stage].repeatable):
            return
        chain.append(node, stage, arguments=arguments, scalars=scalars)


_Found = tuple[str, dict[str, Operand], dict[str, float]]  # a stage, its operands and its scalars


def _float_stage(chain: Chain, node: ir.Node) -> _Found | None:
    if not is_onnx(node):
        return None
    if node.op_type == "Relu":
        return "relu", {}, {}
    if node.op_type in _ACTIVATIONS:
        return None if _is_approximate(node) else (_ACTIVATIONS[node.op_type], {}, {})
    if not_finite(node):
        return None
    if node.op_type == "LeakyRelu":
        return "leaky_relu", {}, {"leaky_relu_slope": node.attributes.get_float("alpha", 0.01)}
    if node.op_type == "Clip":
        bounds = clip_bounds(node)
        return None if bounds is None else ("clip", {}, {"clip_min": bounds[0], "clip_max": bounds[1]})
    if node.op_type == "BatchNormalization":  # one that could not become part of the weights
        operands = batch_norm_operands(node)
        return None if operands is None else ("scale_shift", dict(operands), {})
    if node.op_type == "Add":
        return _addition(chain, node)
    if node.op_type in ("Mul", "Div"):
        return _scaling(chain, node)
    return None


_ACTIVATIONS = {"Sigmoid": "sigmoid", "Swish": "silu", "HardSwish": "hard_swish", "Gelu": "gelu"}


def _is_approximate(node: ir.Node) -> bool:
    """Whether the node is another function than the stage: GELU by tanh, or Swish with a factor."""
    read = node.attributes
    return bool(read.get_string("approximate", "none") != "none" or read.get_float("alpha", 1.0) != 1.0)


def _addition(chain: Chain, node: ir.Node) -> _Found | None:
    first, second = inputs_of(node, 2)
    other = second if first is chain.value else first
    if other is chain.value:
        return None
    if (constant := constant_of(other)) is not None:
        if chain.stages or not _is_per_channel(constant, chain):
            return None
        return "bias", {"bias": Constant(str(other.name), "K", np.broadcast_to(constant.ravel(), (chain.channels,)))}, {}
    return ("residual", {"residual": other}, {}) if other.shape == chain.value.shape else None


def _scaling(chain: Chain, node: ir.Node) -> _Found | None:
    """A multiplication with a constant, or a division by one: a number, or one for each channel."""
    first, second = inputs_of(node, 2)
    other = second if first is chain.value else first
    constant = constant_of(other)
    if constant is None or not (constant.size == 1 or _is_per_channel(constant, chain)):
        return None
    if node.op_type == "Div" and (other is first or not constant.all()):
        return None
    factor = constant.ravel().astype(np.float64)
    scale = np.broadcast_to((1 / factor if node.op_type == "Div" else factor).astype(np.float32), (chain.channels,))
    name = name_of(node)
    shift = np.zeros(chain.channels, np.float32)
    operands: dict[str, Operand] = {
        "scale": Constant(f"{name}.scale", "K", scale),
        "shift": Constant(f"{name}.shift", "K", shift),
    }
    return "scale_shift", operands, {}


def batch_norm_operands(node: ir.Node) -> dict[str, Constant] | None:
    """`scale` and `shift` of a BatchNormalization for each channel; None if they are computed, or in training mode from x
    itself."""
    if node.attributes.get_int("training_mode", 0):
        return None
    parts = [constant_input(node, place) for place in range(1, 5)]
    if any(part is None for part in parts):
        return None
    gamma, beta, mean, variance = (np.asarray(part, np.float64) for part in parts)
    scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    shift = beta - mean * scale
    name = name_of(node)
    return {
        "scale": Constant(f"{name}.scale", "K", scale.astype(np.float32)),
        "shift": Constant(f"{name}.shift", "K", shift.astype(np.float32)),
    }


def not_finite(node: ir.Node) -> str:
    """The attribute of a node that is NaN or infinite; empty if there is none. Bounds of a Clip may be infinite."""
    for name, each in node.attributes.items():
        if each.type.name == "FLOAT" and not each.is_ref() and node.op_type != "Clip" and not math.isfinite(each.as_float()):
            return f"{name} = {each.as_float()}"
    return ""


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """The bounds of a Clip, `LARGEST` if there is none; None if one is computed or no number is beyond it."""
    found = clip_limits(node)
    return None if found is None else (max(found[0], -LARGEST), min(found[1], LARGEST))


def unbounded(node: ir.Node) -> float:
    """What bounds a Clip where it has no bound: before opset 11 the largest number, which infinity is beyond."""
    opset = _CLIP_BY_INPUTS if node.graph is None else node.graph.opset_imports.get("", _CLIP_BY_INPUTS)
    return LARGEST if opset < _CLIP_BY_INPUTS else math.inf


def clip_limits(node: ir.Node) -> tuple[float, float] | None:
    """The bounds of a Clip as they are, infinite if there is none; None as of `clip_bounds`."""
    found, most = [], unbounded(node)
    for place, name, default in ((1, "min", -most), (2, "max", most)):
        bound = constant_input(node, place)
        if bound is None and is_given(node, place):
            return None
        found.append(node.attributes.get_float(name, default) if bound is None else float(bound.flat[0]))
    low, high = found
    return (low, high) if low < math.inf and high > -math.inf else None


def _is_per_channel(constant: Array, chain: Chain) -> bool:
    """Whether a constant has one element for each channel, and is broadcast along the other axes."""
    rank = 0 if chain.value.shape is None else len(chain.value.shape)
    along = [chain.channels if axis == chain.channel_axis else 1 for axis in range(rank)]
    return [*(1,) * (rank - constant.ndim), *constant.shape] == along


# --- Integers ------------------------------------------------------------------------------------------------------
def append_bias(chain: Chain, node: ir.Node, place: int, scale: Array | None = None) -> str:
    """Appends the stage for a bias that is an input of the node, and returns why this is not possible.

    Args:
        scale: what an integer of the sums stands for, if the sums are integers and the bias is not.
    """
    if not is_given(node, place):
        return ""
    value = node.inputs[place]
    bias = folded(value)
    if value is None or bias is None:
        return f"{name_of(node)} has a bias that is computed; allowed: a constant"
    if bias.size not in (1, chain.channels) or (bias.size > 1 and bias.shape[-1] != bias.size):
        return f"{name_of(node)} has a bias of shape {list(bias.shape)}; allowed: one for each of {chain.channels} channels"
    name = str(value.name)
    if scale is not None:
        name, bias = f"{name_of(node)}.bias", _whole_bias(value, bias, scale)
    chain.stages.append("bias")
    chain.arguments["bias"] = Constant(name, "K", np.broadcast_to(bias.ravel(), (chain.channels,)))
    return ""


def _whole_bias(value: ir.Value, bias: Array, scale: Array) -> Array:
    """The bias in integers of `scale`; those that it is dequantised from, if they stand for as much."""
    whole = converted_from(value)
    if whole is not None and whole.dtype == "int32" and whole.zero_point == 0 and whole.scale is not None:
        numbers = constant_of(whole.value)
        if numbers is not None and (whole.scale == scale).all():
            return numbers
    found: Array = np.rint(bias / scale.astype("float64")).astype("int32")
    return found


def append_requantise(chain: Chain, scale: Array, y: Quantised, taken: set[ir.Node]) -> None:
    """Appends the stage that makes 8-bit numbers y, the chain's value, of sums of which an integer stands for `scale`;
    and if they are only read to be added to other 8-bit numbers, the nodes up to the QuantizeLinear of the result."""
    assert y.scale is not None and y.zero_point is not None
    chain.arguments["requantise_scale"] = _scales(chain, "requantise_scale", scale / y.scale)
    added = _Addition.behind(chain, y, taken)
    if added is None:
        chain.stages.append({"requantise": {"to": y.dtype}})
        chain.scalars["y_zero_point"] = y.zero_point
        return
    dtypes = {"to": added.total.dtype, "middle": y.dtype, "residual": added.residual.dtype, "relu": added.relu}
    chain.stages.append({"requantise_add": dtypes})
    chain.arguments["residual"] = added.residual.value
    for name, numbers in (("middle", added.middle), ("residual", added.residual), ("y", added.total)):
        assert numbers.scale is not None and numbers.zero_point is not None
        chain.scalars |= {f"{name}_scale": float(numbers.scale[0]), f"{name}_zero_point": numbers.zero_point}
    for node in added.nodes:
        chain.append(node)


@dataclass(frozen=True)
class _Addition:
    """DequantizeLinear, Add of other dequantised numbers, perhaps Relu, and QuantizeLinear.

    Attributes:
        nodes: in order, without the DequantizeLinear of the residual.
        middle, residual, total: the 8-bit numbers that are added, and those of the result.
    """

    nodes: tuple[ir.Node, ...]
    middle: Quantised
    residual: Quantised
    total: Quantised
    relu: bool

    @classmethod
    def behind(cls, chain: Chain, y: Quantised, taken: set[ir.Node]) -> _Addition | None:
        """The addition that alone reads the chain's value, which is 8-bit numbers y; None if something else does."""
        nodes = [chain.next(taken)]
        while nodes[-1] is not None and nodes[-1].op_type != "QuantizeLinear" and len(nodes) < _MOST_OF_ADDITION:
            follower = only_reader(nodes[-1].outputs[0])
            nodes.append(None if follower in taken else follower)
        known = [node for node in nodes if node is not None and is_onnx(node)]
        types = [node.op_type for node in known]
        if types not in (_ADDED, [*_ADDED[:2], "Relu", _ADDED[2]]):
            return None
        first, second = inputs_of(known[1], 2)
        other = second if first is known[0].outputs[0] else first
        middle, residual, total = converted_from(known[0].outputs[0]), converted_from(other), converted_to(known[-1])
        if other is known[0].outputs[0] or middle is None or residual is None or total is None:
            return None
        if any(each.scale is None or each.scale.size > 1 or each.zero_point is None for each in (middle, residual, total)):
            return None
        if (
            residual.dtype not in INTEGERS
            or residual.value.shape != chain.value.shape
            or constant_of(residual.value) is not None
        ):
            return None
        if middle.zero_point != y.zero_point:  # the stage has one for both
            return None
        return cls(tuple(known), middle, residual, total, "Relu" in types)


_ADDED = ["DequantizeLinear", "Add", "QuantizeLinear"]
_MOST_OF_ADDITION = len(_ADDED) + 1


def integer_stages(chain: Chain, scale: Array, taken: set[ir.Node]) -> None:
    """Appends nodes behind sums of which an integer stands for `scale`, up to the QuantizeLinear if there is one."""
    follower = chain.next(taken)
    if follower is not None and follower.op_type == "Relu":
        chain.append(follower, "relu")
        follower = chain.next(taken)
    if follower is not None and (y := converted_to(follower)):
        chain.append(follower)
        append_requantise(chain, scale, y, taken)
        return
    chain.stages.append("dequantise")
    chain.arguments["dequantise_scale"] = _scales(chain, "dequantise_scale", scale)
    if chain.op != "depthwise_conv2d":  # whose dtype follows from its stages
        chain.params["out_dtype"] = dtype_of(chain.value)
    float_stages(chain, taken)
    follower = chain.next(taken)
    if follower is not None and (y := converted_to(follower)) and y.scale is not None and y.zero_point is not None:
        stage = {"quantise": {"to": y.dtype}}
        arguments: dict[str, Operand] = {"quantise_scale": _scales(chain, "quantise_scale", y.scale)}
        chain.append(follower, stage, arguments=arguments, scalars={"y_zero_point": y.zero_point})
        chain.params.pop("out_dtype", None)


def _scales(chain: Chain, name: str, scale: Array) -> Constant:
    return Constant(f"{name_of(chain.nodes[0])}.{name}", "K", np.broadcast_to(scale, (chain.channels,)))
