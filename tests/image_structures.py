"""Structures of real ONNX files that see: detectors of YOLO's kind, faces, and embeddings of spectra. See
`structure_support`."""

from __future__ import annotations

from typing import Any

import numpy as np
from structure_support import FLOAT, Structure, like


# --- Detectors ----------------------------------------------------------------------------------------------------------
def _c2f(g: Structure, x: str, c: int, blocks: int = 1) -> str:
    """YOLOv8's block: halves of a Split, each convolved half of which stays, too."""
    first, last = g.op("Split", g.silu(g.conv(x, c, c)), g.ints(c // 2, c // 2), outputs=2, axis=1)
    parts = [first, last]
    for _ in range(blocks):
        y = g.silu(g.conv(g.silu(g.conv(parts[-1], c // 2, c // 2, 3)), c // 2, c // 2, 3))
        parts.append(g.op("Add", parts[-1], y))
    return g.silu(g.conv(g.op("Concat", *parts, axis=1), (2 + blocks) * c // 2, c))


def anchors(g: Structure, map_: str) -> tuple[str, str]:
    """Centres of the pixels of a map, and how many there are, by Shape, Range, Expand and Concat."""
    extents = [g.op("Gather", g.op("Shape", map_), g.array(axis, np.int64)) for axis in (2, 3)]
    rows, columns = (
        g.op("Add", g.op("Range", g.array(0.0), g.op("Cast", each, to=FLOAT), g.array(1.0)), g.array(0.5))
        for each in extents
    )
    size = g.op("Concat", g.op("Shape", rows), g.op("Shape", columns), axis=0)
    down = g.op("Expand", g.op("Reshape", rows, g.ints(-1, 1)), size)
    across = g.op("Expand", g.op("Reshape", columns, g.ints(1, -1)), size)
    pair = g.op("Concat", g.op("Unsqueeze", across, g.ints(-1)), g.op("Unsqueeze", down, g.ints(-1)), axis=-1)
    return g.op("Reshape", pair, g.ints(-1, 2)), g.op("Unsqueeze", g.op("Mul", *extents), g.ints(0))


def detector(*shape: int | str) -> Any:
    """YOLOv8 with two scales and four bins of each side."""
    bins, classes = 4, 3
    g = Structure(17, x=shape)
    small = _c2f(g, g.silu(g.conv(g.silu(g.conv("x", 3, 16, 3, strides=[2, 2])), 16, 32, 3, strides=[2, 2])), 32)
    deep = g.silu(g.conv(small, 32, 32, 3, strides=[2, 2]))
    pools = [g.silu(g.conv(deep, 32, 16))]
    for _ in range(3):
        pools.append(g.op("MaxPool", pools[-1], kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1], ceil_mode=0))
    deep = g.silu(g.conv(g.op("Concat", *pools, axis=1), 64, 32))
    up = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    large = g.op("Concat", g.op("Resize", deep, "", g.array([1, 1, 2, 2]), **up), small, axis=1)
    maps = [g.silu(g.conv(large, 64, 32)), deep]
    heads = [g.op("Concat", g.conv(each, 32, 4 * bins), g.conv(each, 32, classes), axis=1) for each in maps]
    batch = g.op("Unsqueeze", g.op("Gather", g.op("Shape", heads[0]), g.array(0, np.int64)), g.ints(0))
    to = g.op("Concat", batch, g.ints(4 * bins + classes), g.ints(-1), axis=0)
    every = g.op("Concat", *(g.op("Reshape", each, to) for each in heads), axis=2)
    boxes, scores = g.op("Split", every, g.ints(4 * bins, classes), outputs=2, axis=1)
    points, strides = [], []
    for number, head in enumerate(heads):
        point, count = anchors(g, head)
        zeros = g.op("ConstantOfShape", g.op("Concat", count, g.ints(1), axis=0))
        points.append(point)
        strides.append(g.op("Add", zeros, g.array(4.0 * 2**number)))
    extents = g.op("Shape", boxes)
    first, last = (g.op("Unsqueeze", g.op("Gather", extents, g.array(n, np.int64)), g.ints(0)) for n in (0, 2))
    sides = g.op("Reshape", boxes, g.op("Concat", first, g.ints(4), g.ints(bins), last, axis=0))
    shares = g.op("Softmax", g.op("Transpose", sides, perm=[0, 2, 1, 3]), axis=1)
    weight = g.array(np.arange(bins).reshape(1, bins, 1, 1))
    sides = g.op("Reshape", g.op("Conv", shares, weight), g.op("Concat", first, g.ints(4), last, axis=0))
    centres = g.op("Unsqueeze", g.op("Transpose", g.op("Concat", *points, axis=0), perm=[1, 0]), g.ints(0))
    low = g.op("Sub", centres, g.op("Slice", sides, g.ints(0), g.ints(2), g.ints(1)))
    high = g.op("Add", centres, g.op("Slice", sides, g.ints(2), g.ints(4), g.ints(1)))
    middle = g.op("Div", g.op("Add", low, high), g.array(2.0))
    found = g.op(
        "Mul",
        g.op("Concat", middle, g.op("Sub", high, low), axis=1),
        g.op("Transpose", g.op("Concat", *strides, axis=0), perm=[1, 0]),
    )
    return g.model(g.op("Concat", found, g.op("Sigmoid", scores), axis=1))


@like("nudenet")
def nudenet() -> Any:
    return detector(1, 3, 16, 24)


@like("ddddocr_det")
def ddddocr_det() -> Any:
    """YOLOX: pixels that four Slices with steps put into channels, a block of two halves, and heads that are joined."""
    g = Structure(11, x=(1, 3, 16, 16))
    parts = []
    for column in (0, 1):
        for row in (0, 1):
            x = g.op("Slice", "x", g.ints(row), g.ints(2**63 - 1), g.ints(2), g.ints(2))
            parts.append(g.op("Slice", x, g.ints(column), g.ints(2**63 - 1), g.ints(3), g.ints(2)))
    x = g.silu(g.conv(g.op("Concat", *parts, axis=1), 12, 16, 3))
    half = g.silu(g.conv(x, 16, 16))
    half = g.op("Add", g.silu(g.conv(g.silu(g.conv(half, 16, 16)), 16, 16, 3)), half)
    x = g.silu(g.conv(g.op("Concat", half, g.silu(g.conv(x, 16, 16)), axis=1), 32, 16))
    pools = [g.op("MaxPool", x, kernel_shape=[n, n], pads=[n // 2] * 4, strides=[1, 1]) for n in (5, 9)]
    deep = g.silu(g.conv(g.op("Concat", x, *pools, axis=1), 48, 16, 3, strides=[2, 2]))
    sizes = [g.array([]), g.array([1, 1, 2, 2])]
    up = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    large = g.silu(g.conv(g.op("Concat", g.op("Resize", deep, *sizes, **up), x, axis=1), 32, 16))
    found = []
    for x, pixels in ((large, 64), (deep, 16)):
        boxes, scores, classes = g.conv(x, 16, 4), g.op("Sigmoid", g.conv(x, 16, 1)), g.op("Sigmoid", g.conv(x, 16, 1))
        found.append(g.op("Reshape", g.op("Concat", boxes, scores, classes, axis=1), g.ints(1, 6, pixels)))
    return g.model(g.op("Transpose", g.op("Concat", *found, axis=2), perm=[0, 2, 1]))


# --- Faces --------------------------------------------------------------------------------------------------------------
@like("centerface")
def centerface() -> Any:
    """Inverted residual blocks, transposed convolutions with a batch norm, and four heads."""
    g = Structure(9, x=(2, 3, 16, 16))
    x = g.op("Relu", g.conv("x", 3, 8, 3, strides=[2, 2]))
    y = g.op("Relu", g.conv(g.op("Relu", g.conv(x, 8, 16)), 16, 16, 3, group=16))
    x = g.op("Add", x, g.conv(y, 16, 8))
    deep = g.conv(g.op("Relu", g.conv(x, 8, 16, 3, group=8, strides=[2, 2])), 16, 8)
    window = {"kernel_shape": [2, 2], "strides": [2, 2], "group": 1, "pads": [0, 0, 0, 0]}
    up = g.op("Relu", g.batch_norm(g.op("ConvTranspose", deep, g.weight(8, 8, 2, 2), **window), 8))
    y = g.op("Relu", g.conv(g.op("Add", up, x), 8, 8, 3))
    return g.model(g.op("Sigmoid", g.conv(y, 8, 1)), *(g.conv(y, 8, k) for k in (2, 2, 10)))


def _prelu(g: Structure, x: str, *shape: int) -> str:
    return str(g.op("PRelu", x, g.array(0.1 + 0.2 * np.abs(g.normal(shape, 1)))))


def proposals(*shape: int | str) -> Any:
    """MTCNN's first net: images in channels-last order of any size, and boxes and scores in this order."""
    g = Structure(12, x=shape)
    valid = {"auto_pad": "VALID", "dilations": [1, 1], "group": 1, "strides": [1, 1]}
    x = g.op("Transpose", "x", perm=[0, 3, 1, 2])
    x = _prelu(g, g.conv(x, 3, 10, 3, **valid), 10, 1, 1)
    x = g.op("MaxPool", x, auto_pad="SAME_UPPER", kernel_shape=[2, 2], strides=[2, 2])
    x = _prelu(g, g.conv(x, 10, 16, 3, **valid), 16, 1, 1)
    boxes, scores = (g.op("Transpose", g.conv(x, 16, k, 1, **valid), perm=[0, 2, 3, 1]) for k in (4, 2))
    return g.model(boxes, g.op("Softmax", scores, axis=3))


@like("mtcnn_pnet")
def mtcnn_pnet() -> Any:
    return proposals(1, 17, 23, 3)


def _refined(size: int, pool: dict[str, Any], c: int, results: tuple[int, ...]) -> Any:
    g = Structure(12, x=(3, size, size, 3))
    valid = {"auto_pad": "VALID", "strides": [1, 1]}
    x = g.op("Transpose", "x", perm=[0, 3, 1, 2])
    x = _prelu(g, g.conv(x, 3, c, 3, **valid), c, 1, 1)
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], **pool)
    x = _prelu(g, g.conv(x, c, c, 2, **valid), c, 1, 1)
    side = (size - 2 + 1) // 2 - 1 if pool["auto_pad"] == "SAME_UPPER" else (size - 5) // 2
    flat = g.op("Flatten", g.op("Transpose", x, perm=[0, 2, 3, 1]))
    y = g.op("Add", g.op("MatMul", flat, g.weight(side * side * c, 8)), g.weight(8, scale=0.1))
    y = _prelu(g, y, 8)
    heads = [g.op("Add", g.op("MatMul", y, g.weight(8, k)), g.weight(k, scale=0.1)) for k in results]
    return g.model(*heads[:-1], g.op("Softmax", heads[-1], axis=1))


@like("mtcnn_rnet")
def mtcnn_rnet() -> Any:
    return _refined(12, {"auto_pad": "SAME_UPPER"}, 8, (4, 2))


@like("mtcnn_onet")
def mtcnn_onet() -> Any:
    return _refined(13, {"auto_pad": "VALID"}, 8, (4, 10, 2))


# --- Spectra ------------------------------------------------------------------------------------------------------------
@like("embedding_model")
def embedding_model() -> Any:
    """Convolutions along one side and then the other, each with a leaky relu and a Max with a number."""
    g = Structure(13, x=(1, 20, 12, 1))
    x = g.op("Reshape", g.op("Pad", "x", g.ints(0, 0, 1, 0, 0, 0, 1, 0)), g.ints(-1, 1, 20, 14))
    x, c = g.op("Relu", g.batch_norm(g.op("Conv", x, g.weight(8, 1, 3, 3), kernel_shape=[3, 3]), 8)), 8
    for k, window, pads in ((8, (1, 3), [0, 1, 0, 1]), (8, (3, 1), [0] * 4), (16, (1, 3), [0] * 4), (16, (3, 1), [0] * 4)):
        x = g.op("LeakyRelu", g.conv(x, c, k, window, pads=pads), alpha=0.2)
        x, c = g.op("Max", x, g.array([-0.4])), k
    x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.conv(g.op("LeakyRelu", x, alpha=0.2), 16, 8, (7, 5), pads=[0] * 4)
    return g.model(g.op("Reshape", x, g.ints(-1, 1, 1, 8)))
