#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A Resize with the coordinates pytorch_half_pixel takes its only pixel along an axis from 0: ONNX defines
# x_original = length_resized > 1 ? (x_resized + 0.5) / scale - 0.5 : 0. onnx's reference evaluator takes -0.5. Linear and nearest
# are clamped to the same pixel, cubic has other weights. ONNX Runtime takes 0.
# Seen on 2026-11-29 (5 pixels 1, 0, 0, 0, 0):
#     evaluator    [1.094]
#     ONNX Runtime [1.0]
# Exits 0 while onnx behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="cubic", coordinate_transformation_mode="pytorch_half_pixel")
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 1, size]) for name, size in (("x", 5), ("y", 1)))
graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(np.array([1, 1, 1, 1]), "sizes")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
values = {"x": np.eye(1, 5, dtype=np.float32).reshape(1, 1, 1, 5)}
evaluated, computed = (
    [round(number, 3) for number in each.run(None, values)[0].ravel().tolist()] for each in (ReferenceEvaluator(model), session)
)
print("evaluator   ", evaluated)
print("ONNX Runtime", computed)
sys.exit(not (evaluated == [1.094] and computed == [1.0]))
PYTHON
