"""Structures of real ONNX files that read text: scene text, captchas, bytes of files, chemical reactions. See
`structure_support`."""

from __future__ import annotations

from typing import Any

import numpy as np
from structure_support import INT32, INT64, Body, Structure, like


def _hard_swish(g: Body, x: str) -> str:
    """As Paddle writes it."""
    clipped = g.op("Clip", g.op("Add", x, g.number(3)), g.number(0), g.number(6))
    return str(g.op("Div", g.op("Mul", x, clipped), g.number(6)))


def _squeeze(g: Body, x: str, c: int) -> str:
    gate = g.op("Relu", g.conv(g.op("GlobalAveragePool", x), c, c // 4))
    return str(g.op("Mul", x, g.op("HardSigmoid", g.conv(gate, c // 4, c), alpha=1 / 6, beta=0.5)))


def _light_block(g: Body, x: str, c: int, k: int, stride: tuple[int, int] = (1, 1)) -> str:
    """Depthwise and pointwise, each with an affine transform of one number behind the convolution."""
    for convolved in (g.conv(x, c, c, 3, group=c, strides=stride), ""):
        x = convolved or g.conv(x, c, k)
        x = g.op("Add", g.op("Mul", x, g.array([1.1])), g.array([0.05]))
        x = _hard_swish(g, x)
    return x


@like("ppocr_det")
def ppocr_det() -> Any:
    g = Structure(12, x=(1, 3, 32, 32))
    x = _hard_swish(g, g.batch_norm(g.conv("x", 3, 8, 3, strides=[2, 2]), 8))
    first = _squeeze(g, _light_block(g, x, 8, 16, (2, 2)), 16)
    second = _light_block(g, first, 16, 16, (2, 2))
    none, scales = g.array([]), g.array([1, 1, 2, 2])
    up = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    larger = g.op("Add", g.conv(first, 16, 8), g.op("Resize", g.conv(second, 16, 8), none, scales, **up))
    joined = g.op("Concat", g.op("Resize", g.conv(second, 16, 8), none, scales, **up), larger, axis=1)
    y = g.op("Relu", g.batch_norm(g.conv(joined, 16, 8, 3), 8))
    y = g.op("Add", g.op("ConvTranspose", y, g.weight(8, 8, 2, 2), strides=[2, 2]), g.weight(1, 8, 1, 1, scale=0.1))
    y = g.op("ConvTranspose", g.op("Relu", g.batch_norm(y, 8)), g.weight(8, 1, 2, 2), strides=[2, 2])
    return g.model(g.op("Sigmoid", g.op("Add", y, g.weight(1, 1, 1, 1))))


def _spelled_norm(g: Body, x: str, c: int) -> str:
    """A layer norm out of means, as exporters before opset 17 write it."""
    apart = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1], keepdims=1))
    variance = g.op("ReduceMean", g.op("Pow", apart, g.number(2)), axes=[-1], keepdims=1)
    normal = g.op("Div", apart, g.op("Sqrt", g.op("Add", variance, g.number(1e-5))))
    return str(g.op("Add", g.op("Mul", normal, g.array(np.linspace(0.5, 1.5, c))), g.weight(c, scale=0.1)))


@like("ppocr_rec")
def ppocr_rec() -> Any:
    """Rows of images to sequences, attention over shapes in int32, and a wide softmax."""
    g = Structure(12, x=(1, 3, 12, 40))
    x = _light_block(g, _hard_swish(g, g.conv("x", 3, 8, 3, strides=[2, 2])), 8, 16, (2, 1))
    x = g.op("AveragePool", x, kernel_shape=[3, 2], strides=[3, 2])
    shape = g.op("Cast", g.op("Shape", x), to=INT32)
    batch = g.op("Slice", shape, g.ints(0), g.ints(1), g.ints(0))
    width = g.op("Slice", shape, g.ints(3), g.ints(4), g.ints(0))
    to_rows = g.op("Cast", g.op("Concat", batch, g.array([16], np.int32), width, axis=0), to=INT64)
    rows = g.op("Transpose", g.op("Reshape", x, to_rows), perm=[0, 2, 1])
    normal = _spelled_norm(g, rows, 16)
    product = g.op("Add", g.op("MatMul", normal, g.weight(16, 48)), g.weight(48, scale=0.1))
    heads = g.op("Concat", g.op("Cast", g.op("Concat", batch, width, axis=0), to=INT64), g.ints(3, 2, 8), axis=0)
    parts = g.op("Transpose", g.op("Reshape", product, heads), perm=[2, 0, 3, 1, 4])
    q, k, v = (g.op("Squeeze", g.op("Slice", parts, g.ints(n), g.ints(n + 1), g.ints(0)), axes=[0]) for n in range(3))
    scores = g.op("MatMul", g.op("Mul", q, g.number(8**-0.5)), g.op("Transpose", k, perm=[0, 1, 3, 2]))
    seen = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    back = g.op("Concat", g.op("Cast", g.op("Concat", batch, width, axis=0), to=INT64), g.ints(16), axis=0)
    y = g.op("Add", rows, g.op("MatMul", g.op("Reshape", seen, back), g.weight(16, 16)))
    y = g.op("Add", y, g.op("MatMul", g.silu(g.op("MatMul", _spelled_norm(g, y, 16), g.weight(16, 32))), g.weight(32, 16)))
    classes = g.op("Add", g.op("MatMul", y, g.weight(16, 203)), g.weight(203, scale=0.1))
    return g.model(g.op("Softmax", classes, axis=2))


@like("ppocr_cls")
def ppocr_cls() -> Any:
    """Biases that a Reshape makes, and a flatten by the shape of the batch."""
    g = Structure(11, x=(2, 3, 16, 24))
    x = _hard_swish(g, g.batch_norm(g.op("Conv", "x", g.weight(8, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2]), 8))
    bias = g.op("Reshape", g.weight(8, scale=0.1), g.ints(1, 8, 1, 1))
    gate = g.op("Add", g.op("Conv", g.op("GlobalAveragePool", x), g.weight(8, 8, 1, 1)), bias)
    x = g.op("Mul", x, g.op("HardSigmoid", gate, alpha=0.2, beta=0.5))
    x = g.op("MaxPool", g.op("Relu", g.conv(x, 8, 16)), kernel_shape=[2, 2], strides=[2, 2])
    pooled = g.op("GlobalAveragePool", x)
    batch = g.op("Slice", g.op("Cast", g.op("Shape", pooled), to=INT32), g.ints(0), g.ints(1), g.ints(0))
    flat = g.op("Reshape", pooled, g.op("Cast", g.op("Concat", batch, g.array([-1], np.int32), axis=0), to=INT64))
    y = g.op("Add", g.op("MatMul", flat, g.weight(16, 2)), g.weight(2))
    return g.model(g.op("Identity", g.op("Softmax", y, axis=1)))


def _crnn(g: Structure) -> tuple[str, int]:
    """Residual blocks of an image whose columns become a sequence."""
    x = g.silu(g.conv("x", 1, 8, 3, strides=[2, 2]))
    x = g.op("Add", x, g.conv(g.silu(g.conv(x, 8, 8, 3)), 8, 8))
    return g.conv(g.silu(g.conv(x, 8, 16, 3, strides=[2, 2])), 16, 8), 8


@like("ddddocr")
def ddddocr() -> Any:
    g = Structure(12, x=(1, 1, 16, 40))
    x, c = _crnn(g)
    rows = g.op("Transpose", x, perm=[3, 0, 1, 2])
    first, second = (g.op("Unsqueeze", g.op("Gather", g.op("Shape", rows), g.array(n, np.int64)), axes=[0]) for n in (0, 1))
    rows = g.op("Reshape", rows, g.op("Concat", first, second, g.ints(-1), axis=0))
    state = g.op("ConstantOfShape", g.op("Concat", g.ints(2), second, g.ints(12), axis=0))
    weights = [g.weight(2, 48, 4 * c), g.weight(2, 48, 12), g.weight(2, 96, scale=0.1)]
    given = {"hidden_size": 12, "direction": "bidirectional"}
    made, _, _ = g.op("LSTM", rows, *weights, "", state, state, outputs=3, **given)
    flat = g.op("Reshape", g.op("Transpose", made, perm=[0, 2, 1, 3]), g.ints(-1, 24))
    y = g.op("Gemm", flat, g.weight(50, 24), g.weight(50, scale=0.1), transB=1)
    return g.model(g.op("Reshape", y, g.op("Concat", first, second, g.ints(-1), axis=0)))


def _dynamic_product(g: Structure, x: str, kind: str, scale: float, bias: str, **attributes: Any) -> str:
    """A quantised convolution or matrix product whose input's scale is measured in the run."""
    whole, x_scale, zero = g.op("DynamicQuantizeLinear", x, outputs=3)
    shape = attributes.pop("shape")
    product = g.op(kind, whole, g.integers(0, 256, shape, np.uint8), zero, g.array(121, np.uint8), **attributes)
    both = g.op("Mul", x_scale, g.array(scale))
    if kind == "ConvInteger":
        rounded = g.op("Cast", g.op("Floor", g.op("Div", bias, both)), to=INT32)
        product = g.op("Add", product, g.op("Reshape", rounded, g.ints(1, -1, 1, 1)))
    y = g.op("Mul", g.op("Cast", product, to=1), both)
    return str(y if kind == "ConvInteger" else g.op("Add", y, bias))


@like("ddddocr_old")
def ddddocr_old() -> Any:
    g = Structure(12, x=(1, 1, 16, 24))
    g.domains["com.microsoft"] = 1
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    x = g.silu(_dynamic_product(g, "x", "ConvInteger", 0.002, g.weight(8), shape=(8, 1, 3, 3), strides=[2, 2], **window))
    y = g.silu(_dynamic_product(g, x, "ConvInteger", 0.002, g.weight(8), shape=(8, 8, 3, 3), **window))
    x = g.op("Add", x, y)
    rows = g.op("Reshape", g.op("Transpose", x, perm=[3, 0, 1, 2]), g.ints(0, 0, -1))
    batch = g.op("Unsqueeze", g.op("Gather", g.op("Shape", rows), g.array(1, np.int64)), axes=[0])
    state = g.op("ConstantOfShape", g.op("Concat", g.ints(2), batch, g.ints(8), axis=0))
    parts = [g.integers(-127, 128, (2, 64, 32), np.int8), g.integers(-127, 128, (2, 8, 32), np.int8)]
    quantised = [g.array([0.002, 0.003]), g.array([0, 0], np.int8)]
    given = [rows, *parts, g.weight(2, 64, scale=0.1), "", state, state, "", *quantised, *quantised]
    made, _, _ = g.op(
        "DynamicQuantizeLSTM", *given, outputs=3, domain="com.microsoft", direction="bidirectional", hidden_size=8
    )  # fmt: skip
    flat = g.op("Reshape", g.op("Transpose", made, perm=[0, 2, 1, 3]), g.ints(12, 16))
    return g.model(_dynamic_product(g, flat, "MatMulInteger", 0.002, g.weight(20), shape=(16, 20)))


@like("magika")
def magika() -> Any:
    """One-hot bytes by Equal, GELU and layer norms out of small nodes, a convolution over text, and a softmax by hand."""
    g = Structure(15, bytes=(INT32, (1, 64)))
    batch = g.op("Slice", g.op("Cast", g.op("Shape", "bytes"), to=INT32), g.ints(0), g.ints(1), g.ints(0))

    def shape(*extents: int) -> str:
        return str(g.op("Cast", g.op("Concat", batch, *(g.array([n], np.int32) for n in extents), axis=0), to=INT64))

    wide = g.op("Expand", g.op("Reshape", "bytes", g.ints(-1, 64, 1)), shape(64, 1))
    hot = g.op("Cast", g.op("Equal", wide, g.array(np.arange(30).reshape(1, 1, 30), np.int32)), to=1)
    x = _tanh_gelu(g, g.op("Add", g.op("MatMul", hot, g.weight(30, 8)), g.weight(1, 1, 8)))
    x = _counted_norm(g, g.op("Reshape", x, shape(16, 32)), 16, 1, shape(1, 32))
    x = g.op("Unsqueeze", x, g.ints(3))
    order = [g.array(each, np.int32) for each in ([0] * 4, [1_000_000_000] * 4, [0, 2, 1, 3], [1] * 4)]
    x = g.op("Conv", g.op("Transpose", g.op("Slice", x, *order), perm=[0, 2, 1, 3]), g.weight(24, 32, 5, 1))
    x = g.op("Squeeze", g.op("Slice", x, g.ints(0, 0, 0, 0), g.ints(*[2**31 - 1] * 3, 1), g.ints(0, 1, 2, 3)), g.ints(3))
    x = _tanh_gelu(g, g.op("Add", x, g.weight(1, 24, 1, scale=0.1)))
    x = _counted_norm(g, g.op("Squeeze", g.op("GlobalMaxPool", x), g.ints(2)), 24, 0, shape(1))
    x = g.op("Add", g.op("MatMul", x, g.weight(24, 10)), g.weight(1, 10))
    most = g.op("Max", g.array(-np.inf), g.op("ReduceMax", x, axes=[1], keepdims=0))
    powers = g.op("Exp", g.op("Sub", x, g.op("Expand", g.op("Reshape", most, shape(1)), shape(1))))
    total = g.op("ReduceSum", powers, g.ints(1), keepdims=0, noop_with_empty_axes=1)
    return g.model(g.op("Div", powers, g.op("Expand", g.op("Reshape", total, shape(1)), shape(1))))


def _tanh_gelu(g: Body, x: str) -> str:
    cubed = g.op("Mul", x, g.op("Mul", x, g.op("Mul", g.array(0.044715), x)))
    inner = g.op("Tanh", g.op("Mul", g.array(0.79788458), g.op("Add", x, cubed)))
    return str(g.op("Mul", x, g.op("Mul", g.array(0.5), g.op("Add", g.array(1.0), inner))))


def _counted_norm(g: Body, x: str, count: int, rest: int, shape: str) -> str:
    """A layer norm over axis 1 by sums and squares, as tf2onnx writes it."""
    sums = [
        g.op("Mul", g.op("ReduceSum", each, g.ints(1), keepdims=0, noop_with_empty_axes=1), g.array(1 / count))
        for each in (x, g.op("Mul", x, x))
    ]
    variance = g.op("Max", g.array(0.0), g.op("Sub", sums[1], g.op("Mul", sums[0], sums[0])))
    wide, mean = (g.op("Expand", g.op("Reshape", each, shape), shape) for each in (variance, sums[0]))
    extents = (1, count, 1)[: 2 + rest]
    scale = g.op("Mul", g.op("Reciprocal", g.op("Sqrt", g.op("Add", wide, g.array(1e-6)))), g.array(np.full(extents, 1.25)))
    return str(g.op("Add", g.op("Mul", g.op("Sub", x, mean), scale), g.weight(*extents, scale=0.1)))


@like("rxnmap")
def rxnmap() -> Any:
    """Embeddings of integers, a mask by Equal, Where and Expand, attention with a bias, and the mean of its heads."""
    n, c, heads = 12, 16, 2
    rows = (INT64, (1, n))
    g = Structure(17, atoms=rows, neighbors=rows, distances=(INT64, (1, n, n)), roles=rows)
    x = g.op(
        "Add", g.op("Gather", g.weight(21, c, scale=0.5), "atoms"), g.op("Gather", g.weight(5, c, scale=0.5), "neighbors")
    )
    x = g.op("Add", x, g.op("Gather", g.weight(4, c, scale=0.5), "roles"))
    bias = g.op("Transpose", g.op("Gather", g.weight(7, heads), "distances"), perm=[0, 3, 1, 2])
    apart = g.op("Unsqueeze", g.op("Cast", g.op("Greater", "atoms", g.array(0, np.int64)), to=1), g.ints(1, 2))
    bias = g.op("Add", bias, g.op("Mul", g.op("Sub", g.array(1.0), apart), g.array(-1e4)))
    extents = [g.op("Unsqueeze", g.op("Gather", g.op("Shape", "atoms"), g.array(k, np.int64)), g.ints(0)) for k in (0, 1)]
    weights = ""
    for _ in range(2):
        normal = g.op("LayerNormalization", x, g.array(np.linspace(0.5, 1.5, c)), g.weight(c, scale=0.1), axis=-1)
        qkv = g.op("Add", g.weight(3 * c, scale=0.1), g.op("MatMul", normal, g.weight(c, 3 * c)))
        parts = []
        for number in range(3):
            part = g.op("Slice", qkv, g.ints(c * number), g.ints(c * number + c), g.ints(2))
            to = g.op("Concat", *extents, g.ints(heads, c // heads), axis=0)
            parts.append(g.op("Transpose", g.op("Reshape", part, to), perm=[0, 2, 1, 3]))
        scores = g.op("MatMul", parts[0], g.op("Transpose", parts[1], perm=[0, 1, 3, 2]))
        weights = g.op("Softmax", g.op("Add", g.op("Div", scores, g.array(8**0.5)), bias), axis=-1)
        seen = g.op("Transpose", g.op("MatMul", weights, parts[2]), perm=[0, 2, 1, 3])
        flat = g.op("Reshape", seen, g.op("Concat", *extents, g.ints(c), axis=0))
        x = g.op("Add", x, g.op("MatMul", flat, g.weight(c, c)))
        inner = g.op("MatMul", x, g.weight(c, 2 * c))
        half = g.op("Add", g.op("Erf", g.op("Div", inner, g.array(2**0.5))), g.array(1.0))
        x = g.op("Add", x, g.op("MatMul", g.op("Mul", g.op("Mul", inner, half), g.array(0.5)), g.weight(2 * c, c)))
    y = g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1]))
    size = g.op("Concat", *extents, extents[1], axis=0)
    ones = g.op("ConstantOfShape", g.op("Reshape", g.op("Shape", size), g.ints(-1)), value=_one(INT64))
    size = g.op("Where", g.op("Equal", size, g.op("Mul", ones, g.array(-1, np.int64))), ones, size)
    same = g.op("Equal", g.op("Unsqueeze", "roles", g.ints(1)), g.op("Unsqueeze", "roles", g.ints(2)))
    y = g.op("Where", g.op("Expand", same, size), g.array(0.0), y)
    y = g.op("Add", y, g.op("ReduceSum", weights, g.ints(1), keepdims=0))
    return g.model(g.op("Squeeze", y, g.ints(0)))


def _one(dtype: int) -> Any:
    from onnx import helper

    return helper.make_tensor("value", dtype, [1], [1])
