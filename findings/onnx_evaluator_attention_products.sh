#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# The fourth output of Attention holds, with qk_matmul_output_mode 0, the products of queries and keys as they are. If there is a softcap,
# onnx's reference evaluator keeps what the softcap makes of them under the same name, and returns that, as in mode 1. ONNX Runtime
# returns the products. The first output is right in both.
# Seen on 2026-11-29 (products 1 and 2):
#     without softcap: evaluator [1.0, 2.0], ONNX Runtime [1.0, 2.0]
#     softcap 1: evaluator [0.762, 0.964], ONNX Runtime [1.0, 2.0]
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
feeds = {
    "q": np.ones((1, 1, 1, 1), np.float32),
    "k": np.array([1, 2], np.float32).reshape(1, 1, 2, 1),
    "v": np.array([1, 2], np.float32).reshape(1, 1, 2, 1),
}
found = []
for label, attributes in (("without softcap", {}), ("softcap 1", {"softcap": 1.0})):
    node = helper.make_node("Attention", list("qkv"), ["y", "", "", "products"], qk_matmul_output_mode=0, **attributes)
    inputs = [info(name, 1, feeds[name].shape) for name in "qkv"]
    graph = helper.make_graph([node], "g", inputs, [info("y", 1, None), info("products", 1, [1, 1, 1, 2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = [run(["products"], feeds)[0] for run in (ReferenceEvaluator(model).run, session.run)]
    found.append([[round(float(each), 3) for each in result.ravel()] for result in results])
    print(f"{label}: evaluator {found[-1][0]}, ONNX Runtime {found[-1][1]}")
sys.exit(found != [[[1.0, 2.0], [1.0, 2.0]], [[0.762, 0.964], [1.0, 2.0]]])
PYTHON
