"""The structures of real ONNX files that packages ship: their nodes, attributes and kinds of shapes, written anew and small,
with random weights.

`text_structures`, `sound_structures` and `image_structures` have a function for each file, which `FILES` names.
`benchmarks/real_models.py` builds the files themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from schedsearch.typed import Array

FLOAT, INT32, INT64, BOOL, UINT8 = (getattr(TensorProto, name) for name in ("FLOAT", "INT32", "INT64", "BOOL", "UINT8"))

FILES: dict[str, Callable[[], Any]] = {}  # a file, as the benchmark calls it -> what makes a model like it
BELOW = {"bytes": 30, "atoms": 21, "neighbors": 5, "distances": 7, "roles": 4}
"""What the integers of an input are less than."""


def like(file: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """The function makes the structure of this file."""

    def keep(made: Callable[[], Any]) -> Callable[[], Any]:
        FILES[file] = made
        return made

    return keep


class Body:
    """Nodes of a graph, or of a branch that reads the values of the graph around it.

    Args:
        whole: the graph that holds the weights of a branch.
    """

    def __init__(self, whole: Structure | None = None) -> None:
        self.nodes: list[Any] = []
        self._whole = whole

    @property
    def whole(self) -> Structure:
        assert self._whole is not None
        return self._whole

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """The result of a node, or the tuple of several. An input "" is left out."""
        number = self.whole.count = self.whole.count + 1
        names = [f"{kind.lower()}{number}.{place}" if place else f"{kind.lower()}{number}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{number}", **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def array(self, values: Any, dtype: Any = np.float32) -> str:
        """A constant among the weights."""
        return self.whole.keep(np.asarray(values, dtype))

    def ints(self, *values: int) -> str:
        return self.array(values, np.int64)

    def number(self, value: float) -> str:
        """A node with a scalar, as torch's exporter writes it."""
        return str(self.op("Constant", value=numpy_helper.from_array(np.asarray(value, np.float32))))

    def weight(self, *shape: int, scale: float = 0.0) -> str:
        """Normal numbers; by default so that a sum over all but the first axis keeps its size."""
        return self.whole.keep(self.whole.normal(shape, scale or 1 / math.sqrt(math.prod(shape[1:]))))

    def conv(self, x: str, c: int, k: int, size: int | Sequence[int] = 1, **attributes: Any) -> str:
        """A convolution with a bias and, by default, pads that keep an odd window's image as large as it is."""
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        groups = attributes.get("group", 1)
        given = {"kernel_shape": sizes, "pads": [n // 2 for n in sizes] * 2, **attributes}
        if "auto_pad" in given:
            del given["pads"]
        return str(self.op("Conv", x, self.weight(k, c // groups, *sizes), self.weight(k, scale=0.1), **given))

    def silu(self, x: str) -> str:
        return str(self.op("Mul", x, self.op("Sigmoid", x)))

    def batch_norm(self, x: str, c: int) -> str:
        parts = [self.array(1 + self.whole.normal((c,), 0.1)), self.weight(c, scale=0.1), self.weight(c, scale=0.1)]
        return str(self.op("BatchNormalization", x, *parts, self.array(np.linspace(0.5, 2, c))))

    def branch(self) -> Body:
        return Body(self.whole)

    def graph(self, name: str, *results: str) -> Any:
        """The nodes as the graph of a branch."""
        return helper.make_graph(self.nodes, name, [], [helper.make_empty_tensor_value_info(each) for each in results])


class Structure(Body):
    """A whole graph.

    Attributes:
        opset: of ONNX's operators.
        inputs: name -> dtype, extents.
    """

    def __init__(self, opset: int, **inputs: tuple[Any, ...]) -> None:  # extents in float32, or a dtype and extents
        super().__init__()
        self._whole, self.opset, self.count = self, opset, 0
        self.inputs = {name: each if isinstance(each[1], tuple) else (FLOAT, each) for name, each in inputs.items()}
        self._weights: list[Any] = []
        self._random = np.random.default_rng(opset)
        self.domains: dict[str, int] = {}

    def normal(self, shape: Sequence[int], scale: float) -> Array:
        return (scale * self._random.standard_normal(shape)).astype(np.float32)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: Any) -> str:
        return self.keep(self._random.integers(low, high, shape).astype(dtype))

    def keep(self, array: Array) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(array.copy(), name))
        return name

    def model(self, *results: str) -> Any:
        """A model with fixed inputs, whose results have the shapes that onnx infers."""
        inputs = [helper.make_tensor_value_info(name, *each) for name, each in self.inputs.items()]
        outputs = [helper.make_empty_tensor_value_info(name) for name in results]
        graph = helper.make_graph(self.nodes, "structure", inputs, outputs, self._weights)
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(*each) for each in self.domains.items())]
        model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))
        for value in (each for each in model.graph.output if not each.type.tensor_type.elem_type):
            value.type.tensor_type.elem_type = FLOAT
        return model
