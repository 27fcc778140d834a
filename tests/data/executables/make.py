"""Writes executables of all kinds with the schedsearch at hand, as `NAME_vVERSION.ssx` beside this file.

The files here were written by earlier versions, and later ones must open them. Their code is for any x86-64 processor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import schedsearch
from schedsearch.executable import kernels
from schedsearch.records.executables import FORMAT_VERSION
from schedsearch.target import Target

FOLDER = Path(__file__).parent
CHANNELS, MOST = 4, 3
BASELINE = {"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "x87"}  # features of every x86-64 processor


def target() -> Target:
    """A CPU with vectors of 128 bits."""
    return replace(schedsearch.detect("cpu"), name="any", sms=1, simd_bits=128)


def convolution(batch: int | str) -> Any:
    """y = relu(conv(x, 1) + 0.5): every output is the sum of 3x3 pixels of all channels, plus 0.5."""
    weight = numpy_helper.from_array(np.ones((CHANNELS, CHANNELS, 3, 3), np.float32), "w")
    bias = numpy_helper.from_array(np.full(CHANNELS, 0.5, np.float32), "b")
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], name="conv"),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, CHANNELS, n, n]) for name, n in (("x", 4), ("y", 2))
    )
    return _model(nodes, [x], [y], [weight, bias])


def window() -> Any:
    """window = relu(x + [-1, 0, 1])[begin:end], with begin and end for both axes; and the extents of x, doubled."""
    bias = numpy_helper.from_array(np.array([-1, 0, 1], np.float32), "bias")
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["sum"], name="add"),
        helper.make_node("Relu", ["sum"], ["positive"], name="relu"),
        helper.make_node("Slice", ["positive", "begin", "end"], ["window"], name="slice"),
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Reshape", ["positive", "flat"], ["row"], name="row"),
        helper.make_node("Concat", ["row", "row"], ["twice"], name="twice", axis=1),
        helper.make_node("Expand", ["bias", "shape"], ["rows"], name="rows"),
    ]
    flat = numpy_helper.from_array(np.array([0, 3, 1], np.int64), "flat")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in ("begin", "end")]
    outputs = [
        helper.make_tensor_value_info("window", TensorProto.FLOAT, [None, None]),
        helper.make_tensor_value_info("twice", TensorProto.FLOAT, [None, None, None]),
        helper.make_tensor_value_info("rows", TensorProto.FLOAT, [None, None]),
    ]
    return _model(nodes, inputs, outputs, [bias, flat])


def _model(nodes: Any, inputs: Any, outputs: Any, constants: Any) -> Any:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def main() -> None:
    features = llvm.get_host_cpu_features()
    features.update({name: name in BASELINE for name in features})
    llvm.get_host_cpu_features = lambda: features
    llvm.get_host_cpu_name = lambda: "x86-64"
    kernels.FEW = 99  # all are compiled here, not in processes of their own
    sizes = {"n": (1, MOST)}
    options: dict[str, Any] = {"target": target(), "db": "none.db"}
    for name, model, dynamic in (
        ("fixed", convolution(2), {}),
        ("sizes", convolution("n"), {"sizes": sizes}),
        ("computed", window(), {"sizes": sizes, "run_mode": "exact"}),
    ):
        path = FOLDER / f"{name}.onnx"
        onnx.save(model, path)
        build: Any = schedsearch.build_dynamic if dynamic else schedsearch.build
        build(path, out=FOLDER / f"{name}_v{FORMAT_VERSION}.ssx", **dynamic, **options).close()
        path.unlink()


if __name__ == "__main__":
    main()
