"""Quantised networks with random weights as ONNX graphs, with pairs of conversions or as QLinear nodes, and what they
compute in integers.

The formulas are those of docs/workload-file.md and docs/networks.md, in NumPy's int64, and in float32 where they say so: an
8-bit number is round(float32(sum) * scale) + zero point, saturated, and a sum of two quantised arrays is a sum in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
CONTRIBUTED = "com.microsoft"


@dataclass
class Codes:
    """A value of the network: 8-bit numbers (code - zero) * scale.

    Attributes:
        linear: names of its scale and zero point in the graph.
        codes: int64, what the network computes for `QuantisedNet.x`.
    """

    name: str
    scale: np.float32
    zero: int
    linear: list[str]
    codes: Array

    @property
    def whole(self) -> Array:
        return self.codes - self.zero

    @property
    def numbers(self) -> Array:
        return self.whole.astype(F32) * self.scale


class QuantisedNet:
    """Builds a graph node by node and computes every value at once; activations are uint8, weights int8 for each channel.

    Args:
        form: "QDQ": operators in floating point between DequantizeLinear and QuantizeLinear; "QLinear": QLinearConv and the
            quantised operators of ONNX Runtime.
    """

    def __init__(self, form: str, *shape: int, seed: int = 0) -> None:
        self.form, self.shape = form, shape
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.values: dict[str, Array] = {}
        self.x = self.random.integers(0, 256, shape).astype(np.uint8)
        self.input = self._value("x", F32(0.0173), 121, self.x.astype(np.int64))

    # --- layers ---
    def conv(self, x: Codes, k: int, size: int = 3, *, stride: int = 1, groups: int = 1, relu: bool = True) -> Codes:
        name, c = f"conv{len(self.nodes)}", x.codes.shape[1]
        weight = self.random.integers(-127, 128, (k, c // groups, size, size)).astype(np.int8)
        scales = self.random.uniform(0.5, 1.5, k).astype(F32) / F32(127)
        unit = x.scale * scales
        pad = size // 2
        sums = _convolved(x.whole, weight.astype(np.int64), stride, pad, groups)
        bias = self.random.integers(-500, 500, k).astype(np.int32) * (c // groups * size)
        sums = sums + bias[:, None, None]
        window = {"pads": [pad] * 4, "strides": [stride] * 2, "group": groups}
        names = self._weight(name, weight, scales)
        made = (np.maximum(sums, 0) if relu else sums).astype(F32) * unit[:, None, None]
        scale, zero = self._linear(made, relu)
        codes = _saturated(sums.astype(F32) * (unit / scale)[:, None, None], zero)
        y = self._value(f"{name}.y", scale, zero, codes)
        if self.form == "QLinear":
            inputs = [x.name, *x.linear, *names, *y.linear, self._constant(f"{name}.bias", bias)]
            self._node("QLinearConv", inputs, y.name, name, **window)
            return y
        filters = self._node("DequantizeLinear", names, f"{name}.filters", axis=0)
        whole = [self._constant(f"{name}.bias", bias), self._constant(f"{name}.unit", unit)]
        added = self._node("DequantizeLinear", whole, f"{name}.added", axis=0)
        value = self._node("Conv", [self._dequantised(x), filters, added], f"{name}.sum", name, **window)
        return self._quantised(self._node("Relu", [value], f"{name}.relu") if relu else value, y)

    def add(self, a: Codes, b: Codes, *, relu: bool = True) -> Codes:
        name, total = f"add{len(self.nodes)}", a.numbers + b.numbers
        total = np.maximum(total, F32(0)) if relu else total
        scale, zero = self._linear(total, relu)
        y = self._value(f"{name}.y", scale, zero, _saturated(total / scale, zero))
        if self.form == "QLinear":
            inputs = [a.name, *a.linear, b.name, *b.linear, *y.linear]
            self._node("QLinearAdd", inputs, y.name, name, domain=CONTRIBUTED)
            return y
        value = self._node("Add", [self._dequantised(a), self._dequantised(b)], f"{name}.sum", name)
        return self._quantised(self._node("Relu", [value], f"{name}.relu") if relu else value, y)

    def concat(self, parts: list[Codes]) -> Codes:
        name, numbers = f"concat{len(self.nodes)}", np.concatenate([part.numbers for part in parts], axis=1)
        scale, zero = self._linear(numbers, False)
        y = self._value(f"{name}.y", scale, zero, _saturated(numbers / scale, zero))
        if self.form == "QLinear":
            inputs = [*y.linear, *(each for part in parts for each in (part.name, *part.linear))]
            self._node("QLinearConcat", inputs, y.name, name, domain=CONTRIBUTED, axis=1)
            return y
        return self._quantised(
            self._node("Concat", [self._dequantised(part) for part in parts], f"{name}.all", name, axis=1), y
        )

    def max_pool(self, x: Codes, size: int = 2, *, stride: int = 2, pad: int = 0) -> Codes:
        name = f"pool{len(self.nodes)}"
        padded = np.pad(x.codes, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=0)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
        y = Codes(f"{name}.y", x.scale, x.zero, x.linear, windows.max(axis=(4, 5)))
        self.values[y.name] = y.codes
        window = {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        if self.form == "QLinear":
            self._node("MaxPool", [x.name], y.name, name, **window)
            return y
        return self._quantised(self._node("MaxPool", [self._dequantised(x)], f"{name}.max", name, **window), y)

    def global_pool(self, x: Codes) -> Codes:
        """The mean, by a scale that contains 1 / pixels: the sum is exact."""
        name, pixels = f"mean{len(self.nodes)}", x.codes.shape[2] * x.codes.shape[3]
        sums = x.whole.sum(axis=(2, 3), keepdims=True)
        unit = x.scale * F32(1 / pixels)
        scale, zero = self._linear(sums.astype(F32) * unit, False)
        y = self._value(f"{name}.y", scale, zero, _saturated(sums.astype(F32) * (unit / scale), zero))
        if self.form == "QLinear":
            inputs = [x.name, *x.linear, *y.linear]
            self._node("QLinearGlobalAveragePool", inputs, y.name, name, domain=CONTRIBUTED, channels_last=0)
            return y
        return self._quantised(self._node("GlobalAveragePool", [self._dequantised(x)], f"{name}.mean", name), y)

    def dense(self, x: Codes, k: int) -> Codes:
        """A matrix product with the flattened image, with one scale of the weight."""
        name, rows = f"dense{len(self.nodes)}", x.whole.reshape(x.whole.shape[0], -1)
        weight, by = self.random.integers(-127, 128, (rows.shape[1], k)).astype(np.int8), F32(0.0077)
        sums, unit = rows @ weight.astype(np.int64), x.scale * by
        scale, zero = self._linear(sums.astype(F32) * unit, False)
        y = self._value(f"{name}.y", scale, zero, _saturated(sums.astype(F32) * (unit / scale), zero))
        names = self._weight(name, weight, np.asarray(by))
        if self.form == "QLinear":
            flat = self._node("Flatten", [x.name], f"{name}.flat")
            self._node("QLinearMatMul", [flat, *x.linear, *names, *y.linear], y.name, name)
            return y
        flat = self._node("Flatten", [self._dequantised(x)], f"{name}.flat")
        filters = self._node("DequantizeLinear", names, f"{name}.filters")
        return self._quantised(self._node("Gemm", [flat, filters], f"{name}.sum", name), y)

    # --- the model ---
    def save(self, path: Path, result: Codes) -> Path:
        info = helper.make_tensor_value_info
        outputs = [info(result.name, TensorProto.UINT8, result.codes.shape)]
        graph = helper.make_graph(self.nodes, "net", [info("x", TensorProto.UINT8, self.shape)], outputs, self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIBUTED, 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        return path

    def _linear(self, numbers: Array, positive: bool) -> tuple[np.float32, int]:
        """A scale and a zero point for which a few numbers saturate."""
        spread = F32(2.5) * numbers.std().astype(F32)
        return (spread / F32(255), 0) if positive else (spread * F32(2) / F32(255), 119)

    def _value(self, name: str, scale: np.float32, zero: int, codes: Array) -> Codes:
        linear = [
            self._constant(f"{name}.scale", np.asarray(scale)),
            self._constant(f"{name}.zero", np.asarray(zero, np.uint8)),
        ]
        self.values[name] = codes
        return Codes(name, scale, zero, linear, codes)

    def _weight(self, name: str, weight: Array, scales: Array) -> list[str]:
        arrays = {"weight": weight, "scales": scales, "zeros": np.zeros(scales.shape, np.int8)}
        return [self._constant(f"{name}.{key}", array) for key, array in arrays.items()]

    def _constant(self, name: str, array: Array) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name

    def _dequantised(self, x: Codes) -> str:
        return self._node("DequantizeLinear", [x.name, *x.linear], f"{x.name}.number{len(self.nodes)}")

    def _quantised(self, value: str, y: Codes) -> Codes:
        self._node("QuantizeLinear", [value, *y.linear], y.name)
        return y

    def _node(self, op: str, inputs: list[str], output: str, name: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=name or output, **attributes))
        return output


def _saturated(numbers: Array, zero: int) -> Array:
    return np.clip(np.rint(numbers).astype(np.int64) + zero, 0, 255)


def _convolved(x: Array, weight: Array, stride: int, pad: int, groups: int) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    k, inputs, r, s = weight.shape
    windows = np.lib.stride_tricks.sliding_window_view(padded, (r, s), axis=(2, 3))[:, :, ::stride, ::stride]
    n, _, h, w = windows.shape[:4]
    windows = windows.reshape(n, groups, inputs, h, w, r, s).transpose(1, 0, 3, 4, 2, 5, 6).reshape(groups, n * h * w, -1)
    filters = weight.reshape(groups, k // groups, -1).transpose(0, 2, 1)
    products = windows.astype(np.float64) @ filters.astype(np.float64)  # exact: below 2^53
    return products.reshape(groups, n, h, w, k // groups).transpose(1, 0, 4, 2, 3).reshape(n, k, h, w).astype(np.int64)


# --- networks -----------------------------------------------------------------------------------------------------------
def vgg(net: QuantisedNet) -> Codes:
    """The 13 convolutions of VGG-16 with a 16th of the channels, and one dense layer."""
    x = net.input
    for width, count in ((4, 2), (8, 2), (16, 3), (32, 3), (32, 3)):
        for _ in range(count):
            x = net.conv(x, width)
        x = net.max_pool(x)
    return net.dense(x, 10)


def resnet(net: QuantisedNet, blocks: tuple[int, ...], *, bottleneck: bool, width: int = 8) -> Codes:
    """ResNet-18 or -50 (He et al., 2015)."""
    x = net.max_pool(net.conv(net.input, width, 7, stride=2), 3, stride=2, pad=1)
    for stage, count in enumerate(blocks):
        inner = width << stage
        outer = inner * (4 if bottleneck else 1)
        for block in range(count):
            stride = 2 if stage and not block else 1
            if bottleneck:
                y = net.conv(net.conv(net.conv(x, inner, 1), inner, 3, stride=stride), outer, 1, relu=False)
            else:
                y = net.conv(net.conv(x, inner, 3, stride=stride), outer, 3, relu=False)
            if stride > 1 or x.codes.shape[1] != outer:
                x = net.conv(x, outer, 1, stride=stride, relu=False)
            x = net.add(y, x)
    return net.dense(net.global_pool(x), 10)


def inception(net: QuantisedNet) -> Codes:
    """Two blocks of four branches, which are concatenated with a scale of their own, and a block that halves the image."""
    x = net.conv(net.conv(net.input, 8, 3, stride=2), 16)
    for _ in range(2):
        branches = [net.conv(x, 16, 1), net.conv(net.conv(x, 8, 1), 16, 5), net.conv(net.conv(net.conv(x, 8, 1), 16), 16)]
        x = net.concat([*branches, net.conv(net.max_pool(x, 3, stride=1, pad=1), 16, 1)])
    x = net.concat([net.conv(x, 16, 3, stride=2), net.max_pool(x, 3, stride=2, pad=1)])
    return net.dense(net.global_pool(x), 10)


def mobilenet(net: QuantisedNet) -> Codes:
    """Inverted residuals (Sandler et al., "MobileNetV2", 2018): depthwise convolutions between 1x1 ones."""
    x = net.conv(net.input, 8, 3, stride=2)
    for expansion, width, count, stride in ((1, 8, 1, 1), (6, 16, 2, 2), (6, 24, 2, 2), (6, 32, 2, 1)):
        for block in range(count):
            inner = x.codes.shape[1] * expansion
            y = net.conv(x, inner, 1) if expansion > 1 else x
            y = net.conv(y, inner, 3, stride=stride if not block else 1, groups=inner)
            y = net.conv(y, width, 1, relu=False)
            same = y.codes.shape == x.codes.shape
            x = net.add(x, y, relu=False) if same else y
    return net.dense(net.global_pool(net.conv(x, 64, 1)), 10)
