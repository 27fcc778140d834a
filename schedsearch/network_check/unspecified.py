"""Elements of which ONNX does not say what they are: floats that become integers out of range.

Implementations give the nearest integer, the least one or one that wraps (Cast: "the result is undefined"). To find what
depends on them, a model is computed with stand-ins for them: elements that are not equal with all of these depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import NodeProto, TensorProto, helper

from schedsearch.typed import Array

STAND_INS = 3
"""The least integer, the largest, and 1, which is odd where the least is even."""
_CASTS = ("Cast", "CastLike")
_INTEGERS: Mapping[int, str] = {
    TensorProto.INT8: "int8", TensorProto.UINT8: "uint8", TensorProto.INT16: "int16", TensorProto.UINT16: "uint16",
    TensorProto.INT32: "int32", TensorProto.UINT32: "uint32", TensorProto.INT64: "int64",
}  # fmt: skip
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def leaves_open(node: NodeProto, dtypes: Mapping[str, int]) -> bool:
    """Whether a node makes integers of floats, or a power of integers, which may be out of range.

    Args:
        dtypes: value -> ONNX's number of its dtype.
    """
    if node.op_type not in (*_CASTS, "Pow") or node.domain not in ("", "ai.onnx"):
        return False
    read = dtypes.get(node.input[0])
    return dtypes.get(node.output[0]) in _INTEGERS and (node.op_type == "Pow" or read in _FLOATS)


def with_stand_in(node: NodeProto, kind: int, number: int) -> tuple[list[NodeProto], Mapping[str, Array]]:
    """Nodes that compute what a node does that leaves something open, with a stand-in for it; and the constants they read.

    Args:
        kind: ONNX's number of the dtype of the result.
        number: of the stand-in, below `STAND_INS`.
    """
    replacing = _Replacing(node, _INTEGERS[kind])
    return replacing.nodes(kind, number), replacing.constants


class _Replacing:
    """Attributes:
    constants: name -> array, of those that its nodes read.
    """

    def __init__(self, node: NodeProto, dtype: str) -> None:
        self._node, self._limits = node, np.iinfo(dtype)
        self.constants: dict[str, Array] = {}

    def nodes(self, kind: int, number: int) -> list[NodeProto]:
        """The last one writes the result, which is stand-in + inside (result - stand-in) in int64; Where is of opset 9."""
        low, high = int(self._limits.min) - 1, int(self._limits.max) + 1
        below = np.float64(low)
        below = below if int(below) == low else np.nextafter(below, -np.inf)
        stand_in = self._constant("stand-in", np.int64((self._limits.min, self._limits.max, 1)[number]))
        same = NodeProto()
        same.CopyFrom(self._node)
        same.output[0] = self._name("any")
        return [
            *self._exact(),
            self._made("Greater", [self._name("exact"), self._constant("low", below)], "above"),
            self._made("Less", [self._name("exact"), self._constant("high", np.float64(high))], "below"),
            self._made("And", [self._name("above"), self._name("below")], "in range"),
            self._made("Cast", [self._name("in range")], "inside", to=TensorProto.INT64),
            same,
            self._made("Cast", [self._name("any")], "wide", to=TensorProto.INT64),
            self._made("Sub", [self._name("wide"), stand_in], "apart"),
            self._made("Mul", [self._name("inside"), self._name("apart")], "moved"),
            self._made("Add", [stand_in, self._name("moved")], "chosen"),
            helper.make_node("Cast", [self._name("chosen")], [self._node.output[0]], to=kind),
        ]

    def _exact(self) -> Iterator[NodeProto]:
        """The result before it is rounded, as a float64, which holds all limits but the largest of 64 bits."""
        if self._node.op_type in _CASTS:
            yield self._made("Cast", [self._node.input[0]], "exact", to=TensorProto.DOUBLE)
            return
        for name, read in zip(("base", "exponent"), self._node.input):
            yield self._made("Cast", [read], name, to=TensorProto.DOUBLE)
        yield self._made("Pow", [self._name("base"), self._name("exponent")], "exact")

    def _name(self, what: str) -> str:
        return f"{self._node.output[0]}/{what}"

    def _made(self, op: str, reads: list[str], what: str, **attributes: int) -> NodeProto:
        return helper.make_node(op, reads, [self._name(what)], **attributes)

    def _constant(self, what: str, value: np.generic) -> str:
        self.constants[self._name(what)] = np.asarray(value)
        return self._name(what)
