"""ONNX models that tests build node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """Builds a model node by node; `results`, or the last node's result, are the network's.

    Weights are random, uniform in -1 ... 1 unless `value` says otherwise.
    """

    def __init__(self, *shape: int | str, dtype: int = TensorProto.FLOAT) -> None:
        self.shape, self.dtype = shape, dtype
        self.results: list[str] = []
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, *shape: int, dtype: Any = np.float32, value: Any = None) -> str:
        random = np.random.default_rng(len(self.weights))
        if value is not None:
            values = np.broadcast_to(np.asarray(value), shape)
        elif np.issubdtype(dtype, np.integer):
            values = random.integers(-9, 10, shape)
        else:
            values = random.uniform(-1, 1, shape)
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values.astype(dtype)), name))
        return name

    def numbers(self, *values: float, dtype: Any = np.float32) -> str:
        """A constant; one number is a scalar."""
        name = f"numbers{len(self.weights)}"
        array = np.asarray(values if len(values) > 1 else values[0], dtype)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def row(self, *values: int) -> str:
        """A constant list of integers, e.g. axes."""
        name = f"row{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def node(self, op: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        name = name or f"{op.lower()}{len(self.nodes)}"
        results = [f"{name}.out", *(f"{name}.out{number}" for number in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), results, name=name, **attributes))
        return results[0]

    def conv(self, x: str, k: int, c: int, size: int = 3, *, name: str = "", bias: bool = True, **attributes: Any) -> str:
        name = name or f"conv{len(self.nodes)}"
        weight = self.weight(f"{name}.weight", k, c, size, size)
        extra = [self.weight(f"{name}.bias", k)] if bias else []
        return self.node("Conv", x, weight, *extra, name=name, **{"pads": [size // 2] * 4, **attributes})

    def batch_norm(self, x: str, channels: int) -> str:
        name = f"norm{len(self.nodes)}"
        parts = [self.weight(f"{name}.{i}", channels) for i in range(3)]
        variance = self.weight(f"{name}.3", channels, value=np.linspace(0.5, 2, channels))
        return self.node("BatchNormalization", x, *parts, variance, name=name)

    def model(self, *, opset: int = 21) -> Any:
        info = helper.make_tensor_value_info
        outputs = [helper.make_empty_tensor_value_info(name) for name in self.results or [self.nodes[-1].output[0]]]
        graph = helper.make_graph(self.nodes, "net", [info("x", self.dtype, self.shape)], outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def save(self, folder: Path, **options: Any) -> Path:
        path = folder / "net.onnx"
        onnx.save(self.model(**options), path)
        return path
