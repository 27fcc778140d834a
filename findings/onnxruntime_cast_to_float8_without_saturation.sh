#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# By ONNX a Cast or QuantizeLinear with saturate=0 makes NaN of what is too large for float8e4m3fn, and infinity for float8e5m2, which has
# infinities. ONNX Runtime keeps the largest number, 448, from 480 to 495, the numbers at whose bits the format has its NaN; and it gives
# NaN for float8e5m2 below 65536. The default, saturate=1, is right. onnx's reference evaluator does what ONNX says.
# Seen on 2026-11-29:
#     FLOAT8E4M3FN of [464, 465, 480, 495, 496]: evaluator [448, nan, nan, nan, nan], ONNX Runtime [448, nan, 448, 448, nan]
#     FLOAT8E5M2 of [61439, 61440, 65535, 65536]: evaluator [57344, inf, inf, inf], ONNX Runtime [57344, nan, nan, inf]
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
from onnx.reference import ReferenceEvaluator

info = helper.make_tensor_value_info
found = []
for name, numbers in (("FLOAT8E4M3FN", [464, 465, 480, 495, 496]), ("FLOAT8E5M2", [61439, 61440, 65535, 65536])):
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=getattr(TensorProto, name), saturate=0),
        helper.make_node("Cast", ["narrow"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["n"])], [info("y", TensorProto.FLOAT, ["n"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.array(numbers, np.float32)}
    texts = [
        "[" + ", ".join(f"{each:.6g}" for each in run(None, feeds)[0]) + "]"
        for run in (ReferenceEvaluator(model).run, session.run)
    ]
    print(f"{name} of {numbers}: evaluator {texts[0]}, ONNX Runtime {texts[1]}")
    found += texts
wanted = ["[448, nan, nan, nan, nan]", "[448, nan, 448, 448, nan]", "[57344, inf, inf, inf]", "[57344, nan, nan, inf]"]
sys.exit(found != wanted)
PYTHON
