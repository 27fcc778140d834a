#!/bin/sh
# onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6
# A BatchNormalization of opset 9 with one output is one for inference: it uses the mean and variance that it is given. onnx's
# reference evaluator uses those of the batch, as in training, and so answers something else than ONNX Runtime. From opset 14 on,
# where the attribute training_mode says it, both agree.
# Seen on 2026-11-28:
#     opset 9 evaluated [-0.148, 0.84, 1.827, 2.815] onnxruntime [0.0, 1.0, 2.0, 3.0]
#     opset 15 evaluated [0.0, 1.0, 2.0, 3.0] onnxruntime [0.0, 1.0, 2.0, 3.0]
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
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

info = helper.make_tensor_value_info
values = {"x": np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)}
values |= {name: np.array([number], np.float32) for name, number in {"scale": 1, "bias": 0, "mean": 0, "var": 1}.items()}
apart = {}
for opset in (9, 15):
    node = helper.make_node("BatchNormalization", list(values), ["y"], epsilon=1e-5)
    inputs = [info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    graph = helper.make_graph([node], "normalised", inputs, [info("y", TensorProto.FLOAT, [1, 1, 2, 2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (evaluated,) = ReferenceEvaluator(model).run(None, values)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (computed,) = session.run(None, values)
    apart[opset] = float(np.abs(evaluated - computed).max())
    shown = [[round(float(each), 3) for each in found.ravel()] for found in (evaluated, computed)]
    print("opset", opset, "evaluated", shown[0], "onnxruntime", shown[1])
sys.exit(not (apart[9] > 0.1 and apart[15] < 1e-5))
PYTHON
