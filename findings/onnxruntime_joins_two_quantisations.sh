#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A value that is quantised and dequantised twice, first coarsely and then finely, has the coarse steps: 1.4 becomes 1 by a scale of 1,
# and 0.9 by a scale of 0.3. From ORT_ENABLE_BASIC on ONNX Runtime removes the pair in the middle, and quantises the value by
# the second scale alone: 1.5. The model has then other results than without optimisation, and nothing says so. Trained models have
# such pairs where two tools, or two layers with fake quantisation, meet.
# Seen on 2026-11-29:
#     ORT_DISABLE_ALL: [-0.9, 0.0, 0.9, 0.9, 6.9]
#     ORT_ENABLE_BASIC: [-1.5, 0.3, 0.6, 1.5, 7.5]
#     ORT_ENABLE_ALL: [-1.5, 0.3, 0.6, 1.5, 7.5]
# Exits 0 while ONNX Runtime behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

info = helper.make_tensor_value_info
nodes = [
    helper.make_node("QuantizeLinear", ["x", "coarse", "zero"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "coarse", "zero"], ["middle"]),
    helper.make_node("QuantizeLinear", ["middle", "fine", "zero"], ["r"]),
    helper.make_node("DequantizeLinear", ["r", "fine", "zero"], ["y"]),
]
constants = [
    helper.make_tensor("coarse", TensorProto.FLOAT, [], [1.0]),
    helper.make_tensor("fine", TensorProto.FLOAT, [], [0.3]),
    helper.make_tensor("zero", TensorProto.INT8, [], [0]),
]
graph = helper.make_graph(nodes, "g", [info("x", 1, [5])], [info("y", 1, [5])], constants)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
x = np.array([-1.4, 0.4, 0.6, 1.4, 7.4], np.float32)
found = []
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found.append([round(float(each), 4) + 0.0 for each in session.run(None, {"x": x})[0]])
    print(f"{level}: {found[-1]}")
joined = [-1.5, 0.3, 0.6, 1.5, 7.5]
sys.exit(found != [[-0.9, 0.0, 0.9, 0.9, 6.9], joined, joined])
PYTHON
