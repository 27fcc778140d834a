#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# The sum of exp(-inf) is 0, and its logarithm -inf: what ONNX Runtime, and PyTorch's logsumexp, give for a row that is masked throughout.
# onnx's reference evaluator subtracts the largest number first, and -inf - -inf is NaN.
# Seen on 2026-11-29 (ReduceLogSumExp):
#     [0, 0]: evaluator 0.693147, ONNX Runtime 0.693147
#     [-inf, 0]: evaluator 0, ONNX Runtime 0
#     [-inf, -inf]: evaluator nan, ONNX Runtime -inf
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
    [helper.make_node("ReduceLogSumExp", ["x"], ["y"], keepdims=0)], "g", [info("x", 1, [2])], [info("y", 1, [])]
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
found = []
for row in ("[0, 0]", "[-inf, 0]", "[-inf, -inf]"):
    feeds = {"x": np.array([float(each) for each in row[1:-1].split(",")], np.float32)}
    texts = [f"{float(run(None, feeds)[0]):.6g}" for run in (ReferenceEvaluator(model).run, session.run)]
    print(f"{row}: evaluator {texts[0]}, ONNX Runtime {texts[1]}")
    found += texts
sys.exit(found != ["0.693147", "0.693147", "0", "0", "nan", "-inf"])
PYTHON
