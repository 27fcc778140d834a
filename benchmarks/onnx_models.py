"""Well-known networks as ONNX files with random weights.

    python benchmarks/onnx_models.py resnet50 --batch 1 --out resnet50.onnx
    python benchmarks/onnx_models.py inception_v3 --batch 32 --int8 --out inception_v3_int8.onnx
    python benchmarks/onnx_models.py --all --folder models

The layers are those of torchvision's resnet50, vgg16 (`features`), inception_v3 (without the auxiliary head), mobilenet_v2,
efficientnet_b0 and regnet_y_400mf after their batch norms became part of the weights, and of mobilenet_v3_large, with one
dense layer at its end. resnet18_depthwise is resnet18 with a depthwise convolution
and a 1x1 one in place of each 3x3, and super_resolution is the network of super_resolution.py. Weights are normal, with a
variance that keeps activations near 1. With --int8 every array between layers is quantised by QuantizeLinear and
DequantizeLinear (uint8 after a relu, else int8; weights int8 with a scale for each filter), as tools for static quantisation
write it.

Needs onnx and NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
LARGEST = 4.0  # of activations, for scales


class Model:
    """A model that is built layer by layer. Names of arrays are their node's.

    Args:
        shape: of the input `x`.
        width: factor of the numbers of channels, to make small models for tests.
        int8: quantised.
    """

    def __init__(self, shape: Sequence[int], *, width: float = 1.0, int8: bool = False, seed: int = 0) -> None:
        self.shape, self.width, self.int8 = tuple(shape), width, int8
        self.channels = {"x": shape[1]}
        self._random = np.random.default_rng(seed)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._quantised: dict[str, str] = {}
        self._relus: set[str] = set()

    def scaled(self, channels: int) -> int:
        """A number of channels times the width, a multiple of 8."""
        return max(8, int(channels * self.width) // 8 * 8)

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] | None = None,
        depthwise: bool = False,
        group_width: int = 0,
        act: str = "relu",
        exact: bool = False,
    ) -> str:
        """A convolution with a bias, and `act`, as of `activation`. Padding is half the kernel by default.

        Args:
            group_width: channels of a group; 0: there are no groups.
            exact: `channels` are not scaled by the width.
        """
        r, s = (kernel, kernel) if isinstance(kernel, int) else kernel
        top, left = (r // 2, s // 2) if padding is None else (padding, padding) if isinstance(padding, int) else padding
        c = self.channels[x]
        k = c if depthwise else channels if exact else self.scaled(channels)
        groups = c if depthwise else c // group_width if group_width else 1
        name = f"conv{sum(node.op_type == 'Conv' for node in self._nodes)}"
        weights = self._random.standard_normal((k, c // groups, r, s), np.float32) * np.sqrt(2 / (c // groups * r * s))
        bias = self._random.standard_normal(k, np.float32) * 0.1
        filters = self._filters(f"{name}.weight", weights.astype(np.float32))
        given = [self._boundary(x), filters, self._constant(f"{name}.bias", bias)]
        window = {"pads": [top, left, top, left], "strides": [stride, stride], "kernel_shape": [r, s]}
        y = self._node("Conv", given, k, name=name, **window, group=groups)
        return self.activation(y, act)

    def activation(self, x: str, act: str) -> str:
        """relu, relu6, silu, hard_swish, sigmoid, hard_sigmoid, or nothing."""
        if act == "silu":
            return self._node("Mul", [x, self._node("Sigmoid", [x], self.channels[x])], self.channels[x])
        if act == "hard_sigmoid":
            return self._node("HardSigmoid", [x], self.channels[x], alpha=1 / 6)
        if act in ("hard_swish", "sigmoid"):
            return self._node({"hard_swish": "HardSwish", "sigmoid": "Sigmoid"}[act], [x], self.channels[x])
        if act == "relu":
            y = self._node("Relu", [x], self.channels[x])
        elif act == "relu6":
            bounds = [
                self._constant(f"clip{len(self._nodes)}.{name}", np.float32(value))
                for name, value in (("low", 0), ("high", 6))
            ]
            y = self._node("Clip", [x, *bounds], self.channels[x])
        else:
            return x
        self._relus.add(y)
        return y

    def squeeze_excite(self, x: str, squeezed: int, act: str, gate: str) -> str:
        """x times gates, which follow from the means of its channels."""
        means = self._node("GlobalAveragePool", [x], self.channels[x])
        gates = self.conv(self.conv(means, squeezed, 1, act=act, exact=True), self.channels[x], 1, act=gate, exact=True)
        return self._node("Mul", [x, gates], self.channels[x])

    def leaky_relu(self, x: str, slope: float) -> str:
        return self._node("LeakyRelu", [x], self.channels[x], alpha=slope)

    def add(self, a: str, b: str, act: str = "") -> str:
        given = [self._boundary(a), self._boundary(b)]
        return self.activation(self._node("Add", given, self.channels[a]), act)

    def concat(self, *parts: str) -> str:
        return self._keeping_relu(
            self._node(
                "Concat", [self._boundary(part) for part in parts], sum(self.channels[each] for each in parts), axis=1
            ),
            parts,
        )

    def pool(self, x: str, kind: str, kernel: int, *, stride: int = 1, padding: int = 0) -> str:
        """MaxPool or AveragePool. The latter counts the padding, as torchvision's does."""
        extra = {"count_include_pad": 1} if kind == "AveragePool" else {}
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
        return self._keeping_relu(self._node(kind, [self._boundary(x)], self.channels[x], **window, **extra), [x])

    def depth_to_space(self, x: str, block: int) -> str:
        return self._node("DepthToSpace", [x], self.channels[x] // block**2, blocksize=block, mode="CRD")

    def classifier(self, x: str, classes: int = 1000) -> str:
        """The mean over each image, and a dense layer."""
        c = self.channels[x]
        flat = self._node("Flatten", [self._node("GlobalAveragePool", [self._boundary(x)], c)], c)
        weight = self._random.standard_normal((classes, c), np.float32) / np.sqrt(c)
        given = [flat, self._constant("classifier.weight", weight.astype(np.float32))]
        given.append(self._constant("classifier.bias", self._random.standard_normal(classes, np.float32)))
        return self._node("Gemm", given, classes, transB=1)

    def finished(self, result: str) -> onnx.ModelProto:
        """The model whose output is this array."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)
        y = helper.make_empty_tensor_value_info(result)
        graph = helper.make_graph(self._nodes, "network", [x], [y], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    # --- parts ---
    def _node(self, op: str, given: Sequence[str], channels: int, *, name: str = "", **attributes: Any) -> str:
        name = name or f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, list(given), [name], name=name, **attributes))
        self.channels[name] = channels
        return name

    def _constant(self, name: str, array: Any) -> str:
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def _keeping_relu(self, y: str, given: Sequence[str]) -> str:
        if all(each in self._relus for each in given):
            self._relus.add(y)
        return y

    def _boundary(self, x: str) -> str:
        """An array between layers: itself, or what it becomes by quantisation."""
        if not self.int8:
            return x
        if x not in self._quantised:
            signed = x not in self._relus
            scale = self._constant(f"{x}.scale", np.float32(LARGEST / (127 if signed else 255)))
            zero = self._constant(f"{x}.zero", np.int8(0) if signed else np.uint8(0))
            whole = self._node("QuantizeLinear", [x, scale, zero], self.channels[x], name=f"{x}.quantised")
            self._quantised[x] = self._node("DequantizeLinear", [whole, scale, zero], self.channels[x], name=f"{x}.back")
        return self._quantised[x]

    def _filters(self, name: str, weights: Any) -> str:
        if not self.int8:
            return self._constant(name, weights)
        scale = np.abs(weights).max(axis=(1, 2, 3)) / 127
        whole = np.rint(weights / scale[:, None, None, None]).astype(np.int8)
        given = [self._constant(name, whole), self._constant(f"{name}.scale", scale.astype(np.float32))]
        given.append(self._constant(f"{name}.zero", np.zeros(len(scale), np.int8)))
        return self._node("DequantizeLinear", given, len(scale), name=f"{name}.back", axis=0)


def resnet50(m: Model) -> str:
    x = m.pool(m.conv("x", 64, 7, stride=2), "MaxPool", 3, stride=2, padding=1)
    for stage, (channels, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = m.conv(m.conv(x, channels, 1), channels, 3, stride=stride)
            y = m.conv(y, 4 * channels, 1, act="")
            shortcut = x if block else m.conv(x, 4 * channels, 1, stride=stride, act="")
            x = m.add(y, shortcut, "relu")
    return m.classifier(x)


def resnet18_depthwise(m: Model) -> str:
    x = m.pool(m.conv("x", 64, 7, stride=2), "MaxPool", 3, stride=2, padding=1)
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = m.conv(m.conv(x, channels, 3, depthwise=True, stride=stride), channels, 1)
            y = m.conv(m.conv(y, channels, 3, depthwise=True), channels, 1, act="")
            shortcut = m.conv(x, channels, 1, stride=stride, act="") if stride == 2 else x
            x = m.add(y, shortcut, "relu")
    return m.classifier(x)


def vgg16(m: Model) -> str:
    x = "x"
    for channels, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            x = m.conv(x, channels, 3)
        x = m.pool(x, "MaxPool", 2, stride=2)
    return x


def mobilenet_v2(m: Model) -> str:
    x = m.conv("x", 32, 3, stride=2, act="relu6")
    for factor, channels, blocks, first_stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for block in range(blocks):
            stride = first_stride if not block else 1
            wide = factor * m.channels[x]
            y = m.conv(x, wide, 1, act="relu6", exact=True) if factor > 1 else x
            y = m.conv(y, wide, 3, depthwise=True, stride=stride, act="relu6")
            y = m.conv(y, channels, 1, act="")
            x = m.add(x, y) if stride == 1 and m.channels[x] == m.channels[y] else y
    return m.classifier(m.conv(x, 1280, 1, act="relu6"))


def mobilenet_v3_large(m: Model) -> str:
    x = m.conv("x", 16, 3, stride=2, act="hard_swish")
    for kernel, wide, channels, squeezes, act, stride in (
        (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1),
        (5, 72, 40, True, "relu", 2), (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1),
        (3, 240, 80, False, "hard_swish", 2), (3, 200, 80, False, "hard_swish", 1), (3, 184, 80, False, "hard_swish", 1),
        (3, 184, 80, False, "hard_swish", 1), (3, 480, 112, True, "hard_swish", 1), (3, 672, 112, True, "hard_swish", 1),
        (5, 672, 160, True, "hard_swish", 2), (5, 960, 160, True, "hard_swish", 1), (5, 960, 160, True, "hard_swish", 1),
    ):  # fmt: skip
        y = m.conv(x, wide, 1, act=act) if wide != 16 else x
        y = m.conv(y, 0, kernel, depthwise=True, stride=stride, act=act)
        y = m.squeeze_excite(y, _eights(m.channels[y] / 4), "relu", "hard_sigmoid") if squeezes else y
        y = m.conv(y, channels, 1, act="")
        x = m.add(x, y) if stride == 1 and m.channels[x] == m.channels[y] else y
    return m.classifier(m.conv(x, 960, 1, act="hard_swish"))


def efficientnet_b0(m: Model) -> str:
    x = m.conv("x", 32, 3, stride=2, act="silu")
    for factor, kernel, first_stride, channels, blocks in (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    ):  # fmt: skip
        for block in range(blocks):
            stride, narrow = first_stride if not block else 1, m.channels[x]
            y = m.conv(x, factor * narrow, 1, act="silu", exact=True) if factor > 1 else x
            y = m.conv(y, 0, kernel, depthwise=True, stride=stride, act="silu")
            y = m.conv(m.squeeze_excite(y, max(1, narrow // 4), "silu", "sigmoid"), channels, 1, act="")
            x = m.add(x, y) if stride == 1 and narrow == m.channels[y] else y
    return m.classifier(m.conv(x, 1280, 1, act="silu"))


def regnet_y_400mf(m: Model) -> str:
    x = m.conv("x", 32, 3, stride=2)
    for channels, blocks in ((48, 1), (104, 3), (208, 6), (440, 6)):
        for block in range(blocks):
            stride, narrow = 2 if not block else 1, m.channels[x]
            y = m.conv(m.conv(x, channels, 1), channels, 3, stride=stride, group_width=8)
            y = m.conv(m.squeeze_excite(y, max(1, round(narrow / 4)), "relu", "sigmoid"), channels, 1, act="")
            shortcut = x if block else m.conv(x, channels, 1, stride=stride, act="")
            x = m.add(y, shortcut, "relu")
    return m.classifier(x)


def _eights(number: float) -> int:
    """The nearest multiple of eight, but at least nine tenths of the number."""
    nearest = max(8, int(number + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * number else nearest + 8


def inception_v3(m: Model) -> str:
    x = m.conv(m.conv("x", 32, 3, stride=2, padding=0), 32, 3, padding=0)
    x = m.pool(m.conv(x, 64, 3), "MaxPool", 3, stride=2)
    x = m.pool(m.conv(m.conv(x, 80, 1), 192, 3, padding=0), "MaxPool", 3, stride=2)
    for pooled in (32, 64, 64):
        x = m.concat(
            m.conv(x, 64, 1),
            m.conv(m.conv(x, 48, 1), 64, 5),
            m.conv(m.conv(m.conv(x, 64, 1), 96, 3), 96, 3),
            m.conv(m.pool(x, "AveragePool", 3, padding=1), pooled, 1),
        )
    x = m.concat(
        m.conv(x, 384, 3, stride=2, padding=0),
        m.conv(m.conv(m.conv(x, 64, 1), 96, 3), 96, 3, stride=2, padding=0),
        m.pool(x, "MaxPool", 3, stride=2),
    )
    for c in (128, 160, 160, 192):
        deep = m.conv(m.conv(m.conv(x, c, 1), c, (7, 1)), c, (1, 7))
        x = m.concat(
            m.conv(x, 192, 1),
            m.conv(m.conv(m.conv(x, c, 1), c, (1, 7)), 192, (7, 1)),
            m.conv(m.conv(deep, c, (7, 1)), 192, (1, 7)),
            m.conv(m.pool(x, "AveragePool", 3, padding=1), 192, 1),
        )
    seven = m.conv(m.conv(m.conv(x, 192, 1), 192, (1, 7)), 192, (7, 1))
    x = m.concat(
        m.conv(m.conv(x, 192, 1), 320, 3, stride=2, padding=0),
        m.conv(seven, 192, 3, stride=2, padding=0),
        m.pool(x, "MaxPool", 3, stride=2),
    )
    for _ in range(2):
        three = m.conv(x, 384, 1)
        double = m.conv(m.conv(x, 448, 1), 384, 3)
        x = m.concat(
            m.conv(x, 320, 1),
            m.concat(m.conv(three, 384, (1, 3)), m.conv(three, 384, (3, 1))),
            m.concat(m.conv(double, 384, (1, 3)), m.conv(double, 384, (3, 1))),
            m.conv(m.pool(x, "AveragePool", 3, padding=1), 192, 1),
        )
    return m.classifier(x)


def super_resolution(m: Model) -> str:
    h = y = m.conv("x", 64, 3, act="")
    for _ in range(2):
        y = m.add(m.conv(m.leaky_relu(m.conv(y, 64, 3, act=""), 0.1), 64, 3, act=""), y)
    y = m.add(m.conv(y, 64, 3, act=""), h)
    y = m.depth_to_space(m.conv(y, 128, 3, act=""), 2)
    y = m.depth_to_space(m.conv(y, 64, 3, act=""), 2)
    return m.conv(y, 3, 3, act="", exact=True)


BUILDERS: Mapping[str, tuple[Callable[[Model], str], tuple[int, int]]] = {
    "resnet50": (resnet50, (224, 224)),
    "resnet18_depthwise": (resnet18_depthwise, (224, 224)),
    "vgg16": (vgg16, (224, 224)),
    "mobilenet_v2": (mobilenet_v2, (224, 224)),
    "mobilenet_v3_large": (mobilenet_v3_large, (224, 224)),
    "efficientnet_b0": (efficientnet_b0, (224, 224)),
    "regnet_y_400mf": (regnet_y_400mf, (224, 224)),
    "inception_v3": (inception_v3, (299, 299)),
    "super_resolution": (super_resolution, (720, 1280)),
}


def build(
    name: str, *, batch: int = 1, size: tuple[int, int] | None = None, width: float = 1.0, int8: bool = False
) -> onnx.ModelProto:
    """A network of `BUILDERS`.

    Args:
        size: height and width of the images; default: those of the name.
        width: factor of the numbers of channels.
    """
    builder, usual = BUILDERS[name]
    model = Model((batch, 3, *(size or usual)), width=width, int8=int8)
    return model.finished(builder(model))


def saved(case: str, folder: Path) -> Path:
    """Writes a network to a folder, and returns its file.

    Args:
        case: NAME:BATCH:FORMAT, where FORMAT is int8, or else a format that the build is asked for.
    """
    name, batch, format_ = case.split(":")
    file = folder / f"{name}.onnx"
    onnx.save(build(name, batch=int(batch), int8=format_ == "int8"), file)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=BUILDERS)
    parser.add_argument("--all", action="store_true", help="write every network")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=float, default=1.0, help="factor of the numbers of channels")
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="of the images")
    parser.add_argument("--int8", action="store_true", help="quantised")
    parser.add_argument("--out", help="file to write; default: NAME.onnx in --folder")
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    if not options.all and not options.name:
        parser.error("give a name or --all")
    for name in BUILDERS if options.all else [options.name]:
        path = Path(options.out) if options.out and not options.all else Path(options.folder) / f"{name}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = tuple(options.size) if options.size else None
        onnx.save(build(name, batch=options.batch, size=size, width=options.width, int8=options.int8), path)
        print(path)


if __name__ == "__main__":
    main()
