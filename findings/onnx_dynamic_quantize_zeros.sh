#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# By ONNX the scale of DynamicQuantizeLinear is (max - min) / 255, which is 0 for an array of zeros, and the zero point then 0 / 0.
# ONNX Runtime gives the scale 1, onnx's reference evaluator 1 / 255; neither is written down. The quantised zeros are the same; what
# reads the scale is not.
# Seen on 2026-11-28:
#     zeros: evaluator scale 0.003921568859368563, ONNX Runtime 1.0
#     zeros and 255: evaluator scale 1.0, ONNX Runtime 1.0
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
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

info = helper.make_tensor_value_info
kinds = {"y": TensorProto.UINT8, "scale": TensorProto.FLOAT, "zero": TensorProto.UINT8}
node = helper.make_node("DynamicQuantizeLinear", ["x"], list(kinds))
outputs = [info(name, kind, None) for name, kind in kinds.items()]
graph = helper.make_graph([node], "g", [info("x", TensorProto.FLOAT, [2])], outputs)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
found = []
for label, x in (("zeros", [0, 0]), ("zeros and 255", [0, 255])):
    feeds = {"x": np.array(x, np.float32)}
    scales = [run(None, feeds)[1] for run in (ReferenceEvaluator(model).run, session.run)]
    found.append([np.float32(each) for each in scales])
    print(f"{label}: evaluator scale {found[-1][0]}, ONNX Runtime {found[-1][1]}")
sys.exit(found != [[np.float32(1 / 255), 1], [1, 1]])
PYTHON
