"""Nodes behind a convolution or matrix product that a stage of its epilogue computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import Array, constant_input, constant_of, inputs_of, is_given, is_onnx, name_of
from schedsearch.network.graph import Constant
from schedsearch.ops import STAGES

if TYPE_CHECKING:
    import onnx_ir as ir

_LARGEST = float(np.finfo(np.float32).max)


def float_stages(chain: Chain, channels: int, taken: set[ir.Node]) -> None:
    """Appends nodes in floating point as long as a stage computes them."""
    while (node := chain.next(taken)) is not None and (found := _float_stage(chain, node, channels)) is not None:
        stage, arguments, scalars = found
        if stage in chain.stages and not STAGES[stage].repeatable:
            return
        chain.append(node, stage, arguments=arguments, scalars=scalars)


_Found = tuple[str, dict[str, Operand], dict[str, float]]  # a stage, its operands and its scalars


def _float_stage(chain: Chain, node: ir.Node, channels: int) -> _Found | None:
    if not is_onnx(node):
        return None
    if node.op_type == "Relu":
        return "relu", {}, {}
    if node.op_type == "LeakyRelu":
        return "leaky_relu", {}, {"leaky_relu_slope": node.attributes.get_float("alpha", 0.01)}
    if node.op_type == "Clip":
        bounds = clip_bounds(node)
        return None if bounds is None else ("clip", {}, {"clip_min": bounds[0], "clip_max": bounds[1]})
    if node.op_type == "BatchNormalization":  # one that could not become part of the weights
        return _batch_norm(node)
    if node.op_type == "Add":
        return _addition(chain, node, channels)
    return None


def _addition(chain: Chain, node: ir.Node, channels: int) -> _Found | None:
    first, second = inputs_of(node, 2)
    other = second if first is chain.value else first
    if other is chain.value:
        return None
    if (constant := constant_of(other)) is not None:
        if chain.stages or not _is_per_channel(constant, chain.value, channels):
            return None
        return "bias", {"bias": Constant(str(other.name), "K", np.broadcast_to(constant.ravel(), (channels,)))}, {}
    return ("residual", {"residual": other}, {}) if other.shape == chain.value.shape else None


def _batch_norm(node: ir.Node) -> _Found | None:
    parts = [constant_input(node, place) for place in range(1, 5)]
    if any(part is None for part in parts):
        return None
    gamma, beta, mean, variance = (np.asarray(part, np.float64) for part in parts)
    scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    shift = beta - mean * scale
    name = name_of(node)
    operands: dict[str, Operand] = {
        "scale": Constant(f"{name}.scale", "K", scale.astype(np.float32)),
        "shift": Constant(f"{name}.shift", "K", shift.astype(np.float32)),
    }
    return "scale_shift", operands, {}


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """The bounds of a Clip; None if one is computed."""
    found = []
    for place, name, default in ((1, "min", -_LARGEST), (2, "max", _LARGEST)):
        bound = constant_input(node, place)
        if bound is None and is_given(node, place):
            return None
        found.append(node.attributes.get_float(name, default) if bound is None else float(bound.flat[0]))
    return found[0], found[1]


def _is_per_channel(constant: Array, value: ir.Value, channels: int) -> bool:
    """Whether a constant has one element for each channel, and is broadcast along the other axes."""
    rank = 0 if value.shape is None else len(value.shape)
    along = [channels if axis == (1 if rank == 4 else rank - 1) else 1 for axis in range(rank)]
    return [*(1,) * (rank - constant.ndim), *constant.shape] == along
