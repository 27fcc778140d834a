#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A Resize with the coordinates align_corners ends with the last pixel of the image. onnx's reference evaluator takes size * scale for
# the length of the result, 7.5 for 5 pixels at a scale of 1.5, where the result has 7: the last pixel is missed. Cubic and nearest
# differ, too. ONNX Runtime and PyTorch's interpolate(align_corners=True) take 7.
# Seen on 2026-11-29 (5 pixels 0 to 4):
#     evaluator    [0.0, 0.615, 1.231, 1.846, 2.462, 3.077, 3.692]
#     ONNX Runtime [0.0, 0.667, 1.333, 2.0, 2.667, 3.333, 4.0]
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

node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode="align_corners")
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 1, size]) for name, size in (("x", 5), ("y", 7)))
graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(np.array([1, 1, 1, 1.5], np.float32), "scales")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
values = {"x": np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)}
evaluated, computed = (
    [round(number, 3) for number in each.run(None, values)[0].ravel().tolist()] for each in (ReferenceEvaluator(model), session)
)
print("evaluator   ", evaluated)
print("ONNX Runtime", computed)
sys.exit(not (evaluated[-1] == 3.692 and computed[-1] == 4.0))
PYTHON
