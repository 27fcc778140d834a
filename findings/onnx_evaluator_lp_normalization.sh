#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# LpNormalization with p = 1 divides by the sum of the absolute values. onnx's reference evaluator sums the values with their signs: a row
# whose sum is negative changes its signs, and one whose sum is 0 becomes 0. ONNX Runtime sums absolute values.
# Seen on 2026-11-29 (rows of two numbers):
#     [1, 3]: evaluator [0.25, 0.75], ONNX Runtime [0.25, 0.75]
#     [1, -3]: evaluator [-0.5, 1.5], ONNX Runtime [0.25, -0.75]
#     [2, -2]: evaluator [0.0, 0.0], ONNX Runtime [0.5, -0.5]
# Exits 0 while they behave like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

info = helper.make_tensor_value_info
graph = helper.make_graph(
    [helper.make_node("LpNormalization", ["x"], ["y"], p=1, axis=1)], "g", [info("x", 1, [1, 2])], [info("y", 1, [1, 2])]
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
found = []
for row in ([1, 3], [1, -3], [2, -2]):
    feeds = {"x": np.array([row], np.float32)}
    found.append([run(None, feeds)[0][0].tolist() for run in (ReferenceEvaluator(model).run, session.run)])
    print(f"{row}: evaluator {found[-1][0]}, ONNX Runtime {found[-1][1]}")
plain = [0.25, 0.75]
sys.exit(found != [[plain, plain], [[-0.5, 1.5], [0.25, -0.75]], [[0.0, 0.0], [0.5, -0.5]]])
PYTHON
