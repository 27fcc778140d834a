"""How many numbers or products the nodes of a model add up: what a sum may be off by grows with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from onnx import NodeProto

_LONGEST = 1 << 12  # numbers in a sum of which the shape does not say how many
RECURRENT = {"LSTM": (0, 5, 6), "GRU": (0, 5), "RNN": (0, 5), "DynamicQuantizeLSTM": (0, 5, 6)}
"""Inputs of nodes whose products are sums of gates, which the network keeps in the dtype of the first. ONNX Runtime makes
8-bit numbers of those of the last one."""


def length_of(node: NodeProto, shapes: Sequence[list[int | None] | None]) -> int:
    """How many numbers or products a node adds up at most."""

    def size(shape: Iterable[int | None] | None) -> int:
        if shape is None:
            return _LONGEST
        return math.prod(each or _LONGEST for each in shape)

    if node.op_type in ("Conv", "ConvTranspose", "FusedConv") and len(shapes) > 1 and shapes[1]:
        return size(shapes[1]) // (shapes[1][0] or 1) if node.op_type != "ConvTranspose" else size(shapes[1])
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul", "FusedGemm") and shapes[0]:
        return max(each or _LONGEST for each in shapes[0][-2:])
    if node.op_type in RECURRENT and shapes[1] and shapes[2]:
        return (shapes[1][-1] or _LONGEST) + (shapes[2][-1] or _LONGEST)
    if node.op_type in ("DFT", "STFT") and shapes[0]:
        frame = shapes[2] if node.op_type == "STFT" and len(shapes) > 2 and shapes[2] else shapes[0]
        return max(each or _LONGEST for each in frame)
    if node.op_type == "AveragePool":
        return math.prod(next((each.ints for each in node.attribute if each.name == "kernel_shape"), [_LONGEST]))
    if node.op_type == "Col2Im" and shapes[0]:
        return shapes[0][1] or _LONGEST  # no more blocks overlap than a block has pixels
    if node.op_type in ("Softmax", "LogSoftmax") and shapes[0]:
        axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
        return size(shapes[0][axis:])  # before opset 13 the axes behind belong to it
    return size(shapes[0])
