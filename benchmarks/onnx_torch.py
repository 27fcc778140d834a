"""An ONNX model as a torch module with the same weights, for comparisons. It has the operators of `onnx_models.py`.

    module = as_module(onnx_models.build("resnet50"))
    y = module(x)

The module is a torch.fx graph of torch.nn.functional calls, so that torch.compile sees what a
module written by hand would call.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import fx
from torch.nn import functional


def as_module(model: onnx.ModelProto) -> fx.GraphModule:
    """The module that computes the model's only output.

    Raises:
        ValueError: an operator that is not here.
    """
    builder = _Builder(model)
    for node in model.graph.node:
        convert = getattr(builder, f"on_{node.op_type.lower()}", None)
        if convert is None:
            raise ValueError(f"no torch function for {node.op_type}")
        builder.values[node.output[0]] = convert(
            node, {each.name: helper.get_attribute_value(each) for each in node.attribute}
        )
    builder.graph.output(builder.values[model.graph.output[0].name])
    return fx.GraphModule(builder.root, builder.graph)


def quantise(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Integers, held as floats."""
    return (torch.round(x / scale) + zero).clamp(low, high)


def dequantise(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (x - zero) * scale


def shuffle(x: torch.Tensor, block: int) -> torch.Tensor:
    return functional.pixel_shuffle(x, block)


class _Builder:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.root, self.graph = torch.nn.Module(), fx.Graph()
        self.arrays = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        self.values: dict[str, Any] = {"x": self.graph.placeholder("x")}

    def call(self, function: Any, *args: Any, **named: Any) -> fx.Node:
        return self.graph.call_function(function, args, named)

    def value(self, name: str) -> fx.Node:
        """An array that a node made, or a weight."""
        if name not in self.values:
            key = f"weight_{len(self.values)}"
            array = np.array(self.arrays[name], dtype=np.float32)
            self.root.register_buffer(key, torch.from_numpy(array))
            self.values[name] = self.graph.get_attr(key)
        return self.values[name]

    def on_conv(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        pads = attributes["pads"]
        given = [self.value(name) for name in node.input]
        return self.call(functional.conv2d, *given, attributes["strides"], pads[:2], [1, 1], attributes["group"])

    def on_relu(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(functional.relu, self.value(node.input[0]))

    def on_leakyrelu(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(functional.leaky_relu, self.value(node.input[0]), attributes["alpha"])

    def on_clip(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        low, high = (float(self.arrays[name]) for name in node.input[1:])
        return self.call(torch.clamp, self.value(node.input[0]), low, high)

    def on_add(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(operator.add, self.value(node.input[0]), self.value(node.input[1]))

    def on_mul(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(operator.mul, self.value(node.input[0]), self.value(node.input[1]))

    def on_sigmoid(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(torch.sigmoid, self.value(node.input[0]))

    def on_hardswish(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(functional.hardswish, self.value(node.input[0]))

    def on_hardsigmoid(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        """With an alpha of 1 / 6, which is that of PyTorch."""
        return self.call(functional.hardsigmoid, self.value(node.input[0]))

    def on_concat(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(torch.cat, [self.value(name) for name in node.input], attributes["axis"])

    def on_maxpool(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self._pool(functional.max_pool2d, node, attributes)

    def on_averagepool(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self._pool(functional.avg_pool2d, node, attributes)

    def _pool(self, function: Any, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(
            function, self.value(node.input[0]), attributes["kernel_shape"], attributes["strides"], attributes["pads"][:2]
        )

    def on_globalaveragepool(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(functional.adaptive_avg_pool2d, self.value(node.input[0]), 1)

    def on_flatten(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(torch.flatten, self.value(node.input[0]), 1)

    def on_gemm(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(functional.linear, *(self.value(name) for name in node.input))

    def on_depthtospace(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        return self.call(shuffle, self.value(node.input[0]), attributes["blocksize"])

    def on_quantizelinear(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        limits = np.iinfo(self.arrays[node.input[2]].dtype)
        return self.call(quantise, *(self.value(name) for name in node.input), int(limits.min), int(limits.max))

    def on_dequantizelinear(self, node: Any, attributes: dict[str, Any]) -> fx.Node:
        x, scale, zero = node.input
        if np.ndim(self.arrays[scale]):  # of filters, one for each
            for name in (scale, zero):
                self.arrays[name] = self.arrays[name].reshape(-1, 1, 1, 1)
        return self.call(dequantise, self.value(x), self.value(scale), self.value(zero))
