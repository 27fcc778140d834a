#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A Clip without a lower or upper bound takes the least and the largest finite number, says ONNX. So a Clip without any bound is
# not the identity: ONNX Runtime turns infinity into 3.4e38, and a row of attention that is masked with minus infinity has no
# infinity behind it. onnx's reference evaluator keeps infinity where a bound is missing.
# Seen on 2026-11-28:
#     no bounds: evaluator [-inf, inf], ONNX Runtime [-3.4028235e+38, 3.4028235e+38]
#     max = 5: evaluator [-inf, 5.0], ONNX Runtime [-3.4028235e+38, 5.0]
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
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

x, found = np.array([-np.inf, np.inf], np.float32), []
info = helper.make_tensor_value_info
for label, inputs in (("no bounds", ["x"]), ("max = 5", ["x", "", "five"])):
    held = [numpy_helper.from_array(np.float32(5).reshape(()), "five")] if "five" in inputs else []
    ports = [info("x", TensorProto.FLOAT, [2])], [info("y", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([helper.make_node("Clip", inputs, ["y"])], "g", *ports, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = [ReferenceEvaluator(model).run(None, {"x": x})[0], session.run(None, {"x": x})[0]]
    texts = ["[" + ", ".join(map(str, each)) + "]" for each in results]
    print(f"{label}: evaluator {texts[0]}, ONNX Runtime {texts[1]}")
    found.append([bool(np.isinf(each).any()) for each in results])
sys.exit(found != [[True, False], [True, False]])
PYTHON
