#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A Loop whose condition is missing ("") takes as many turns as its first input says: "for (int i=0; i < trip_count; ++i)" in the
# operator's text. onnx's reference evaluator takes None for false and no turn at all, and so gives the start of what is carried.
# Seen on 2026-11-28:
#     three turns of doubling 1.0: evaluated 1.0 onnxruntime 8.0
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

info = helper.make_tensor_value_info
nodes = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["v", "v"], ["w"])]
inputs = [info("turn", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [])]
body = helper.make_graph(nodes, "body", inputs, [info("on", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [])])
loop = helper.make_node("Loop", ["turns", "", "x"], ["y"], body=body)
turns = numpy_helper.from_array(np.array(3), "turns")
x, y = info("x", TensorProto.FLOAT, []), info("y", TensorProto.FLOAT, [])
graph = helper.make_graph([loop], "doubled", [x], [y], [turns])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
values = {"x": np.array(1, np.float32)}
(evaluated,) = ReferenceEvaluator(model).run(None, values)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(computed,) = session.run(None, values)
print("three turns of doubling 1.0: evaluated", float(evaluated), "onnxruntime", float(computed))
sys.exit(not (evaluated == 1 and computed == 8))
PYTHON
